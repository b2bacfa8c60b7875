"""Assignment of each parameter to one rank, its owner, by one of Paddle's two rules.

    greedy_even    each parameter goes to the rank with the fewest elements so far (ties: lowest
                   rank)
    use_order      parameters fill rank 0 up to 1/ranks of all elements, then rank 1, and so on

Both rules process parameters in the order in which the program first uses them. `greedy_even`
balances the number of elements per rank. `use_order` assigns neighbouring parameters to one rank,
but can be uneven: it advances by only one rank even after a parameter that is as large as the
shares of two. So the last ranks may own no parameter. In stage 2, `use_order` delays reductions:
each bucket contains gradients of all ranks, and the backward pass computes the gradients of rank 0
last.

If an equation of the optimizer combines several parameters (`RowAnalysis.groups`), one rank owns
all of them.

Source: `partition_parameters` of passes/auto_parallel_sharding.py (Paddle).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtrans._jax import Var
from dtrans.ir.program import BACKWARD, FORWARD
from dtrans.rows.analysis import RowAnalysis
from dtrans.step.halves import DividedStep


RULES = ("greedy_even", "use_order")


def assign_owners(sizes: Sequence[int], ranks: int, rule: str) -> list[int]:
    """Choose the rank that owns each parameter, from the sizes of the parameters.

    Args:
      sizes: the number of elements of each parameter.
      ranks: the number of ranks.
      rule: one of `RULES`: "greedy_even" or "use_order".

    Returns:
      The index of the owner of each parameter, in the order of `sizes`.

    Source: `greedy_even` and `use_order` of auto_parallel_sharding.py (Paddle).

    Example:
      >>> from dtrans.zero.by_leaf.assign import assign_owners
      >>> assign_owners([3, 1, 1, 1], 2, "greedy_even"), assign_owners([3, 1, 1, 1], 2, "use_order")
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
        # total / ranks may be a fraction, so compare integers
        if seen * ranks > total * (rank + 1):
            rank += 1
    return found


def assign_leaves(
    step: DividedStep, analysis: RowAnalysis, ranks: int, rule: str
) -> dict[str, int]:
    """Choose the rank that owns each parameter of a step.

    Parameters get the same owner if the optimizer combines them.

    Args:
      step: the training step, divided into its gradient computation and its update.
      analysis: the analysis that found the values that the update computes row by row.
      ranks: the number of ranks.
      rule: "greedy_even" or "use_order".

    Returns:
      The owner by name, in the order of the assignment.
    """
    groups: dict[str, list[str]] = {}
    for n in leaves_by_use(step):
        if n in analysis.params:
            groups.setdefault(analysis.home_of(n), []).append(n)
    types = step.program.inputs
    sizes = []
    for leaves in groups.values():
        sizes.append(sum(types[n].size for n in leaves))
    owner: dict[str, int] = {}
    for leaves, rank in zip(groups.values(), assign_owners(sizes, ranks, rule), strict=True):
        owner |= dict.fromkeys(leaves, rank)
    return owner


def leaves_by_use(step: DividedStep) -> list[str]:
    """Return the parameters in the order in which the step first reads them.

    Unused parameters are last.
    """
    inner = step.program.inner
    invars = step.program.invars
    leaf_of: dict[Var, str] = {invars[n]: n for n in step.params}
    used: dict[str, None] = {}
    for eqn, role in zip(inner.eqns, step.program.roles, strict=True):
        if role in (FORWARD, BACKWARD):
            for a in eqn.invars:
                if isinstance(a, Var) and a in leaf_of:
                    used[leaf_of[a]] = None
    return [*used, *(n for n in step.params if n not in used)]


def sum_loads(sizes: Mapping[str, int], owner: Mapping[str, int], ranks: int) -> list[int]:
    """Return for each rank the total size of the parameters that it owns."""
    loads = [0] * ranks
    for n, rank in owner.items():
        loads[rank] += sizes[n]
    return loads
