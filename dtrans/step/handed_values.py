"""Values of the forward pass that the update reads (the loss, statistics) become its inputs.

An update may read the loss, for example. After the division of the step, the update contains copies
of all equations that it needs, including those of the loss. But a server has no rows of the batch,
and a ZeRO rank may have only slices of parameters. So neither can compute the loss. `hand_over`
removes these equations from the update. The forward pass computes their values and passes them to
the update as inputs (`DividedStep.handed`).

`hand_over` also saves time if the update would repeat a loop of the forward pass: XLA merges equal
equations, but not equal loops.

Invariant: afterwards an equation of the update that reads the batch also reads a gradient or
optimizer state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from dtrans._jax import LOOPS, JaxprEqn, Var, equations_inside
from dtrans.ir.builder import extract_part
from dtrans.ir.dataflow import free_variables, variables
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, OPTIMIZE, Program, is_communication
from dtrans.ir.pytree import unused_name
from dtrans.step.halves import DividedStep, Gradient, UpdateProgram


def hand_over(step: DividedStep, parts: Collection[str], *, drawn: bool = False) -> DividedStep:
    """Change a step so that its update gets values of the forward pass (the loss) as inputs.

    Without this change, the update would compute these values again, which needs the batch.

    Args:
      step: the training step, divided into its gradient computation and its update.
      parts: names of batch arrays that differ between trainers. Values of the forward pass that
        depend on these arrays become inputs.
      drawn: True to also include values that trainers communicate, and values that depend on the
        trainer's index, such as random numbers.
    """
    half = step.optimize
    values = _forward_values(step, parts, drawn)
    if not values:
        return step
    eqns = [e for e in half.eqns if not values.issuperset(e.outvars)]
    read = dict.fromkeys([*free_variables(eqns), *variables(half.inner.outvars)])

    taken = {*map(str, half.in_names), *step.program.in_names, *step.program.out_names}
    handed: dict[str, Var] = {}
    for v in read:
        if v in values:
            handed[unused_name(f"forward/{len(handed)}", taken)] = v

    # A batch array that nothing reads is removed: its type would fix the batch size of the half.
    inputs = {n: v for n, v in half.invars.items() if n not in step.batch or v in read}
    invars = [*inputs.values(), *handed.values()]
    jaxpr = eliminate_dead(extract_part(half.jaxpr, invars, eqns, half.inner.outvars))
    optimize = UpdateProgram(jaxpr, (*inputs, *handed), half.out_names)
    return dataclasses.replace(
        step, program=_forward_of(step, values), optimize=optimize, handed=handed
    )


def runs_loops_of_forward(step: DividedStep, parts: Collection[str]) -> bool:
    """Return True if the update repeats a loop of the forward pass, which would run twice.

    XLA merges equal equations, but not equal loops. `hand_over` avoids the second run.

    Args:
      step: the training step, divided into its gradient computation and its update.
      parts: names of batch arrays; only loops that depend on them count.
    """
    values = _forward_values(step, parts)
    loops = [e for e in step.optimize.eqns if e.primitive.name in LOOPS]
    return any(values.issuperset(e.outvars) for e in loops)


def _forward_values(step: DividedStep, parts: Collection[str], drawn: bool = False) -> set[Var]:
    """Return the values in the update that depend on the batch, and that forward can compute.

    Such a value depends on no gradient. It depends on no optimizer state either, except state that
    the forward pass reads anyway. `hand_over` describes the arguments.
    """
    half = step.optimize
    known_to_forward = {*step.params, *step.batch, *step.state_read}
    late: set[Var] = set()
    of_batch: set[Var] = set()
    for name, v in half.invars.items():
        if isinstance(name, Gradient) or name not in known_to_forward:
            late.add(v)
        if name in parts:
            of_batch.add(v)
    values: set[Var] = set()
    for eqn in half.eqns:
        read = set(variables(eqn.invars))
        if read & late:
            late.update(eqn.outvars)
        elif read & (of_batch | values) or (drawn and _is_drawn(eqn)):
            values.update(eqn.outvars)
    return values


def _is_drawn(eqn: JaxprEqn) -> bool:
    """Return True if an equation communicates with other trainers, or reads the trainer's index."""
    return any(map(is_communication, (eqn, *equations_inside(eqn))))


def _forward_of(step: DividedStep, values: set[Var]) -> Program:
    """Give the role `forward` to the equations in the step's program that compute `values`."""
    roles = list(step.program.roles)
    for i, eqn in enumerate(step.program.eqns):
        if roles[i] == OPTIMIZE and values.issuperset(eqn.outvars):
            roles[i] = FORWARD
    return dataclasses.replace(step.program, roles=tuple(roles))
