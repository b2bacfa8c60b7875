"""Assignment of the equations of a forward pass to the stages of a pipeline.

The list of equations is divided into consecutive stages (`dtrans.pipeline_parallel.balance`).
First, some equations move to just before their first reader: casts and reshapes of parameters, and
equations that depend on no micro-batch (masks, `iota`). Otherwise, a cast of all parameters at the
beginning of the loss would put all parameters on the first stage. In a second version of the list,
elementwise equations that read only inputs also move. Both versions are divided into stages. The
result is the division with the faster slowest stage.

The cost of a stage is its number of floating-point operations, plus `flops_per_byte` for each byte
that the stage sends to the next stage. If stages have different speeds, the number of operations is
divided by the relative speed of the stage. A stage sends each value once. It also forwards values
that only later stages read (skip connections). Three kinds of values are not sent:

  - inputs of the step: each stage that reads an input receives it with the batch
  - values that depend on no micro-batch: each stage that reads them computes them
  - results of the step: they stay on the stage that computes them

Some equations have no cost, such as reshapes. Every stage gets at least one equation with a cost,
if the program has enough of them. Between two equations with a cost, a stage begins where the
fewest bytes cross the boundary. On a tie, equations without a cost are on the stage that reads
their results.

Policies:

  BALANCE_FLOPS    Minimizes the cost of the slowest stage, including the cost of sending. If
                   sending is expensive, a stage may get almost no work.
  REPEATED_LAYERS  Each stage gets the same number of repeated blocks
                   (`dtrans.pipeline_parallel.repeated_blocks`). Equations before the blocks are on
                   the first stage, equations after the blocks on the last. EPL's rule. Raises
                   ConfigError if the number of blocks is not a multiple of the number of stages.
  BALANCE_OP_NUM   Each stage gets the same number of equations. EPL's rule, but the number of
                   stages is always the requested number.
  HEURISTIC        The default. Among the divisions that nearly balance the operations of stages,
                   it takes the division that sends the fewest bytes
                   (`dtrans.pipeline_parallel.balance.balanced`). Stages begin at repeated blocks
                   instead, if the slowest stage then has at most `SLACK` times the work. If all
                   blocks cost about the same, and each stage can get the same number of blocks, the
                   result is the division of REPEATED_LAYERS. Stages of different speeds get numbers
                   of layers in proportion to their speeds, if possible.

EPL has no cost model. It avoids dividing blocks only if their number is a multiple of the number of
stages (epl/parallel/planner.py).

Scopes in the user's model (`dtrans.step.scopes`) override all policies. An equation outside of all
scopes goes to the stage of the last scope before it. But its stage is never before the stages of
its operands, and never after the stages of its readers. An equation that depends only on inputs of
the step is on the first stage that reads its result. EPL has the same rule.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import numpy as np

from dtrans._jax import ClosedJaxpr, JaxprEqn, Var, facts_of, jaxprs_in_params
from dtrans.errors import ConfigError
from dtrans.ir.cost import flops, nbytes
from dtrans.ir.dataflow import propagate, variables
from dtrans.ir.selection import exclude, select, values_at
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

# Floating-point operations that a device does while it sends one byte: 100 Gflop/s divided by 10
# GB/s. For an accelerator on a fast link, the number is several hundred.
FLOPS_PER_BYTE = 10.0


@dataclasses.dataclass(frozen=True)
class StageCost:
    """Cost of a stage's forward pass for one micro-batch.

    Attributes:
      equations: the number of equations of the stage.
      flops: the floating-point operations of these equations.
      sends: the bytes sent to the next stage, including forwarded values of earlier stages.
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
    speeds: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return the stage index of each top-level equation.

    The stage of an equation is never before the stages of its operands.

    Args:
      forward: the jaxpr of the loss function, before differentiation, with inlined calls
        (`dtrans.ir.inline.inline_calls`).
      num_stages: the number of stages; each gets at least one equation.
      policy: one of `POLICIES`. With None, the user's scopes determine the stages; without scopes,
        the policy is HEURISTIC.
      flops_per_byte: the floating-point operations that a device does while it sends one byte.
      batch: the inputs that differ between micro-batches; None if all inputs do. Each stage
        recomputes the values that it reads if they depend on none of these inputs.
      speeds: the speed of each stage; only ratios matter. None if all stages are equally fast.

    Raises:
      ConfigError: the forward pass has fewer equations than `num_stages`. The policy is unknown, or
        REPEATED_LAYERS finds no blocks. Scopes contradict `num_stages`, the policy, or the order
        of the equations. Or stages have different speeds, and the policy ignores speeds.

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
        raise ConfigError(f"policy is {policy!r}; expected one of {', '.join(POLICIES)}")
    if num_stages < 1:
        raise ConfigError(f"num_stages is {num_stages}; expected 1 or more")
    if flops_per_byte < 0:
        raise ConfigError(f"flops_per_byte is {flops_per_byte}; expected 0 or more")
    by_scope = scoped_stages(forward)
    if by_scope is not None:
        count = max(by_scope) + 1
        if count != num_stages:
            raise ConfigError(
                f"num_stages is {num_stages}, but the model has {count} scopes, and each scope is "
                f"a stage; pass num_stages={count}"
            )
        if policy is not None:
            raise ConfigError(
                f"policy is {policy!r}, but the {count} scopes of this model already determine its "
                "stages; leave out policy"
            )
        return by_scope
    if len(eqns) < num_stages:
        raise ConfigError(
            f"num_stages is {num_stages}, but the step's forward pass has only {len(eqns)} "
            "equations; reduce num_stages"
        )

    relative = relative_speeds(speeds, num_stages)
    if len(set(relative)) > 1 and policy in ("BALANCE_OP_NUM", "REPEATED_LAYERS"):
        what = "equations" if policy == "BALANCE_OP_NUM" else "layers"
        raise ConfigError(
            f"speeds of dtrans.Cluster cannot be combined with policy={policy!r}, which gives each "
            f"stage the same number of {what}; leave out policy, or pass policy='BALANCE_FLOPS'"
        )
    costs = list(map(flops, eqns))
    if policy == "BALANCE_OP_NUM":
        return part_of_each(partition_balance([1] * len(eqns), num_stages), len(eqns))
    rule = contiguous
    if policy in (None, "HEURISTIC"):
        rule = balanced
    # Divide the equations in each candidate order, and take the division whose slowest stage
    # takes the least time.
    divisions = []
    for order in _orders(forward, costs, batch):
        row = _OrderedEquations(forward, costs, order, flops_per_byte, batch, relative)
        divisions.append((row, row.divide(num_stages, rule)))
    row, best = min(divisions, key=lambda pair: pair[0].slowest(pair[1]))
    if policy == "REPEATED_LAYERS":
        best = _repeated(row, num_stages)
    elif policy != "BALANCE_FLOPS":
        best = _heuristic(row, num_stages, best)
    return row.stages(best)


def relative_speeds(speeds: Sequence[float] | None, num_stages: int) -> tuple[float, ...]:
    """Return the speed of each stage, divided by the mean speed; 1 for each stage without speeds.

    The mean is over the devices that run a stage. `flops_per_byte` describes a device with this
    mean speed.

    Example:
      >>> from dtrans.pipeline_parallel.assign_stages import relative_speeds
      >>> relative_speeds([30, 10], 2), relative_speeds(None, 2)
      ((1.5, 0.5), (1.0, 1.0))
    """
    if speeds is None or len(set(speeds)) == 1:
        return (1.0,) * num_stages
    mean = sum(speeds) / len(speeds)
    return tuple(speed / mean for speed in speeds)


def stage_costs(
    forward: ClosedJaxpr, stage_of: Sequence[int], batch: Collection[Var] | None = None
) -> tuple[StageCost, ...]:
    """Return the cost of each stage.

    Args:
      forward: the forward pass.
      stage_of: the stage of each equation of `forward`.
      batch: the inputs that differ between micro-batches; None if all inputs do.

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
    first: dict[Var, int] = {}  # value -> the stage that computes the value
    last: dict[Var, int] = {}  # value -> the last stage that reads the value
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


# Rule of `dtrans.pipeline_parallel.balance`: (costs, crossing, parts, speeds) -> starts of parts
Rule: TypeAlias = Callable[
    [Sequence[float], Sequence[float], int, Sequence[float]], tuple[int, ...]
]


# -- the list of equations -------------------------------------------------------------------------


class _OrderedEquations:
    """List of a program's equations in one order, and its divisions into consecutive stages.

    `stages_of` tries several orders, because the possible divisions depend on the order.

    Args:
      forward: the program.
      costs: the floating-point operations of each equation, in the program's order.
      order: the order of the list, as indices of equations in the program.
      flops_per_byte: the cost of sending one byte, in floating-point operations.
      batch: the inputs that differ between micro-batches; None if all inputs do.
      speeds: the relative speed of each stage.

    Attributes:
      eqns: the equations, in the order of the list.
      costs: the floating-point operations of each equation in `eqns`.
      crossing: the cost of a boundary in front of each equation in `eqns`.
    """

    def __init__(
        self,
        forward: ClosedJaxpr,
        costs: Sequence[int],
        order: Sequence[int],
        flops_per_byte: float,
        batch: Collection[Var] | None,
        speeds: Sequence[float],
    ) -> None:
        self.order, self.speeds = order, speeds
        self.eqns = values_at(forward.jaxpr.eqns, order)
        self.costs = values_at(costs, order)
        count = len(order)
        last: dict[Var, int] = {}
        for i, eqn in enumerate(self.eqns):
            last |= dict.fromkeys(_reads(eqn), i)
        # `changes[i]` is the number of bytes that cross boundary i, minus the number that cross
        # boundary i - 1. A running sum over `changes` gives the bytes that cross each boundary.
        changes = [0] * (count + 1)
        dependent = _of_batch(forward, batch)
        for i, eqn in enumerate(self.eqns):
            for v in eqn.outvars:
                if v in dependent and last.get(v, i) > i:
                    changes[i + 1] += nbytes(v.aval)
                    changes[last[v] + 1] -= nbytes(v.aval)
        self.crossing = [flops_per_byte * alive for alive in itertools.accumulate(changes[:count])]

    def stages(self, starts: Sequence[int]) -> tuple[int, ...]:
        """Return the stage of each equation, in program order, if stages begin at `starts`."""
        stages = [0] * len(self.order)
        parts = part_of_each(starts, len(self.order))
        for position, part in zip(self.order, parts, strict=True):
            stages[position] = part
        return tuple(stages)

    def work(self, starts: Sequence[int]) -> list[int]:
        """Return the floating-point operations of each stage, if stages begin at `starts`."""
        bounds = [*starts, len(self.order)]
        return [sum(self.costs[a:b]) for a, b in itertools.pairwise(bounds)]

    def times(self, starts: Sequence[int]) -> list[float]:
        """Return the work of each stage, divided by the relative speed of its device."""
        return [x / speed for x, speed in zip(self.work(starts), self.speeds, strict=True)]

    def slowest(self, starts: Sequence[int]) -> float:
        """Return the cost of the slowest stage, including the bytes that the stage sends."""
        sent = [*values_at(self.crossing, starts[1:]), 0.0]
        return max(map(sum, zip(self.times(starts), sent, strict=True)))

    def divide(self, parts: int, rule: Rule, blocks: Blocks | None = None) -> tuple[int, ...]:
        """Divide the list into stages; return the position at which each stage begins.

        Args:
          parts: the number of stages.
          rule: the function that chooses the boundaries: `balance.contiguous` or
            `balance.balanced`.
          blocks: repeated layers of the model. No stage begins inside of a layer.
        """
        positions: Sequence[int] = range(len(self.order))
        if blocks is not None:
            inside = {*range(blocks.starts[0], blocks.stop)} - {*blocks.starts}
            positions = exclude(positions, inside)
        costs = self.work(positions)
        paid = np.flatnonzero(costs).tolist()
        if len(paid) < parts:
            crossing = values_at(self.crossing, positions)
            return tuple(values_at(positions, rule(costs, crossing, parts, self.speeds)))
        # The rules take time quadratic in the number of candidate boundaries. So between two
        # consecutive units with a cost, only the cheapest boundary is a candidate (on ties the
        # first).
        best = [0]
        for a, b in itertools.pairwise(paid):
            best.append(min(positions[a + 1 : b + 1], key=lambda i: (self.crossing[i], i)))
        crossing = values_at(self.crossing, best)
        starts = rule(values_at(costs, paid), crossing, parts, self.speeds)
        return tuple(values_at(best, starts))


def _reads(eqn: JaxprEqn) -> list[Var]:
    return variables(eqn.invars)


def _of_batch(forward: ClosedJaxpr, batch: Collection[Var] | None) -> set[Var]:
    """Return all values that depend on the micro-batch, including the inputs in `batch`."""
    inputs = forward.jaxpr.invars if batch is None else batch
    return set(propagate(forward.jaxpr.eqns, dict.fromkeys(inputs, 1), {}))


def _orders(
    forward: ClosedJaxpr, costs: Sequence[int], batch: Collection[Var] | None
) -> list[list[int]]:
    """Return the candidate orders of the equations. In each order, operands precede their readers.

    The first order moves equations without a cost, and equations that depend on no micro-batch, to
    just before their first reader. The second order also moves elementwise equations on inputs.
    """
    eqns = forward.jaxpr.eqns
    dependent = _of_batch(forward, batch)
    free, movable = [], []
    for eqn, cost in zip(eqns, costs, strict=True):
        is_free = cost == 0 or dependent.isdisjoint(_reads(eqn))
        is_plain = facts_of(eqn).flops != "product" and not any(jaxprs_in_params(eqn.params))
        free.append(is_free)
        movable.append(is_free or is_plain)
    late, later = _delay_to_readers(eqns, free), _delay_to_readers(eqns, movable)
    return [late] if later == late else [late, later]


def _delay_to_readers(eqns: Sequence[JaxprEqn], movable: Sequence[bool]) -> list[int]:
    """Return an order in which each movable equation directly precedes its first reader.

    So a cast of a parameter is on the stage that uses the parameter, not on the first stage.
    """
    producer: dict[Var, int] = {}
    operands: list[list[int]] = []
    moves: list[bool] = []  # True for each equation that is movable, with all its operands
    for i, eqn in enumerate(eqns):
        operands.append(values_at(producer, select(_reads(eqn), producer)))
        moves.append(not eqn.effects and movable[i] and all(values_at(moves, operands[i])))
        producer |= dict.fromkeys(eqn.outvars, i)
    # Index of the first reader of each equation; len(eqns) if no equation reads its outputs
    reader = [len(eqns)] * len(eqns)
    for i in reversed(range(len(eqns))):
        if not moves[i] or reader[i] == len(eqns):
            reader[i] = i
        for k in operands[i]:
            reader[k] = min(reader[k], reader[i])
    return sorted(range(len(eqns)), key=lambda i: (reader[i], i))


# -- policies --------------------------------------------------------------------------------------


def _heuristic(row: _OrderedEquations, parts: int, best: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first equation of each stage by the policy HEURISTIC.

    This policy prefers boundaries between layers (repeated blocks of equations). The result is
    `best` if the model has no such blocks, or if `best` is clearly better balanced.

    Args:
      row: the equations, in order.
      parts: the number of stages.
      best: the first equation of each stage in the balanced division.
    """
    found = repeated_blocks(row.eqns, row.costs, row.crossing, parts)
    if not found:
        return best
    blocks = found[0]
    starts = row.divide(parts, balanced, blocks)
    near = lambda mine, other: max(row.times(mine)) <= SLACK * max(row.times(other))

    # If all blocks cost about the same, users expect the same number of blocks on each stage.
    each = blocks.costs(row.costs)
    is_even = max(each) <= SLACK * min(each) and len(set(row.speeds)) == 1
    if len(blocks) % parts == 0 and is_even:
        even = _even(blocks, parts)
        if near(even, starts):
            return even
        return starts
    if near(starts, best):
        return starts
    return best


def _even(blocks: Blocks, parts: int) -> tuple[int, ...]:
    """Return the first equation of each stage, for equal numbers of repeated blocks (layers)."""
    each = len(blocks) // parts
    return (0, *blocks.starts[each::each])


def _repeated(row: _OrderedEquations, parts: int) -> tuple[int, ...]:
    """Return the first equation of each stage by the policy REPEATED_LAYERS.

    All stages get the same number of layers (repeated blocks of equations). The search may find
    several kinds of blocks. The function uses the best kind with a number of blocks that is a
    multiple of `parts`.

    Raises:
      ConfigError: no number of repeated blocks is a multiple of `parts`.
    """
    for blocks in repeated_blocks(row.eqns, row.costs, row.crossing, parts):
        if len(blocks) % parts == 0:
            return _even(blocks, parts)
    reason = "the model has no repeated equations or scopes"
    counts = {*map(len, repeated_blocks(row.eqns, row.costs, row.crossing))}
    if counts:
        numbers = " or ".join(map(str, sorted(counts, reverse=True)))
        reason = f"the model repeats {numbers} blocks"
    raise ConfigError(
        "policy='REPEATED_LAYERS' needs a number of repeated blocks that is a multiple of "
        f"num_stages={parts}, but {reason}; change num_stages or the policy"
    )


# -- scopes ----------------------------------------------------------------------------------------


def scoped_stages(forward: ClosedJaxpr) -> tuple[int, ...] | None:
    """Return the stage of each equation according to the user's scopes.

    Each scope is a stage, in the order in which scopes first appear. In a model with `replicate`
    scopes, `split` scopes are stages, too. If the model has no `replicate` scope, return None.

    Raises:
      ConfigError: a scope reads a value of a later scope, or scopes are nested.

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

    # Walk back over the equations, and find the first stage that reads an output of each one.
    readers: dict[Var, int] = {}
    first = [len(named)] * len(eqns)
    for i in reversed(range(len(eqns))):
        for v in eqns[i].outvars:
            first[i] = min(first[i], readers.get(v, len(named)))
        scope_stage = fixed[i]
        bound = first[i] if scope_stage is None else scope_stage
        for a in _reads(eqns[i]):
            readers[a] = min(bound, readers.get(a, bound))

    # Walk forward. An equation outside of all scopes is never before the stages of its operands.
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
    """Raise ConfigError if a scope reads a value of a later scope."""
    reached: dict[Var, int] = {}
    for eqn, stage in zip(eqns, fixed, strict=True):
        latest = max((reached.get(a, -1) for a in _reads(eqn)), default=-1)
        if stage is not None and latest > stage:
            raise ConfigError(
                f"{eqn.primitive.name} in {named[stage]} reads a value of {named[latest]}. This "
                "stage begins later, and a stage cannot read from a later one; enter the scopes "
                "in the order in which values flow through the model"
            )
        reached |= dict.fromkeys(eqn.outvars, max(latest, -1 if stage is None else stage))
