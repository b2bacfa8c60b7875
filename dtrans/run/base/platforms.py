"""Differences between platforms that affect plans and compiler options.

On CPUs, XLA does not overlap an all-gather with computation, and its rewrite of divisions can be
disabled (`stable_bits_options`). A difference that affects one collective is in the module of this
collective in `dtrans.ops`.
"""

from __future__ import annotations

import dataclasses

import jax

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.zero.plan import ShardingPlan


def resolve_for_platform(plan: CollectivePlan, platform: str = "") -> CollectivePlan:
    """Return the plan with defaults for a platform, where the user left options unset.

    On CPUs, loops of stage 3 do not prefetch: since all-gathers do not overlap with computation, a
    prefetch would only cost the memory of a layer.

    Args:
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
    """Return compiler options with which an equation has the same bits in every program.

    XLA's algebraic simplifier rewrites `x / s` to `x * (1 / s)` if only one equation reads `s`. So
    Adam on a server with one block would differ from Adam on a server with two blocks, which both
    read the bias correction. These options disable the pass on CPUs, where an optimizer is no
    slower without it.

    Returns:
      Options for `jax.jit(compiler_options=...)`; None on other platforms.
    """
    if jax.default_backend() != "cpu":
        return None
    return {"xla_disable_hlo_passes": "algsimp"}
