"""Table rows that GEO-SGD trainers store, in a step that `plan.verify()` traces.

`CachedRows` stores a trainer's rows of a table. `UnseenChanges` records which of these rows other
trainers have changed. Both need the ids of rows, but in a trace, ids are unknown (`traced_tables`).
So objects of both classes are stored as traced arrays. Each operation is traced as one equation.
When it is evaluated, it restores the object from the arrays, calls the method, and returns the new
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.ops.moved_rows import trace_move
from dtrans.protocol.server_blocks import RowGradient, TableSpec
from dtrans.protocol.tables.cached_rows import CachedRows
from dtrans.protocol.tables.changed_rows import UnseenChanges
from dtrans.protocol.tables.table_rows import BlockRowSet
from dtrans.run.parameter_server.tables.missed_steps import pad
from dtrans.run.parameter_server.tables.row_updates import pad_ids


# A function. Its arguments are a `CachedRows`, arrays of ids, and arrays of rows.
Move = Callable[..., Sequence[Any]]
NO_IDS = np.zeros(0, np.int32)


class TracedCachedRows(CachedRows):
    """Rows of one table that a GEO-SGD trainer stores, as arrays in a JAX trace.

    The *row state* of a table consists of the arrays of optimizer state with a row for each table
    row.

    Args:
      ids: the sorted ids of the rows that the trainer stores at the start.
      rows: the table with all rows, followed by each array of its row state.
    """

    def __init__(self, ids: np.ndarray, rows: Sequence[Any]) -> None:
        self._size = size = len(rows[0])
        self._types = [((size, *x.shape[1:]), x.dtype) for x in rows]
        self._state_types = [*[((size,), np.int32)] * 2, *self._types, self._types[0]]
        begin = lambda numbers, rows: _start(numbers[0], rows).arrays(size)
        self._arrays = trace_move(begin, [pad_ids(ids, size, size)], rows, self._state_types)

    def missing(self, ids: Any) -> Any:
        """Return the ids of rows that the trainer does not store yet, padded."""
        (found,) = self._move(lambda local, ids: [local.missing(ids)], [ids], [], [len(ids)], [])
        return found

    def add(self, ids: Any, rows: Any, state: Sequence[Any] | None = None) -> None:
        """Store rows that the trainer has looked up for the first time.

        Args:
          ids: padded ids of the rows.
          rows: the values of these rows.
          state: the optimizer state of these rows: the same rows of each array.
        """

        def add(table: CachedRows, ids: np.ndarray, *arrays: np.ndarray) -> list[Any]:
            rows, *state = (x[: len(ids)] for x in arrays)
            table.add(ids, rows, state)
            return []

        self._move(add, [ids], [rows, *(state or ())], [], [])

    def take(self, ids: Any, size: int) -> list[Any]:
        """Return stored rows and their optimizer state, padded to `size` rows."""
        types = [((size, *shape[1:]), dtype) for shape, dtype in self._types]
        return self._move(lambda local, ids: local.take(ids, size), [ids], [], [], types)

    def put(self, ids: Any, new: Sequence[Any]) -> None:
        """Store new values that a step has computed, of stored rows and their optimizer state."""

        def put(local: CachedRows, ids: np.ndarray, *new: np.ndarray) -> list[Any]:
            local.put(ids, new)
            return []

        self._move(put, [ids], new, [], [])

    def over(self, rows: Sequence[Any]) -> list[Any]:
        """Copy full arrays, and replace the rows that the trainer stores by the trainer's values.

        Args:
          rows: the table with all rows, followed by each array of its optimizer state.
        """

        def over(local: CachedRows, ids: np.ndarray, *rows: np.ndarray) -> list[Any]:
            for x, here in zip(rows, local.take(local.ids, len(local)), strict=True):
                x[local.ids] = here
            return [*rows]

        return self._move(over, [NO_IDS], rows, [], self._types)

    def _unpushed(self) -> tuple[Any, Any, Any]:
        row = self._types[0]
        unpushed = lambda local, ids: local._unpushed()
        ids, rows, old = self._move(unpushed, [NO_IDS], [], [self._size], [row] * 2)
        return ids, rows, old

    def _known(self, server: RowGradient) -> tuple[Any, Any, Any, Any]:
        def known(local: CachedRows, ids: np.ndarray, rows: np.ndarray) -> Sequence[Any]:
            return local._known(RowGradient(ids, rows[: len(ids)]))

        row = self._types[0]
        ids, rows, local, old = self._move(
            known, [server.ids], [server.rows], [self._size], [row] * 3
        )
        return ids, rows, local, old

    def _agree(self, ids: Any, local: Any, old: Any) -> None:
        def agree(table: CachedRows, ids: np.ndarray, *arrays: np.ndarray) -> list[Any]:
            old, *local = (x[: len(ids)] for x in arrays)
            table._agree(ids, local[0] if local else None, old)
            return []

        self._move(agree, [ids], [old] if local is None else [old, local], [], [])

    def _move(
        self,
        fn: Move,
        numbers: Sequence[Any],
        rows: Sequence[Any],
        counts: Sequence[int],
        types: Sequence[Any],
    ) -> list[Any]:
        """Trace a call of a function that may change the stored rows; return its padded outputs.

        Args:
          fn: the function. Its arguments are the `CachedRows`, ids without padding, and arrays of
            rows. Its outputs are arrays of ids, followed by arrays of rows.
          numbers: the padded ids to pass to `fn`.
          rows: the arrays of rows to pass to `fn`.
          counts: the padded length of each output of ids.
          types: the padded shape and the dtype of each output of rows.
        """
        here, size, ours = len(self._arrays), self._size, len(self._types) + 1

        def host(numbers: Sequence[Any], moved: Sequence[Any]) -> list[np.ndarray]:
            local = CachedRows.from_arrays(numbers[0], numbers[1], *moved[:ours])
            ids = [x[x < size] for x in numbers[2:]]
            outs = list(map(np.asarray, fn(local, *ids, *moved[ours:])))
            padded = []
            for x, count in zip(outs, counts, strict=False):
                padded.append(pad(x, count, size))
            for x, (shape, _) in zip(outs[len(counts) :], types, strict=True):
                padded.append(pad(x, shape[0]))
            return [*local.arrays(size), *padded]

        id_types = [((count,), np.int32) for count in counts]
        outs = trace_move(
            host,
            [*self._arrays[:2], *numbers],
            [*self._arrays[2:], *rows],
            [*self._state_types, *id_types, *types],
        )
        self._arrays = outs[:here]
        return outs[here:]


def _start(ids: np.ndarray, rows: Sequence[Any]) -> CachedRows:
    """Return the rows of a table that a GEO-SGD trainer stores at the start of a traced step.

    Args:
      ids: padded ids of these rows.
      rows: the table with all rows, followed by each array of its optimizer state.
    """
    ids = ids[ids < len(ids)]
    local = CachedRows(rows)
    local.add(ids, rows[0][ids], [x[ids] for x in rows[1:]])
    return local


class TracedChanges:
    """Record of the rows that a server must send to GEO-SGD trainers, as arrays in a JAX trace.

    Trainers store rows. If another trainer changes a row, the server sends the new row with its
    next answer (`UnseenChanges`).

    Args:
      tables: the blocks (rows of a table on this server), by name.
      trainers: the number of trainers.
      start: for each block by name, a list with the ids of the rows that each trainer stores at the
        start.
    """

    def __init__(
        self,
        tables: Mapping[str, TableSpec],
        trainers: int,
        start: Mapping[str, Sequence[np.ndarray]],
    ) -> None:
        self._tables, self._trainers = tables, trainers
        changes = UnseenChanges(tables, trainers)
        for name, of_trainers in start.items():
            for k, ids in enumerate(of_trainers):
                changes.asked(k, name, ids)
        self._has: dict[str, Any] = {n: changes.has(n).astype(np.int32) for n in changes.tables}

    def asked(self, k: int, name: str, ids: Any) -> None:
        """Record that a trainer has looked up rows. It needs the later changes of these rows.

        Args:
          k: id of the trainer.
          name: name of the block (a table's rows on this server).
          ids: padded ids of the rows.
        """
        self._note(name, ids, lambda notes, ids: notes.asked(k, name, ids))

    def changed(self, k: int, name: str, ids: Any) -> None:
        """Record that a trainer has changed rows. Other trainers need the new values.

        Args:
          k: id of the trainer.
          name: name of the block (a table's rows on this server).
          ids: padded ids of the rows.
        """
        self._note(name, ids, lambda notes, ids: notes.changed(k, name, ids))

    def take(self, k: int, name: str) -> Any:
        """Return the padded ids of the changed rows to send to trainer `k` now."""
        return self._note(name, NO_IDS, lambda notes, ids: notes.take(k, name))

    def _note(
        self, name: str, ids: Any, fn: Callable[[UnseenChanges, np.ndarray], np.ndarray | None]
    ) -> Any:
        if name not in self._has:
            return None
        rows = self._tables[name].rows

        def host(numbers: Sequence[Any], _: Sequence[Any]) -> list[np.ndarray]:
            notes = UnseenChanges({name: self._tables[name]}, self._trainers)
            notes.restore(name, numbers[0])
            found = fn(notes, numbers[1][numbers[1] < rows])
            found = NO_IDS if found is None else found
            return [notes.has(name).astype(np.int32), pad_ids(found, rows, rows)]

        has = self._has[name]
        types = [(has.shape, np.int32), ((rows,), np.int32)]
        self._has[name], found = trace_move(host, [has, ids], [], types)
        return found


def rows_of_table(spans: Sequence[BlockRowSet], parts: Sequence[RowGradient]) -> RowGradient:
    """Join rows of a table from several servers, and convert their ids to ids in the table.

    Args:
      spans: the rows of the table that each server stores.
      parts: the rows from each server. Their padded ids count only the rows on this server.
    """
    rows = sum(span.rows for span in spans)

    def host(numbers: Sequence[Any], found: Sequence[Any]) -> list[np.ndarray]:
        ids, there = [], []
        for some, x, span in zip(numbers, found, spans, strict=True):
            count = int(np.searchsorted(some, span.rows))
            ids.append(span.in_leaf(some[:count]))
            there.append(x[:count])
        return [pad_ids(np.concatenate(ids), rows, rows), pad(np.concatenate(there), rows)]

    row = parts[0].rows
    types = [((rows,), np.int32), ((rows, *row.shape[1:]), row.dtype)]
    ids_of_blocks, rows_of_blocks = [], []
    for part in parts:
        ids_of_blocks.append(part.ids)
        rows_of_blocks.append(part.rows)
    return RowGradient(*trace_move(host, ids_of_blocks, rows_of_blocks, types))
