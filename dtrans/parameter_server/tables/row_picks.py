"""Equations that read rows of a leaf by id, or that add to rows by id."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from dtrans._jax import JaxprEqn, Var
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.rows.rules import Step


@dataclasses.dataclass(frozen=True)
class RowPick(Step):
    """Equation that reads rows of a leaf by id (`w[ids]`), or adds to them (`w.at[ids].add(x)`).

    Attributes:
      numbers: index of the operand that contains the row ids.
      component: the operand may contain index vectors along its last dimension, with one index for
        each indexed dimension of the leaf. This is the position of the row id in an index vector.
        None if the operand is a single id.
      out_of_range: treatment of ids that are outside the table. "error": the trainer raises an
        error; "clip": the nearest row is read; "drop": no row is read, and the result is a fill
        value.
      count: the number of consecutive rows that begin at an id, as in a slice.
    """

    numbers: int = 1
    component: int | None = None
    out_of_range: str = "error"
    count: int = 1


def adds_rows(eqn: JaxprEqn) -> bool:
    """Return True if an equation adds to rows, or overwrites consecutive rows."""
    return eqn.primitive.name in ("scatter-add", "dynamic_update_slice")


def _gather(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    numbers = eqn.params["dimension_numbers"]
    size = eqn.params["slice_sizes"][row.axis]
    rows = eqn.invars[0].aval.shape[row.axis]
    if row.axis not in numbers.start_index_map or row.width != 1 or not _is_window(size, rows):
        return None
    component = numbers.start_index_map.index(row.axis)
    outside = _outside(eqn, numbers.collapsed_slice_dims, row)
    if size > 1 and outside != "error":
        return None
    return RowPick((row, None), (SHARED,), component=component, out_of_range=outside, count=size)


def _scatter(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    numbers = eqn.params["dimension_numbers"]
    at = numbers.scatter_dims_to_operand_dims
    if row.axis not in at or row.width != 1:
        return None
    size = 1
    if row.axis not in numbers.inserted_window_dims:
        without = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = [d for d in range(eqn.invars[0].aval.ndim) if d not in without]
        dim = numbers.update_window_dims[window.index(row.axis)]
        size = eqn.invars[2].aval.shape[dim]
        if not _is_window(size, eqn.invars[0].aval.shape[row.axis]):
            return None
    component = at.index(row.axis)
    outside = _outside(eqn, numbers.inserted_window_dims, row)
    if size > 1 and outside != "error":
        return None
    return RowPick((row, None, None), (row,), component=component, out_of_range=outside, count=size)


def _is_window(size: int, rows: int) -> bool:
    """Return True if a slice of `size` rows is a lookup: one row, or several but not all rows."""
    return size == 1 or 1 < size < rows


def _outside(eqn: JaxprEqn, removed: Sequence[int], row: RowAxis) -> str:
    """Return the effect of an id outside the table on a gather or scatter (`RowPick.out_of_range`).

    Args:
      eqn: the gather or scatter.
      removed: dimensions of the table that the result for one id does not have.
      row: layout of the table.
    """
    mode, fill = eqn.params["mode"], eqn.params.get("fill_value", 0)
    # `vmap` of `emb[i]` also clips, but a picked row then has the table's dimension. JAX fills with
    # NaN by default, also in `jnp.take`. In both cases, an id outside the table is a mistake.
    if mode == GatherScatterMode.CLIP and row.axis in removed:
        return "clip"
    if mode == GatherScatterMode.FILL_OR_DROP and fill is not None and fill == fill:
        return "drop"
    return "error"


def run_ids(starts: jax.Array, count: int) -> jax.Array:
    """Return the ids of `count` consecutive rows from each start, along a new last dimension."""
    # `count` may be too large for an id type with fewer than 32 bits
    dtype = starts.dtype if starts.dtype.itemsize >= 4 else jnp.dtype(jnp.int32)
    return starts[..., None].astype(dtype) + jnp.arange(count, dtype=dtype)


def _dynamic_slice(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    size, rows = eqn.params["slice_sizes"][row.axis], eqn.invars[0].aval.shape[row.axis]
    if not 0 < size < rows or row.width != 1:
        return None
    operands = (row, *(None,) * (len(eqn.invars) - 1))
    return RowPick(operands, (SHARED,), numbers=1 + row.axis, count=size)


def _dynamic_update_slice(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    rows, updated = (a.aval.shape[row.axis] for a in eqn.invars[:2])
    if not 0 < updated < rows or row.width != 1:
        return None
    operands = (row, *(None,) * (len(eqn.invars) - 1))
    return RowPick(operands, (row,), numbers=2 + row.axis, count=updated)


# name of a primitive -> (equation, layout of its first operand) -> `RowPick`, or None
_PICKS: Mapping[str, Callable[[JaxprEqn, RowAxis], RowPick | None]] = {
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}


def find_pick(eqn: JaxprEqn, row: RowAxis, producers: Mapping[Var, JaxprEqn]) -> RowPick | None:
    """Return the lookup by row ids that an equation performs; None for other equations.

    Args:
      eqn: the equation.
      row: layout of its first operand: the dimension along which the table's rows are.
      producers: for each variable, the equation that computes it.
    """
    name, read = eqn.primitive.name, eqn.invars[0]
    pick = _PICKS[name](eqn, row) if name in _PICKS else None
    if pick is None or name != "gather" or jnp.issubdtype(read.aval.dtype, jnp.inexact):
        return pick
    # The derivative of `emb.at[ids].set(x)` scatters integers, and gathers them at the same ids.
    # JAX writes this gather without the mode of the scatter.
    scatter = producers.get(read) if isinstance(read, Var) else None
    if scatter is None or scatter.primitive.name != "scatter":
        return pick
    written = _scatter(scatter, row)
    return pick if written is None else dataclasses.replace(pick, out_of_range=written.out_of_range)
