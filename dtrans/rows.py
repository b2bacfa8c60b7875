"""Row analysis: what an optimizer does to the rows of parameters, and which leaves it lets us slice along dim 0.

One pass forward over the optimize half of a step gives every value a layout (`dtrans.layouts`) by the rules of the
primitives (`dtrans.rules`). Elementwise equations keep rows; a reduction over rows becomes one part for each block
and an `all_reduce` of the parts, whose result is shared; anything else that touches rows binds the leaf, which must
then live whole on one server, with the equation that did it as the reason. Leaves that meet so are a `Group`.
Loops and branches are looked into, with the layouts of what goes into them.

The layouts of state inputs are not guessed from names or shapes: a state input starts as `Shared`, and takes the
layout of the output of its own name until nothing changes (the layouts form a finite lattice and only go up,
two or three passes do it).

Applying an optimizer to slices without asking is wrong by 1e-2 to 1e-1 for clipping by global norm, LAMB, LARS or
Adafactor, silently. What is not understood here costs balance, never correctness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from dtrans._jax import Atom, JaxprEqn, Literal, Var, opened, origin_of, scan_counts, scope_of, while_counts
from dtrans.branches import inline_bodies, normalise
from dtrans.cut import GRAD, OptimizeHalf
from dtrans.layouts import SHARED, Layout, Rows, Whole, join, leaves_of, sendable
from dtrans.listing import short_type
from dtrans.rewrite import eliminate_dead
from dtrans.rules import Step, step_of


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that must live whole on one server, and the first equation that made it so (None for a 0-d leaf)."""

    leaves: tuple[str, ...]
    reason: str | None


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
    claims: dict[Var, set[Rows]] = dataclasses.field(default_factory=dict)

    def layout(self, atom: Atom) -> Layout:
        """The layout of any value; literals are shared."""
        return SHARED if isinstance(atom, Literal) else self.layouts.get(atom, SHARED)


@dataclasses.dataclass(frozen=True, eq=False)
class RowAnalysis:
    """What `analyse` found.

    Attributes:
      half: the optimize half that was analysed: the one that was given, with branches taken apart.
      flow: the layout of every value in it, and how equations are carried out on rows.
      groups: leaf to its group, for the leaves that cannot be sliced.
      params: the leaves, in leaf order.
      axes: the dimension whose entries are the rows of a leaf, where that is not the first.
    """

    half: OptimizeHalf
    flow: Flow
    groups: Mapping[str, Group]
    params: tuple[str, ...]
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def layout(self, atom: Atom) -> Layout:
        """The layout of any value."""
        return self.flow.layout(atom)

    @cached_property
    def inputs(self) -> dict[str, Var]:
        """Input name to variable."""
        return dict(zip(self.half.in_names, self.half.jaxpr.jaxpr.invars, strict=True))

    @cached_property
    def outputs(self) -> dict[str, Atom]:
        """Output name to value."""
        return dict(zip(self.half.out_names, self.half.jaxpr.jaxpr.outvars, strict=True))

    def home(self, layout: Layout) -> str | None:
        """The leaf, or the first leaf of the group, that a value with this layout lives with; None if it is shared."""
        return None if layout is SHARED else self.home_of(min(leaves_of([layout])))

    def home_of(self, leaf: str) -> str:
        """The leaf, or the first leaf of the group that it is in."""
        return self.groups[leaf].leaves[0] if leaf in self.groups else leaf

    def placed(self, whole: Collection[str]) -> RowAnalysis:
        """The same, once it is known which leaves are on one server: what they are reduced to is there already."""
        known = {*whole, *self.groups}
        half, roots = self.half, {leaf: g.leaves[0] for leaf, g in self.groups.items()}
        while True:
            flow, bound = _settled(half, self.params, known, self.axes)
            groups = _groups(bound, self.params)
            # fewer may be bound: what a leaf that is whole anyway is reduced to in a loop, say
            assert all(set(g.leaves) <= set(self.groups[n].leaves) for n, g in groups.items() if n in self.groups)
            assert groups.keys() <= known, f"{sorted(groups.keys() - known)} were cut, and cannot be"
            simpler = normalise(half.jaxpr, flow, roots)
            if simpler is None:
                return dataclasses.replace(self, half=half, flow=flow)
            half = dataclasses.replace(half, jaxpr=eliminate_dead(simpler))


def analyse(half: OptimizeHalf, params: Sequence[str], axes: Mapping[str, int] | None = None) -> RowAnalysis:
    """Find which of `params` the optimize half lets us slice. Time is linear in the number of equations.

    Args:
      axes: the dimension whose entries are the rows of a leaf, where that is not the first.
    """
    axes = axes or {}
    half = dataclasses.replace(half, jaxpr=inline_bodies(half.jaxpr))
    whole: set[str] = set()
    bound: list[Whole] = []
    while True:
        flow, found = _settled(half, params, whole, axes)
        groups = _groups([*bound, *found], params)
        roots = {leaf: g.leaves[0] for leaf, g in groups.items()}
        simpler = normalise(half.jaxpr, flow, roots)
        if simpler is not None:
            half = dataclasses.replace(half, jaxpr=eliminate_dead(simpler))
        elif groups.keys() <= whole:
            return RowAnalysis(half, flow, groups, tuple(params), axes)
        else:  # again: what these leaves are reduced to, even in a loop, is where they are
            bound += found
            whole |= groups.keys()


def _settled(
    half: OptimizeHalf, params: Sequence[str], whole: Collection[str], axes: Mapping[str, int]
) -> tuple[Flow, list[Whole]]:
    """The layouts once those of state inputs have settled, and everything that binds leaves."""
    inner = half.jaxpr.jaxpr
    inputs = dict(zip(half.in_names, inner.invars, strict=True))
    outputs = dict(zip(half.out_names, inner.outvars, strict=True))
    start: dict[Var, Layout] = {}
    for name in params:
        rows = Rows(name, axes.get(name, 0))
        var = inputs.get(name, inputs.get(name + GRAD))
        own: Layout = rows if var is not None and var.aval.ndim else Whole(frozenset([name]))
        if name in inputs and name in outputs:
            start[inputs[name]] = own
        if name + GRAD in inputs:
            start[inputs[name + GRAD]] = own
    own_names = set(params)
    state = {n: v for n, v in inputs.items() if n in outputs and n not in own_names}
    free = set(state.values())

    while True:
        flow = _Pass(whole, free).over(inner.eqns, start)
        changed = False
        for name, var in state.items():
            now, out = start.get(var, SHARED), outputs[name]
            new = join(now, flow.layout(out), name)
            if new is SHARED and out is var and len(flow.claims.get(var, ())) == 1:
                # never changes, and is only ever read beside one leaf's rows: it is sliced as they are
                (new,) = flow.claims[var]
            if new != now:
                start[var] = new
                changed = True
        if not changed:
            break

    bound = list(flow.bound)
    for name in params:
        layout = flow.layout(outputs[name]) if name in outputs else SHARED
        if isinstance(layout, Whole) and name not in layout.leaves and not sendable(layout):
            bound.append(Whole(layout.leaves | {name}, layout.reason))
        elif isinstance(layout, Rows) and layout != Rows(name, axes.get(name, 0)):
            bound.append(Whole(frozenset({name, layout.leaf}), f"new {name} is made of rows of {layout.leaf}"))
    bound += [x for x in start.values() if isinstance(x, Whole) and (x.reason or len(x.leaves) > 1)]
    return flow, bound


class _Pass:
    """One pass forward.

    Args:
      whole: leaves that are on one server whatever happens.
      free: state inputs of which it is not known yet what they are.
      within: the loop or branch whose body this is.
    """

    def __init__(self, whole: Collection[str], free: Collection[Var] = (), within: JaxprEqn | None = None) -> None:
        self.whole = whole
        self.free = free
        self.within = within

    def over(self, eqns: Iterable[JaxprEqn], start: Mapping[Var, Layout]) -> Flow:
        """Follow equations, from the layouts of what they read."""
        flow = Flow(dict(start))
        for i, eqn in enumerate(eqns):
            ins = [flow.layout(a) for a in eqn.invars]
            if all(x is SHARED for x in ins):
                continue
            step = self._step(flow, eqn, ins)
            flow.steps[i] = step
            flow.layouts.update((v, x) for v, x in zip(eqn.outvars, step.outs, strict=True) if x is not SHARED)
            flow.bound += [x for x in step.outs if isinstance(x, Whole) and (x.reason or len(x.leaves) > 1)]
            if not self.free or all(x is SHARED or sendable(x) for x in ins):
                continue
            for a, x, row in zip(eqn.invars, ins, step.operands, strict=True):
                if x is SHARED and isinstance(a, Var) and a in self.free and a.aval.ndim:
                    flow.claims.setdefault(a, set()).update([row] if row else _NO_ROWS)
        return flow

    def _step(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        """What one equation does, some of its operands not being shared."""
        stuck = [x for a, x in zip(eqn.invars, ins, strict=True) if isinstance(x, Whole) and x.reason and a.aval.ndim]
        rows = [x for x in ins if isinstance(x, Rows)]
        leaves = leaves_of([*stuck, *rows])
        name = eqn.primitive.name
        if name == "cond" or (leaves and name in _LOOPS):
            # what comes from other leaves, and can be sent, is there before the first turn
            sent = [SHARED if leaves and isinstance(x, Whole) and not x.leaves <= leaves else x for x in ins]
            flow.crosses |= sent != list(ins)
            return _LOOPS[name](self, flow, eqn, sent)
        if stuck or len(leaves) > 1:
            out: Layout = Whole(leaves, stuck[0].reason if stuck else self._reason(eqn, ins, "mixes leaves"))
        elif rows:
            step = step_of(eqn, [x if isinstance(x, Rows) else SHARED for x in ins])
            flow.crosses |= any(isinstance(x, Whole) and x.leaves != leaves for x in ins)
            if step is not None and not step.reduce:
                return step
            if step is not None and not leaves <= set(self.whole):
                flow.crosses = True
                return step
            # what a whole leaf is reduced to is small, and can be sent
            out = Whole(leaves, None if step else self._reason(eqn, ins, "mixes rows"))
        else:
            homes = {x.leaves for x in ins if isinstance(x, Whole)}
            out = Whole(homes.pop()) if len(homes) == 1 else SHARED
        flow.crosses |= any(isinstance(x, Whole) and isinstance(out, Whole) and not x.leaves <= out.leaves for x in ins)
        flow.crosses |= out is SHARED
        return Step((None,) * len(ins), (out,) * len(eqn.outvars))

    # -- loops and branches ----------------------------------------------------------------------

    def _body(self, eqn: JaxprEqn, jaxpr: Any, ins: Sequence[Layout]) -> tuple[Flow, list[Layout]]:
        """One pass over a body, and the layouts of its outputs."""
        inner = opened(jaxpr)
        inside = _Pass(self.whole, within=self.within or eqn).over(
            inner.eqns, dict(zip(inner.invars, ins, strict=True))
        )
        return inside, [inside.layout(a) for a in inner.outvars]

    def _cond(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        """Each output is what it is in any branch. Who reads several homes is taken apart later (`dtrans.branches`)."""
        which, *operands = ins
        bodies: list[Flow] = []
        outs: list[Layout] = [SHARED] * len(eqn.outvars)
        for branch in eqn.params["branches"]:
            inside, made = self._body(eqn, branch, operands)
            bodies.append(inside)
            outs = [join(a, b, "cond") for a, b in zip(outs, made, strict=True)]
            flow.bound += inside.bound
            flow.crosses |= inside.crosses
        if isinstance(which, Whole):
            flow.crosses |= any(leaves_of([x]) - which.leaves for x in outs) or SHARED in outs
        return Step(tuple(x if isinstance(x, Rows) else None for x in ins), tuple(outs), bodies=tuple(bodies))

    def _scan(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        consts, carry = scan_counts(eqn)
        inside = [_moved(x, -1) if i >= consts + carry else x for i, x in enumerate(ins)]
        if None in inside:
            return self._bound(eqn, ins, "goes through the rows")
        given: list[Layout] = [x for x in inside if x is not None]
        while True:
            body, outs = self._body(eqn, eqn.params["jaxpr"], given)
            joined = [join(a, b, "scan") for a, b in zip(given[consts : consts + carry], outs, strict=False)]
            if joined == given[consts : consts + carry]:
                break
            given[consts : consts + carry] = joined
        made = [*joined, *(_moved(x, 1) or SHARED for x in outs[carry:])]
        operands = [_moved(x, 1) or SHARED if i >= consts + carry else x for i, x in enumerate(given)]
        return self._loop(flow, eqn, ins, operands, made, (body,))

    def _while(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        of_cond, of_body = while_counts(eqn)
        given = list(ins)
        while True:
            body, outs = self._body(eqn, eqn.params["body_jaxpr"], given[of_cond:])
            joined = [join(a, b, "while") for a, b in zip(given[of_cond + of_body :], outs, strict=True)]
            if joined == given[of_cond + of_body :]:
                break
            given[of_cond + of_body :] = joined
        test, (goes_on,) = self._body(eqn, eqn.params["cond_jaxpr"], given[:of_cond] + joined)
        if goes_on is not SHARED:
            return self._bound(eqn, given, "goes on as rows tell it", bodies=(test, body))
        return self._loop(flow, eqn, ins, given, joined, (test, body))

    def _loop(
        self,
        flow: Flow,
        eqn: JaxprEqn,
        ins: Sequence[Layout],
        given: Sequence[Layout],
        outs: Sequence[Layout],
        bodies: tuple[Flow, ...],
    ) -> Step:
        """A loop on the rows of one leaf that needs nothing from other servers; anything else binds."""
        leaves = leaves_of([*given, *outs])
        if any(b.bound for b in bodies) or len(leaves) > 1:
            return self._bound(eqn, given, "mixes leaves", bodies)
        if any(b.crosses for b in bodies) and not leaves <= set(self.whole):
            return self._bound(eqn, given, "reduces over rows in each turn", bodies)
        return Step(tuple(x if isinstance(x, Rows) else None for x in given), tuple(outs), bodies=bodies)

    def _bound(self, eqn: JaxprEqn, ins: Sequence[Layout], what: str, bodies: Sequence[Flow] = ()) -> Step:
        """An equation that binds all that it reads."""
        reasons = [x.reason for b in bodies for x in b.bound if x.reason]
        reasons += [x.reason for x in ins if isinstance(x, Whole) and x.reason]
        out = Whole(leaves_of(ins), (*reasons, self._reason(eqn, ins, what))[0])
        return Step((None,) * len(ins), (out,) * len(eqn.outvars))

    def _reason(self, eqn: JaxprEqn, ins: Sequence[Layout], what: str) -> str:
        """`dot_general mixes rows of f32[5,5] (optax.contrib.scale_by_muon)`."""
        operand = next((a for a, x in zip(eqn.invars, ins, strict=True) if isinstance(x, Rows)), None)
        of = f" of {short_type(operand.aval)}" if operand else ""
        where = origin_of(eqn) or (origin_of(self.within) if self.within else "") or scope_of(eqn)
        return f"{eqn.primitive.name} {what}{of}" + (f" ({where})" if where else "")


_LOOPS = {"cond": _Pass._cond, "scan": _Pass._scan, "while": _Pass._while}
_NO_ROWS = frozenset({Rows("", 0), Rows("", 1)})  # more than one claim: it is read whole


def _moved(x: Layout, by: int) -> Layout | None:
    """The layout of one turn's slice of a scanned value (-1), or of all of it (+1); None: its rows are the turns."""
    if not isinstance(x, Rows):
        return x
    return dataclasses.replace(x, axis=x.axis + by) if x.axis + by >= 0 else None


def _groups(bound: Sequence[Whole], params: Sequence[str]) -> dict[str, Group]:
    """Join leaves that are bound together (union-find)."""
    parent: dict[str, str] = {}

    def find(leaf: str) -> str:
        parent.setdefault(leaf, leaf)
        while parent[leaf] != leaf:
            parent[leaf] = parent[parent[leaf]]
            leaf = parent[leaf]
        return leaf

    for m in bound:
        first, *others = sorted(m.leaves)
        for other in others:
            parent[find(other)] = find(first)
        find(first)
    reasons: dict[str, str] = {}
    for m in bound:
        if m.reason:
            reasons.setdefault(find(min(m.leaves)), m.reason)
    members: dict[str, list[str]] = {}
    for leaf in params:
        if leaf in parent:
            members.setdefault(find(leaf), []).append(leaf)
    groups = {root: Group(tuple(leaves), reasons.get(root)) for root, leaves in members.items()}
    return {leaf: g for g in groups.values() for leaf in g.leaves}
