"""Which rows of a table a step looks up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.errors import BatchError
from dtrans.protocol.served import RowGradient


# of a block that rows are asked of: its server, its name, the numbers of rows in it, increasing,
# and memory for them
WantedRows = tuple[str, str, np.ndarray, np.ndarray]


def unique_ids(
    ids: Sequence[Any], *, table: str, rows: int, size: int, whose: str = ""
) -> np.ndarray:
    """The numbers of rows in several arrays, unique and sorted; `rows` stands where there are fewer
    than `size`.

    Args:
      whose: the arrays are, for an error: " of trainer 1's part".

    Raises:
      BatchError: a number of a row that the table does not have, or one that is no integer.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.table_rows import unique_ids
      >>> unique_ids([np.array([[2, 5], [2, 0]])], table="params/emb", rows=9, size=4)
      array([0, 2, 5, 9], dtype=int32)
      >>> unique_ids([np.array([[2, 5], [2, 9]])], table="params/emb", rows=9, size=4)  # doctest: +ELLIPSIS
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
                f"lookup {i} of {table} asks for {first}of {x.dtype.name}: numbers of rows are "
                "integers"
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
    """The numbers of a flat array, sorted, each once: as `numpy.unique`, which hashes them, in a
    tenth of its time."""
    found = np.sort(numbers)
    if not len(found):
        return found
    is_first = np.empty(len(found), bool)
    is_first[0] = True
    np.not_equal(found[1:], found[:-1], out=is_first[1:])
    return found[is_first]


def are_among(numbers: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of some numbers are among others, both sorted, each once: as `numpy.isin`."""
    if not len(others):
        return np.zeros(len(numbers), bool)
    return np.asarray(
        others[np.minimum(np.searchsorted(others, numbers), len(others) - 1)] == numbers
    )


class BlockRowSet(Protocol):
    """Which rows of a table a block has."""

    @property
    def rows(self) -> int:
        """How many."""

    def among(self, ids: np.ndarray) -> slice | np.ndarray:
        """Where in increasing numbers those of these rows are."""

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Where rows of these are among them, by their numbers in the table."""

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """The numbers of rows in the table, by where they are among these."""


@dataclasses.dataclass(frozen=True)
class RowRun:
    """Rows from `start` on."""

    start: int
    rows: int

    def among(self, ids: np.ndarray) -> slice:
        """Where in increasing numbers those of these rows are."""
        return slice(*np.searchsorted(ids, (self.start, self.start + self.rows)).tolist())

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Where rows of these are among them, by their numbers in the table."""
        return ids - self.start

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """The numbers of rows in the table, by where they are among these."""
        return places + self.start


def runs_of(sections: Sequence[int]) -> list[RowRun]:
    """Runs of so many rows, one behind the other."""
    return [RowRun(sum(sections[:i]), n) for i, n in enumerate(sections)]


def wanted_of(
    uniq: np.ndarray,
    rows: np.ndarray,
    *,
    epmap: Sequence[str],
    names: Sequence[str],
    spans: Sequence[BlockRowSet],
) -> list[WantedRows]:
    """What is to be asked of each block of a table, whose rows go into `rows`; these are zeros
    behind them.

    Where a block's rows do not lie one behind the other in `rows`, they come to memory of their own
    (`put_in_place`).

    Args:
      uniq: increasing numbers; those that the table does not have stand for nothing.
      epmap, names, spans: the server, the name and the rows of each block.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.table_rows import runs_of, wanted_of
      >>> rows = np.ones((3, 2))
      >>> where = {"epmap": ("here", "there"), "names": ("emb.block0", "emb.block1"), "spans": runs_of((4, 5))}
      >>> [(ep, name, ids.tolist(), len(x)) for ep, name, ids, x in wanted_of(np.array([0, 5, 9]), rows, **where)]
      [('here', 'emb.block0', [0], 1), ('there', 'emb.block1', [1], 1)]
    """
    rows[np.searchsorted(uniq, sum(x.rows for x in spans)) :] = 0
    places = [x.among(uniq) for x in spans]
    blocks = zip(epmap, names, spans, places, strict=True)
    return [(ep, n, x.local(uniq[at]), rows[at]) for ep, n, x, at in blocks]


def put_in_place(
    uniq: np.ndarray, rows: np.ndarray, wanted: Sequence[WantedRows], spans: Sequence[BlockRowSet]
) -> None:
    """Let rows that have come be where `wanted_of` was to have them."""
    for (*_, came), x in zip(wanted, spans, strict=True):
        at = x.among(uniq)
        if not isinstance(at, slice):
            rows[at] = came


def merged_rows(parts: Sequence[RowGradient], how: str) -> RowGradient:
    """The sum or the mean of gradients of rows, as one of all their rows: each is zero where it has
    no row.

    Args:
      how: "sum" or "mean".

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.served import RowGradient
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
    for x in parts:  # in the order in which they were made
        rows[np.searchsorted(ids, x.ids)] += x.rows
    if how == "mean":
        rows *= np.asarray(1 / len(parts), rows.dtype)
    return RowGradient(ids, rows)
