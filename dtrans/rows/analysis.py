"""Row analysis: find the parameters that an optimizer updates row by row (along dimension 0).

Several servers can share such a parameter. A parameter with an update that mixes rows, for example
through a matrix product, must be stored on one server.

One forward pass over the optimizer's equations assigns a layout to every value. A layout
(`dtrans.rows.layout`) states how the value relates to the rows of parameters. Elementwise equations
keep rows. A reduction over rows becomes a partial reduction on each server and an `all_reduce`
between servers; all servers then know its result. Any other equation on rows *binds* its leaves
(arrays of the parameter pytree). They stay unsliced, together on one server, and the plan reports
the equation as the reason. Leaves that must be together form a `Group`.

The layouts of optimizer state are not guessed from names or shapes. A state input starts as
`Shared`, and then gets the layout of the output with its name. The pass is repeated until no layout
changes. A layout changes only from `Shared` to rows, and from rows to `Colocated`. So two or three
passes suffice.

Without this analysis, updates with LAMB, LARS, Adafactor or clipping by global norm would be wrong
by 1e-2 to 1e-1, without an error. An unknown primitive binds its leaves: loads are less balanced,
but the numbers are correct.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from dtrans._jax import Atom, Var
from dtrans.ir.inline import eliminate_dead
from dtrans.rows.flow import Flow, FlowPass
from dtrans.rows.layout import (
    SHARED,
    Colocated,
    Layout,
    RowAxis,
    binding,
    join,
    leaves_of,
    sendable,
)
from dtrans.rows.normalize import inline_bodies, normalise
from dtrans.step.halves import Gradient, Name, UpdateProgram


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that one server must store in full, because the update mixes their rows.

    `reason` describes the first equation that mixes rows, such as `dot_general mixes rows of
    f32[5,5]`. For a scalar parameter, `reason` is None.
    """

    leaves: tuple[str, ...]
    reason: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class RowAnalysis:
    """Result of `analyse`: states for each value of an optimizer's update how it relates to rows.

    The planner of a parameter-server job reads from it the parameters that may be split over
    servers. The program writer reads from it how each equation runs on some of the rows.

    Attributes:
      half: the optimizer's part of the training step. Loops and branches over parameters of several
        servers are split, one for each server.
      flow: layout of each value, and how each equation runs on a block (the rows of one server).
      groups: for each parameter that one server must store in full, its group.
      params: names of all parameters, in pytree order, such as `params/w`.
      axes: for each parameter with rows along another dimension than 0, this dimension.
    """

    half: UpdateProgram
    flow: Flow
    groups: Mapping[str, Group]
    params: tuple[str, ...]
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def layout(self, atom: Atom) -> Layout:
        """Return the layout of a value: the relation of its entries to the rows of parameters."""
        return self.flow.layout(atom)

    @cached_property
    def inputs(self) -> dict[Name, Var]:
        """Variable of each input of the optimizer's program, by name (`opt_state/0/count`)."""
        return self.half.invars

    @cached_property
    def outputs(self) -> dict[str, Atom]:
        """Value of each output of the optimizer's program, by name (such as `params/w`)."""
        return self.half.outvars

    def home(self, layout: Layout) -> str | None:
        """Return a parameter that is on the same servers as a value with this layout.

        A value is computed on the servers that store the rows it depends on. Return None for a
        value that every server computes, such as a step count.
        """
        if layout is SHARED:
            return None
        return self.home_of(min(leaves_of([layout])))

    def home_of(self, leaf: str) -> str:
        """Return the first parameter of the group of `leaf`; `leaf` itself if it has no group.

        All parameters of a group are on one server, so the result stands for this server.
        """
        if leaf not in self.groups:
            return leaf
        return self.groups[leaf].leaves[0]

    @cached_property
    def input_names(self) -> dict[Var, str]:
        """Name of each input that is not a gradient."""
        return {v: n for n, v in self.inputs.items() if isinstance(n, str)}

    @cached_property
    def state_of(self) -> dict[str | None, tuple[str, ...]]:
        """Names of the optimizer state that is stored with each parameter, e.g. its momentum.

        The key None has the state that every server stores, such as a step count.
        """
        new = set(self.outputs) - set(self.params)
        found: dict[str | None, tuple[str, ...]] = {None: ()}
        for var, name in self.input_names.items():
            if name in new:
                home = self.home(self.layout(var))
                found[home] = (*found.get(home, ()), name)
        return found

    def with_unsliced(self, unsliced: Collection[str]) -> RowAnalysis:
        """Return the analysis for a placement that stores the parameters `unsliced` in full.

        The planner may leave a small parameter on one server, although its rows are independent. A
        reduction over the rows of this parameter then needs no communication between servers.
        """
        known = {*unsliced, *self.groups}
        half, roots = self.half, {leaf: g.leaves[0] for leaf, g in self.groups.items()}
        while True:
            flow, bound = _settled(half, self.params, known, self.axes)
            groups = _groups(bound, self.params)
            # Groups can only become smaller: a reduction inside a loop, for example, no longer
            # binds a leaf that is unsliced in any case.
            for leaf in groups.keys() & self.groups.keys():
                assert set(groups[leaf].leaves) <= set(self.groups[leaf].leaves)
            sliced = groups.keys() - known
            assert not sliced, f"{sorted(sliced)} were sliced, but cannot be"
            simpler = normalise(half.jaxpr, flow, roots)
            if simpler is None:
                return dataclasses.replace(self, half=half, flow=flow)
            half = dataclasses.replace(half, jaxpr=eliminate_dead(simpler))


def analyse(
    half: UpdateProgram, params: Sequence[str], axes: Mapping[str, int] | None = None
) -> RowAnalysis:
    """Analyse an optimizer's update: find the parameters that can be split over servers by rows.

    The time is linear in the number of equations.

    Args:
      half: the part of a training step that computes new parameters and optimizer state from
        gradients.
      params: names of the parameters, such as `params/w`.
      axes: row dimension of each parameter with rows along another dimension than 0.
    """
    axes = axes or {}
    half = dataclasses.replace(half, jaxpr=inline_bodies(half.jaxpr))
    unsliced: set[str] = set()
    bound: list[Colocated] = []
    while True:
        flow, found = _settled(half, params, unsliced, axes)
        groups = _groups([*bound, *found], params)
        roots = {leaf: g.leaves[0] for leaf, g in groups.items()}
        simpler = normalise(half.jaxpr, flow, roots)
        if simpler is not None:
            half = dataclasses.replace(half, jaxpr=eliminate_dead(simpler))
        elif groups.keys() <= unsliced:
            return RowAnalysis(half, flow, groups, tuple(params), axes)
        else:  # repeat, since reductions over leaves that are now unsliced need no communication
            bound += found
            unsliced |= groups.keys()


def leaves_of_state(half: UpdateProgram, params: Sequence[str]) -> dict[str, str]:
    """Return for each array of optimizer state the parameter with which servers store it.

    For example, the momentum `opt_state/0/mu/w` is stored with `params/w`. State that all servers
    store, such as a step count, is omitted.
    """
    found: dict[str, str] = {}
    for leaf, names in analyse(half, params).state_of.items():
        if leaf is not None:
            found |= dict.fromkeys(names, leaf)
    return found


def _settled(
    half: UpdateProgram, params: Sequence[str], unsliced: Collection[str], axes: Mapping[str, int]
) -> tuple[Flow, list[Colocated]]:
    """Find the layouts of all values; repeat until the layouts of the optimizer state are stable.

    The first pass does not know the layout of a state input such as momentum. The layout of the
    output with the same name gives it for the next pass.

    Returns:
      The result of the last pass, and the layouts with leaves that one server must store in full.
    """
    inner = half.inner
    inputs = half.invars
    outputs = half.outvars
    start: dict[Var, Layout] = {}
    for name in params:
        rows = RowAxis(name, axes.get(name, 0))
        grad = inputs.get(Gradient(name))
        var = inputs.get(name, grad)
        layout_of_leaf: Layout = rows
        if var is None or not var.aval.ndim:
            layout_of_leaf = Colocated(frozenset([name]))
        if name in inputs and name in outputs:
            start[inputs[name]] = layout_of_leaf
        if grad is not None:
            start[grad] = layout_of_leaf
    leaf_names = set(params)
    state: dict[str, Var] = {}
    for n, v in inputs.items():
        if isinstance(n, str) and n in outputs and n not in leaf_names:
            state[n] = v
    free = set(state.values())

    while True:
        flow = FlowPass(unsliced, free).over(inner.eqns, start)
        changed = False
        for name, var in state.items():
            now, out = start.get(var, SHARED), outputs[name]
            new = join(now, flow.layout(out), name)
            if new is SHARED and out is var and len(flow.claims.get(var, ())) == 1:
                # slice a constant state array like the leaf if only rows of one leaf use it
                (new,) = flow.claims[var]
            if new != now:
                start[var] = new
                changed = True
        if not changed:
            break

    bound = list(flow.bound)
    for name in params:
        layout = flow.layout(outputs[name]) if name in outputs else SHARED
        if isinstance(layout, Colocated) and name not in layout.leaves and not sendable(layout):
            bound.append(Colocated(layout.leaves | {name}, layout.reason))
        elif isinstance(layout, RowAxis) and layout != RowAxis(name, axes.get(name, 0)):
            reason = f"new {name} depends on rows of {layout.leaf}"
            bound.append(Colocated(frozenset({name, layout.leaf}), reason))
    return flow, bound + binding(start.values())


def _groups(bound: Sequence[Colocated], params: Sequence[str]) -> dict[str, Group]:
    """Return the group of each parameter that one server must store in full.

    Parameters of one layout in `bound` must be on the same server, so they form one group. Layouts
    with a common parameter are merged: `{a, b}` and `{b, c}` give the group `(a, b, c)`.
    """
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
