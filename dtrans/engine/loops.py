"""Loops and branches on pieces: how their operands and outputs lie, and their bodies as written for
one shard.

The body of a loop is written several times: first with what is carried lying as it comes in, and
again until each comes out of the body as it went in. What is carried goes up this order, and stays
where it is:

    whole < a sum left open < cut

A sum that is added to in every turn is left open (the gradient of a weight that a loop reads is
reduced once, behind the loop); one that the body reads otherwise is whole. A dimension that a
`scan` goes along is never cut. The condition of a `while`, and the index of a branch, are whole:
every shard takes the same turns.

A body that would gather more in all its turns than its operands are is carried out on whole values.
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
from dtrans.engine.layout import PARTIAL, Gathered, Partial, Placed, nbytes, rows_only
from dtrans.ir.interpret import ForwardAnalysis, enter
from dtrans.ir.program import is_communication
from dtrans.ops import collective_of, moved_values
from dtrans.rows.layout import SHARED, RowAxis, Shared


@dataclasses.dataclass(frozen=True)
class WrittenBody:
    """A body for one shard.

    Attributes:
      jaxpr: on pieces.
      outs: how its outputs lie.
      gathers: what it makes whole.
      sliced: inputs that are whole and of which it reads pieces alone, by their number, and which
        pieces.
      scaled: values that stand for others (`dtrans.engine.values`).
      takes_index: whether its first operand is the number of the shard.
    """

    jaxpr: ClosedJaxpr
    outs: tuple[Placed, ...]
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
    """Return the bytes that one shard puts into communication, by primitive; of a gather, what
    comes out of it."""
    found: dict[str, int] = {}
    for eqn in eqns:
        if collective_of(eqn) is not None:
            name = eqn.primitive.name
            found[name] = found.get(name, 0) + sum(nbytes(a.aval) for a in moved_values(eqn))
    return found


Outs = Sequence[Placed] | None
Write = Callable[[Any, Sequence[Placed], Outs, int], WrittenBody]


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """How a loop or a branch is carried out on a shard.

    Attributes:
      operands: how each operand is read.
      outs: how each output lies.
      bodies: those of the equation, in its order.
    """

    operands: tuple[Placed, ...]
    outs: tuple[Placed, ...]
    bodies: tuple[WrittenBody, ...]


def plan_loop(
    eqn: JaxprEqn, ins: Sequence[Placed], write: Write, *, shares_work: bool = True
) -> LoopPlan | None:
    """Return the plan of a loop or a branch; None if whole values are the better way.

    Args:
      ins: layouts of its operands.
      write: writes a body, from the layouts of its inputs, those of its outputs (or None), and the
        number of outputs that are carried: those are added up.
      shares_work: True if pieces save work; the reductions of a body then never speak for whole
        values.
    """
    plan = _plan(eqn, ins, write)
    if (cut := _cut_before(eqn, plan)) and eqn.primitive.name in (SCAN, *REMAT):
        other = _plan(eqn, [cut.get(i, x) for i, x in enumerate(ins)], write)
        plan = (
            other
            if sum(len(b.gathers) for b in other.bodies) <= sum(len(b.gathers) for b in plan.bodies)
            else plan
        )
    mixes = any(b.gathers for b in plan.bodies)
    if eqn.primitive.name in REMAT or (shares_work and not mixes):
        return plan
    turns = scan_length(eqn) if eqn.primitive.name == SCAN else 1
    inside = turns * sum(b.moved for b in plan.bodies)
    outside = sum(nbytes(a.aval) for a, x in zip(eqn.invars, ins, strict=True) if x is not SHARED)
    return None if inside > outside else plan


def _cut_before(eqn: JaxprEqn, plan: LoopPlan) -> dict[int, RowAxis]:
    """Return whole operands that the body reads in pieces only: they are sharded before the
    loop."""
    wires = wiring(eqn)
    rows = {i: row for i, row in plan.bodies[0].sliced.items() if i not in wires.carried}
    return {i: _moved(row, 1) if i in wires.slices else row for i, row in rows.items()}


def _plan(eqn: JaxprEqn, ins: Sequence[Placed], write: Write) -> LoopPlan:
    """Write the bodies of an equation until what is carried settles, and once more where outputs
    lie otherwise."""
    wires = wiring(eqn)
    taken: dict[int, list[Placed]] = {}

    def run(number: int, body: Any, layouts: list[Placed]) -> tuple[WrittenBody, Sequence[Placed]]:
        taken[number] = _whole_or_open(layouts)
        found = write(body, taken[number], None, len(wires.carried) if wires.outs[number] else 0)
        return found, found.outs

    join = _join if eqn.primitive.name == COND else _join_turns
    layouts = ForwardAnalysis[Placed](
        join, lambda eqn, ins: None, lambda aval, value: SHARED, _inside, _stack
    )
    start = [x if i in wires.carried else rows_only(x) for i, x in enumerate(ins)]
    entered = enter(layouts, eqn, start, run)
    written: list[WrittenBody] = []
    for k, found in entered.bodies.items():
        # every shard takes the same turns
        ends = [SHARED] if wires.outs[k] is None else _whole_or_open(entered.ends[k])
        added = len(wires.carried) if wires.outs[k] else 0
        written.append(
            found if list(found.outs) == ends else write(bodies(eqn)[k], taken[k], ends, added)
        )
    return LoopPlan(
        tuple(_whole_or_open(entered.operands)), tuple(_whole_or_open(entered.outs)), tuple(written)
    )


# -- layouts that settle ---------------------------------------------------------------------------


class _Closed(Shared):
    """A carried value that a turn reads whole: it is a partial sum in no turn."""


_CLOSED: Final = _Closed()


def _whole_or_open(layouts: Sequence[Placed]) -> list[Placed]:
    return [SHARED if x is _CLOSED else x for x in layouts]


def _join(one: Placed, other: Placed) -> Placed:
    """Return the layout of a value that has one of two: cut if either is, else a sum if either is
    one."""
    both = (one, other)
    rows = [x for x in both if isinstance(x, RowAxis)]
    return rows[0] if rows else PARTIAL if any(isinstance(x, Partial) for x in both) else SHARED


def _join_turns(carried: Placed, made: Placed) -> Placed:
    """Return the layout of a carried value whose layout changes in a turn."""
    is_whole = carried is _CLOSED or (
        isinstance(carried, Partial) and not isinstance(made, Partial)
    )
    return _CLOSED if is_whole and not isinstance(made, RowAxis) else _join(carried, made)


def _inside(x: Placed) -> Placed:
    """Return the layout of a turn's slice; a stack that is cut along the turns is whole."""
    return _moved(x, -1) if isinstance(x, RowAxis) and x.axis else SHARED


def _stack(x: Placed) -> Placed:
    return _moved(x, 1) if isinstance(x, RowAxis) else x


def _moved(row: RowAxis, by: int) -> RowAxis:
    return dataclasses.replace(row, axis=row.axis + by)
