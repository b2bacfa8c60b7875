"""Sharding: data-parallel training in which every rank stores a slice of the state (ZeRO 1, 2, 3).

    stage    stored as slices       communication
    1        optimizer state        gradients are reduce-scattered after the backward pass
    2        also gradients         each gradient is reduce-scattered as soon as it is computed
    3        also parameters        parameters are also gathered, in forward and backward

    forward, backward     each rank on its part of the batch
    reduce_scatter        gradients: a rank receives its slice of the sum
                          (`dtrans.zero.reduce_scatter`)
    optimize              on slices (`dtrans.zero.update`)
    all_gather            parameters: after the update in stages 1 and 2, before their uses in
                          stage 3 (`dtrans.zero.all_gather`)

All ranks run one program (SPMD), in which sliced arrays have the shape of a slice.
`dtrans.zero.choose_slices` chooses the slices once. With `replicas` there are several groups of
ranks. Each group stores all slices, one on each rank. The slices of gradients are summed over
groups.

Source: Rajbhandari et al., ZeRO (arXiv 1910.02054); passes/auto_parallel_sharding.py and
meta_optimizers/sharding_optimizer.py (Paddle), in which each variable has one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

from dtrans._jax import without_mesh
from dtrans.batch.exact_step import ExactStep
from dtrans.checks import check_int, check_type
from dtrans.data_parallel.merge_rules import infer_merges
from dtrans.data_parallel.options import Reduce
from dtrans.data_parallel.transform import callers, check_names, refuse_collectives, share_step
from dtrans.errors import BatchError
from dtrans.ir.program import Program
from dtrans.plan import with_recipe
from dtrans.step.batch_sharing import Batch
from dtrans.step.halves import DividedStep, divide_step
from dtrans.step.observers import (
    GRADIENTS,
    RETURN_IT,
    STATE,
    UPDATE,
    callers_of,
    check_observers,
    refuse_observers,
)
from dtrans.step.startup import match_startup, normalize_step
from dtrans.zero.forward_values import with_forward_values
from dtrans.zero.mixed_precision import low_precision
from dtrans.zero.options import Precision, ShardingOptions, Slicing
from dtrans.zero.plan import ShardingPlan
from dtrans.zero.rank_layout import RankLayout
from dtrans.zero.rank_program import write_rank


@with_recipe
@without_mesh
def sharding(
    main: Program,
    startup: Program,
    *,
    degree: int,
    stage: int = 1,
    replicas: int = 1,
    num_micro_batch: int = 1,
    precision: Precision | str | None = None,
    slices: Slicing = Slicing(),
    reduce: Reduce | str = Reduce(),
    batch: Batch | str = Batch(),
) -> ShardingPlan:
    """Plan data-parallel training with sharded optimizer state, gradients and parameters.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`, for any batch shape.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      degree: the number of ranks that store one copy of the state together.
      stage: 1 shards optimizer state; 2 also shards gradients; 3 also shards parameters.
      replicas: the number of groups of `degree` ranks. All degree * replicas ranks split the batch.
      num_micro_batch: the number of micro-batches into which each rank splits its part of the
        batch. In stages 2 and 3, gradients are scattered after each micro-batch, so that ranks
        accumulate slices.
      precision: the types in which steps compute: a `dtrans.Precision`, or its `dtype`, "bf16" or
        "fp16".
      slices: the slices of parameters, and how they are gathered: a `dtrans.Slicing`.
      reduce: the reduction of gradients: a `dtrans.Reduce`, or its `op`. Its `bucket_MB` is also
        the bucket size of the gathers after an update.
      batch: "exact" computes, for any step, the results of one device on the full batch. With
        "local", each rank computes the step on only its part of the batch. A `dtrans.Batch` also
        selects the arrays and dimensions to split.

    Raises:
      ConfigError: an option is out of range, or names an array that the step does not have.
      GradientError: the gradients of the step cannot be identified (see `dtrans.step.halves`), or
        the step has collectives already.
      TraceError: the outputs of `startup` do not match the arguments of `main`.

    Source: `apply_pass("sharding", ...)`, and `sharding_configs` of DistributedStrategy, in Paddle.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.adam(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.ones((6, 2))}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.ones((4, 6))
      >>> main, startup = dtrans.trace(step, *init(key), x), dtrans.trace(init, key)
      >>> slices = dtrans.Slicing(min_slice_size=0)
      >>> plan = dtrans.sharding(main, startup, degree=4, stage=3, slices=slices)
      >>> [op.type for op in plan.program.ops if op.role == "dist"]
      ['after', 'all_gather', 'slice', 'pad', 'reduce_scatter', 'div', 'all_reduce', 'div']
      >>> plan.memory()["params"], plan.program.inputs["params/w"].str_short()
      (16, 'float32[2,2]')
      >>> job = plan.simulate()
      >>> state, loss = job.step(job.init(key), x)
      >>> job.params(state)["w"].shape, float(loss)
      ((6, 2), 36.0)
    """
    main, startup = normalize_step(main, startup, keep_frozen_updates=True)
    check_int("degree", degree, "a positive number of ranks")
    check_int("replicas", replicas, "a positive number of groups of ranks")
    check_type("slices", slices, Slicing)
    options = ShardingOptions(
        trainers=degree * replicas,
        axis_name=slices.axis_name,
        num_micro_batch=num_micro_batch,
        reduce=Reduce.from_option(reduce),
        batch=Batch.from_option(batch, "exact"),
        stage=stage,
        degree=degree,
        replicas=replicas,
        precision=Precision.from_option(precision),
        slices=slices,
    )
    return plan_sharding(main, startup, options)


def plan_sharding(main: Program, startup: Program, options: ShardingOptions) -> ShardingPlan:
    """Plan sharding from checked options."""
    refuse_collectives(main)
    plain = divide_step(main).with_reported()
    check_names(plain, options)
    if options.trainers > 1:
        check_observers(plain.program, plain.observers)
        refuse_observers(plain.observers, (GRADIENTS, UPDATE), "ranks have slices of", RETURN_IT)
        if options.num_micro_batch > 1:
            refuse_observers(plain.observers, (STATE,), "each micro-step reads", RETURN_IT)
    matched = match_startup(plain.program, startup)

    # derive the step of one rank, and the rules that merge the ranks' results
    traced = main if options.precision.dtype is None else None
    step, trainer_options, shared = share_step(
        in_precision(plain, main, options.precision), options, traced
    )
    step = with_forward_values(step, trainer_options)
    merges = infer_merges(step, trainer_options) if shared is None else shared.merges
    layout = RankLayout.from_step(step, trainer_options, merges)
    for_uneven = None
    if shared is not None and not options.splits_evenly:
        for_uneven = partial(_write_uneven, shared, options, layout)
    return ShardingPlan(
        main=plain.program,
        startup=matched,
        program=write_rank(step, layout),
        options=options,
        buckets=layout.buckets(step),
        merges=merges,
        callers=callers_of(plain.observers, *callers(options)),
        slices=layout.slices,
        replan=partial(plan_sharding, main, startup),
        gathers=layout.gathers,
        owned=layout.owned,
        shared=shared,
        for_uneven_batch=for_uneven,
    )


def _write_uneven(
    shared: ExactStep,
    options: ShardingOptions,
    planned: RankLayout,
    types: Sequence[jax.ShapeDtypeStruct],
) -> Program:
    """Return a rank's program for a batch that the number of ranks does not divide.

    Ranks store the state in the planned slices.

    Raises:
      BatchError: the update of the padded step needs other slices.
    """
    other = shared.for_types(types)
    other_options = options.with_shared(other)
    step = with_forward_values(other.step, other_options)
    layout = RankLayout.from_step(step, other_options, other.merges, planned.slices)
    if layout.sliced != planned.sliced:
        raise BatchError(
            f"{step.program.name} needs other slices of the state for a batch that the number of "
            f"ranks does not divide; pass a batch whose size is a multiple of {options.trainers}"
        )
    return write_rank(step, layout)


def in_precision(plain: DividedStep, main: Program, precision: Precision) -> DividedStep:
    """Return the step with matrix products in 16 bits, if `precision` has a `dtype`."""
    if precision.dtype is None:
        return plain
    return divide_step(
        low_precision(main, plain, precision.dtype, precision.scaling)
    ).with_reported()
