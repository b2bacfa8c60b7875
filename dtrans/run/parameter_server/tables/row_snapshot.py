"""Snapshot of an embedding table, which a thread writes to a file while updates change the table.

The table is not copied at once (copy-on-write). The thread, called *reader*, reads the rows in
increasing order, in segments. Before the server changes a row that the reader has not read, the
server saves a copy of the row. The memory for saved rows is bounded: when it is full, the server
waits for the reader. If the reader makes no progress for some time, the server continues, and the
reader gets an error.

A server with snapshots at failures (`dtrans.Snapshots(at_loss=True)`) takes a snapshot before each
update. Most of these snapshots are never read, so they only record the old values of the rows that
the update changes.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from dtrans.checkpoint.saved_rows import InitRows, RowSegment, TableRows
from dtrans.errors import StateError
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.tables.row_directory import MISSING, RowDirectory
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.new_rows import RowMaker
from dtrans.run.parameter_server.tables.stored_rows import StoredRows


SEGMENT = 8 << 20  # bytes of the rows in a segment
# Saved rows are indexed by groups of consecutive rows.
GROUPS = 256  # maximum number of groups
LEAST = 4096  # minimum number of rows of a group
# Maximum bytes of saved rows. For a block of more than 12 times this size, the limit is a twelfth
# of the block.
ROOM = 16 << 20
WINDOW = 1 << 16  # maximum number of rows that are copied while the lock is held


class SharedRows(Protocol):
    """Interface to rows that change while a snapshot of them is read, such as `TableMemory`."""

    table: TableBlock
    arrays: dict[str, np.ndarray]
    stored: StoredRows
    missed: MissedSteps | None
    maker: RowMaker | None
    step: int
    evicted: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory for the rows that exist, their optimizer state and their hash table."""


@dataclasses.dataclass(frozen=True, eq=False)
class _SavedRows:
    """Copies of rows that an update has changed since the snapshot.

    Attributes:
      ids: the sorted ids of the rows.
      changed: a number for the last change of each row (`StoredRows.changed`).
      seen: number of updates that each row includes; undefined for rows that do not exist. The
        array is None if rows skip no updates.
      rows: copies of the rows in each array, by name. Rows that do not exist are left out.
    """

    ids: np.ndarray
    changed: np.ndarray
    seen: np.ndarray | None
    rows: Mapping[str, np.ndarray]

    def between(self, start: int, stop: int) -> _SavedRows:
        """Return the rows with ids from `start` to `stop` - 1."""
        a, b = np.searchsorted(self.ids, (start, stop))
        skipped = int((self.changed[:a] > 0).sum())
        count = int((self.changed[a:b] > 0).sum())
        rows = {n: x[skipped : skipped + count] for n, x in self.rows.items()}
        seen = None if self.seen is None else self.seen[a:b]
        return _SavedRows(self.ids[a:b], self.changed[a:b], seen, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        seen = 0 if self.seen is None else self.seen.nbytes
        rows = sum(x.nbytes for x in self.rows.values())
        return self.ids.nbytes + self.changed.nbytes + seen + rows


class RowSnapshot(TableRows):
    """Snapshot of a table's rows on one server, which another thread can read during updates.

    Args:
      memory: the rows.
      is_live: True if updates continue. Then an update saves rows before it changes them, and
        `segments` can be read only once.
      patience: seconds that the server waits for a reader that makes no progress. None to save any
        number of rows without a wait.

    Attributes:
      most: the largest number of bytes that saved rows have had so far.
    """

    def __init__(
        self, memory: SharedRows, *, is_live: bool = False, patience: float | None = 10.0
    ) -> None:
        self._memory, self._is_live, self._patience = memory, is_live, patience
        self.names, self.step, self.evicted = memory.table.arrays, memory.step, memory.evicted
        maker = memory.maker
        self.begins = None if maker is None else InitRows(maker.eqn, maker.args)
        self._missed: MissedSteps | None = None
        if memory.missed is not None:
            self._missed = memory.missed.until_now()
        self.rows = memory.table.rows
        self._row_bytes = sum(x[:1].nbytes for x in memory.arrays.values())
        self._room: float = max(ROOM, memory.nbytes // 12)
        self._group = max(LEAST, -(-self.rows // GROUPS))
        if patience is None:
            # Groups make reads during many updates fast, but each group costs time in an update.
            self._room, self._group = math.inf, max(1, self.rows)
        self._at = 0  # id of the first row that the reader has not read
        self._saved_ids = RowDirectory()
        # The sorted ids of all rows to read, or None to read all rows of the block. The reader
        # sets `_known` before it reads the first row.
        self._known: np.ndarray | None = None
        self._saved: dict[int, list[_SavedRows]] = {}  # index of a group -> its saved rows
        self._nbytes = self.most = 0
        self._over = ""  # the reason for the end of the snapshot; empty before the end
        self._progress = threading.Condition()

    # -- the server ------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if the snapshot has ended, and updates need not save rows any more."""
        return bool(self._over)

    def save(self, ids: np.ndarray) -> None:
        """Save copies of rows before an update changes them; wait while the memory is full."""
        with self._progress:
            while not self._over:
                due = ids[(ids >= self._at) & (self._saved_ids.find(ids) == MISSING)]
                if self._nbytes + len(due) * self._row_bytes <= self._room or not len(due):
                    break
                assert self._patience is not None
                if not self._progress.wait(self._patience):
                    self._end(
                        f"the checkpoint of {self.names[0]} is written too slowly: no rows were "
                        f"written for {self._patience:g} s, and {self._nbytes:,} bytes of changed "
                        "rows wait in memory; save to a faster disk"
                    )
            if not self._over and len(due):
                self._put(np.sort(due))

    def _put(self, ids: np.ndarray) -> None:
        """Store copies of rows, in groups of adjacent ids."""
        first, last = ids[0] // self._group, ids[-1] // self._group
        edges = np.searchsorted(ids, np.arange(first + 1, last + 1) * self._group)
        for part in np.split(ids, edges):
            if len(part):
                saved = self._copy(part)
                self._saved.setdefault(int(part[0]) // self._group, []).append(saved)
                self._nbytes += saved.nbytes
        self._saved_ids.put(ids, np.zeros(len(ids), np.int64))
        self.most = max(self.most, self._nbytes)

    def _copy(self, ids: np.ndarray) -> _SavedRows:
        stored = self._memory.stored
        slots = stored.slots(ids)
        seen = None if self._memory.missed is None else stored.seen[np.maximum(slots, 0)]
        exists = slots[slots >= 0]
        rows = {n: x[exists] for n, x in self._memory.arrays.items()}
        return _SavedRows(ids, stored.changed(slots), seen, rows)

    def close(self) -> None:
        """End the snapshot. The reader calls `close` when it has read all rows, or has failed."""
        with self._progress:
            self._end(self._over or "it was read")

    def _end(self, reason: str) -> None:
        self._over = reason
        self._saved.clear()
        self._saved_ids = RowDirectory()
        self._nbytes = 0
        self._progress.notify_all()

    # -- the reader ------------------------------------------------------------------------------

    def first(self, ids: np.ndarray) -> list[np.ndarray]:
        maker = self._memory.maker
        assert maker is not None
        return maker(ids)

    def segments(self) -> Iterator[RowSegment]:
        """Yield the rows of the snapshot in segments, with sorted ids.

        Raises:
          StateError: the reader was too slow, and the server has ended the snapshot.
        """
        if not self._is_live:
            self._at, self._over = 0, ""
        if self._missed is None or self._missed.rests:
            # Rows that have never existed do not belong to the snapshot.
            self._known = self._memory.stored.known_ids()
        most = max(1, SEGMENT // max(1, self._row_bytes))
        waiting, size = list[RowSegment](), 0
        while self._at < self.rows:
            segment = self._catch_up(*self._next(most))
            if len(segment.ids):
                waiting.append(segment)
                size += len(segment.ids)
            if size >= most:
                yield _concatenate(waiting)
                waiting, size = [], 0
        if waiting:
            yield _concatenate(waiting)
        self.close()

    def _next(self, most: int) -> tuple[_SavedRows, np.ndarray]:
        """Read at most `most` further rows, as they were at the time of the snapshot.

        With the lock held, the method copies current rows. For rows that have changed since, it
        takes the saved copies.

        Returns:
          The rows, and the ids of rows that did not exist at the time of the snapshot.
        """
        with self._progress:
            if self._over:
                raise StateError(self._over)
            group = self._at // self._group
            ids, stop = self._window(min(most, WINDOW))
            saved = [x.between(self._at, stop) for x in self._saved.get(group, ())]

            stored = self._memory.stored
            slots = stored.slots(ids)
            changed = stored.changed(slots)
            seen = None if self._memory.missed is None else stored.seen[np.maximum(slots, 0)]
            for x in saved:
                at, is_known = _places(x.ids, ids)
                changed[at] = x.changed[is_known]
                if seen is not None and x.seen is not None:
                    seen[at] = x.seen[is_known]

            exists = ids[changed > 0]
            # A row that was evicted meanwhile has no slot. Here the row of slot 0 takes its place,
            # until the saved copy replaces it below.
            slots = np.maximum(slots[changed > 0], 0)
            rows = {n: x[slots] for n, x in self._memory.arrays.items()}
            for x in saved:
                at = np.searchsorted(exists, x.ids[x.changed > 0])
                for n, old in x.rows.items():
                    rows[n][at] = old

            if stop % self._group == 0 or stop == self.rows:
                # The reader has read the complete group, so the group's saved rows are dropped.
                self._nbytes -= sum(x.nbytes for x in self._saved.pop(group, ()))
            self._at = stop
            self._progress.notify_all()
        is_listed = changed != 0
        seen = None if seen is None else seen[is_listed]
        return _SavedRows(ids[is_listed], changed[is_listed], seen, rows), ids[changed <= 0]

    def _window(self, most: int) -> tuple[np.ndarray, int]:
        """Return the ids of at most `most` rows to read next, and the id after them."""
        stop = min((self._at // self._group + 1) * self._group, self.rows)
        if self._known is None:
            stop = min(self._at + most, stop)
            return np.arange(self._at, stop), stop
        first, last = np.searchsorted(self._known, (self._at, stop))
        if last - first > most:
            last = first + most
            stop = int(self._known[last])
        return self._known[first:last], stop

    def _catch_up(self, old: _SavedRows, new: np.ndarray) -> RowSegment:
        """Run the updates that rows have skipped; return the rows as a segment.

        If updates also change rows that do not exist yet, initialize these rows and include them.

        Args:
          old: rows at the time of the snapshot.
          new: ids of rows that did not exist at that time.
        """
        rows, missed = dict(old.rows), self._missed
        exists = old.changed > 0
        if missed is not None:
            assert old.seen is not None
            missed.for_rows(old.seen[exists]).make_up(np.arange(int(exists.sum())), rows)
        if missed is None or missed.rests or not len(new):
            return RowSegment(old.ids.astype(np.int32), old.changed, list(rows.values()))

        added = dict(zip(self.names, self.first(new), strict=True))
        missed.for_rows(np.zeros(len(new), np.int64)).make_up(np.arange(len(new)), added)
        ids = np.concatenate([old.ids[exists], new])
        order = np.argsort(ids, kind="stable")
        changed = np.concatenate([old.changed[exists], np.ones(len(new), np.int64)])
        arrays = [np.concatenate([rows[n], added[n]])[order] for n in self.names]
        return RowSegment(ids[order].astype(np.int32), changed[order], arrays)


def _places(some: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index in `ids` of each entry of `some`, and a mask of entries that have one."""
    at = np.searchsorted(ids, some)
    is_known = at < len(ids)
    is_known[is_known] = ids[at[is_known]] == some[is_known]
    return at[is_known], is_known


def _concatenate(segments: list[RowSegment]) -> RowSegment:
    if len(segments) == 1:
        return segments[0]
    ids, changed, rows = [], [], []
    for segment in segments:
        ids.append(segment.ids)
        changed.append(segment.changed)
        rows.append(segment.rows)
    arrays = list(map(np.concatenate, zip(*rows, strict=True)))
    return RowSegment(np.concatenate(ids), np.concatenate(changed), arrays)
