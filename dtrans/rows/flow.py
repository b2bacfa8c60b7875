"""Forward pass over a program's equations: finds the layout of each value.

A layout (`dtrans.rows.layout`) states the relation of a value to the rows of parameters. For each
equation, the pass also records a `Step`: the form in which the equation runs on only some rows. The
pass enters the bodies of loops and branches.
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
from dtrans.rows.layout import (
    SHARED,
    Colocated,
    Layout,
    RowAxis,
    all_shared,
    binding,
    first_reason,
    join,
    leaves_of,
    row_axes,
    rows_or_none,
    rows_or_shared,
    sendable,
)
from dtrans.rows.rules import Step, step_of


@dataclasses.dataclass(eq=False)
class Flow:
    """Result of the forward pass over some equations: relates their values to rows of parameters.

    Each server stores a block (some rows) of each parameter and of its optimizer state. An equation
    can run on a block alone if the rows do not depend on each other.

    Attributes:
      layouts: layout of each value that is not the same on all servers.
      steps: index of an equation -> how the equation runs on a block of rows. Equations without
        rows have no entry.
      bound: layouts with parameters that one server must store in full.
      crosses: True if servers must communicate to run the equations, e.g. for a norm over all rows.
      claims: for each state input with an unknown layout, the layouts of the rows that equations
        combine with this input.
    """

    layouts: dict[Var, Layout]
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    bound: list[Colocated] = dataclasses.field(default_factory=list)
    crosses: bool = False
    claims: dict[Var, set[RowAxis]] = dataclasses.field(default_factory=dict)

    def layout(self, atom: Atom) -> Layout:
        """Return the layout of a value. Literals are `SHARED`: every server can compute them."""
        if isinstance(atom, Literal):
            return SHARED
        return self.layouts.get(atom, SHARED)


class FlowPass:
    """Forward pass over a program, or over the body of a loop: follows rows from inputs to outputs.

    Args:
      unsliced: names of parameters that one server stores in full, even if their rows are
        independent.
      free: inputs of the optimizer state with layouts that are not known yet.
      within: the outermost loop or branch that contains the equations, to describe their place in
        the user's code; None if there is none.
    """

    several = False  # True if a loop may run on rows of several leaves independently

    def __init__(
        self, unsliced: Collection[str], free: Collection[Var] = (), within: JaxprEqn | None = None
    ) -> None:
        self.unsliced = unsliced
        self.free = free
        self.within = within

    def over(self, eqns: Iterable[JaxprEqn], start: Mapping[Var, Layout]) -> Flow:
        """Find the layouts of the values that some equations compute.

        Args:
          eqns: the equations, in order.
          start: layout of each input that has rows of a parameter.

        Returns:
          The layouts, and the way in which each equation runs on a block (the rows of one server).
        """
        flow = Flow(dict(start))
        for i, eqn in enumerate(eqns):
            ins = [flow.layout(a) for a in eqn.invars]
            if all_shared(ins) and not self._begins(eqn):
                continue
            step = self._step(flow, eqn, ins)
            flow.steps[i] = step
            for v, x in zip(eqn.outvars, step.outs, strict=True):
                if x is not SHARED:
                    flow.layouts[v] = x
            flow.bound += binding(step.outs)
            if not self.free or all(x is SHARED or sendable(x) for x in ins):
                continue
            for a, x, row in zip(eqn.invars, ins, step.operands, strict=True):
                if x is SHARED and isinstance(a, Var) and a in self.free and a.aval.ndim:
                    flow.claims.setdefault(a, set()).update([row] if row else _NO_ROWS)
        return flow

    def _begins(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation's outputs have rows of a parameter, although no operand has.

        In this class there is no such equation. A subclass may name some, such as lookups of rows.
        """
        return False

    def _step(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        """Return the way in which one equation runs on a block (the rows of one server).

        If the equation mixes rows, its outputs get a layout that binds its parameters to one
        server.

        Args:
          flow: results for the equations before it. If servers must communicate, this method sets
            `flow.crosses`.
          eqn: the equation. At least one operand has rows, or depends on rows.
          ins: layouts of the operands.
        """
        stuck = []
        for a, x in zip(eqn.invars, ins, strict=True):
            if isinstance(x, Colocated) and x.reason and a.aval.ndim:
                stuck.append(x)
        rows = row_axes(ins)
        leaves = leaves_of([*stuck, *rows])
        name = eqn.primitive.name
        if name == COND or (leaves and name in LOOPS):
            # values of other servers count as shared: these servers send them before the loop or
            # branch
            sent = list(ins)
            for i, x in enumerate(ins):
                if leaves and isinstance(x, Colocated) and not x.leaves <= leaves:
                    sent[i] = SHARED
            flow.crosses |= sent != list(ins)
            return self._control(flow, eqn, sent)
        if stuck or len(leaves) > 1:
            reason = stuck[0].reason if stuck else self._reason(eqn, ins, "mixes leaves")
            out: Layout = Colocated(leaves, reason)
        elif rows:
            step = step_of(eqn, list(map(rows_or_shared, ins)))
            flow.crosses |= any(isinstance(x, Colocated) and x.leaves != leaves for x in ins)
            if step is not None and not step.reduce:
                return step
            if step is not None and not leaves <= set(self.unsliced):
                flow.crosses = True
                return step
            if step is None:
                warn_if_unknown(
                    eqn, f"is assumed to mix rows, so {', '.join(sorted(leaves))} is not sliced"
                )
            # the result of a reduction is small, and can be sent to other servers
            out = Colocated(leaves, None if step else self._reason(eqn, ins, "mixes rows"))
        else:
            homes = {x.leaves for x in ins if isinstance(x, Colocated)}
            out = Colocated(homes.pop()) if len(homes) == 1 else SHARED
        for x in ins:
            if isinstance(x, Colocated) and isinstance(out, Colocated):
                flow.crosses |= not x.leaves <= out.leaves
        flow.crosses |= out is SHARED
        return Step((None,) * len(ins), (out,) * len(eqn.outvars))

    # -- loops and branches ----------------------------------------------------------------------

    def _inside(self, eqn: JaxprEqn) -> FlowPass:
        """Return the pass for the body of a loop or branch `eqn`."""
        return FlowPass(self.unsliced, within=self.within or eqn)

    def _control(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        """Return how a loop or branch runs on a block (the rows of one server).

        A loop can run on a block if it uses rows of one parameter and does not communicate. Any
        other loop binds its parameters: one server must store them in full. A branch may combine
        several parameters; `dtrans.rows.normalize` splits it later.
        """
        rows_are_turns = []

        def turn(stack: Layout) -> Layout:
            moved = _moved(stack, -1)
            rows_are_turns.append(moved is None)
            return moved or SHARED

        def run(number: int, body: Any, layouts: Sequence[Layout]) -> tuple[Flow, list[Layout]]:
            inner = opened(body)
            start = dict(zip(inner.invars, layouts, strict=True))
            inside = self._inside(eqn).over(inner.eqns, start)
            return inside, [inside.layout(a) for a in inner.outvars]

        layouts = ForwardAnalysis[Layout](
            lambda a, b: join(a, b, eqn.primitive.name),
            rule=lambda eqn, ins: None,
            default=lambda aval, value: SHARED,
            slice_fact=turn,
            stack=lambda x: _moved(x, 1) or SHARED,
        )
        entered = enter(layouts, eqn, ins, run)
        bodies = tuple(entered.bodies.values())
        leaves = leaves_of([*entered.operands, *entered.outs])
        if eqn.primitive.name == COND:
            self._note_branches(flow, ins[0], entered.outs, bodies)
        elif any(rows_are_turns):
            return self._bound(eqn, ins, "iterates over the rows")
        elif entered.decision not in (None, SHARED):
            return self._bound(
                eqn, entered.operands, "ends by a condition that depends on rows", bodies
            )
        elif any(b.bound for b in bodies) or (len(leaves) > 1 and not self.several):
            return self._bound(eqn, entered.operands, "mixes leaves", bodies)
        elif any(b.crosses for b in bodies) and not leaves <= set(self.unsliced):
            return self._bound(eqn, entered.operands, "reduces over rows in each iteration", bodies)
        operands = tuple(map(rows_or_none, entered.operands))
        return Step(
            operands, tuple(entered.outs), bodies=bodies, ends=tuple(entered.body_outs.values())
        )

    def _note_branches(
        self, flow: Flow, which: Layout, outs: Sequence[Layout], branches: Sequence[Flow]
    ) -> None:
        """Record in `flow` the requirements of a `cond`: those of all its branches.

        A branch may require that one server stores parameters in full, or that servers communicate.
        `dtrans.rows.normalize` later splits a `cond` that combines values of several servers.
        """
        for inside in branches:
            flow.bound += inside.bound
            flow.crosses |= inside.crosses
        if isinstance(which, Colocated):
            flow.crosses |= any(leaves_of([x]) - which.leaves for x in outs) or SHARED in outs

    def _bound(
        self, eqn: JaxprEqn, ins: Sequence[Layout], what: str, bodies: Sequence[Flow] = ()
    ) -> Step:
        """Return the result for an equation that mixes rows: one server must store its parameters.

        Args:
          eqn: the equation.
          ins: layouts of its operands.
          what: the reason for the report of the plan, such as "mixes rows".
          bodies: for a loop, the results for its bodies. If they have a reason, the report shows
            this reason instead of `what`, because it names an equation in the loop.
        """
        layouts: list[Layout] = []
        for body in bodies:
            layouts += body.bound
        reason = first_reason([*layouts, *ins]) or self._reason(eqn, ins, what)
        out = Colocated(leaves_of(ins), reason)
        return Step((None,) * len(ins), (out,) * len(eqn.outvars))

    def _reason(self, eqn: JaxprEqn, ins: Sequence[Layout], what: str) -> str:
        """Return a description of an equation that mixes rows, for the report of the plan.

        An example is `dot_general mixes rows of f32[5,5] (optax.contrib.scale_by_muon)`.
        """
        text = eqn.primitive.name
        if not is_known(eqn):
            text += ", which dtrans does not know,"
        text += f" {what}"
        for a, x in zip(eqn.invars, ins, strict=True):
            if isinstance(x, RowAxis):
                text += f" of {short_type(a.aval)}"
                break
        where = origin_of(eqn)
        if not where and self.within is not None:
            where = origin_of(self.within)
        where = where or scope_of(eqn)
        if where:
            return f"{text} ({where})"
        return text


# Two different layouts, recorded for an input that is read in full: only an input with a single
# layout is sliced.
_NO_ROWS = frozenset({RowAxis("", 0), RowAxis("", 1)})


def _moved(x: Layout, by: int) -> Layout | None:
    """Convert the layout of a scanned array to the layout of one iteration's slice, or back.

    `lax.scan` removes dimension 0 of each scanned array. So rows along dimension 1 of the array are
    along dimension 0 of the slice that an iteration gets.

    Args:
      x: layout of the scanned array (for `by=-1`), or of an iteration's output (for `by=1`).
      by: -1 from the array to its slice; 1 from an output to the array in which the scan stacks it.

    Returns:
      The layout; None if the scan iterates over the rows themselves.
    """
    if not isinstance(x, RowAxis):
        return x
    if x.axis + by < 0:
        return None
    return dataclasses.replace(x, axis=x.axis + by)
