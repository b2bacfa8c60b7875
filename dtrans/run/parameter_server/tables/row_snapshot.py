"""Rows of a block as they are at one moment, read in a thread of its own while the block goes on:
copy-on-write.

The reader takes the rows in increasing order, some at a time. Before the server changes rows that
were not read yet, it keeps what they are now. Memory for these is bounded: where it is full, the
server waits for the reader. A reader that makes no progress for long loses its snapshot, and the
server goes on.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from dtrans.checkpoint.saved_rows import InitRows, RowSegment, TableRows
from dtrans.errors import StateError
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.new_rows import RowMaker


SEGMENT = 8 << 20  # bytes of rows that are read at once
# groups of rows by which rows are kept that change, and how many rows one has at least
GROUPS, LEAST = (
    256,
    4096,
)
ROOM = 16 << 20  # bytes that may be kept of rows, or a twelfth of what the block weighs
WINDOW = 1 << 16  # rows that are looked through at once


class SharedRows(Protocol):
    """A block that goes on while its rows are read
    (`dtrans.run.parameter_server.tables.table_memory`)."""

    table: TableBlock
    held: dict[str, np.ndarray]
    changed_at: np.ndarray
    missed: MissedSteps | None
    maker: RowMaker | None
    step: int
    evicted: int

    @property
    def nbytes(self) -> int:
        """What the rows that are made weigh, with their state."""


@dataclasses.dataclass(frozen=True, eq=False)
class _KeptRows:
    """Rows as they were, before they have changed."""

    ids: np.ndarray
    changed: np.ndarray
    seen: np.ndarray | None
    rows: Mapping[str, np.ndarray]  # of those that were made

    def between(self, start: int, stop: int) -> _KeptRows:
        """Those from one number to another."""
        a, b = np.searchsorted(self.ids, (start, stop))
        before, count = int((self.changed[:a] > 0).sum()), int((self.changed[a:b] > 0).sum())
        rows = {n: x[before : before + count] for n, x in self.rows.items()}
        return _KeptRows(
            self.ids[a:b], self.changed[a:b], None if self.seen is None else self.seen[a:b], rows
        )

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        seen = 0 if self.seen is None else self.seen.nbytes
        return (
            self.ids.nbytes + self.changed.nbytes + seen + sum(x.nbytes for x in self.rows.values())
        )


class RowSnapshot(TableRows):
    """Rows of a block as they are now.

    Args:
      memory: the block.
      goes_on: whether the block does, and keeps rows that change; its segments are read once.
      patience: seconds that the server waits for a reader that makes no progress.

    Attributes:
      most: the most bytes that were kept at one time.
    """

    def __init__(
        self, memory: SharedRows, *, goes_on: bool = False, patience: float = 10.0
    ) -> None:
        self._memory, self._goes_on, self._patience = memory, goes_on, patience
        self.names, self.step, self.evicted = memory.table.arrays, memory.step, memory.evicted
        maker = memory.maker
        self.begins = None if maker is None else InitRows(maker.eqn, maker.args)
        self._missed: MissedSteps | None = None if memory.missed is None else memory.missed.as_now()
        self.rows = memory.table.rows
        self._row_bytes = sum(x[:1].nbytes for x in memory.held.values())
        self._room = max(ROOM, memory.nbytes // 12)
        self._group = max(LEAST, -(-self.rows // GROUPS))
        self._at = 0  # the rows before this one are read
        self._is_kept = np.zeros(self.rows, bool)
        self._kept: dict[int, list[_KeptRows]] = {}  # by group
        self._nbytes = self.most = 0
        self._over = ""  # why nothing is to be kept any more
        self._progress = threading.Condition()

    # -- the server ------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nobody needs to keep rows for it any more."""
        return bool(self._over)

    def keep(self, ids: np.ndarray) -> None:
        """Keep what these rows are, which are about to change; waits where there is no room for
        it."""
        with self._progress:
            while not self._over:
                due = ids[(ids >= self._at) & ~self._is_kept[ids]]
                if self._nbytes + len(due) * self._row_bytes <= self._room or not len(due):
                    break
                if not self._progress.wait(self._patience):
                    self._end(
                        f"{self.names[0]} changes faster than it is written: nothing was written "
                        "for "
                        f"{self._patience:g} s, and {self._nbytes:,} bytes of rows wait for it; "
                        "save to a faster disk"
                    )
            if not self._over and len(due):
                self._put(np.sort(due))

    def _put(self, ids: np.ndarray) -> None:
        edges = np.searchsorted(
            ids, np.arange(ids[0] // self._group + 1, ids[-1] // self._group + 1) * self._group
        )
        for some in np.split(ids, edges):
            if len(some):
                kept = self._as_they_are(some)
                self._kept.setdefault(int(some[0]) // self._group, []).append(kept)
                self._nbytes += kept.nbytes
        self._is_kept[ids] = True
        self.most = max(self.most, self._nbytes)

    def _as_they_are(self, ids: np.ndarray) -> _KeptRows:
        changed = self._memory.changed_at[ids]
        there = ids[changed > 0]
        seen = None if self._memory.missed is None else self._memory.missed.seen[ids]
        return _KeptRows(ids, changed, seen, {n: x[there] for n, x in self._memory.held.items()})

    def close(self) -> None:
        """Keep nothing any more: it is read, or nobody will."""
        with self._progress:
            self._end(self._over or "it was read")

    def _end(self, why: str) -> None:
        self._over = why
        self._kept.clear()
        self._is_kept = np.zeros(0, bool)
        self._nbytes = 0
        self._progress.notify_all()

    # -- the reader ------------------------------------------------------------------------------

    def first(self, ids: np.ndarray) -> list[np.ndarray]:
        maker = self._memory.maker
        assert maker is not None
        return maker(ids)

    def segments(self) -> Iterator[RowSegment]:
        """The rows. Raises StateError where the server has gone on without."""
        if not self._goes_on:
            self._at, self._over = 0, ""
        most, waiting, size = max(1, SEGMENT // max(1, self._row_bytes)), list[RowSegment](), 0
        while self._at < self.rows:
            segment = self._brought_up(*self._next(most))
            if len(segment.ids):
                waiting.append(segment)
                size += len(segment.ids)
            if size >= most:
                yield _joined(waiting)
                waiting, size = [], 0
        if waiting:
            yield _joined(waiting)
        self.close()

    def _next(self, most: int) -> tuple[_KeptRows, np.ndarray]:
        """The next rows as they were, and the numbers of those that were not made."""
        with self._progress:
            if self._over:
                raise StateError(self._over)
            start = self._at
            group = start // self._group
            stop = min(start + min(most, WINDOW), (group + 1) * self._group, self.rows)
            ids = np.arange(start, stop)
            changed = self._memory.changed_at[start:stop].copy()
            seen = (
                None if self._memory.missed is None else self._memory.missed.seen[start:stop].copy()
            )
            kept = [x.between(start, stop) for x in self._kept.get(group, ())]
            for x in kept:
                changed[x.ids - start] = x.changed
                if seen is not None and x.seen is not None:
                    seen[x.ids - start] = x.seen
            made = ids[changed > 0]
            rows = {n: x[made] for n, x in self._memory.held.items()}
            for x in kept:
                at = np.searchsorted(made, x.ids[x.changed > 0])
                for n, of in x.rows.items():
                    rows[n][at] = of
            if stop % self._group == 0 or stop == self.rows:
                self._nbytes -= sum(x.nbytes for x in self._kept.pop(group, ()))
            self._at = stop
            self._progress.notify_all()
        there = changed != 0
        seen = None if seen is None else seen[there]
        return _KeptRows(ids[there], changed[there], seen, rows), ids[changed <= 0]

    def _brought_up(self, some: _KeptRows, new: np.ndarray) -> RowSegment:
        """Rows with the steps that they have missed; and the others, where these move too."""
        rows, missed = dict(some.rows), self._missed
        if missed is not None:
            assert some.seen is not None
            made = some.changed > 0
            missed.of_rows(some.seen[made]).make_up(np.arange(int(made.sum())), rows)
        if missed is None or missed.rests or not len(new):
            return RowSegment(some.ids.astype(np.int32), some.changed, list(rows.values()))
        others = dict(zip(self.names, self.first(new), strict=True))
        missed.of_rows(np.zeros(len(new), np.int64)).make_up(np.arange(len(new)), others)
        made = some.ids[some.changed > 0]
        order = np.argsort(np.concatenate([made, new]), kind="stable")
        changed = np.concatenate([some.changed[some.changed > 0], np.ones(len(new), np.int64)])[
            order
        ]
        joined = [np.concatenate([rows[n], others[n]])[order] for n in self.names]
        return RowSegment(np.concatenate([made, new])[order].astype(np.int32), changed, joined)


def _joined(segments: list[RowSegment]) -> RowSegment:
    if len(segments) == 1:
        return segments[0]
    rows = [np.concatenate(of) for of in zip(*(x.rows for x in segments), strict=True)]
    return RowSegment(
        np.concatenate([x.ids for x in segments]),
        np.concatenate([x.changed for x in segments]),
        rows,
    )
