"""Forward pass of a micro-batch: the loss function of a step, laid out as one list of equations.

    prelude    equations before the loss: a key that is split, parameters in another type
    eqns       the loss function, and equations on its results
    diff       the values that the loss is differentiated by, and their leaves

The values of `eqns` are cut into stages. Each stage computes the part of the prelude that it reads.
This module differentiates nothing.
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
from dtrans.ir.dataflow import backward_slice, propagate
from dtrans.ir.inline import inline_calls
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
      jaxpr: inputs are the variables of `diff`, then those of `given`; outputs are the loss, then
        `results`.
      diff: what the loss is differentiated by, to the leaf whose gradient that is.
      given: each input of `jaxpr`, to the value of the step that it is: an input, or made by the
        prelude.
      prelude: equations of the step that make what inputs are given.
      loss: the value whose derivative is taken.
      results: the results of the step that are made here, state that is (batch statistics), and
        summaries, by name.
      summaries: what the step shows (`dtrans.summary`); the values are results, by `summary_name`.
      collected: result, or summary, to the collection that it is in (`dtrans.collect`).
    """

    step: Cut
    jaxpr: ClosedJaxpr
    diff: Mapping[Var, str]
    given: Mapping[Var, Atom]
    prelude: ClosedJaxpr
    loss: Atom
    results: Mapping[str, Atom]
    summaries: Sequence[Summary]
    collected: Mapping[str, str]

    def before(self, b: Builder, wanted: Sequence[Atom], inputs: Mapping[Var, Atom]) -> list[Atom]:
        """Write what the prelude makes of the step's inputs."""
        eqns = opened(self.prelude).eqns
        return b.inline_part(
            self.prelude, inputs, [eqns[i] for i in backward_slice(eqns, wanted)[0]], wanted
        )

    @property
    def of_micro_batches(self) -> list[Var]:
        """The inputs that each micro-batch has its own of."""
        return [v for v, a in self.given.items() if not self.of_state(a)]

    def of_state(self, value: Atom) -> bool:
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
    eqn = loss_of(source)
    inner = source.inner
    at = inner.eqns.index(eqn)
    outs = source.outvars
    ins = source.invars
    made_here = [n for n in step.frozen if outs[n] is not ins[n]]
    names = [n for n in (*step.results, *made_here) if n not in step.from_gradients]
    count = len(opened(eqn.params["loss"]).outvars)
    observers = step.early
    wanted: list[Atom] = [outs[n] for n in names]
    wanted += [a for i in observers for a in inner.eqns[i].invars]
    kept = sorted({*backward_slice(inner.eqns, wanted)[0], *observers, at})
    marked = inline_calls(eqn.params["loss"], keep=(COLLECT,), rules=True)
    body = inline_calls(eqn.params["loss"], rules=True)
    differentiated, others = operands_of(eqn.replace(params={**eqn.params, "loss": body}))
    _check(step, eqn, count, kept, at)

    # what the step makes of the loss's results reads them under the names they have inside
    env: dict[Var, Atom] = dict(zip(eqn.outvars[:count], opened(body).outvars, strict=True))
    after = propagate(inner.eqns, dict.fromkeys(eqn.outvars, 1), {})
    late = [
        i
        for i in kept
        if i != at and (any(after.get(v) for v in inner.eqns[i].outvars) or i in observers)
    ]
    eqns = [
        *opened(body).eqns,
        *(inner.eqns[i].replace(invars=read_from(env, inner.eqns[i].invars)) for i in late),
    ]
    shown = summaries(closed([], [], [], [], eqns, body))
    eqns = [e for e in eqns if e.primitive is not summary_p]
    results = dict(zip(names, read_from(env, [outs[n] for n in names]), strict=True))
    results |= {summary_name(s.tag): s.atom for s in shown if s.atom is not None}
    eqns = _live(eqns, [opened(body).outvars[0], *results.values()])
    made = {v for e in eqns for v in e.outvars}
    own = {*differentiated, *others, *opened(body).constvars}
    keys = _collected(marked, body, eqn, {n: outs[n] for n in names}, shown)
    reads = [a for e in eqns for a in e.invars] + list(results.values())
    outer = dict.fromkeys(a for a in reads if isinstance(a, Var) and a not in made and a not in own)
    steps_constants = dict(zip(inner.constvars, constants(source.jaxpr), strict=True))
    direct = [v for v in outer if v not in steps_constants]
    constvars = [*opened(body).constvars, *(v for v in outer if v in steps_constants)]
    values = [*constants(body), *(steps_constants[v] for v in outer if v in steps_constants)]
    given: dict[Var, Atom] = {**differentiated, **others, **{v: v for v in direct}}
    loss = opened(body).outvars[0]
    jaxpr = closed(constvars, values, list(given), [loss, *results.values()], eqns, source.jaxpr)
    leaf_of = {v: leaf for leaf, v in step.gradients.items()}
    diff = {
        v: leaf_of[g]
        for v, g in zip(differentiated, eqn.outvars[count:], strict=True)
        if g in leaf_of
    }
    made_before = [a for a in given.values() if isinstance(a, Var)]
    early = backward_slice(inner.eqns, made_before)[0]
    prelude = closed_with(source.jaxpr, outvars=made_before, eqns=[inner.eqns[i] for i in early])
    return ForwardPass(step, jaxpr, diff, given, prelude, loss, results, shown, keys)


def _live(eqns: Sequence[JaxprEqn], outputs: Sequence[Atom]) -> list[JaxprEqn]:
    """Return the equations with effects, or with outputs that are needed."""
    seen = [i for i, e in enumerate(eqns) if e.effects]
    kept, _ = backward_slice(eqns, [*outputs, *(a for i in seen for a in eqns[i].invars)])
    return [eqns[i] for i in sorted({*kept, *seen})]


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
    """Return the collection of each result and summary that is in one.

    Args:
      marked: the loss function with the marks of collections; `body` is the same without them.
      eqn: the equation of the step that holds it.
      outs: the results of the step.
    """
    keys = collected(marked)
    of_output: dict[Atom, str] = {}
    for v, a in zip(eqn.outvars, opened(marked).outvars, strict=False):
        if isinstance(a, Var) and a in keys:
            of_output[v] = keys[a]
    found = {n: of_output[a] for n, a in outs.items() if isinstance(a, Var) and a in of_output}
    seen = {s.tag: s.atom for s in summaries(marked)}
    for s in shown:
        atom = seen.get(s.tag)
        if isinstance(atom, Var) and atom in keys:
            found[summary_name(s.tag)] = keys[atom]
    return found


def _check(step: Cut, eqn: JaxprEqn, count: int, kept: Sequence[int], at: int) -> None:
    """Refuse gradients that the step uses in another way than through their marks."""
    inner = step.program.inner
    raw = set(eqn.outvars[count:])
    for e in inner.eqns:
        if e.primitive is not mark_p and any(isinstance(a, Var) and a in raw for a in e.invars):
            raise GradientError(
                f"{step.program.name} uses gradients that dtrans.value_and_grad did not mark"
            )
    assert inner.eqns[at].primitive is value_and_grad_p and at in kept
