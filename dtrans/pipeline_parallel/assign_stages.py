"""Assignment of the equations of a forward pass to the stages of a pipeline.

The equations are put in a row, and the row is cut (`dtrans.pipeline_parallel.balance`). The row is
the program's own order, but for what a program may make long before it is needed: a cast or a
reshape of a parameter, and whatever depends on no micro-batch (masks, `iota`), stand right before
what reads them first. Otherwise casting all parameters at the top would put all of them on the
first stage. The same is tried with all elementwise work on inputs alone, and kept where the slowest
stage gets faster by it.

A stage costs its floating-point operations, and `flops_per_byte` for each byte that it sends on:
all values that were made before the cut and are read after it, also those that a stage only hands
on (skip connections), each once. Inputs cross for free, since they are where they are read, and so
do values that depend on no micro-batch, which are made there. Results need not be carried either:
they stay where they are made. Every stage has at least one equation that costs something, if there
are as many; what costs nothing is on the side of the cut where less crosses, else with its readers.

Policies:

  BALANCE_FLOPS    the slowest stage is as fast as cuts between equations allow, sending included. Exact. Where sending
                   is dear a stage may be left with next to no work.
  REPEATED_LAYERS  repeated blocks (`dtrans.pipeline_parallel.repeated_blocks`), the same number on
                   each stage; what comes before them is on the first stage, what comes after on the
                   last. EPL's rule; an error if none fit.
  BALANCE_OP_NUM   the same number of equations. EPL's rule, without the stages that it loses.
  HEURISTIC        the default. The operations of stages are balanced; of the cuts near balance those that send the
                   fewest bytes (`dtrans.pipeline_parallel.balance.balanced`), so that no stage is
                   left with nothing. Repeated blocks stay whole where no stage does more than
                   `SLACK` times as much work so; if their number is a multiple of the stages, and
                   they cost about the same, as with REPEATED_LAYERS.

EPL has no model of cost, and keeps blocks whole only where their number is a multiple
(epl/parallel/planner.py).

Scopes of the user (`dtrans.step.scopes`) come before all policies. An equation outside of them goes
by EPL's rule of minimum and maximum: no stage before that of what it reads, none after that of what
reads it, and in between the stage of the last scope before it. What is made of inputs alone goes to
the first stage that reads it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from dtrans._jax import ClosedJaxpr, JaxprEqn, Var, facts_of, jaxprs_in_params
from dtrans.errors import ConfigError
from dtrans.ir.cost import flops, nbytes
from dtrans.ir.dataflow import propagate
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

# Operations that a device does in the time that one byte takes to the next: 100 Gflop/s over 10
# GB/s. An accelerator on a fast link has several hundred.
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
      num_stages: how many stages; each gets at least one equation.
      policy: one of `POLICIES`. None: as the user's scopes say if there are any, else HEURISTIC.
      flops_per_byte: floating-point operations that a device does in the time in which one byte
        goes to the next.
      batch: the inputs that each micro-batch has its own of; what depends on none of them is made
        wherever it is read. None: all inputs.

    Raises:
      ConfigError: there are more stages than equations; the policy is unknown, or finds no blocks
        that fit; scopes are as many as other stages than asked for, contradict what depends on
        what, or are given beside a policy.

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
        raise ConfigError(f"num_stages={num_stages}: there must be one at least")
    if flops_per_byte < 0:
        raise ConfigError(f"flops_per_byte={flops_per_byte}: it must not be negative")
    by_scope = scoped_stages(forward)
    if by_scope is not None:
        count = max(by_scope) + 1
        if count != num_stages:
            raise ConfigError(
                f"num_stages={num_stages}, and the model has {count} scopes, each of them a stage"
            )
        if policy is not None:
            raise ConfigError(
                f"policy={policy!r} beside {count} scopes in the model, which say what the stages "
                "are"
            )
        return by_scope
    if len(eqns) < num_stages:
        raise ConfigError(
            f"num_stages={num_stages}, and the step's forward pass has only {len(eqns)} equations"
        )

    costs = [flops(eqn) for eqn in eqns]
    if policy == "BALANCE_OP_NUM":
        return part_of_each(partition_balance([1] * len(eqns), num_stages), len(eqns))
    rows = [
        _Row(forward, costs, order, flops_per_byte, batch)
        for order in _orders(forward, costs, batch)
    ]
    rule = balanced if policy in (None, "HEURISTIC") else contiguous
    cuts = [(row, row.cut(num_stages, rule)) for row in rows]
    row, best = min(cuts, key=lambda cut: cut[0].slowest(cut[1]))
    if policy == "BALANCE_FLOPS":
        return row.stages(best)
    return row.stages(
        _repeated(row, num_stages)
        if policy == "REPEATED_LAYERS"
        else _heuristic(row, num_stages, best)
    )


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
      >>> forward = jax.make_jaxpr(lambda w, x: (jnp.tanh(x @ w) @ w).sum())(jnp.ones((64, 64)), jnp.ones((2, 64)))
      >>> for cost in stage_costs(forward, stages_of(forward, 2)):
      ...     print(cost)
      StageCost(equations=2, flops=16512, sends=512)
      StageCost(equations=2, flops=16512, sends=0)
    """
    eqns = forward.jaxpr.eqns
    count = max(stage_of, default=0) + 1
    stage = {v: s for e, s in zip(eqns, stage_of, strict=True) for v in e.outvars}
    last: dict[Var, int] = {}
    for eqn, s in zip(eqns, stage_of, strict=True):
        last |= {a: max(s, last.get(a, 0)) for a in _reads(eqn)}
    sends = [0] * count
    for v in _of_batch(forward, batch):
        for s in range(stage.get(v, count), last.get(v, 0)):
            sends[s] += nbytes(v.aval)
    mine = [[e for e, s in zip(eqns, stage_of, strict=True) if s == k] for k in range(count)]
    return tuple(
        StageCost(len(own), sum(map(flops, own)), sent)
        for own, sent in zip(mine, sends, strict=True)
    )


Rule: TypeAlias = Callable[[Sequence[float], Sequence[float], int], tuple[int, ...]]


# -- the row of equations --------------------------------------------------------------------------


class _Row:
    """Equations in the order in which they are cut.

    Args:
      order: positions in the program.
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
        self.eqns = [forward.jaxpr.eqns[i] for i in order]
        self.costs = [costs[i] for i in order]
        count = len(order)
        changes = [0] * (count + 1)  # of the bytes that are alive, from one equation to the next
        last = {a: i for i, e in enumerate(self.eqns) for a in _reads(e)}
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

    def most_work(self, starts: Sequence[int]) -> int:
        """Return the operations of the part that has most, without sending."""
        return max(sum(self.costs[a:b]) for a, b in itertools.pairwise([*starts, len(self.order)]))

    def slowest(self, starts: Sequence[int]) -> float:
        """Return the cost of the slowest part."""
        ends = [*starts[1:], len(self.order)]
        sent = [*(self.crossing[i] for i in starts[1:]), 0.0]
        return max(sum(self.costs[a:b]) + c for a, b, c in zip(starts, ends, sent, strict=True))

    def cut(self, parts: int, rule: Rule, whole: Blocks | None = None) -> tuple[int, ...]:
        """Return the start of each part.

        Args:
          rule: `contiguous` or `balanced`.
          whole: blocks that no cut divides.
        """
        inside = range(whole.starts[0] + 1, whole.stop) if whole else range(0)
        places = [
            i for i in range(len(self.order)) if i not in inside or (whole and i in whole.starts)
        ]
        costs = [
            sum(self.costs[a:b])
            for a, b in zip(places, [*places[1:], len(self.order)], strict=True)
        ]
        dear = [k for k, cost in enumerate(costs) if cost > 0]
        if len(dear) < parts:
            return tuple(places[k] for k in rule(costs, [self.crossing[i] for i in places], parts))
        # between two units that cost something one cut is enough: where the least crosses, the
        # earliest of these
        between = [[0], *(places[a + 1 : b + 1] for a, b in itertools.pairwise(dear))]
        best = [min(gap, key=lambda i: (self.crossing[i], i)) for gap in between]
        starts = rule([costs[k] for k in dear], [self.crossing[i] for i in best], parts)
        return tuple(best[k] for k in starts)


def _reads(eqn: JaxprEqn) -> list[Var]:
    return [a for a in eqn.invars if isinstance(a, Var)]


def _of_batch(forward: ClosedJaxpr, batch: Collection[Var] | None) -> set[Var]:
    """Return the values that depend on a micro-batch, inputs included."""
    inputs = forward.jaxpr.invars if batch is None else batch
    return set(propagate(forward.jaxpr.eqns, dict.fromkeys(inputs, 1), {}))


def _orders(
    forward: ClosedJaxpr, costs: Sequence[int], batch: Collection[Var] | None
) -> list[list[int]]:
    """Orders of the equations to choose from; each respects what depends on what."""
    eqns = forward.jaxpr.eqns
    dependent = _of_batch(forward, batch)
    free = [
        c == 0 or not any(a in dependent for a in _reads(e))
        for e, c in zip(eqns, costs, strict=True)
    ]
    plain = [facts_of(e).flops != "product" and not any(jaxprs_in_params(e.params)) for e in eqns]
    late = _late(eqns, free)
    later = _late(eqns, [a or b for a, b in zip(free, plain, strict=True)])
    return [late] if later == late else [late, later]


def _late(eqns: Sequence[JaxprEqn], movable: Sequence[bool]) -> list[int]:
    """Return an order in which movable equations stand before their first reader."""
    made_of = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    operands = [[made_of[a] for a in _reads(e) if a in made_of] for e in eqns]
    moved: list[bool] = []
    for i in range(len(eqns)):
        moved.append(not eqns[i].effects and movable[i] and all(moved[k] for k in operands[i]))
    place = [len(eqns)] * len(eqns)  # of the first reader; none reads it so far
    for i in reversed(range(len(eqns))):
        if not moved[i] or place[i] == len(eqns):
            place[i] = i
        for k in operands[i]:
            place[k] = min(place[k], place[i])
    return sorted(range(len(eqns)), key=lambda i: (place[i], i))


# -- policies --------------------------------------------------------------------------------------


def _heuristic(row: _Row, parts: int, best: tuple[int, ...]) -> tuple[int, ...]:
    """Whole blocks, if they fit; else the balanced cut."""
    found = repeated_blocks(row.eqns, row.costs, row.crossing, parts)
    if not found:
        return best
    blocks = found[0]
    each, starts = blocks.costs(row.costs), row.cut(parts, balanced, blocks)
    if len(blocks) % parts == 0 and max(each) <= SLACK * min(each):
        even = _even(blocks, parts)
        return even if row.most_work(even) <= SLACK * row.most_work(starts) else starts
    return starts if row.most_work(starts) <= SLACK * row.most_work(best) else best


def _even(blocks: Blocks, parts: int) -> tuple[int, ...]:
    """Return the starts of parts with equal numbers of blocks."""
    each = len(blocks) // parts
    return (0, *blocks.starts[each::each])


def _repeated(row: _Row, parts: int) -> tuple[int, ...]:
    """Return the starts of parts that each have the same number of the best repeated blocks."""
    found = repeated_blocks(row.eqns, row.costs, row.crossing, parts)
    for blocks in found:
        if len(blocks) % parts == 0:
            return _even(blocks, parts)
    counts = sorted(
        {len(b) for b in repeated_blocks(row.eqns, row.costs, row.crossing)}, reverse=True
    )
    there = (
        f"there are rows of {', '.join(map(str, counts))} blocks"
        if counts
        else "no equations or scopes repeat"
    )
    raise ConfigError(
        "policy='REPEATED_LAYERS' needs a number of repeated blocks that is a multiple of "
        f"num_stages={parts}; {there}"
    )


# -- scopes ----------------------------------------------------------------------------------------


def scoped_stages(forward: ClosedJaxpr) -> tuple[int, ...] | None:
    """Return the stage of each equation by the user's scopes; None without a `replicate` scope.

    Stages are the scopes in the order in which they first appear. `split` scopes beside `replicate`
    scopes are stages.

    Raises:
      ConfigError: what is in one scope is read in an earlier one; scopes are in each other.

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

    # the first stage that reads what an equation makes
    readers: dict[Var, int] = {}
    first = [len(named)] * len(eqns)
    for i in reversed(range(len(eqns))):
        first[i] = min((readers[v] for v in eqns[i].outvars if v in readers), default=len(named))
        own = fixed[i]
        bound = first[i] if own is None else own
        readers |= {
            a: min(bound, readers.get(a, bound)) for a in eqns[i].invars if isinstance(a, Var)
        }

    stage: dict[Var, int] = {}
    of_scope: set[Var] = set()
    made: list[int] = []
    current = 0
    for i, eqn in enumerate(eqns):
        own = fixed[i]
        reads = _reads(eqn)
        after = max((stage.get(a, 0) for a in reads), default=0)
        free = own is None and not of_scope.intersection(reads)
        if own is not None:
            current = at = own
        elif free and first[i] < len(named):
            at = first[i]
        else:
            at = max(after, min(current, first[i]))
        if not free:
            of_scope.update(eqn.outvars)
        stage |= dict.fromkeys(eqn.outvars, at)
        made.append(at)
    return tuple(made)


def _check_order(
    eqns: Sequence[JaxprEqn], fixed: Sequence[int | None], named: Sequence[Scope]
) -> None:
    """Refuse scopes that read what a later one makes."""
    reached: dict[Var, int] = {}
    for eqn, own in zip(eqns, fixed, strict=True):
        latest = max((reached.get(a, -1) for a in _reads(eqn)), default=-1)
        if own is not None and latest > own:
            raise ConfigError(
                f"{eqn.primitive.name} in {named[own]} reads what {named[latest]} makes, which "
                "begins after it: no "
                "stage can read from a later one. Enter the scopes in the order in which values go "
                "through them"
            )
        reached |= dict.fromkeys(eqn.outvars, max(latest, -1 if own is None else own))
