"""Results that a step computes from sliced gradients: a norm, a count of non-finite numbers.

The engine writes them as it writes an update (`dtrans.zero.update`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dtrans._jax import Var
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.pytree import unused_name
from dtrans.rows.analysis import analyse
from dtrans.step.cut import Cut, Gradient, Name, OptimizeHalf
from dtrans.zero.choose_slices import Sliced
from dtrans.zero.forward_values import leaves_that_meet_the_batch


class GradientResults:
    """Results of gradients, as a half of its own.

    Args:
      step: the step, cut.
      leaves: the leaves that are cut.
      here: the values of the step that are there already.
      differing: those of them that differ from rank to rank.

    Attributes:
      half: from gradients, parameters, and other values, to the results.
      others: the values of the step that are neither, by the name of the input.
      mixed: leaves whose gradient and value it needs whole, since they meet values that differ.
    """

    def __init__(
        self,
        step: Cut,
        leaves: Mapping[str, Sliced],
        here: Collection[Var],
        differing: Collection[Var],
    ) -> None:
        inner = step.program.inner
        outs = step.program.outvars
        boundary = {v: n for n, v in step.boundary.items()}
        known = {n for n in step.params if n in leaves}
        there = set(here) - {v for n, v in step.program.invars.items() if n in known}
        kept, _ = backward_slice(
            inner.eqns, [outs[n] for n in step.from_gradients], {*boundary, *there}
        )
        b = Builder(step.program.jaxpr)
        names: dict[Var, Name] = {v: Gradient(n) for v, n in boundary.items()}
        names |= {v: n for n, v in step.program.invars.items() if n in step.params}
        self.others: dict[Name, Var] = {}
        inputs: dict[Var, Name] = {}
        eqns = [inner.eqns[i] for i in kept]
        made = {v for e in eqns for v in e.outvars}
        wanted = [outs[n] for n in step.from_gradients]
        for a in [*(a for e in eqns for a in e.invars), *wanted]:
            if isinstance(a, Var) and a not in made and a not in inputs and not b.is_constant(a):
                inputs[a] = names.get(a) or unused_name(f"given/{len(self.others)}", step.params)
                if a not in names:
                    self.others[inputs[a]] = a
        b.invars += inputs
        for e in eqns:
            b.keep(e)
        self.half = OptimizeHalf(
            b.build(wanted), tuple(inputs.values()), tuple(step.from_gradients)
        )
        local = [n for n, v in self.others.items() if v in differing]
        axes = {n: sliced.axis for n, sliced in leaves.items()}
        self.mixed = (
            [n for n in self._meeting(b, inputs, step, axes, local) if n in leaves] if local else []
        )

    def _meeting(
        self,
        b: Builder,
        inputs: Mapping[Var, Name],
        step: Cut,
        axes: Mapping[str, int],
        local: Collection[Name],
    ) -> Collection[str]:
        """Return the leaves that meet values that differ from rank to rank."""
        params = [(n, v) for v, n in inputs.items() if isinstance(n, str) and n in step.params]
        outs = [step.program.outvars[n] for n in step.from_gradients]
        # the row analysis follows the leaves that it sees on both sides
        both = OptimizeHalf(
            b.build([*outs, *(v for _, v in params)]),
            tuple(inputs.values()),
            (*step.from_gradients, *(n for n, _ in params)),
        )
        return leaves_that_meet_the_batch(analyse(both, step.params, axes), local)
