"""`dtrans.sharding`: data-parallel training in which trainers divide the state (ZeRO 1, 2, 3).

In ordinary data parallelism, every trainer stores all parameters and optimizer state. Here each
trainer, called a *rank*, stores a part of them:

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

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax

from dtrans._jax import without_mesh
from dtrans.batch.exact_step import ExactStep
from dtrans.checks import check_int, check_together, check_type
from dtrans.data_parallel.device_parts import DeviceParts
from dtrans.data_parallel.merge_rules import infer_merges
from dtrans.data_parallel.options import Reduce
from dtrans.data_parallel.sequence_axis import find_sequence_axis
from dtrans.data_parallel.transform import (
    callers,
    check_names,
    divide_if_possible,
    refuse_collectives,
    share_step,
    write_trainer,
    write_uneven,
)
from dtrans.errors import BatchError, ConfigError
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
    refuse_calls,
    refuse_observers,
)
from dtrans.step.startup import match_startup, normalize_step
from dtrans.tensor_parallel.mesh_option import DATA, MODEL, SEQUENCE, sizes_of_mesh
from dtrans.tensor_parallel.model_axis import shard_state
from dtrans.zero.choose_slices import slice_state_again
from dtrans.zero.forward_values import with_forward_values
from dtrans.zero.mixed_precision import low_precision
from dtrans.zero.options import Precision, ShardingOptions, Slicing
from dtrans.zero.plan import ShardingPlan
from dtrans.zero.rank_layout import RankLayout
from dtrans.zero.rank_program import write_rank
from dtrans.zero.undivided import find_stored_dims, slice_undivided


@with_recipe
@without_mesh
def sharding(
    main: Program,
    startup: Program,
    *,
    degree: int | None = None,
    mesh: Mapping[str, int] | None = None,
    stage: int = 1,
    replicas: int = 1,
    num_micro_batch: int = 1,
    precision: Precision | str | None = None,
    slices: Slicing = Slicing(),
    reduce: Reduce | str = Reduce(),
    batch: Batch | str = Batch(),
) -> ShardingPlan:
    """Plan data-parallel training in which trainers divide the state among them (ZeRO).

    Each trainer, called a rank, stores slices of the optimizer state; in stage 3, also of
    parameters. The results equal those of ordinary data parallelism, but each rank needs less
    memory.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`, for any batch shape.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      degree: the number of ranks that store one copy of the state together.
      mesh: replaces `degree` and `slices.axis_name`: the number of devices along each axis, such as
        {"data": 4, "model": 2}. The batch and the state are divided over "data". The parameters of
        `dtrans.split` scopes, and their optimizer state, are also divided over "model", along
        another dimension. The sequences of the batch are divided over "sequence"
        (`Batch.sequence`). `slices.state_axes` also divides optimizer state over "sequence".
      stage: 1 shards optimizer state; 2 also shards gradients; 3 also shards parameters.
      replicas: the number of groups of `degree` ranks, or of copies of the mesh. All degree *
        replicas ranks split the batch.
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
      GradientError: an option needs gradients that dtrans cannot find in the step
        (`dtrans.step.gradients`), or the step has collectives already.
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
    check_int("replicas", replicas, "a positive number of groups of ranks")
    check_type("slices", slices, Slicing)
    model = sequence = 0
    if mesh is not None:
        degree, model, sequence = _from_mesh(mesh, degree, slices)
        slices = dataclasses.replace(slices, axis_name=DATA)
    if SEQUENCE in slices.state_axes and not sequence:
        raise ConfigError(
            f"state_axes={slices.state_axes} divides state over {SEQUENCE!r}, but there is no mesh "
            f"with this axis; pass mesh={{..., {SEQUENCE!r}: n}}, or leave state_axes out"
        )
    check_int("degree", degree, "a positive number of ranks")
    assert degree is not None
    options = ShardingOptions(
        trainers=degree * replicas,
        axis_name=slices.axis_name,
        num_micro_batch=num_micro_batch,
        reduce=Reduce.from_option(reduce),
        batch=Batch.from_option(batch, "exact", one_program="dtrans.sharding"),
        stage=stage,
        degree=degree,
        replicas=replicas,
        model=model,
        sequence=sequence,
        precision=Precision.from_option(precision),
        slices=slices,
    )
    return plan_sharding(main, startup, options)


def _from_mesh(
    mesh: Mapping[str, int], degree: int | None, slices: Slicing
) -> tuple[int, int, int]:
    """Read the sizes of the axes "data", "model" and "sequence" from the option `mesh`."""
    others = {
        f"degree={degree}": degree is not None,
        f"axis_name={slices.axis_name!r}": slices.axis_name != Slicing().axis_name,
        f"replica_axis_name={slices.replica_axis_name!r}": slices.replica_axis_name in mesh,
    }
    check_together(others, "the mesh has the axes; leave one of the two out", f"mesh={mesh!r}")
    degree, model, sequence = sizes_of_mesh(mesh)
    if not isinstance(model, int):
        raise ConfigError(
            f"mesh={mesh!r}: dtrans.sharding cannot divide dtrans.split layers over the same "
            "devices as the batch; pass the mesh to dtrans.nccl2, or a number of devices as "
            f"mesh[{MODEL!r}]"
        )
    return degree, model, sequence


def plan_sharding(main: Program, startup: Program, options: ShardingOptions) -> ShardingPlan:
    """Plan sharding from options that `dtrans.sharding` has checked."""
    refuse_collectives(main)
    plain = divide_if_possible(main, options)
    check_names(plain, options)
    if options.trainers > 1:
        check_observers(plain.program, plain.observers)
        refuse_observers(plain.observers, (GRADIENTS, UPDATE), "ranks have slices of", RETURN_IT)
        if options.num_micro_batch > 1:
            refuse_observers(plain.observers, (STATE,), "each micro-step reads", RETURN_IT)
    if options.has_devices:
        refuse_calls(plain.observers)
    if plain.undivided:
        return _plan_undivided(plain, startup, options, partial(plan_sharding, main, startup))
    matched = match_startup(plain.program, startup)

    # derive the step of one rank, and the rules that merge the ranks' results
    traced = main if options.precision.dtype is None else None
    step, trainer_options, shared = share_step(
        in_precision(plain, main, options.precision), options, traced
    )
    step = with_forward_values(step, trainer_options)
    merges = infer_merges(step, trainer_options) if shared is None else shared.merges
    model = shard_state(plain, MODEL, options.model) if options.model else None
    divided = model.dims if model else {}
    layout = RankLayout.from_step(step, trainer_options, merges, divided=divided)
    for_uneven = None
    if shared is not None and not options.splits_evenly:
        for_uneven = partial(_write_uneven, shared, options, layout)
    parts = DeviceParts(write_rank(step, layout), layout.buckets(step), for_uneven)
    if model is not None:
        model = model.without_conflicts({n: s.axis for n, s in layout.sliced.items()})
        parts = parts.on_model_axis(model, plain.program.inputs)
    sequence = find_sequence_axis(plain, options)
    if sequence is not None:
        if SEQUENCE in options.slices.state_axes:
            of_model = model.sliced if model else {}
            state = slice_state_again(
                plain,
                sequence.size,
                [layout.slices.sliced, of_model],
                options.slices.min_slice_size,
            )
            sequence = dataclasses.replace(sequence, state=state)
        parts = parts.on_sequence_axis(sequence)
    return ShardingPlan(
        main=plain.program,
        startup=matched,
        options=options,
        merges=merges,
        callback_notes=callers_of(plain.observers, *callers(options)),
        slices=layout.slices,
        replan=partial(plan_sharding, main, startup),
        gathers=layout.gathers,
        owned=layout.owned,
        shared=shared,
        model_state=model,
        sequence=sequence,
        **parts.fields,
    )


def _plan_undivided(
    plain: DividedStep,
    startup: Program,
    options: ShardingOptions,
    replan: Callable[[ShardingOptions], ShardingPlan],
) -> ShardingPlan:
    """Plan sharding of a step in which no gradients were found.

    Args:
      plain: the step, without a division into gradients and update (`leave_undivided`).
      startup: as in `dtrans.sharding`.
      options: the options of `dtrans.sharding`.
      replan: function that plans the same step with other options.
    """
    slices = slice_undivided(plain, options)
    step, trainer_options, shared = share_step(
        plain, options, None, find_stored_dims(slices, options)
    )
    merges = infer_merges(step, trainer_options) if shared is None else shared.merges
    return ShardingPlan(
        main=plain.program,
        startup=match_startup(plain.program, startup),
        program=write_trainer(step, trainer_options, merges),
        options=options,
        buckets=(),
        merges=merges,
        callback_notes=callers_of(plain.observers, *callers(options)),
        slices=slices,
        replan=replan,
        shared=shared,
        for_uneven_batch=None if shared is None else partial(write_uneven, shared, options),
    )


def _write_uneven(
    shared: ExactStep,
    options: ShardingOptions,
    planned: RankLayout,
    types: Sequence[jax.ShapeDtypeStruct],
) -> Program:
    """Write a rank's program for a batch that the number of ranks does not divide.

    The job stores its state in the planned slices, so the new program must use the same slices.

    Args:
      shared: the step, which can be traced again for a batch of any size.
      options: the options of `dtrans.sharding`.
      planned: the layout of the plan.
      types: types of the step's inputs, with the new batch.

    Raises:
      BatchError: the update for this batch needs other slices.
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
    """Return the step with matrix products in 16 bits, if the user asked for a 16-bit type.

    Args:
      plain: the step, divided into its gradient computation and its update.
      main: the same step, as it was traced.
      precision: the user's option.
    """
    if precision.dtype is None:
        return plain
    return divide_step(
        low_precision(main, plain, precision.dtype, precision.scaling)
    ).with_reported()
