"""Values of the forward pass that an update reads: the loss, statistics, counts of rows.

An update may read `x @ w`, for example. A rank's update has only slices of parameters, and the
rank's part of the batch. If the update computed `x @ w` from these, a sum over ranks would mix
different rows of the batch. So the forward pass computes such values from full parameters, and
passes them to the update (`dtrans.step.handed_values`).

If an equation of the update combines a parameter's rows with the batch, the parameter is not sliced
(`leaves_that_meet_the_batch`).
"""

from __future__ import annotations

from collections.abc import Collection

from dtrans._jax import Primitive, Var, origin_of
from dtrans.data_parallel.options import Options
from dtrans.ir.array_fns import is_key
from dtrans.ir.dataflow import variables
from dtrans.ir.pytree import is_under
from dtrans.ir.selection import values_at
from dtrans.ops import COLLECTIVES
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.layout import Colocated, Layout, leaves_of
from dtrans.step.halves import DividedStep, Name
from dtrans.step.handed_values import hand_over
from dtrans.zero.options import ShardingOptions
from dtrans.zero.rank_values import local_values


def with_forward_values(step: DividedStep, options: ShardingOptions) -> DividedStep:
    """Return the step with an update that gets values of the forward pass as inputs.

    Without this change, an update that reads the loss would compute it again, on a rank that has
    only slices of the parameters.

    If each rank updates complete parameters (`partition="greedy_even"`), the inputs also include
    values that need a collective. Only the owner of a parameter runs its update, and would wait
    forever in a collective.
    """
    if options.trainers == 1:
        return step
    return hand_over(step, differing_batch(step, options), drawn=options.slices.partition != "rows")


def differing_batch(step: DividedStep, options: Options) -> set[str]:
    """Return the batch arrays that differ from rank to rank: split arrays and random keys."""
    found = set()
    for n in step.batch:
        t = step.program.inputs[n]
        if (t.ndim or is_key(t.dtype)) and not is_under(n, options.batch.unsplit_inputs):
            found.add(n)
    return found


def differing_values(step: DividedStep, options: Options) -> set[Var]:
    """Return the values that differ from rank to rank before gradients are reduced."""
    seeds = values_at(step.program.invars, differing_batch(step, options))
    return local_values(step.program.inner.eqns, seeds, completed=_completed())


def differing_inputs(step: DividedStep, options: Options) -> set[str]:
    """Return the names of the update's inputs that differ from rank to rank.

    They are batch arrays, or values of the forward pass that depend on them.
    """
    values = differing_values(step, options)
    differing = differing_batch(step, options)
    for name, v in step.handed.items():
        if v in values:
            differing.add(name)
    return differing.intersection(step.optimize.in_names)


def leaves_that_meet_the_batch(
    analysis: RowAnalysis, differing: Collection[Name]
) -> dict[str, str]:
    """Find parameters that an update combines with each rank's own rows of the batch.

    Such parameters cannot be sliced: each rank would combine a different slice with different rows.

    Args:
      analysis: the analysis that found the values that the update computes row by row.
      differing: the inputs of the update that differ from rank to rank.

    Returns:
      A dict: parameter -> reason, such as "its update mixes it with each rank's rows of the batch".
    """
    eqns = analysis.half.eqns
    local = local_values(eqns, values_at(analysis.inputs, differing), completed=_completed())
    found: dict[str, str] = {}
    for i, eqn in enumerate(eqns):
        if local.isdisjoint(variables(eqn.invars)):
            continue
        step = analysis.flow.steps.get(i)
        meeting: list[Layout] = []
        for atom in (*eqn.invars, *eqn.outvars):
            layout = analysis.layout(atom)
            if isinstance(layout, Colocated):
                meeting.append(layout)
        if step is not None and (step.reduce or step.bodies):
            meeting += [x for x in (*step.operands, *step.outs) if x is not None]
        reason = f"its update mixes it with each rank's rows of the batch ({origin_of(eqn)})"
        found.update(dict.fromkeys(leaves_of(meeting) - found.keys(), reason))
    return found


def _completed() -> set[Primitive]:
    """Return the collectives with the same result on every rank, such as an all-reduce."""
    return {record.primitive for record in COLLECTIVES.values() if record.same_for_all}
