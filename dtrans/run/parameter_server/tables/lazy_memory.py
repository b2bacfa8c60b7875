"""Memory of tables. The system allocates a page on its first write; unused pages are freed."""

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
            # With huge pages, the first write of a row would allocate 2 MiB. A kernel without huge
            # pages raises OSError.
            with contextlib.suppress(OSError):
                self._area.madvise(mmap.MADV_NOHUGEPAGE)
        self.array = np.frombuffer(self._area, np.uint8)[:size].view(dtype).reshape(shape)

    def give_back(self, unused: np.ndarray, new: np.ndarray) -> None:
        """Free the pages that contain only unused rows.

        Args:
          unused: mask of the unused rows. The values of these rows are undefined afterwards.
          new: increasing ids of the rows that became unused after the last call.
        """
        row, page = self.array[:1].nbytes, mmap.PAGESIZE
        # A page is freed if it lies completely in a run of unused rows. An earlier call has freed
        # the pages of runs without a row in `new`.
        edges = np.flatnonzero(np.diff(unused, prepend=False, append=False))
        starts, stops = edges[::2], edges[1::2]
        begins, ends = -(-starts * row // page) * page, stops * row // page * page
        is_due = (ends > begins) & (np.searchsorted(new, stops) > np.searchsorted(new, starts))
        for begin, end in zip(begins[is_due].tolist(), ends[is_due].tolist(), strict=True):
            self._area.madvise(mmap.MADV_DONTNEED, begin, end - begin)
