"""Rules of primitives: the form in which an equation can run on some rows instead of full arrays.

The row analysis (`dtrans.rows.flow`) calls a rule for each equation with operands that have rows of
one parameter. If the equation mixes rows, the rule returns None. Otherwise it returns a `Step`,
which describes the equation on a block (the rows of one server).

Primitives that are elementwise, that reduce, or that only mix other axes than the rows need no rule
here (`dtrans._jax.primitives` lists them). A primitive that moves rows to another axis needs a
function in `RULES`. `dtrans.rows.flow` handles loops and branches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrans._jax import JaxprEqn, facts_of, is_callback_on_rows, mixed_axes
from dtrans.rows.layout import SHARED, Layout, RowAxis, all_shared, row_axes


@dataclasses.dataclass(frozen=True)
class Step:
    """Description of one equation that runs on a block (the rows of one server).

    Attributes:
      operands: for each operand, the layout of the rows to read; None for the full operand.
      outs: layout of each output.
      reduce: if the equation reduces over rows, the operation that combines the results of servers,
        e.g. "sum"; else None.
      params: takes the output types on the block; returns the changed parameters of the equation,
        e.g. the `shape` of a broadcast.
      bodies: for a loop or branch, the `dtrans.rows.flow.Flow` of each body.
      ends: for a loop or branch, the layouts of each body's outputs.
    """

    operands: tuple[RowAxis | None, ...]
    outs: tuple[Layout, ...]
    reduce: str | None = None
    params: Callable[[Sequence[Any]], dict[str, Any]] | None = None
    bodies: tuple[Any, ...] = ()
    ends: tuple[Sequence[Layout], ...] = ()


def step_of(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Return the form of an equation that runs on some rows; None if the equation mixes rows."""
    facts = facts_of(eqn)
    if facts.elementwise:
        return _elementwise(eqn, ins)
    if eqn.primitive.name in RULES:
        return RULES[eqn.primitive.name](eqn, ins)
    if facts.reduces:
        return _reduce(eqn, ins)
    if mixed_axes(eqn) is None:
        return None
    return _along(eqn, ins)


def rows_of_operands(eqn: JaxprEqn, row: RowAxis, out: int = 0) -> Step | None:
    """Return the rows of the operands from which an equation computes rows of one output.

    Args:
      eqn: the equation.
      row: layout of the output: the axis that has the rows.
      out: index of the output.

    Returns:
      A `Step`; its `operands` are the rows to read. None if the rows need full operands.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> eqn = jax.make_jaxpr(jnp.transpose)(jnp.ones((6, 2))).jaxpr.eqns[0]
      >>> rows_of_operands(eqn, RowAxis("w", 1)).operands
      (RowAxis(leaf='w', axis=0, width=1, order=None),)
    """
    count = eqn.outvars[out].aval.shape[row.axis] // row.width
    for k, a in enumerate(eqn.invars):
        for axis, size in enumerate(a.aval.shape):
            for width in dict.fromkeys((row.width, size // count if count else 0)):
                if not width or size != count * width:
                    continue
                ins: list[Layout] = [SHARED] * len(eqn.invars)
                ins[k] = RowAxis(row.leaf, axis, width)
                step = step_of(eqn, ins)
                if step is not None and not step.reduce and step.outs[out] == row:
                    return step
    return None


def _common_rows(ins: Sequence[Layout]) -> RowAxis | None:
    """Return the layout that all operands with rows have; None if their layouts differ."""
    rows = set(row_axes(ins))
    if len(rows) == 1:
        return rows.pop()
    return None


def _all_as(row: RowAxis, eqn: JaxprEqn) -> tuple[RowAxis | None, ...]:
    """Return one entry for each operand: None for a scalar, `row` for an array."""
    return tuple(row if a.aval.ndim else None for a in eqn.invars)


def _elementwise(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe an elementwise equation: row i of the output depends on row i of the operands.

    Operands may be broadcast: scalars, or dimensions of size 1. But if an operand depends on rows,
    its row axis must have full length.
    """
    row = _common_rows(ins)
    shape = eqn.outvars[0].aval.shape
    if row is None or any(v.aval.shape != shape for v in eqn.outvars):
        return None
    operands: list[RowAxis | None] = []
    for a, layout in zip(eqn.invars, ins, strict=True):
        operand_shape = a.aval.shape
        if not operand_shape and not isinstance(layout, RowAxis):
            operands.append(None)
            continue
        if len(operand_shape) != len(shape):
            return None
        if any(d not in (1, n) for d, n in zip(operand_shape, shape, strict=True)):
            return None
        has_rows = operand_shape[row.axis] == shape[row.axis]
        if isinstance(layout, RowAxis) and not has_rows:
            return None
        operands.append(row if has_rows else None)
    return Step(tuple(operands), (row,) * len(eqn.outvars))


def _broadcast_in_dim(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    row = _common_rows(ins[:1])
    if row is None or len(ins) > 1:
        return None
    axis = eqn.params["broadcast_dimensions"][row.axis]
    if eqn.params["shape"][axis] != eqn.invars[0].aval.shape[row.axis]:
        return None
    to = dataclasses.replace(row, axis=axis)
    return Step((row,), (to,), params=lambda outs: {"shape": outs[0].shape})


def _reshape(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe a reshape that merges the row axis with axes after it, or splits the row axis.

    In the result, a row is a run of `width` entries. The equation may first permute the axes.
    """
    row = _common_rows(ins[:1])
    shape, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if row is None or len(ins) > 1 or not shape[row.axis]:
        return None
    order = eqn.params["dimensions"] or range(len(shape))
    before = math.prod(shape[d] for d in order[: order.index(row.axis)])
    count = shape[row.axis] // row.width
    for axis, size in enumerate(new):
        if size % count == 0 and math.prod(new[:axis]) == before:
            out = dataclasses.replace(row, axis=axis, width=size // count)
            return Step((row,), (out,), params=lambda outs: {"new_sizes": outs[0].shape})
    return None


def _transpose(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    row = _common_rows(ins)
    if row is None:
        return None
    return Step((row,), (dataclasses.replace(row, axis=eqn.params["permutation"].index(row.axis)),))


def _without(row: RowAxis, gone: Sequence[int]) -> RowAxis:
    """Return the layout of the rows after the axes `gone` were removed."""
    return dataclasses.replace(row, axis=row.axis - sum(d < row.axis for d in gone))


def _squeeze(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    row, gone = _common_rows(ins), eqn.params["dimensions"]
    if row is None or row.axis in gone:
        return None
    return Step((row,), (_without(row, gone),))


def _reduce(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe a reduction over axes other than the row axis, or over rows.

    Over rows, each block gives a partial result. No argmax over rows occurs here, since
    `dtrans.rows.normalize` has replaced it.
    """
    row, gone, op = _common_rows(ins), mixed_axes(eqn) or (), facts_of(eqn).reduces
    if row is None or len(ins) > 1:
        return None
    if row.axis not in gone:
        return Step((row,), (_without(row, gone),))
    if op == "position":
        return None
    return Step((row,), (SHARED,), reduce=op)


def _along(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe an equation that mixes entries only along axes other than the row axis.

    All operands except scalars must have the row axis.
    """
    row, last = _common_rows(ins), facts_of(eqn).last_axes(eqn)
    if (
        row is None
        or row.axis in (mixed_axes(eqn) or ())
        or any(v.aval.ndim <= row.axis for v in eqn.outvars)
    ):
        return None
    if last and any(row.axis >= a.aval.ndim - last for a in eqn.invars):
        return None
    return Step(_all_as(row, eqn), (row,) * len(eqn.outvars))


def _stack(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe a stack along a new axis. A new axis before the row axis moves the row axis."""
    row = _common_rows(ins)
    if row is None:
        return None
    axis = row.axis + (eqn.params["axis"] <= row.axis)
    return Step(_all_as(row, eqn), (dataclasses.replace(row, axis=axis),))


def _unstack(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    row, axis = _common_rows(ins), eqn.params["axis"]
    if row is None or axis == row.axis:
        return None
    return Step((row,), (_without(row, [axis]),) * len(eqn.outvars))


def _tile(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe a `tile` along axes other than the row axis."""
    row, reps = _common_rows(ins), eqn.params["reps"]
    if row is None or len(reps) != eqn.invars[0].aval.ndim or reps[row.axis] != 1:
        return None
    return Step((row,), (row,))


def _pad(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    row = _common_rows(ins[:1])
    if (
        row is None
        or ins[1] is not SHARED
        or tuple(eqn.params["padding_config"][row.axis]) != (0, 0, 0)
    ):
        return None
    return Step((row, None), (row,))


def _slice(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe a slice along axes other than the row axis."""
    row = _common_rows(ins)
    if row is None or eqn.outvars[0].aval.shape[row.axis] != eqn.invars[0].aval.shape[row.axis]:
        return None
    axis, limits = row.axis, eqn.params["limit_indices"]

    def params(outs: Sequence[Any]) -> dict[str, Any]:
        return {"limit_indices": (*limits[:axis], outs[0].shape[axis], *limits[axis + 1 :])}

    return Step((row,), (row,), params=params)


def _dynamic_slice(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe a `dynamic_slice` along axes other than the row axis.

    Along the row axis the slice is full: XLA clamps its start to 0.
    """
    row = _common_rows(ins[:1])
    if row is None or not all_shared(ins[1:]):
        return None
    if eqn.outvars[0].aval.shape[row.axis] != eqn.invars[0].aval.shape[row.axis]:
        return None
    operands = (row, *(None,) * (len(ins) - 1))
    return Step(operands, (row,), params=lambda outs: {"slice_sizes": outs[0].shape})


def _dynamic_update_slice(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    row = _common_rows(ins[:2])
    if row is None or not all_shared(ins[2:]):
        return None
    if eqn.invars[0].aval.shape[row.axis] != eqn.invars[1].aval.shape[row.axis]:
        return None
    return Step((row, row, *(None,) * (len(ins) - 2)), (row,))


def _dot_general(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe a matrix product: contracted rows are summed, and other rows stay rows."""
    contract, batch = eqn.params["dimension_numbers"]
    lhs, rhs = ins
    free = []
    for a, used in zip(eqn.invars, zip(contract, batch, strict=True), strict=True):
        dims = {*range(a.aval.ndim)}.difference(*used)
        free.append(sorted(dims))
    mine, row = (0, lhs) if isinstance(lhs, RowAxis) else (1, rhs)
    other = ins[1 - mine]
    assert isinstance(row, RowAxis)
    for dims, reduces in ((contract, True), (batch, False)):
        if row.axis in dims[mine]:
            at = dims[mine].index(row.axis)
            theirs = dataclasses.replace(row, axis=dims[1 - mine][at])
            if isinstance(other, RowAxis) and other != theirs:
                return None
            operands = (row, theirs) if mine == 0 else (theirs, row)
            if reduces:
                return Step(operands, (SHARED,), reduce="sum")
            return Step(operands, (dataclasses.replace(row, axis=at),))
    if isinstance(other, RowAxis):
        return None
    axis = len(batch[0]) + (len(free[0]) if mine else 0) + free[mine].index(row.axis)
    return Step((row, None) if mine == 0 else (None, row), (dataclasses.replace(row, axis=axis),))


def _triangular_solve(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe a triangular solve with one matrix for all rows; the rows are right-hand sides.

    In `A X = B` the columns of `B` are independent, and in `X A = B` its rows are. `jax.vmap` of a
    solve writes the rows of a parameter as columns of `B`.
    """
    matrix, row = ins
    if isinstance(matrix, RowAxis) or not isinstance(row, RowAxis):
        return _along(eqn, ins)
    free = eqn.invars[1].aval.ndim - (1 if eqn.params["left_side"] else 2)
    if row.axis != free:
        return _along(eqn, ins)
    return Step((None, row), (row,))


def _pure_callback(eqn: JaxprEqn, ins: Sequence[Layout]) -> Step | None:
    """Describe a host function that treats rows independently: it is called on some of the rows."""
    row = _common_rows(ins)
    if row is None or row.axis or not eqn.outvars or not is_callback_on_rows(eqn):
        return None
    count = eqn.outvars[0].aval.shape[0]
    operands: list[RowAxis | None] = []
    for a, layout in zip(eqn.invars, ins, strict=True):
        has_rows = a.aval.shape[0] == count
        if isinstance(layout, RowAxis) and not has_rows:
            return None
        operands.append(row if has_rows else None)
    outs = (row,) * len(eqn.outvars)
    return Step(tuple(operands), outs, params=lambda outs: {"result_avals": tuple(outs)})


RULES: Mapping[str, Callable[[JaxprEqn, Sequence[Layout]], Step | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot_general,
    "triangular_solve": _triangular_solve,
    "pure_callback": _pure_callback,
}
