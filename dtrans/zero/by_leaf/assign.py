"""Assignment of whole leaves to ranks, by Paddle's two rules.

    greedy_even    the next leaf to the rank with the fewest elements so far, the first of equals
    use_order      the leaves in order; the next rank begins once its share of all elements is passed

Both take leaves in the order in which the program first uses them, and weigh them by their
elements. `greedy_even` is as even as whole leaves in this order allow. `use_order` keeps neighbours
together, and may leave ranks with nothing: it advances by one rank at most, however large the leaf
was. In stage 2 it delays gradients: a bucket contains those of all ranks, and the backward pass
computes those of rank 0 last.

Leaves that their optimizer binds together (`RowAnalysis.groups`) go to one rank: that of the first
of them.

Source: `partition_parameters` of passes/auto_parallel_sharding.py (Paddle).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtrans._jax import Var
from dtrans.ir.program import BACKWARD, FORWARD
from dtrans.rows.analysis import RowAnalysis
from dtrans.step.cut import Cut


RULES = ("greedy_even", "use_order")


def owners_of(sizes: Sequence[int], ranks: int, rule: str) -> list[int]:
    """Return the owner of each of several sizes, in order.

    Args:
      sizes: in elements.
      ranks: how many owners there may be.
      rule: one of `RULES`.

    Source: `greedy_even` and `use_order` of auto_parallel_sharding.py (Paddle).

    Example:
      >>> from dtrans.zero.by_leaf.assign import owners_of
      >>> owners_of([3, 1, 1, 1], 2, "greedy_even"), owners_of([3, 1, 1, 1], 2, "use_order")
      ([0, 1, 1, 1], [0, 0, 1, 1])
    """
    assert rule in RULES, rule
    found: list[int] = []
    if rule == "greedy_even":
        loads = [0] * ranks
        for size in sizes:
            found.append(min(range(ranks), key=loads.__getitem__))
            loads[found[-1]] += size
        return found
    rank, seen, total = 0, 0, sum(sizes)
    for size in sizes:
        found.append(rank)
        seen += size
        if seen * ranks > total * (rank + 1):  # in integers: its share may be no whole number
            rank += 1
    return found


def owned_leaves(step: Cut, analysis: RowAnalysis, ranks: int, rule: str) -> dict[str, int]:
    """Return the owner of each leaf of the analysis, in the order of assignment."""
    known = set(analysis.params)
    groups: dict[str, list[str]] = {}
    for n in [n for n in first_used(step) if n in known]:
        groups.setdefault(analysis.home_of(n), []).append(n)
    sizes = [sum(step.program.inputs[n].size for n in leaves) for leaves in groups.values()]
    given = zip(groups.values(), owners_of(sizes, ranks, rule), strict=True)
    return {n: rank for leaves, rank in given for n in leaves}


def first_used(step: Cut) -> list[str]:
    """Return the leaves in the order of their first use in the program; unused ones come last."""
    inner = step.program.inner
    params = set(step.params)
    leaf_of = {v: n for n, v in step.program.invars.items() if n in params}
    used: dict[str, None] = {}
    for eqn, role in zip(inner.eqns, step.program.roles, strict=True):
        if role in (FORWARD, BACKWARD):
            used |= dict.fromkeys(
                leaf_of[a] for a in eqn.invars if isinstance(a, Var) and a in leaf_of
            )
    return [*used, *(n for n in step.params if n not in used)]


def loads_of(sizes: Mapping[str, int], owner: Mapping[str, int], ranks: int) -> list[int]:
    """Return the sum of the sizes of each rank's leaves."""
    return [sum(sizes[n] for n, k in owner.items() if k == rank) for rank in range(ranks)]
