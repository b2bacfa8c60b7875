"""Sharding: data parallel training in which every rank keeps a slice. ZeRO 1, 2 and 3, as rewrites
of the same step.

    stage 1   optimizer state        gradients are reduce-scattered behind the backward pass
    stage 2   and gradients          each is reduce-scattered right after it is made
    stage 3   and parameters         gathered where they are read, in the forward and again in the backward pass

    forward, backward     each rank on its part of the batch
    reduce_scatter        gradients: a rank gets its slice of the sum (`dtrans.zero.reduce_scatter`)
    optimize              on slices (`dtrans.zero.update`)
    all_gather            parameters: behind the update in stages 1 and 2, where they are read in stage 3
                          (`dtrans.zero.all_gather`)

The program is one for all ranks (SPMD): arrays that are sliced have the shape of a slice in it.
What is sliced is decided once, in `dtrans.zero.choose_slices`. With `replicas` there are several
groups of ranks: slices are those of a group, and groups add up the slices of gradients that their
ranks have.

Source: Rajbhandari et al., ZeRO (arXiv 1910.02054); passes/auto_parallel_sharding.py and
meta_optimizers/sharding_optimizer.py (Paddle), which move whole variables from and to owners.
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
from dtrans.step.cut import Cut, cut
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
from dtrans.zero.rank_program import RankLayout, rewritten


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
    """Plan data-parallel training in which ranks share the optimizer's state, gradients and
    parameters.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`, for any batch shape.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      degree: how many ranks share a copy of the state.
      stage: 1, 2 or 3; see above.
      replicas: how many such groups there are. The batch is shared by degree * replicas ranks.
      num_micro_batch: into how many micro-steps each rank divides its part of the batch. In stages
        2 and 3 each of them scatters its gradients, so that what is added up are slices.
      precision: in what types steps compute: a `dtrans.Precision`, or its `dtype`, "bf16" or
        "fp16".
      slices: how leaves are sliced, and gathered again: a `dtrans.Slicing`.
      reduce: how gradients are reduced: a `dtrans.Reduce`, or its `op`. Parameters that are
        gathered behind an update are in buckets of the same size.
      batch: "exact", for one device's numbers whatever the step; "local", for ranks that each take
        the step on their part alone; or a `dtrans.Batch`, which also says which arrays are cut, and
        how.

    Raises:
      ConfigError: an option that is out of range, or names that the step does not have.
      GradientError: the gradients of the step cannot be told (see `dtrans.step.cut`), or it has
        collectives already.
      TraceError: `startup` does not make what `main` takes.

    Source: `apply_pass("sharding", ...)`, and `sharding_configs` of DistributedStrategy, in Paddle.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.adam(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.ones((6, 2))}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.ones((4, 6))
      >>> main, startup = dtrans.trace(step, *init(key), x), dtrans.trace(init, key)
      >>> plan = dtrans.sharding(main, startup, degree=4, stage=3, slices=dtrans.Slicing(min_slice_size=0))
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
        precision=Precision.of(precision),
        slices=slices,
    )
    return plan_sharding(main, startup, options)


def plan_sharding(main: Program, startup: Program, options: ShardingOptions) -> ShardingPlan:
    """Plan sharding with options that are checked."""
    refuse_collectives(main)
    plain = cut(main).with_reported()
    check_names(plain, options)
    if options.trainers > 1:
        check_observers(plain.program, plain.observers)
        refuse_observers(plain.observers, (GRADIENTS, UPDATE), "ranks have slices of", RETURN_IT)
        if options.num_micro_batch > 1:
            refuse_observers(plain.observers, (STATE,), "each micro-step reads", RETURN_IT)
    given, startup = startup, match_startup(plain, startup)
    # what one rank carries out of the step, and how that becomes one
    same = main if options.precision.dtype is None else None
    step, o, shared = share_step(in_precision(plain, main, options.precision), options, same)
    step = with_forward_values(step, o)
    merges = infer_merges(step, o) if shared is None else shared.merges  # how each result is merged
    layout = RankLayout.of(step, o, merges)  # which rank holds which slice of what
    return ShardingPlan(
        main=plain.program,
        startup=startup,
        program=rewritten(step, layout),
        options=options,
        buckets=layout.buckets(step),
        merges=merges,
        callers=callers_of(plain.observers, *callers(options)),
        slices=layout.slices,
        replan=partial(plan_sharding, main, given),
        gathers=layout.gathers,
        owned=layout.owned,
        shared=shared,
        for_uneven_batch=None
        if shared is None or options.splits_evenly
        else partial(_of_whole, shared, options, layout),
    )


def _of_whole(
    shared: ExactStep,
    options: ShardingOptions,
    planned: RankLayout,
    types: Sequence[jax.ShapeDtypeStruct],
) -> Program:
    """Return a rank's program for a batch that ranks do not divide, on the slices that were
    planned.

    Raises:
      BatchError: the padded step would need other slices.
    """
    other = shared.for_types(types)
    of_other = options.with_shared(other)
    step = with_forward_values(other.step, of_other)
    layout = RankLayout.of(step, of_other, other.merges, planned.slices)
    if layout.cuts != planned.cuts:
        raise BatchError(
            f"{step.program.name} needs other slices of the state for a batch that "
            f"{options.trainers} ranks do not "
            "divide; pass a batch that they divide"
        )
    return rewritten(step, layout)


def in_precision(plain: Cut, main: Program, precision: Precision) -> Cut:
    """Return the step with products in the requested type; in 16 bits it is a new program."""
    if precision.dtype is None:
        return plain
    return cut(low_precision(main, plain, precision.dtype, precision.scaling)).with_reported()
