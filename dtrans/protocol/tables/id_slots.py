"""Slots (positions in arrays) of table rows: each new row id gets the next slot."""

from __future__ import annotations

import numpy as np

from dtrans.protocol.tables.row_directory import RowDirectory


LEAST = 64  # initial number of slots


class IdSlots:
    """Map from each id to its slot: 0, 1, ... in the order in which the ids were added.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.id_slots import IdSlots
      >>> slots = IdSlots()
      >>> slots.add(np.array([7, 100_000_000]))
      >>> slots.find(np.array([100_000_000, 8, 7])).tolist(), len(slots)
      ([1, -1, 0], 2)
    """

    def __init__(self) -> None:
        self._ids, self._directory = np.zeros(LEAST, np.int32), RowDirectory()

    def __len__(self) -> int:
        return len(self._directory)

    @property
    def ids(self) -> np.ndarray:
        """The ids, in the order of their slots."""
        return self._ids[: len(self)]

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the slot of each id, and -1 for unknown ids."""
        return self._directory.find(ids)

    def add(self, ids: np.ndarray) -> None:
        """Add new ids, and assign the next slots to them. The ids must be unique."""
        before, count = len(self), len(self) + len(ids)
        if count > len(self._ids):
            size = max(count, 2 * len(self._ids))
            self._ids = np.concatenate([self.ids, np.zeros(size - before, np.int32)])
        self._ids[before:count] = ids
        self._directory.put(ids, np.arange(before, count))
