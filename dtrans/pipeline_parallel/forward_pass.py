"""Forward pass of a micro-batch: the loss function of a step as one flat list of equations.

    prelude    equations before the loss function, such as a split of a key or a cast of parameters
    eqns       equations of the loss function, and later equations that read its results

`dtrans.pipeline_parallel.assign_stages` divides `eqns` into stages. Each stage recomputes the
values of the prelude that it reads. `dtrans.pipeline_parallel.stage_vjp` differentiates the stages
later, with respect to the inputs that are parameters (`ForwardPass.parameter_of_input`).
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
    backward_slice,
    live_equations,
    needed_equations,
    propagate,
    variables,
    variables_read,
)
from dtrans.ir.inline import inline_calls
from dtrans.ir.selection import exclude, invert, select, subset, values_at
from dtrans.step.capture import loss_of, operands_of, value_and_grad_p
from dtrans.step.collect import COLLECT, collected
from dtrans.step.frozen import changed_leaves
from dtrans.step.halves import DividedStep
from dtrans.step.marks import mark_p
from dtrans.step.summary import Summary, summaries, summary_p


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass(HoldsJaxpr):
    """Forward pass of a training step for one micro-batch (a part of the batch).

    It is divided into stages, which are then differentiated separately.

    Attributes:
      step: the step with its loss function as one equation (`dtrans.step.capture`), divided into
        forward and backward, and the update.
      jaxpr: the equations. The inputs of the jaxpr are the keys of `sources`. Its outputs are the
        loss, followed by `results`.
      parameter_of_input: maps an input of `jaxpr` to a parameter. The derivative with respect to
        this input is the parameter's gradient.
      sources: maps an input of `jaxpr` to an input of the step, or to an output of the prelude.
      prelude: the equations that the step runs before the loss function, to compute the values of
        `sources`.
      loss: the value to differentiate.
      results: results of the step that the forward pass computes, by name. They include updated
        state, such as batch statistics, and values of summaries, which `summary_name` names.
      summaries: the summaries of the step (`dtrans.summary`).
      collected: merge rules that the user chose with `dtrans.collect`, such as `GLOBAL_MEAN`, by
        name of the result or summary.
    """

    step: DividedStep
    jaxpr: ClosedJaxpr
    parameter_of_input: Mapping[Var, str]
    sources: Mapping[Var, Atom]
    prelude: ClosedJaxpr
    loss: Atom
    results: Mapping[str, Atom]
    summaries: Sequence[Summary]
    collected: Mapping[str, str]

    def write_prelude(
        self, b: Builder, wanted: Sequence[Atom], inputs: Mapping[Var, Atom]
    ) -> list[Atom]:
        """Write the equations before the loss function that compute `wanted`.

        Args:
          b: the builder to write to.
          wanted: values that the step computes before the loss function.
          inputs: maps each input of the step to its value in `b`.

        Returns:
          The values of `wanted` in `b`.
        """
        eqns = needed_equations(opened(self.prelude).eqns, wanted)
        return b.inline_part(self.prelude, inputs, eqns, wanted)

    @property
    def micro_batch_inputs(self) -> list[Var]:
        """Inputs of the jaxpr that differ between micro-batches."""
        return [v for v, a in self.sources.items() if not self.is_state(a)]

    def is_state(self, value: Atom) -> bool:
        """Return True if the step computes `value` from parameters and optimizer state alone.

        An example is a cast weight, which the step computes before the loss function. A stage
        recomputes such a value instead of saving it.
        """
        return not select(self.inputs_of([value]), self.step.batch)

    def inputs_of(self, wanted: Sequence[Atom]) -> list[str]:
        """Return the names of the step's inputs from which `wanted` is computed."""
        names = dict(zip(self.step.program.inner.invars, self.step.program.in_names, strict=True))
        _, leaves = backward_slice(self.prelude.jaxpr.eqns, wanted)
        return values_at(names, select(names, leaves))


def forward_pass(step: DividedStep) -> ForwardPass:
    """Return the forward pass of a step that calls its loss function in one equation.

    `dtrans.step.capture` writes such steps.

    Raises:
      GradientError: the step uses gradients that were not computed with `dtrans.value_and_grad`.
    """
    source = step.program
    inner, outs = source.inner, source.outvars
    eqn = loss_of(source)
    at = inner.eqns.index(eqn)

    # Find the equations outside of the loss function that results and host callbacks need.
    from_forward = changed_leaves(source, step.frozen)
    names = exclude([*step.results, *from_forward], step.from_gradients)
    wanted: list[Atom] = values_at(outs, names)
    for i in step.early:
        wanted += inner.eqns[i].invars
    needed = sorted({*backward_slice(inner.eqns, wanted)[0], *step.early, at})

    # Inline the loss function, once with the marks of `dtrans.collect` and once without.
    marked = inline_calls(eqn.params["loss"], keep=(COLLECT,), rules=True)
    body = inline_calls(eqn.params["loss"], rules=True)
    loss_body = opened(body)
    count, loss = len(loss_body.outvars), loss_body.outvars[0]
    differentiated, others = operands_of(eqn.replace(params={**eqn.params, "loss": body}))
    _check(step, eqn, count, needed, at)

    # The results of the loss function have different variables inside and outside of the function.
    # Later equations are rewritten to read the variables inside.
    env: dict[Var, Atom] = dict(zip(eqn.outvars[:count], loss_body.outvars, strict=True))
    after = propagate(inner.eqns, dict.fromkeys(eqn.outvars, 1), {})
    eqns = list(loss_body.eqns)
    for i in needed:
        late = inner.eqns[i]
        if i != at and (any(map(after.get, late.outvars)) or i in step.early):
            eqns.append(late.replace(invars=read_from(env, late.invars)))

    # Collect the results, including values of summaries, and remove the equations of summaries.
    shown = summaries(closed([], [], [], [], eqns, body))
    results = dict(zip(names, read_from(env, values_at(outs, names)), strict=True))
    results |= {summary_name(s.tag): s.atom for s in shown if s.atom is not None}
    keys = _collected(marked, eqn, subset(outs, names), shown)
    plain = [e for e in eqns if e.primitive is not summary_p]
    eqns = live_equations(plain, [loss, *results.values()])

    # Collect the inputs and constants of the loss function, and of the later equations.
    step_constants = dict(zip(inner.constvars, constants(source.jaxpr), strict=True))
    constant_of = dict(zip(loss_body.constvars, constants(body), strict=True))
    sources: dict[Var, Atom] = {**differentiated, **others}
    local = {*sources, *constant_of}
    for e in eqns:
        local.update(e.outvars)
    reads = dict.fromkeys(variables_read(eqns, results.values()))
    for v in reads:
        if v in local:
            continue
        if v in step_constants:
            constant_of[v] = step_constants[v]
        else:
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
    """Return the name of a summary's value among the results of a pipeline."""
    return f"@summary/{tag}"


def _collected(
    marked: ClosedJaxpr,
    eqn: JaxprEqn,
    outs: Mapping[str, Atom],
    shown: Sequence[Summary],
) -> dict[str, str]:
    """Return the merge rule of each result and summary that the user passed to `dtrans.collect`.

    Args:
      marked: the loss function, with an equation for each call of `dtrans.collect`.
      eqn: the equation of the step that calls the loss function.
      outs: the results of the step, by name.
      shown: the summaries of the step.
    """
    keys = collected(marked)
    of_output: dict[Atom, str] = {}
    for v, a in zip(eqn.outvars, opened(marked).outvars, strict=False):
        if isinstance(a, Var) and a in keys:
            of_output[v] = keys[a]
    found = {}
    for n, a in outs.items():
        if isinstance(a, Var) and a in of_output:
            found[n] = of_output[a]
    atoms = {s.tag: s.atom for s in summaries(marked)}
    for s in shown:
        atom = atoms.get(s.tag)
        if isinstance(atom, Var) and atom in keys:
            found[summary_name(s.tag)] = keys[atom]
    return found


def _check(step: DividedStep, eqn: JaxprEqn, count: int, needed: Sequence[int], at: int) -> None:
    """Raise GradientError if the step reads gradients not computed by `dtrans.value_and_grad`."""
    inner = step.program.inner
    raw = set(eqn.outvars[count:])
    for e in inner.eqns:
        if e.primitive is not mark_p and not raw.isdisjoint(variables(e.invars)):
            raise GradientError(
                f"{step.program.name} uses gradients that dtrans.value_and_grad did not mark; "
                "read the gradients that it returns"
            )
    assert inner.eqns[at].primitive is value_and_grad_p and at in needed
