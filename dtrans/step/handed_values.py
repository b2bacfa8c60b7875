"""Values of forward that an update reads, made inputs of the update: the loss, statistics, counts
of rows.

As it is cut, an update has all equations that it needs, those of forward too. Forward makes such
values and hands them over (`Cut.handed`) where the update cannot make them: servers have no row of
the batch, and ranks have slices of parameters. A loop that makes gradients would run once more for
what else it carries.

Invariant: an equation of the update that reads the batch also reads a gradient or optimizer state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from dtrans._jax import LOOPS, Atom, JaxprEqn, Var, equations_inside
from dtrans.ir.builder import extract_part
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, OPTIMIZE, Program, is_communication
from dtrans.ir.pytree import unused_name
from dtrans.step.cut import Cut, Gradient, OptimizeHalf


def hand_over(step: Cut, parts: Collection[str], *, drawn: bool = False) -> Cut:
    """Return the step with an optimize half that takes values of forward as inputs (`Cut.handed`).

    Args:
      parts: the arrays of the batch that forward reads for them.
      drawn: hand over also what is made of rows that each trainer draws (random numbers with the
        rows of the batch).
    """
    half = step.optimize
    made = _made_by_forward(step, parts, drawn)
    if not made:
        return step
    kept = [e for e in half.eqns if not made.issuperset(e.outvars)]
    atoms = [*(a for e in kept for a in e.invars), *half.inner.outvars]
    read = dict.fromkeys(a for a in atoms if isinstance(a, Var))

    taken = {*map(str, half.in_names), *step.program.in_names, *step.program.out_names}
    handed: dict[str, Atom] = {}
    for v in read:
        if v in made:
            handed[unused_name(f"forward/{len(handed)}", taken)] = v

    # arrays of the batch that nothing reads any more would tie the half to one size of the batch
    given = {n: v for n, v in half.invars.items() if n not in step.batch or v in read}
    invars = [*given.values(), *(v for v in read if v in made)]
    jaxpr = eliminate_dead(extract_part(half.jaxpr, invars, kept, half.inner.outvars))
    optimize = OptimizeHalf(jaxpr, (*given, *handed), half.out_names)
    return dataclasses.replace(
        step, program=_forward_of(step, made), optimize=optimize, handed=handed
    )


def runs_loops_of_forward(step: Cut, parts: Collection[str]) -> bool:
    """Return True if the update has a loop of forward: XLA merges equal equations, and no loops."""
    made = _made_by_forward(step, parts)
    return any(e.primitive.name in LOOPS and made.issuperset(e.outvars) for e in step.optimize.eqns)


def _made_by_forward(step: Cut, parts: Collection[str], drawn: bool = False) -> set[Var]:
    """Return the values of the update that depend on the batch, and neither on a gradient nor on
    sliced state."""
    half = step.optimize
    # state that forward reads is whole on every rank: its leaf is never cut
    whole = {*step.params, *step.batch, *step.asked}
    late = {v for n, v in half.invars.items() if isinstance(n, Gradient) or n not in whole}
    of_batch = {v for n, v in half.invars.items() if n in parts}
    made: set[Var] = set()
    for eqn in half.eqns:
        read = {a for a in eqn.invars if isinstance(a, Var)}
        if read & late:
            late.update(eqn.outvars)
        elif read & (of_batch | made) or (drawn and _is_drawn(eqn)):
            made.update(eqn.outvars)
    return made


def _is_drawn(eqn: JaxprEqn) -> bool:
    """Return True if an equation makes another value on each trainer, or exchanges values."""
    return any(map(is_communication, (eqn, *equations_inside(eqn))))


def _forward_of(step: Cut, made: set[Var]) -> Program:
    """Return the step's program, in which forward has the equations that make these values."""
    pairs = zip(step.program.eqns, step.program.roles, strict=True)
    roles = [
        FORWARD if role == OPTIMIZE and made.issuperset(e.outvars) else role for e, role in pairs
    ]
    return dataclasses.replace(step.program, roles=tuple(roles))
