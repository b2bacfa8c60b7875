"""Differences between platforms that plans and compilations heed; those of a collective are in its
file of `ops`.

XLA on CPUs gathers nothing beside computation, and divides by a number in another way where nothing
else reads that.
"""

from __future__ import annotations

import dataclasses

import jax

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


def as_written() -> dict[str, str] | None:
    """Options to compile a function with whose bits may not depend on what is compiled beside it.

    XLA makes `x * (1 / s)` of `x / s` where one equation alone reads the number `s`; so Adam on a
    server with one block would differ from Adam on one with two, whose corrections both read. On
    CPUs it can be told not to, and an optimizer is no slower then.
    """
    return {"xla_disable_hlo_passes": "algsimp"} if jax.default_backend() == "cpu" else None
