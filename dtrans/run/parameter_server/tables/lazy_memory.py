"""Memory of tables: the system gives a page when it is written to, and gets it back when no row in
it is there."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np


class LazyArray:
    """An array of zeros in such memory.

    Args:
      shape: rows first.
      dtype: of its entries.

    Attributes:
      array: it.

    Example:
      >>> import numpy as np
      >>> from dtrans.run.parameter_server.tables.lazy_memory import LazyArray
      >>> memory = LazyArray((4096, 4), "float32")
      >>> memory.array[:] = 1
      >>> memory.give_back(np.arange(4096) < 4000, np.array([7]))
      >>> float(memory.array[4000:].min())
      1.0
    """

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self._area = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(
                OSError
            ):  # a kernel that has no huge pages does not know the word
                self._area.madvise(mmap.MADV_NOHUGEPAGE)  # a row would take 2 MiB
        self.array = np.frombuffer(self._area, np.uint8)[:size].view(dtype).reshape(shape)

    def give_back(self, unused: np.ndarray, new: np.ndarray) -> None:
        """Give back the pages in which no row is used.

        Args:
          unused: of each row, whether it is; it holds anything afterwards.
          new: the numbers of those that were used until now, increasing.
        """
        row, page = self.array[:1].nbytes, mmap.PAGESIZE
        edges = np.flatnonzero(np.diff(unused, prepend=False, append=False))
        starts, stops = edges[::2], edges[1::2]
        begins, ends = -(-starts * row // page) * page, stops * row // page * page
        is_due = (ends > begins) & (np.searchsorted(new, stops) > np.searchsorted(new, starts))
        for begin, end in zip(begins[is_due].tolist(), ends[is_due].tolist(), strict=True):
            self._area.madvise(mmap.MADV_DONTNEED, begin, end - begin)
