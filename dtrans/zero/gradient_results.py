"""Results that are computed from gradients of which each rank has a slice: a norm, a count of what is not finite.

What a step computes from gradients and returns is looked at as an update is: the row analysis finds what it does to the
rows of each leaf, reductions over rows become reductions of slices and an `all_reduce`. A gradient that is mixed in
another way, or returned itself, is gathered.
"""

from __future__ import annotations

from collections.abc import Collection

from dtrans._jax import Var
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.pytree import unused_name
from dtrans.rows.analysis import analyse
from dtrans.rows.layout import RowAxis
from dtrans.step.cut import Cut, Gradient, Name, OptimizeHalf
from dtrans.zero.choose_slices import Slices
from dtrans.zero.forward_values import leaves_that_meet_the_batch


class GradientResults:
    """What a step computes from gradients, as a half of its own.

    Args:
      step: the step, cut.
      slices: what is cut.
      here: the values of the step that are there already.
      differing: those of them that differ from rank to rank.

    Attributes:
      half: from gradients, parameters, and other values, to the results (and the parameters).
      others: the values of the step that are neither, by the name of the input.
      slices: what is given to it as slices.
      gathered: leaves whose gradient, or whose value, it needs whole.
    """

    def __init__(self, step: Cut, slices: Slices, here: Collection[Var], differing: Collection[Var]) -> None:
        inner = step.program.inner
        outs = step.program.outvars
        boundary = {v: n for n, v in step.boundary.items()}
        known = {n for n in step.params if n in slices.leaves}
        there = set(here) - {v for n, v in step.program.invars.items() if n in known}
        kept, _ = backward_slice(inner.eqns, [outs[n] for n in step.from_gradients], {*boundary, *there})
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
        params = [(n, v) for v, n in inputs.items() if isinstance(n, str) and n in step.params]
        half = OptimizeHalf(
            b.build([*wanted, *(v for _, v in params)]),
            tuple(inputs.values()),
            (*step.from_gradients, *(n for n, _ in params)),
        )
        analysis = analyse(half, step.params, slices.analysis.axes)
        mixed = {
            row.leaf for n in step.from_gradients if isinstance(row := analysis.layout(analysis.outputs[n]), RowAxis)
        } | set(analysis.groups)
        mixed |= set(leaves_that_meet_the_batch(analysis, [n for n, v in self.others.items() if v in differing]))
        self.half = half
        leaves = {n: s for n, s in slices.leaves.items() if n not in mixed}
        self.slices = Slices(analysis, leaves, {}, {})
        read = {*half.graded, *half.in_names}
        self.gathered = [n for n in slices.leaves if n in mixed and n in read]
