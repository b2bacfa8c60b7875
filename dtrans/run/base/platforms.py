"""What one platform alone needs: all differences between them that are carried out, or planned, by dtrans.

XLA on CPUs gathers nothing beside computation, scatters wrongly over Gloo before JAX 0.12, drops barriers early, and
divides by a number in another way where nothing else reads that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import gloo_scatters_wrongly
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.zero.plan import ShardingPlan


def as_run_on(plan: CollectivePlan, platform: str = "") -> CollectivePlan:
    """The same plan as a job on a platform runs it: what was left open is chosen.

    On CPUs to gather ahead in loops costs the memory of a layer, and gains nothing.

    Args:
      platform: "cpu", "gpu", "tpu", ..., as JAX calls it.
    """
    if not isinstance(plan, ShardingPlan):
        return plan
    o = plan.options
    is_open = o.slices.prefetch is None and o.prefetch > 0 and o.prefetches_in_loops
    if platform != "cpu" or o.stage < 3 or not is_open:
        return plan
    replanned: ShardingPlan = plan.replan(dataclasses.replace(o, prefetches_in_loops=False))
    return replanned


def reduce_scatter(*xs: Any, over: tuple[str, ...], axis: int, **_: Any) -> Sequence[Any]:
    """A reduce-scatter; over Gloo one that is right."""
    scatter = partial(jax.lax.psum_scatter, axis_name=over, scatter_dimension=axis, tiled=True)
    if not gloo_scatters_wrongly():
        return [scatter(x) for x in xs]
    reduce = partial(_reduce_and_slice, over=over, axis=axis)
    return [jax.lax.platform_dependent(x, cpu=reduce, default=scatter) for x in xs]


def _reduce_and_slice(x: jax.Array, *, over: tuple[str, ...], axis: int) -> jax.Array:
    """A reduce-scatter as an all-reduce, of which each trainer takes its part."""
    part = x.shape[axis] // jax.lax.axis_size(over)
    start = jax.lax.axis_index(over) * part
    made: jax.Array = jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, over), start, part, axis)
    return made


def after(x: jax.Array, y: jax.Array) -> Sequence[Any]:
    """XLA keeps to `optimization_barrier`, except for CPUs: there it goes before equal equations are made one."""
    return [jax.lax.platform_dependent(x, y, cpu=_after_on_cpu, default=_after_elsewhere)]


def as_written() -> dict[str, str] | None:
    """Options to compile a function with whose bits may not depend on what is compiled beside it.

    XLA makes `x * (1 / s)` of `x / s` where one equation alone reads the number `s`; so Adam on a server with one block
    would differ from Adam on one with two, whose corrections both read. On CPUs it can be told not to, and an optimizer
    is no slower then.
    """
    return {"xla_disable_hlo_passes": "algsimp"} if jax.default_backend() == "cpu" else None


def _after_on_cpu(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x`, by a choice that is always the same; XLA does not know that, for it looks at `y`."""
    one = jax.lax.slice(y, (0,) * y.ndim, (1,) * y.ndim).reshape(()).astype(jnp.float32)
    return jnp.where(jnp.logical_or(one == one, one != one), x, jnp.zeros_like(x))


def _after_elsewhere(x: jax.Array, y: jax.Array) -> jax.Array:
    made: jax.Array = jax.lax.optimization_barrier((x, y))[0]
    return made
