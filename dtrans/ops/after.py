"""After: an array, once another exists.

    x = after x, y   []

A gather of the result cannot start earlier, nor merge with an equal gather elsewhere. A gathered
array can then be freed, and gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.ops.primitive import communication


def _over_axis(x: jax.Array, y: jax.Array) -> Sequence[Any]:
    """Return `x` after a barrier.

    XLA keeps `optimization_barrier`, except on CPUs, where it removes it before it merges equal
    equations.
    """
    return [jax.lax.platform_dependent(x, y, cpu=_after_on_cpu, default=_after_elsewhere)]


def _after_on_cpu(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `x` by a selection that is always true, which XLA cannot know since it reads `y`."""
    one = jax.lax.slice(y, (0,) * y.ndim, (1,) * y.ndim).reshape(()).astype(jnp.float32)
    return jnp.where(jnp.logical_or(one == one, one != one), x, jnp.zeros_like(x))


def _after_elsewhere(x: jax.Array, y: jax.Array) -> jax.Array:
    result: jax.Array = jax.lax.optimization_barrier((x, y))[0]
    return result


# Under vmap a barrier would add the batch axis of `y` to `x`, which all groups share.
after_p = communication(
    "after", lambda x, y: [x], over_axis=_over_axis, under_vmap=lambda x, y: [x]
)
