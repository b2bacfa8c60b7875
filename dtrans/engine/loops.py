"""Loops and branches on pieces: how their operands and outputs lie, and their bodies as written for one shard.

The body of a loop is written several times: first with what is carried lying as it comes in, and again until each
comes out of the body as it went in. What is carried goes up this order, and stays where it is:

    whole < a sum left open < cut

A sum that is added to in every turn is left open (the gradient of a weight that a loop reads is reduced once, behind
the loop); one that the body reads otherwise is whole. A dimension that a `scan` goes along is never cut. The condition
of a `while`, and the index of a branch, are whole: every shard takes the same turns.

A body that would gather more in all its turns than its operands are is carried out on whole values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrans._jax import (
    COND,
    REMAT,
    SCAN,
    WHILE,
    ClosedJaxpr,
    JaxprEqn,
    bodies,
    equations,
    scan_counts,
    scan_length,
    while_counts,
)
from dtrans.engine.layout import PARTIAL, Gathered, Partial, Placed, nbytes
from dtrans.ir.program import is_communication
from dtrans.rows.layout import SHARED, RowAxis


@dataclasses.dataclass(frozen=True)
class WrittenBody:
    """A body for one shard.

    Attributes:
      jaxpr: on pieces.
      outs: how its outputs lie.
      gathers: what it makes whole.
      sliced: inputs that are whole and of which it reads pieces alone, by their number, and which pieces.
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
        return sum(nbytes(a.aval) for e in equations(self.jaxpr) if is_communication(e) for a in e.outvars)


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


def plan_loop(eqn: JaxprEqn, ins: Sequence[Placed], write: Write, *, shares_work: bool = True) -> LoopPlan | None:
    """Return the plan of a loop or a branch; None if whole values are the better way.

    Args:
      ins: layouts of its operands.
      write: writes a body, from the layouts of its inputs, those of its outputs (or None), and the
        number of outputs that are carried: those are added up.
      shares_work: True if pieces save work; the reductions of a body then never speak for whole
        values.
    """
    make = {SCAN: _scan, WHILE: _while, COND: _cond}.get(eqn.primitive.name, _remat)
    plan = make(eqn, ins, write)
    if (cut := _cut_before(eqn, plan)) and eqn.primitive.name in (SCAN, *REMAT):
        other = make(eqn, [cut.get(i, x) for i, x in enumerate(ins)], write)
        plan = other if sum(len(b.gathers) for b in other.bodies) <= sum(len(b.gathers) for b in plan.bodies) else plan
    mixes = any(b.gathers for b in plan.bodies)
    if eqn.primitive.name in REMAT or (shares_work and not mixes):
        return plan
    turns = scan_length(eqn) if eqn.primitive.name == SCAN else 1
    inside = turns * sum(b.moved for b in plan.bodies)
    outside = sum(nbytes(a.aval) for a, x in zip(eqn.invars, ins, strict=True) if x is not SHARED)
    return None if inside > outside else plan


def _cut_before(eqn: JaxprEqn, plan: LoopPlan) -> dict[int, RowAxis]:
    """Operands that are whole and of which the body reads pieces alone: they are cut before it."""
    first, last = 0, len(eqn.invars)
    if eqn.primitive.name == SCAN:
        consts, carried = scan_counts(eqn)
        first, last = consts, consts + carried
    found = {}
    for i, row in plan.bodies[0].sliced.items():
        if not first <= i < last or eqn.primitive.name in REMAT:
            found[i] = dataclasses.replace(row, axis=row.axis + 1) if i >= last else row
    return found


def _remat(eqn: JaxprEqn, ins: Sequence[Placed], write: Write) -> LoopPlan:
    (body,) = bodies(eqn)
    taken = [_no_sum(x) for x in ins]
    written = write(body, taken, None, 0)
    return LoopPlan(tuple(taken), written.outs, (written,))


def _scan(eqn: JaxprEqn, ins: Sequence[Placed], write: Write) -> LoopPlan:
    consts, carried = scan_counts(eqn)
    (body,) = bodies(eqn)
    fixed = [_no_sum(x) for x in ins[:consts]]
    parts = [_inside(x) for x in ins[consts + carried :]]
    carry, written = _settled(
        ins[consts : consts + carried],
        lambda carry, outs: write(body, [*fixed, *carry, *parts], outs, carried),
    )
    stacks = [dataclasses.replace(x, axis=x.axis + 1) if isinstance(x, RowAxis) else x for x in written.outs[carried:]]
    taken = [dataclasses.replace(x, axis=x.axis + 1) if isinstance(x, RowAxis) else x for x in parts]
    return LoopPlan((*fixed, *carry, *taken), (*carry, *stacks), (written,))


def _while(eqn: JaxprEqn, ins: Sequence[Placed], write: Write) -> LoopPlan:
    of_cond, of_body = while_counts(eqn)
    condition, body = bodies(eqn)
    fixed = [_no_sum(x) for x in ins[: of_cond + of_body]]
    carry, written = _settled(
        ins[of_cond + of_body :], lambda carry, outs: write(body, [*fixed[of_cond:], *carry], outs, len(carry))
    )
    asked = write(condition, [*fixed[:of_cond], *carry], [SHARED], 0)
    return LoopPlan((*fixed, *carry), tuple(carry), (asked, written))


def _cond(eqn: JaxprEqn, ins: Sequence[Placed], write: Write) -> LoopPlan:
    operands = [_no_sum(x) for x in ins[1:]]
    natural = [write(body, operands, None, 0).outs for body in bodies(eqn)]
    outs = [_join(*of) for of in zip(*natural, strict=True)]
    written = [write(body, operands, outs, 0) for body in bodies(eqn)]
    return LoopPlan((SHARED, *operands), tuple(outs), tuple(written))


def _settled(
    start: Sequence[Placed], write: Callable[[Sequence[Placed], Outs], WrittenBody]
) -> tuple[list[Placed], WrittenBody]:
    """How what is carried lies in all turns, and the body that takes and gives it so."""
    carry, whole = list(start), [False] * len(start)
    while True:
        found = write(carry, None)
        made = found.outs[: len(carry)]
        closed_ = [isinstance(c, Partial) and not isinstance(m, Partial) for c, m in zip(carry, made, strict=True)]
        whole = [w or c for w, c in zip(whole, closed_, strict=True)]
        new = [_join(c, m) for c, m in zip(carry, made, strict=True)]
        new = [SHARED if w and not isinstance(x, RowAxis) else x for w, x in zip(whole, new, strict=True)]
        if new == carry:
            break
        carry = new
    if list(made) == carry:
        return carry, found
    return carry, write(carry, [*carry, *found.outs[len(carry) :]])


def _join(*layouts: Placed) -> Placed:
    """How a value lies that comes in several ways: cut where it is cut anywhere, else open where it is open."""
    cut = [x for x in layouts if isinstance(x, RowAxis)]
    return cut[0] if cut else PARTIAL if any(isinstance(x, Partial) for x in layouts) else SHARED


def _no_sum(x: Placed) -> Placed:
    return x if isinstance(x, RowAxis) else SHARED


def _inside(x: Placed) -> Placed:
    """What a turn has of a stack; one that is cut along the turns is whole."""
    return dataclasses.replace(x, axis=x.axis - 1) if isinstance(x, RowAxis) and x.axis else SHARED
