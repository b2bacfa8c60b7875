"""Row ids of a step's lookups, and the blocks of a table that have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.errors import BatchError
from dtrans.protocol.server_blocks import RowGradient


# a lookup in a block: server, name, increasing row ids in the block, and memory for the rows
WantedRows = tuple[str, str, np.ndarray, np.ndarray]


def unique_ids(
    ids: Sequence[Any], *, table: str, rows: int, size: int, whose: str = ""
) -> np.ndarray:
    """Return the row ids in several arrays, unique and sorted, and padded with `rows` to
    `size`.

    Args:
      whose: the owner of the arrays, for an error: " of trainer 1's part".

    Raises:
      BatchError: a row number is not in the table, or is no integer.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.table_rows import unique_ids
      >>> unique_ids([np.array([[2, 5], [2, 0]])], table="params/emb", rows=9, size=4)
      array([0, 2, 5, 9], dtype=int32)
      >>> wrong = np.array([[2, 5], [2, 9]])
      >>> unique_ids([wrong], table="params/emb", rows=9, size=4)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      dtrans.errors.BatchError: lookup 0 of params/emb asks for row 9 at [1, 1]; the table has rows
        0 to 8...
    """
    arrays = [np.asarray(x) for x in ids]
    for i, x in enumerate(arrays):
        if not np.issubdtype(x.dtype, np.integer):
            first = f"row {x.flat[0]} at [{', '.join('0' * x.ndim)}]{whose}, " if x.size else ""
            raise BatchError(
                f"lookup {i} of {table} asks for {first}of {x.dtype.name}: row ids are integers"
            )
        if x.size and (x.min() < 0 or x.max() >= rows):
            at = np.unravel_index(np.argmax((x < 0) | (x >= rows)), x.shape)
            raise BatchError(
                f"lookup {i} of {table} asks for row {x[at]} at "
                f"[{', '.join(map(str, at))}]{whose}; the table has "
                f"rows 0 to {rows - 1} (a negative number is counted from the end before it comes "
                "here)"
            )
    found = sorted_once(np.concatenate([x.reshape(-1).astype(np.int32) for x in arrays]))
    return np.concatenate([found, np.full(size - len(found), rows, np.int32)])


def sorted_once(numbers: np.ndarray) -> np.ndarray:
    """Return the unique integers of a flat array, sorted: `numpy.unique` hashes them, in ten times
    the time."""
    found = np.sort(numbers)
    if not len(found):
        return found
    is_first = np.empty(len(found), bool)
    is_first[0] = True
    np.not_equal(found[1:], found[:-1], out=is_first[1:])
    return found[is_first]


def are_among(numbers: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return True for each number that is among others, both sorted and unique, as `numpy.isin`."""
    if not len(others):
        return np.zeros(len(numbers), bool)
    return np.asarray(
        others[np.minimum(np.searchsorted(others, numbers), len(others) - 1)] == numbers
    )


class BlockRowSet(Protocol):
    """Rows of a table that a block has."""

    @property
    def rows(self) -> int:
        """The number of rows."""

    def among(self, ids: np.ndarray) -> slice | np.ndarray:
        """Return the positions of these rows in increasing row ids of the table."""

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Return the row ids in the block from those in the table."""

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """Return the row ids in the table from those in the block."""


@dataclasses.dataclass(frozen=True)
class RowRun:
    """Consecutive rows from `start` on."""

    start: int
    rows: int

    def among(self, ids: np.ndarray) -> slice:
        """Return the positions of these rows in increasing row ids of the table."""
        return slice(*np.searchsorted(ids, (self.start, self.start + self.rows)).tolist())

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Return the row ids in the block from those in the table."""
        return ids - self.start

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """Return the row ids in the table from those in the block."""
        return places + self.start


def runs_of(sections: Sequence[int]) -> list[RowRun]:
    """Return consecutive runs of rows with these lengths."""
    return [RowRun(sum(sections[:i]), n) for i, n in enumerate(sections)]


def wanted_of(
    uniq: np.ndarray,
    rows: np.ndarray,
    *,
    epmap: Sequence[str],
    names: Sequence[str],
    spans: Sequence[BlockRowSet],
) -> list[WantedRows]:
    """Return the lookup in each block of a table, whose rows are received into `rows`; zeros pad
    them.

    If the rows of a block are not consecutive in `rows`, they get separate memory (`put_in_place`).

    Args:
      uniq: increasing row ids; ids beyond the table are padding.
      epmap, names, spans: server, name and rows of each block.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.table_rows import runs_of, wanted_of
      >>> rows = np.ones((3, 2))
      >>> names = ("emb.block0", "emb.block1")
      >>> blocks = {"epmap": ("here", "there"), "names": names, "spans": runs_of((4, 5))}
      >>> wanted = wanted_of(np.array([0, 5, 9]), rows, **blocks)
      >>> [(ep, name, ids.tolist(), len(x)) for ep, name, ids, x in wanted]
      [('here', 'emb.block0', [0], 1), ('there', 'emb.block1', [1], 1)]
    """
    rows[np.searchsorted(uniq, sum(x.rows for x in spans)) :] = 0
    places = [x.among(uniq) for x in spans]
    blocks = zip(epmap, names, spans, places, strict=True)
    return [(ep, n, x.local(uniq[at]), rows[at]) for ep, n, x, at in blocks]


def put_in_place(
    uniq: np.ndarray, rows: np.ndarray, wanted: Sequence[WantedRows], spans: Sequence[BlockRowSet]
) -> None:
    """Copy received rows to their places in `rows`, if `wanted_of` gave them separate memory."""
    for (*_, came), x in zip(wanted, spans, strict=True):
        at = x.among(uniq)
        if not isinstance(at, slice):
            rows[at] = came


def merged_rows(parts: Sequence[RowGradient], how: str) -> RowGradient:
    """Merge gradients of rows: their sum or mean, on the union of their rows.

    Args:
      how: "sum" or "mean".

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.server_blocks import RowGradient
      >>> from dtrans.protocol.tables.table_rows import merged_rows
      >>> one, other = (RowGradient(np.array(ids), np.ones((2, 1))) for ids in ([1, 4], [0, 4]))
      >>> found = merged_rows([one, other], "mean")
      >>> found.ids.tolist(), found.rows.tolist()
      ([0, 1, 4], [[0.5], [0.5], [1.0]])
    """
    if len(parts) == 1:
        return parts[0]
    ids = sorted_once(np.concatenate([x.ids for x in parts]))
    rows = np.zeros((len(ids), *parts[0].rows.shape[1:]), parts[0].rows.dtype)
    for x in parts:  # in the order of the steps: float sums depend on it
        rows[np.searchsorted(ids, x.ids)] += x.rows
    if how == "mean":
        rows *= np.asarray(1 / len(parts), rows.dtype)
    return RowGradient(ids, rows)
