"""Tables of a step that is traced to be verified: numbers of rows are values that nobody knows yet.

What the host does with numbers becomes equations that call the same functions
(`dtrans.ops.moved_rows`). An array of numbers has room for as many as there may be: they increase,
and that of no row stands behind them.

`plan.verify()` traces synchronous jobs (`dtrans.run.parameter_server.mesh`) with these, and ordered
ones (`dtrans.run.parameter_server.ordered_job`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import JaxprEqn, is_traced
from dtrans.ops.moved_rows import trace_move
from dtrans.parameter_server.tables.touched_rows import TableBlock, room_for
from dtrans.protocol.served import RowGradient
from dtrans.protocol.tables.table_rows import BlockRowSet, put_in_place, wanted_of
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.row_updates import all_ids, put_at, room_after, taken_at
from dtrans.run.parameter_server.tables.table_memory import among


Rows = Mapping[str, Any]


class TracedMemory:
    """A block of a table, and its state, as arrays (`TableMemory` has them in memory that is
    written again).

    Args:
      table: the block.
      missed: makes the steps that rows miss; None where only rows with a gradient move.
      state: what it begins with, and its state, by name.

    Attributes:
      held: the block, and the state that has rows of it, by name.
      reads: what has to be known of each update, by name.
    """

    def __init__(self, table: TableBlock, missed: MissedSteps | None, state: Rows) -> None:
        self._table, self._missed = table, missed
        self.held: Rows = {n: state[n] for n in table.arrays}
        self.reads = () if missed is None else tuple(missed.reads)

    def take(self, ids: Any, size: int) -> dict[str, Any]:
        """Return rows of the block and of its state, and zeros behind them."""
        assert len(ids) == size, "numbers have room already"
        return taken_at(self._table, ids, self.held)

    def put(self, ids: Any, made: Rows, values: Rows) -> Rows:
        """Return all arrays with new rows: an update was made of some, and the others have made its
        step at once.

        Args:
          values: what `reads` names.
        """
        self.held = put_at(self._table, ids, made, self._caught_up(ids, values))
        return self.held

    def _caught_up(self, ids: Any, values: Rows) -> Rows:
        """Return all arrays after one step without a gradient of every row, but those with these
        numbers."""
        if self._missed is None:
            return self.held
        seen = jnp.zeros(self._table.rows, jnp.int32).at[ids].set(1, mode="drop")
        records = {n: jnp.asarray(values[n])[None] for n in self.reads}
        made: Rows = self._missed.catching_up(self._table.rows)(self.held, seen, records, 0, 1)
        return made


def fetch_rows(eqn: JaxprEqn, uniq: Any, give: Callable[[str, str, Any], Any]) -> Any:
    """Return the rows that a `prefetch` equation looks up, and zeros behind them.

    Args:
      uniq: their numbers.
      give: returns rows of a block, given its server, its name and numbers.
    """
    p, (t, *_) = eqn.params, eqn.params["types"]
    where = {x: p[x] for x in ("epmap", "names", "spans")}

    def ask(numbers: Sequence[Any], _: Sequence[Any]) -> list[np.ndarray]:
        wanted = wanted_of(numbers[0], np.zeros(len(numbers[0])), **where)
        return [
            room_after(ids, len(numbers[0]), span.rows)
            for (*_, ids, _), span in zip(wanted, p["spans"], strict=True)
        ]

    def land(numbers: Sequence[Any], parts: Sequence[Any]) -> list[np.ndarray]:
        rows = np.zeros(t.shape, np.int64)
        wanted = wanted_of(numbers[0], rows, **where)
        for (*_, ids, memory), part in zip(wanted, parts, strict=True):
            memory[...] = part[: len(ids)]
        put_in_place(numbers[0], rows, wanted, p["spans"])
        return [rows]

    asked = trace_move(ask, [uniq], [], [(uniq.shape, np.int32)] * len(p["names"]))
    parts = [give(*of) for of in zip(p["epmap"], p["names"], asked, strict=True)]
    return trace_move(land, [uniq], parts, [(t.shape, t.dtype)])[0]


def part_of_block(span: BlockRowSet, whole: RowGradient) -> RowGradient:
    """Return the part of a gradient of rows of a table that a block has, by the numbers of rows in
    it."""

    def cut(numbers: Sequence[Any], rows: Sequence[Any]) -> list[np.ndarray]:
        at = span.among(numbers[0])
        local = span.local(numbers[0][at])
        return [
            room_after(local, len(numbers[0]), span.rows),
            _with_zeros(rows[0][at], len(numbers[0])),
        ]

    if is_traced(whole.ids) or is_traced(whole.rows):
        types = [(whole.ids.shape, np.int32), (whole.rows.shape, whole.rows.dtype)]
        return RowGradient(*trace_move(cut, [whole.ids], [whole.rows], types))
    at = span.among(whole.ids)
    return RowGradient(span.local(whole.ids[at]), whole.rows[at])


def gradients_with_room(
    table: TableBlock, given: Mapping[str, RowGradient]
) -> tuple[Any, dict[str, Any]]:
    """Lay what is sent of rows of a block out for one update.

    Args:
      given: what trainers have sent, and what they have received of the same rows, by name.

    Returns:
      The numbers of the rows that are updated, and each of `given` as an array with room for them,
      zero elsewhere.
    """
    if any(is_traced(x.ids) or is_traced(x.rows) for x in given.values()):
        return _traced_with_room(table, given)
    ids = np.arange(table.rows) if table.updates_all else all_ids(table, given, table.gradients)
    size = table.rows if table.updates_all else room_for(len(ids))
    return ids, {n: among(ids, size, x) for n, x in given.items()}


def _traced_with_room(
    table: TableBlock, given: Mapping[str, RowGradient]
) -> tuple[Any, dict[str, Any]]:
    """Trace `gradients_with_room`. The number of no row stands behind those that there are."""
    size = (
        table.rows
        if table.updates_all
        else room_for(sum(len(given[n].ids) for n in table.gradients.values()))
    )

    def put_together(numbers: Sequence[Any], rows: Sequence[Any]) -> list[np.ndarray]:
        sent = {n: _there(table, *pair) for n, *pair in zip(given, numbers, rows, strict=True)}
        ids = np.arange(table.rows) if table.updates_all else all_ids(table, sent, table.gradients)
        return [room_after(ids, size, table.rows), *(among(ids, size, x) for x in sent.values())]

    sent = given.values()
    types = [((size,), np.int32), *(((size, *x.rows.shape[1:]), x.rows.dtype) for x in sent)]
    ids, *each = trace_move(put_together, [x.ids for x in sent], [x.rows for x in sent], types)
    return ids, dict(zip(given, each, strict=True))


def _there(table: TableBlock, ids: np.ndarray, rows: np.ndarray) -> RowGradient:
    """Return rows without the room behind them."""
    count = int(np.searchsorted(ids, table.rows))
    return RowGradient(ids[:count], rows[:count])


def _with_zeros(rows: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])
