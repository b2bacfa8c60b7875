"""After: an array, once another is there.

    x = after x, y   []

Whatever gathers the result can neither begin earlier nor be merged with an equal gather elsewhere.
So a gathered array can be freed, and gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.ops.primitive import communication


def _over_axis(x: jax.Array, y: jax.Array) -> Sequence[Any]:
    """XLA keeps `optimization_barrier`, except on CPUs: there it removes it before it merges equal
    equations."""
    return [jax.lax.platform_dependent(x, y, cpu=_after_on_cpu, default=_after_elsewhere)]


def _after_on_cpu(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `x` by a choice that is always the same; XLA does not know that, for it looks at
    `y`."""
    one = jax.lax.slice(y, (0,) * y.ndim, (1,) * y.ndim).reshape(()).astype(jnp.float32)
    return jnp.where(jnp.logical_or(one == one, one != one), x, jnp.zeros_like(x))


def _after_elsewhere(x: jax.Array, y: jax.Array) -> jax.Array:
    made: jax.Array = jax.lax.optimization_barrier((x, y))[0]
    return made


# under vmap a barrier would give a slice, which all groups have, an axis for each group of what it
# waits for
after_p = communication(
    "after", lambda x, y: [x], over_axis=_over_axis, under_vmap=lambda x, y: [x]
)
