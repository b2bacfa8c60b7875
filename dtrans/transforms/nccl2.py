"""nccl2 mode: data parallel over collectives. The step keeps its optimizer; gradients are averaged over trainers.

    forward, backward     each trainer on its part of the batch
    all_reduce            over a named axis, right after the last gradient of a bucket is made, so that XLA can run it
                          beside the rest of the backward pass
    optimize              as it was, on the averaged gradients: the same on every trainer

The program is one for all trainers (SPMD). With a loss that is a mean over the batch, and trainers that see equal
shares of it, it computes what one device computes on the whole batch. With a `weight` (a count of examples that the
step returns) shares need not be equal: gradients and averaged results are weighted by it.

A *bucket* is a run of gradients of one dtype, in the order in which the backward pass makes them, up to
`fuse_grad_size_in_MB`. It is one equation with many operands; nothing is copied together. JAX lowers it to one
`stablehlo.all_reduce` for each operand, side by side, and XLA's combiner makes those one again (also across buckets,
where it finds that better; its thresholds are XLA's flags).

Source: `DistributeTranspiler._transpile_nccl2` and the fused all-reduce of ParallelExecutor (Paddle).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, Literal, Var, equations
from dtrans.collective import CollectivePlan
from dtrans.cut import GRAD, Cut, cut, spread
from dtrans.errors import ConfigError, GradientError
from dtrans.ops import trainer_index_p
from dtrans.program import BACKWARD, FORWARD, OPTIMIZE, Program
from dtrans.rewrite import Builder, needed
from dtrans.transforms.halves import ready_order, refuse_nested, write_trainer_half
from dtrans.transforms.reducer import COMPRESSED, REDUCED, Options, Reducer, buckets_of
from dtrans.transforms.startup import match_startup
from dtrans.transforms.window import write_window


MERGES = (*REDUCED, "concat", "each", "same")


def nccl2(
    main: Program,
    startup: Program,
    *,
    trainers: int,
    axis_name: str = "trainers",
    reduce: str = "mean",
    merge: Mapping[str, str] | None = None,
    weight: str | None = None,
    replicated: Collection[str] = (),
    fuse_grad_size_in_MB: float = 32,
    compress: str | None = None,
    compress_scale: float = 1.0,
    hierarchical_allreduce_inter_nranks: int = 0,
    accumulate_steps: int = 1,
    max_splits: int | None = None,
    nccl_comm_num: int | None = None,
    clip_local_norm: float | None = None,
) -> CollectivePlan:
    """Plan data-parallel training of a traced step over collectives.

    Args:
      main: `dtrans.trace(step, params, opt_state, *batch)`, for any batch shape.
      startup: `dtrans.trace(init, *args)` with `init(*args) -> (params, opt_state)`.
      trainers: how many trainers share each global batch.
      axis_name: of the axis that they are on.
      reduce: "mean" or "sum" of the gradients over trainers; "sum" for a loss that is a sum over the batch.
      merge: what becomes of results, and of parameters that the optimizer does not make (batch statistics), by name:
        "mean", "sum", "max", "concat" (on dim 0), "each" (a leading axis, one row per trainer), or "same" (they are
        equal anyway). By default what grows with the batch is concatenated, other floating-point results are reduced
        as gradients are, and parameters averaged; other results get a row per trainer. What is computed from gradients
        is computed from the reduced ones.
      weight: the name of a result, a scalar that says how many examples a trainer's part of the batch has. It is
        itself added up.
      replicated: names of batch arrays that every trainer gets whole. Others are split on dim 0; 0-d arrays go to every
        trainer, a `jax.random.key` folded with the trainer's number unless it is named here.
      fuse_grad_size_in_MB: the size up to which gradients are reduced together; 0 reduces each by itself.
      compress: "bf16" or "fp16": gradients are reduced in this type, multiplied by `compress_scale` before and divided
        by it after. A sum that overflows is not hidden: it arrives as infinity.
      compress_scale: see `compress`.
      hierarchical_allreduce_inter_nranks: how many trainers a node has, if gradients are to be reduced inside each
        node, then across nodes, then gathered inside again, so that 1/n of the bytes go between nodes. Trainers are
        then on two axes, `{axis_name}_exter` (nodes) and `{axis_name}_inter`.
      accumulate_steps: into how many micro-steps each trainer divides its part of the batch. Their gradients are added
        up by a scan, and reduced once.
      max_splits: EPL's rule of buckets in the place of `fuse_grad_size_in_MB`: at most about so many, of even size.
      nccl_comm_num: how many chains of reductions may run beside each other; within a chain each waits for the one
        before. By default XLA decides.
      clip_local_norm: clip each trainer's own gradients to this global norm *before* they are reduced, as EPL does by
        default. (A clip in the optimizer is one of the reduced gradients.) All reductions then wait for the last
        gradient.

    Raises:
      ConfigError: an option that is out of range, or names that the step does not have.
      GradientError: the gradients of the step cannot be told (see `dtrans.cut`), or it has collectives already.
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
    options = Options(
        trainers=trainers,
        axis_name=axis_name,
        reduce=reduce,
        merge=dict(merge or {}),
        weight=weight,
        replicated=tuple(replicated),
        fuse_grad_size_in_MB=fuse_grad_size_in_MB,
        compress=compress,
        compress_scale=compress_scale,
        inter=hierarchical_allreduce_inter_nranks,
        accumulate_steps=accumulate_steps,
        max_splits=max_splits,
        nccl_comm_num=nccl_comm_num,
        clip_local_norm=clip_local_norm,
    )
    check_options(main, startup, options, replicated)
    refuse_collectives(main)
    step = cut(main).with_observed()
    refuse_nested(step, trainers)
    check_names(step, options)
    startup = match_startup(step, startup)
    merges = merges_of(step, options)
    return CollectivePlan(
        main=step.program,
        startup=startup,
        program=rewritten(step, options, merges),
        trainers=trainers,
        axes=options.axes,
        buckets=buckets_of(step, options),
        merges=merges,
        replicated=options.replicated,
        dropped=step.dropped,
    )


# -- what is refused -------------------------------------------------------------------------------


def check_options(main: Any, startup: Any, o: Any, replicated: Any) -> None:
    """Refuse what cannot be planned, by the option's name."""
    for name, program in (("main", main), ("startup", startup)):
        if not isinstance(program, Program):
            raise ConfigError(f"{name} must be a Program (dtrans.trace(fn, *args)), it is {type(program).__name__}")
    if isinstance(o.trainers, bool) or not isinstance(o.trainers, int) or o.trainers < 1:
        raise ConfigError(
            f"trainers must be a positive number of trainers, it is {o.trainers!r}; endpoints are for "
            "DistributeTranspiler.transpile"
        )
    if not isinstance(o.axis_name, str) or not o.axis_name:
        raise ConfigError(f"axis_name must be the name of an axis, it is {o.axis_name!r}")
    if o.reduce not in ("mean", "sum"):
        raise ConfigError(f"reduce must be 'mean' or 'sum', it is {o.reduce!r}")
    if o.weight is not None and o.reduce != "mean":
        raise ConfigError(f"weight={o.weight!r} is for reduce='mean', it is {o.reduce!r}")
    size = o.fuse_grad_size_in_MB
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not size >= 0:
        raise ConfigError(f"fuse_grad_size_in_MB must be a size in megabytes, 0 or more; it is {size!r}")
    if o.compress is not None and o.compress not in COMPRESSED:
        raise ConfigError(f"compress must be 'bf16', 'fp16' or None, it is {o.compress!r}")
    if isinstance(o.compress_scale, bool) or not isinstance(o.compress_scale, (int, float)) or not o.compress_scale > 0:
        raise ConfigError(f"compress_scale must be a positive number, it is {o.compress_scale!r}")
    if o.compress is None and o.compress_scale != 1.0:
        raise ConfigError(f"compress_scale={o.compress_scale!r} is for compress='bf16' or 'fp16', which is None")
    for name in ("max_splits", "nccl_comm_num"):
        count = getattr(o, name)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"{name} must be a positive number, or None; it is {count!r}")
    norm = o.clip_local_norm
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0):
        raise ConfigError(f"clip_local_norm must be a positive number, or None; it is {norm!r}")
    if isinstance(o.accumulate_steps, bool) or not isinstance(o.accumulate_steps, int) or o.accumulate_steps < 1:
        raise ConfigError(f"accumulate_steps must be a positive number of micro-steps, it is {o.accumulate_steps!r}")
    if isinstance(o.inter, bool) or not isinstance(o.inter, int) or o.inter < 0:
        raise ConfigError(f"hierarchical_allreduce_inter_nranks must be a number of trainers, it is {o.inter!r}")
    if o.inter and (o.trainers % o.inter or not 1 < o.inter < o.trainers):
        raise ConfigError(
            f"hierarchical_allreduce_inter_nranks={o.inter} must divide the {o.trainers} trainers into several nodes "
            "of several trainers each"
        )
    if isinstance(replicated, str):
        raise ConfigError(f"replicated={replicated!r} must be a collection of names of batch arrays")
    for name, way in o.merge.items():
        if way not in MERGES:
            raise ConfigError(f"merge[{name!r}] must be one of {', '.join(MERGES)}; it is {way!r}")


def check_names(step: Cut, o: Options) -> None:
    """Refuse names that the step does not have."""
    mergeable = (*step.results, *step.held)
    for name in o.merge:
        if name not in mergeable:
            raise ConfigError(f"merge names {name!r}; what trainers make and can be merged is {', '.join(mergeable)}")
        if name in step.held and o.merge[name] in ("concat", "each"):
            raise ConfigError(
                f"merge[{name!r}]={o.merge[name]!r}: every trainer has the same parameters; 'mean', 'sum', 'max' or "
                "'same' keep it so"
            )
        way, t = o.merge[name], step.program.outputs[name]
        if way == "concat" and not t.ndim:
            raise ConfigError(f"merge[{name!r}]='concat': it is {t.str_short()}, which has no dim 0; say 'each'")
        number, flag = jnp.issubdtype(t.dtype, jnp.number), jnp.issubdtype(t.dtype, jnp.bool_)
        others = "say 'max' or 'each'" if flag else "say 'sum' or 'each'" if number else "say 'each' or 'same'"
        fits = {"mean": jnp.issubdtype(t.dtype, jnp.inexact), "sum": number, "max": number or flag}
        if not fits.get(way, True):
            raise ConfigError(f"merge[{name!r}]={way!r}: it is {t.str_short()}; {others}")
    for name in o.replicated:
        if not any(n == name or n.startswith(name + "/") for n in step.batch):
            raise ConfigError(f"replicated names {name!r}; the arrays of the batch are {', '.join(step.batch)}")
    if o.weight is not None:
        if o.weight not in step.results:
            raise ConfigError(f"weight={o.weight!r} must be a result of the step: {', '.join(step.results)}")
        if step.program.outputs[o.weight].shape != ():
            raise ConfigError(
                f"weight={o.weight!r} must be a scalar, it is {step.program.outputs[o.weight].str_short()}"
            )
        if not jnp.issubdtype(step.program.outputs[o.weight].dtype, jnp.number):
            raise ConfigError(
                f"weight={o.weight!r} must be a number, it is {step.program.outputs[o.weight].str_short()}"
            )
        if o.weight in step.from_gradients:
            raise ConfigError(f"weight={o.weight!r} is computed from gradients, which it would have to weight")
    for name, g in step.gradients.items():
        if o.compress is not None and jnp.issubdtype(g.aval.dtype, jnp.complexfloating):
            raise ConfigError(
                f"compress={o.compress!r}: the gradient of {name} is {g.aval.str_short()}, and {o.compress} is real"
            )
    source = step.program
    kept, _ = needed(
        source.jaxpr.jaxpr.eqns,
        [a for n, a in zip(source.out_names, source.jaxpr.jaxpr.outvars, strict=True) if n in step.from_gradients],
        step.border.values(),
    )
    if any(source.roles[i] == BACKWARD for i in kept):
        raise GradientError(
            f"{', '.join(step.from_gradients)}: computed from gradients, and from a derivative that is not known to be "
            "one, as of a leaf that is not updated; take gradients with dtrans.value_and_grad"
        )


def refuse_collectives(main: Program) -> None:
    """A step that communicates by itself would reduce twice."""
    for eqn in equations(main.jaxpr):
        axes = [eqn.params.get(key, ()) for key in ("axes", "axis_name")]
        names = [n for a in axes for n in (a if isinstance(a, (tuple, list)) else (a,))]
        # a number is an axis of an array: of a psum over the axis of a vmap that this is left
        if eqn.primitive.name == "shard_map" or not all(isinstance(n, (int, np.integer)) for n in names):
            raise GradientError(
                f"{main.name} has a collective in it already ({eqn.primitive.name}): its gradients may have been "
                "reduced by what the step does itself. Give the step for one device, without shard_map, pmap or psum"
            )


# -- what trainers share ---------------------------------------------------------------------------


def is_replicated(name: str, o: Options) -> bool:
    """Whether an array of the batch was named as one that every trainer gets whole."""
    return any(name == r or name.startswith(r + "/") for r in o.replicated)


def merges_of(step: Cut, o: Options) -> dict[str, str]:
    """What becomes of each result, and of each parameter that trainers make."""
    program = step.program
    made_here = [n for n in step.held if not _unchanged(program, n)]
    parts = o.trainers * o.accumulate_steps
    if parts == 1:
        return {n: "each" if o.merge.get(n) == "each" else "same" for n in (*step.results, *made_here)}
    inner = program.jaxpr.jaxpr
    outs = dict(zip(program.out_names, inner.outvars, strict=True))
    asked = [n for n in step.results if n not in o.merge and (program.outputs[n].ndim or isinstance(outs[n], Literal))]
    grown: Mapping[str, Any] = {}
    grown_outs: Mapping[str, Atom] = {}
    if asked:
        split = [
            n for n in step.batch if program.inputs[n].ndim and not is_replicated(n, o)
        ]  # traced again, on a batch of all trainers
        types = [
            jax.ShapeDtypeStruct((t.shape[0] * parts, *t.shape[1:]) if n in split else t.shape, t.dtype)
            for n, t in program.inputs.items()
        ]
        rows = {program.inputs[n].shape[0]: n for n in split}
        if len(rows) > 1:
            listed = " and ".join(f"{n} has {count}" for count, n in rows.items())
            raise ConfigError(
                f"{', '.join(asked)} may grow with the batch, whose arrays are split over the trainers on dim 0, but "
                f"{listed} rows; name what every trainer needs whole in replicated=(...)"
            )
        whole = program.at_flat(types)
        grown, grown_outs = whole.outputs, dict(zip(whole.out_names, whole.jaxpr.jaxpr.outvars, strict=True))
    of_batch = spread(
        inner.eqns,
        {v: 1 for n, v in zip(program.in_names, inner.invars, strict=True) if n in step.batch},
        dict.fromkeys(step.border.values(), 0),  # what is made of these is made of the reduced ones
    )
    found: dict[str, str] = {}
    for n in (*step.results, *made_here):
        t, out = program.outputs[n], outs[n]
        if n in o.merge:
            found[n] = o.merge[n]
        elif n == o.weight:
            found[n] = "sum"
        elif n in grown and grown[n].shape != t.shape:
            if grown[n].shape != (parts * t.shape[0], *t.shape[1:]):
                raise ConfigError(
                    f"{n} is {t.str_short()} on a trainer's part and {grown[n].str_short()} on the batch of all: "
                    f"it cannot be merged; results may grow with the batch on dim 0 only (or say merge={{{n!r}: ...}})"
                )
            found[n] = "concat"
        elif isinstance(out, Literal):
            found[n] = _static(n, out, grown_outs.get(n), parts)
        elif not of_batch.get(out):
            found[n] = "same"
        elif jnp.issubdtype(t.dtype, jnp.inexact):
            found[n] = o.reduce if n in step.results else "mean"
        elif n in step.held:
            raise ConfigError(
                f"{n} is {t.str_short()} and made of a trainer's part of the batch: say what becomes of it, "
                f"merge={{{n!r}: 'mean'}}, 'sum', 'max' or 'same'"
            )
        elif o.accumulate_steps > 1:
            raise ConfigError(
                f"{n} is {t.str_short()} and made in each of {o.accumulate_steps} micro-steps: say what becomes of it, "
                f"merge={{{n!r}: 'sum'}}, 'max' or 'same' (the last one)"
            )
        else:
            found[n] = "each"
    return found


def _static(name: str, here: Literal, whole: Atom | None, parts: int) -> str:
    """What becomes of a result that is a number: it may be one of the batch, such as its rows."""
    if not isinstance(whole, Literal) or np.array_equal(here.val, whole.val):
        return "same"
    if np.array_equal(parts * np.asarray(here.val), whole.val):
        return "sum"
    raise ConfigError(
        f"{name} is {here.val} on a trainer's part and {whole.val} on the batch of all: say what becomes of it, "
        f"merge={{{name!r}: 'same'}}, 'sum', 'max' or 'each'"
    )


def _unchanged(program: Program, name: str) -> bool:
    ins = dict(zip(program.in_names, program.jaxpr.jaxpr.invars, strict=True))
    outs = dict(zip(program.out_names, program.jaxpr.jaxpr.outvars, strict=True))
    return outs[name] is ins[name]


# -- the rewrite -----------------------------------------------------------------------------------


def rewritten(step: Cut, o: Options, merges: Mapping[str, str]) -> Program:
    """The step with its gradients and results reduced over the axis."""
    source = step.program
    inner = source.jaxpr.jaxpr
    vars_of = dict(zip(source.in_names, inner.invars, strict=True))
    outs: dict[str, Atom] = dict(zip(source.out_names, inner.outvars, strict=True))
    b = Builder(source.jaxpr)
    b.role = FORWARD
    keys = _inputs(b, step, o)
    _fold_keys(b, keys, o)
    local = [n for n in step.results if n not in step.from_gradients]
    reducer = Reducer(b, step, o)
    if o.accumulate_steps == 1:
        write_trainer_half(b, step, local, reducer.made)
    else:
        whole = [n for n in step.batch if is_replicated(n, o)]
        grads, made = write_window(b, step, o.accumulate_steps, local, merges, o.weight, whole)
        outs |= made
        reducer.weighted = True
        reducer.weight = None if o.weight is None else made[o.weight]
        for leaf in ready_order(step):
            reducer.made(leaf, grads[leaf])
    reducer.finish()

    b.role = OPTIMIZE
    half = step.optimize
    given = [reducer.means[n.removesuffix(GRAD)] if n.endswith(GRAD) else vars_of[n] for n in half.in_names]
    outs |= zip(half.out_names, b.inline(half.jaxpr, *given), strict=True)
    outs |= _from_gradients(b, step, outs, reducer.means)
    outs |= reducer.merged(outs, merges)

    def respecialise(types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        return rewritten(cut(source.at_flat(types)).with_observed(), o, merges)

    return Program(
        f"trainer of {source.name}",
        b.build([outs[n] for n in source.out_names]),
        source.args,
        source.out,
        tuple(b.roles),
        b.labels,
        respecialise,
    )


def _inputs(b: Builder, step: Cut, o: Options) -> dict[Var, Var]:
    """Take the step's inputs; those that are keys under another variable, from which the step's own is made."""
    keys: dict[Var, Var] = {}
    for n, v in zip(step.program.in_names, step.program.jaxpr.jaxpr.invars, strict=True):
        is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
        if o.trainers > 1 and n in step.batch and is_key and not v.aval.ndim and not is_replicated(n, o):
            keys[v] = b.input(v.aval)
        else:
            b.invars.append(v)
    return keys


def _fold_keys(b: Builder, keys: Mapping[Var, Var], o: Options) -> None:
    """Give each trainer a key of its own."""
    if not keys:
        return
    (index,) = b.bind(trainer_index_p, over=o.over)
    for own, given in keys.items():
        b.call(jax.random.fold_in, given, index)
        b.eqns[-1] = b.eqns[-1].replace(outvars=[own])  # the step's equations read it under this name


def _from_gradients(b: Builder, step: Cut, outs: Mapping[str, Atom], means: Mapping[str, Atom]) -> dict[str, Atom]:
    """Results that are computed from gradients, from the reduced ones."""
    if not step.from_gradients:
        return {}
    inner = step.program.jaxpr.jaxpr
    border = {v: means[n] for n, v in step.border.items() if n in means}
    env: dict[Var, Atom] = dict(border)
    here = {v for e in b.eqns for v in e.outvars}
    kept, _ = needed(inner.eqns, [outs[n] for n in step.from_gradients], border)
    for i in kept:
        eqn = inner.eqns[i]
        if any(isinstance(a, Var) and a in env for a in eqn.invars):
            atoms = [env.get(a, a) if isinstance(a, Var) else a for a in eqn.invars]
            env.update(zip(eqn.outvars, b.copy(eqn, atoms, [v.aval for v in eqn.outvars]), strict=True))
        elif not here.issuperset(eqn.outvars):
            b.keep(eqn)
    found = {n: outs[n] for n in step.from_gradients}
    return {n: env.get(a, a) if isinstance(a, Var) else a for n, a in found.items()}
