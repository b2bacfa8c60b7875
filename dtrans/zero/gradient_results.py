"""Results that a step computes from sliced gradients, such as a norm or a count of infinities.

Each rank has only slices of gradients. So the equations of these results are rewritten for slices
like those of an update (`dtrans.zero.update`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.engine.layout import Sliced
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import all_operands, needed_equations, outputs_of
from dtrans.ir.pytree import unused_name
from dtrans.ir.selection import values_at
from dtrans.rows.analysis import analyse
from dtrans.step.halves import DividedStep, Gradient, Name, UpdateProgram
from dtrans.zero.forward_values import leaves_that_meet_the_batch


class GradientResults:
    """Equations of a step that compute results, such as a norm, from gradients.

    Args:
      step: the step, divided into its gradient computation and its update.
      leaves: the sliced parameters, by name.
      computed: values of the step that the rank's forward and backward pass have computed.
      differing: the values of the step that differ from rank to rank.

    Attributes:
      half: a jaxpr that computes the results from gradients, parameters and other values.
      others: the inputs of `half` that are neither gradients nor parameters: name -> variable of
        the step.
      mixed: sliced parameters that the results combine with values that differ from rank to rank.
        The results read these parameters and their gradients in full.
    """

    def __init__(
        self,
        step: DividedStep,
        leaves: Mapping[str, Sliced],
        computed: Collection[Var],
        differing: Collection[Var],
    ) -> None:
        outs = step.program.outvars
        wanted = values_at(outs, step.from_gradients)
        known = {*step.boundary.values(), *computed}
        eqns = needed_equations(step.program.inner.eqns, wanted, known)

        b = Builder(step.program.jaxpr)
        self.others: dict[Name, Var] = {}
        self.inputs = self._name_inputs(step, b, eqns, wanted)
        b.invars += self.inputs
        for eqn in eqns:
            b.keep(eqn)
        jaxpr = b.build(wanted)
        self.half = UpdateProgram(jaxpr, tuple(self.inputs.values()), tuple(step.from_gradients))

        local = [n for n, v in self.others.items() if v in differing]
        self.mixed: list[str] = []
        if local:
            axes = {n: sliced.axis for n, sliced in leaves.items()}
            meeting = self._leaves_that_meet(b, step, wanted, axes, local)
            self.mixed = [n for n in meeting if n in leaves]

    def _name_inputs(
        self, step: DividedStep, b: Builder, eqns: Sequence[JaxprEqn], wanted: Sequence[Atom]
    ) -> dict[Var, Name]:
        """Return a name for each input of `half`; also set the attribute `others`."""
        names: dict[Var, Name] = {v: Gradient(n) for n, v in step.boundary.items()}
        names |= {v: n for n, v in step.program.invars.items() if n in step.params}
        computed = set(outputs_of(eqns))
        reads = all_operands(eqns)
        inputs: dict[Var, Name] = {}
        for a in (*reads, *wanted):
            if not isinstance(a, Var) or a in computed or a in inputs or b.is_constant(a):
                continue
            if a in names:
                inputs[a] = names[a]
            else:
                inputs[a] = unused_name(f"given/{len(self.others)}", step.params)
                self.others[inputs[a]] = a
        return inputs

    def _leaves_that_meet(
        self,
        b: Builder,
        step: DividedStep,
        wanted: Sequence[Atom],
        axes: Mapping[str, int],
        local: Collection[Name],
    ) -> Collection[str]:
        """Return the parameters that results combine with values that differ from rank to rank."""
        params: list[str] = []
        values: list[Atom] = []
        for v, n in self.inputs.items():
            if isinstance(n, str) and n in step.params:
                params.append(n)
                values.append(v)
        # the row analysis follows a leaf only if it is an input and an output
        jaxpr = b.build([*wanted, *values])
        out_names = (*step.from_gradients, *params)
        half = UpdateProgram(jaxpr, tuple(self.inputs.values()), out_names)
        return leaves_that_meet_the_batch(analyse(half, step.params, axes), local)
