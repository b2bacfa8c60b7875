"""The mean of what trainers send, which a server's blocks read; and the same without those who have left.

`sum` and `scale` in Paddle. It stands beside the equations of a block (`OptimizeBlock.grads`), not among them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import jax

from dtrans.ops import OptimizeBlock


def mean_of(*grads: jax.Array) -> jax.Array:
    """The sum, scaled by one over their number; of one gradient, that."""
    return grads[0] if len(grads) == 1 else functools.reduce(jax.lax.add, grads) * (1 / len(grads))


def mean_over(block: OptimizeBlock, present: Collection[int]) -> OptimizeBlock:
    """A block on the means of what some of the trainers send, one of them at least."""
    grads = tuple(dataclasses.replace(g, sent={k: n for k, n in g.sent.items() if k in present}) for g in block.grads)
    return dataclasses.replace(block, grads=grads)
