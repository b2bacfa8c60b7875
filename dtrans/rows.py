"""Row analysis: which leaves an optimizer lets us slice along dim 0.

One pass forward over the optimize half of a step gives every value a layout:

    Shared            no parameter's row enters it: counts, schedules, constants
    Rows(leaf, axis)  row i along `axis` is made of row i of `leaf` and of shared values only
    Mixed(leaves)     made of those leaves in some other way

Elementwise equations keep `Rows`; a shared operand that meets rows is sliced where they are (see
`dtrans.shards`). Anything else that touches rows makes `Mixed`, with the equation that did it as the
reason. The layouts of state inputs are not guessed from names or shapes: a state input starts as
`Shared`, and takes the layout of the output of its own name until nothing changes (the layouts form a
finite lattice and only go up, two or three passes do it).

A leaf all of whose new values are `Rows` can be cut into any blocks of rows. Leaves that meet in a `Mixed`
value that reaches new state form a `Group`, which must live whole on one server. Applying an
optimizer to slices without asking is wrong by 1e-2 to 1e-1 for clipping by global norm, LAMB, LARS or
Adafactor, silently; here it costs balance, never correctness.

To let more optimizers slice, give their primitives a rule in `_layout`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property

from dtrans._jax import Atom, JaxprEqn, Literal, Var, scope_of
from dtrans.cut import GRAD, OptimizeHalf
from dtrans.listing import short_type


# Primitives whose output at an index depends on the operands at that index only.
# fmt: off
ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
        "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type",
        "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
        "expm1", "floor", "ge", "gradient", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite",
        "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg",
        "nextafter", "not", "or", "optimization_barrier", "polygamma", "population_count", "pow", "real",
        "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
        "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
    }
)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Shared:
    """No parameter's row enters the value."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The value has the rows of `leaf` along `axis`."""

    leaf: str
    axis: int


@dataclasses.dataclass(frozen=True)
class Mixed:
    """The value is made of `leaves` in a way that has no rows.

    `reason` is the equation that made it so; None where there never were rows (0-d leaves).
    """

    leaves: frozenset[str]
    reason: str | None = dataclasses.field(default=None, compare=False)


Layout = Shared | Rows | Mixed
SHARED = Shared()


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that must live whole on one server, and the first equation that made it so (None for a 0-d leaf)."""

    leaves: tuple[str, ...]
    reason: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class RowAnalysis:
    """What `analyse` found.

    Attributes:
      half: the optimize half that was analysed.
      layouts: the layout of every value in it.
      groups: leaf to its group, for the leaves that cannot be sliced.
    """

    half: OptimizeHalf
    layouts: Mapping[Var, Layout]
    groups: Mapping[str, Group]

    def layout(self, atom: Atom) -> Layout:
        """The layout of any value; literals are shared."""
        return SHARED if isinstance(atom, Literal) else self.layouts.get(atom, SHARED)

    @cached_property
    def inputs(self) -> dict[str, Var]:
        """Input name to variable."""
        return dict(zip(self.half.in_names, self.half.jaxpr.jaxpr.invars, strict=True))

    @cached_property
    def outputs(self) -> dict[str, Atom]:
        """Output name to value."""
        return dict(zip(self.half.out_names, self.half.jaxpr.jaxpr.outvars, strict=True))

    def owners(self, layout: Layout) -> tuple[str, ...]:
        """The leaves that a value with this layout lives with; none for a shared one."""
        if isinstance(layout, Rows):
            return self.groups[layout.leaf].leaves if layout.leaf in self.groups else (layout.leaf,)
        if isinstance(layout, Mixed):
            return self.groups[min(layout.leaves)].leaves
        return ()


def analyse(half: OptimizeHalf, params: Sequence[str]) -> RowAnalysis:
    """Find which of `params` the optimize half lets us slice. Time is linear in the number of equations."""
    inner = half.jaxpr.jaxpr
    inputs = dict(zip(half.in_names, inner.invars, strict=True))
    outputs = dict(zip(half.out_names, inner.outvars, strict=True))
    updated = set(half.out_names)
    start: dict[Var, Layout] = {}
    for name in params:
        own: Layout = Rows(name, 0) if name in inputs and inputs[name].aval.ndim else Mixed(frozenset([name]))
        if name in inputs and name in updated:
            start[inputs[name]] = own
        if name + GRAD in inputs:
            start[inputs[name + GRAD]] = own
    own_names = set(params)
    state = {n: v for n, v in inputs.items() if n in updated and n not in own_names}
    free = set(state.values())

    while True:
        layouts, claims = _propagate(inner.eqns, start, free)
        changed = False
        for name, var in state.items():
            now = start.get(var, SHARED)
            out = outputs[name]
            new = _join(now, SHARED if isinstance(out, Literal) else layouts.get(out, SHARED), name)
            if new == SHARED and out is var and len(claims.get(var, ())) == 1:
                # never changes, and is only ever read beside one leaf's rows: it is sliced as they are
                (new,) = claims[var]
            if new != now:
                start[var] = new
                changed = True
        if not changed:
            break

    mixed: list[Mixed] = []
    for name, out in outputs.items():
        layout = layouts.get(out, SHARED) if isinstance(out, Var) else SHARED
        if name in state:
            if isinstance(layout, Rows) and layout.axis != 0:
                layout = Mixed(frozenset([layout.leaf]), f"{name} has its rows along axis {layout.axis}")
        elif isinstance(layout, Mixed):
            layout = Mixed(layout.leaves | {name}, layout.reason)
        elif isinstance(layout, Rows) and layout != Rows(name, 0):
            layout = Mixed(frozenset({name, layout.leaf}), f"new {name} is made of rows of {layout.leaf}")
        if isinstance(layout, Mixed):
            mixed.append(layout)
    return RowAnalysis(half, layouts, _groups(mixed, params))


def _propagate(
    eqns: Sequence[JaxprEqn], start: Mapping[Var, Layout], free: set[Var]
) -> tuple[dict[Var, Layout], dict[Var, set[Rows]]]:
    """One pass: the layout of each value that is not shared, and beside whose rows free state inputs were read."""
    env: dict[Var, Layout] = dict(start)
    claims: dict[Var, set[Rows]] = {}
    for eqn in eqns:
        ins = [SHARED if isinstance(a, Literal) else env.get(a, SHARED) for a in eqn.invars]
        if all(x is SHARED for x in ins):
            continue
        out = _layout(eqn, ins)
        env.update(dict.fromkeys(eqn.outvars, out))
        if isinstance(out, Rows):
            for a, x in zip(eqn.invars, ins, strict=True):
                if x is SHARED and isinstance(a, Var) and a in free and a.aval.ndim:
                    claims.setdefault(a, set()).add(out)
    return env, claims


def _layout(eqn: JaxprEqn, ins: Sequence[Layout]) -> Layout:
    """The layout of an equation's outputs, given that not all of its inputs are shared."""
    rows = {x for x in ins if isinstance(x, Rows)}
    blends = [x for x in ins if isinstance(x, Mixed)]
    if len(rows) == 1 and not blends:
        (row,) = rows
        if eqn.primitive.name in ELEMENTWISE and _keeps_rows(eqn, ins, row.axis):
            return row
    leaves = frozenset({r.leaf for r in rows}).union(*(b.leaves for b in blends))
    reason = next((b.reason for b in blends if b.reason), None)
    if reason is None and rows:
        what = "mixes rows" if len(leaves) == 1 else "mixes leaves"
        operand = next(a for a, x in zip(eqn.invars, ins, strict=True) if isinstance(x, Rows))
        where = scope_of(eqn)
        reason = f"{eqn.primitive.name} {what} of {short_type(operand.aval)}" + (f" ({where})" if where else "")
    elif reason is None and len(leaves) > 1:
        reason = f"{eqn.primitive.name} mixes leaves"
    return Mixed(leaves, reason)


def _keeps_rows(eqn: JaxprEqn, ins: Sequence[Layout], axis: int) -> bool:
    """Whether an elementwise equation maps row i to row i: operands are of the output's shape, or broadcast to it.

    A shared operand may be a scalar, or have dimensions of size 1. One that has rows must have all of them.
    """
    shape = eqn.outvars[0].aval.shape
    if any(v.aval.shape != shape for v in eqn.outvars):
        return False
    for a, layout in zip(eqn.invars, ins, strict=True):
        own = a.aval.shape
        if isinstance(layout, Rows) and (len(own) != len(shape) or own[axis] != shape[axis]):
            return False
        if own and (len(own) != len(shape) or any(d not in (1, n) for d, n in zip(own, shape, strict=True))):
            return False
    return True


def _join(a: Layout, b: Layout, name: str) -> Layout:
    """The least layout above both."""
    if a == b or b is SHARED:
        return a
    if a is SHARED:
        return b
    leaves: frozenset[str] = frozenset()
    reason = f"{name} is made of rows in two ways"
    for x in (a, b):
        if isinstance(x, Mixed):
            leaves, reason = leaves | x.leaves, x.reason or reason
        elif isinstance(x, Rows):
            leaves |= {x.leaf}
    return Mixed(leaves, reason)


def _groups(mixed: Sequence[Mixed], params: Sequence[str]) -> dict[str, Group]:
    """Join leaves that meet in a mixed value (union-find)."""
    parent: dict[str, str] = {}

    def find(leaf: str) -> str:
        parent.setdefault(leaf, leaf)
        while parent[leaf] != leaf:
            parent[leaf] = parent[parent[leaf]]
            leaf = parent[leaf]
        return leaf

    reasons: dict[str, str] = {}
    for m in mixed:
        first, *others = sorted(m.leaves)
        for other in others:
            parent[find(other)] = find(first)
        find(first)
    for m in mixed:
        if m.reason:
            reasons.setdefault(find(min(m.leaves)), m.reason)
    members: dict[str, list[str]] = {}
    for leaf in params:
        if leaf in parent:
            members.setdefault(find(leaf), []).append(leaf)
    groups = {root: Group(tuple(leaves), reasons.get(root)) for root, leaves in members.items()}
    return {leaf: g for g in groups.values() for leaf in g.leaves}
