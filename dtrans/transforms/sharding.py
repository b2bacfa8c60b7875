"""Sharding: data parallel training in which every rank keeps a slice. ZeRO 1, 2 and 3, as rewrites of the same step.

    stage 1   optimizer state        gradients are reduce-scattered behind the backward pass
    stage 2   and gradients          each is reduce-scattered right after it is made
    stage 3   and parameters         gathered where they are read, in the forward and again in the backward pass

    forward, backward     each rank on its part of the batch
    reduce_scatter        gradients: a rank gets its slice of the sum (`dtrans.transforms.scatters`)
    optimize              on slices (`dtrans.transforms.slice_writer`)
    all_gather            parameters: behind the update in stages 1 and 2, where they are read in stage 3
                          (`dtrans.transforms.gathers`)

The program is one for all ranks (SPMD): arrays that are sliced have the shape of a slice in it. What is sliced is
decided once, in `dtrans.transforms.slices`. With `dp_degree` there are several groups of ranks: slices are those of a
group, and groups add up the slices of gradients that their ranks have.

Source: Rajbhandari et al., ZeRO (arXiv 1910.02054); passes/auto_parallel_sharding.py and
meta_optimizers/sharding_optimizer.py (Paddle), which move whole variables from and to owners.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.cut import GRAD, Cut, OptimizeHalf, cut
from dtrans.errors import ConfigError
from dtrans.ops import all_gather_p, all_reduce_p, trainer_index_p
from dtrans.program import BACKWARD, DIST, FORWARD, OPTIMIZE, Program, is_communication
from dtrans.rewrite import Builder
from dtrans.rows import analyse
from dtrans.sharded import ShardingPlan
from dtrans.transforms.amp import (
    GOOD,
    SCALE,
    SKIPPED,
    all_finite,
    low_gradients,
    low_precision,
    next_scale,
    scale_spec,
    unscaled,
)
from dtrans.transforms.from_gradients import GradientResults
from dtrans.transforms.gathers import Gatherer, Gathering, Given, Scattered
from dtrans.transforms.halves import HalfWriter, ready_order, refuse_nested, write_trainer_half
from dtrans.transforms.merges import merges_of
from dtrans.transforms.nccl2 import check_names, refuse_collectives
from dtrans.transforms.options import COMPRESSED
from dtrans.transforms.owned import Owned
from dtrans.transforms.reducer import buckets_of
from dtrans.transforms.replica import fold_keys, take_inputs
from dtrans.transforms.scatters import Scatterer, kinds_of
from dtrans.transforms.sharding_options import LossScaling, ShardingOptions, check_sharding
from dtrans.transforms.slice_writer import rows_from, sliced_half
from dtrans.transforms.slices import Sliced, Slices, slices_of, stacked_leaves
from dtrans.transforms.startup import check_programs, match_startup
from dtrans.transforms.window import Window, write_accumulation
from dtrans.trees import both, is_under


def sharding(
    main: Program,
    startup: Program,
    *,
    stage: int = 1,
    degree: int,
    dp_degree: int = 1,
    amp: str | None = None,
    loss_scaling: LossScaling | float | None = None,
    fuse_grad_size_in_MB: float = 32,
    overlap: bool = True,
    prefetch: int | None = None,
    segment_broadcast_MB: float = 0,
    min_slice_size: int = 1024,
    partition: str = "rows",
    axis_name: str = "shard",
    dp_axis_name: str = "dp",
    reduce: str = "mean",
    merge: Mapping[str, str] | None = None,
    weight: str | None = None,
    replicated: Collection[str] = (),
    compress: str | None = None,
    compress_scale: float = 1.0,
    accumulate_steps: int = 1,
    max_splits: int | None = None,
    nccl_comm_num: int | None = None,
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
      amp: "bf16" or "fp16": products of matrices in that type (`dtrans.transforms.amp`), parameters gathered, and
        gradients reduced, in it where products alone read them. Parameters that are updated stay as they are; each rank
        has slices of them, in every stage. In stages 1 and 2 they are gathered once in a step (or micro-step).
      loss_scaling: how the loss is scaled (`dtrans.LossScaling`), or a fixed scale. For "fp16" it is dynamic by
        default: from 2^15, halved by a step in which a gradient of any rank is not finite, which changes nothing else,
        and doubled after 2,000 others. "bf16" needs none.
      fuse_grad_size_in_MB: gradients, and parameters behind an update, are moved together up to this size.
      overlap: let collectives run beside computation. Without, each begins when the one before has ended.
      prefetch: in stage 3, how many parameters are gathered ahead of time, the first one of the next layer in a loop;
        1 by default, 0 without `overlap`. On CPUs, where nothing is gathered beside computation, jobs do not gather
        ahead in loops by default: it costs the memory of a layer, and gains nothing.
      segment_broadcast_MB: in stage 3, parameters that are read one after the other are gathered together up to this
        size. 0 gathers each by itself.
      min_slice_size: a parameter of fewer elements stays whole on every rank.
      partition: "rows" cuts each parameter. "greedy_even" and "use_order" give whole ones to ranks, each of which alone
        updates what it owns and holds its state, for optimizers that cannot slice; see `dtrans.transforms.owned`. That
        is for stages 1 and 2, and without `amp`; `min_slice_size` is not looked at.
      axis_name, dp_axis_name: of the axes that ranks of a group, and groups, are on.
      reduce, merge, weight, replicated, compress, compress_scale, accumulate_steps, max_splits, nccl_comm_num,
        clip_local_norm: as for `dtrans.nccl2`. In stages 2 and 3 each of `accumulate_steps` scatters its gradients,
        so that what is added up are slices.

    Raises:
      ConfigError: an option that is out of range or unknown, or names that the step does not have.
      GradientError: the gradients of the step cannot be told (see `dtrans.cut`), or it has collectives already.
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
    if isinstance(replicated, str) or not isinstance(replicated, Collection):
        raise ConfigError(f"replicated={replicated!r} must be a collection of names of batch arrays")
    if merge is not None and not isinstance(merge, Mapping):
        raise ConfigError(f"merge={merge!r} must say for each name what becomes of it, such as {{'aux': 'sum'}}")
    options = ShardingOptions(
        trainers=_ranks(degree, dp_degree),
        axis_name=axis_name,
        reduce=reduce,
        merge=dict(merge or {}),
        weight=weight,
        replicated=tuple(replicated),
        fuse_grad_size_in_MB=fuse_grad_size_in_MB,
        compress=compress,
        compress_scale=compress_scale,
        inter=0,
        accumulate_steps=accumulate_steps,
        max_splits=max_splits,
        nccl_comm_num=nccl_comm_num,
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
        segment_broadcast_MB=segment_broadcast_MB,
        min_slice_size=min_slice_size,
        partition=partition,
    )
    return planned(main, startup, options)


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


def planned(main: Program, startup: Program, options: ShardingOptions) -> ShardingPlan:
    """What `sharding` plans with these options."""
    check_sharding(options)
    refuse_collectives(main)
    plain = cut(main).with_observed()
    refuse_nested(plain, options.trainers)
    check_names(plain, options)
    if options.amp is None:
        step = plain
    else:
        step = cut(low_precision(main, options.amp, options.loss_scaling)).with_observed()
    if options.weight is not None and options.accumulate_steps > 1 and options.stage > 1:
        raise ConfigError(
            f"weight={options.weight!r} and accumulate_steps={options.accumulate_steps} in stage {options.stage}: "
            "gradients are scattered in each micro-step, before the weights of all are known; use stage 1"
        )
    startup = match_startup(plain, startup)
    merges = merges_of(step, options)
    layout = _Layout.of(step, options, merges)
    values = {n: step.gradients[n] for n in ready_order(step)}
    owned = layout.owned
    return ShardingPlan(
        main=plain.program,
        startup=startup,
        program=rewritten(step, layout),
        options=options,
        buckets=owned.buckets(step, options) if owned else buckets_of(values, options, layout.kind(step)),
        merges=merges,
        dropped=step.dropped,
        slices=layout.slices,
        traced=main,
        owned=owned,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """What is decided once, whatever the shape of the batch.

    Attributes:
      o: the options.
      merges: what becomes of results.
      slices: what is cut.
      half: the optimize half of a rank.
      owned: who owns which leaf, where leaves are not cut but given to ranks.
    """

    o: ShardingOptions
    merges: Mapping[str, str]
    slices: Slices
    half: OptimizeHalf
    owned: Owned | None = None

    @classmethod
    def of(cls, step: Cut, o: ShardingOptions, merges: Mapping[str, str]) -> _Layout:
        """Decide."""
        if o.degree == 1:
            wholes = dict.fromkeys(step.params, "degree is 1")
            return cls(o, merges, Slices(analyse(step.optimize, step.params), {}, {}, wholes), step.optimize)
        if o.partition != "rows":
            owned = Owned.of(step, o)
            return cls(o, merges, owned.slices, owned.half, owned)
        stacked = stacked_leaves(step) if o.stage > 1 else set()
        slices = slices_of(step, o.degree, least=o.min_slice_size, stacked=stacked, sliced_in_use=o.stage == 3)
        return cls(o, merges, slices, sliced_half(slices, o.axis_name))

    @property
    def cuts(self) -> dict[str, Sliced]:
        """The arrays that are slices between steps."""
        return {**(self.slices.leaves if self.o.slices_params else {}), **self.slices.state}

    def layers(self, step: Cut) -> dict[Var, str]:
        """The gradients that loops make layer by layer, and scatter there: stacks of what is cut in each layer."""
        o = self.o
        if o.stage == 1 or o.weight is not None or o.clip_local_norm is not None or o.compress is not None:
            return {}
        program, border = step.program, set(step.border.values())
        eqns = program.jaxpr.jaxpr.eqns
        trained = [e for e, role in zip(eqns, program.roles, strict=True) if role in (FORWARD, BACKWARD)]
        # what reads a gradient beside its mark needs all of it
        read = {a for e in trained if not border.intersection(e.outvars) for a in e.invars if isinstance(a, Var)}
        read |= {a for a in program.jaxpr.jaxpr.outvars if isinstance(a, Var)}
        made = {v for e in eqns if e.primitive.name == "scan" for v in e.outvars[e.params["num_carry"] :]}
        found: dict[Var, str] = {}
        for leaf, g in step.gradients.items():
            s = self.slices.leaves.get(leaf)
            if s is not None and s.axis and isinstance(g, Var) and g in made and g not in read and g not in found:
                found[g] = leaf
        return found

    def kind(self, step: Cut) -> Any:
        """In what way each gradient is reduced."""
        layers = set(self.layers(step).values())
        low = {} if self.o.amp is None else dict.fromkeys(low_gradients(step, COMPRESSED[self.o.amp]), self.o.amp)
        compress = {n: to for n, to in low.items() if n not in layers}
        return kinds_of(self.slices.leaves, layers, compress, self.unreduced)

    @property
    def unreduced(self) -> Collection[str]:
        """Leaves whose gradients are the same on all ranks, and stay it: not where each weights or clips its own."""
        return self.slices.unreduced if self.o.weight is None and self.o.clip_local_norm is None else ()


def rewritten(step: Cut, layout: _Layout) -> Program:
    """The step of one rank."""
    return _Writer(step, layout).program()


class _Writer:
    """Writes the step of one rank."""

    def __init__(self, step: Cut, layout: _Layout) -> None:
        self.step = step
        self.layout = layout
        self.o = o = layout.o
        self.leaves = layout.slices.leaves
        self.source = step.program
        inner = self.source.jaxpr.jaxpr
        self.outs: dict[str, Atom] = dict(zip(self.source.out_names, inner.outvars, strict=True))
        self.vars_of = dict(zip(self.source.in_names, inner.invars, strict=True))
        self.kind = layout.kind(step)
        # reductions one after the other are one chain
        self.reducing = o if o.overlap or o.nccl_comm_num else dataclasses.replace(o, nccl_comm_num=1)
        self._index: Atom | None = None  # of the rank, in a group
        self.b = b = Builder(self.source.jaxpr)
        b.role = FORWARD
        cuts = layout.cuts
        taken = take_inputs(b, step, o, {n: s.of_rank(self.source.inputs[n]) for n, s in cuts.items()})
        self.local: dict[str, Atom] = {n: taken.get(v, v) for n, v in self.vars_of.items()}
        batch = {self.vars_of[n] for n in step.batch}
        if layout.owned is not None:
            self.local |= layout.owned.take(b, self.source.in_names)
        fold_keys(b, {v: k for v, k in taken.items() if v in batch}, o)

    def program(self) -> Program:
        """The program."""
        step, b = self.step, self.b
        results = [n for n in step.results if n not in step.from_gradients]
        values: dict[str, Atom] = {n: step.gradients[n] for n in ready_order(step)}
        found = dict(self.outs)
        if self.o.accumulate_steps == 1:
            reducer = self._reducer(b, step, values, self.outs.get(self.o.weight or ""))
            found |= self._half(b, step, results, reducer.made, self.local)
        else:
            made = self._accumulated(results)
            found |= made
            reducer = self._reducer(b, step, values, found.get(self.o.weight or ""), scattered=self.o.stage > 1)
            for leaf in values:
                reducer.made(leaf, made[leaf + GRAD])
        reducer.finish()
        means, finite = self._unscaled(reducer.means)
        found |= self._updated(means, finite)
        found |= self._from_gradients(means)
        found |= reducer.merged(found, self.layout.merges, self.vars_of)
        owned = self.layout.owned
        args, out = (owned.args, owned.out) if owned else (self.source.args, self.source.out)
        n_state, n_given = (sum(len(spec.names) for spec in of[:2]) for of in (self.source.args, args))

        def respecialise(types: Sequence[jax.ShapeDtypeStruct]) -> Program:
            held = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.source.jaxpr.jaxpr.invars[:n_state]]
            other = cut(self.source.at_flat([*held, *types[n_given:]])).with_observed()
            return rewritten(other, self.layout)

        if finite is not None:
            out = both(out, scale_spec())
        return Program(
            f"rank of {self.source.name}",
            b.build([found[n] for n in out.names]),
            args,
            out,
            tuple(DIST if is_communication(e) else role for e, role in zip(b.eqns, b.roles, strict=True)),
            b.labels,
            respecialise,
        )

    # -- forward and backward --------------------------------------------------------------------

    def _reducer(
        self, b: Builder, step: Cut, values: Mapping[str, Atom], weight: Atom | None, scattered: bool = False
    ) -> Scatterer:
        if self.layout.owned is not None:
            return self.layout.owned.reducer(b, values, self.reducing, weight)
        kind = self.kind if not scattered else kinds_of(self.leaves, self.leaves, {}, self.layout.unreduced)
        return Scatterer(b, values, self.reducing, weight, GRAD, self.leaves, kind)

    def _half(
        self, b: Builder, step: Cut, results: Sequence[str], made: Any, local: Mapping[str, Atom]
    ) -> dict[str, Atom]:
        """Write forward and backward; gradients go to `made`, in stage 1 when all are there."""
        late: list[tuple[str, Atom]] = []
        tell = made if self.o.stage > 1 else lambda leaf, grad: late.append((leaf, grad))
        writer = self._gatherer(b, step, local) if self.o.slices_params or self.layout.layers(step) else None
        found = write_trainer_half(b, step, results, tell, writer, straight=True)
        for leaf, grad in late:
            made(leaf, grad)
        return found

    def _gatherer(self, b: Builder, step: Cut, local: Mapping[str, Atom]) -> Any:
        vars_of = dict(zip(step.program.in_names, step.program.jaxpr.jaxpr.invars, strict=True))
        stacked = stacked_leaves(step)
        given = {
            vars_of[n]: Given(n, s, local[n], stacked=n in stacked and s.axis > 0 and self.o.stage == 3)
            for n, s in self.leaves.items()
            if self.o.slices_params
        }
        o = self.o
        low = set() if o.amp is None else low_gradients(step, COMPRESSED[o.amp])
        layers = {
            g: Scattered(self.leaves[n], COMPRESSED[o.amp] if o.amp and n in low else g.aval.dtype)
            for g, n in self.layout.layers(step).items()
        }
        segment = (o.segment_broadcast_MB if o.stage == 3 else o.fuse_grad_size_in_MB) * 2**20
        how = Gathering(o.axis_name, o.degree, o.prefetch, o.prefetch_in_loops, segment, once=o.stage < 3)

        def writer(eqns: Sequence[JaxprEqn], roles: Sequence[str], ends: Sequence[tuple[int, Atom]]) -> HalfWriter:
            return Gatherer(b, eqns, roles, given, how, layers, ends)

        return writer

    def _accumulated(self, results: Sequence[str]) -> dict[str, Atom]:
        """Write forward and backward of all micro-steps; their gradients are slices from stage 2 on."""
        o, step = self.o, self.step
        whole = [n for n in step.batch if is_under(n, o.replicated)]
        window = Window(o.accumulate_steps, o.reduce, self.layout.merges, o.weight, whole)
        given = {n: self.local[n] for n in self.leaves} if o.slices_params else {}

        def half(inner: Builder, micro: Cut) -> dict[str, Atom]:
            local = {n: inner.input(a.aval) for n, a in given.items()}
            inner.role = FORWARD
            if o.stage == 1:
                grads: dict[str, Atom] = {}
                found = self._half(inner, micro, results, grads.__setitem__, local)
                return found | {n + GRAD: g for n, g in grads.items()}
            values: dict[str, Atom] = {n: micro.gradients[n] for n in ready_order(micro)}
            scatterer = _MicroScatterer(inner, values, self.reducing, None, GRAD, self.leaves, self.layout.kind(micro))
            found = self._half(inner, micro, results, scatterer.made, local)
            scatterer.finish()
            return found | {n + GRAD: g for n, g in scatterer.means.items()}

        return write_accumulation(self.b, step, window, results, given, half)

    # -- the update ------------------------------------------------------------------------------

    def _unscaled(self, means: Mapping[str, Atom]) -> tuple[dict[str, Atom], Atom | None]:
        """Write the gradients of a loss that is not scaled, and whether all of them are finite, on every rank."""
        b, s = self.b, self.o.loss_scaling
        if s is None:
            return dict(means), None
        b.role = OPTIMIZE
        if not s.dynamic:
            return {n: b.call(unscaled(s.initial), g)[0] for n, g in means.items()}, None
        plain = {n: b.call(unscaled(None), g, self.vars_of[SCALE])[0] for n, g in means.items()}
        (finite,) = b.call(all_finite, *means.values())
        if self.leaves:
            over = (self.o.axis_name,)
            (finite,) = b.bind(all_reduce_p, finite, op="and", name="finite", owners=(), over=over)
            b.labels[finite] = "finite"
        return plain, finite

    def _updated(self, means: Mapping[str, Atom], finite: Atom | None) -> dict[str, Atom]:
        """Write the update; new parameters and state, by name. What is not finite updates nothing."""
        b, o, half = self.b, self.o, self.layout.half
        b.role = OPTIMIZE
        given: list[Atom] = []
        for n in half.in_names:
            if n.endswith(GRAD):
                given.append(means[n.removesuffix(GRAD)])
            elif n in self.leaves:
                given.append(self._slice_of(n))
            else:
                given.append(self.local[n])
        found = dict(zip(half.out_names, b.inline(half.jaxpr, *given), strict=True))
        if finite is not None:
            found = {n: b.call(_picked, finite, x, self.local[n])[0] for n, x in found.items()}
            kept = (GOOD, SCALE, SKIPPED)
            assert o.loss_scaling is not None
            made = b.call(next_scale(o.loss_scaling), finite, *(self.vars_of[n] for n in kept))
            found |= zip(kept, made, strict=True)
        if not o.slices_params:
            found |= self._gathered({n: found[n] for n in self.leaves if n in found})
        return found

    def _slice_of(self, leaf: str) -> Atom:
        """The rank's slice of a parameter."""
        s, o, b = self.leaves[leaf], self.o, self.b
        if o.slices_params:
            return self.local[leaf]
        if self._index is None:
            (self._index,) = b.bind(trainer_index_p, over=(o.axis_name,))
        (start,) = b.call(_times(s.part), self._index)
        return b.call(rows_from(s.axis, s.part, s.padded), self.local[leaf], start)[0]

    def _gathered(self, slices: Mapping[str, Atom]) -> dict[str, Atom]:
        """Write gathers of slices of leaves, in buckets; the leaves."""
        b, o = self.b, self.o
        b.role = DIST
        found: dict[str, Atom] = {}
        before: Sequence[Atom] = ()
        for i, bucket in enumerate(_buckets(slices, self.leaves, o.fuse_grad_size_in_MB * 2**20)):
            sent: Sequence[Atom] = [slices[n] for n in bucket]
            axis = self.leaves[bucket[0]].axis
            if before and not o.overlap:
                sent = b.call(_after, *sent, *before)[: len(sent)]
            made = before = b.bind(
                all_gather_p, *sent, name=f"params/{i}", over=(o.axis_name,), size=o.degree, axis=axis
            )
            for n, x in zip(bucket, made, strict=True):
                s = self.leaves[n]
                b.labels[x] = f"{n}.gathered"
                found[n] = x if s.padded == s.size else b.part(x, s.axis, 0, s.size)
        return found

    def _from_gradients(self, means: Mapping[str, Atom]) -> dict[str, Atom]:
        """Write results that are computed from gradients, of slices where that can be."""
        step, b = self.step, self.b
        if not step.from_gradients:
            return {}
        if self.layout.owned is not None:
            means = self.layout.owned.whole_gradients(b, means, self.o)
        here = {*b.invars, *(v for e in b.eqns for v in e.outvars)}
        results = GradientResults(step, self.layout.slices, here)
        half = sliced_half(results.slices, self.o.axis_name)
        whole = self._gathered({n: means[n] for n in results.gathered if n + GRAD in half.in_names})
        own = {n: self.local[n] for n in results.gathered if n in half.in_names}
        params = self._gathered(own) if self.o.slices_params else own
        b.role = OPTIMIZE
        given: list[Atom] = []
        for n in half.in_names:
            if n.endswith(GRAD):
                leaf = n.removesuffix(GRAD)
                given.append(whole.get(leaf, means[leaf]))
            elif n in results.others:
                given.append(results.others[n])
            elif n in results.slices.leaves:
                given.append(self._slice_of(n))
            else:
                given.append(params.get(n, self.local[n]))
        made = dict(zip(half.out_names, b.inline(half.jaxpr, *given), strict=True))
        return {n: made[n] for n in step.from_gradients}


class _MicroScatterer(Scatterer):
    """Gradients of one micro-step: scattered in a group, and nothing else, until all have been added up."""

    adds_up = False

    def sums(self, bucket: Any, sent: Sequence[Atom]) -> Sequence[Atom]:
        kind, o = self.kind(bucket.leaves[0]), self.options
        if kind.axis is None:
            return sent
        inside = dataclasses.replace(o, dp_degree=1)
        self.options, kept = inside, o
        made = super().sums(bucket, sent)
        self.options = kept
        return made

    def _averaged(self, total: Atom) -> Atom:
        return total


def _buckets(slices: Mapping[str, Atom], leaves: Mapping[str, Sliced], limit: float) -> list[list[str]]:
    """Leaves that are gathered together, by type and dimension, up to a size."""
    kind = lambda n: (str(slices[n].aval.dtype), leaves[n].axis)
    found: list[list[str]] = []
    size = 0.0
    for n in sorted(slices, key=kind):
        nbytes = slices[n].aval.size * slices[n].aval.dtype.itemsize * leaves[n].degree
        if not found or kind(found[-1][0]) != kind(n) or size + nbytes > limit:
            found.append([])
            size = 0.0
        found[-1].append(n)
        size += nbytes
    return found


def _picked(finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(finite, new, old)


@functools.cache
def _times(by: int) -> Any:
    return lambda index: index * by


def _after(*xs: jax.Array) -> Sequence[jax.Array]:
    made: Sequence[jax.Array] = jax.lax.optimization_barrier(xs)
    return made
