"""Values of forward that an update reads: the loss, statistics of activations, counts of rows.

In its update a rank has slices of parameters and its own rows of the batch. `x @ w` on these would
add up products of different rows. So forward computes such values, from whole parameters, and hands
them over (`dtrans.step.handed_values`).

Where an equation of the update that reads the batch reduces over the rows of a leaf, that leaf
stays whole on every rank (`leaves_that_meet_the_batch`).
"""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, Literal, Primitive, Var, origin_of
from dtrans.data_parallel.options import Options
from dtrans.ir.pytree import is_under
from dtrans.ops import COLLECTIVES
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.layout import Colocated, leaves_of
from dtrans.step.cut import Cut, Name
from dtrans.step.handed_values import hand_over
from dtrans.zero.options import ShardingOptions
from dtrans.zero.rank_values import local_values


def with_forward_values(step: Cut, o: ShardingOptions) -> Cut:
    """Return the step with an optimize half that takes values of forward as inputs (`Cut.handed`).

    Where leaves have owners, forward also makes what ranks draw and reduce: in the branch of one
    owner, an all-reduce would wait for the other ranks for ever.
    """
    if o.trainers == 1:
        return step
    return hand_over(step, differing_batch(step, o), drawn=o.slices.partition != "rows")


def differing_batch(step: Cut, o: Options) -> set[str]:
    """Return the arrays of the batch that differ from rank to rank: parts, and keys that are
    folded."""
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
    return local_values(step.program.inner.eqns, seeds, completed=_completed())


def differing_inputs(step: Cut, o: Options) -> set[str]:
    """Return the inputs of the update that differ from rank to rank."""
    values, of_batch = differing_values(step, o), differing_batch(step, o)
    handed = {n for n, v in step.handed.items() if v in values}
    return {
        n for n in step.optimize.in_names if isinstance(n, str) and (n in of_batch or n in handed)
    }


def leaves_that_meet_the_batch(
    analysis: RowAnalysis, differing: Collection[Name]
) -> dict[str, str]:
    """Return the leaves whose rows are reduced together with values that differ from rank to rank,
    and why.

    Args:
      analysis: the analysis of an update.
      differing: its inputs that differ from rank to rank.
    """
    eqns = analysis.half.eqns
    local = local_values(eqns, [analysis.inputs[n] for n in differing], completed=_completed())
    found: dict[str, str] = {}
    for i, eqn in enumerate(eqns):
        if local.isdisjoint(_vars(eqn.invars)):
            continue
        step = analysis.flow.steps.get(i)
        reduces = step is not None and (step.reduce or step.bodies)
        rows = (*step.operands, *step.outs) if step is not None and reduces else ()
        mixed = [analysis.layout(a) for a in (*eqn.invars, *eqn.outvars)]
        met = leaves_of(
            [x for x in rows if x is not None] + [x for x in mixed if isinstance(x, Colocated)]
        )
        why = f"its update mixes it with each rank's rows of the batch ({origin_of(eqn)})"
        found.update(dict.fromkeys(met - found.keys(), why))
    return found


def _completed() -> set[Primitive]:
    """Return the collectives whose results are the same on every rank."""
    return {record.primitive for record in COLLECTIVES.values() if record.same_for_all}


def _vars(atoms: Collection[Atom]) -> list[Var]:
    return [a for a in atoms if not isinstance(a, Literal)]
