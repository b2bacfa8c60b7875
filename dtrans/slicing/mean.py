"""Mean or sum of the trainers' gradients, which a server's blocks read; also after trainers left.

It corresponds to Paddle's `sum` and `scale`. It is an attribute of a block (`OptimizeBlock.grads`)
and none of its equations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence

import jax

from dtrans.ops import OptimizeBlock


def reduce_gradients(op: str, grads: Sequence[jax.Array]) -> jax.Array:
    """Return the sum of gradients, or their mean; for "same", or a single one, the first."""
    if len(grads) == 1 or op == "same":
        return grads[0]
    total = functools.reduce(jax.lax.add, grads)
    return total * (1 / len(grads)) if op == "mean" else total


def sent_by(block: OptimizeBlock, present: Collection[int]) -> OptimizeBlock:
    """Return a block that reads the gradients of the trainers in `present`, at least one."""
    grads = []
    for g in block.grads:
        sent = {k: n for k, n in g.sent.items() if k in present}
        grads.append(dataclasses.replace(g, sent=sent))
    return dataclasses.replace(block, grads=tuple(grads))
