"""Which rows of a table a step looks up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtrans.errors import BatchError


def unique_ids(ids: Sequence[Any], *, table: str, rows: int, size: int) -> np.ndarray:
    """The numbers of rows in several arrays, unique and sorted; `rows` stands where there are fewer than `size`.

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
                f"lookup {i} of {table} asks for row {x[at]} at [{', '.join(map(str, at))}]; the table has rows 0 to "
                f"{rows - 1} (a negative number is counted from the end before it comes here)"
            )
    found = np.unique(np.concatenate([x.reshape(-1).astype(np.int32) for x in arrays]))
    return np.concatenate([found, np.full(size - len(found), rows, np.int32)])
