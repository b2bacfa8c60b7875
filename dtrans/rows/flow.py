"""One pass forward over equations: the layout of every value, and how each equation is carried out
on rows.

Loops and branches are looked into, with the layouts of what goes into them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dtrans._jax import (
    COND,
    LOOPS,
    Atom,
    JaxprEqn,
    Literal,
    Var,
    is_known,
    opened,
    origin_of,
    scope_of,
    warn_if_unknown,
)
from dtrans.ir.display import short_type
from dtrans.ir.interpret import ForwardAnalysis, enter
from dtrans.rows.layout import SHARED, Layout, RowAxis, Whole, join, leaves_of, sendable
from dtrans.rows.rules import Step, step_of


@dataclasses.dataclass(eq=False)
class Flow:
    """What one pass over equations found.

    Attributes:
      layouts: of every value that is not shared.
      steps: by position, how to carry out an equation on a block of rows.
      bound: the layouts that bind leaves.
      crosses: whether something in it has to go from one server to another.
      claims: beside whose rows each free state input was read.
    """

    layouts: dict[Var, Layout]
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    bound: list[Whole] = dataclasses.field(default_factory=list)
    crosses: bool = False
    claims: dict[Var, set[RowAxis]] = dataclasses.field(default_factory=dict)

    def layout(self, atom: Atom) -> Layout:
        """The layout of any value; literals are shared."""
        return SHARED if isinstance(atom, Literal) else self.layouts.get(atom, SHARED)


class _Pass:
    """One pass forward.

    Args:
      whole: leaves that are on one server whatever happens.
      free: state inputs of which it is not known yet what they are.
      within: the loop or branch whose body this is.
    """

    several = False  # whether a loop may be on rows of several leaves, each on its own

    def __init__(
        self, whole: Collection[str], free: Collection[Var] = (), within: JaxprEqn | None = None
    ) -> None:
        self.whole = whole
        self.free = free
        self.within = within

    def over(self, eqns: Iterable[JaxprEqn], start: Mapping[Var, Layout]) -> Flow:
        """Follow equations, from the layouts of what they read."""
        flow = Flow(dict(start))
        for i, eqn in enumerate(eqns):
            ins = [flow.layout(a) for a in eqn.invars]
            if all(x is SHARED for x in ins) and not self._begins(eqn):
                continue
            step = self._step(flow, eqn, ins)
            flow.steps[i] = step
            flow.layouts.update(
                (v, x) for v, x in zip(eqn.outvars, step.outs, strict=True) if x is not SHARED
            )
            flow.bound += [
                x for x in step.outs if isinstance(x, Whole) and (x.reason or len(x.leaves) > 1)
            ]
            if not self.free or all(x is SHARED or sendable(x) for x in ins):
                continue
            for a, x, row in zip(eqn.invars, ins, step.operands, strict=True):
                if x is SHARED and isinstance(a, Var) and a in self.free and a.aval.ndim:
                    flow.claims.setdefault(a, set()).update([row] if row else _NO_ROWS)
        return flow

    def _begins(self, eqn: JaxprEqn) -> bool:
        """Whether an equation has rows though nothing that it reads has."""
        return False

    def _step(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        """What one equation does, some of its operands not being shared."""
        stuck = [
            x
            for a, x in zip(eqn.invars, ins, strict=True)
            if isinstance(x, Whole) and x.reason and a.aval.ndim
        ]
        rows = [x for x in ins if isinstance(x, RowAxis)]
        leaves = leaves_of([*stuck, *rows])
        name = eqn.primitive.name
        if name == COND or (leaves and name in LOOPS):
            # what comes from other leaves, and can be sent, is there before the first turn
            sent = [
                SHARED if leaves and isinstance(x, Whole) and not x.leaves <= leaves else x
                for x in ins
            ]
            flow.crosses |= sent != list(ins)
            return self._control(flow, eqn, sent)
        if stuck or len(leaves) > 1:
            out: Layout = Whole(
                leaves, stuck[0].reason if stuck else self._reason(eqn, ins, "mixes leaves")
            )
        elif rows:
            step = step_of(eqn, [x if isinstance(x, RowAxis) else SHARED for x in ins])
            flow.crosses |= any(isinstance(x, Whole) and x.leaves != leaves for x in ins)
            if step is not None and not step.reduce:
                return step
            if step is not None and not leaves <= set(self.whole):
                flow.crosses = True
                return step
            if step is None:
                warn_if_unknown(
                    eqn, f"is treated as mixing rows: {', '.join(sorted(leaves))} is whole"
                )
            # what a whole leaf is reduced to is small, and can be sent
            out = Whole(leaves, None if step else self._reason(eqn, ins, "mixes rows"))
        else:
            homes = {x.leaves for x in ins if isinstance(x, Whole)}
            out = Whole(homes.pop()) if len(homes) == 1 else SHARED
        flow.crosses |= any(
            isinstance(x, Whole) and isinstance(out, Whole) and not x.leaves <= out.leaves
            for x in ins
        )
        flow.crosses |= out is SHARED
        return Step((None,) * len(ins), (out,) * len(eqn.outvars))

    # -- loops and branches ----------------------------------------------------------------------

    def _inside(self, eqn: JaxprEqn) -> _Pass:
        """A pass over the body of an equation."""
        return _Pass(self.whole, within=self.within or eqn)

    def _control(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        """Return how an equation with bodies is carried out on rows: as its bodies are.

        A loop on the rows of one leaf needs nothing from other servers; any other loop binds.
        """
        rows_are_turns = []

        def turn(stack: Layout) -> Layout:
            moved = _moved(stack, -1)
            rows_are_turns.append(moved is None)
            return moved or SHARED

        def run(number: int, body: Any, layouts: Sequence[Layout]) -> tuple[Flow, list[Layout]]:
            inner = opened(body)
            inside = self._inside(eqn).over(
                inner.eqns, dict(zip(inner.invars, layouts, strict=True))
            )
            return inside, [inside.layout(a) for a in inner.outvars]

        layouts = ForwardAnalysis[Layout](
            lambda a, b: join(a, b, eqn.primitive.name),
            rule=lambda eqn, ins: None,
            default=lambda aval, value: SHARED,
            turn=turn,
            stack=lambda x: _moved(x, 1) or SHARED,
        )
        entered = enter(layouts, eqn, ins, run)
        bodies = tuple(entered.bodies.values())
        leaves = leaves_of([*entered.operands, *entered.outs])
        if eqn.primitive.name == COND:
            self._note_branches(flow, ins[0], entered.outs, bodies)
        elif any(rows_are_turns):
            return self._bound(eqn, ins, "goes through the rows")
        elif entered.decision not in (None, SHARED):
            return self._bound(eqn, entered.operands, "goes on as rows tell it", bodies)
        elif any(b.bound for b in bodies) or (len(leaves) > 1 and not self.several):
            return self._bound(eqn, entered.operands, "mixes leaves", bodies)
        elif any(b.crosses for b in bodies) and not leaves <= set(self.whole):
            return self._bound(eqn, entered.operands, "reduces over rows in each turn", bodies)
        operands = tuple(x if isinstance(x, RowAxis) else None for x in entered.operands)
        return Step(operands, tuple(entered.outs), bodies=bodies, ends=tuple(entered.ends.values()))

    def _note_branches(
        self, flow: Flow, which: Layout, outs: Sequence[Layout], branches: Sequence[Flow]
    ) -> None:
        """Note what branches bind and cross. A branch that reads several homes is split later."""
        for inside in branches:
            flow.bound += inside.bound
            flow.crosses |= inside.crosses
        if isinstance(which, Whole):
            flow.crosses |= any(leaves_of([x]) - which.leaves for x in outs) or SHARED in outs

    def _bound(
        self, eqn: JaxprEqn, ins: Sequence[Layout], what: str, bodies: Sequence[Flow] = ()
    ) -> Step:
        """An equation that binds all that it reads."""
        reasons = [x.reason for b in bodies for x in b.bound if x.reason]
        reasons += [x.reason for x in ins if isinstance(x, Whole) and x.reason]
        out = Whole(leaves_of(ins), (*reasons, self._reason(eqn, ins, what))[0])
        return Step((None,) * len(ins), (out,) * len(eqn.outvars))

    def _reason(self, eqn: JaxprEqn, ins: Sequence[Layout], what: str) -> str:
        """`dot_general mixes rows of f32[5,5] (optax.contrib.scale_by_muon)`."""
        operand = next(
            (a for a, x in zip(eqn.invars, ins, strict=True) if isinstance(x, RowAxis)), None
        )
        of = f" of {short_type(operand.aval)}" if operand else ""
        where = origin_of(eqn) or (origin_of(self.within) if self.within else "") or scope_of(eqn)
        name = eqn.primitive.name + ("" if is_known(eqn) else ", which dtrans does not know,")
        return f"{name} {what}{of}" + (f" ({where})" if where else "")


_NO_ROWS = frozenset({RowAxis("", 0), RowAxis("", 1)})  # more than one claim: it is read whole


def _moved(x: Layout, by: int) -> Layout | None:
    """The layout of one turn's slice of a scanned value (-1), or of all of it (+1); None: its rows
    are the turns."""
    if not isinstance(x, RowAxis):
        return x
    return dataclasses.replace(x, axis=x.axis + by) if x.axis + by >= 0 else None
