"""Loops and branches on shards: layouts of their operands and outputs, and their bodies.

The body of a loop is rewritten until the layouts of carried values settle: the first time with the
layouts of the initial values, then with those that the body returns. A carried value only moves up
in this order:

    replicated < partial sum < sharded

A carried sum that each iteration only adds to stays a partial sum: the gradient of a weight that a
loop reads is reduced once, after the loop. A sum that the body reads otherwise is reduced. The
dimension that a `scan` iterates over is not sharded here (`dtrans.engine.sharded_scans` does that).
The condition of a `while` and the index of a branch are replicated: all shards run the same bodies.

A loop runs on full values if its body would gather more bytes in all iterations than its operands
have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from dtrans._jax import (
    COND,
    REMAT,
    SCAN,
    ClosedJaxpr,
    JaxprEqn,
    bodies,
    equations,
    scan_length,
    wiring,
)
from dtrans.engine.layout import PARTIAL, Gathered, Partial, ShardLayout, rows_only
from dtrans.ir.cost import nbytes, total_bytes
from dtrans.ir.interpret import ForwardAnalysis, enter
from dtrans.ir.program import is_communication
from dtrans.ops import collective_of, moved_values
from dtrans.rows.layout import SHARED, RowAxis, Shared


@dataclasses.dataclass(frozen=True)
class WrittenBody:
    """Body for one shard.

    Attributes:
      jaxpr: the body.
      outs: layouts of its outputs.
      gathers: values that it gathers.
      sliced: by position, the replicated inputs that it reads in one sharded layout only.
      scaled: scaled values that stand for other values (`dtrans.engine.values`).
      takes_index: True if its first operand is the shard's index.
    """

    jaxpr: ClosedJaxpr
    outs: tuple[ShardLayout, ...]
    gathers: tuple[Gathered, ...]
    sliced: Mapping[int, RowAxis]
    scaled: Mapping[Any, tuple[Any, int]]
    takes_index: bool = False

    @property
    def moved(self) -> int:
        """Bytes that it puts into communication."""
        return sum(
            nbytes(a.aval) for e in equations(self.jaxpr) if is_communication(e) for a in e.outvars
        )


def moved_bytes(eqns: Iterable[JaxprEqn]) -> dict[str, int]:
    """Return the bytes that one shard communicates, by primitive; a gather counts its output."""
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
    """Layouts and bodies of a loop or a branch on a shard.

    Attributes:
      operands: layout in which each operand is read.
      outs: layout of each output.
      bodies: rewritten bodies, in the equation's order.
    """

    operands: tuple[ShardLayout, ...]
    outs: tuple[ShardLayout, ...]
    bodies: tuple[WrittenBody, ...]

    @property
    def gathers(self) -> int:
        """Number of all-gathers in its bodies."""
        return sum(len(body.gathers) for body in self.bodies)


def plan_loop(
    eqn: JaxprEqn, ins: Sequence[ShardLayout], write: Write, *, shares_work: bool = True
) -> LoopPlan | None:
    """Return the plan of a loop or a branch; None if full values cost less.

    Args:
      eqn: the loop or branch.
      ins: layouts of its operands.
      write: rewrites a body, from the layouts of its inputs and outputs (or None), and the number
        of
        carried outputs: those may be partial sums.
      shares_work: True if shards save computation; bytes of reductions then never decide for full
        values.
    """
    plan = _plan(eqn, ins, write)
    if (cut := _cut_before(eqn, plan)) and eqn.primitive.name in (SCAN, *REMAT):
        other = _plan(eqn, [cut.get(i, x) for i, x in enumerate(ins)], write)
        if other.gathers <= plan.gathers:
            plan = other
    mixes = any(b.gathers for b in plan.bodies)
    if eqn.primitive.name in REMAT or (shares_work and not mixes):
        return plan
    iterations = scan_length(eqn) if eqn.primitive.name == SCAN else 1
    inside = iterations * sum(b.moved for b in plan.bodies)
    outside = sum(nbytes(a.aval) for a, x in zip(eqn.invars, ins, strict=True) if x is not SHARED)
    return None if inside > outside else plan


def _cut_before(eqn: JaxprEqn, plan: LoopPlan) -> dict[int, RowAxis]:
    """Return replicated operands that the body reads sharded only: the loop takes them sharded."""
    wires = wiring(eqn)
    rows = {i: row for i, row in plan.bodies[0].sliced.items() if i not in wires.carried}
    return {i: _moved(row, 1) if i in wires.slices else row for i, row in rows.items()}


def _plan(eqn: JaxprEqn, ins: Sequence[ShardLayout], write: Write) -> LoopPlan:
    """Rewrite the bodies of an equation until the layouts of carried values settle."""
    wires = wiring(eqn)
    body_ins: dict[int, list[ShardLayout]] = {}

    def run(
        number: int, body: Any, layouts: list[ShardLayout]
    ) -> tuple[WrittenBody, Sequence[ShardLayout]]:
        body_ins[number] = _drop_closed(layouts)
        found = write(body, body_ins[number], None, len(wires.carried) if wires.outs[number] else 0)
        return found, found.outs

    join = _join if eqn.primitive.name == COND else _join_iterations
    layouts = ForwardAnalysis[ShardLayout](
        join, lambda eqn, ins: None, lambda aval, value: SHARED, _inside, _stack
    )
    start = [x if i in wires.carried else rows_only(x) for i, x in enumerate(ins)]
    entered = enter(layouts, eqn, start, run)
    written: list[WrittenBody] = []
    for k, found in entered.bodies.items():
        # shards must run the same iterations, or collectives in the body would wait forever
        ends = [SHARED] if wires.outs[k] is None else _drop_closed(entered.ends[k])
        added = len(wires.carried) if wires.outs[k] else 0
        written.append(
            found if list(found.outs) == ends else write(bodies(eqn)[k], body_ins[k], ends, added)
        )
    return LoopPlan(
        tuple(_drop_closed(entered.operands)), tuple(_drop_closed(entered.outs)), tuple(written)
    )


# -- joins of layouts ------------------------------------------------------------------------------


class _Closed(Shared):
    """Layout of a carried value that an iteration reads in full: never a partial sum."""


_CLOSED: Final = _Closed()


def _drop_closed(layouts: Sequence[ShardLayout]) -> list[ShardLayout]:
    return [SHARED if x is _CLOSED else x for x in layouts]


def _join(one: ShardLayout, other: ShardLayout) -> ShardLayout:
    """Return the common layout: sharded if either is sharded, else a partial sum if either is
    one."""
    both = (one, other)
    rows = [x for x in both if isinstance(x, RowAxis)]
    return rows[0] if rows else PARTIAL if any(isinstance(x, Partial) for x in both) else SHARED


def _join_iterations(carried: ShardLayout, after: ShardLayout) -> ShardLayout:
    """Return the layout of a carried value whose layout changes in an iteration."""
    is_closed = carried is _CLOSED or (
        isinstance(carried, Partial) and not isinstance(after, Partial)
    )
    return _CLOSED if is_closed and not isinstance(after, RowAxis) else _join(carried, after)


def _inside(x: ShardLayout) -> ShardLayout:
    """Return the layout of an iteration's slice; a stack sharded along iterations is replicated."""
    return _moved(x, -1) if isinstance(x, RowAxis) and x.axis else SHARED


def _stack(x: ShardLayout) -> ShardLayout:
    return _moved(x, 1) if isinstance(x, RowAxis) else x


def _moved(row: RowAxis, by: int) -> RowAxis:
    return dataclasses.replace(row, axis=row.axis + by)
