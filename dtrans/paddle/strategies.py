"""Sharding with Paddle's names for the options of `dtrans.sharding`.

The names come from `DistributedStrategy.sharding_configs` (fleet), and from the `sharding`, `amp`
and `gradient_merge` parts of `Strategy` (auto parallel). Options that Paddle does not have keep the
names of dtrans: `merge`, `prefetch`, `min_slice_size`. `NAMES` maps the names; `sharding` converts
the values.

Source: python/paddle/distributed/fleet/meta_optimizers/sharding_optimizer.py and
python/paddle/distributed/passes/auto_parallel_sharding.py.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from dtrans.checks import check_int, check_known, check_one_of, group_options
from dtrans.data_parallel.options import Reduce
from dtrans.errors import ConfigError, rename_options
from dtrans.ir.program import Program
from dtrans.step.batch_sharing import Batch
from dtrans.tensor_parallel.mesh_option import DATA, MODEL
from dtrans.zero.options import LossScaling, Precision, Slicing
from dtrans.zero.plan import ShardingPlan
from dtrans.zero.transform import sharding as sharding_of


# maps names of options in dtrans to Paddle's names, so that errors contain the user's name
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

# Paddle's options that `dtrans.sharding` does not have: the one value that is accepted, and the
# remedy in the error for other values
ELSEWHERE: dict[str, tuple[Any, str]] = {
    "pp_degree": (
        1,
        "dtrans.pipeline has stages, and shards their state with StageMemory(sharding_stage=...)",
    ),
    "hybrid_dp": (
        False,
        "it has an effect only with several groups of ranks; pass their number as dp_degree",
    ),
    "sharding_segment_strategy": (
        "segment_broadcast_MB",
        "segment_broadcast_MB always determines the segments",
    ),
    "segment_anchors": (None, "segment_broadcast_MB always determines the segments"),
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
    mp_degree: int = 1,
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
      stage: 1 shards the optimizer state; 2 also shards gradients; 3 also shards parameters.
      sharding_degree: the number of ranks in a group. Each group shards one copy of the state.
      mp_degree: the number of devices of a rank, which divide the layers in `dtrans.split` scopes.
      dp_degree: the number of groups. A job has mp_degree * sharding_degree * dp_degree devices.
      partition_algor: "rows" divides each parameter into slices; Paddle's "greedy_even" and
        "use_order" place complete parameters on ranks.
      fuse_grad_size_in_MB: the size of a bucket, whose gradients are reduced together.
      segment_broadcast_MB: in stage 3, the size of a bucket, whose parameters are gathered
        together.
      enable_overlap: True if collectives may overlap computation.
      comm_stream_num: the number of reductions that may run at the same time; with 1, XLA decides.
      gradient_merge_acc_step: the number of micro-batches into which each rank splits its batch.
      amp: True computes matrix products in 16 bits.
      amp_dtype: "float16" or "bfloat16".
      init_loss_scaling: the initial loss scale; used with "float16" only.
      use_dynamic_loss_scaling: True if the loss scale adapts to the gradients.
      incr_every_n_steps: the number of finite steps after which the loss scale grows.
      incr_ratio: the factor by which the loss scale grows.
      decr_ratio: the factor after a step that is not finite; it must be 1 / incr_ratio.
      **options: `reduce` ("mean" or "sum") and `batch` of `dtrans.sharding`, and fields of its
        option classes that Paddle does not have, such as `prefetch`. Further options of Paddle are
        accepted only with values that have no effect.

    Returns:
      The plan of `dtrans.sharding`.

    Raises:
      ConfigError: an option is out of range, unknown, or not an option of `dtrans.sharding`. The
        message contains Paddle's name of the option.
      GradientError, TraceError: as `dtrans.sharding`.

    Source: `sharding_configs` and `amp_configs` of Paddle's DistributedStrategy;
      `_get_hybrid_degree` and `_build_groups` of fleet's ShardingOptimizer.

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
      dtrans.errors.ConfigError: optimize_cast=True is not supported: with amp=True parameters are \
gathered in 16 bits, and each rank casts its slices; leave optimize_cast out
    """
    if dp_degree != 1 and options.get("hybrid_dp") in (True, False):
        del options["hybrid_dp"]  # Paddle: several groups are always hybrid data parallel
    for name, (neutral, remedy) in ELSEWHERE.items():
        if (value := options.pop(name, neutral)) != neutral:
            raise ConfigError(f"{name}={value!r} is not supported: {remedy}; leave {name} out")
    check_known(
        "dtrans.paddle.sharding", options, inspect.signature(sharding).parameters, RECORDS, NAMES
    )
    if amp:
        check_one_of("amp_dtype", amp_dtype, ("float16", "bfloat16"))
    is_scaled = amp and use_dynamic_loss_scaling and amp_dtype == "float16"
    if is_scaled and not math.isclose(decr_ratio, 1 / incr_ratio):
        raise ConfigError(
            f"decr_ratio is {decr_ratio!r}; expected 1 / incr_ratio: pass "
            f"decr_ratio={1 / incr_ratio!r}"
        )
    sizes, phrases = _sizes(sharding_degree, mp_degree)
    flat = {
        **options,
        **sizes,
        "stage": stage,
        "replicas": dp_degree,
        "partition": partition_algor,
        "bucket_MB": fuse_grad_size_in_MB,
        "gather_bucket_MB": segment_broadcast_MB,
        "overlap": enable_overlap,
        "chains": None if comm_stream_num == 1 else comm_stream_num,
        "num_micro_batch": gradient_merge_acc_step,
    }
    with rename_options(NAMES | phrases):
        if amp and amp_dtype == "float16":
            scaling = LossScaling(
                init_loss_scaling, use_dynamic_loss_scaling, incr_ratio, incr_every_n_steps
            )
            flat["precision"] = Precision("fp16", scaling)
        elif amp:
            flat["precision"] = "bf16"
        return sharding_of(main, startup, **group_options(flat, RECORDS))


def _sizes(sharding_degree: int, mp_degree: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return options of `dtrans.sharding` for Paddle's two degrees, and phrases for errors.

    An error of `dtrans.sharding` may contain the name of an option that the user did not write. The
    second dict maps such phrases to Paddle's names.
    """
    check_int("mp_degree", mp_degree, "a positive number of devices")
    if mp_degree == 1:
        return {"degree": sharding_degree}, {}
    check_int("sharding_degree", sharding_degree, "a positive number of ranks")
    mesh = {DATA: sharding_degree, MODEL: mp_degree}
    phrases = {
        f"mesh={mesh}": f"sharding_degree={sharding_degree} with mp_degree={mp_degree}",
        f"mesh={{..., {MODEL!r}: {mp_degree}}}": f"mp_degree={mp_degree}",
        f"{mp_degree} devices of the mesh divide": f"mp_degree={mp_degree} divides",
        "a mesh in which": "mp_degree so that",
        "a mesh for split layers": f"mp_degree={mp_degree}",
        f"leave {MODEL!r} out of mesh": "leave mp_degree out",
    }
    return {"mesh": mesh}, phrases
