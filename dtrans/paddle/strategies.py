"""Paddle's names for sharding, over `dtrans.sharding`.

The names are those of `DistributedStrategy.sharding_configs` (fleet), and of the `sharding`, `amp`
and `gradient_merge` parts of `Strategy` (auto parallel). What has no name in Paddle keeps its own:
`merge`, `prefetch`, `min_slice_size`. The module is a table of names, and the few options whose
values differ.

Source: python/paddle/distributed/fleet/meta_optimizers/sharding_optimizer.py and
python/paddle/distributed/passes/auto_parallel_sharding.py.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from dtrans.checks import check_known, check_one_of, grouped
from dtrans.data_parallel.options import Reduce
from dtrans.errors import ConfigError, options_named
from dtrans.ir.program import Program
from dtrans.step.batch_sharing import Batch
from dtrans.zero.options import LossScaling, Precision, Slicing
from dtrans.zero.plan import ShardingPlan
from dtrans.zero.transform import sharding as sharding_of


# The options of `dtrans.sharding`, and the fields of its records, that have other names in Paddle.
NAMES = {
    "degree": "sharding_degree",
    "replicas": "dp_degree",
    "num_micro_batch": "gradient_merge_acc_step",
    "precision": "amp_dtype",
    "partition": "partition_algor",
    "gather_bucket_MB": "segment_broadcast_MB",
    "overlap": "enable_overlap",
    "bucket_MB": "fuse_grad_size_in_MB",
    "chains": "comm_stream_num",
    "loss_scaling": "init_loss_scaling",
    "initial": "init_loss_scaling",
    "factor": "incr_ratio",
    "interval": "incr_every_n_steps",
}

RECORDS = {"slices": Slicing(), "reduce": Reduce(), "batch": Batch("local")}


# Paddle's other options: the value that asks for nothing, and what to use in place of any other.
ELSEWHERE: dict[str, tuple[Any, str]] = {
    "mp_degree": (1, "dtrans.pipeline has tensor parallelism: mark the layers with dtrans.split"),
    "pp_degree": (
        1,
        "dtrans.pipeline has stages, and shards their state with StageMemory(sharding_stage=...)",
    ),
    "hybrid_dp": (False, "dp_degree says how many groups of ranks there are"),
    "sharding_segment_strategy": (
        "segment_broadcast_MB",
        "segments are always cut by segment_broadcast_MB",
    ),
    "segment_anchors": (None, "segments are always cut by segment_broadcast_MB"),
    "optimize_cast": (
        False,
        "with amp=True parameters are gathered in 16 bits, and each rank casts its slices",
    ),
    "optimize_offload": (
        False,
        "dtrans.pipeline(memory=dtrans.StageMemory(offload=True)) keeps parameters and state on "
        "the host",
    ),
    "decr_every_n_nan_or_inf": (1, "the scale decreases with each step that is not finite"),
}


def sharding(
    main: Program,
    startup: Program,
    *,
    stage: int = 1,
    sharding_degree: int = 8,
    dp_degree: int = 1,
    partition_algor: str = "rows",
    fuse_grad_size_in_MB: float = 32,
    segment_broadcast_MB: float = 32,
    enable_overlap: bool = True,
    comm_stream_num: int = 1,
    gradient_merge_acc_step: int = 1,
    amp: bool = False,
    amp_dtype: str = "float16",
    init_loss_scaling: float = 32768.0,
    use_dynamic_loss_scaling: bool = True,
    incr_every_n_steps: int = 1000,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    **options: Any,
) -> ShardingPlan:
    """Plan sharding (ZeRO) with Paddle's names for the options.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      stage: 1, 2 or 3: ranks share the optimizer's state, gradients too, parameters too.
      sharding_degree: the number of ranks of a group, which share one copy of the state.
      dp_degree: the number of groups.
      partition_algor: "rows" cuts each parameter; Paddle's "greedy_even" and "use_order" give whole
        ones to ranks.
      fuse_grad_size_in_MB: gradients are reduced together up to this size.
      segment_broadcast_MB: parameters are gathered together up to this size, in stage 3.
      enable_overlap: let collectives run beside computation.
      comm_stream_num: how many chains of reductions may run beside each other; 1 leaves that to
        XLA.
      gradient_merge_acc_step: into how many micro-steps each rank cuts its part of the batch.
      amp: compute products of matrices in 16 bits.
      amp_dtype: "float16" or "bfloat16".
      init_loss_scaling: the first scale of the loss; for "float16" alone.
      use_dynamic_loss_scaling: let the scale follow the gradients.
      incr_every_n_steps: after how many steps whose gradients are finite the scale grows.
      incr_ratio: the factor by which it grows.
      decr_ratio: the factor by which it shrinks after a step that is not finite: 1 / incr_ratio.
      **options: `reduce` ("mean" or "sum") and `batch` of `dtrans.sharding`, and the fields of its
        records that Paddle has no name for; Paddle's other options may be given with the value that
        asks for nothing.

    Returns:
      The plan that `dtrans.sharding` makes.

    Raises:
      ConfigError: an option that is out of range, unknown, or found elsewhere, by Paddle's name.
      GradientError, TraceError: as `dtrans.sharding`.

    Source: `sharding_configs` and `amp_configs` of Paddle's DistributedStrategy.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.adam(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.ones((64, 32))}, tx.init(p))
      >>> key = jax.random.key(0)
      >>> main, startup = dtrans.trace(step, *init(key), jnp.ones((4, 64))), dtrans.trace(init, key)
      >>> plan = dtrans.paddle.sharding(main, startup, stage=2, sharding_degree=4)
      >>> plan.options.stage, plan.options.degree
      (2, 4)
      >>> dtrans.paddle.sharding(main, startup, optimize_cast=True)
      Traceback (most recent call last):
      ...
      dtrans.errors.ConfigError: optimize_cast=True: with amp=True parameters are gathered in 16
        bits, and each rank \
casts its slices; leave it out
    """
    for name, (nothing, remedy) in ELSEWHERE.items():
        if (given := options.pop(name, nothing)) != nothing:
            raise ConfigError(f"{name}={given!r}: {remedy}; leave it out")
    check_known(
        "dtrans.paddle.sharding", options, inspect.signature(sharding).parameters, RECORDS, NAMES
    )
    if amp:
        check_one_of("amp_dtype", amp_dtype, ("float16", "bfloat16"))
    if (
        amp
        and use_dynamic_loss_scaling
        and not math.isclose(decr_ratio, 1 / incr_ratio)
        and amp_dtype == "float16"
    ):
        raise ConfigError(
            f"decr_ratio={decr_ratio!r} and incr_ratio={incr_ratio!r}: the scale shrinks by what "
            "it grows; "
            f"say decr_ratio={1 / incr_ratio!r}"
        )
    flat = {
        **options,
        "stage": stage,
        "degree": sharding_degree,
        "replicas": dp_degree,
        "partition": partition_algor,
        "bucket_MB": fuse_grad_size_in_MB,
        "gather_bucket_MB": segment_broadcast_MB,
        "overlap": enable_overlap,
        "chains": None if comm_stream_num == 1 else comm_stream_num,
        "num_micro_batch": gradient_merge_acc_step,
    }
    with options_named(NAMES):
        if amp and amp_dtype == "float16":
            scaling = LossScaling(
                init_loss_scaling, use_dynamic_loss_scaling, incr_ratio, incr_every_n_steps
            )
            flat["precision"] = Precision("fp16", scaling)
        elif amp:
            flat["precision"] = "bf16"
        return sharding_of(main, startup, **grouped(flat, RECORDS))
