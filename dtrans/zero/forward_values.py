"""Values of forward that an update reads: the loss, statistics of activations, counts of rows.

In its update a rank has slices of parameters and its own rows of the batch. `x @ w` on these would add up products of
different rows. So forward computes such values, from whole parameters, and the update takes them as inputs.

Invariant: an equation of the update that reads the batch also reads a gradient or optimizer state. Where such an
equation reduces over the rows of a leaf, that leaf stays whole on every rank (`leaves_that_meet_the_batch`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, Literal, Var, origin_of
from dtrans.data_parallel.options import Options
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import FORWARD, OPTIMIZE, Program
from dtrans.ir.pytree import is_under, unused_name
from dtrans.ops import all_gather_p, all_reduce_p
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.layout import RowAxis
from dtrans.step.cut import Cut, Gradient, Name, OptimizeHalf
from dtrans.zero.slice_flow import local_values


COMPLETED = (all_reduce_p, all_gather_p)  # their results are the same on every rank


def with_forward_values(step: Cut, o: Options) -> Cut:
    """Return the step with an optimize half that takes values of forward as inputs (`Cut.handed`)."""
    half = step.optimize
    if o.trainers == 1 or differing_batch(step, o).isdisjoint(half.in_names):
        return step
    made = _made_by_forward(step, o)
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
    b = Builder(half.jaxpr)
    b.invars += [*given.values(), *(v for v in read if v in made)]
    for eqn in kept:
        b.keep(eqn)
    jaxpr = eliminate_dead(b.build([*half.inner.outvars]))
    optimize = OptimizeHalf(jaxpr, (*given, *handed), half.out_names)
    return dataclasses.replace(step, program=_forward_of(step, made), optimize=optimize, handed=handed)


def _made_by_forward(step: Cut, o: Options) -> set[Var]:
    """Return the values of the update that depend on the batch, and neither on a gradient nor on sliced state."""
    half = step.optimize
    # state that forward reads is whole on every rank: its leaf is never cut
    whole = {*step.params, *step.batch, *step.asked}
    late = {v for n, v in half.invars.items() if isinstance(n, Gradient) or n not in whole}
    parts = differing_batch(step, o)
    of_batch = {v for n, v in half.invars.items() if n in parts}
    made: set[Var] = set()
    for eqn in half.eqns:
        read = {a for a in eqn.invars if isinstance(a, Var)}
        if read & late:
            late.update(eqn.outvars)
        elif read & (of_batch | made):
            made.update(eqn.outvars)
    return made


def _forward_of(step: Cut, made: set[Var]) -> Program:
    """Return the step's program, in which forward has the equations that make these values."""
    pairs = zip(step.program.eqns, step.program.roles, strict=True)
    roles = [FORWARD if role == OPTIMIZE and made.issuperset(e.outvars) else role for e, role in pairs]
    return dataclasses.replace(step.program, roles=tuple(roles))


def differing_batch(step: Cut, o: Options) -> set[str]:
    """Return the arrays of the batch that differ from rank to rank: parts, and keys that are folded."""
    found = set()
    for n in step.batch:
        t = step.program.inputs[n]
        is_key = jnp.issubdtype(t.dtype, jax.dtypes.prng_key)
        if (t.ndim or is_key) and not is_under(n, o.batch.unsplit_inputs):
            found.add(n)
    return found


def differing_values(step: Cut, o: Options) -> set[Var]:
    """Return the values of the step that differ from rank to rank, before gradients are reduced."""
    seeds = [step.program.invars[n] for n in differing_batch(step, o)]
    return local_values(step.program.inner.eqns, seeds, completed=COMPLETED)


def differing_inputs(step: Cut, o: Options) -> set[str]:
    """Return the inputs of the update that differ from rank to rank."""
    values, of_batch = differing_values(step, o), differing_batch(step, o)
    handed = {n for n, v in step.handed.items() if v in values}
    return {n for n in step.optimize.in_names if isinstance(n, str) and (n in of_batch or n in handed)}


def leaves_that_meet_the_batch(analysis: RowAnalysis, differing: Collection[Name]) -> dict[str, str]:
    """Return the leaves whose rows are reduced together with values that differ from rank to rank, and why.

    Args:
      analysis: the analysis of an update.
      differing: its inputs that differ from rank to rank.
    """
    eqns = analysis.half.eqns
    local = local_values(eqns, [analysis.inputs[n] for n in differing], completed=COMPLETED)
    found: dict[str, str] = {}
    for i, eqn in enumerate(eqns):
        step = analysis.flow.steps.get(i)
        if step is None or not (step.reduce or step.bodies) or local.isdisjoint(_vars(eqn.invars)):
            continue
        for row in (*step.operands, *step.outs):
            if isinstance(row, RowAxis):
                found.setdefault(row.leaf, f"its update mixes it with each rank's rows of the batch ({origin_of(eqn)})")
    return found


def _vars(atoms: Collection[Atom]) -> list[Var]:
    return [a for a in atoms if not isinstance(a, Literal)]
