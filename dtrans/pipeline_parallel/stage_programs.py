"""The programs of a stage: forward, backward, and gradients of weights where these are made apart.

    forward     parameters, batch, what comes from the stage before  ->  what goes on, results, residuals
    backward    the same, residuals, cotangents of what goes on, sums of gradients  ->  cotangents, sums of gradients
    weights     residuals of forward and backward, sums of gradients  ->  sums of gradients

A stage is differentiated by itself (`jax.vjp`). What its derivative reads of the forward pass are
the *residuals*. Of these, three kinds are not kept for each micro-batch: inputs of the stage are
read again, numbers stand in the program, and what is made of parameters alone (a weight in another
type) is made again. With `gradient_checkpoint` more is made
again: all but what has a name that was asked for, and what was made of random numbers alone.

Values go from a stage to the next one only. What a later stage reads (a skip connection) is carried
through those in between, and its cotangent comes back the same way; each adds its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, ShapedArray, Var, closed_with, opened
from dtrans.ir.array_fns import padded, sum_type
from dtrans.ir.builder import Builder, extract_part
from dtrans.ir.dataflow import backward_slice, propagate
from dtrans.ir.program import BACKWARD, FORWARD, Program
from dtrans.ir.pytree import TreeSpec, unused_name
from dtrans.ops import reduce_scatter_p
from dtrans.pipeline_parallel.forward_pass import ForwardPass
from dtrans.pipeline_parallel.options import AXIS, PipelineOptions
from dtrans.pipeline_parallel.stage_vjp import StageVjp
from dtrans.step.cut import GRAD
from dtrans.zero.choose_slices import Sliced


@dataclasses.dataclass(frozen=True, eq=False)
class StagePrograms:
    """Programs of a stage for one micro-batch.

    Attributes:
      index: the number of the stage.
      forward, backward: its programs.
      weights: computes the gradients of weights, if the backward program does not.
      params: the leaves of the step that it reads.
      state: the arrays of the optimizer's state that it reads; every stage has them.
      sums: the name of each sum of gradients that it computes, and its leaf. If each micro-batch is
        clipped, these are gradients of one micro-batch, not sums.
      cotangents: the name of each cotangent, and its value.
      batch: the arrays of the batch that it reads.
      receives, sends: the values from the stage before, and for the stage after.
      results: the results of the step that it computes.
      eqns: the number of its equations of the loss function.
    """

    index: int
    forward: Program
    backward: Program
    weights: Program | None
    params: tuple[str, ...]
    state: tuple[str, ...]
    sums: Mapping[str, str]
    cotangents: Mapping[str, str]
    batch: tuple[str, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    results: tuple[str, ...]
    eqns: int

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves whose gradients it makes."""
        return tuple(self.sums.values())

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the residuals and received values that a stage stores from forward to backward."""
        here = {*self.forward.out_names, *self.receives}
        read = [*self.backward.in_names, *(self.weights.in_names if self.weights else ())]
        given = {*self.params, *self.state, *self.batch}
        return tuple(n for n in dict.fromkeys(read) if n in here and n not in given)


def program_of(
    name: str, jaxpr: ClosedJaxpr, ins: Sequence[str], outs: Sequence[str], role: str
) -> Program:
    """Return a program whose inputs and outputs are one dict each."""
    inner = opened(jaxpr)
    args, out = (
        {n: v.aval for n, v in zip(of, vs, strict=True)}
        for of, vs in ((ins, inner.invars), (outs, inner.outvars))
    )
    spec, made = TreeSpec.from_tree(args), TreeSpec.from_tree(out)
    by_name = dict(zip(ins, inner.invars, strict=True))
    outs_by_name = dict(zip(outs, inner.outvars, strict=True))
    ordered = closed_with(
        jaxpr,
        invars=[by_name[n] for n in spec.names],
        outvars=[outs_by_name[n] for n in made.names],
    )
    return Program(name, ordered, (spec,), made, (role,) * len(inner.eqns))


class StageProgramWriter:
    """Cuts a forward pass into the programs of stages.

    Args:
      forward: what is cut.
      stage_of: the stage of each of its equations; never before that of what it reads.
      o: the options.
      scatter: leaves of whose gradients each replica adds up a slice.
    """

    def __init__(
        self,
        forward: ForwardPass,
        stage_of: Sequence[int],
        o: PipelineOptions,
        scatter: Mapping[str, Sliced],
    ) -> None:
        self.forward = forward
        self.stage_of = stage_of
        self.o = o
        self.scatter = scatter
        self.count = max(stage_of) + 1
        eqns = forward.eqns
        inner = forward.inner
        self.inputs = set(inner.invars)
        made = {v: s for e, s in zip(eqns, stage_of, strict=True) for v in e.outvars}
        # what depends on no micro-batch (a mask, a weight transposed) is made in each stage that
        # reads it
        self.dependent = propagate(eqns, dict.fromkeys(forward.of_micro_batches, 1), {})
        self.made_at = {v: s for v, s in made.items() if self.dependent.get(v)}
        last: dict[Var, int] = {}
        for e, s in zip(eqns, stage_of, strict=True):
            if any(self.dependent.get(v) for v in e.outvars) or e.effects:
                last |= {a: max(s, last.get(a, s)) for a in e.invars if isinstance(a, Var)}
        self.last = last
        self.crossing = [
            [v for v, s in self.made_at.items() if s <= k < last.get(v, -1)]
            for k in range(self.count)
        ]
        order = dict.fromkeys(v for vs in self.crossing for v in vs)
        # names that no argument of the user's can have
        self.names = {v: f"@value/{i}" for i, v in enumerate(order)}
        self.active = propagate(eqns, dict.fromkeys(forward.diff, 1), {})
        self.loss_at = self.made_at.get(forward.loss, 0) if isinstance(forward.loss, Var) else 0
        # which stage gives a result: the one that makes it, or the last for what no stage makes
        self.results_of: list[list[str]] = [[] for _ in range(self.count)]
        for n, a in forward.results.items():
            self.results_of[
                self.made_at.get(a, self.count - 1) if isinstance(a, Var) else self.count - 1
            ].append(n)

    def differentiable(self, v: Atom) -> bool:
        """Return True if the loss's derivative may pass through a value."""
        return (
            isinstance(v, Var)
            and bool(self.active.get(v))
            and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        )

    def stages(self) -> tuple[StagePrograms, ...]:
        """Return the programs of all stages."""
        return tuple(self._stage(s) for s in range(self.count))

    def _stage(self, s: int) -> StagePrograms:
        f = self.forward
        received = self.crossing[s - 1] if s else []
        sent = self.crossing[s]
        results = self.results_of[s]
        own = [i for i, at in enumerate(self.stage_of) if at == s]
        outs = [v for v in sent if self.made_at[v] == s]
        result_atoms = [f.results[n] for n in results]
        wanted = [*outs, *result_atoms]
        if self.loss_at == s:
            wanted.append(f.loss)
        body, reads, heard = self._body(own, received, wanted)
        diff = [v for v in reads if v in f.diff]
        backs = [v for v in received if self.differentiable(v)]  # whose cotangents go back
        fronts = [v for v in sent if self.differentiable(v)]  # whose cotangents come
        given = {v: f.given[v] for v in reads}
        step_names = f.inputs_of([*given.values()])
        types = f.step.program.inputs
        params = tuple(n for n in step_names if n in f.step.params)
        state = tuple(n for n in step_names if n in f.step.opt_state)
        batch = tuple(n for n in step_names if n in f.step.batch)
        given_names = (*params, *state, *batch)

        ins = [*given_names, *(self.names[v] for v in received)]
        ahead = [v for v in fronts if self.made_at[v] == s]
        through = [v for v in fronts if self.made_at[v] != s]
        has_loss = self.loss_at == s and self.differentiable(f.loss)
        vjp = StageVjp(
            self._prelude(given_names, list(given.values())),
            body,
            reads,
            received,
            heard,
            [*diff, *(v for v in backs if v in heard)],
            [*ahead, *([f.loss] if has_loss else [])],
            [*outs, *result_atoms],
            [*(types[n] for n in given_names), *(v.aval for v in received)],
            len(params) + len(state),
            self._checkpoints(s),
        )
        leaves = tuple(f.diff[v] for v in diff)
        out_names = [*(self.names[v] for v in outs), *results]
        residuals = vjp.named(out_names, ins)
        named = dict(zip([*out_names, *residuals], opened(vjp.forward).outvars, strict=True))
        forward = program_of(
            f"forward of stage {s}", vjp.gives(list(named.values())), ins, list(named), FORWARD
        )
        sums = {unused_name(n + GRAD, types): n for n in leaves}
        cotangents = {v: self.names[v] + GRAD for v in (*fronts, *backs)}
        backward_jaxpr = self._backward(vjp, has_loss, ahead, through, backs, heard, leaves)
        so_far = sums if self.o.clip_of_each is None else ()
        names_in = [*ins, *residuals, *(cotangents[v] for v in (*ahead, *through)), *so_far]
        names_out = [*(cotangents[v] for v in backs), *sums]
        backward, weights = self._programs(s, backward_jaxpr, names_in, names_out, len(backs))
        return StagePrograms(
            s,
            forward,
            backward,
            weights,
            params,
            state,
            sums,
            {name: self.names[v] for v, name in cotangents.items()},
            batch,
            tuple(self.names[v] for v in received),
            tuple(self.names[v] for v in sent),
            tuple(results),
            len(own),
        )

    def _body(
        self, own: Sequence[int], received: Sequence[Var], wanted: Sequence[Atom]
    ) -> tuple[ClosedJaxpr, list[Var], list[Var]]:
        """The equations of a stage, as a function of inputs of the forward pass and of what it was
        sent."""
        f, inner = self.forward, self.forward.inner
        mine = set(own)
        effects = [a for i in own if f.eqns[i].effects for a in f.eqns[i].invars]
        stop = set(received)
        kept, leaves = backward_slice(f.eqns, [*wanted, *effects], stop)
        kept = sorted({*kept, *(i for i in own if f.eqns[i].effects)})
        for i in kept:
            assert i in mine or not any(self.dependent.get(v) for v in f.eqns[i].outvars), f.eqns[i]
        eqns = [f.eqns[i] for i in kept]
        used = leaves | {a for e in eqns for a in e.invars if isinstance(a, Var)}
        used |= {a for a in wanted if isinstance(a, Var)}
        reads = [v for v in inner.invars if v in used]
        heard = [v for v in received if v in used]
        return extract_part(f.jaxpr, [*reads, *heard], eqns, wanted), reads, heard

    def _prelude(self, names: Sequence[str], wanted: Sequence[Atom]) -> ClosedJaxpr:
        """Write the values that a stage computes from the step's inputs before it begins."""
        f = self.forward
        source = f.step.program
        vars_of = source.invars
        b = Builder(f.prelude)
        inputs: dict[Var, Atom] = {vars_of[n]: b.input(vars_of[n].aval) for n in names}
        return b.build(f.before(b, wanted, inputs))

    def _backward(
        self,
        vjp: StageVjp,
        has_loss: bool,
        ahead: Sequence[Var],
        through: Sequence[Var],
        backs: Sequence[Var],
        heard: Sequence[Var],
        leaves: Sequence[str],
    ) -> ClosedJaxpr:
        """Cotangents through a stage: of what it was given, and added to the gradients so far."""
        b = Builder(vjp.backward)
        stage_ins = [b.input(t) for t in vjp.in_types]
        saved = [b.input(a.aval) for a in vjp.kept]
        cts: list[Atom] = [b.input(v.aval) for v in ahead]
        passing = {v: b.input(v.aval) for v in through}
        types = [self._sum_type(n) for n in leaves]
        adds = self.o.clip_of_each is None
        sums = [b.input(t) for t in types] if adds else []
        if has_loss:
            loss = self.forward.loss
            cts += [
                Literal(loss.aval.dtype.type(self.o.loss_scale), loss.aval.update(weak_type=False))
            ]
        b.role = BACKWARD
        made = vjp.write_backward(b, stage_ins, saved, cts)
        grads, back = (
            made[: len(leaves)],
            dict(zip([v for v in backs if v in heard], made[len(leaves) :], strict=True)),
        )
        outs: list[Atom] = []
        for v in backs:
            if v in passing and v in back:
                outs += b.call(_added, passing[v], back[v])
            else:
                outs.append(back[v] if v in back else passing[v])
        grads = self._scattered(b, dict(zip(leaves, grads, strict=True)))
        scale = self.o.loss_scale
        if adds:
            add = _added if scale == 1.0 else _added_unscaled(scale)
            outs += [b.call(add, acc, g)[0] for acc, g in zip(sums, grads, strict=True)]
        else:
            outs += [b.call(_cast(t.dtype, scale), g)[0] for t, g in zip(types, grads, strict=True)]
        return b.build(outs)

    def _sum_type(self, leaf: str) -> Any:
        """Return the type of the sum of a leaf's gradients."""
        param = self.forward.step.program.inputs[leaf]
        wide = ShapedArray(param.shape, sum_type(param.dtype))
        return self.scatter[leaf].of_rank(wide) if leaf in self.scatter else wide

    def _scattered(self, b: Builder, grads: Mapping[str, Atom]) -> list[Atom]:
        """Reduce-scatter gradients that replicas store as slices, by type and dimension."""
        found = dict(grads)
        kinds: dict[Any, list[str]] = {}
        for n in grads:
            if n in self.scatter:
                kinds.setdefault((grads[n].aval.dtype, self.scatter[n].axis), []).append(n)
        for i, ((_, axis), names) in enumerate(kinds.items()):
            parts = [b.call(padded(axis, self.scatter[n].padded), grads[n])[0] for n in names]
            made = b.bind(
                reduce_scatter_p,
                *parts,
                name=f"bucket/{i}",
                over=(AXIS,),
                size=self.o.replicas,
                axis=axis,
            )
            found |= zip(names, made, strict=True)
        return list(found.values())

    def _checkpoints(self, s: int) -> Collection[str] | None:
        """The names of what a stage keeps beside what it was sent; None where it keeps all that its
        backward reads."""
        names, end = self.o.memory.gradient_checkpoint, self.o.memory.last_checkpointed_stage
        if not names or (end >= 0 and s > end):
            return None
        return () if isinstance(names, str) else names

    def _programs(
        self, s: int, jaxpr: ClosedJaxpr, ins: Sequence[str], outs: Sequence[str], cotangents: int
    ) -> tuple[Program, Program | None]:
        """Write backward as one program, or as one of cotangents and one of gradients."""
        inner = opened(jaxpr)
        if not self.o.splits_backward:
            return _live(f"backward of stage {s}", jaxpr, ins, outs), None
        first, _ = backward_slice(inner.eqns, inner.outvars[:cotangents])
        second, _ = backward_slice(
            inner.eqns,
            inner.outvars[cotangents:],
            {v for i in first for v in inner.eqns[i].outvars},
        )
        made = {v for i in first for v in inner.eqns[i].outvars}
        read = dict.fromkeys(
            a for i in second for a in inner.eqns[i].invars if isinstance(a, Var) and a in made
        )
        read |= dict.fromkeys(
            a for a in inner.outvars[cotangents:] if isinstance(a, Var) and a in made
        )
        between = [v for v in read if not _is_made_of_nothing(v, inner.eqns)]
        names = [f"@between/{i}" for i in range(len(between))]
        take: Callable[[Sequence[int]], list[JaxprEqn]] = lambda which: [
            inner.eqns[i] for i in which
        ]
        one = closed_with(jaxpr, outvars=[*inner.outvars[:cotangents], *between], eqns=take(first))
        extra = backward_slice(inner.eqns, inner.outvars[cotangents:], {*between})[0]
        invars = [*inner.invars, *between]
        two = closed_with(
            jaxpr, invars=invars, outvars=inner.outvars[cotangents:], eqns=take(extra)
        )
        return (
            _live(f"backward of stage {s}", one, ins, [*outs[:cotangents], *names]),
            _live(f"weights of stage {s}", two, [*ins, *names], outs[cotangents:]),
        )


def _is_made_of_nothing(var: Var, eqns: Sequence[JaxprEqn]) -> bool:
    """Return True if a value is a constant, which is cheaper to recompute than to store."""
    return not backward_slice(eqns, [var])[1]


def _live(name: str, jaxpr: ClosedJaxpr, ins: Sequence[str], outs: Sequence[str]) -> Program:
    """Return a backward program without unused equations and inputs."""
    inner = opened(jaxpr)
    kept, leaves = backward_slice(inner.eqns, inner.outvars)
    used = leaves | {a for a in inner.outvars if isinstance(a, Var)}
    here = [(n, v) for n, v in zip(ins, inner.invars, strict=True) if v in used]
    live = extract_part(jaxpr, [v for _, v in here], [inner.eqns[i] for i in kept], inner.outvars)
    return program_of(name, live, [n for n, _ in here], outs, BACKWARD)


def _added(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y.astype(x.dtype)


@functools.cache
def _added_unscaled(scale: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, y: x + y.astype(x.dtype) / scale


@functools.cache
def _cast(dtype: Any, scale: float) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x.astype(dtype) if scale == 1.0 else x.astype(dtype) / scale


def sums_of(programs: Sequence[StagePrograms]) -> dict[str, Any]:
    """Return the types of the sums of gradients, by leaf."""
    made = [(p.weights or p.backward) for p in programs]
    return {leaf: made[p.index].outputs[n] for p in programs for n, leaf in p.sums.items()}
