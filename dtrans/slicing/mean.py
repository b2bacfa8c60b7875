"""Mean or sum of the trainers' gradients, which a server computes before its update.

Paddle adds `sum` and `scale` ops to a server's program. Here, the reduction is not part of the
program: `OptimizeBlock.grads` describes it. So a server can change the reduction when a trainer
leaves the job. The server first decodes gradients that trainers sent in an encoded form.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax

from dtrans.ops import BlockGradient, OptimizeBlock


def reduce_gradients(gradient: BlockGradient, sent: Sequence[jax.Array], t: Any) -> jax.Array:
    """Merge the trainers' gradients of one block, as a server does before its update.

    Args:
      gradient: description of the gradient; its `op` is "mean", "sum", or "same" (take the first
        one).
      sent: the arrays that the trainers sent.
      t: shape and dtype of the result.
    """
    wire, op = gradient.wire, gradient.op
    grads = sent if wire is None else [wire.decode(x, t) for x in sent]
    if len(grads) == 1 or op == "same":
        return grads[0]
    total = functools.reduce(jax.lax.add, grads)
    if op == "mean":
        return total * (1 / len(grads))
    return total


def sent_by(block: OptimizeBlock, present: Collection[int]) -> OptimizeBlock:
    """Rewrite a server's program so that it reads gradients only of some trainers.

    A server calls this function after a trainer has left the job.

    Args:
      block: the program.
      present: indices of the remaining trainers.
    """
    grads = []
    for g in block.grads:
        sent = {k: n for k, n in g.sent.items() if k in present}
        grads.append(dataclasses.replace(g, sent=sent))
    return dataclasses.replace(block, grads=tuple(grads))
