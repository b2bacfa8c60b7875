"""Memory that is received into, and kept.

Received parameters become JAX arrays without a copy: on CPU, `jax.device_put` of host memory
aligned to 64 bytes takes it as it is, and holds on to it for as long as the array, or a computation
that reads it, lives. So the memory may be written again only when nobody else refers to it, which
CPython's reference count of the memory's owner tells exactly. Fresh memory for every step would
cost more than the wire (page faults).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np


ALIGNMENT = 64  # what XLA:CPU asks of memory that it takes without a copy


class BufferPool:
    """Aligned memory by key, handed out again when nothing refers to it any more.

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
        """An array whose contents are not defined, and which nobody else can see."""
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
