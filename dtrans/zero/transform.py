"""Sharding: data parallel training in which every rank keeps a slice. ZeRO 1, 2 and 3, as rewrites of the same step.

    stage 1   optimizer state        gradients are reduce-scattered behind the backward pass
    stage 2   and gradients          each is reduce-scattered right after it is made
    stage 3   and parameters         gathered where they are read, in the forward and again in the backward pass

    forward, backward     each rank on its part of the batch
    reduce_scatter        gradients: a rank gets its slice of the sum (`dtrans.zero.reduce_scatter`)
    optimize              on slices (`dtrans.zero.update`)
    all_gather            parameters: behind the update in stages 1 and 2, where they are read in stage 3
                          (`dtrans.zero.all_gather`)

The program is one for all ranks (SPMD): arrays that are sliced have the shape of a slice in it. What is sliced is
decided once, in `dtrans.zero.slices`. With `dp_degree` there are several groups of ranks: slices are those of a
group, and groups add up the slices of gradients that their ranks have.

Source: Rajbhandari et al., ZeRO (arXiv 1910.02054); passes/auto_parallel_sharding.py and
meta_optimizers/sharding_optimizer.py (Paddle), which move whole variables from and to owners.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from dtrans.data_parallel.merge_rules import merges_of
from dtrans.data_parallel.options import check_names_given
from dtrans.data_parallel.reducer import buckets_of
from dtrans.data_parallel.transform import check_names, refuse_collectives
from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.step.cut import cut
from dtrans.step.forward_backward import ready_order, refuse_nested
from dtrans.step.startup import check_programs, match_startup
from dtrans.zero.mixed_precision import low_precision
from dtrans.zero.options import LossScaling, ShardingOptions, check_sharding
from dtrans.zero.plan import ShardingPlan
from dtrans.zero.rank_program import RankLayout, rewritten


def sharding(
    main: Program,
    startup: Program,
    *,
    stage: int = 1,
    degree: int,
    dp_degree: int = 1,
    amp: str | None = None,
    loss_scaling: LossScaling | float | None = None,
    reduce_bucket_MB: float = 32,
    overlap: bool = True,
    prefetch: int | None = None,
    gather_bucket_MB: float = 0,
    min_slice_size: int = 1024,
    partition: str = "rows",
    axis_name: str = "shard",
    dp_axis_name: str = "dp",
    reduce: str = "mean",
    merge: Mapping[str, str] | None = None,
    example_count: str | None = None,
    unsplit_inputs: Collection[str] = (),
    compress: str | None = None,
    compress_scale: float = 1.0,
    num_micro_batch: int = 1,
    max_buckets: int | None = None,
    reduction_chains: int | None = None,
    clip_local_norm: float | None = None,
    **unknown: Any,
) -> ShardingPlan:
    """Plan data-parallel training in which ranks share the optimizer's state, gradients and parameters.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`, for any batch shape.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      stage: 1, 2 or 3; see above.
      degree: how many ranks share a copy of the state.
      dp_degree: how many such groups there are. The batch is shared by degree * dp_degree ranks.
      amp: "bf16" or "fp16": products of matrices in that type (`dtrans.zero.mixed_precision`), parameters gathered, and
        gradients reduced, in it where products alone read them. Parameters that are updated stay as they are; each rank
        has slices of them, in every stage. In stages 1 and 2 they are gathered once in a step (or micro-step).
      loss_scaling: how the loss is scaled (`dtrans.LossScaling`), or a fixed scale. For "fp16" it is dynamic by
        default: from 2^15, halved by a step in which a gradient of any rank is not finite, which changes nothing else,
        and doubled after 2,000 others. "bf16" needs none.
      reduce_bucket_MB: gradients, and parameters behind an update, are moved together up to this size.
      overlap: let collectives run beside computation. Without, each begins when the one before has ended.
      prefetch: in stage 3, how many parameters are gathered ahead of time, the first one of the next layer in a loop;
        1 by default, 0 without `overlap`. On CPUs, where nothing is gathered beside computation, jobs do not gather
        ahead in loops by default: it costs the memory of a layer, and gains nothing.
      gather_bucket_MB: in stage 3, parameters that are read one after the other are gathered together up to this
        size. 0 gathers each by itself.
      min_slice_size: a parameter of fewer elements stays whole on every rank.
      partition: "rows" cuts each parameter. "greedy_even" and "use_order" give whole ones to ranks, each of which alone
        updates what it owns and holds its state, for optimizers that cannot slice; see `dtrans.zero.by_leaf.layout`.
        That is for stages 1 and 2, and without `amp`; `min_slice_size` is not looked at.
      axis_name, dp_axis_name: of the axes that ranks of a group, and groups, are on.
      reduce, merge, example_count, unsplit_inputs, compress, compress_scale, num_micro_batch, max_buckets,
      reduction_chains,
        clip_local_norm: as for `dtrans.nccl2`. In stages 2 and 3 each of `num_micro_batch` scatters its gradients,
        so that what is added up are slices.

    Raises:
      ConfigError: an option that is out of range or unknown, or names that the step does not have.
      GradientError: the gradients of the step cannot be told (see `dtrans.step.cut`), or it has collectives already.
      TraceError: `startup` does not make what `main` takes.

    Source: `apply_pass("sharding", ...)`, and `sharding_configs` of DistributedStrategy, in Paddle.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.adam(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.ones((6, 2))}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.ones((4, 6))
      >>> main, startup = dtrans.trace(step, *init(key), x), dtrans.trace(init, key)
      >>> plan = dtrans.sharding(main, startup, stage=3, degree=4, min_slice_size=0)
      >>> [op.type for op in plan.program.ops if op.role == "dist"]
      ['after', 'all_gather', 'slice', 'pad', 'reduce_scatter', 'div', 'all_reduce', 'div']
      >>> plan.memory()["params"], plan.program.inputs["params/w"].str_short()
      (16, 'float32[2,2]')
      >>> job = plan.simulate()
      >>> state, loss = job.step(job.init(key), x)
      >>> job.params(state)["w"].shape, float(loss)
      ((6, 2), 36.0)
    """
    check_programs(main, startup)
    if unknown:
        raise ConfigError(_unknown(next(iter(unknown))))
    check_names_given(unsplit_inputs, merge)
    options = ShardingOptions(
        trainers=_ranks(degree, dp_degree),
        axis_name=axis_name,
        reduce=reduce,
        merge=dict(merge or {}),
        example_count=example_count,
        unsplit_inputs=tuple(unsplit_inputs),
        reduce_bucket_MB=reduce_bucket_MB,
        compress=compress,
        compress_scale=compress_scale,
        trainers_per_node=0,
        num_micro_batch=num_micro_batch,
        max_buckets=max_buckets,
        reduction_chains=reduction_chains,
        clip_local_norm=clip_local_norm,
        local_sgd=None,
        stage=stage,
        degree=degree,
        dp_degree=dp_degree,
        dp_axis_name=dp_axis_name,
        amp=amp,
        loss_scaling=_scaling(loss_scaling, amp),
        overlap=overlap,
        prefetch=(depth := int(bool(overlap)) if prefetch is None else prefetch),
        prefetch_in_loops=depth,
        automatic=prefetch is None,
        gather_bucket_MB=gather_bucket_MB,
        min_slice_size=min_slice_size,
        partition=partition,
    )
    return plan_sharding(main, startup, options)


def _scaling(given: Any, amp: Any) -> Any:
    """How the loss is scaled; what says nothing of it is refused later, by its name."""
    if given is None:
        return LossScaling() if amp == "fp16" else None
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return LossScaling(float(given), dynamic=False)
    return given


def _ranks(degree: Any, dp_degree: Any) -> int:
    """How many ranks there are; what is no number is refused later, by its name."""
    return degree * dp_degree if all(isinstance(n, int) and n > 0 for n in (degree, dp_degree)) else 1


def _unknown(name: str) -> str:
    known = [p.name for p in inspect.signature(sharding).parameters.values() if p.kind is p.KEYWORD_ONLY]
    close = difflib.get_close_matches(name, known, 1)
    return f"{name} is no option of sharding" + (f"; did you mean {close[0]}?" if close else f": {', '.join(known)}")


def plan_sharding(main: Program, startup: Program, options: ShardingOptions) -> ShardingPlan:
    """What `sharding` plans with these options."""
    check_sharding(options)
    refuse_collectives(main)
    plain = cut(main).with_reported()
    refuse_nested(plain, options.trainers)
    check_names(plain, options)
    if options.amp is None:
        step = plain
    else:
        step = cut(low_precision(main, options.amp, options.loss_scaling)).with_reported()
    given, startup = startup, match_startup(plain, startup)
    merges = merges_of(step, options)
    layout = RankLayout.of(step, options, merges)
    values = {n: step.gradients[n] for n in ready_order(step)}
    owned = layout.owned
    return ShardingPlan(
        main=plain.program,
        startup=startup,
        program=rewritten(step, layout),
        options=options,
        buckets=owned.buckets(step, options) if owned else buckets_of(values, options, layout.kind(step)),
        merges=merges,
        unused_effects=step.unused_effects,
        slices=layout.slices,
        replan=lambda other: plan_sharding(main, given, other),
        owned=owned,
    )
