"""Collectives among trainers: a `Collective` defines the types, the result and the lowering of one.

    x... = NAME x...   [name, over, size?, PARAMS...]

`over` lists the names of the trainers' mesh axes. An equation may have several operands; the
collective is applied to each of them. The parameter `size`, the number of trainers, is present if
types depend on this number. PARAMS define the operation. To add a collective, write a file in this
folder that calls `new_collective`, and a line in `__init__`. Then programs with the collective can
be lowered, costed and verified, and parameter servers can execute it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dtrans._jax import Atom, JaxprEqn, Primitive
from dtrans.ops.primitive import Lowering, communication


@dataclasses.dataclass(frozen=True, eq=False)
class Collective:
    """Definition of a collective.

    Attributes:
      primitive: primitive of its equations. `OVER_AXIS` and `UNDER_VMAP` have its lowerings.
      params: names of the parameters that define the operation: a reduction, or dimensions.
      type_of: function of (operand type, number of trainers, *values of `params`) that returns the
        type of the result.
      fits: function of (shape, number of trainers, *values of `params`) that returns True if the
        values are valid. Servers call it with values from a message.
      result: function of (parts, mine, xp, *values of `params`) that returns the result of one
        trainer. `parts` are the operands of all trainers in order, `mine(x, axis)` returns this
        trainer's piece of an array, and `xp` is `jnp` or `np`.
      same_for_all: True if all trainers get the same result.
      reduces: True if the result is an elementwise reduction of the trainers' operands.
      counts_results: True if an equation's traffic is the size of its results, as for a gather;
        False if it is the size of its operands.
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

    Arguments that are not listed here are attributes of `Collective`.

    Args:
      over_axis, under_vmap: lowerings, as in `communication`.
      check: function of (*operand types, **parameters) that asserts further conditions.
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
    """Return the definition of a collective equation; None for any other equation."""
    found: Collective | None = getattr(eqn.primitive, "collective", None)
    return found


def moved_values(eqn: JaxprEqn) -> Sequence[Atom]:
    """Return the values with the size of a collective's traffic: its results or its operands.

    For a gather these are the results, which are larger. For a reduction they are the operands.
    """
    record = collective_of(eqn)
    assert record is not None, eqn.primitive
    return eqn.outvars if record.counts_results else eqn.invars


def way_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the name and the parameters of a collective, such as ("all_reduce", "sum").

    With parameter servers, a trainer sends this tuple to the server that runs the collective. The
    parameter `how` of `exchange` (`dtrans.ops.rpc`) has one tuple for each operand.
    """
    record = collective_of(eqn)
    assert record is not None, eqn.primitive
    return eqn.primitive.name, *(eqn.params[n] for n in record.params)


def is_way(way: Any, shape: Sequence[int], trainers: int) -> bool:
    """Return True if a received value is a valid description of a collective, as from `way_of`.

    Servers check messages with this function.

    Args:
      way: the value from the message, such as ["all_reduce", "sum"].
      shape: shape of the operand.
      trainers: number of trainers.
    """
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
    """Return True if values from a message are integers that index dimensions of an array.

    Args:
      shape: shape of the array.
      *axes: the values to check.
    """
    return all(type(axis) is int and 0 <= axis < len(shape) for axis in axes)
