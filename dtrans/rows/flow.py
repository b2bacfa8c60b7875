"""One forward pass over equations: the layout of every value, and how equations run on rows.

The pass enters loops and branches with the layouts of their operands.
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
from dtrans.rows.layout import SHARED, Colocated, Layout, RowAxis, join, leaves_of, sendable
from dtrans.rows.rules import Step, step_of


@dataclasses.dataclass(eq=False)
class Flow:
    """Result of one pass over equations.

    Attributes:
      layouts: layout of every value that is not shared.
      steps: by position, how an equation runs on a block of rows.
      bound: layouts that bind leaves.
      crosses: True if values must be sent between servers.
      claims: for each free state input, the rows that it was read with.
    """

    layouts: dict[Var, Layout]
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    bound: list[Colocated] = dataclasses.field(default_factory=list)
    crosses: bool = False
    claims: dict[Var, set[RowAxis]] = dataclasses.field(default_factory=dict)

    def layout(self, atom: Atom) -> Layout:
        """Return the layout of a value; literals are shared."""
        return SHARED if isinstance(atom, Literal) else self.layouts.get(atom, SHARED)


class FlowPass:
    """One forward pass.

    Args:
      unsliced: leaves that are on one server in any case.
      free: state inputs whose layouts are not known yet.
      within: the loop or branch that has this body.
    """

    several = False  # True if a loop may run on rows of several leaves independently

    def __init__(
        self, unsliced: Collection[str], free: Collection[Var] = (), within: JaxprEqn | None = None
    ) -> None:
        self.unsliced = unsliced
        self.free = free
        self.within = within

    def over(self, eqns: Iterable[JaxprEqn], start: Mapping[Var, Layout]) -> Flow:
        """Follow equations, from the layouts of their inputs."""
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
                x for x in step.outs if isinstance(x, Colocated) and (x.reason or len(x.leaves) > 1)
            ]
            if not self.free or all(x is SHARED or sendable(x) for x in ins):
                continue
            for a, x, row in zip(eqn.invars, ins, step.operands, strict=True):
                if x is SHARED and isinstance(a, Var) and a in self.free and a.aval.ndim:
                    flow.claims.setdefault(a, set()).update([row] if row else _NO_ROWS)
        return flow

    def _begins(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation makes rows from operands without rows."""
        return False

    def _step(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        """Return how an equation runs, if some operand is not shared."""
        stuck = [
            x
            for a, x in zip(eqn.invars, ins, strict=True)
            if isinstance(x, Colocated) and x.reason and a.aval.ndim
        ]
        rows = [x for x in ins if isinstance(x, RowAxis)]
        leaves = leaves_of([*stuck, *rows])
        name = eqn.primitive.name
        if name == COND or (leaves and name in LOOPS):
            # sendable values of other leaves arrive before the first iteration
            sent = [
                SHARED if leaves and isinstance(x, Colocated) and not x.leaves <= leaves else x
                for x in ins
            ]
            flow.crosses |= sent != list(ins)
            return self._control(flow, eqn, sent)
        if stuck or len(leaves) > 1:
            out: Layout = Colocated(
                leaves, stuck[0].reason if stuck else self._reason(eqn, ins, "mixes leaves")
            )
        elif rows:
            step = step_of(eqn, [x if isinstance(x, RowAxis) else SHARED for x in ins])
            flow.crosses |= any(isinstance(x, Colocated) and x.leaves != leaves for x in ins)
            if step is not None and not step.reduce:
                return step
            if step is not None and not leaves <= set(self.unsliced):
                flow.crosses = True
                return step
            if step is None:
                warn_if_unknown(
                    eqn, f"is treated as mixing rows: {', '.join(sorted(leaves))} is not sliced"
                )
            # a reduction over an unsliced leaf is small, and can be sent
            out = Colocated(leaves, None if step else self._reason(eqn, ins, "mixes rows"))
        else:
            homes = {x.leaves for x in ins if isinstance(x, Colocated)}
            out = Colocated(homes.pop()) if len(homes) == 1 else SHARED
        flow.crosses |= any(
            isinstance(x, Colocated) and isinstance(out, Colocated) and not x.leaves <= out.leaves
            for x in ins
        )
        flow.crosses |= out is SHARED
        return Step((None,) * len(ins), (out,) * len(eqn.outvars))

    # -- loops and branches ----------------------------------------------------------------------

    def _inside(self, eqn: JaxprEqn) -> FlowPass:
        """Return the pass for the body of an equation."""
        return FlowPass(self.unsliced, within=self.within or eqn)

    def _control(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        """Return how an equation with bodies runs on rows, from its bodies.

        A loop on the rows of one leaf needs no value of other servers; any other loop binds.
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
            return self._bound(eqn, entered.operands, "ends by a condition on rows", bodies)
        elif any(b.bound for b in bodies) or (len(leaves) > 1 and not self.several):
            return self._bound(eqn, entered.operands, "mixes leaves", bodies)
        elif any(b.crosses for b in bodies) and not leaves <= set(self.unsliced):
            return self._bound(eqn, entered.operands, "reduces over rows in each turn", bodies)
        operands = tuple(x if isinstance(x, RowAxis) else None for x in entered.operands)
        return Step(operands, tuple(entered.outs), bodies=bodies, ends=tuple(entered.ends.values()))

    def _note_branches(
        self, flow: Flow, which: Layout, outs: Sequence[Layout], branches: Sequence[Flow]
    ) -> None:
        """Record the leaves that branches bind, and whether they send values between servers.

        A branch that reads several homes is split later.
        """
        for inside in branches:
            flow.bound += inside.bound
            flow.crosses |= inside.crosses
        if isinstance(which, Colocated):
            flow.crosses |= any(leaves_of([x]) - which.leaves for x in outs) or SHARED in outs

    def _bound(
        self, eqn: JaxprEqn, ins: Sequence[Layout], what: str, bodies: Sequence[Flow] = ()
    ) -> Step:
        """Return the step of an equation that binds all its operands."""
        reasons = [x.reason for b in bodies for x in b.bound if x.reason]
        reasons += [x.reason for x in ins if isinstance(x, Colocated) and x.reason]
        out = Colocated(leaves_of(ins), (*reasons, self._reason(eqn, ins, what))[0])
        return Step((None,) * len(ins), (out,) * len(eqn.outvars))

    def _reason(self, eqn: JaxprEqn, ins: Sequence[Layout], what: str) -> str:
        """Describe an equation: `dot_general mixes rows of f32[5,5]
        (optax.contrib.scale_by_muon)`."""
        operand = next(
            (a for a, x in zip(eqn.invars, ins, strict=True) if isinstance(x, RowAxis)), None
        )
        of = f" of {short_type(operand.aval)}" if operand else ""
        where = origin_of(eqn) or (origin_of(self.within) if self.within else "") or scope_of(eqn)
        name = eqn.primitive.name + ("" if is_known(eqn) else ", which dtrans does not know,")
        return f"{name} {what}{of}" + (f" ({where})" if where else "")


_NO_ROWS = frozenset({RowAxis("", 0), RowAxis("", 1)})  # two claims: it is read in full


def _moved(x: Layout, by: int) -> Layout | None:
    """Return the layout of an iteration's slice (-1) or of the stack (+1).

    None if the iterations are the rows.
    """
    if not isinstance(x, RowAxis):
        return x
    return dataclasses.replace(x, axis=x.axis + by) if x.axis + by >= 0 else None
