"""Memory for received blocks, reused between steps.

On CPU, `jax.device_put` does not copy host memory that is aligned to 64 bytes. The JAX array refers
to that memory until the array, and each computation that reads it, is deleted. So the pool reuses
memory only if CPython's reference count shows that nothing else refers to it. New memory in every
step would cause page faults, which take longer than the transfer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


ALIGNMENT = 64  # bytes; XLA:CPU does not copy host memory with this alignment


class BufferPool:
    """Pool of aligned arrays, each reused when nothing else refers to it.

    Args:
      alignment: alignment of each array in bytes, a power of two.

    Example:
      >>> from dtrans.protocol.buffers import BufferPool
      >>> pool = BufferPool()
      >>> a = pool.take("w", (2, 3), "float32")
      >>> a.shape, a.dtype.name, pool.take("w", (2, 3), "float32") is a
      ((2, 3), 'float32', False)
    """

    def __init__(self, alignment: int = ALIGNMENT) -> None:
        self._alignment = alignment
        self._owners: dict[tuple[Any, ...], list[np.ndarray]] = {}
        self._starts: dict[int, int] = {}  # id of an owner -> index of its first aligned byte

    def take(self, key: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return an array of undefined contents to which nothing else refers.

        Args:
          key: arrays are reused only under the same key.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        owners = self._owners.setdefault((key, nbytes), [])
        for i in range(len(owners)):
            # 2 references: the list, and the argument of getrefcount
            if sys.getrefcount(owners[i]) == 2:
                break
        else:
            i = len(owners)
            owners.append(np.empty(nbytes + self._alignment, np.uint8))
            self._starts[id(owners[i])] = -owners[i].ctypes.data % self._alignment
        start = self._starts[id(owners[i])]
        return owners[i][start : start + nbytes].view(dtype).reshape(shape)
