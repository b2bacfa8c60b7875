"""Split of an array into its blocks (ranges of rows), and the inverse: concatenation of blocks.

    blocks... = split_byref X      [sections]
    X         = concat blocks...   [axis=0]

A job of several processes runs both primitives without copies. A block of a gradient is a view of
the gradient's buffer, and a received block is written into the rows of its parameter. On a mesh,
XLA compiles both primitives.

Source: paddle/fluid/operators/distributed_ops/split_byref_op.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrans.ops.primitive import communication


def _split(x: Any, *, sections: Sequence[int]) -> list[Any]:
    assert sum(sections) == x.shape[0]
    return [x.update(shape=(rows, *x.shape[1:])) for rows in sections]


def _concat(*blocks: Any, axis: int) -> list[Any]:
    shape = list(blocks[0].shape)
    shape[axis] = sum(b.shape[axis] for b in blocks)
    return [blocks[0].update(shape=tuple(shape))]


split_byref_p = communication("split_byref", _split)
concat_p = communication("concat", _concat)
