"""`dtrans.nccl2`: data parallelism in which trainers average gradients with collectives.

    forward, backward     each trainer computes gradients of its part of the batch
    all_reduce            over a named axis, right after the last gradient of a bucket, so that XLA
                          can overlap it with the remaining backward pass
    optimize              every trainer computes the same update, from averaged gradients

All trainers run one program (SPMD). For any step, its results equal the results of one device on
the full batch (`dtrans.batch`). If a value mixes rows of the batch, the program reduces over
trainers. With `batch="local"` each trainer computes the step on only its part, and trainers average
gradients and results. If `Batch.example_count` names a result that counts examples, this count
weights averages.

With `local_sgd`, each trainer takes several complete steps without communication. Then the trainers
average parameters and optimizer state. With any option, all trainers have equal state after each
step of the job.

A *bucket* is a sequence of gradients of one dtype, in the order of the backward pass, up to
`Reduce.bucket_MB`. The reduction of a bucket is one equation with many operands, so that gradients
are not copied to one buffer. JAX lowers this equation to one `stablehlo.all_reduce` for each
operand. XLA's combiner merges these again, even across buckets, up to thresholds in XLA's flags.

Source: `DistributeTranspiler._transpile_nccl2` and the fused all-reduce of ParallelExecutor
(Paddle).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, axes_of, equations, without_mesh
from dtrans.batch.exact_step import ExactStep, batch_axes, full_type, shard_step
from dtrans.batch.precomputed_micro_steps import PrecomputedMicroSteps, shard_by_parts
from dtrans.checks import check_together
from dtrans.data_parallel.accumulation import (
    MicroSteps,
    micro_types,
    write_local_steps,
    write_micro_steps,
)
from dtrans.data_parallel.colocated import plan_colocated
from dtrans.data_parallel.device_parts import DeviceParts
from dtrans.data_parallel.merge_rules import check_merge, infer_merges, mergeable_state
from dtrans.data_parallel.options import Options, OptionsT, Reduce
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.reducer import SAME_FOR_ALL, Reducer, ReduceSpec, assign_buckets
from dtrans.data_parallel.replica import fold_keys, take_inputs, write_from_gradients
from dtrans.data_parallel.sequence_axis import find_sequence_axis
from dtrans.errors import ConfigError, GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.program import BACKWARD, FORWARD, OPTIMIZE, Program
from dtrans.ir.pytree import is_under
from dtrans.ir.selection import subset
from dtrans.plan import with_recipe
from dtrans.rows.analysis import leaves_of_state
from dtrans.step.batch_sharing import Batch
from dtrans.step.capture import captured_if_marked
from dtrans.step.forward_backward import (
    ready_order,
    refuse_inseparable,
    refuse_nested,
    write_trainer_half,
)
from dtrans.step.halves import (
    GRAD,
    DividedStep,
    Gradient,
    divide_again,
    divide_step,
    leave_undivided,
)
from dtrans.step.handed_values import hand_over, runs_loops_of_forward
from dtrans.step.observers import (
    FORWARD as READS_BATCH,
    RETURN_IT,
    STATE,
    UPDATE,
    call_once,
    callers_of,
    check_observers,
    refuse_calls,
    refuse_observers,
)
from dtrans.step.startup import match_startup, normalize_step
from dtrans.tensor_parallel.mesh_option import DATA, MODEL, MeshSizes, sizes_of_mesh
from dtrans.tensor_parallel.model_axis import ModelState, shard_state


@with_recipe
@without_mesh
def nccl2(
    main: Program,
    startup: Program,
    *,
    trainers: int | None = None,
    mesh: Mapping[str, int | str] | None = None,
    num_micro_batch: int = 1,
    local_sgd: int | None = None,
    trainers_per_node: int = 0,
    reduce: Reduce | str = Reduce(),
    batch: Batch | str = Batch(),
    axis_name: str = "trainers",
) -> CollectivePlan:
    """Plan data-parallel training in which trainers average their gradients with collectives.

    Each trainer computes gradients of its part of the batch. An all-reduce sums them, and every
    trainer computes the same update. The plan runs nothing; call `plan.on_mesh()` or
    `plan.on_cluster()` next.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`, for any batch shape.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      trainers: the number of trainers among which each batch is divided.
      mesh: replaces `trainers` and `axis_name`: the number of devices along each axis, such as
        {"data": 4, "model": 2}. The batch is divided over "data". The parameters of `dtrans.split`
        scopes, and their optimizer state, are divided over "model". The sequences of the batch are
        divided over "sequence" (`Batch.sequence`). With {"data": 4, "model": "data"}, the trainers
        also divide the parameters of these scopes. They then compute such a layer together, for the
        rows of all trainers.
      num_micro_batch: the number of micro-batches into which each trainer splits its part of the
        batch. A scan adds up their gradients, and the sum is reduced once. Values that depend on
        the full batch, but not on parameters (a dropout mask), are computed before the scan.
      local_sgd: the number of steps that each trainer takes without communication, before trainers
        average parameters and optimizer state (local SGD). Each step reads one part of the
        trainer's batch. If the optimizer's state has a count of anything but steps, `batch.merge`
        must say how to merge this count.
      trainers_per_node: the number of trainers in a node, for hierarchical reductions; 0 for flat
        ones. A hierarchical reduction reduces inside each node, then across nodes, and gathers
        inside each node. With n trainers in a node, 1/n of the bytes cross nodes. The mesh then has
        two axes: `{axis_name}_exter` over nodes, and `{axis_name}_inter` over the trainers of a
        node.
      reduce: the reduction of gradients: a `dtrans.Reduce`, or its `op`, "mean" or "sum".
      batch: "exact" computes, for any step, the results of one device on the full batch. With
        "local", each trainer computes the step on only its part of the batch. A `dtrans.Batch` also
        selects the arrays and dimensions to split.
      axis_name: the name of the trainers' axis.

    Raises:
      ConfigError: an option is out of range, or names an array that the step does not have.
      GradientError: an option needs gradients that cannot be found (see `dtrans.step.halves`), or
        the step has collectives already.
      TraceError: the outputs of `startup` do not match the arguments of `main`.

    Source: `DistributeTranspilerConfig.mode = "nccl2"` in Paddle's distribute_transpiler.py.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.zeros(2)}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.array([[1.0, 3.0], [3.0, 5.0]])
      >>> main, startup = dtrans.trace(step, *init(key), x), dtrans.trace(init, key)
      >>> plan = dtrans.nccl2(main, startup, trainers=2)
      >>> [op.outputs for op in plan.program.ops if op.type == "all_reduce"]
      [('params/w@GRAD.sum',), ('loss.sum',)]
      >>> job = plan.simulate()
      >>> state, loss = job.step(job.init(key), x)
      >>> job.params(state)["w"].tolist(), float(loss)
      ([1.0, 2.0], 11.0)
    """
    main, startup = normalize_step(main, startup)
    model: int | str = 0
    sequence = 0
    if mesh is not None:
        sizes = _from_mesh(mesh, trainers, trainers_per_node, axis_name)
        (trainers, model, sequence), axis_name = sizes, DATA
    options = Options(
        trainers=trainers,  # type: ignore[arg-type]  # `Options` checks it
        axis_name=axis_name,
        model=0 if model == DATA else model,  # type: ignore[arg-type]
        sequence=sequence,
        colocated=model == DATA,
        num_micro_batch=num_micro_batch,
        local_sgd=local_sgd,
        trainers_per_node=trainers_per_node,
        reduce=Reduce.from_option(reduce),
        batch=Batch.from_option(batch, "exact", one_program="dtrans.nccl2"),
    )
    return plan_data_parallel(main, startup, options)


def _from_mesh(
    mesh: Mapping[str, int | str], trainers: int | None, trainers_per_node: int, axis_name: str
) -> MeshSizes:
    """Read the sizes of the axes from the option `mesh`, and refuse options that it replaces."""
    others = {
        f"trainers={trainers}": trainers is not None,
        f"trainers_per_node={trainers_per_node}": trainers_per_node != 0,
        f"axis_name={axis_name!r}": axis_name != "trainers",
    }
    check_together(others, "the mesh has the axes; leave one of the two out", f"mesh={mesh!r}")
    return sizes_of_mesh(mesh)


def plan_data_parallel(main: Program, startup: Program, options: Options) -> CollectivePlan:
    """Plan data-parallel training from options that `dtrans.nccl2` has checked."""
    refuse_collectives(main)
    plain = divide_if_possible(main, options)
    check_names(plain, options)
    if options.colocated:
        return plan_colocated(plain, startup, options, partial(plan_data_parallel, main, startup))
    if options.trainers > 1:
        check_observers(plain.program, plain.observers)
    if options.has_devices:
        refuse_calls(plain.observers)
    matched = match_startup(plain.program, startup)
    step, trainer_options, shared = share_step(plain, options, main)
    merges = infer_merges(step, trainer_options) if shared is None else shared.merges
    program = write_trainer(step, trainer_options, merges)
    buckets = assign_buckets(reduced_values(step, trainer_options, merges), trainer_options)
    for_uneven_batch = None
    if shared is not None and not options.splits_evenly:
        for_uneven_batch = partial(write_uneven, shared, options)
    parts = DeviceParts(program, buckets, for_uneven_batch)
    state: ModelState | None = None
    if options.model:
        state = shard_state(plain, MODEL, options.model)
        parts = parts.on_model_axis(state, plain.program.inputs)
    sequence = find_sequence_axis(plain, options)
    if sequence is not None:
        parts = parts.on_sequence_axis(sequence)
    return CollectivePlan(
        main=plain.program,
        startup=matched,
        options=options,
        merges=merges,
        callback_notes=callers_of(plain.observers, *callers(options)),
        replan=partial(plan_data_parallel, main, startup),
        shared=shared,
        model_state=state,
        sequence=sequence,
        **parts.fields,
    )


def divide_if_possible(main: Program, options: Options) -> DividedStep:
    """Divide a step at its gradients; return the undivided step if no gradients are found.

    If no option needs gradients, the batch of an undivided step can be split, too.

    Raises:
      GradientError: the program is not a training step, or an option needs the gradients.
    """
    try:
        plain = divide_step(main).with_reported()
        _check_gradient_results(plain)
    except GradientError as e:
        if options.need_of_gradients:
            raise GradientError(f"{e}. Or {options.need_of_gradients}") from None
        return leave_undivided(main, str(e))
    return plain


def callers(options: Options) -> tuple[str, str]:
    """Return two phrases for the plan's notes, such as "trainer 0": they name who runs callbacks.

    The first phrase names the trainers that run host callbacks in forward and backward. The second
    names the trainers that run all other host callbacks.
    """
    noun = options.noun
    each = f"each {noun}, with its own values"
    if options.micro_steps > 1:
        each += ", in each micro-step"
    if options.local_sgd is not None:
        return each, each
    return f"{noun} 0" if options.batch.exact else each, f"{noun} 0"


def write_uneven(
    shared: ExactStep, options: Options, types: Sequence[jax.ShapeDtypeStruct]
) -> Program:
    """Write a trainer's program for a batch that the number of trainers does not divide.

    Args:
      shared: the split of the batch, which can be derived for other numbers of rows.
      options: the options of the data-parallel strategy.
      types: the types of the step's inputs, with the new batch.
    """
    other = shared.for_types(types)
    return write_trainer(other.step, options.with_shared(other), other.merges)


def share_step(
    plain: DividedStep,
    options: OptionsT,
    main: Program | None,
    pieces: Mapping[str, int] = MappingProxyType({}),
) -> tuple[DividedStep, OptionsT, ExactStep | None]:
    """Rewrite the single-device step for one trainer, which reads only its part of the batch.

    With `batch="exact"`, the trainer's step contains communication. Its results then equal the
    results of the full batch.

    Args:
      plain: the training step, divided at its gradients.
      options: the user's options.
      main: the traced step. None if `plain` was modified after tracing, for example to compute in
        16 bits.
      pieces: sliced dimension of each array of state that trainers store in pieces.

    Returns:
      The step, the options for writing it, and the exact split of the batch (None with
      `batch="local"`).

    Raises:
      ConfigError: the options have micro-steps or a local clip, but the step is not a sum over
        parts of the batch.
      GradientError: a gradient depends on another gradient, which would differ between trainers.
    """
    parts = options.trainers * options.num_micro_batch
    if parts == 1 or options.local_sgd is not None or not options.batch.exact:
        _refuse_differing_gradients(plain, options)
        return plain, options.local, None
    precomputed = None
    if options.num_micro_batch == 1:
        shared = shard_step(
            plain, options.batch, parts, options.over, pieces=pieces, noun=options.noun
        )
    else:
        # reject callbacks that read rows, since each call would see only one micro-step's rows
        of_rows = [dataclasses.replace(x, reads=READS_BATCH) for x in plain.observers if x.rows]
        refuse_observers(of_rows, (READS_BATCH,), "micro-steps have rows of", RETURN_IT)
        shared, precomputed = _by_micro_steps(plain, options, main)
    _refuse_mixed_rows(plain.program.name, shared, options, is_sum=precomputed is None)
    step = shared.step if options.num_micro_batch == 1 else plain
    options = dataclasses.replace(options.with_shared(shared), precomputed=precomputed)
    return step, options, shared


def _refuse_differing_gradients(step: DividedStep, options: Options) -> None:
    """Raise GradientError if a gradient depends on another one, which would differ by trainer."""
    if options.local_sgd is None:
        refuse_nested(step, options.trainers, options.noun)
    if options.trainers > 1:
        # with local steps there is no batch='exact' to recommend
        remedy = ""
        if options.local_sgd is None:
            remedy = "Or pass batch='exact', where one program computes both"
        refuse_inseparable(step, f"which differs by {options.noun}", remedy=remedy)


def _refuse_mixed_rows(name: str, shared: ExactStep, options: Options, *, is_sum: bool) -> None:
    """Raise ConfigError if an option needs a step that is a sum over parts, but the step is not.

    Local clips and micro-steps need such a step. Its gradients are a sum: each part of the batch
    contributes a term that depends only on this part.

    Args:
      name: the name of the step.
      shared: the split of the batch.
      options: the options of the data-parallel strategy.
      is_sum: True if micro-steps read only their part of the batch, and no value that is computed
        before them from the full batch.
    """
    mixed = f"{name} has values that depend on all rows ({shared.reason})"
    if options.reduce.clip_local_norm is not None and not (shared.proven and is_sum):
        raise ConfigError(
            f"clip_local_norm={options.reduce.clip_local_norm!r} clips the gradient of each "
            f"{options.noun}'s rows, but {mixed}; pass batch='local', or clip the reduced gradient "
            "in the optimizer"
        )
    if options.num_micro_batch > 1 and not shared.proven:
        raise ConfigError(
            f"with num_micro_batch={options.num_micro_batch} a step reads parts of the batch one "
            f"after the other, but {mixed} and on a parameter; pass batch='local' to compute such "
            "values from each part alone, or leave num_micro_batch out"
        )


def _by_micro_steps(
    step: DividedStep, options: Options, main: Program | None
) -> tuple[ExactStep, PrecomputedMicroSteps | None]:
    """Split the batch over the micro-steps of all trainers.

    Returns:
      The split; and the values that trainers compute from the full batch before their micro-steps.
      The second is None if there are no such values.
    """
    axes, parts = batch_axes(step, options.batch), options.trainers * options.num_micro_batch
    of_part = micro_types(step.program, axes, options.num_micro_batch, options.noun)
    # If the step is a sum over parts, prefer to run the step itself on each part. The alternative
    # computes terms of the gradients. Terms are smaller than gradients: a clip by norm would change
    # too few of them, and in 16 bits they may underflow.
    if options.reduce.clip_local_norm is not None or main is None:
        part = step.program.specialize_flat([*of_part.values()])
        alone = shard_step(
            divide_step(part).with_reported(), options.batch, parts, options.over, noun=options.noun
        )
        if alone.proven or options.reduce.clip_local_norm is not None:
            return alone, None
    full_types = [full_type(t, axes.get(n), parts) for n, t in of_part.items()]
    full = step.program.specialize_flat(full_types)
    _refuse_sized(step, divide_step(full).with_reported(), options)
    captured = None if main is None else captured_if_marked(full)
    leaves = leaves_of_state(step.optimize, step.params) if step.state_read else {}
    constants = (*step.frozen, *(n for n in step.state_read if n not in leaves))
    written = full if captured is None else captured
    shared, values = shard_by_parts(written, axes, constants, parts, options.over, options.noun)
    return shared, PrecomputedMicroSteps(
        written, values, shared.part, axes, options.trainers, options.over
    )


def _refuse_sized(step: DividedStep, full: DividedStep, options: Options) -> None:
    """Raise ConfigError if the update, or a result of gradients, depends on rows or their number.

    After the micro-steps, each trainer would compute this update or result from only its rows.

    Args:
      step: the step with a trainer's part of the batch.
      full: the step with the full batch.
      options: the options of the data-parallel strategy.
    """
    if options.trainers > 1 and (found := step.first_difference(full)) is not None:
        name, line = found
        raise ConfigError(
            f"num_micro_batch={options.num_micro_batch}: {name} of {step.program.name} depends on "
            f"gradients, and also on rows of the batch or on their number ({line}), and each "
            f"{options.noun} has different rows; divide inside the loss function, or leave "
            "num_micro_batch out"
        )


# -- checks ----------------------------------------------------------------------------------------


def check_names(step: DividedStep, options: Options) -> None:
    """Raise ConfigError if an option names an array that the step lacks, or a wrong merge rule.

    Args:
      step: the training step, divided at its gradients.
      options: the options `merge`, `unsplit_inputs`, `example_count` and `compress` are checked.
    """
    state = mergeable_state(step, options)
    mergeable = (*step.results, *state)
    for name, way in options.batch.merge.items():
        if name not in mergeable:
            raise ConfigError(
                f"merge names {name!r}, expected an output of {options.noun}s: "
                f"{', '.join(mergeable)}"
            )
        check_merge(name, way, step.program.outputs[name], is_state=name in state, options=options)
    for name in options.batch.unsplit_inputs:
        if not any(is_under(n, [name]) for n in step.batch):
            raise ConfigError(
                f"unsplit_inputs names {name!r}, expected an array of the batch: "
                f"{', '.join(step.batch)}"
            )
    if options.batch.example_count is not None:
        check_example_count(step, options, options.batch.example_count)
    to = options.reduce.compress
    for name, g in step.gradients.items():
        if to is not None and jnp.issubdtype(g.aval.dtype, jnp.complexfloating):
            raise ConfigError(
                f"compress={to!r}: the gradient of {name} is {g.aval.str_short()}, but {to} has no "
                "complex numbers; leave compress out"
            )
    _check_gradient_results(step)


def _check_gradient_results(step: DividedStep) -> None:
    """Raise GradientError if a result reads a derivative that is not a gradient of a parameter.

    The plan reduces only gradients of parameters, so this derivative would differ between trainers.
    """
    source = step.program
    results = [a for n, a in source.outvars.items() if n in step.from_gradients]
    needed, _ = backward_slice(source.eqns, results, step.boundary.values())
    if any(source.roles[i] == BACKWARD for i in needed):
        raise GradientError(
            f"{', '.join(step.from_gradients)}: computed from gradients and from another "
            "derivative, for example of a leaf that is not updated; take gradients with "
            "dtrans.value_and_grad"
        )


def check_example_count(step: DividedStep, options: Options, name: str) -> None:
    """Raise ConfigError if a result cannot be used as the weight of a trainer's gradients.

    Args:
      step: the training step, divided at its gradients.
      options: the options of the data-parallel strategy.
      name: the name of the result.
    """
    if name not in step.results:
        raise ConfigError(
            f"example_count={name!r} is not a result of the step; name one of "
            f"{', '.join(step.results)}"
        )
    t = step.program.outputs[name]
    if t.shape != ():
        raise ConfigError(f"example_count={name!r} is {t.str_short()}; expected a scalar")
    if not jnp.issubdtype(t.dtype, jnp.number):
        raise ConfigError(f"example_count={name!r} is {t.str_short()}; expected a number")
    if name in step.from_gradients:
        raise ConfigError(
            f"example_count={name!r} is computed from gradients, but the count must weight these "
            "gradients; return a count of the batch's rows"
        )


def refuse_collectives(main: Program) -> None:
    """Raise GradientError if the user's step has collectives, such as `jax.lax.psum`.

    The gradients of such a step would be reduced twice.
    """
    for eqn in equations(main.jaxpr):
        # ignore integer axes: jax.vmap turns a psum over its axis into a sum over this dimension
        is_local = all(isinstance(n, (int, np.integer)) for n in axes_of(eqn))
        if eqn.primitive.name == "shard_map" or not is_local:
            raise GradientError(
                f"{main.name} has a collective already ({eqn.primitive.name}), which may have "
                "reduced its gradients; pass the step for one device, without shard_map, pmap or "
                "psum"
            )


# -- the rewrite -----------------------------------------------------------------------------------


def reduced_values(
    step: DividedStep, options: Options, merges: Mapping[str, str]
) -> dict[str, Atom]:
    """Return the values that trainers average: gradients, or state after local steps.

    Gradients are in the order in which the backward pass computes them.
    """
    if options.local_sgd is None:
        return subset(step.gradients, ready_order(step))
    outs = step.program.outvars
    return {n: outs[n] for n in (*step.params, *step.opt_state) if merges.get(n) == "mean"}


def write_trainer(
    step: DividedStep,
    options: Options,
    merges: Mapping[str, str],
    kind: Callable[[str], ReduceSpec] = lambda leaf: SAME_FOR_ALL,
) -> Program:
    """Write the program that each trainer runs, with the reductions of gradients and results.

    Args:
      step: the step of one trainer.
      options: the options of the data-parallel strategy.
      merges: the merge rule of each output.
      kind: function from the name of a leaf to the `ReduceSpec` of its gradient.
    """
    source = step.program
    outs: dict[str, Atom] = source.outvars
    if options.micro_steps > 1 and options.shared is not None:
        # each micro-step would call a callback that reads only parameters, so move it to the update
        step = step.with_observers(STATE, UPDATE)
    b = Builder(source.jaxpr)
    b.role = FORWARD
    keys = take_inputs(b, step, options)
    fold_keys(b, keys, options)
    if options.local_sgd is None:
        outs |= _write_shared_update(b, step, options, merges, outs, kind)
    else:
        outs |= _write_averaged_state(b, step, options, merges, outs)

    program = Program.written(f"{options.noun} of {source.name}", b, source.args, source.out, outs)
    return source.rewritten(
        lambda other: write_trainer(
            divide_again(step, other).with_reported(), options, merges, kind
        ),
        result=program,
    )


def _write_shared_update(
    b: Builder,
    step: DividedStep,
    options: Options,
    merges: Mapping[str, str],
    outs: Mapping[str, Atom],
    kind: Callable[[str], ReduceSpec],
) -> dict[str, Atom]:
    """Write a trainer's step, with an update that reads the reduced gradients.

    Returns:
      The outputs by name.
    """
    vars_of = step.program.invars
    if options.num_micro_batch == 1 and runs_loops_of_forward(step, step.batch):
        step = hand_over(step, step.batch)
    results = [n for n in step.results if n not in step.from_gradients]
    found = dict(outs)
    inputs: dict[str, Atom] = dict(vars_of)
    values = reduced_values(step, options, merges)
    if options.num_micro_batch == 1:
        reducer = Reducer(
            b, values, options, outs.get(options.batch.example_count or ""), GRAD, kind
        )
        outputs = write_trainer_half(b, step, results, reducer.add)
        inputs |= subset(outputs, step.handed)
    else:
        window = MicroSteps.from_options(step, options, merges)
        outputs, grads = write_micro_steps(b, step, window, results)
        found |= outputs
        reducer = Reducer(
            b, values, options, found.get(options.batch.example_count or ""), GRAD, kind
        )
        for leaf in values:
            reducer.add(leaf, grads[leaf])
    reducer.finish()
    begun = len(b.eqns)

    b.role = OPTIMIZE
    half = step.optimize
    atoms: list[Atom] = []
    for n in half.in_names:
        atoms.append(reducer.means[n.leaf] if isinstance(n, Gradient) else inputs[n])
    found |= zip(half.out_names, b.inline(half.jaxpr, *atoms), strict=True)
    found |= write_from_gradients(b, step, found, reducer.means)
    if options.trainers > 1:
        # with batch='local', each trainer runs its own callbacks of forward and backward
        call_once(b, options.over, 0 if options.shared is not None else begun)
    return found | reducer.reduce_results(found, merges, vars_of)


def _write_averaged_state(
    b: Builder,
    step: DividedStep,
    options: Options,
    merges: Mapping[str, str],
    outs: Mapping[str, Atom],
) -> dict[str, Atom]:
    """Write a trainer's local steps, then the average of all trainers' state (local SGD).

    Returns:
      The outputs by name.
    """
    found = {**outs, **write_local_steps(b, step, MicroSteps.from_options(step, options, merges))}
    values = reduced_values(step, options, merges)
    reducer = Reducer(b, values, options, found.get(options.batch.example_count or ""))
    for leaf in values:
        reducer.add(leaf, found[leaf])
    reducer.finish()
    vars_of = step.program.invars
    others = {n: way for n, way in merges.items() if n not in values}
    return found | reducer.reduce_results(found, others, vars_of) | reducer.means
