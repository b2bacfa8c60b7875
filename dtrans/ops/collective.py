"""Collectives among trainers: one record has all that the package knows of one.

    x... = NAME x...   [name, over, size?, PARAMS...]

`over` has the names of the trainers' mesh axes. An equation takes several operands, each by itself.
`size`, the number of trainers, is present if types depend on it, and PARAMS define the operation. A
new collective is a file of this folder that calls `new_collective`, and a line in `__init__`.
Programs with it are then lowered, counted and verified, and parameter servers carry it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dtrans._jax import Atom, JaxprEqn, Primitive
from dtrans.ops.primitive import Lowering, communication


@dataclasses.dataclass(frozen=True, eq=False)
class Collective:
    """Record of a collective.

    Attributes:
      primitive: primitive of its equations, with the lowering over named axes (`OVER_AXIS`,
        `UNDER_VMAP`).
      params: parameters that define the operation: a reduction, or dimensions.
      type_of: type of a result, from that of its operand, the number of trainers, and the values of
        `params`.
      fits: returns True if the values of `params`, from a message, suit a shape and a number of
        trainers.
      result: result of one trainer, called as `result(parts, mine, xp, *params)`. `parts` are the
        operands of all trainers in order, `mine(x, axis)` returns this trainer's piece of an
        array, `xp` is `jnp` or `np`.
      same_for_all: True if all trainers get the same result.
      reduces: True if a result combines the parts of all trainers entry by entry.
      counts_results: True if bytes of results are counted, as for a gather; else bytes of operands.
    """

    primitive: Primitive
    params: tuple[str, ...]
    type_of: Callable[..., Any]
    fits: Callable[..., bool]
    result: Callable[..., Any]
    same_for_all: bool
    reduces: bool
    counts_results: bool


COLLECTIVES: dict[str, Collective] = {}


def new_collective(
    name: str,
    *,
    params: tuple[str, ...],
    type_of: Callable[..., Any],
    fits: Callable[..., bool],
    result: Callable[..., Any],
    over_axis: Lowering,
    under_vmap: Lowering | None = None,
    check: Callable[..., None] | None = None,
    same_for_all: bool = False,
    reduces: bool = False,
    counts_results: bool = False,
) -> Primitive:
    """Register a collective, and return its primitive.

    Other arguments are those of `Collective`.

    Args:
      over_axis, under_vmap: lowering, as in `communication`.
      check: asserts further conditions of operands and parameters.
    """

    def types(*operands: Any, **values: Any) -> list[Any]:
        if check is not None:
            check(*operands, **values)
        size = values.get("size", 0)
        chosen = [values[n] for n in params]
        return [type_of(x, size, *chosen) for x in operands]

    primitive = communication(name, types, over_axis=over_axis, under_vmap=under_vmap)
    record = Collective(
        primitive, params, type_of, fits, result, same_for_all, reduces, counts_results
    )
    primitive.collective = record  # type: ignore[attr-defined]
    COLLECTIVES[name] = record
    return primitive


def collective_of(eqn: JaxprEqn) -> Collective | None:
    """Return the record of a collective equation; None for any other equation."""
    found: Collective | None = getattr(eqn.primitive, "collective", None)
    return found


def moved_values(eqn: JaxprEqn) -> Sequence[Atom]:
    """Return the values whose bytes a collective moves: results of a gather, else operands."""
    record = collective_of(eqn)
    assert record is not None, eqn.primitive
    return eqn.outvars if record.counts_results else eqn.invars


def way_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the collective and its parameters, for an exchange through servers (`exchange`)."""
    record = collective_of(eqn)
    assert record is not None, eqn.primitive
    return eqn.primitive.name, *(eqn.params[n] for n in record.params)


def is_way(way: Any, shape: Sequence[int], trainers: int) -> bool:
    """Return True if a value from a message is a way of a collective for a shape."""
    if not isinstance(way, list) or not way or not isinstance(way[0], str):
        return False
    name, *values = way
    record = COLLECTIVES.get(name)
    return (
        record is not None
        and len(values) == len(record.params)
        and record.fits(shape, trainers, *values)
    )


def are_dimensions(shape: Sequence[int], *axes: Any) -> bool:
    """Return True if values from a message are dimensions of a shape."""
    return all(type(axis) is int and 0 <= axis < len(shape) for axis in axes)
