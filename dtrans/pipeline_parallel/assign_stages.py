"""Assignment of the equations of a forward pass to the stages of a pipeline.

The equations form a row, and the row is cut (`dtrans.pipeline_parallel.balance`). The row follows
the program, with one exception. Casts and reshapes of parameters, and values that depend on no
micro-batch (masks, `iota`), move to just before their first reader. Otherwise a cast of all
parameters at the top would put all of them on the first stage. A second row also moves all
elementwise work on inputs alone. It is taken if its slowest stage is faster.

A stage costs its floating-point operations, plus `flops_per_byte` for each byte that it sends. A
stage sends each value that it computes or forwards (skip connections) once. Three kinds of values
cross a cut for free. Inputs are present where they are read. Values that depend on no micro-batch
are computed there. Results stay on the stage that computes them.

Every stage gets at least one equation with a cost, if there are enough. An equation without a cost
is on the side of the cut where less crosses, else with its readers.

Policies:

  BALANCE_FLOPS    The slowest stage is as fast as cuts between equations allow, sending included.
                   Exact. If sending is expensive, a stage may get almost no work.
  REPEATED_LAYERS  Each stage gets the same number of repeated blocks
                   (`dtrans.pipeline_parallel.repeated_blocks`). Equations before them are on the
                   first stage, equations after them on the last. EPL's rule; an error if none fit.
  BALANCE_OP_NUM   Each stage gets the same number of equations. EPL's rule, without the stages
                   that it loses.
  HEURISTIC        The default. The operations of stages are near balance, and the cuts send the
                   fewest bytes (`dtrans.pipeline_parallel.balance.balanced`). Blocks are not cut
                   if no stage then does more than `SLACK` times the work. If the stages divide
                   their number and they cost about the same, as with REPEATED_LAYERS.

EPL has no cost model, and avoids cutting blocks only if the stages divide their number
(epl/parallel/planner.py).

Scopes of the user (`dtrans.step.scopes`) override all policies. Equations outside of them follow
EPL's rule of minimum and maximum. Their stage is the stage of the last scope before, but not before
their operands and not after their readers. Values computed from inputs alone go to the first stage
that reads them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from dtrans._jax import ClosedJaxpr, JaxprEqn, Var, facts_of, jaxprs_in_params
from dtrans.errors import ConfigError
from dtrans.ir.cost import flops, nbytes
from dtrans.ir.dataflow import propagate, variables
from dtrans.ir.selection import values_at
from dtrans.pipeline_parallel.balance import (
    SLACK,
    balanced,
    contiguous,
    part_of_each,
    partition_balance,
)
from dtrans.pipeline_parallel.repeated_blocks import Blocks, repeated_blocks
from dtrans.step.scopes import Scope, scopes_of


POLICIES = ("HEURISTIC", "REPEATED_LAYERS", "BALANCE_FLOPS", "BALANCE_OP_NUM")

# Floating-point operations of a device in the time of sending one byte: 100 Gflop/s over 10 GB/s.
# An accelerator on a fast link has several hundred.
FLOPS_PER_BYTE = 10.0


@dataclasses.dataclass(frozen=True)
class StageCost:
    """Cost of a stage's forward pass for one micro-batch.

    Attributes:
      equations: the number of its equations.
      flops: their floating-point operations.
      sends: bytes that it sends to the next stage, including values that it only passes on.
    """

    equations: int
    flops: int
    sends: int


def stages_of(
    forward: ClosedJaxpr,
    num_stages: int,
    *,
    policy: str | None = None,
    flops_per_byte: float = FLOPS_PER_BYTE,
    batch: Collection[Var] | None = None,
) -> tuple[int, ...]:
    """Return the stage of each top-level equation, never before the stages of its operands.

    Args:
      forward: the loss function, not differentiated, its calls inlined
        (`dtrans.ir.inline.inline_calls`).
      num_stages: the number of stages; each gets at least one equation.
      policy: one of `POLICIES`. None: the user's scopes if there are any, else HEURISTIC.
      flops_per_byte: floating-point operations of a device in the time of sending one byte.
      batch: the inputs that differ between micro-batches. Stages recompute values that depend on
        none of them. None: all inputs.

    Raises:
      ConfigError: there are more stages than equations; the policy is unknown, or no blocks fit
        it. Scopes differ in number from the stages, contradict the order of operands, or exclude
        the policy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.pipeline_parallel.assign_stages import stages_of
      >>> def loss(w, x):
      ...     for _ in range(4):
      ...         x = jnp.tanh(x @ w)
      ...     return x.sum()
      >>> stages_of(jax.make_jaxpr(loss)(jnp.ones((64, 64)), jnp.ones((2, 64))), 2)
      (0, 0, 0, 0, 1, 1, 1, 1, 1)
    """
    eqns = forward.jaxpr.eqns
    if policy is not None and policy not in POLICIES:
        raise ConfigError(f"policy={policy!r} is unknown; there are {', '.join(POLICIES)}")
    if num_stages < 1:
        raise ConfigError(f"num_stages={num_stages}: a pipeline has at least one stage")
    if flops_per_byte < 0:
        raise ConfigError(f"flops_per_byte={flops_per_byte} is negative; write 0 or more")
    by_scope = scoped_stages(forward)
    if by_scope is not None:
        count = max(by_scope) + 1
        if count != num_stages:
            raise ConfigError(
                f"num_stages={num_stages}, and the model has {count} scopes, each of them a stage; "
                f"pass num_stages={count}"
            )
        if policy is not None:
            raise ConfigError(
                f"policy={policy!r} is for models without scopes, and {count} scopes in this model "
                "determine its stages; leave out policy"
            )
        return by_scope
    if len(eqns) < num_stages:
        raise ConfigError(
            f"num_stages={num_stages}, and the step's forward pass has only {len(eqns)} equations; "
            "ask for fewer stages"
        )

    costs = list(map(flops, eqns))
    if policy == "BALANCE_OP_NUM":
        return part_of_each(partition_balance([1] * len(eqns), num_stages), len(eqns))
    # two orders of the row: the one with the faster slowest stage is cut
    rule = balanced if policy in (None, "HEURISTIC") else contiguous
    cuts = []
    for order in _orders(forward, costs, batch):
        row = _Row(forward, costs, order, flops_per_byte, batch)
        cuts.append((row, row.cut(num_stages, rule)))
    row, best = min(cuts, key=lambda cut: cut[0].slowest(cut[1]))
    if policy == "REPEATED_LAYERS":
        best = _repeated(row, num_stages)
    elif policy != "BALANCE_FLOPS":
        best = _heuristic(row, num_stages, best)
    return row.stages(best)


def stage_costs(
    forward: ClosedJaxpr, stage_of: Sequence[int], batch: Collection[Var] | None = None
) -> tuple[StageCost, ...]:
    """Return the cost of each stage.

    Args:
      forward: the forward pass.
      stage_of: the stage of each of its equations.
      batch: as for `stages_of`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.pipeline_parallel.assign_stages import stage_costs, stages_of
      >>> loss = lambda w, x: (jnp.tanh(x @ w) @ w).sum()
      >>> forward = jax.make_jaxpr(loss)(jnp.ones((64, 64)), jnp.ones((2, 64)))
      >>> for cost in stage_costs(forward, stages_of(forward, 2)):
      ...     print(cost)
      StageCost(equations=2, flops=16512, sends=512)
      StageCost(equations=2, flops=16512, sends=0)
    """
    count = max(stage_of, default=0) + 1
    equations, work, sends = [0] * count, [0] * count, [0] * count
    first: dict[Var, int] = {}  # the stage that computes a value
    last: dict[Var, int] = {}  # the last stage that reads it
    for eqn, stage in zip(forward.jaxpr.eqns, stage_of, strict=True):
        equations[stage] += 1
        work[stage] += flops(eqn)
        first |= dict.fromkeys(eqn.outvars, stage)
        for operand in _reads(eqn):
            last[operand] = max(stage, last.get(operand, 0))
    for value in _of_batch(forward, batch):
        for stage in range(first.get(value, count), last.get(value, 0)):
            sends[stage] += nbytes(value.aval)
    return tuple(map(StageCost, equations, work, sends))


Rule: TypeAlias = Callable[[Sequence[float], Sequence[float], int], tuple[int, ...]]


# -- the row of equations --------------------------------------------------------------------------


class _Row:
    """Row of equations, to be cut into consecutive parts.

    Args:
      forward: the program.
      costs: the floating-point operations of each of its equations.
      order: the position in the program of each equation of the row.
      flops_per_byte: the cost of sending one byte.
      batch: as for `stages_of`.
    """

    def __init__(
        self,
        forward: ClosedJaxpr,
        costs: Sequence[int],
        order: Sequence[int],
        flops_per_byte: float,
        batch: Collection[Var] | None,
    ) -> None:
        self.order = order
        self.eqns = values_at(forward.jaxpr.eqns, order)
        self.costs = values_at(costs, order)
        count = len(order)
        last: dict[Var, int] = {}
        for i, eqn in enumerate(self.eqns):
            last |= dict.fromkeys(_reads(eqn), i)
        # differences of the bytes that cross each cut, whose running sum is the bytes: one pass
        # over the equations instead of one for each cut
        changes = [0] * (count + 1)
        dependent = _of_batch(forward, batch)
        for i, eqn in enumerate(self.eqns):
            for v in eqn.outvars:
                if v in dependent and last.get(v, i) > i:
                    changes[i + 1] += nbytes(v.aval)
                    changes[last[v] + 1] -= nbytes(v.aval)
        self.crossing = [flops_per_byte * alive for alive in itertools.accumulate(changes[:count])]

    def stages(self, starts: Sequence[int]) -> tuple[int, ...]:
        """Return the stage of each equation of the program."""
        part = part_of_each(starts, len(self.order))
        return tuple(s for _, s in sorted(zip(self.order, part, strict=True)))

    def work(self, starts: Sequence[int]) -> list[int]:
        """Return the operations of each part, without sending."""
        return [sum(self.costs[a:b]) for a, b in itertools.pairwise([*starts, len(self.order)])]

    def slowest(self, starts: Sequence[int]) -> float:
        """Return the cost of the slowest part."""
        sent = [*self._crossing_at(starts[1:]), 0.0]
        return max(map(sum, zip(self.work(starts), sent, strict=True)))

    def _crossing_at(self, places: Sequence[int]) -> list[float]:
        """Return the cost of a cut in front of each place."""
        return values_at(self.crossing, places)

    def cut(self, parts: int, rule: Rule, blocks: Blocks | None = None) -> tuple[int, ...]:
        """Return the start of each part.

        Args:
          parts: the number of parts.
          rule: `contiguous` or `balanced`.
          blocks: blocks that no cut divides.
        """
        places: Sequence[int] = range(len(self.order))
        if blocks is not None:
            inside = {*range(blocks.starts[0], blocks.stop)} - {*blocks.starts}
            places = [i for i in places if i not in inside]
        costs = self.work(places)
        paid = [k for k, cost in enumerate(costs) if cost > 0]
        if len(paid) < parts:
            return tuple(values_at(places, rule(costs, self._crossing_at(places), parts)))
        # Only the cheapest cut between two consecutive units with a cost is a candidate, the
        # earliest on ties: the rules take time quadratic in the number of candidates.
        best = [0]
        for a, b in itertools.pairwise(paid):
            best.append(min(places[a + 1 : b + 1], key=lambda i: (self.crossing[i], i)))
        starts = rule(values_at(costs, paid), self._crossing_at(best), parts)
        return tuple(values_at(best, starts))


def _reads(eqn: JaxprEqn) -> list[Var]:
    return variables(eqn.invars)


def _of_batch(forward: ClosedJaxpr, batch: Collection[Var] | None) -> set[Var]:
    """Return the values that depend on a micro-batch, inputs included."""
    inputs = forward.jaxpr.invars if batch is None else batch
    return set(propagate(forward.jaxpr.eqns, dict.fromkeys(inputs, 1), {}))


def _orders(
    forward: ClosedJaxpr, costs: Sequence[int], batch: Collection[Var] | None
) -> list[list[int]]:
    """Return the orders of the equations to choose from; operands precede their readers in each."""
    eqns = forward.jaxpr.eqns
    dependent = _of_batch(forward, batch)
    free, movable = [], []
    for eqn, cost in zip(eqns, costs, strict=True):
        is_free = cost == 0 or dependent.isdisjoint(_reads(eqn))
        is_plain = facts_of(eqn).flops != "product" and not any(jaxprs_in_params(eqn.params))
        free.append(is_free)
        movable.append(is_free or is_plain)
    late, later = _late(eqns, free), _late(eqns, movable)
    return [late] if later == late else [late, later]


def _late(eqns: Sequence[JaxprEqn], movable: Sequence[bool]) -> list[int]:
    """Return an order in which movable equations stand before their first reader."""
    producer: dict[Var, int] = {}
    operands: list[list[int]] = []
    moves: list[bool] = []  # an equation moves only if all its operands do
    for i, eqn in enumerate(eqns):
        operands.append([producer[a] for a in _reads(eqn) if a in producer])
        moves.append(not eqn.effects and movable[i] and all(moves[k] for k in operands[i]))
        producer |= dict.fromkeys(eqn.outvars, i)
    place = [len(eqns)] * len(eqns)  # of the first reader, or len(eqns) without one
    for i in reversed(range(len(eqns))):
        if not moves[i] or place[i] == len(eqns):
            place[i] = i
        for k in operands[i]:
            place[k] = min(place[k], place[i])
    return sorted(range(len(eqns)), key=lambda i: (place[i], i))


# -- policies --------------------------------------------------------------------------------------


def _heuristic(row: _Row, parts: int, best: tuple[int, ...]) -> tuple[int, ...]:
    """Return a cut that divides no repeated block, if it is near balance; else the balanced cut.

    Args:
      row: the equations.
      parts: the number of parts.
      best: the starts of the balanced cut.
    """
    found = repeated_blocks(row.eqns, row.costs, row.crossing, parts)
    if not found:
        return best
    blocks = found[0]
    starts = row.cut(parts, balanced, blocks)
    near = lambda mine, other: max(row.work(mine)) <= SLACK * max(row.work(other))

    # blocks of equal cost: the same number for each stage, which is the cut that a person would
    # draw
    each = blocks.costs(row.costs)
    if len(blocks) % parts == 0 and max(each) <= SLACK * min(each):
        even = _even(blocks, parts)
        return even if near(even, starts) else starts
    return starts if near(starts, best) else best


def _even(blocks: Blocks, parts: int) -> tuple[int, ...]:
    """Return the starts of parts with equal numbers of blocks."""
    each = len(blocks) // parts
    return (0, *blocks.starts[each::each])


def _repeated(row: _Row, parts: int) -> tuple[int, ...]:
    """Return the starts of parts that each have the same number of the best repeated blocks."""
    for blocks in repeated_blocks(row.eqns, row.costs, row.crossing, parts):
        if len(blocks) % parts == 0:
            return _even(blocks, parts)
    reason = "no equations or scopes repeat"
    counts = {*map(len, repeated_blocks(row.eqns, row.costs, row.crossing))}
    if counts:
        reason = f"there are rows of {', '.join(map(str, sorted(counts, reverse=True)))} blocks"
    raise ConfigError(
        "policy='REPEATED_LAYERS' needs a number of repeated blocks that is a multiple of "
        f"num_stages={parts}; {reason}"
    )


# -- scopes ----------------------------------------------------------------------------------------


def scoped_stages(forward: ClosedJaxpr) -> tuple[int, ...] | None:
    """Return the stage of each equation by the user's scopes; None without a `replicate` scope.

    Stages are the scopes in the order in which they first appear. In a model with `replicate`
    scopes, `split` scopes are stages too.

    Raises:
      ConfigError: an earlier scope reads a value of a later one; scopes are nested.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.step.scopes import replicate
      >>> from dtrans.pipeline_parallel.assign_stages import scoped_stages
      >>> def loss(x):
      ...     with replicate():
      ...         x = jnp.sin(x)
      ...     x = x + 1
      ...     with replicate():
      ...         return jnp.cos(x)
      >>> scoped_stages(jax.make_jaxpr(loss)(1.0))
      (0, 0, 1)
    """
    eqns = forward.jaxpr.eqns
    scopes = scopes_of(eqns)
    if not any(s is not None and s.kind == "replicate" for s in scopes):
        return None
    number: dict[tuple[str, str], int] = {}
    named: list[Scope] = []
    for scope in scopes:
        if scope is not None and scope.key not in number:
            number[scope.key] = len(number)
            named.append(scope)
    fixed = [None if s is None else number[s.key] for s in scopes]
    _check_order(eqns, fixed, named)

    # backward: the first stage that reads an output of each equation
    readers: dict[Var, int] = {}
    first = [len(named)] * len(eqns)
    for i in reversed(range(len(eqns))):
        for v in eqns[i].outvars:
            first[i] = min(first[i], readers.get(v, len(named)))
        scope_stage = fixed[i]
        bound = first[i] if scope_stage is None else scope_stage
        for a in _reads(eqns[i]):
            readers[a] = min(bound, readers.get(a, bound))

    # forward: EPL's rule of minimum and maximum for the equations outside of scopes
    stage: dict[Var, int] = {}
    of_scope: set[Var] = set()
    stages: list[int] = []
    current = 0
    for i, eqn in enumerate(eqns):
        scope_stage = fixed[i]
        reads = _reads(eqn)
        after = max((stage.get(a, 0) for a in reads), default=0)
        free = scope_stage is None and of_scope.isdisjoint(reads)
        if scope_stage is not None:
            current = at = scope_stage
        elif free and first[i] < len(named):
            at = first[i]
        else:
            at = max(after, min(current, first[i]))
        if not free:
            of_scope.update(eqn.outvars)
        stage |= dict.fromkeys(eqn.outvars, at)
        stages.append(at)
    return tuple(stages)


def _check_order(
    eqns: Sequence[JaxprEqn], fixed: Sequence[int | None], named: Sequence[Scope]
) -> None:
    """Refuse scopes that read a value of a later scope."""
    reached: dict[Var, int] = {}
    for eqn, stage in zip(eqns, fixed, strict=True):
        latest = max((reached.get(a, -1) for a in _reads(eqn)), default=-1)
        if stage is not None and latest > stage:
            raise ConfigError(
                f"{eqn.primitive.name} in {named[stage]} reads what {named[latest]} makes, which "
                "begins after it, and a stage cannot read from a later one; enter the scopes in "
                "the order in which values go through them"
            )
        reached |= dict.fromkeys(eqn.outvars, max(latest, -1 if stage is None else stage))
