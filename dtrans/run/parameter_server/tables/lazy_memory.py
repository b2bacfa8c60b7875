"""Memory for embedding tables that may stay mostly unused.

The operating system allocates a page on its first write. Pages that are no longer used can be
freed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np


class LazyArray:
    """Array of zeros that uses memory only for pages that have been written.

    Args:
      shape: the shape; rows are dimension 0.
      dtype: the type of entries.

    Attributes:
      array: the NumPy array.

    Example:
      >>> from dtrans.run.parameter_server.tables.lazy_memory import LazyArray
      >>> memory = LazyArray((4096, 4), "float32")
      >>> memory.array[:] = 1
      >>> memory.give_back(1000)
      >>> float(memory.array[:1000].min())
      1.0
    """

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self._area = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # With huge pages, the first write of a row would allocate 2 MiB. A kernel without huge
            # pages raises OSError.
            with contextlib.suppress(OSError):
                self._area.madvise(mmap.MADV_NOHUGEPAGE)
        self.array = np.frombuffer(self._area, np.uint8)[:size].view(dtype).reshape(shape)

    def give_back(self, start: int) -> None:
        """Free the pages that contain only rows from `start` on."""
        begin = -(-start * self.array[:1].nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < len(self._area):
            self._area.madvise(mmap.MADV_DONTNEED, begin, len(self._area) - begin)
