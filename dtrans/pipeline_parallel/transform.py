"""`pipeline`: rewrites a training step into the programs of stages, and a schedule.

It does the following, in this order. The right column is the module for each line:

scale the loss by a dynamic scale                               dynamic_scale
capture the loss function before it is differentiated           dtrans.step.capture
derive the step of a micro-batch, and merge rules of results    dtrans.batch
write the forward pass as one list of equations                 forward_pass
assign each equation to a stage                                 assign_stages
write the programs of each stage                                stage_programs
order the tasks of each device                                  schedule
write the merge of results over micro-batches and replicas      results
write the update, and divide it by stage                        update, update_by_stage
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax

from dtrans._jax import Var, checkpoint_name_of, closed, equations, without_mesh
from dtrans.batch.exact_step import ExactStep, batch_axes, parts_error, shard_step
from dtrans.batch.precomputed import with_rows_first
from dtrans.batch.precomputed_micro_steps import shard_by_parts
from dtrans.batch.written_parts import WrittenParts, without_effects
from dtrans.checks import check_type
from dtrans.data_parallel.merge_rules import infer_merges
from dtrans.data_parallel.options import Reduce
from dtrans.data_parallel.transform import check_names, refuse_collectives
from dtrans.errors import ConfigError, DtransError, GradientError
from dtrans.ir.array_fns import array_type
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.ir.pytree import is_under
from dtrans.ir.selection import exclude, omit, retain
from dtrans.pipeline_parallel.assign_stages import scoped_stages, stages_of
from dtrans.pipeline_parallel.auto_stages import auto_stages
from dtrans.pipeline_parallel.dynamic_scale import with_dynamic_scale
from dtrans.pipeline_parallel.forward_pass import ForwardPass, forward_pass
from dtrans.pipeline_parallel.options import PipelineOptions, StageMemory, Stages
from dtrans.pipeline_parallel.plan import PipelinePlan, ShownValues
from dtrans.pipeline_parallel.results import STACK, check_state
from dtrans.pipeline_parallel.schedule import Schedule, schedule as schedule_of
from dtrans.pipeline_parallel.split_stages import sharding_of, shards_of
from dtrans.pipeline_parallel.stage_programs import StagePrograms, sums_of
from dtrans.pipeline_parallel.stage_scan import (
    ScanSplits,
    StageRows,
    loops_of,
    merge_iterations,
    split_iterations,
    split_scans,
    stage_rows,
    stages_of_parts,
    unstack_params,
)
from dtrans.pipeline_parallel.staged_model import (
    StagedModel,
    micro_batch_of,
    step_programs,
    write_stages,
)
from dtrans.pipeline_parallel.update import (
    arguments_of,
    results_from_gradients,
    slices_of_sums,
    update_of,
)
from dtrans.plan import with_recipe
from dtrans.rows.analysis import leaves_of_state
from dtrans.step.batch_sharing import Batch
from dtrans.step.capture import captured, refuse_loss_in_update, value_and_grad_p
from dtrans.step.collect import COLLECT, collected
from dtrans.step.forward_backward import refuse_inseparable
from dtrans.step.halves import DividedStep, asks_for, divide_step, reports_update
from dtrans.step.observers import (
    EARLY,
    GRADIENTS,
    RETURN_IT,
    UPDATE,
    callers_of,
    check_observers,
    refuse_observers,
)
from dtrans.step.scopes import scopes_within
from dtrans.step.startup import match_startup, normalize_step
from dtrans.zero.mixed_precision import check_scale, scale_spec


# Name of the axis of micro-batches in the analysis of a step. No mesh has this axis, because
# micro-batches run one after the other.
PARTS = ("parts",)


@with_recipe
@without_mesh
def pipeline(
    main: Program,
    startup: Program,
    *,
    num_stages: int | Literal["auto"],
    num_micro_batch: int = 1,
    schedule: str | Schedule = "PreferBackward",
    replicas: int | Literal["auto"] = 1,
    stages: Stages = Stages(),
    memory: StageMemory = StageMemory(),
    reduce: Reduce | str = Reduce(),
    batch: Batch | str = Batch(),
) -> PipelinePlan:
    """Plan pipelined training: stages of the loss function run on different devices.

    The batch is split into micro-batches, which flow through the stages. The step must compute its
    gradients with `dtrans.value_and_grad` (as `dtrans.make_train_step` does), because the loss
    function is divided before it is differentiated. By default, the job computes the same results
    as the step on one device with the full batch.

    Args:
      main: the traced training step, (params, opt_state, *batch) -> (params, opt_state, loss, ...).
      startup: the traced init, (...) -> (params, opt_state).
      num_stages: the number of devices of one replica. Each device runs one stage, or
        `stages.chunks` stages. "auto": the number of `dtrans.replicate` scopes in the model.
        Without scopes, "auto" simulates steps, and takes the least number of stages that is nearly
        the fastest (`dtrans.pipeline_parallel.auto_stages`).
      num_micro_batch: the number of micro-batches into which a replica splits its part of the
        batch. A step updates the parameters once, with the gradients of all micro-batches.
      schedule: the order of tasks on each device: a `dtrans.Schedule`, or the name of a schedule.
        "PreferForward" or "GPipe": all forwards, then all backwards. "PreferBackward" or "1F1B":
        backwards as early as possible. "PreferBackwardOptimizer": one more micro-batch in flight,
        which hides transfers. "Interleaved": several stages on each device. "ZeroBubble" or
        "ZB-H1": gradients of weights fill idle time.
      replicas: the number of copies of the pipeline. Each copy gets a part of the batch, and the
        replicas of a stage reduce their gradients. "auto": the largest number for which the devices
        of `stages.cluster` suffice. The plan names devices that stay idle.
      stages: the rule that chooses the stages, and their devices: a `dtrans.Stages`.
      memory: options that reduce the memory of stages: a `dtrans.StageMemory`.
      reduce: the reduction of gradients over micro-batches and the replicas of a stage: a
        `dtrans.Reduce`, or its `op`. A clip in the optimizer applies to the reduced gradients
        (EPL's `clip_after_allreduce`).
      batch: "exact", "micro" (or "local", a synonym), or a `dtrans.Batch` without `example_count`.
        "exact": the job computes the same results as one device on the full batch. If micro-batches
        need values of the full batch, such as a number of valid tokens, the job computes these
        first (`dtrans.batch.precomputed`). This requires that the values depend on no parameter. If
        the gradient of the full batch is not a sum over micro-batches, this function raises
        ConfigError. "micro": each micro-batch runs the step independently, with separate batch
        statistics. All micro-batches of a step read the statistics from before the step.
        `Batch.merge` determines how results are merged.

    Raises:
      ConfigError: an option is out of range, or the loss has fewer equations than stages. Scopes
        contradict each other. With batch="exact", the step is not a sum over micro-batches.
      BatchError: the batch cannot be divided into micro-batches of equal size.
      GradientError: the step computes gradients without `dtrans.value_and_grad`, or in a loop.
      TraceError: `startup` does not return the state that `main` takes.

    Source: `Parallel` of EPL (epl/parallel/parallel.py), its schedulers
      (epl/strategies/scheduler.py) and its planner (epl/parallel/planner.py). GPipe (arXiv
      1811.06965), PipeDream's 1F1B (arXiv 1806.03377).

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> def loss(params, x):
      ...     for w in params["layers"]:
      ...         x = jnp.tanh(x @ w)
      ...     return jnp.mean(x**2)
      >>> init = lambda key: (p := {"layers": [jnp.eye(64)] * 4}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.ones((8, 64))
      >>> main = dtrans.trace(dtrans.make_train_step(loss, tx), *init(key), x)
      >>> plan = dtrans.pipeline(main, dtrans.trace(init, key), num_stages=2, num_micro_batch=4)
      >>> [s.params for s in plan.stages]
      [('params/layers/0', 'params/layers/1'), ('params/layers/2', 'params/layers/3')]
      >>> plan.schedule.bubble
      Fraction(1, 5)
      >>> job = plan.simulate()
      >>> state, loss = job.step(job.init(key), x)
      >>> bool(jnp.allclose(loss, jnp.tanh(jnp.tanh(jnp.tanh(jnp.tanh(1.0)))) ** 2))
      True
    """
    main, startup = normalize_step(main, startup)
    check_type("stages", stages, Stages)
    if num_stages == "auto" and isinstance(schedule, Schedule):
        num_stages = schedule.num_stages
    auto, count = num_stages == "auto", 1 if num_stages == "auto" else num_stages
    timetable = _timetable(schedule, count, num_micro_batch, stages.chunks)
    per_scope = devices_of_scopes(main)
    options = PipelineOptions(
        num_stages=count,
        num_micro_batch=num_micro_batch,
        schedule=timetable.name,
        splits_backward=timetable.splits_backward,
        chunks=timetable.chunks,
        replicas=per_scope if replicas == "auto" else replicas * per_scope,
        stages=stages,
        memory=memory,
        reduce=Reduce.from_option(reduce),
        batch=Batch.from_option(batch, "exact", micro=True, one_program="dtrans.pipeline"),
    )
    plan = plan_pipeline(main, startup, options, timetable, auto=auto)
    if replicas == "auto":
        options = _fill_devices(options, plan, per_scope)
        plan = plan_pipeline(main, startup, options, plan.schedule)
    plan.check_devices()
    return plan


def _fill_devices(o: PipelineOptions, least: PipelinePlan, per_scope: int) -> PipelineOptions:
    """Return options with as many replicas as the devices allow, for `replicas="auto"`.

    Args:
      o: the options.
      least: the plan for the least number of replicas. It determines the number of stages.
      per_scope: the number of replicas must be a multiple of this number.

    Raises:
      ConfigError: the least number of replicas needs more devices.
    """
    planned, cluster = least.options, o.stages.cluster
    devices = tuple(jax.devices() if cluster.devices is None else cluster.devices)
    needed = per_scope * sum(least.model.device_counts)
    if len(devices) < needed:
        raise ConfigError(
            f"replicas is 'auto', but one replica of {planned.num_stages} stages uses {needed} "
            f"devices, and there are {len(devices)}; pass fewer stages, or more devices in "
            "dtrans.Cluster(devices=...)"
        )
    replicas = len(devices) // needed * per_scope
    if cluster.slices is not None:
        replicas = len(cluster.slices[0])  # the user has listed the devices of each replica
    return dataclasses.replace(
        o,
        num_stages=planned.num_stages,
        schedule=planned.schedule,
        chunks=planned.chunks,
        replicas=replicas,
        stages=dataclasses.replace(o.stages, cluster=dataclasses.replace(cluster, devices=devices)),
    )


def devices_of_scopes(main: Program) -> int:
    """Return the `device_count` of the model's `replicate` scopes; 1 without scopes.

    Each of these devices computes a part of a replica's batch.

    Raises:
      ConfigError: two scopes have different device counts.
    """
    counts = {s.device_count or 1: s for s in scopes_within(main.jaxpr) if s.kind == "replicate"}
    if len(counts) > 1:
        (a, first), (b, second) = list(counts.items())[:2]
        raise ConfigError(
            f"{first} has {a} device{'s' * (a > 1)} and {second} has {b}, but every stage divides "
            "the batch over the same number of devices; give all scopes the same device_count"
        )
    return next(iter(counts), 1)


def _timetable(
    option: str | Schedule, num_stages: int, num_micro_batch: int, chunks: int | None
) -> Schedule:
    """Return the schedule of a plan: a named schedule, or the user's schedule after a check.

    Args:
      option: the argument `schedule` of `pipeline`.
      num_stages, num_micro_batch, chunks: the sizes that the schedule must have.
    """
    if not isinstance(option, Schedule):
        return schedule_of(option, num_stages, num_micro_batch, chunks)
    sizes = (option.num_stages, option.num_micro_batch, option.chunks)
    planned = (num_stages, num_micro_batch, chunks or option.chunks)
    if sizes != planned:
        raise ConfigError(
            f"the schedule {option.name} is for num_stages={sizes[0]}, num_micro_batch={sizes[1]}, "
            f"chunks={sizes[2]}; expected {planned[0]}, {planned[1]}, {planned[2]}, the values "
            "that dtrans.pipeline received"
        )
    return option


STAGES_HAVE = "which a stage has only for one micro-batch at a time"


def plan_pipeline(
    main: Program, startup: Program, o: PipelineOptions, timetable: Schedule, *, auto: bool = False
) -> PipelinePlan:
    """Plan a pipeline with checked options; see `pipeline`.

    Args:
      main: the traced step.
      startup: the traced init.
      o: the options of the pipeline.
      timetable: the schedule.
      auto: True to choose the number of stages. The function then ignores the numbers of stages in
        `o` and `timetable`.
    """
    # Divide and check the step of the global batch.
    refuse_collectives(main)
    original, axes = divide_step(main), {}
    refuse_inseparable(original, STAGES_HAVE, may_send=True, may_report=True)
    check_callbacks(original, o)
    if o.batch.exact:
        check_names(original.with_reported(), o.over_parts)
        axes = batch_axes(original, o.batch)
        unsplit = tuple(exclude(original.batch, axes))
        batch = dataclasses.replace(o.batch, axes=0, unsplit_inputs=unsplit)
        o = dataclasses.replace(o, batch=batch)
        main = with_rows_first(main, axes)
    if o.dynamic_scaling is not None:
        main = with_dynamic_scale(main, o.dynamic_scaling)

    # The step of a micro-batch.
    try:
        traced = micro_batch_of(main, o, _types(main))
    except DtransError:
        # A step that itself loops over micro-batches cannot be traced for fewer rows. For a step
        # with its own loop, `captured` raises a clearer error.
        captured(main)
        raise
    # This step is not captured, because `_merges` needs the equations of the loss.
    plain = divide_step(traced).with_reported()
    refuse_inseparable(plain, STAGES_HAVE, may_send=True, may_report=True)
    refuse_loss_in_update(captured(main if o.batch.exact else traced))
    _check_reads(plain, o)
    shared, written = shared_by(main, traced, o, dict.fromkeys(axes, 0))
    o = o.local if shared is None else o.with_exact_step(shared)
    values = None
    if shared is None or written is None:
        collecting = part = captured(traced)
        step = divide_step(part).with_reported()
    else:
        # A rewritten step has lost the marks of `dtrans.collect` outside of the loss. So read the
        # marks from the step of the global batch.
        collecting = captured(main)
        precompute, step = written.precompute_program(captured(main)), shared.step
        part, values = step.program, precompute if precompute.out_names else None
    _check_reads(step, o)
    check_names(step, o.over_parts)
    startup = match_startup(original.program, startup)

    # Write the forward pass of a micro-batch, and choose stages.
    forward = forward_pass(step)
    if o.precision.scaling is not None:
        check_scale(o.precision.scaling, forward.loss.aval.dtype, main.name)
    if auto:
        o, timetable = auto_stages(forward, o)
    _check_checkpoint_names(forward, o)
    merges = _merges(plain, collecting, forward, o, shared)
    if shared is None:
        check_state(merges, step.params, o)
    forward, stage_of, splits, rows = _assign_stages(forward, o)
    step = forward.step  # Its parameters are now rows of stacked layers.

    # Write the programs of the stages and of the update.
    shards = shards_of(forward, stage_of, o)
    slices = {} if max(shards) > 1 else slices_of_sums(step, o)
    stages = write_stages(forward, stage_of, o, slices)
    homes, users = _homes(stages, step)
    sharding = sharding_of(step, stages, shards, users)
    if max(shards) > 1 and o.slices_gradients:
        # The programs without slices show the dimensions that shards divide. Replicas must slice
        # other dimensions.
        slices = slices_of_sums(step, o, sharding.params)
        stages = write_stages(forward, stage_of, o, slices)
    update = update_of(step, sums_of(stages), homes, users, sharding, rows, o)
    if update.layout is not None and o.slices_gradients:
        # Stages write slices of gradients, and the update reads them. Both have chosen the slices
        # independently, so check that the choices are equal.
        for leaf, _, _ in update.sums.values():
            assert slices.get(leaf) == update.layout.slices.leaves.get(leaf), leaf
    sharding = update.sharding
    hidden = (x for x in original.observers if not x.calls and x.reads not in EARLY)
    caller = "its stage, for each micro-batch" if o.parts > 1 else "its stage"
    return PipelinePlan(
        main=original.program,  # The step of the global batch, with the role of each equation
        startup=startup,
        options=o,
        schedule=timetable,
        model=StagedModel(part, o, stage_of, homes, users, sharding, splits, rows, merges),
        step_programs=step_programs(forward, stages, merges, sharding, o),
        update=update,
        shared=shared,
        values=values,
        axes={n: axis for n, axis in axes.items() if axis},
        shown=ShownValues(tuple(forward.summaries), forward.collected, tuple(map(str, hidden))),
        callback_notes=callers_of(original.observers, caller, ""),
    )


def check_callbacks(step: DividedStep, o: PipelineOptions) -> None:
    """Raise an error if a host callback (`jax.debug.print`, say) reads a value that no stage has.

    Args:
      step: the step of the global batch.
      o: the options of the pipeline.
    """
    refuse_observers(step.observers, (GRADIENTS, UPDATE), "no single stage has", RETURN_IT)
    if o.parts > 1:
        check_observers(step.program, step.observers)
        if o.batch.exact:
            also = "; or pass batch='micro', so that each micro-batch calls it"
            refuse_observers(
                step.observers,
                EARLY,
                "a stage has only for one micro-batch at a time",
                RETURN_IT + also,
            )


def _check_reads(step: DividedStep, o: PipelineOptions) -> None:
    """Raise an error if the update reads rows of the batch, or the loss reads optimizer state.

    The loss may read optimizer state that belongs to no parameter, such as a step counter.

    Args:
      step: the step of a micro-batch.
      o: the options of the pipeline.
    """
    for n in arguments_of(step) if o.parts > 1 else ():
        if step.program.inputs[n].ndim and not is_under(n, o.batch.unsplit_inputs):
            reader = f"the update of {step.program.name} reads"
            remedy = "compute with the rows in the loss function"
            if n not in step.arguments:
                names = ", ".join(results_from_gradients(step, n))
                reader = f"to compute the result {names}, {step.program.name} reads gradients and"
                remedy = (
                    f"leave {names} out of the results, and compute values of the new state after "
                    "the step, from job.params(state) or job.gather(state)"
                )
            raise GradientError(
                f"{reader} {n}, but each micro-batch has different rows of {n}; {remedy}, or, if "
                f"all micro-batches share {n}, pass dtrans.Batch(unsplit_inputs=({n!r},))"
            )
    # The loss scale belongs to no leaf, although the update of a 0-d leaf reads it.
    leaves = omit(leaves_of_state(step.optimize, step.params), scale_spec().names)
    for n, output in step.state_read.items():
        if n in leaves:
            need = reports_update if output in step.from_gradients else asks_for
            raise need(output, n).refused("")


def shared_by(
    main: Program, part: Program, o: PipelineOptions, axes: Mapping[str, int]
) -> tuple[ExactStep | None, WrittenParts | None]:
    """Rewrite the step for one micro-batch, so that the sum over micro-batches is the full step.

    The step may read values of the full batch, such as a number of valid tokens. The job computes
    these *precomputed* values before the micro-batches. With `batch="micro"`, or if the batch is
    not split, both results are None.

    Args:
      main: the step of the global batch.
      part: the traced step of a micro-batch.
      o: the options of the pipeline.
      axes: maps each split array of the batch to 0, the dimension along which it is split.

    Returns:
      The step, and the precomputed values that it reads.

    Raises:
      ConfigError: the step is not a sum over micro-batches, even with precomputed values.
    """
    if not o.batch.exact or o.parts == 1:
        return None, None
    # The user has chosen the clip and the loss scale for gradients of the traced step. A step that
    # `shard_by_parts` writes has smaller gradients. So if the traced step is exact, use it.
    if o.reduce.clip_local_norm is not None or o.precision.scaling is not None:
        alone = shard_step(
            divide_step(without_effects(part)).with_reported(),
            o.batch,
            o.parts,
            PARTS,
            open_state=True,
            noun="micro-batch",
        )
        if alone.proven:
            return alone, None
    plain = divide_step(main).with_reported()
    leaves = leaves_of_state(plain.optimize, plain.params)
    replicated = list(plain.frozen)
    for n in plain.opt_state:
        if n in plain.state_read or n not in leaves:
            replicated.append(n)
    # If the step's outputs depend on the batch size, `shard_by_parts` also needs the step of a
    # micro-batch.
    is_sized = plain.differing_outputs(divide_step(part).with_reported())
    shared, written = shard_by_parts(
        captured(main),
        axes,
        tuple(replicated),
        o.parts,
        PARTS,
        "micro-batch",
        part if is_sized else None,
    )
    if shared.proven:
        return shared, written
    raise parts_error(plain, shared, "micro-batches", "micro")


def _types(program: Program) -> list[jax.ShapeDtypeStruct]:
    return list(map(array_type, program.inputs.values()))


def _assign_stages(
    forward: ForwardPass, o: PipelineOptions
) -> tuple[ForwardPass, tuple[int, ...], ScanSplits, Mapping[str, tuple[StageRows, ...]]]:
    """Assign equations to stages, and split scans over layers.

    Returns:
      The forward pass with split scans, the stage of each of its equations, the splits, and the
        rows of each stack.
    """
    speeds = _speeds_of_stages(forward, o)

    def stages_for(f: ForwardPass) -> tuple[int, ...]:
        return stages_of(
            f.jaxpr,
            o.model_stages,
            policy=o.stages.policy,
            flops_per_byte=o.stages.flops_per_byte,
            batch=f.micro_batch_inputs,
            speeds=speeds,
        )

    if o.model_stages == 1 or not loops_of(forward):
        return forward, stages_for(forward), (), {}
    # Assign iterations one by one, and then merge the iterations of each stage into one scan.
    single, origin = split_scans(forward, split_iterations(forward))
    by_iteration = stages_for(single)
    splits = merge_iterations(forward, origin, by_iteration)
    parts, parts_origin = split_scans(forward, splits)
    stage_of = stages_of_parts(splits, forward, parts_origin, origin, by_iteration)
    unstacked = unstack_params(parts, stage_rows(parts, stage_of), stage_of)
    return unstacked.forward, unstacked.stage_of, splits, unstacked.rows


def _speeds_of_stages(forward: ForwardPass, o: PipelineOptions) -> tuple[float, ...] | None:
    """Return the speed of each stage; None without speeds, and if scopes determine the stages.

    Raises:
      ConfigError: the number of devices of a stage depends on the choice of the stages.
    """
    cluster = o.stages.cluster
    if cluster.speeds is None or scoped_stages(forward.jaxpr) is not None:
        return None
    if any(s.kind == "split" for s in scopes_within(forward.jaxpr)):
        raise ConfigError(
            "speeds of dtrans.Cluster cannot be combined with a dtrans.split scope outside of "
            "dtrans.replicate scopes: the stage of the scope has several devices, so the speeds of "
            "stages are unknown before stages are chosen; put the stages in dtrans.replicate "
            "scopes, or leave out speeds"
        )
    return cluster.stage_speeds([1] * o.num_stages, o.replicas) * o.chunks


def _check_checkpoint_names(forward: ForwardPass, o: PipelineOptions) -> None:
    """Raise ConfigError if `gradient_checkpoint` has a name that no value of the loss has."""
    if isinstance(o.memory.gradient_checkpoint, str):
        return
    there = set(map(checkpoint_name_of, forward.eqns)) - {None}
    inside = set(map(checkpoint_name_of, equations(forward.jaxpr))) - {None, *there}
    for n in o.memory.gradient_checkpoint:
        if n in inside:
            raise ConfigError(
                f"gradient_checkpoint contains {n!r}, the name of a value inside a loop, a branch "
                "or jax.checkpoint, and stages cannot save such values; name an output of the "
                "loop, branch or checkpoint instead"
            )
        if n not in there:
            names = ", ".join(sorted(map(str, there)))
            raise ConfigError(
                f"gradient_checkpoint contains {n!r}; expected one of the names in the loss "
                f"({names or 'there are none'}), given with jax.ad_checkpoint.checkpoint_name"
            )


def _merges(
    plain: DividedStep,
    part: Program,
    forward: ForwardPass,
    o: PipelineOptions,
    shared: ExactStep | None,
) -> dict[str, str]:
    """Return the rule that merges each result over micro-batches, by name.

    The user chooses the rule with `Batch.merge` or `dtrans.collect`. Otherwise, it is inferred.

    Args:
      plain: the traced step of a micro-batch, with all equations of its loss.
      part: the same step in another form: its loss function is one equation, and so is each call of
        `dtrans.collect`.
      forward: the forward pass.
      o: the options. With `shared`, its `batch.merge` contains the rules.
      shared: the step of a micro-batch for `batch="exact"`; None for `batch="micro"`.
    """
    step = forward.step
    keys = {n: key for n, key in forward.collected.items() if n in step.results or n in step.params}
    for n, key in _collected_outside(part, step).items():
        if keys.setdefault(n, key) != key:
            raise ConfigError(
                f"{n} is collected under {keys[n]} in the loss, but under {key} outside of the "
                "loss; choose one"
            )
    for n, key in keys.items():
        if shared is not None:
            raise ConfigError(
                f"{n} is collected under {key}, which merges values of micro-batches, but with "
                "batch='exact' results are values of the global batch; leave out dtrans.collect, "
                "or pass batch='micro'"
            )
        if n in o.batch.merge:
            raise ConfigError(
                f"{n} is collected under {key}, but merge[{n!r}] is {o.batch.merge[n]!r}; leave "
                "out one of them"
            )
        if key.endswith("CONCAT") and not step.program.outputs[n].ndim:
            raise ConfigError(
                f"{n} is collected under {key}, but it is 0-d and cannot be concatenated; use a "
                "collection of sums or means"
            )
        if n in step.params and key != "GLOBAL_MEAN":
            raise ConfigError(
                f"{n} is collected under {key}, but it is state, which must be equal on all "
                "replicas; use GLOBAL_MEAN"
            )

    # `infer_merges` does not know collections. It gets a placeholder for each collected result,
    # which is replaced below.
    collected_as = {n: "mean" if n in step.params else "same" for n in keys}
    # `plain` counts the rows of a micro-batch. In an exact step, such state may be precomputed from
    # the full batch, so that all micro-batches return the same value. It gets a placeholder, too.
    exact_state: dict[str, str] = {}
    if shared is not None:
        exact_state = {n: "same" for n in shared.merges if n not in o.batch.merge}
    placeholders = {**collected_as, **dict.fromkeys(exact_state, "max")}
    batch = dataclasses.replace(o.batch, merge={**o.batch.merge, **placeholders})
    merges = infer_merges(
        plain,
        dataclasses.replace(o.over_parts, batch=batch),
        count_remedy=(
            "each micro-batch would count separately; count outside of the step, or use "
            "batch='exact', which counts the rows of the full batch"
        ),
    )
    merges |= retain(exact_state, merges)
    for n in forward.results:
        # If `infer_merges` has no rule for an array of state, the array depends on no micro-batch,
        # so all micro-batches compute the same value. Other results without a rule are summaries,
        # whose values are stacked.
        merges.setdefault(n, "same" if n in step.params else STACK)
    for n, key in keys.items():
        if n in step.results:
            merges[n] = key
    return merges


def _collected_outside(part: Program, step: DividedStep) -> dict[str, str]:
    """Return the merge rules that the step sets with `dtrans.collect` outside of its loss."""
    flat = inline_calls(part.jaxpr, keep=(COLLECT,))
    inner = flat.jaxpr
    around = [e for e in inner.eqns if e.primitive is not value_and_grad_p]
    keys = collected(closed([], [], [], [], around, flat))
    found = {}
    for n, a in zip(part.out_names, inner.outvars, strict=True):
        if not isinstance(a, Var) or a not in keys:
            continue
        if n in step.from_gradients or n in step.opt_state or n in step.optimized:
            raise ConfigError(
                f"{n} is collected under {keys[a]}, but it is computed once, from the gradients of "
                "all micro-batches; leave out dtrans.collect"
            )
        found[n] = keys[a]
    return found


def _homes(
    stages: Sequence[StagePrograms], step: DividedStep
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Return two dicts by parameter: the stage that stores it, and the stages of its gradient.

    Several stages may use one parameter, e.g. a tied embedding. The first stage that computes its
    gradient stores it. A parameter without a gradient is stored on the first stage that reads it.
    If no stage reads it, stage 0 stores it.
    """
    homes: dict[str, int] = {}
    users: dict[str, tuple[int, ...]] = {}
    for n in step.params:
        with_gradient = [s.index for s in stages if n in s.leaves]
        readers = [s.index for s in stages if n in s.params or n in s.results]
        homes[n] = [*with_gradient, *readers, 0][0]
        if with_gradient:
            users[n] = tuple(with_gradient)
    return homes, users
