"""Programs of a stage: forward, backward, and (if the schedule splits backward) weights.

    forward     parameters, batch, received values -> sent values, results, residuals
    backward    inputs of forward, residuals, cotangents of sent values, sums of gradients
                -> cotangents of received values, sums of gradients
    weights     residuals of forward and backward, sums of gradients -> sums of gradients

Each stage is differentiated separately (`dtrans.pipeline_parallel.stage_vjp`). The *residuals* of a
stage are the values of its forward pass that its derivative reads.

A stage sends values only to the next stage. If a later stage reads a value (a skip connection), the
stages in between forward the value. The value's cotangent returns through the same stages, and each
stage that reads the value adds its part of the cotangent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, Literal, ShapedArray, Var, closed_with, opened
from dtrans.engine.layout import Sliced
from dtrans.ir.array_fns import padded, sum_type
from dtrans.ir.builder import Builder, extract_part
from dtrans.ir.dataflow import avals, backward_slice, needed_equations, propagate, variables
from dtrans.ir.program import BACKWARD, FORWARD, Program
from dtrans.ir.pytree import TreeSpec, unused_name
from dtrans.ir.selection import exclude, select, values_at
from dtrans.ops import reduce_scatter_p
from dtrans.pipeline_parallel.forward_pass import ForwardPass
from dtrans.pipeline_parallel.options import AXIS, PipelineOptions
from dtrans.pipeline_parallel.stage_vjp import StageVjp
from dtrans.step.halves import GRAD


@dataclasses.dataclass(frozen=True, eq=False)
class StagePrograms:
    """Programs of a stage for one micro-batch.

    Attributes:
      index: the index of the stage.
      forward, backward: the programs of the forward and backward pass.
      weights: the program that computes the gradients of weights; None if the backward program
        computes them.
      params: the parameters that the stage reads.
      state: the arrays of the optimizer's state that the stage reads, such as a step count. Every
        stage has a copy of these.
      sums: maps the name of each sum of gradients to its leaf. If the gradients of each micro-batch
        are clipped, these are one micro-batch's gradients instead of sums.
      cotangents: maps the name of each cotangent to the name of its value.
      batch: the arrays of the batch that the stage reads.
      receives, sends: the values from the previous stage, and the values for the next stage.
      results: the results of the step that the stage computes.
      eqns: the number of equations in the stage's part of the loss function.
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
        """Leaves for which the stage computes gradients."""
        return tuple(self.sums.values())

    @property
    def saved(self) -> tuple[str, ...]:
        """Residuals and received values that the stage saves from forward to backward."""
        candidates = {*self.forward.out_names, *self.receives}
        candidates -= {*self.params, *self.state, *self.batch}
        reads = dict.fromkeys(self.backward.in_names)
        if self.weights is not None:
            reads |= dict.fromkeys(self.weights.in_names)
        return tuple(select(reads, candidates))


def program_of(
    name: str, jaxpr: ClosedJaxpr, ins: Sequence[str], outs: Sequence[str], role: str
) -> Program:
    """Return a program with one dict of inputs and one dict of outputs.

    Args:
      name: the name of the program.
      jaxpr: the equations of the program.
      ins, outs: the names of the inputs and outputs of `jaxpr`.
      role: the role of all equations.
    """
    inner = opened(jaxpr)
    invars = dict(zip(ins, inner.invars, strict=True))
    outvars = dict(zip(outs, inner.outvars, strict=True))
    arg = TreeSpec.from_tree(dict(zip(ins, avals(inner.invars), strict=True)))
    out = TreeSpec.from_tree(dict(zip(outs, avals(inner.outvars), strict=True)))
    # The entries of a dict are sorted by key in a pytree, so the inputs and outputs of the jaxpr
    # are reordered.
    ordered_ins = values_at(invars, arg.names)
    ordered_outs = values_at(outvars, out.names)
    ordered = closed_with(jaxpr, invars=ordered_ins, outvars=ordered_outs)
    return Program(name, ordered, (arg,), out, (role,) * len(inner.eqns))


def with_jaxpr(p: Program, jaxpr: ClosedJaxpr) -> Program:
    """Return a copy of a stage's program with another jaxpr, and inputs in the same order."""
    return program_of(p.name, jaxpr, p.in_names, p.out_names, p.roles[0] if p.roles else FORWARD)


class StageProgramWriter:
    """Writer of the forward and backward programs of all stages.

    Args:
      forward: the forward pass of a micro-batch.
      stage_of: the stage of each equation. It is never before the stages of the operands.
      o: the options of the pipeline.
      scatter: the slices of each parameter with a gradient that replicas reduce-scatter (dict by
        parameter).
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
        # Each stage recomputes values that depend on no micro-batch (a mask, a transposed weight).
        # For all other values, `home` is the stage that computes the value, and `last` is the last
        # stage that reads it.
        self.dependent = propagate(eqns, dict.fromkeys(forward.micro_batch_inputs, 1), {})
        self.home: dict[Var, int] = {}
        last: dict[Var, int] = {}
        for e, s in zip(eqns, stage_of, strict=True):
            outs = list(filter(self.dependent.get, e.outvars))
            self.home |= dict.fromkeys(outs, s)
            if outs or e.effects:
                for operand in variables(e.invars):
                    last[operand] = max(s, last.get(operand, s))

        # The values that each stage sends. Their names contain `@`, so that they differ from names
        # of arguments.
        self.crossing: list[list[Var]] = []
        self.names: dict[Var, str] = {}
        for k in range(self.count):
            sent = [v for v, s in self.home.items() if s <= k < last.get(v, -1)]
            self.crossing.append(sent)
            for v in sent:
                self.names.setdefault(v, f"@value/{len(self.names)}")

        self.active = propagate(eqns, dict.fromkeys(forward.parameter_of_input, 1), {})
        self.loss_at = self._home_of(forward.loss, 0)
        # The last stage returns the results that depend on no micro-batch.
        self.results_of: list[list[str]] = [[] for _ in range(self.count)]
        for n, a in forward.results.items():
            self.results_of[self._home_of(a, self.count - 1)].append(n)

    def _home_of(self, a: Atom, default: int) -> int:
        """Return the stage that computes a value of a micro-batch.

        If a value is the same for all micro-batches, each stage computes it, and the result is
        `default`.
        """
        return self.home.get(a, default) if isinstance(a, Var) else default

    def differentiable(self, v: Atom) -> bool:
        """Return True if a value may have a cotangent: a float that depends on parameters."""
        return (
            isinstance(v, Var)
            and bool(self.active.get(v))
            and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        )

    def stages(self) -> tuple[StagePrograms, ...]:
        """Return the programs of all stages."""
        return tuple(map(self._stage, range(self.count)))

    def _stage(self, s: int) -> StagePrograms:
        """Return the programs of stage `s`."""
        f, o, names = self.forward, self.o, self.names
        received, sent = self.crossing[s - 1] if s else [], self.crossing[s]
        results = self.results_of[s]
        local = [i for i, at in enumerate(self.stage_of) if at == s]

        # The equations of the stage.
        outs = [v for v in sent if self.home[v] == s]
        outputs: list[Atom] = [*outs, *values_at(f.results, results)]
        wanted = [*outputs, f.loss] if self.loss_at == s else outputs
        body, reads, operands = self._body(local, received, wanted)

        # The inputs: arrays of the step, followed by values from the previous stage.
        sources = values_at(f.sources, reads)
        step_names, types = f.inputs_of(sources), f.step.program.inputs
        params = tuple(select(step_names, f.step.params))
        state = tuple(select(step_names, f.step.opt_state))
        batch = tuple(select(step_names, f.step.batch))
        step_ins = (*params, *state, *batch)
        ins = [*step_ins, *map(names.__getitem__, received)]
        in_types = [*map(types.__getitem__, step_ins), *avals(received)]

        # Differentiate sent values and the loss: with respect to parameters (`diff`), and to the
        # received values.
        diff = select(reads, f.parameter_of_input)
        back = list(filter(self.differentiable, received))  # cotangents for the previous stage
        front = list(filter(self.differentiable, sent))  # cotangents from the next stage
        ahead = select(front, outs)
        through = exclude(front, outs)
        has_loss = self.loss_at == s and self.differentiable(f.loss)
        vjp = StageVjp(
            _prelude(f, step_ins, sources),
            body,
            reads,
            received,
            operands,
            [*diff, *select(back, operands)],
            [*ahead, f.loss] if has_loss else ahead,
            outputs,
            in_types,
            len(params) + len(state),
            self._checkpoints(s),
        )

        # Write the forward program. A residual that is also another output has the name of this
        # output.
        out_names = [*map(names.__getitem__, outs), *results]
        residuals = vjp.names_of_saved(out_names, ins)
        outvars = dict(zip([*out_names, *residuals], opened(vjp.forward).outvars, strict=True))
        forward_jaxpr = vjp.with_outputs([*outvars.values()])
        forward = program_of(f"forward of stage {s}", forward_jaxpr, ins, [*outvars], FORWARD)

        # The backward program.
        leaves = tuple(values_at(f.parameter_of_input, diff))
        sums = {unused_name(n + GRAD, types): n for n in leaves}
        cotangents = {v: names[v] + GRAD for v in (*front, *back)}
        backward_jaxpr = self._backward(vjp, has_loss, ahead, through, back, operands, leaves)
        so_far = sums if o.clip_of_each is None else ()
        from_after = map(cotangents.__getitem__, (*ahead, *through))
        names_in = [*ins, *residuals, *from_after, *so_far]
        names_out = [*map(cotangents.__getitem__, back), *sums]
        weights = None
        if o.splits_backward:
            count = len(back)
            backward, weights = _split_backward(s, backward_jaxpr, names_in, names_out, count)
        else:
            backward = _live(f"backward of stage {s}", backward_jaxpr, names_in, names_out)
        return StagePrograms(
            s,
            forward,
            backward,
            weights,
            params,
            state,
            sums,
            {name: names[v] for v, name in cotangents.items()},
            batch,
            tuple(map(names.__getitem__, received)),
            tuple(map(names.__getitem__, sent)),
            tuple(results),
            len(local),
        )

    def _body(
        self, local: Sequence[int], received: Sequence[Var], wanted: Sequence[Atom]
    ) -> tuple[ClosedJaxpr, list[Var], list[Var]]:
        """Return the forward equations of a stage as a jaxpr, and the inputs that it reads.

        Args:
          local: the equations that are assigned to the stage.
          received: the values from the previous stage.
          wanted: the outputs of the stage.

        Returns:
          (jaxpr, inputs, received): the inputs of the forward pass and the received values that the
            jaxpr reads.
        """
        f = self.forward
        with_effects = [i for i in local if f.eqns[i].effects]
        targets = list(wanted)
        for i in with_effects:
            targets += f.eqns[i].invars
        live, leaves = backward_slice(f.eqns, targets, set(received))
        eqns = []
        used = {*leaves, *variables(wanted)}
        for i in sorted({*live, *with_effects}):
            eqn = f.eqns[i]
            is_shared = not any(map(self.dependent.get, eqn.outvars))
            assert is_shared or self.stage_of[i] == self.stage_of[local[0]], eqn
            eqns.append(eqn)
            used.update(variables(eqn.invars))
        reads = select(f.inner.invars, used)
        operands = select(received, used)
        return extract_part(f.jaxpr, [*reads, *operands], eqns, wanted), reads, operands

    def _backward(
        self,
        vjp: StageVjp,
        has_loss: bool,
        ahead: Sequence[Var],
        through: Sequence[Var],
        backs: Sequence[Var],
        operands: Sequence[Var],
        leaves: Sequence[str],
    ) -> ClosedJaxpr:
        """Return the backward pass of a stage. Its outputs are cotangents and sums of gradients.

        Args:
          vjp: the differentiated stage.
          has_loss: True if the stage computes the loss. The loss has the loss scale as cotangent.
          ahead: the differentiable sent values that the stage computes.
          through: the differentiable sent values that the stage only forwards.
          backs: the received values with a cotangent.
          operands: the received values that the stage reads.
          leaves: the leaves for which the stage computes gradients.
        """
        scale, adds = self.o.loss_scale, self.o.clip_of_each is None
        b = Builder(vjp.backward)
        stage_ins = b.inputs(vjp.in_types)
        saved = b.inputs(avals(vjp.saved))
        cotangents: list[Atom] = [*b.inputs(avals(ahead))]
        passing = dict(zip(through, b.inputs(avals(through)), strict=True))
        types = list(map(self._sum_type, leaves))
        sums = b.inputs(types) if adds else []
        if has_loss:
            t = self.forward.loss.aval.update(weak_type=False)
            cotangents.append(Literal(t.dtype.type(scale), t))
        b.role = BACKWARD
        grads = vjp.write_backward(b, stage_ins, saved, cotangents)
        with_parts = select(backs, operands)
        back = dict(zip(with_parts, grads[len(leaves) :], strict=True))

        # If the stage reads a value and also forwards it, the value's cotangent is the sum of two
        # parts.
        outs: list[Atom] = []
        for v in backs:
            if v in passing and v in back:
                outs += b.call(_added, passing[v], back[v])
            else:
                outs.append(back[v] if v in back else passing[v])

        local = dict(zip(leaves, grads[: len(leaves)], strict=True))
        scattered = self._scattered(b, local)
        if adds:
            add = _added if scale == 1.0 else _added_unscaled(scale)
            for total, grad in zip(sums, scattered, strict=True):
                outs += b.call(add, total, grad)
        else:
            for t, grad in zip(types, scattered, strict=True):
                outs += b.call(_cast(t.dtype, scale), grad)
        return b.build(outs)

    def _sum_type(self, leaf: str) -> Any:
        """Return the shape and dtype of a leaf's summed gradients."""
        param = self.forward.step.program.inputs[leaf]
        wide = ShapedArray(param.shape, sum_type(param.dtype))
        return self.scatter[leaf].rank_type(wide) if leaf in self.scatter else wide

    def _scattered(self, b: Builder, grads: Mapping[str, Atom]) -> list[Atom]:
        """Reduce-scatter the gradients of one stage over its replicas.

        Gradients of one dtype and dimension are packed into one collective.
        """
        found = dict(grads)
        kinds: dict[Any, list[str]] = {}
        for n in grads:
            if n in self.scatter:
                kinds.setdefault((grads[n].aval.dtype, self.scatter[n].axis), []).append(n)
        for i, ((_, axis), names) in enumerate(kinds.items()):
            parts = [b.call(padded(axis, self.scatter[n].padded), grads[n])[0] for n in names]
            slices = b.bind(
                reduce_scatter_p,
                *parts,
                name=f"bucket/{i}",
                over=(AXIS,),
                size=self.o.replicas,
                axis=axis,
            )
            found |= zip(names, slices, strict=True)
        return list(found.values())

    def _checkpoints(self, s: int) -> Collection[str] | None:
        """Return the names of the values that a stage with checkpoints saves.

        If the stage has no checkpoints, it saves all residuals, and the result is None.
        """
        names, end = self.o.memory.gradient_checkpoint, self.o.memory.last_checkpointed_stage
        if not names or (end >= 0 and s > end):
            return None
        if isinstance(names, str):  # "auto" saves only received values.
            return ()
        return names


def _prelude(forward: ForwardPass, names: Sequence[str], wanted: Sequence[Atom]) -> ClosedJaxpr:
    """Return a jaxpr of equations that a step runs before its loss, such as casts of weights.

    Args:
      forward: the forward pass.
      names: the names of the inputs of the jaxpr, which are inputs of the step.
      wanted: the values that the jaxpr returns.
    """
    vars_of = forward.step.program.invars
    b = Builder(forward.prelude)
    step_vars = values_at(vars_of, names)
    inputs: dict[Var, Atom] = dict(zip(step_vars, b.inputs(avals(step_vars)), strict=True))
    return b.build(forward.write_prelude(b, wanted, inputs))


def _split_backward(
    s: int, jaxpr: ClosedJaxpr, ins: Sequence[str], outs: Sequence[str], cotangents: int
) -> tuple[Program, Program]:
    """Split the backward pass of a stage in two programs, for schedules such as ZeroBubble.

    The first program computes the cotangents that the previous stage waits for. The second computes
    the gradients of weights, and can run later.

    Args:
      s: index of the stage.
      jaxpr: the backward pass.
      ins, outs: the names of the inputs and outputs of `jaxpr`.
      cotangents: the number of cotangents. They are the first outputs.
    """
    inner = opened(jaxpr)
    eqns = inner.eqns
    back, grads = inner.outvars[:cotangents], inner.outvars[cotangents:]

    # The second program reads these values of the first program, except constants: to recompute
    # constants is cheaper than to store them.
    first = needed_equations(eqns, back)
    computed: set[Var] = set()
    for eqn in first:
        computed.update(eqn.outvars)
    reads: list[Atom] = []
    for eqn in needed_equations(eqns, grads, computed):
        reads += eqn.invars
    shared = dict.fromkeys(variables([*reads, *grads]))
    between = [v for v in shared if v in computed and backward_slice(eqns, [v])[1]]

    names = [f"@between/{i}" for i in range(len(between))]
    one = closed_with(jaxpr, outvars=[*back, *between], eqns=first)
    second = needed_equations(eqns, grads, between)
    two = closed_with(jaxpr, invars=[*inner.invars, *between], outvars=grads, eqns=second)
    return (
        _live(f"backward of stage {s}", one, ins, [*outs[:cotangents], *names]),
        _live(f"weights of stage {s}", two, [*ins, *names], outs[cotangents:]),
    )


def _live(name: str, jaxpr: ClosedJaxpr, ins: Sequence[str], outs: Sequence[str]) -> Program:
    """Return the program of a stage's backward pass, without unused equations and inputs."""
    inner = opened(jaxpr)
    needed, leaves = backward_slice(inner.eqns, inner.outvars)
    used = {*leaves, *variables(inner.outvars)}
    named = dict(zip(ins, inner.invars, strict=True))
    reads = {n: v for n, v in named.items() if v in used}
    eqns = values_at(inner.eqns, needed)
    live = extract_part(jaxpr, [*reads.values()], eqns, inner.outvars)
    return program_of(name, live, [*reads], outs, BACKWARD)


def _added(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y.astype(x.dtype)


@functools.cache
def _added_unscaled(scale: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, y: x + y.astype(x.dtype) / scale


@functools.cache
def _cast(dtype: Any, scale: float) -> Callable[[jax.Array], jax.Array]:
    if scale == 1.0:
        return lambda x: x.astype(dtype)
    return lambda x: x.astype(dtype) / scale


def sums_of(programs: Sequence[StagePrograms]) -> dict[str, Any]:
    """Return the shape and dtype of each leaf's summed gradients, by leaf."""
    types: dict[str, Any] = {}
    for p in programs:
        outputs = (p.weights or p.backward).outputs
        for n, leaf in p.sums.items():
            types[leaf] = outputs[n]
    return types
