"""Mean or sum of the trainers' gradients on a server.

Paddle adds `sum` and `scale` ops to an optimize block. Here `OptimizeBlock.grads` records the
reduction, so that a server can change it when trainers leave.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence

import jax

from dtrans.ops import OptimizeBlock


def reduce_gradients(op: str, grads: Sequence[jax.Array]) -> jax.Array:
    """Return the "sum" or "mean" of gradients; for "same", return the first gradient."""
    if len(grads) == 1 or op == "same":
        return grads[0]
    total = functools.reduce(jax.lax.add, grads)
    if op == "mean":
        return total * (1 / len(grads))
    return total


def sent_by(block: OptimizeBlock, present: Collection[int]) -> OptimizeBlock:
    """Rewrite a server's program to read only the gradients of the trainers in `present`."""
    grads = []
    for g in block.grads:
        sent = {k: n for k, n in g.sent.items() if k in present}
        grads.append(dataclasses.replace(g, sent=sent))
    return dataclasses.replace(block, grads=tuple(grads))
