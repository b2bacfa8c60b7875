"""A growing map from row ids to slots: open addressing in NumPy's memory.

Its memory grows with the added numbers, and not with their range.
"""

from __future__ import annotations

import numpy as np


FREE = -1
LEAST = 64  # initial capacity, a power of two
FACTOR = np.uint32(2654435769)  # 2**32 over the golden ratio (Knuth): it spreads neighbours


class IdSlots:
    """Map from each number to its slot: 0, 1, ... in the order in which they were added.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.id_slots import IdSlots
      >>> slots = IdSlots()
      >>> slots.add(np.array([7, 100_000_000]))
      >>> slots.find(np.array([100_000_000, 8, 7])).tolist(), len(slots)
      ([1, -1, 0], 2)
    """

    def __init__(self) -> None:
        self._ids, self._count = np.zeros(LEAST, np.int32), 0
        self._places = np.full(2 * LEAST, FREE, np.int32)  # slots

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> np.ndarray:
        """The numbers, in the order of their slots."""
        return self._ids[: self._count]

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the slots of numbers; -1 for a missing one."""
        found = np.full(len(ids), FREE, np.int32)
        ahead, at = np.arange(len(ids)), self._first(ids)
        while len(ahead):
            slots = self._places[at]
            here = slots != FREE
            same = here & (self._ids[np.where(here, slots, 0)] == ids[ahead])
            found[ahead[same]] = slots[same]
            on = here & ~same
            ahead, at = ahead[on], self._next(at[on])
        return found

    def add(self, ids: np.ndarray) -> None:
        """Add numbers that are not there, each once."""
        before, self._count = self._count, self._count + len(ids)
        size = len(self._ids)
        while size < self._count:
            size *= 2
        if size > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(size - len(self._ids), np.int32)])
            self._places = np.full(2 * size, FREE, np.int32)
            self._place(np.arange(before, dtype=np.int32))
        self._ids[before : self._count] = ids
        self._place(np.arange(before, self._count, dtype=np.int32))

    def _place(self, slots: np.ndarray) -> None:
        at = self._first(self._ids[slots])
        while len(slots):
            free = self._places[at] == FREE
            self._places[at[free]] = slots[free]  # one of several with the same place gets it
            on = self._places[at] != slots
            slots, at = slots[on], self._next(at[on])

    def _first(self, ids: np.ndarray) -> np.ndarray:
        mixed = ids.astype(np.uint32) * FACTOR
        return (mixed >> np.uint32(32 - (len(self._places) - 1).bit_length())).astype(np.int64)

    def _next(self, at: np.ndarray) -> np.ndarray:
        return (at + 1) & (len(self._places) - 1)
