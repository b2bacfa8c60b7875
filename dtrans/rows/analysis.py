"""Row analysis: what an optimizer does to the rows of parameters, and which leaves it lets us slice
along dim 0.

One pass forward over the optimize half of a step gives every value a layout (`dtrans.rows.layout`)
by the rules of the primitives (`dtrans.rows.rules`). Elementwise equations keep rows; a reduction
over rows becomes one part for each block and an `all_reduce` of the parts, whose result is shared;
anything else that touches rows binds the leaf, which must then live whole on one server, with the
equation that did it as the reason. Leaves that meet so are a `Group`. Loops and branches are looked
into, with the layouts of what goes into them.

The layouts of state inputs are not guessed from names or shapes: a state input starts as `Shared`,
and takes the layout of the output of its own name until nothing changes (the layouts form a finite
lattice and only go up, two or three passes do it).

Applying an optimizer to slices without asking is wrong by 1e-2 to 1e-1 for clipping by global norm,
LAMB, LARS or Adafactor, silently. What is not understood here costs balance, never correctness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from dtrans._jax import Atom, Var
from dtrans.ir.inline import eliminate_dead
from dtrans.rows.flow import Flow, _Pass
from dtrans.rows.layout import SHARED, Layout, RowAxis, Whole, join, leaves_of, sendable
from dtrans.rows.normalize import inline_bodies, normalise
from dtrans.step.cut import Gradient, Name, OptimizeHalf


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that must live whole on one server, and the first equation that made it so (None for a
    0-d leaf)."""

    leaves: tuple[str, ...]
    reason: str | None


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
    def inputs(self) -> dict[Name, Var]:
        """Input name to variable."""
        return self.half.invars

    @cached_property
    def outputs(self) -> dict[str, Atom]:
        """Output name to value."""
        return self.half.outvars

    def home(self, layout: Layout) -> str | None:
        """The leaf, or the first leaf of the group, that a value with this layout lives with; None
        if it is shared."""
        return None if layout is SHARED else self.home_of(min(leaves_of([layout])))

    def home_of(self, leaf: str) -> str:
        """The leaf, or the first leaf of the group that it is in."""
        return self.groups[leaf].leaves[0] if leaf in self.groups else leaf

    @cached_property
    def input_names(self) -> dict[Var, str]:
        """The names of inputs other than gradients."""
        return {v: n for n, v in self.inputs.items() if isinstance(n, str)}

    @cached_property
    def state_of(self) -> dict[str | None, tuple[str, ...]]:
        """The optimizer's state by home; under None the state of no leaf: no row enters it, or only
        by reductions."""
        new = set(self.outputs) - set(self.params)
        found: dict[str | None, tuple[str, ...]] = {None: ()}
        for var, name in self.input_names.items():
            if name in new:
                home = self.home(self.layout(var))
                found[home] = (*found.get(home, ()), name)
        return found

    def placed(self, whole: Collection[str]) -> RowAnalysis:
        """The same, once it is known which leaves are on one server: what they are reduced to is
        there already."""
        known = {*whole, *self.groups}
        half, roots = self.half, {leaf: g.leaves[0] for leaf, g in self.groups.items()}
        while True:
            flow, bound = _settled(half, self.params, known, self.axes)
            groups = _groups(bound, self.params)
            # fewer may be bound: what a leaf that is whole anyway is reduced to in a loop, say
            assert all(
                set(g.leaves) <= set(self.groups[n].leaves)
                for n, g in groups.items()
                if n in self.groups
            )
            assert groups.keys() <= known, (
                f"{sorted(groups.keys() - known)} were cut, and cannot be"
            )
            simpler = normalise(half.jaxpr, flow, roots)
            if simpler is None:
                return dataclasses.replace(self, half=half, flow=flow)
            half = dataclasses.replace(half, jaxpr=eliminate_dead(simpler))


def analyse(
    half: OptimizeHalf, params: Sequence[str], axes: Mapping[str, int] | None = None
) -> RowAnalysis:
    """Find which of `params` the optimize half lets us slice. Time is linear in the number of
    equations.

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


def leaves_of_state(half: OptimizeHalf, params: Sequence[str]) -> dict[str, str]:
    """Return the leaf that each array of the optimizer's state lives with; those that no row enters
    live with none."""
    state_of = analyse(half, params).state_of
    return {n: leaf for leaf, names in state_of.items() if leaf is not None for n in names}


def _settled(
    half: OptimizeHalf, params: Sequence[str], whole: Collection[str], axes: Mapping[str, int]
) -> tuple[Flow, list[Whole]]:
    """The layouts once those of state inputs have settled, and everything that binds leaves."""
    inner = half.inner
    inputs = half.invars
    outputs = half.outvars
    start: dict[Var, Layout] = {}
    for name in params:
        rows = RowAxis(name, axes.get(name, 0))
        grad = inputs.get(Gradient(name))
        var = inputs.get(name, grad)
        own: Layout = rows if var is not None and var.aval.ndim else Whole(frozenset([name]))
        if name in inputs and name in outputs:
            start[inputs[name]] = own
        if grad is not None:
            start[grad] = own
    own_names = set(params)
    state = {
        n: v
        for n, v in inputs.items()
        if isinstance(n, str) and n in outputs and n not in own_names
    }
    free = set(state.values())

    while True:
        flow = _Pass(whole, free).over(inner.eqns, start)
        changed = False
        for name, var in state.items():
            now, out = start.get(var, SHARED), outputs[name]
            new = join(now, flow.layout(out), name)
            if new is SHARED and out is var and len(flow.claims.get(var, ())) == 1:
                # never changes, and is only ever read beside one leaf's rows: it is sliced as they
                # are
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
        elif isinstance(layout, RowAxis) and layout != RowAxis(name, axes.get(name, 0)):
            bound.append(
                Whole(
                    frozenset({name, layout.leaf}), f"new {name} is made of rows of {layout.leaf}"
                )
            )
    bound += [x for x in start.values() if isinstance(x, Whole) and (x.reason or len(x.leaves) > 1)]
    return flow, bound


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
