"""Embedding tables in a step that `plan.verify()` traces, where ids of rows are unknown values.

Functions that compute ids on the host are traced as equations. These equations call the functions
when the step is evaluated (`dtrans.ops.moved_rows`). An array of ids has a static length, and its
entries increase. It is padded with the table's number of rows, which is not a row id.

Two jobs use these functions: the job on a mesh (`dtrans.run.parameter_server.mesh`), and the
asynchronous job in a fixed order (`dtrans.run.parameter_server.ordered_job`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import JaxprEqn, is_traced
from dtrans.ir.selection import subset
from dtrans.ops.moved_rows import trace_move
from dtrans.parameter_server.tables.touched_rows import TableBlock, capacity_for
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.table_rows import BlockRowSet, block_parts, put_in_place, wanted_of
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps, pad
from dtrans.run.parameter_server.tables.row_updates import (
    all_ids,
    pad_ids,
    put_rows,
    take_rows,
)
from dtrans.run.parameter_server.tables.table_memory import scatter_rows


Rows = Mapping[str, Any]


class TracedMemory:
    """Rows of a table on one server, as arrays in a JAX trace; it replaces `TableMemory`.

    Args:
      table: description of the rows.
      missed: runs updates that rows have skipped; None if updates change only rows with a gradient.
      state: the initial values, by name.

    Attributes:
      arrays: the rows, and each array of optimizer state that has a row for each of them, by name.
      reads: names of the values that `put` needs from each update.
    """

    def __init__(self, table: TableBlock, missed: MissedSteps | None, state: Rows) -> None:
        self._table, self._missed = table, missed
        self.arrays: Rows = subset(state, table.arrays)
        self.reads = () if missed is None else tuple(missed.reads)

    def admit(self, gradients: Mapping[str, RowGradient]) -> Mapping[str, RowGradient]:
        """Return all gradients, because in a traced step a row filter stores all rows."""
        return gradients

    def take(self, ids: Any, size: int) -> dict[str, Any]:
        """Return rows and their optimizer state for an update, padded to `size` rows with zeros."""
        assert len(ids) == size, "traced ids are padded"
        return take_rows(self._table, ids, self.arrays)

    def put(self, ids: Any, new: Rows, values: Rows) -> Rows:
        """Store the rows that an update has computed; return `arrays`.

        Rows without a gradient skip the update. The method runs the update for them at once.

        Args:
          ids: padded ids.
          new: the new rows of each array, by name.
          values: the update's values with the names `reads`.
        """
        self.arrays = put_rows(self._table, ids, new, self._caught_up(ids, values))
        return self.arrays

    def _caught_up(self, ids: Any, values: Rows) -> Rows:
        """Update all rows except `ids` with a zero gradient; return all arrays."""
        if self._missed is None:
            return self.arrays
        seen = jnp.zeros(self._table.rows, jnp.int32).at[ids].set(1, mode="drop")
        records = {n: jnp.asarray(values[n])[None] for n in self.reads}
        make_up = self._missed.catching_up(self._table.rows)
        arrays: Rows = make_up(self.arrays, seen, records, 0, 1)
        return arrays


def fetch_rows(eqn: JaxprEqn, uniq: Any, give: Callable[[str, str, Any], Any]) -> Any:
    """Return the rows that a `prefetch` equation looks up, padded with zeros.

    Args:
      eqn: the equation.
      uniq: padded ids.
      give: function that returns rows of a block (a table's rows on one server). Its arguments are
        the server's endpoint, the block's name, and padded ids in the block.
    """
    p, (t, *_) = eqn.params, eqn.params["types"]
    where = subset(p, ("epmap", "names"))

    def ask(numbers: Sequence[Any], _: Sequence[Any]) -> list[np.ndarray]:
        (blocks,) = block_parts(numbers, [p["spans"]])
        asked = []
        for (_at, ids), span in zip(blocks, p["spans"], strict=True):
            asked.append(pad_ids(ids, len(numbers[0]), span.rows))
        return asked

    def land(numbers: Sequence[Any], parts: Sequence[Any]) -> list[np.ndarray]:
        rows = np.zeros(t.shape, np.int64)
        (blocks,) = block_parts(numbers, [p["spans"]])
        wanted = wanted_of(rows, parts=blocks, **where)
        for (_, _, ids, memory), part in zip(wanted, parts, strict=True):
            memory[...] = part[: len(ids)]
        put_in_place(rows, wanted, blocks)
        return [rows]

    asked = trace_move(ask, [uniq], [], [(uniq.shape, np.int32)] * len(p["names"]))
    parts = list(map(give, p["epmap"], p["names"], asked))
    return trace_move(land, [uniq], parts, [(t.shape, t.dtype)])[0]


def part_of_block(span: BlockRowSet, gradient: RowGradient) -> RowGradient:
    """Select the gradients of the table rows on one server; number the rows as on the server.

    Args:
      span: the rows of the table that the server stores.
      gradient: gradients of rows of the table.
    """

    def pick(numbers: Sequence[Any], rows: Sequence[Any]) -> list[np.ndarray]:
        size = len(numbers[0])
        at = span.among(numbers[0])
        local = span.local(numbers[0][at])
        return [pad_ids(local, size, span.rows), pad(rows[0][at], size)]

    if is_traced(gradient.ids) or is_traced(gradient.rows):
        ids, rows = gradient.ids, gradient.rows
        types = [(ids.shape, np.int32), (rows.shape, rows.dtype)]
        return RowGradient(*trace_move(pick, [ids], [rows], types))
    at = span.among(gradient.ids)
    return RowGradient(span.local(gradient.ids[at]), gradient.rows[at])


def gradients_with_room(
    table: TableBlock, gradients: Mapping[str, RowGradient]
) -> tuple[Any, dict[str, Any]]:
    """Convert gradients of table rows to padded arrays, as a compiled update needs them.

    Args:
      table: the table's block on this server.
      gradients: trainers' gradients by name. With delay compensation, they include the rows that
        trainers have received.

    Returns:
      The ids of the rows to update, and a map from the name of each gradient to an array. The array
      has these rows and padding. A row without a gradient is zero.
    """
    if any(is_traced(x.ids) or is_traced(x.rows) for x in gradients.values()):
        return _trace_layout(table, gradients)
    ids = _updated_ids(table, gradients)
    size = table.rows if table.updates_all else capacity_for(len(ids))
    return ids, {n: scatter_rows(ids, size, x) for n, x in gradients.items()}


def _updated_ids(table: TableBlock, gradients: Mapping[str, RowGradient]) -> np.ndarray:
    """Return the ids of the rows that an update with these gradients changes."""
    if table.updates_all:
        return np.arange(table.rows)
    return all_ids(table, gradients, table.gradients)


def _trace_layout(
    table: TableBlock, gradients: Mapping[str, RowGradient]
) -> tuple[Any, dict[str, Any]]:
    """Trace a call of `gradients_with_room` as one equation."""
    if table.updates_all:
        size = table.rows
    else:
        size = capacity_for(sum(len(gradients[n].ids) for n in table.gradients.values()))

    def lay_out(numbers: Sequence[Any], rows: Sequence[Any]) -> list[np.ndarray]:
        found = {}
        for name, ids, some in zip(gradients, numbers, rows, strict=True):
            found[name] = _drop_padding(table, ids, some)
        updated = _updated_ids(table, found)
        arrays = [scatter_rows(updated, size, x) for x in found.values()]
        return [pad_ids(updated, size, table.rows), *arrays]

    all_numbers, all_rows = [], []
    types: list[Any] = [((size,), np.int32)]
    for x in gradients.values():
        all_numbers.append(x.ids)
        all_rows.append(x.rows)
        types.append(((size, *x.rows.shape[1:]), x.rows.dtype))
    ids, *arrays = trace_move(lay_out, all_numbers, all_rows, types)
    return ids, dict(zip(gradients, arrays, strict=True))


def _drop_padding(table: TableBlock, ids: np.ndarray, rows: np.ndarray) -> RowGradient:
    count = int(np.searchsorted(ids, table.rows))
    return RowGradient(ids[:count], rows[:count])
