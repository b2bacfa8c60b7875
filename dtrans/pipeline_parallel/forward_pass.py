"""Forward pass of a micro-batch: the loss function of a step, laid out as one list of equations.

    prelude    equations before the loss: a key that is split, parameters in another type
    eqns       the loss function, and equations on its results
    diff       the values that the loss is differentiated by, and their leaves

`dtrans.pipeline_parallel.assign_stages` cuts `eqns` into stages. Each stage computes the part of
the prelude that it reads. This module does not differentiate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    HoldsJaxpr,
    JaxprEqn,
    Var,
    closed,
    closed_with,
    constants,
    opened,
)
from dtrans.errors import GradientError
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import (
    all_operands,
    backward_slice,
    live_equations,
    needed_equations,
    propagate,
    variables,
)
from dtrans.ir.inline import inline_calls
from dtrans.ir.selection import invert, subset, values_at
from dtrans.step.capture import loss_of, operands_of, value_and_grad_p
from dtrans.step.collect import COLLECT, collected
from dtrans.step.cut import Cut
from dtrans.step.marks import mark_p
from dtrans.step.summary import Summary, summaries, summary_p


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass(HoldsJaxpr):
    """The forward pass of a step.

    Attributes:
      step: the step, captured (`dtrans.step.capture`) and cut.
      jaxpr: the equations. Inputs are the keys of `sources`; outputs are the loss, then `results`.
      diff: each input by which the loss is differentiated, to the leaf with this gradient.
      sources: each input of `jaxpr`, to its value in the step: an input of the step, or an output
        of the prelude.
      prelude: equations of the step that compute these values.
      loss: the value to differentiate.
      results: results of the step that the forward pass computes, by name. They include state
        (batch statistics) and summaries.
      summaries: the summaries of the step (`dtrans.summary`); `results` has their values, by
        `summary_name`.
      collected: result, or summary, to its collection (`dtrans.collect`).
    """

    step: Cut
    jaxpr: ClosedJaxpr
    diff: Mapping[Var, str]
    sources: Mapping[Var, Atom]
    prelude: ClosedJaxpr
    loss: Atom
    results: Mapping[str, Atom]
    summaries: Sequence[Summary]
    collected: Mapping[str, str]

    def write_prelude(
        self, b: Builder, wanted: Sequence[Atom], inputs: Mapping[Var, Atom]
    ) -> list[Atom]:
        """Write the equations of the prelude that compute `wanted` from the step's inputs."""
        eqns = needed_equations(opened(self.prelude).eqns, wanted)
        return b.inline_part(self.prelude, inputs, eqns, wanted)

    @property
    def micro_batch_inputs(self) -> list[Var]:
        """The inputs that differ between micro-batches."""
        return [v for v, a in self.sources.items() if not self.is_state(a)]

    def is_state(self, value: Atom) -> bool:
        """Return True if a value of the prelude depends on no input of the batch."""
        return all(n not in self.step.batch for n in self.inputs_of([value]))

    def inputs_of(self, wanted: Sequence[Atom]) -> list[str]:
        """Return the names of the step's inputs that values of the prelude depend on."""
        names = dict(zip(self.step.program.inner.invars, self.step.program.in_names, strict=True))
        _, leaves = backward_slice(self.prelude.jaxpr.eqns, wanted)
        return [n for v, n in names.items() if v in leaves]


def forward_pass(step: Cut) -> ForwardPass:
    """Return the forward pass of a captured step.

    Raises:
      GradientError: gradients are used without their marks.
    """
    source = step.program
    inner, outs, ins = source.inner, source.outvars, source.invars
    eqn = loss_of(source)
    at = inner.eqns.index(eqn)

    # the equations of the step outside of the loss that results and callbacks need
    from_forward = [n for n in step.frozen if outs[n] is not ins[n]]
    names = [n for n in (*step.results, *from_forward) if n not in step.from_gradients]
    wanted: list[Atom] = values_at(outs, names)
    for i in step.early:
        wanted += inner.eqns[i].invars
    needed = sorted({*backward_slice(inner.eqns, wanted)[0], *step.early, at})

    # the loss function: once with the marks of collections, once without
    marked = inline_calls(eqn.params["loss"], keep=(COLLECT,), rules=True)
    body = inline_calls(eqn.params["loss"], rules=True)
    loss_body = opened(body)
    count, loss = len(loss_body.outvars), loss_body.outvars[0]
    differentiated, others = operands_of(eqn.replace(params={**eqn.params, "loss": body}))
    _check(step, eqn, count, needed, at)

    # equations on the loss's results read them under the names that they have inside
    env: dict[Var, Atom] = dict(zip(eqn.outvars[:count], loss_body.outvars, strict=True))
    after = propagate(inner.eqns, dict.fromkeys(eqn.outvars, 1), {})
    eqns = list(loss_body.eqns)
    for i in needed:
        late = inner.eqns[i]
        if i != at and (any(map(after.get, late.outvars)) or i in step.early):
            eqns.append(late.replace(invars=read_from(env, late.invars)))

    # results, among them summaries, whose equations go
    shown = summaries(closed([], [], [], [], eqns, body))
    results = dict(zip(names, read_from(env, values_at(outs, names)), strict=True))
    results |= {summary_name(s.tag): s.atom for s in shown if s.atom is not None}
    keys = _collected(marked, body, eqn, subset(outs, names), shown)
    plain = [e for e in eqns if e.primitive is not summary_p]
    eqns = live_equations(plain, [loss, *results.values()])

    # inputs and constants: those of the loss function, and values of the step around it
    steps_constants = dict(zip(inner.constvars, constants(source.jaxpr), strict=True))
    constant_of = dict(zip(loss_body.constvars, constants(body), strict=True))
    sources: dict[Var, Atom] = {**differentiated, **others}
    local = {*sources, *constant_of}
    for e in eqns:
        local.update(e.outvars)
    reads = [*all_operands(eqns), *results.values()]
    for v in dict.fromkeys(variables(reads)):
        if v in steps_constants and v not in local:
            constant_of[v] = steps_constants[v]
        elif v not in local:
            sources[v] = v
    jaxpr = closed(
        [*constant_of],
        [*constant_of.values()],
        [*sources],
        [loss, *results.values()],
        eqns,
        source.jaxpr,
    )

    leaf_of = invert(step.gradients)
    gradients = zip(differentiated, eqn.outvars[count:], strict=True)
    diff = {v: leaf_of[g] for v, g in gradients if g in leaf_of}
    values = variables(sources.values())
    early = needed_equations(inner.eqns, values)
    prelude = closed_with(source.jaxpr, outvars=values, eqns=early)
    return ForwardPass(step, jaxpr, diff, sources, prelude, loss, results, shown, keys)


def summary_name(tag: str) -> str:
    """Return the name of the result that a summary shows."""
    return f"@summary/{tag}"


def _collected(
    marked: ClosedJaxpr,
    body: ClosedJaxpr,
    eqn: JaxprEqn,
    outs: Mapping[str, Atom],
    shown: Sequence[Summary],
) -> dict[str, str]:
    """Return the collection of each result and summary that has one.

    Args:
      marked: the loss function with the marks of collections; `body` is the same without them.
      eqn: the equation of the step that contains it.
      outs: the results of the step.
      shown: the summaries of the step.
    """
    keys = collected(marked)
    of_output: dict[Atom, str] = {}
    for v, a in zip(eqn.outvars, opened(marked).outvars, strict=False):
        if isinstance(a, Var) and a in keys:
            of_output[v] = keys[a]
    found = {n: of_output[a] for n, a in outs.items() if isinstance(a, Var) and a in of_output}
    atoms = {s.tag: s.atom for s in summaries(marked)}
    for s in shown:
        atom = atoms.get(s.tag)
        if isinstance(atom, Var) and atom in keys:
            found[summary_name(s.tag)] = keys[atom]
    return found


def _check(step: Cut, eqn: JaxprEqn, count: int, needed: Sequence[int], at: int) -> None:
    """Refuse gradients that the step reads without their marks."""
    inner = step.program.inner
    raw = set(eqn.outvars[count:])
    for e in inner.eqns:
        if e.primitive is not mark_p and not raw.isdisjoint(variables(e.invars)):
            raise GradientError(
                f"{step.program.name} uses gradients that dtrans.value_and_grad did not mark; "
                "read the gradients that it returns"
            )
    assert inner.eqns[at].primitive is value_and_grad_p and at in needed
