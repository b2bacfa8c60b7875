"""Loops and branches on shards: layouts of their operands and outputs, and their bodies.

The body of a loop is rewritten with the layouts of the initial carried values. If the body returns
other layouts, the body is rewritten with the returned layouts. The rewrite is repeated until the
layouts no longer change. It ends, because a layout changes only upwards in this order:

    replicated < partial sum < sharded

If iterations only add to a carried partial sum, the sum is reduced once, after the loop. The
gradient of a weight that a loop reads is an example. If the body reads the sum in another way, each
iteration reduces it first. `dtrans.engine.sharded_scans` shards the dimension over which a `scan`
iterates. The index of a `cond` is replicated, so all shards run the same branch. The condition of a
`while` is also replicated, with one exception: `jax.vmap` writes a condition for each row, and a
loop ends when all rows are finished. Each shard then ends its loop when its rows are finished. The
bodies of such a loop must not communicate, because shards run different numbers of iterations.

If all iterations together would communicate more bytes than the operands have, the operands are
gathered before the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from dtrans._jax import (
    COND,
    REMAT,
    SCAN,
    WHILE,
    ClosedJaxpr,
    JaxprEqn,
    bodies,
    body_indices,
    equations,
    scan_length,
)
from dtrans.engine.layout import PARTIAL, Gathered, Partial, ShardLayout, Shards
from dtrans.ir.cost import nbytes, total_bytes
from dtrans.ir.interpret import ForwardAnalysis, enter
from dtrans.ir.program import is_communication
from dtrans.ops import collective_of, moved_values
from dtrans.rows.layout import SHARED, RowAxis, Shared, rows_or_none, rows_or_shared


@dataclasses.dataclass(frozen=True)
class WrittenBody:
    """Body of a loop or branch after its rewrite for one shard.

    Attributes:
      jaxpr: the body.
      outs: layout of each output.
      gathers: notes about values that the body gathers.
      sliced: maps the index of a replicated input to a sharded layout, if the body reads the input
        only in this layout. The input is then sharded before the loop.
      scaled: records the values that are another value divided by a power of the number of shards.
        `scaled[v]` is (w, k) if v = w / shards**k.
      takes_index: True if the first input is the shard's index.
    """

    jaxpr: ClosedJaxpr
    outs: tuple[ShardLayout, ...]
    gathers: tuple[Gathered, ...]
    sliced: Mapping[int, RowAxis]
    scaled: Mapping[Any, tuple[Any, int]]
    takes_index: bool = False

    @property
    def communicates(self) -> bool:
        """True if the body has a collective."""
        return any(collective_of(e) is not None for e in equations(self.jaxpr))

    @property
    def moved(self) -> int:
        """Bytes that the body communicates in one iteration."""
        return sum(
            nbytes(a.aval) for e in equations(self.jaxpr) if is_communication(e) for a in e.outvars
        )


def moved_bytes(eqns: Iterable[JaxprEqn]) -> dict[str, int]:
    """Return the bytes that one shard communicates, by the name of the collective.

    An all-gather counts the bytes of its output. Other collectives count the bytes of operands.
    """
    found: dict[str, int] = {}
    for eqn in eqns:
        if collective_of(eqn) is not None:
            name = eqn.primitive.name
            found[name] = found.get(name, 0) + total_bytes(moved_values(eqn))
    return found


Outs = Sequence[ShardLayout] | None
Write = Callable[[Any, Sequence[ShardLayout], Outs, int], WrittenBody]


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """Layouts and rewritten bodies of a loop or a branch.

    Attributes:
      operands: layout that each operand is converted to.
      outs: layout of each output.
      bodies: rewritten bodies, in the order of `bodies(eqn)`.
    """

    operands: tuple[ShardLayout, ...]
    outs: tuple[ShardLayout, ...]
    bodies: tuple[WrittenBody, ...]

    @property
    def gathers(self) -> int:
        """Number of all-gathers in the bodies."""
        return sum(len(body.gathers) for body in self.bodies)


def plan_loop(
    eqn: JaxprEqn,
    ins: Sequence[ShardLayout],
    write: Write,
    shards: Shards,
    *,
    terms: Collection[int] = (),
) -> LoopPlan | None:
    """Plan a loop or a branch on shards; return None if it costs less to gather its operands.

    Args:
      eqn: the loop or branch.
      ins: layout of each operand.
      write: function that rewrites a body. Its arguments are the body, the layouts of its inputs,
        the wanted layouts of its outputs (or None), and a number n. The first n outputs may be
        partial sums.
      shards: number and options of the shards.
      terms: indices of outputs that may stay partial sums after the loop.
    """
    plan = _cheapest(eqn, ins, write, terms)
    if plan is None:
        return None
    if (sharded := _sharded_before(eqn, plan)) and eqn.primitive.name in (SCAN, *REMAT):
        ins_before = [sharded.get(i, x) for i, x in enumerate(ins)]
        other = _cheapest(eqn, ins_before, write, terms)
        if other is not None and other.gathers <= plan.gathers:
            plan = other
    if eqn.primitive.name in REMAT or shards.gathers_in_loops:
        return plan
    if shards.shares_work and not plan.gathers:
        return plan
    inside = _moved_inside(eqn, plan)
    outside = sum(nbytes(a.aval) for a, x in zip(eqn.invars, ins, strict=True) if x is not SHARED)
    return None if inside > outside else plan


def condition_rows(eqn: JaxprEqn, plan: LoopPlan) -> RowAxis | None:
    """Return the layout of a `while` condition with one entry for each row of a batch; else None.

    `jax.vmap` writes such conditions. Each shard then ends the loop when its own rows are finished.
    """
    return rows_or_none(plan.bodies[0].outs[0]) if eqn.primitive.name == WHILE else None


def _sharded_before(eqn: JaxprEqn, plan: LoopPlan) -> dict[int, RowAxis]:
    """Return the replicated operands that the first body reads only as pieces: index -> layout.

    The caller slices these operands once before the loop, not in each iteration.
    """
    indices = body_indices(eqn)
    found: dict[int, RowAxis] = {}
    for i, row in plan.bodies[0].sliced.items():
        if i not in indices.carried:
            found[i] = _moved(row, 1) if i in indices.slices else row
    return found


def _moved_inside(eqn: JaxprEqn, plan: LoopPlan) -> int:
    """Return the bytes that all iterations communicate."""
    iterations = scan_length(eqn) if eqn.primitive.name == SCAN else 1
    return iterations * sum(b.moved for b in plan.bodies)


def _cheapest(
    eqn: JaxprEqn, ins: Sequence[ShardLayout], write: Write, terms: Collection[int]
) -> LoopPlan | None:
    """Return the cheaper of two plans, in communicated bytes; None if there is no plan.

    In one plan, all outputs may be partial sums; in the other, only the outputs `terms` may.

    More partial sums may cost more. In a residual stream, for example, a layer adds a partial sum
    to a carried value. If the carried value becomes a partial sum, the next layer must reduce
    several values that depend on it.
    """

    def moved(plan: LoopPlan) -> int:
        sums = [i for i, x in enumerate(plan.outs) if isinstance(x, Partial) and i not in terms]
        return _moved_inside(eqn, plan) + sum(nbytes(eqn.outvars[i].aval) for i in sums)

    plan = _plan(eqn, ins, write)
    if plan is None:
        return None
    has_sums = any(isinstance(x, Partial) for x in plan.outs)
    if not has_sums or not _moved_inside(eqn, plan):
        return plan
    other = _plan(eqn, ins, write, terms)
    return other if other is not None and moved(other) < moved(plan) else plan


def _plan(
    eqn: JaxprEqn,
    ins: Sequence[ShardLayout],
    write: Write,
    terms: Collection[int] | None = None,
) -> LoopPlan | None:
    """Rewrite the bodies of an equation until the layouts of carried values stop changing.

    Args:
      eqn, ins, write: as in `plan_loop`.
      terms: indices of the outputs that may be partial sums; by default all outputs may.

    Returns:
      The plan; None if the condition of a `while` depends on rows of several shards.
    """
    if terms is not None:
        ins = list(map(rows_or_shared, ins))
    indices = body_indices(eqn)
    body_ins: dict[int, list[ShardLayout]] = {}
    carried = len(indices.carried) if terms is None else 0

    def may_be(i: int, layout: ShardLayout) -> bool:
        return terms is None or i in terms or not isinstance(layout, Partial)

    def run(
        number: int, body: Any, layouts: list[ShardLayout]
    ) -> tuple[WrittenBody, Sequence[ShardLayout]]:
        body_ins[number] = _drop_closed(layouts)
        found = write(body, body_ins[number], None, carried if indices.outs[number] else 0)
        return found, [x if may_be(i, x) else SHARED for i, x in enumerate(found.outs)]

    join = _join if eqn.primitive.name == COND else _join_iterations
    layouts = ForwardAnalysis[ShardLayout](
        join, lambda eqn, ins: None, lambda aval, value: SHARED, _inside, _stack
    )
    start = [x if i in indices.carried else rows_or_shared(x) for i, x in enumerate(ins)]
    entered = enter(layouts, eqn, start, run)
    rows = rows_or_none(entered.decision) if eqn.primitive.name == WHILE else None
    if rows is not None:  # each carried value has the rows of the condition
        aligned = [rows if i in indices.carried else x for i, x in enumerate(start)]
        entered = enter(layouts, eqn, aligned, run)
    written: list[WrittenBody] = []
    for k, found in entered.bodies.items():
        # the condition must be replicated: shards with different numbers of iterations would hang
        condition = SHARED if rows is None else rows
        ends = [condition] if indices.outs[k] is None else _drop_closed(entered.body_outs[k])
        added = carried if indices.outs[k] else 0
        if list(found.outs) != ends:
            found = write(bodies(eqn)[k], body_ins[k], ends, added)
        written.append(found)
    # shards that run different numbers of iterations would wait for each other
    waits = any(body.communicates for body in written)
    if rows is not None and (waits or set(entered.outs) != {rows}):
        return None
    return LoopPlan(
        tuple(_drop_closed(entered.operands)), tuple(_drop_closed(entered.outs)), tuple(written)
    )


# -- joins of layouts ------------------------------------------------------------------------------


class _Closed(Shared):
    """Replicated layout of a carried value that must not become a partial sum again.

    The body reads the full value, so each iteration reduces the partial sum.
    """


_CLOSED: Final = _Closed()


def _drop_closed(layouts: Sequence[ShardLayout]) -> list[ShardLayout]:
    return [SHARED if x is _CLOSED else x for x in layouts]


def _join(one: ShardLayout, other: ShardLayout) -> ShardLayout:
    """Return the higher of two layouts: replicated < partial sum < sharded."""
    for x in (one, other):
        if isinstance(x, RowAxis):
            return x
    if isinstance(one, Partial) or isinstance(other, Partial):
        return PARTIAL
    return SHARED


def _join_iterations(carried: ShardLayout, after: ShardLayout) -> ShardLayout:
    """Join the layouts that a carried value has before and after an iteration."""
    is_closed = carried is _CLOSED or (
        isinstance(carried, Partial) and not isinstance(after, Partial)
    )
    if is_closed and not isinstance(after, RowAxis):
        return _CLOSED
    return _join(carried, after)


def _inside(x: ShardLayout) -> ShardLayout:
    """Return the layout of the slice that one iteration reads from a scanned array.

    If the array is sharded along the iterations, each iteration reads a replicated slice.
    """
    if isinstance(x, RowAxis) and x.axis:
        return _moved(x, -1)
    return SHARED


def _stack(x: ShardLayout) -> ShardLayout:
    if isinstance(x, RowAxis):
        return _moved(x, 1)
    return x


def _moved(row: RowAxis, by: int) -> RowAxis:
    return dataclasses.replace(row, axis=row.axis + by)
