"""Memory into which arrays are received, reused between steps.

On CPU, `jax.device_put` does not copy host memory that is aligned to 64 bytes. The JAX array uses
that memory until JAX deletes the array, and all computations that read the array have ended. So the
pool reuses memory only if CPython's reference count shows that nothing else refers to the memory.
New memory in every step would cause page faults, which take longer than the transfer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


ALIGNMENT = 64  # bytes; XLA:CPU does not copy host memory with this alignment


class BufferPool:
    """Pool of arrays into which messages are received, aligned so that JAX need not copy them.

    An array is reused when only the pool refers to it.

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
        # id() of an array of bytes in the pool -> index of its first aligned byte
        self._starts: dict[int, int] = {}

    def take(self, key: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return an array with undefined contents: an unused one of the pool, or a new one.

        Args:
          key: name of the array; an array is reused only for the key that it was created with.
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
