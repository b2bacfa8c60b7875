"""Hash table from the ids of table rows to small integers, stored in NumPy arrays.

For example, it maps a row's id to its position in memory. All ids of a batch are looked up at once.
Entries are in two arrays, at the positions that linear probing selects. Entries are never deleted.
So a thread may look up an id while another thread adds other ids.

The tables of one server are *parts* of one hash table. So one search finds the rows that a step
looks up in all tables, however many tables there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


MISSING = -1  # the number of an id without an entry
_EMPTY = np.iinfo(np.int64).min  # the id of an unused position
_LEAST = 64  # minimum number of positions
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio (Fibonacci hashing)


class RowDirectory:
    """Hash table from ids of rows to numbers.

    At most half of the positions in its arrays are used. An entry takes 32 to 64 bytes in a large
    table.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.row_directory import RowDirectory
      >>> directory = RowDirectory()
      >>> directory.put(np.array([7, 10**12]), np.array([0, 1]))
      >>> directory.find(np.array([10**12, 8])).tolist()
      [1, -1]
    """

    def __init__(self) -> None:
        self._count = 0
        self._entries = _allocate(_LEAST)  # the ids and the numbers, by position

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of all positions."""
        return sum(x.nbytes for x in self._entries)

    def items(self, among: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids, or the ids in `among`, in increasing order, and the number of each id."""
        ids, numbers = self._entries
        is_listed = ids != _EMPTY
        if among is not None:
            is_listed = (ids >= among.start) & (ids < among.stop)
        used = np.flatnonzero(is_listed)
        # One copy of the ids is sorted and returned, because another thread may add ids meanwhile.
        ids, numbers = ids[used], numbers[used]
        order = np.argsort(ids)
        return ids[order], numbers[order]

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each id; `MISSING` for ids without an entry."""
        found = np.full(len(ids), MISSING, np.int64)
        known, numbers = self._entries
        wanted, places, at = ids, np.arange(len(ids)), _hash(ids, len(known))
        while len(wanted):
            there = known[at]
            is_found = there == wanted
            found[places[is_found]] = numbers[at[is_found]]
            goes_on = ~is_found & (there != _EMPTY)
            wanted, places = wanted[goes_on], places[goes_on]
            at = (at[goes_on] + 1) & (len(known) - 1)
        return found

    def put(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Set the number of each id. The ids must be unique."""
        size = len(self._entries[0])
        if 2 * (self._count + len(ids)) > size:
            # Ids that already have an entry need no new position.
            count = self._count + int((self.find(ids) == MISSING).sum())
            if 2 * count > size:
                self._grow(count)
        self._count += _write(self._entries, ids, numbers)

    def _grow(self, count: int) -> None:
        """Move all entries to larger arrays, with twice as many positions as `count` or more."""
        entries = _allocate(max(_LEAST, 1 << (2 * count - 1).bit_length()))
        _write(entries, *self.items())
        self._entries = entries


class DirectoryPart:
    """Entries of one table's rows, in a hash table that several tables of a server share.

    Args:
      directory: the hash table.
      among: range of ids in the hash table. Row i of this table has the i-th id of the range.

    Attributes:
      count: the number of the block's entries.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.row_directory import DirectoryPart, RowDirectory
      >>> directory = RowDirectory()
      >>> some, others = (DirectoryPart(directory, range(n, n + 10)) for n in (0, 10))
      >>> others.put(np.array([7]), np.array([0]))
      >>> some.find(np.array([7])).tolist(), others.find(np.array([7])).tolist()
      ([-1], [0])
    """

    def __init__(self, directory: RowDirectory, among: range) -> None:
        self.directory, self.among = directory, among
        self.count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the shared hash table that this table's rows take."""
        return self.directory.nbytes * self.count // max(1, len(self.directory))

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of this table's rows in increasing order, and the number of each row."""
        keys, numbers = self.directory.items(self.among)
        return keys - self.among.start, numbers

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each row; `MISSING` for rows without an entry."""
        return find_together([self], [ids])

    def put(self, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Set the number of each row. The rows must be unique."""
        put_together([self], [ids], [numbers], [self.find(ids)])


def find_together(parts: Sequence[DirectoryPart], ids: Sequence[np.ndarray]) -> np.ndarray:
    """Look up rows of several tables by one search of the hash table that they share.

    Args:
      parts: the entries of each table.
      ids: the row ids to look up in each table.

    Returns:
      The numbers of all rows, in the order of the parts; `MISSING` for rows without an entry.
    """
    return parts[0].directory.find(_keys(parts, ids))


def _keys(parts: Sequence[DirectoryPart], ids: Sequence[np.ndarray]) -> np.ndarray:
    """Return the ids in the hash table that stand for the rows of several parts."""
    keys = np.concatenate(ids, dtype=np.int64)
    starts = [part.among.start for part in parts]
    keys += np.repeat(starts, list(map(len, ids)))
    return keys


def put_together(
    parts: Sequence[DirectoryPart],
    ids: Sequence[np.ndarray],
    numbers: Sequence[np.ndarray],
    before: Sequence[np.ndarray],
) -> None:
    """Set the numbers of rows of several tables, which share one hash table.

    Args:
      parts: the entries of each table.
      ids: the row ids of each table, which must be unique.
      numbers: the number of each of these rows.
      before: the result of `find` for the rows of each table.
    """
    parts[0].directory.put(_keys(parts, ids), np.concatenate(numbers))
    for part, found in zip(parts, before, strict=True):
        part.count += int(np.count_nonzero(found == MISSING))


def _allocate(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(size, _EMPTY, np.int64), np.full(size, MISSING, np.int64)


def _hash(ids: np.ndarray, size: int) -> np.ndarray:
    """Return the first position of each id; `size` is a power of two."""
    bits = np.uint64(65 - int(size).bit_length())
    return ((ids.astype(np.int64).view(np.uint64) * _FACTOR) >> bits).view(np.int64)


def _write(entries: tuple[np.ndarray, np.ndarray], ids: np.ndarray, numbers: np.ndarray) -> int:
    """Store the number of each id in the arrays of a hash table; return how many ids are new."""
    known, values = entries
    at, added = _hash(ids, len(known)), 0
    while len(ids):
        free = known[at] == _EMPTY
        known[at[free]] = ids[free]  # Of several ids with one position, NumPy stores one.
        is_placed = known[at] == ids
        values[at[is_placed]] = numbers[is_placed]
        added += int((free & is_placed).sum())
        ids, numbers = ids[~is_placed], numbers[~is_placed]
        at = (at[~is_placed] + 1) & (len(known) - 1)
    return added
