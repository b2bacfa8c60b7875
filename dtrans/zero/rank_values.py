"""Search for values that differ from rank to rank, also inside loops and branches.

A value is *local* if it depends on the batch or on the index of the rank. All other values are
equal on every rank, so they need no reduction.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

from dtrans._jax import JaxprEqn, Primitive, Var, equations_inside, has_bodies
from dtrans.ir.interpret import Facts, ForwardAnalysis, forward
from dtrans.ops import trainer_index_p


def local_values(
    eqns: Sequence[JaxprEqn], seeds: Iterable[Var], completed: Collection[Primitive] = ()
) -> set[Var]:
    """Find the values that differ from rank to rank.

    Args:
      eqns: the equations, in order.
      seeds: inputs that differ from rank to rank.
      completed: collectives with equal results on every rank, such as an all-reduce. Results of any
        other equation differ if an operand differs.
    """
    return _local(forward(_differing(completed), eqns, dict.fromkeys(seeds, True)))


def local_inside(eqn: JaxprEqn, local: Collection[Var]) -> list[set[Var]]:
    """Find the values in the bodies of a loop or branch that differ from rank to rank.

    Args:
      eqn: the equation.
      local: values outside the equation that differ from rank to rank.

    Returns:
      For each body, the set of these values.
    """
    start = {a: True for a in eqn.invars if isinstance(a, Var) and a in local}
    (entered,) = forward(_differing(()), [eqn], start).entered.values()
    return [_local(facts) for facts in entered.bodies.values()]


def operands_among(eqn: JaxprEqn, values: Collection[Var]) -> set[int]:
    """Return the indices of the operands of an equation that are in `values`."""
    found = set()
    for k, operand in enumerate(eqn.invars):
        if isinstance(operand, Var) and operand in values:
            found.add(k)
    return found


def _local(facts: Facts[bool]) -> set[Var]:
    return {v for v, differs in facts.values.items() if differs}


def _differing(completed: Collection[Primitive]) -> ForwardAnalysis[bool]:
    """Return the analysis that finds the values that differ from rank to rank.

    Args:
      completed: collectives with the same result on every rank.
    """

    def rule(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
        if eqn.primitive in completed:
            return [False] * len(eqn.outvars)
        if has_bodies(eqn):
            return None
        differs = eqn.primitive is trainer_index_p or any(ins) or _reads_rank_inside(eqn)
        return [differs] * len(eqn.outvars)

    return ForwardAnalysis(
        operator.or_, rule, default=lambda aval, value: False, decide=operator.or_
    )


def _reads_rank_inside(eqn: JaxprEqn) -> bool:
    """Return True if a nested jaxpr reads the index of the rank."""
    return any(e.primitive is trainer_index_p for e in equations_inside(eqn))
