"""Primitive `after`: delays an array until another array has been computed.

    x = after x, y   []

The result equals `x`, but depends on `y`. So a gather of the result starts after `y` is computed,
and XLA cannot merge this gather with an earlier gather of `x`. Sharded training uses this to save
memory: it frees a gathered array, and gathers it again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.ops.primitive import communication


def _over_axis(x: jax.Array, y: jax.Array) -> Sequence[Any]:
    """Return `x` with a dependency on `y`.

    An `optimization_barrier` is not enough on CPUs: XLA removes it before it merges equal
    equations.
    """
    return [jax.lax.platform_dependent(x, y, cpu=_after_on_cpu, default=_after_elsewhere)]


def _after_on_cpu(x: jax.Array, y: jax.Array) -> jax.Array:
    """Select `x` by a condition that reads `y` and is always true.

    XLA does not know that the condition is true, so it keeps the dependency.
    """
    one = jax.lax.slice(y, (0,) * y.ndim, (1,) * y.ndim).reshape(()).astype(jnp.float32)
    return jnp.where(jnp.logical_or(one == one, one != one), x, jnp.zeros_like(x))


def _after_elsewhere(x: jax.Array, y: jax.Array) -> jax.Array:
    result: jax.Array = jax.lax.optimization_barrier((x, y))[0]
    return result


# `x` is the same for all trainers. Under vmap a barrier would add the mapped axis of `y` to `x`.
after_p = communication(
    "after", lambda x, y: [x], over_axis=_over_axis, under_vmap=lambda x, y: [x]
)
