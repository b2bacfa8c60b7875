"""Arrays that are stored in several pieces, each with some of the rows.

A synchronous server updates a large parameter piece by piece. It stores and sends the pieces
separately, because a copy into one array would take about as long as the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class RowPieces:
    """Array with its rows in several smaller arrays, one after the other.

    NumPy functions convert the object to one array.

    Args:
      arrays: at least one array; the rows of each array follow the rows of the previous one.
      start: number of bytes of the full array before these rows; 0 for a complete array.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.row_pieces import RowPieces
      >>> np.asarray(RowPieces([np.zeros(2, np.int8), np.ones(1, np.int8)]))
      array([0, 0, 1], dtype=int8)
    """

    def __init__(self, arrays: Sequence[Any], start: int = 0) -> None:
        self.arrays, self.start = tuple(arrays), start

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that contains all rows."""
        return (sum(len(x) for x in self.arrays), *self.arrays[0].shape[1:])

    @property
    def dtype(self) -> Any:
        """Dtype of the rows."""
        return self.arrays[0].dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes of these rows."""
        return sum(x.nbytes for x in self.arrays)

    def copy_to(self, memory: np.ndarray) -> None:
        """Copy the rows to an array of the same shape and dtype."""
        at = 0
        for x in self.arrays:
            memory[at : at + len(x)] = np.asarray(x)
            at += len(x)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        memory = np.empty(self.shape, self.dtype)
        self.copy_to(memory)
        return memory if dtype is None else memory.astype(dtype)
