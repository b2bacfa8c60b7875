"""Values of forward that an update reads, as inputs of the update: the loss, statistics, counts.

The cut gives an update all equations that it needs, including those of forward. Where the update
cannot compute them, forward does, and they become inputs (`Cut.handed`): servers have no row of the
batch, and ranks have slices of parameters. Otherwise the update
would also run a loop of forward again: XLA merges equal equations, but not loops.

Invariant: an equation of the update that reads the batch also reads a gradient or optimizer state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from dtrans._jax import LOOPS, Atom, JaxprEqn, Var, equations_inside
from dtrans.ir.builder import extract_part
from dtrans.ir.dataflow import all_operands, variables
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, OPTIMIZE, Program, is_communication
from dtrans.ir.pytree import unused_name
from dtrans.step.cut import Cut, Gradient, OptimizeHalf


def hand_over(step: Cut, parts: Collection[str], *, drawn: bool = False) -> Cut:
    """Return the step with an optimize half that takes values of forward as inputs (`Cut.handed`).

    Args:
      step: the step.
      parts: batch arrays that these values depend on.
      drawn: True to include values that depend on random rows of each trainer.
    """
    half = step.optimize
    values = _forward_values(step, parts, drawn)
    if not values:
        return step
    eqns = [e for e in half.eqns if not values.issuperset(e.outvars)]
    atoms = [*all_operands(eqns), *half.inner.outvars]
    read = dict.fromkeys(variables(atoms))

    taken = {*map(str, half.in_names), *step.program.in_names, *step.program.out_names}
    handed: dict[str, Atom] = {}
    for v in read:
        if v in values:
            handed[unused_name(f"forward/{len(handed)}", taken)] = v

    # unread batch arrays are dropped: they would tie the half to one batch size
    inputs = {n: v for n, v in half.invars.items() if n not in step.batch or v in read}
    invars = [*inputs.values(), *(v for v in read if v in values)]
    jaxpr = eliminate_dead(extract_part(half.jaxpr, invars, eqns, half.inner.outvars))
    optimize = OptimizeHalf(jaxpr, (*inputs, *handed), half.out_names)
    return dataclasses.replace(
        step, program=_forward_of(step, values), optimize=optimize, handed=handed
    )


def runs_loops_of_forward(step: Cut, parts: Collection[str]) -> bool:
    """Return True if the update repeats a loop of forward: XLA merges equal equations, not
    loops."""
    values = _forward_values(step, parts)
    return any(
        e.primitive.name in LOOPS and values.issuperset(e.outvars) for e in step.optimize.eqns
    )


def _forward_values(step: Cut, parts: Collection[str], drawn: bool = False) -> set[Var]:
    """Return the values in the update that depend on the batch, but not on gradients or sliced
    state."""
    half = step.optimize
    # state that forward reads is replicated: its leaf is never sliced
    replicated = {*step.params, *step.batch, *step.state_read}
    late = {v for n, v in half.invars.items() if isinstance(n, Gradient) or n not in replicated}
    of_batch = {v for n, v in half.invars.items() if n in parts}
    values: set[Var] = set()
    for eqn in half.eqns:
        read = set(variables(eqn.invars))
        if read & late:
            late.update(eqn.outvars)
        elif read & (of_batch | values) or (drawn and _is_drawn(eqn)):
            values.update(eqn.outvars)
    return values


def _is_drawn(eqn: JaxprEqn) -> bool:
    """Return True if an equation differs between trainers, or communicates."""
    return any(map(is_communication, (eqn, *equations_inside(eqn))))


def _forward_of(step: Cut, values: set[Var]) -> Program:
    """Return the step's program with the equations of these values in forward."""
    pairs = zip(step.program.eqns, step.program.roles, strict=True)
    roles = [
        FORWARD if role == OPTIMIZE and values.issuperset(e.outvars) else role for e, role in pairs
    ]
    return dataclasses.replace(step.program, roles=tuple(roles))
