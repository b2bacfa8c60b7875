"""Values that differ from rank to rank, in a step and in the bodies of its loops and branches.

Values computed from the batch are *local*: each rank has its own. All others are the same on every
rank.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

from dtrans._jax import JaxprEqn, Primitive, Var, equations_inside, has_bodies
from dtrans.ir.interpret import ForwardAnalysis, forward
from dtrans.ops import trainer_index_p


def local_values(
    eqns: Sequence[JaxprEqn], seeds: Iterable[Var], completed: Collection[Primitive] = ()
) -> set[Var]:
    """Return the values that differ from rank to rank, where `seeds` do.

    Args:
      completed: collectives whose results are the same on every rank; by default nothing is known
        of them.
    """
    facts = forward(_differing(completed), eqns, dict.fromkeys(seeds, True))
    return {v for v, differs in facts.values.items() if differs}


def local_inside(eqn: JaxprEqn, local: Collection[Var]) -> list[set[Var]]:
    """Return the values that differ from rank to rank in each body of an equation.

    Args:
      local: values outside of it that differ.
    """
    start = {a: True for a in eqn.invars if isinstance(a, Var) and a in local}
    (entered,) = forward(_differing(()), [eqn], start).entered.values()
    return [
        {v for v, differs in facts.values.items() if differs} for facts in entered.bodies.values()
    ]


def _differing(completed: Collection[Primitive]) -> ForwardAnalysis[bool]:
    """Return the analysis of values that differ from rank to rank."""

    def rule(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
        if eqn.primitive in completed:
            return [False] * len(eqn.outvars)
        if has_bodies(eqn):
            return None
        return [eqn.primitive is trainer_index_p or any(ins) or _asks_rank(eqn)] * len(eqn.outvars)

    return ForwardAnalysis(
        operator.or_, rule, default=lambda aval, value: False, decide=operator.or_
    )


def _asks_rank(eqn: JaxprEqn) -> bool:
    """Return True if a nested jaxpr asks for the rank, as where rows of random numbers are
    drawn."""
    return any(e.primitive is trainer_index_p for e in equations_inside(eqn))
