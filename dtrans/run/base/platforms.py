"""Differences between platforms that affect plans and compiler options.

On CPUs, XLA does not overlap an all-gather with computation, and an option disables XLA's rewrite
of divisions (`stable_bits_options`). If a difference affects only one collective, the collective's
module in `dtrans.ops` describes it.
"""

from __future__ import annotations

import dataclasses

import jax

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.zero.plan import ShardingPlan


def resolve_for_platform(plan: CollectivePlan, platform: str = "") -> CollectivePlan:
    """Set options that the user left unset, to the best values for a platform.

    On CPUs, loops of ZeRO stage 3 do not prefetch the next layer, because all-gathers do not
    overlap with computation. A prefetch would only cost the memory of a layer.

    Args:
      plan: the plan.
      platform: JAX's name of the platform: "cpu", "gpu", "tpu".
    """
    if not isinstance(plan, ShardingPlan):
        return plan
    o = plan.options
    is_open = o.slices.prefetch is None and o.prefetch > 0 and o.prefetches_in_loops
    if platform != "cpu" or o.stage < 3 or not is_open:
        return plan
    replanned: ShardingPlan = plan.replan(dataclasses.replace(o, prefetches_in_loops=False))
    return replanned


def stable_bits_options() -> dict[str, str] | None:
    """Return compiler options with which equal equations have equal bits in different programs.

    Several servers compile different programs for parts of one update, and must round equally.
    XLA's algebraic simplifier rewrites `x / s` to `x * (1 / s)` if only one equation reads `s`,
    such as Adam's bias correction. A server that stores two parameters has two such equations, and
    keeps `x / s`. So it would round differently from a server that stores one. On CPUs, the options
    disable the simplifier. This does not make optimizers slower.

    Returns:
      Options for `jax.jit(compiler_options=...)`; None on other platforms.
    """
    if jax.default_backend() != "cpu":
        return None
    return {"xla_disable_hlo_passes": "algsimp"}
