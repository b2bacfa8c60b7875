"""Hash map from row ids to consecutive slots, with open addressing in NumPy arrays.

The memory of the map depends on the number of stored ids; large ids need no more memory.
"""

from __future__ import annotations

import numpy as np


FREE = -1  # value of an unused entry of the hash table, and result for an unknown id
LEAST = 64  # initial capacity, a power of two
# 2**32 divided by the golden ratio (Knuth): multiplication by it spreads neighbouring ids
FACTOR = np.uint32(2654435769)


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
        self._ids, self._count = np.zeros(LEAST, np.int32), 0
        self._places = np.full(2 * LEAST, FREE, np.int32)  # hash table: position -> slot

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> np.ndarray:
        """The ids, in the order of their slots."""
        return self._ids[: self._count]

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the slot of each id, and -1 for unknown ids."""
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
        """Add new ids, and assign the next slots to them. The ids must be unique."""
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
            # If several slots have the same position, NumPy stores the last of these slots. The
            # others try the next position.
            self._places[at[free]] = slots[free]
            on = self._places[at] != slots
            slots, at = slots[on], self._next(at[on])

    def _first(self, ids: np.ndarray) -> np.ndarray:
        mixed = ids.astype(np.uint32) * FACTOR
        return (mixed >> np.uint32(32 - (len(self._places) - 1).bit_length())).astype(np.int64)

    def _next(self, at: np.ndarray) -> np.ndarray:
        return (at + 1) & (len(self._places) - 1)
