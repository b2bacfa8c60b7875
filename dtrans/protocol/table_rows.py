"""Which rows of a table a step looks up, and which of them each server has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtrans.errors import BatchError
from dtrans.protocol.served import RowGradient


# of a block that rows are asked of: its server, its name, the numbers of rows in it, increasing, and memory for them
WantedRows = tuple[str, str, np.ndarray, np.ndarray]


def unique_ids(ids: Sequence[Any], *, table: str, rows: int, size: int, whose: str = "") -> np.ndarray:
    """The numbers of rows in several arrays, unique and sorted; `rows` stands where there are fewer than `size`.

    Args:
      whose: the arrays are, for an error: " of trainer 1's part".

    Raises:
      BatchError: a number of a row that the table does not have.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.table_rows import unique_ids
      >>> unique_ids([np.array([[2, 5], [2, 0]])], table="params/emb", rows=9, size=4)
      array([0, 2, 5, 9], dtype=int32)
      >>> unique_ids([np.array([[2, 5], [2, 9]])], table="params/emb", rows=9, size=4)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      dtrans.errors.BatchError: lookup 0 of params/emb asks for row 9 at [1, 1]; the table has rows 0 to 8...
    """
    arrays = [np.asarray(x) for x in ids]
    for i, x in enumerate(arrays):
        if x.size and (x.min() < 0 or x.max() >= rows):
            at = np.unravel_index(np.argmax((x < 0) | (x >= rows)), x.shape)
            raise BatchError(
                f"lookup {i} of {table} asks for row {x[at]} at [{', '.join(map(str, at))}]{whose}; the table has "
                f"rows 0 to {rows - 1} (a negative number is counted from the end before it comes here)"
            )
    found = np.unique(np.concatenate([x.reshape(-1).astype(np.int32) for x in arrays]))
    return np.concatenate([found, np.full(size - len(found), rows, np.int32)])


def parts_of_rows(uniq: np.ndarray, sections: Sequence[int]) -> list[tuple[int, slice]]:
    """For each run of rows: which row it begins with, and where in sorted numbers its own are.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.table_rows import parts_of_rows
      >>> parts_of_rows(np.array([0, 2, 5, 9]), [4, 5])
      [(0, slice(0, 2, None)), (4, slice(2, 3, None))]
    """
    ends = np.cumsum([0, *sections])
    at = np.searchsorted(np.asarray(uniq), ends).tolist()
    return [(int(start), slice(a, b)) for start, a, b in zip(ends, at, at[1:], strict=False)]


def wanted_of(
    uniq: np.ndarray, rows: np.ndarray, *, epmap: Sequence[str], names: Sequence[str], sections: Sequence[int]
) -> list[WantedRows]:
    """What is to be asked of each block of a table, whose rows go into `rows`; these are zeros behind them.

    Args:
      uniq: sorted numbers; those that the table does not have stand for nothing.
      epmap, names, sections: the server, the name and the rows of each block.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.table_rows import wanted_of
      >>> rows = np.ones((3, 2))
      >>> where = {"epmap": ("here", "there"), "names": ("emb.block0", "emb.block1"), "sections": (4, 5)}
      >>> [(ep, name, ids.tolist(), len(x)) for ep, name, ids, x in wanted_of(np.array([0, 5, 9]), rows, **where)]
      [('here', 'emb.block0', [0], 1), ('there', 'emb.block1', [1], 1)]
    """
    parts = parts_of_rows(uniq, sections)
    rows[parts[-1][1].stop :] = 0
    return [(ep, n, uniq[at] - start, rows[at]) for ep, n, (start, at) in zip(epmap, names, parts, strict=True)]


def merged_rows(parts: Sequence[RowGradient], how: str) -> RowGradient:
    """The sum or the mean of gradients of rows, as one of all their rows: each is zero where it has no row.

    Args:
      how: "sum" or "mean".

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.served import RowGradient
      >>> from dtrans.protocol.table_rows import merged_rows
      >>> one, other = (RowGradient(np.array(ids), np.ones((2, 1))) for ids in ([1, 4], [0, 4]))
      >>> found = merged_rows([one, other], "mean")
      >>> found.ids.tolist(), found.rows.tolist()
      ([0, 1, 4], [[0.5], [0.5], [1.0]])
    """
    if len(parts) == 1:
        return parts[0]
    ids = np.unique(np.concatenate([x.ids for x in parts]))
    rows = np.zeros((len(ids), *parts[0].rows.shape[1:]), parts[0].rows.dtype)
    for x in parts:  # in the order in which they were made
        rows[np.searchsorted(ids, x.ids)] += x.rows
    if how == "mean":
        rows *= np.asarray(1 / len(parts), rows.dtype)
    return RowGradient(ids, rows)
