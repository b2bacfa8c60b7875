"""Memory for received blocks, reused between steps.

Received parameters become JAX arrays without a copy. On CPU, `jax.device_put` takes host memory
that is aligned to 64 bytes as it is. It keeps the memory for as long as the array, or a computation
that reads it, lives. So the memory may be written again only if nothing else refers to it, and
CPython's reference count of the memory's owner tells that exactly. Fresh memory in every step would
cost more than the transfer, because of page faults.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


ALIGNMENT = 64  # XLA:CPU takes memory with this alignment without a copy


class BufferPool:
    """Aligned memory by key, handed out again when nothing refers to it.

    Args:
      alignment: of the first byte of each array, a power of two.

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
        self._starts: dict[int, int] = {}  # the first aligned byte of each owner, by its id

    def take(self, key: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return an array with undefined contents, which nothing else refers to."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        owners = self._owners.setdefault((key, nbytes), [])
        for i in range(len(owners)):
            # the list and getrefcount's own argument: nobody else refers to the owner
            if sys.getrefcount(owners[i]) == 2:
                break
        else:
            i = len(owners)
            owners.append(np.empty(nbytes + self._alignment, np.uint8))
            self._starts[id(owners[i])] = -owners[i].ctypes.data % self._alignment
        start = self._starts[id(owners[i])]
        return owners[i][start : start + nbytes].view(dtype).reshape(shape)
