"""nccl2 mode: data parallel over collectives. The step keeps its optimizer; gradients are averaged over trainers.

    forward, backward     each trainer on its part of the batch
    all_reduce            over a named axis, right after the last gradient of a bucket is made, so that XLA can run it
                          beside the rest of the backward pass
    optimize              as it was, on the averaged gradients: the same on every trainer

The program is one for all trainers (SPMD). With a loss that is a mean over the batch, and trainers that see equal
shares of it, it computes what one device computes on the whole batch. With a `weight` (a count of examples that the
step returns) shares need not be equal: gradients and averaged results are weighted by it.

A *bucket* is a run of gradients of one dtype, in the order in which the backward pass makes them, up to
`fuse_grad_size_in_MB`. It is one variadic reduction; nothing is copied together.

Source: `DistributeTranspiler._transpile_nccl2` and the fused all-reduce of ParallelExecutor (Paddle).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, Literal, Var, equations
from dtrans.collective import Bucket, CollectivePlan
from dtrans.cut import GRAD, Cut, cut, spread
from dtrans.errors import ConfigError, GradientError
from dtrans.ops import all_reduce_p, trainer_index_p
from dtrans.program import DIST, FORWARD, OPTIMIZE, Program
from dtrans.rewrite import Builder, needed
from dtrans.transforms.halves import ready_order, write_trainer_half
from dtrans.transforms.startup import match_startup


COMPRESSED = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
REDUCED = {"mean": "sum", "sum": "sum", "max": "max"}  # merge to operation
MERGES = (*REDUCED, "concat", "each", "same")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `nccl2`, which says what they are."""

    trainers: int
    axis_name: str
    reduce: str
    merge: Mapping[str, str]
    weight: str | None
    replicated: tuple[str, ...]
    fuse_grad_size_in_MB: float
    compress: str | None
    compress_scale: float


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
        equal anyway). By default what grows with the batch is concatenated, other floating-point values are reduced as
        gradients are, and other results get a row per trainer.
      weight: the name of a result, a scalar that says how many examples a trainer's part of the batch has.
      replicated: names of batch arrays that every trainer gets whole. Others are split on dim 0; 0-d arrays go to every
        trainer, a `jax.random.key` folded with the trainer's number unless it is named here.
      fuse_grad_size_in_MB: the size up to which gradients are reduced together; 0 reduces each by itself.
      compress: "bf16" or "fp16": gradients are reduced in this type, multiplied by `compress_scale` before and divided
        by it after. A sum that overflows is not hidden: it arrives as infinity.
      compress_scale: see `compress`.

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
    )
    check_options(main, startup, options, replicated)
    refuse_collectives(main)
    step = cut(main)
    check_names(step, options)
    startup = match_startup(step, startup)
    merges = merges_of(step, options)
    return CollectivePlan(
        main=step.program,
        startup=startup,
        program=rewritten(step, options, merges),
        trainers=trainers,
        axis_name=axis_name,
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
        if o.merge[name] == "mean" and not jnp.issubdtype(step.program.outputs[name].dtype, jnp.inexact):
            raise ConfigError(
                f"merge[{name!r}]='mean': it is {step.program.outputs[name].str_short()}; say 'sum' or 'each'"
            )
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
        if o.weight in step.from_gradients:
            raise ConfigError(f"weight={o.weight!r} is computed from gradients, which it would have to weight")


def refuse_collectives(main: Program) -> None:
    """A step that communicates by itself would reduce twice."""
    for eqn in equations(main.jaxpr):
        axes = eqn.params.get("axes", ()) if eqn.primitive.name.startswith(("psum", "pm")) else ()
        if (
            eqn.primitive.name == "shard_map"
            or any(isinstance(a, str) for a in axes)
            or "axis_index_groups" in eqn.params
        ):
            raise GradientError(
                f"{main.name} has a collective in it already ({eqn.primitive.name}): its gradients may have been "
                "reduced by what the step does itself. Give the step for one device, without shard_map, pmap or psum"
            )


# -- what trainers share ---------------------------------------------------------------------------


def is_replicated(name: str, o: Options) -> bool:
    """Whether an array of the batch was named as one that every trainer gets whole."""
    return any(name == r or name.startswith(r + "/") for r in o.replicated)


def buckets_of(step: Cut, o: Options) -> tuple[Bucket, ...]:
    """Gradients that are reduced together, in the order in which their last one is made."""
    limit = o.fuse_grad_size_in_MB * 2**20
    open_: dict[Any, list[str]] = {}
    size: dict[Any, int] = {}
    order = ready_order(step)
    done: list[tuple[str, ...]] = []
    for leaf in order:
        aval = step.gradients[leaf].aval
        nbytes = aval.size * aval.dtype.itemsize
        if open_.get(aval.dtype) and size[aval.dtype] + nbytes > limit:
            done.append(tuple(open_.pop(aval.dtype)))
        open_.setdefault(aval.dtype, []).append(leaf)
        size[aval.dtype] = nbytes + (size[aval.dtype] if len(open_[aval.dtype]) > 1 else 0)
    done += map(tuple, open_.values())
    at = {leaf: i for i, leaf in enumerate(order)}
    done.sort(key=lambda leaves: at[leaves[-1]])
    types = {leaf: step.gradients[leaf].aval for leaf in order}
    return tuple(
        Bucket(
            f"bucket/{i}",
            leaves,
            types[leaves[0]].dtype,
            sum(types[n].size for n in leaves) * np.dtype(_sent(types[leaves[0]].dtype, o)).itemsize,
        )
        for i, leaves in enumerate(done)
    )


def _sent(dtype: Any, o: Options) -> Any:
    """The type in which gradients of a type are reduced."""
    return dtype if o.compress is None else COMPRESSED[o.compress]


def merges_of(step: Cut, o: Options) -> dict[str, str]:
    """What becomes of each result, and of each parameter that trainers make."""
    program = step.program
    made_here = [n for n in step.held if not _unchanged(program, n)]
    if o.trainers == 1:
        return dict.fromkeys((*step.results, *made_here), "same")
    asked = [n for n in step.results if n not in o.merge and program.outputs[n].ndim]
    grown: Mapping[str, Any] = {}
    if asked:
        split = [
            n for n in step.batch if program.inputs[n].ndim and not is_replicated(n, o)
        ]  # traced again, on a batch of all trainers
        types = [
            jax.ShapeDtypeStruct((t.shape[0] * o.trainers, *t.shape[1:]) if n in split else t.shape, t.dtype)
            for n, t in program.inputs.items()
        ]
        grown = program.at_flat(types).outputs
    inner = program.jaxpr.jaxpr
    outs = dict(zip(program.out_names, inner.outvars, strict=True))
    of_batch = spread(
        inner.eqns, {v: 1 for n, v in zip(program.in_names, inner.invars, strict=True) if n in step.batch}, {}
    )
    found: dict[str, str] = {}
    for n in (*step.results, *made_here):
        t, out = program.outputs[n], outs[n]
        if n in o.merge:
            found[n] = o.merge[n]
        elif n in grown and grown[n].shape != t.shape:
            if grown[n].shape != (o.trainers * t.shape[0], *t.shape[1:]):
                raise ConfigError(
                    f"{n} is {t.str_short()} on a trainer's part and {grown[n].str_short()} on the batch of all: "
                    f"it cannot be merged; results may grow with the batch on dim 0 only (or say merge={{{n!r}: ...}})"
                )
            found[n] = "concat"
        elif isinstance(out, Literal) or not of_batch.get(out):
            found[n] = "same"
        elif jnp.issubdtype(t.dtype, jnp.inexact):
            found[n] = o.reduce
        elif n in step.held:
            raise ConfigError(
                f"{n} is {t.str_short()} and made of a trainer's part of the batch: say what becomes of it, "
                f"merge={{{n!r}: 'mean'}}, 'sum', 'max' or 'same'"
            )
        else:
            found[n] = "each"
    return found


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
    reducer = _Reducer(b, step, o)
    write_trainer_half(b, step, local, reducer.made)
    reducer.finish()

    b.role = OPTIMIZE
    half = step.optimize
    env: dict[Var, Atom] = {}
    for n, v in zip(half.in_names, half.jaxpr.jaxpr.invars, strict=True):
        env[v] = reducer.means[n.removesuffix(GRAD)] if n.endswith(GRAD) else vars_of[n]
    env.update((v, b.constant(c)) for v, c in zip(half.jaxpr.jaxpr.constvars, half.jaxpr.consts, strict=True))
    read: Callable[[Atom], Atom] = lambda a: env.get(a, a) if isinstance(a, Var) else a
    for eqn in half.jaxpr.jaxpr.eqns:
        made = b.copy(eqn, [read(a) for a in eqn.invars], [v.aval for v in eqn.outvars])
        env.update(zip(eqn.outvars, made, strict=True))
    outs |= {n: read(a) for n, a in zip(half.out_names, half.jaxpr.jaxpr.outvars, strict=True)}
    outs |= _from_gradients(b, step, outs, reducer.means)
    outs |= reducer.merged(outs, merges)

    def respecialise(types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        return rewritten(cut(source.at_flat(types)), o, merges)

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
    (index,) = b.bind(trainer_index_p, over=o.axis_name)
    for own, given in keys.items():
        b.call(jax.random.fold_in, given, index)
        b.eqns[-1] = b.eqns[-1].replace(outvars=[own])  # the step's equations read it under this name


def _from_gradients(b: Builder, step: Cut, outs: Mapping[str, Atom], means: Mapping[str, Atom]) -> dict[str, Atom]:
    """Results that are computed from gradients, from the reduced ones."""
    if not step.from_gradients:
        return {}
    inner = step.program.jaxpr.jaxpr
    half = step.optimize
    border = {
        v: means[n.removesuffix(GRAD)]
        for n, v in zip(half.in_names, half.jaxpr.jaxpr.invars, strict=True)
        if n.endswith(GRAD)
    }
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


class _Reducer:
    """Writes the reductions."""

    def __init__(self, b: Builder, step: Cut, o: Options) -> None:
        self.b = b
        self.o = o
        self.step = step
        self.means: dict[str, Atom] = {}
        self.grads: dict[str, Atom] = {}
        self.bucket_of = {leaf: bucket for bucket in buckets_of(step, o) for leaf in bucket.leaves}
        self.missing = {bucket.name: set(bucket.leaves) for bucket in self.bucket_of.values()}
        self.waiting: list[Bucket] = []
        outs = dict(zip(step.program.out_names, step.program.jaxpr.jaxpr.outvars, strict=True))
        self.weight: Atom | None = None if o.weight is None else outs[o.weight]
        self._total: Atom | None = None
        self._seen = 0
        self._here: set[Var] = set(b.invars)

    def made(self, leaf: str, grad: Atom) -> None:
        """A gradient is there: its bucket may be full."""
        self.grads[leaf] = grad
        bucket = self.bucket_of[leaf]
        self.missing[bucket.name].discard(leaf)
        if not self.missing[bucket.name]:
            self.waiting.append(bucket)
        if self._weight_is_there():
            self._flush()

    def finish(self) -> None:
        """Reduce what is left."""
        self._flush()

    def _weight_is_there(self) -> bool:
        for eqn in self.b.eqns[self._seen :]:
            self._here.update(eqn.outvars)
        self._seen = len(self.b.eqns)
        return not isinstance(self.weight, Var) or self.weight in self._here or self.b.is_constant(self.weight)

    def _flush(self) -> None:
        role, self.b.role = self.b.role, DIST
        for bucket in self.waiting:
            self._reduce(bucket)
        self.waiting.clear()
        self.b.role = role

    def _reduce(self, bucket: Bucket) -> None:
        b, o = self.b, self.o
        if o.trainers == 1:
            self.means |= {n: self.grads[n] for n in bucket.leaves}
            return
        unique = list(dict.fromkeys(self.grads[n] for n in bucket.leaves if isinstance(self.grads[n], Var)))
        literal = [self.grads[n] for n in bucket.leaves if not isinstance(self.grads[n], Var)]
        parts: list[Atom] = [*unique, *literal]
        names = {id(self.grads[n]): n for n in bucket.leaves}
        sent: list[Atom] = []
        for g in parts:
            if self.weight is not None:
                g = b.call(_weighted, g, self.weight)[0]
            if o.compress is not None:
                g = b.call(_compressed(o.compress, o.compress_scale), g)[0]
            sent.append(g)
        sums = b.bind(all_reduce_p, *sent, op="sum", name=bucket.name, owners=(), over=o.axis_name)
        for g, total in zip(parts, sums, strict=True):
            b.labels[total] = f"{names[id(g)]}{GRAD}.sum"
            back: Atom = total
            if o.compress is not None:
                back = b.call(_restored(g.aval.dtype, o.compress_scale), back)[0]
            back = self._averaged(back) if o.reduce == "mean" else back
            self.means |= {n: back for n in bucket.leaves if self.grads[n] is g}

    def _averaged(self, total: Atom) -> Atom:
        if self.weight is None:
            return self.b.call(_scaled(1 / self.o.trainers), total)[0]
        return self.b.call(_divided, total, self._total_weight())[0]

    def _total_weight(self) -> Atom:
        if self._total is None:
            assert self.weight is not None
            (self._total,) = self.b.bind(
                all_reduce_p, self.weight, op="sum", name="weight", owners=(), over=self.o.axis_name
            )
            self.b.labels[self._total] = f"{self.o.weight}.sum"
        return self._total

    def merged(self, outs: Mapping[str, Atom], merges: Mapping[str, str]) -> dict[str, Atom]:
        """Results and statistics, reduced; one variadic reduction for each operation."""
        b, o = self.b, self.o
        b.role = DIST
        found: dict[str, Atom] = {}
        for op in dict.fromkeys(REDUCED.values()):
            names = [n for n, way in merges.items() if REDUCED.get(way) == op]
            if not names:
                continue
            sent: list[Atom] = []
            for n in names:
                x = outs[n]
                weighted = merges[n] == "mean" and self.weight is not None
                sent.append(b.call(_weighted, x, self.weight)[0] if weighted and self.weight is not None else x)
            made = b.bind(all_reduce_p, *sent, op=op, name=f"results/{op}", owners=(), over=o.axis_name)
            for n, x in zip(names, made, strict=True):
                b.labels[x] = f"{n}.{op}"
                found[n] = self._averaged(x) if merges[n] == "mean" else x
        return found


# small functions that the reductions are wrapped in, each traced once for a type


def _weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * weight.astype(x.dtype)


def _divided(x: jax.Array, total: jax.Array) -> jax.Array:
    return x / total.astype(x.dtype)


@functools.cache
def _scaled(by: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x * by


@functools.cache
def _compressed(to: str, scale: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: (x * scale).astype(COMPRESSED[to]) if scale != 1.0 else x.astype(COMPRESSED[to])


@functools.cache
def _restored(dtype: Any, scale: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x.astype(dtype) * (1 / scale) if scale != 1.0 else x.astype(dtype)
