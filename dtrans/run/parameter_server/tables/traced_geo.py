"""Rows that trainers of GEO-SGD keep, in a step that is traced to be verified.

Rows are moved by `KeptRows`, and noted by `UnseenChanges`, as in processes. Between two equations
both are arrays: numbers of rows are not known before the step is evaluated (`traced_tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.ops.moved_rows import trace_move
from dtrans.protocol.served import RowGradient, ServedRows
from dtrans.protocol.tables.changed_rows import UnseenChanges
from dtrans.protocol.tables.kept_rows import KeptRows
from dtrans.protocol.tables.table_rows import BlockRowSet


Move = Callable[..., Sequence[Any]]


class TracedKeptRows(KeptRows):
    """The rows of one table that a trainer keeps.

    Args:
      ids: their numbers at the start, increasing.
      rows: local rows, and each array of their state, with all rows of the table; the trainer keeps
        those of `ids`.
    """

    def __init__(self, ids: np.ndarray, rows: Sequence[Any]) -> None:
        self._size = size = len(rows[0])
        self._types = [((size, *x.shape[1:]), x.dtype) for x in rows]
        old = self._types[0]
        padded = np.concatenate([ids, np.full(size - len(ids), size)]).astype(np.int32)
        types = [((size,), np.int32), ((size,), np.int32), *self._types, old]
        begin = lambda numbers, rows: _begun(numbers[0], rows).arrays(size)
        self._arrays = trace_move(begin, [padded], rows, types)

    def missing(self, ids: Any) -> Any:
        """Return the numbers of rows that are not here, and that of no row behind them."""
        (found,) = self._move(lambda kept, ids: [kept.missing(ids)], [ids], [], [len(ids)], [])
        return found

    def add(self, ids: Any, rows: Any, state: Sequence[Any] | None = None) -> None:
        """Keep rows that were not here.

        Args:
          state: of the same rows.
        """

        def add(kept: KeptRows, ids: np.ndarray, rows: np.ndarray, *state: np.ndarray) -> list[Any]:
            kept.add(ids, rows[: len(ids)], [x[: len(ids)] for x in state])
            return []

        self._move(add, [ids], [rows, *(state or ())], [], [])

    def take(self, ids: Any, size: int) -> list[Any]:
        """Return rows with their state, and zeros behind them."""
        types = [((size, *shape[1:]), dtype) for shape, dtype in self._types]
        return self._move(lambda kept, ids: kept.take(ids, size), [ids], [], [], types)

    def put(self, ids: Any, made: Sequence[Any]) -> None:
        """Keep what a step has made of rows."""

        def put(kept: KeptRows, ids: np.ndarray, *made: np.ndarray) -> list[Any]:
            kept.put(ids, made)
            return []

        self._move(put, [ids], made, [], [])

    def over(self, rows: Sequence[Any]) -> list[Any]:
        """Return local rows and their state where they are here, and other rows elsewhere."""

        def over(kept: KeptRows, ids: np.ndarray, *rows: np.ndarray) -> list[Any]:
            for x, here in zip(rows, kept.take(kept.ids, len(kept)), strict=True):
                x[kept.ids] = here
            return [*rows]

        return self._move(over, [np.zeros(0, np.int32)], rows, [], self._types)

    def _unpushed(self) -> tuple[Any, Any, Any]:
        row = self._types[0]
        ids, local, old = self._move(
            lambda kept, ids: kept._unpushed(), [np.zeros(0, np.int32)], [], [self._size], [row] * 2
        )
        return ids, local, old

    def _known(self, server: RowGradient) -> tuple[Any, Any, Any, Any]:
        def known(kept: KeptRows, ids: np.ndarray, rows: np.ndarray) -> Sequence[Any]:
            return kept._known(RowGradient(ids, rows[: len(ids)]))

        row = self._types[0]
        ids, rows, local, old = self._move(
            known, [server.ids], [server.rows], [self._size], [row] * 3
        )
        return ids, rows, local, old

    def _agree(self, ids: Any, local: Any, old: Any) -> None:
        def agree(
            kept: KeptRows, ids: np.ndarray, old: np.ndarray, *local: np.ndarray
        ) -> list[Any]:
            kept._agree(ids, local[0][: len(ids)] if local else None, old[: len(ids)])
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
        """Apply a function that moves rows, and keep its result; return its outputs, padded.

        Args:
          fn: takes what is kept, numbers without those of no row, and rows.
          counts: how many numbers each of its first outputs has room for.
          types: the shape and dtype of each further output.
        """
        here, size, ours = len(self._arrays), self._size, len(self._types) + 1

        def host(numbers: Sequence[Any], moved: Sequence[Any]) -> list[np.ndarray]:
            kept = KeptRows.from_arrays(numbers[0], numbers[1], *moved[:ours])
            there = [x[x < size] for x in numbers[2:]]
            made = [np.asarray(x) for x in fn(kept, *there, *moved[ours:])]
            ids = [_behind(x, count, size) for x, count in zip(made, counts, strict=False)]
            rest = zip(made[len(counts) :], types, strict=True)
            return [*kept.arrays(size), *ids, *(_behind(x, t[0][0], 0) for x, t in rest)]

        kinds = [((size,), np.int32), ((size,), np.int32), *self._types, self._types[0]]
        kinds += [*(((count,), np.int32) for count in counts), *types]
        outs = trace_move(host, [*self._arrays[:2], *numbers], [*self._arrays[2:], *rows], kinds)
        self._arrays = outs[:here]
        return outs[here:]


def _begun(ids: np.ndarray, rows: Sequence[Any]) -> KeptRows:
    """Return the rows that a trainer keeps directly after a lookup."""
    size = len(ids)
    ids = ids[ids < size]
    kept = KeptRows(rows)
    kept.add(ids, rows[0][ids], [x[ids] for x in rows[1:]])
    return kept


def _behind(x: np.ndarray, size: int, filler: int) -> np.ndarray:
    """Return an array with others behind its rows."""
    return np.concatenate([x, np.full((size - len(x), *x.shape[1:]), filler, x.dtype)])


class TracedChanges:
    """The rows of one server's blocks that trainers have, and those that others have changed.

    Args:
      tables: the blocks.
      trainers: how many there are.
      kept: for each block the rows that each trainer has at the start.
    """

    def __init__(
        self,
        tables: Mapping[str, ServedRows],
        trainers: int,
        kept: Mapping[str, Sequence[np.ndarray]],
    ) -> None:
        self._tables, self._trainers = tables, trainers
        begun = UnseenChanges(tables, trainers)
        for name, of_trainers in kept.items():
            for k, ids in enumerate(of_trainers):
                begun.asked(k, name, ids)
        self._has: dict[str, Any] = {n: begun.has(n).astype(np.int32) for n in begun.tables}

    def asked(self, k: int, name: str, ids: Any) -> None:
        """Note that a trainer has rows of a block."""
        self._note(name, ids, lambda notes, ids: notes.asked(k, name, ids))

    def changed(self, k: int, name: str, ids: Any) -> None:
        """Note that a trainer has changed rows of a block."""
        self._note(name, ids, lambda notes, ids: notes.changed(k, name, ids))

    def take(self, k: int, name: str) -> Any:
        """Return the numbers of the rows to send to a trainer, padded with the number of no row."""
        return self._note(name, np.zeros(0, np.int32), lambda notes, ids: notes.take(k, name))

    def _note(
        self, name: str, ids: Any, fn: Callable[[UnseenChanges, np.ndarray], np.ndarray | None]
    ) -> Any:
        if name not in self._has:
            return None
        rows = self._tables[name].rows

        def host(numbers: Sequence[Any], _: Sequence[Any]) -> list[np.ndarray]:
            notes = UnseenChanges({name: self._tables[name]}, self._trainers)
            notes.restore(name, numbers[0])
            told = fn(notes, numbers[1][numbers[1] < rows])
            return [
                notes.has(name).astype(np.int32),
                _behind(np.zeros(0, np.int32) if told is None else told, rows, rows),
            ]

        has = self._has[name]
        self._has[name], told = trace_move(
            host, [has, ids], [], [(has.shape, np.int32), ((rows,), np.int32)]
        )
        return told


def rows_of_table(spans: Sequence[BlockRowSet], parts: Sequence[RowGradient]) -> RowGradient:
    """Return rows of all blocks of a table, by their numbers in it."""
    rows = sum(span.rows for span in spans)

    def host(numbers: Sequence[Any], found: Sequence[Any]) -> list[np.ndarray]:
        counts = [
            int(np.searchsorted(ids, span.rows)) for ids, span in zip(numbers, spans, strict=True)
        ]
        ids = [
            span.in_leaf(x[:count]) for x, span, count in zip(numbers, spans, counts, strict=True)
        ]
        there = [x[:count] for x, count in zip(found, counts, strict=True)]
        return [
            _behind(np.concatenate(ids).astype(np.int32), rows, rows),
            _behind(np.concatenate(there), rows, 0),
        ]

    row = parts[0].rows
    types = [((rows,), np.int32), ((rows, *row.shape[1:]), row.dtype)]
    return RowGradient(*trace_move(host, [x.ids for x in parts], [x.rows for x in parts], types))
