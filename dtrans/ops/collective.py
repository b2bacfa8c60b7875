"""Collectives among trainers: all that the package knows of one is one record.

    x... = NAME x...   [name, over, size?, PARAMS...]

`over` is the names of the axes that trainers are on. An equation takes several operands, each by
itself; `size`, the number of trainers, is there where types depend on it, and PARAMS say what
becomes of an operand. A new collective is a file of this folder that calls `new_collective`, and a
line in `__init__`: programs that have it are then lowered, counted and verified, and parameter
servers carry it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dtrans._jax import Atom, JaxprEqn, Primitive
from dtrans.ops.primitive import Lowering, communication


@dataclasses.dataclass(frozen=True, eq=False)
class Collective:
    """Meanings of a collective.

    Attributes:
      primitive: of its equations, with the lowering over named axes (`OVER_AXIS`, `UNDER_VMAP`).
      params: parameters of an equation that say what becomes of an operand: an operation, or
        dimensions.
      type_of: type of a result, from that of its operand, the number of trainers, and the values of
        `params`.
      fits: returns True if the values of `params`, from a message, suit a shape and a number of
        trainers.
      result: result of one trainer, from the parts of all in their order. It also takes a function
        that returns this trainer's piece of an array along a dimension, `jnp` or `np`, and the
        values of `params`.
      same_for_all: all trainers get the same result.
      reduces: a result combines the parts of all entry by entry.
      counts_results: bytes are those of the results, as of a gather; else those of the operands.
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

    Args:
      over_axis, under_vmap: its lowering, as of `communication`.
      check: asserts what else is true of its operands and parameters. The other arguments are those
        of `Collective`.
    """

    def types(*operands: Any, **given: Any) -> list[Any]:
        if check is not None:
            check(*operands, **given)
        return [type_of(x, given.get("size", 0), *(given[n] for n in params)) for x in operands]

    primitive = communication(name, types, over_axis=over_axis, under_vmap=under_vmap)
    record = Collective(
        primitive, params, type_of, fits, result, same_for_all, reduces, counts_results
    )
    primitive.collective = record  # type: ignore[attr-defined]
    COLLECTIVES[name] = record
    return primitive


def collective_of(eqn: JaxprEqn) -> Collective | None:
    """Return the collective that an equation is; None for any other equation."""
    found: Collective | None = getattr(eqn.primitive, "collective", None)
    return found


def moved_values(eqn: JaxprEqn) -> Sequence[Atom]:
    """Return the values whose bytes a collective moves: the results of a gather, else the
    operands."""
    record = collective_of(eqn)
    assert record is not None, eqn.primitive
    return eqn.outvars if record.counts_results else eqn.invars


def way_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return what an exchange through servers does to the operands of a collective (`exchange`)."""
    record = collective_of(eqn)
    assert record is not None, eqn.primitive
    return eqn.primitive.name, *(eqn.params[n] for n in record.params)


def is_way(way: Any, shape: Sequence[int], trainers: int) -> bool:
    """Return True if a way, from a message, is one of a collective, for a part of some shape."""
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
