"""Memory of the existing rows of an embedding table, and of their optimizer state.

A server stores a row only after its first use. The stored rows have no gaps. A hash table maps the
id of each row to a *slot* (index in memory). The slots of n rows are 0 to n - 1. So memory is
proportional to the number of stored rows, even if their ids are scattered over a large table. If
all rows exist from the start, the slot of a row is its id, and there is no hash table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.checkpoint.saved_rows import COUNTS, split_counts
from dtrans.protocol.tables.row_directory import MISSING, DirectoryPart
from dtrans.run.parameter_server.tables.lazy_memory import LazyArray


class StoredRows:
    """Existing rows of a block (a table's rows on one server), and their optimizer state.

    Args:
      types: shape and dtype of the block and of each array of its state, by name.
      directory: the hash table, with which rows may be added and removed; None if all rows exist.
      arrays: the initial arrays, if all rows exist.

    Attributes:
      arrays: the block and each array of its state, by name. The index of a row is its slot.
      count: the number of existing rows.
      changed_at: for each slot, a number for the step that last changed the row (`changed` of
        `dtrans.checkpoint.saved_rows.RowSegment`).
      seen: for each slot, the number of updates that the row includes (`MissedSteps.seen` of
        `dtrans.run.parameter_server.tables.missed_steps`).
    """

    def __init__(
        self,
        types: Mapping[str, Any],
        directory: DirectoryPart | None,
        arrays: Sequence[np.ndarray] = (),
    ) -> None:
        rows = next(iter(types.values())).shape[0]
        self._lazy = [LazyArray((rows,), np.int64) for _ in range(3)]
        self.changed_at, self.seen, self._ids = (x.array for x in self._lazy)
        if not arrays:
            areas = [LazyArray(t.shape, t.dtype) for t in types.values()]
            self._lazy += areas
            arrays = [x.array for x in areas]
        self.arrays = dict(zip(types, arrays, strict=True))
        self._directory = directory
        self.count = 0
        if directory is None:
            self.count = rows
            self.changed_at[:] = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the existing rows, with their ids, step numbers and hash table."""
        arrays = [*self.arrays.values()]
        directory = 0
        if self._directory is not None:
            arrays += self._numbers
            directory = self._directory.nbytes
        return directory + self.count * sum(x[:1].nbytes for x in arrays)

    @property
    def _numbers(self) -> tuple[np.ndarray, ...]:
        return self.changed_at, self.seen, self._ids

    @property
    def has_gaps(self) -> bool:
        """True if rows of the table may be missing here, and can be added and removed."""
        return self._directory is not None

    @property
    def directory(self) -> DirectoryPart:
        """The block's part of the hash table, if rows may be added."""
        assert self._directory is not None
        return self._directory

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """Return each row's slot (index in memory); negative for a row that does not exist."""
        return ids if self._directory is None else self._directory.find(ids)

    def ids(self, slots: np.ndarray) -> np.ndarray:
        """Return the ids of the rows at the given slots (indices in memory)."""
        return slots if self._directory is None else self._ids[slots]

    def changed(self, slots: np.ndarray) -> np.ndarray:
        """Return for each row the number of its last change or eviction; 0 for rows never used.

        `RowSegment.changed` describes these numbers.
        """
        found = self.changed_at[np.maximum(slots, 0)]
        if self._directory is not None:
            # The directory stores `changed` of rows that do not exist, which is less than -1.
            found = np.where(slots < 0, np.where(slots == MISSING, 0, slots), found)
        return found

    def known_ids(self) -> np.ndarray | None:
        """Return the sorted ids of all rows in the hash table; None if all rows exist.

        These are existing rows, evicted rows, and rows that a row filter has counted.
        """
        return None if self._directory is None else self._directory.items()[0]

    def evicted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sorted ids of evicted rows, and a number for the step of each eviction.

        `RowSegment.changed` describes these numbers.
        """
        if self._directory is None:
            return np.arange(0), np.arange(0)
        ids, slots = self._directory.items()
        ids, (_, changed) = ids[slots < 0], split_counts(slots[slots < 0])
        is_evicted = changed < MISSING
        return ids[is_evicted], changed[is_evicted]

    def counts(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of updates that a row filter has counted for missing rows."""
        return split_counts(self.slots(ids))[0]

    def set_counts(self, ids: np.ndarray, counts: np.ndarray) -> None:
        """Store a row filter's counts of updates of rows that do not exist yet."""
        assert self._directory is not None
        _, changed = split_counts(self.slots(ids))
        self._directory.put(ids, changed - counts * COUNTS)

    def missing_ids(self) -> np.ndarray:
        """Return the sorted ids of rows that do not exist."""
        is_missing = np.ones(len(self._ids), bool)
        is_missing[self.ids(np.arange(self.count))] = False
        return np.flatnonzero(is_missing)

    def add(self, ids: np.ndarray, rows: Sequence[np.ndarray], changed: np.ndarray | int) -> None:
        """Store rows that did not exist, or the rows of a checkpoint.

        Args:
          ids: the ids of the rows.
          rows: the rows of each array.
          changed: a number for the last change of each row, as in `RowSegment.changed`.
        """
        if self._directory is not None:
            self._directory.put(ids, self.append(ids, rows, changed))
            return
        for x, new in zip(self.arrays.values(), rows, strict=True):
            x[ids] = new
        self.changed_at[ids] = changed

    def append(
        self, ids: np.ndarray, rows: Sequence[np.ndarray], changed: np.ndarray | int
    ) -> np.ndarray:
        """Store rows that did not exist; return their slots, to be entered into the hash table.

        The arguments are those of `add`.
        """
        start, stop = self.count, self.count + len(ids)
        self._ids[start:stop] = ids
        for x, new in zip(self.arrays.values(), rows, strict=True):
            x[start:stop] = new
        self.changed_at[start:stop] = changed
        self.count = stop
        return np.arange(start, stop)

    def mark_missing(self, ids: np.ndarray, changed: np.ndarray) -> None:
        """Record rows of a checkpoint that do not exist: evicted, or counted by a row filter."""
        if self._directory is not None:
            self._directory.put(ids, changed)

    def to_move(self, slots: np.ndarray) -> np.ndarray:
        """Return the slots (indices in memory) of the rows that `remove` would move.

        Args:
          slots: as for `remove`.
        """
        left = self.count - len(slots)
        return np.setdiff1d(np.arange(left, self.count), slots, assume_unique=True)

    def remove(self, slots: np.ndarray, changed: int) -> None:
        """Remove rows, and free their memory. The last rows in memory move to the free places.

        Args:
          slots: increasing indices in memory of the rows to remove.
          changed: number to record for the removed rows, as in `RowSegment.changed`.
        """
        assert self._directory is not None
        left, moved = self.count - len(slots), self.to_move(slots)
        free = slots[slots < left]
        self._directory.put(self._ids[slots], np.full(len(slots), changed))
        for x in (*self.arrays.values(), *self._numbers):
            x[free] = x[moved]
        self._directory.put(self._ids[free], free)
        for area in self._lazy:
            area.give_back(left)
        self.count = left
