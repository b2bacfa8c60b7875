"""nccl2 mode: data parallel over collectives. The step keeps its optimizer; gradients are averaged
over trainers.

    forward, backward     each trainer on its part of the batch
    all_reduce            over a named axis, right after the last gradient of a bucket is made, so that XLA can run it
                          beside the rest of the backward pass
    optimize              as it was, on the averaged gradients: the same on every trainer

The program is one for all trainers (SPMD), and computes what one device computes on the whole
batch, whatever the step (`dtrans.batch`): what crosses the batch is reduced where it does. With
`batch="local"` each trainer takes the step on its part alone, and means are averaged: with a
`Batch.example_count` (a count of examples that the step returns) gradients and averaged results are
weighted by it.

With `local_sgd` trainers take whole steps by themselves, and what is reduced after them is
parameters and optimizer state. All trainers have the same state before and after each step of the
job, whichever way.

A *bucket* is a run of gradients of one dtype, in the order in which the backward pass makes them,
up to `Reduce.bucket_MB`. It is one equation with many operands; nothing is copied together. JAX
lowers it to one `stablehlo.all_reduce` for each operand, side by side, and XLA's combiner makes
those one again (also across buckets, where it finds that better; its thresholds are XLA's flags).

Source: `DistributeTranspiler._transpile_nccl2` and the fused all-reduce of ParallelExecutor
  (Paddle).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, axes_of, equations, without_mesh
from dtrans.batch.exact_step import ExactStep, batch_axes, full_type, shard_step
from dtrans.batch.precomputed_micro_steps import PrecomputedMicroSteps, shard_by_parts
from dtrans.data_parallel.accumulation import (
    MicroSteps,
    micro_types,
    write_local_steps,
    write_micro_steps,
)
from dtrans.data_parallel.merge_rules import check_merge, merges_of
from dtrans.data_parallel.options import Options, OptionsT, Reduce
from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.reducer import SAME_FOR_ALL, Reducer, ReduceSpec, buckets_of
from dtrans.data_parallel.replica import fold_keys, take_inputs, write_from_gradients
from dtrans.errors import ConfigError, GradientError
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.program import BACKWARD, FORWARD, OPTIMIZE, Program
from dtrans.ir.pytree import is_under
from dtrans.plan import with_recipe
from dtrans.rows.analysis import leaves_of_state
from dtrans.step.batch_sharing import Batch
from dtrans.step.capture import captured_if_marked
from dtrans.step.cut import GRAD, Cut, Gradient, cut
from dtrans.step.forward_backward import (
    ready_order,
    refuse_across,
    refuse_nested,
    write_trainer_half,
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
    refuse_observers,
)
from dtrans.step.startup import match_startup, normalize_step


@with_recipe
@without_mesh
def nccl2(
    main: Program,
    startup: Program,
    *,
    trainers: int,
    num_micro_batch: int = 1,
    local_sgd: int | None = None,
    trainers_per_node: int = 0,
    reduce: Reduce | str = Reduce(),
    batch: Batch | str = Batch(),
    axis_name: str = "trainers",
) -> CollectivePlan:
    """Plan data-parallel training of a traced step over collectives.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`, for any batch shape.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      trainers: how many trainers share each global batch.
      num_micro_batch: into how many micro-steps each trainer divides its part of the batch. Their
        gradients are added up by a scan, and reduced once. Values of the whole batch that no
        parameter enters (a dropout's mask) are made in front of them.
      local_sgd: how many steps of its own each trainer takes, one after the other on so many parts
        of its part of the batch, before trainers average their parameters and optimizer state
        (local SGD): one reduction in so many steps. What the optimizer counts, other than steps,
        must be named in `batch.merge`.
      trainers_per_node: how many trainers a node has, if gradients are to be reduced inside each
        node, then across nodes, then gathered inside again, so that 1/n of the bytes go between
        nodes. Trainers are then on two axes, `{axis_name}_exter` (nodes) and `{axis_name}_inter`.
      reduce: how gradients are reduced over trainers: a `dtrans.Reduce`, or its `op`, "mean" or
        "sum".
      batch: "exact", for one device's numbers whatever the step; "local", for trainers that each
        take the step on their part alone; or a `dtrans.Batch`, which also says which arrays are
        cut, and how.
      axis_name: of the axis that trainers are on.

    Raises:
      ConfigError: an option that is out of range, or names that the step does not have.
      GradientError: the gradients of the step cannot be told (see `dtrans.step.cut`), or it has
        collectives already.
      TraceError: `startup` does not make what `main` takes.

    Source: `DistributeTranspilerConfig.mode = "nccl2"` in Paddle's distribute_transpiler.py.

    Example:
      >>> import jax, jax.numpy as jnp, optax, dtrans
      >>> tx = optax.sgd(0.5)
      >>> step = dtrans.make_train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), tx)
      >>> init = lambda key: (p := {"w": jnp.zeros(2)}, tx.init(p))
      >>> key, x = jax.random.key(0), jnp.array([[1.0, 3.0], [3.0, 5.0]])
      >>> plan = dtrans.nccl2(dtrans.trace(step, *init(key), x), dtrans.trace(init, key), trainers=2)
      >>> [op.outputs for op in plan.program.ops if op.type == "all_reduce"]
      [('params/w@GRAD.sum',), ('loss.sum',)]
      >>> job = plan.simulate()
      >>> state, loss = job.step(job.init(key), x)
      >>> job.params(state)["w"].tolist(), float(loss)
      ([1.0, 2.0], 11.0)
    """
    main, startup = normalize_step(main, startup)
    options = Options(
        trainers=trainers,
        axis_name=axis_name,
        num_micro_batch=num_micro_batch,
        local_sgd=local_sgd,
        trainers_per_node=trainers_per_node,
        reduce=Reduce.of(reduce),
        batch=Batch.from_option(batch, "exact"),
    )
    return plan_data_parallel(main, startup, options)


def plan_data_parallel(main: Program, startup: Program, options: Options) -> CollectivePlan:
    """Plan data parallelism with options that are checked."""
    refuse_collectives(main)
    plain = cut(main).with_reported()
    check_names(plain, options)
    if options.trainers > 1:
        check_observers(plain.program, plain.observers)
    given, startup = startup, match_startup(plain, startup)
    # what one trainer carries out, and how that becomes one
    step, o, shared = shared_by(plain, options, main)
    merges = merges_of(step, o) if shared is None else shared.merges
    return CollectivePlan(
        main=plain.program,
        startup=startup,
        program=rewritten(step, o, merges),
        options=options,
        buckets=buckets_of(reduced_values(step, o, merges), o),
        merges=merges,
        callers=callers_of(plain.observers, *callers(options)),
        replan=partial(plan_data_parallel, main, given),
        shared=shared,
        for_whole=None
        if shared is None or options.splits_evenly
        else partial(_of_whole, shared, options),
    )


def callers(o: Options) -> tuple[str, str]:
    """Return who calls callbacks of forward and backward, and who calls others."""
    noun = o.noun
    own = f"each {noun}, with values of its own" + (
        ", in each micro-step" if o.micro_steps > 1 else ""
    )
    if o.local_sgd is not None:
        return own, own
    return f"{noun} 0" if o.batch.exact else own, f"{noun} 0"


def _of_whole(
    shared: ExactStep, options: Options, types: Sequence[jax.ShapeDtypeStruct]
) -> Program:
    """Return the program of a trainer for a batch that trainers do not divide."""
    other = shared.for_types(types)
    return rewritten(other.step, options.of(other), other.merges)


def shared_by(
    plain: Cut, options: OptionsT, main: Program | None
) -> tuple[Cut, OptionsT, ExactStep | None]:
    """Return one trainer's step, its options, and the exact split of the batch if there is one.

    Args:
      main: the step as it was traced; None if it was rewritten, as in 16 bits.

    Raises:
      ConfigError: a trainer takes parts of the batch one after the other, and the parts of the step
        do not add up.
      GradientError: gradients are computed from other gradients, and trainers have different ones.
    """
    parts = options.trainers * options.num_micro_batch
    if parts == 1 or options.local_sgd is not None or not options.batch.exact:
        if options.local_sgd is None:
            refuse_nested(plain, options.trainers, options.noun)
        if options.trainers > 1:
            alone = options.local_sgd is not None
            refuse_across(
                plain,
                f"of which each {options.noun} has its own",
                remedy=""
                if alone
                else f"With batch='exact' all {options.noun}s make one update, which may",
            )
        return plain, options.local, None
    given = None
    if options.num_micro_batch > 1:
        of_rows = [dataclasses.replace(x, reads=READS_BATCH) for x in plain.observers if x.rows]
        refuse_observers(of_rows, (READS_BATCH,), "micro-steps have rows of", RETURN_IT)
    if options.num_micro_batch == 1:
        shared = shard_step(plain, options.batch, parts, options.over, noun=options.noun)
    else:
        shared, given = _by_micro_steps(plain, options, main)
    if options.reduce.clip_local_norm is not None and not (shared.proven and given is None):
        raise ConfigError(
            f"clip_local_norm={options.reduce.clip_local_norm!r} clips what each {options.noun}'s "
            "own rows make, and "
            f"{plain.program.name} has values of all of them ({shared.reason}). Say batch='local', "
            "or clip in the "
            "optimizer, which clips the gradient of all"
        )
    if options.num_micro_batch > 1 and not shared.proven:
        raise ConfigError(
            f"num_micro_batch={options.num_micro_batch} takes rows of the batch one after the "
            "other, and "
            f"{plain.program.name} has values of all of them ({shared.reason}). Those that no "
            "parameter enters are "
            "made before. Say batch='local', for values of each part alone, or leave "
            "num_micro_batch out"
        )
    step = shared.step if options.num_micro_batch == 1 else plain
    return step, dataclasses.replace(options.of(shared), given=given), shared


def _by_micro_steps(
    step: Cut, o: Options, main: Program | None
) -> tuple[ExactStep, PrecomputedMicroSteps | None]:
    """Return how the micro-steps of all trainers share the batch, and how they are written."""
    axes, parts = batch_axes(step, o.batch), o.trainers * o.num_micro_batch
    of_part = micro_types(step.program, axes, o.num_micro_batch, o.noun)
    # The user's own step, if parts may take it: a norm clips its gradients, and a scale keeps them
    # in the range of 16 bits. Terms are smaller.
    if o.reduce.clip_local_norm is not None or main is None:
        part = step.program.specialize_flat([*of_part.values()])
        alone = shard_step(cut(part).with_reported(), o.batch, parts, o.over, noun=o.noun)
        if alone.proven or o.reduce.clip_local_norm is not None:
            return alone, None
    whole = step.program.specialize_flat(
        [full_type(t, axes.get(n), parts) for n, t in of_part.items()]
    )
    _refuse_sized(step, cut(whole).with_reported(), o)
    captured = None if main is None else captured_if_marked(whole)
    leaves = leaves_of_state(step.optimize, step.params) if step.state_read else {}
    held = (*step.frozen, *(n for n in step.state_read if n not in leaves))
    written = whole if captured is None else captured
    shared, values = shard_by_parts(written, axes, held, parts, o.over, o.noun)
    micro = PrecomputedMicroSteps(written, values, shared.part, axes, o.trainers, o.over)
    return shared, micro


def _refuse_sized(step: Cut, whole: Cut, o: Options) -> None:
    """Refuse an update, or a result of gradients, that reads rows of the batch or a number of them.

    Each trainer carries it out once, behind its micro-steps, and has its own rows.

    Args:
      step: with a trainer's part of the batch.
      whole: the same with the whole batch.
    """
    if o.trainers > 1 and (found := step.first_difference(whole)) is not None:
        name, line = found
        raise ConfigError(
            f"num_micro_batch={o.num_micro_batch}: {name} of {step.program.name} is made of "
            "gradients and of rows of "
            f"the batch, or of their number ({line}), and each {o.noun} has rows of its own; "
            "divide inside of the loss "
            "function, or leave num_micro_batch out"
        )


# -- what is refused -------------------------------------------------------------------------------


def check_names(step: Cut, o: Options) -> None:
    """Refuse names that the step does not have, and ways to merge that do not fit what they
    name."""
    state = step.frozen if o.local_sgd is None else (*step.params, *step.opt_state)
    mergeable = (*step.results, *state)
    for name, way in o.batch.merge.items():
        if name not in mergeable:
            raise ConfigError(
                f"merge names {name!r}; what {o.noun}s make and can be merged is "
                f"{', '.join(mergeable)}"
            )
        check_merge(name, way, step.program.outputs[name], is_state=name in state, o=o)
    for name in o.batch.unsplit_inputs:
        if not any(is_under(n, [name]) for n in step.batch):
            raise ConfigError(
                f"unsplit_inputs names {name!r}; the arrays of the batch are "
                f"{', '.join(step.batch)}"
            )
    if o.batch.example_count is not None:
        check_example_count(step, o, o.batch.example_count)
    to = o.reduce.compress
    for name, g in step.gradients.items():
        if to is not None and jnp.issubdtype(g.aval.dtype, jnp.complexfloating):
            raise ConfigError(
                f"compress={to!r}: the gradient of {name} is {g.aval.str_short()}, and {to} is real"
            )
    source = step.program
    kept, _ = backward_slice(
        source.eqns,
        [a for n, a in source.outvars.items() if n in step.from_gradients],
        step.boundary.values(),
    )
    if any(source.roles[i] == BACKWARD for i in kept):
        raise GradientError(
            f"{', '.join(step.from_gradients)}: computed from gradients, and from a derivative "
            "that is not known to be "
            "one, as of a leaf that is not updated; take gradients with dtrans.value_and_grad"
        )


def check_example_count(step: Cut, o: Options, name: str) -> None:
    """Refuse what cannot weight gradients."""
    if name not in step.results:
        raise ConfigError(
            f"example_count={name!r} must be a result of the step: {', '.join(step.results)}"
        )
    t = step.program.outputs[name]
    if t.shape != ():
        raise ConfigError(f"example_count={name!r} must be a scalar, it is {t.str_short()}")
    if not jnp.issubdtype(t.dtype, jnp.number):
        raise ConfigError(f"example_count={name!r} must be a number, it is {t.str_short()}")
    if name in step.from_gradients:
        raise ConfigError(
            f"example_count={name!r} is computed from gradients, which it would have to weight"
        )


def refuse_collectives(main: Program) -> None:
    """Refuse a step that communicates by itself, since it would reduce twice."""
    for eqn in equations(main.jaxpr):
        # a number is an axis of an array: of a psum over the axis of a vmap that this is left
        if eqn.primitive.name == "shard_map" or not all(
            isinstance(n, (int, np.integer)) for n in axes_of(eqn)
        ):
            raise GradientError(
                f"{main.name} has a collective in it already ({eqn.primitive.name}): its gradients "
                "may have been "
                "reduced by what the step does itself. Give the step for one device, without "
                "shard_map, pmap or psum"
            )


# -- the rewrite -----------------------------------------------------------------------------------


def reduced_values(step: Cut, o: Options, merges: Mapping[str, str]) -> dict[str, Atom]:
    """Return the values that trainers average, by leaf, in the step's order."""
    if o.local_sgd is None:
        return {n: step.gradients[n] for n in ready_order(step)}
    outs = step.program.outvars
    return {n: outs[n] for n in (*step.params, *step.opt_state) if merges.get(n) == "mean"}


def rewritten(
    step: Cut,
    o: Options,
    merges: Mapping[str, str],
    kind: Callable[[str], ReduceSpec] = lambda leaf: SAME_FOR_ALL,
) -> Program:
    """Return the step with gradients (or state after local steps) and results reduced over the
    axis.

    Args:
      kind: in what way the gradient of a leaf is reduced, where not all are in the same.
    """
    source = step.program
    outs: dict[str, Atom] = source.outvars
    if o.micro_steps > 1 and o.shared is not None:  # micro-steps would call it several times
        step = step.with_observers(STATE, UPDATE)
    b = Builder(source.jaxpr)
    b.role = FORWARD
    keys = take_inputs(b, step, o)
    fold_keys(b, keys, o)
    if o.local_sgd is None:
        outs |= _trained_together(b, step, o, merges, outs, kind)
    else:
        outs |= _trained_apart(b, step, o, merges, outs)

    made = Program.written(f"trainer of {source.name}", b, source.args, source.out, outs)
    return source.rewritten(
        lambda other: rewritten(cut(other).with_reported(), o, merges, kind), result=made
    )


def _trained_together(
    b: Builder,
    step: Cut,
    o: Options,
    merges: Mapping[str, str],
    outs: Mapping[str, Atom],
    kind: Callable[[str], ReduceSpec],
) -> dict[str, Atom]:
    """Write a step on reduced gradients; its outputs by name."""
    vars_of = step.program.invars
    if o.num_micro_batch == 1 and runs_loops_of_forward(step, step.batch):
        step = hand_over(step, step.batch)
    results = [n for n in step.results if n not in step.from_gradients]
    found = dict(outs)
    given: dict[str, Atom] = dict(vars_of)
    values = reduced_values(step, o, merges)
    if o.num_micro_batch == 1:
        reducer = Reducer(b, values, o, outs.get(o.batch.example_count or ""), GRAD, kind)
        made = write_trainer_half(b, step, results, reducer.made)
        given |= {n: made[n] for n in step.handed}
    else:
        made, grads = write_micro_steps(b, step, MicroSteps.of(step, o, merges), results)
        found |= made
        reducer = Reducer(b, values, o, found.get(o.batch.example_count or ""), GRAD, kind)
        for leaf in values:
            reducer.made(leaf, grads[leaf])
    reducer.finish()
    begun = len(b.eqns)

    b.role = OPTIMIZE
    half = step.optimize
    atoms = [reducer.means[n.leaf] if isinstance(n, Gradient) else given[n] for n in half.in_names]
    found |= zip(half.out_names, b.inline(half.jaxpr, *atoms), strict=True)
    found |= write_from_gradients(b, step, found, reducer.means)
    if o.trainers > 1:  # the values of each part alone are each trainer's own to call with
        call_once(b, o.over, 0 if o.shared is not None else begun)
    return found | reducer.merged(found, merges, vars_of)


def _trained_apart(
    b: Builder, step: Cut, o: Options, merges: Mapping[str, str], outs: Mapping[str, Atom]
) -> dict[str, Atom]:
    """Write local steps, and the mean of what they make; its outputs by name."""
    found = {**outs, **write_local_steps(b, step, MicroSteps.of(step, o, merges))}
    values = reduced_values(step, o, merges)
    reducer = Reducer(b, values, o, found.get(o.batch.example_count or ""))
    for leaf in values:
        reducer.made(leaf, found[leaf])
    reducer.finish()
    vars_of = step.program.invars
    others = {n: way for n, way in merges.items() if n not in values}
    return found | reducer.merged(found, others, vars_of) | reducer.means
