"""The mean or sum of what trainers send, which a server's blocks read; and the same without those
who have left.

`sum` and `scale` in Paddle. It stands beside the equations of a block (`OptimizeBlock.grads`), not
among them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence

import jax

from dtrans.ops import OptimizeBlock


def made_one(op: str, grads: Sequence[jax.Array]) -> jax.Array:
    """The sum of gradients; for "mean" scaled by one over their number; of one, or of what is the
    "same", that."""
    if len(grads) == 1 or op == "same":
        return grads[0]
    total = functools.reduce(jax.lax.add, grads)
    return total * (1 / len(grads)) if op == "mean" else total


def sent_by(block: OptimizeBlock, present: Collection[int]) -> OptimizeBlock:
    """A block on what some of the trainers send, one of them at least."""
    grads = tuple(
        dataclasses.replace(g, sent={k: n for k, n in g.sent.items() if k in present})
        for g in block.grads
    )
    return dataclasses.replace(block, grads=grads)
