"""Effect of an update on rows whose gradient is zero.

Rows that no trainer looked up have a gradient of zero. If the update leaves such rows and their
optimizer state unchanged, servers need to update only the rows that were looked up. The analysis
follows each value of the update at such a row through the equations. A value is one number for all
such rows, an unchanged array of the state, or something else. A number times zero counts as zero,
though the number may be infinite.

If the update reduces over rows (a clip by the norm of the gradients), such rows must add nothing.

A row that no trainer has looked up yet may rest though others move: Adam's moments begin with zero,
and stay zero.

A lazy update leaves such rows out. It loses nothing if each step uses a row's gradient at once, as
Adam does: only the decay of moments is left out. An accumulator (`optax.MultiSteps`) keeps
gradients until a later step, and that step must reach every row. `find_waiting` follows a row
through the update for each outcome of each condition, and tells the two apart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import (
    COND,
    SCAN,
    WHILE,
    Atom,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    facts_of,
    line_of,
    moved_operands,
    opened,
    origin_of,
)
from dtrans.ir.folding import Alias, are_equal, fold, is_number, number_by_jax
from dtrans.ir.interpret import ForwardAnalysis, enter
from dtrans.ir.program import Program
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.flow import Flow
from dtrans.rows.layout import RowAxis, Shared, leaves_of
from dtrans.rows.rules import Step
from dtrans.step.cut import Gradient


@dataclasses.dataclass(frozen=True)
class _Other:
    """A value that is computed.

    Attributes:
      reads: inputs with rows that it is computed from.
    """

    reads: frozenset[Var] = frozenset()


_OTHER = _Other()
_Kind = Any  # a number, `Alias`, or `_Other`


@dataclasses.dataclass(frozen=True)
class _Condition:
    """A value that decides what happens to rows.

    Attributes:
      outcomes: those that it may have.
      said: the equation that makes it, for people.
    """

    var: Var
    outcomes: tuple[np.ndarray, ...]
    said: str


MOST_CASES = 256  # outcomes of conditions that a row is followed through

_NEUTRAL = {"sum": 0, "or": False, "and": True, "xor": False}  # what adds nothing to a reduction


@dataclasses.dataclass(frozen=True)
class ZeroGradient:
    """Effect of an update on rows of a leaf whose gradient is zero.

    Attributes:
      moves: the leaf, or arrays of the state, that change at rows that no trainer looked up.
      counts: the equation by which such rows enter a reduction over all rows; empty if none does.
      positions: the equation by which a row's number enters the row; empty if none does.
      state: the arrays of the optimizer's state that have a row for each row of the leaf.
      unlike: arrays in `state` whose rows are not along dimension 0.
      rests: array of the state to its initial value, at which rows rest until their first lookup.
        None if they do not rest.
    """

    moves: tuple[str, ...]
    counts: str
    positions: str
    state: tuple[str, ...]
    unlike: tuple[str, ...]
    rests: Mapping[str, Any] | None


def at_zero_gradient(analysis: RowAnalysis, leaf: str, begins: Mapping[Any, Any]) -> ZeroGradient:
    """Follow a row with a gradient of zero through an update that lets the leaf be cut.

    Args:
      begins: arrays of the optimizer's state that begin as one number: that, by name.
    """
    rows = _arrays_with_rows(analysis, leaf)

    def moved(begins: Mapping[Any, Any]) -> tuple[_Followed, tuple[str, ...]]:
        seen = _follow(analysis, leaf, begins=begins)
        before = {n: begins.get(n, Alias(v)) for n, v in rows.items()}
        return seen, tuple(
            n for n in rows if not are_equal(seen.kind(analysis.outputs[n]), before[n])
        )

    seen, moves = moved({})
    state = tuple(n for n in rows if n != leaf)
    unlike = tuple(n for n in state if analysis.layout(rows[n]) != RowAxis(leaf, 0))
    begun = {n: begins[n] for n in state if n in begins}
    rests = None if moved(begun)[1] else begun
    return ZeroGradient(moves, seen.counts, seen.positions, state, unlike, rests)


def find_waiting(analysis: RowAnalysis, leaf: str) -> str:
    """Return why gradients of a row wait for a later step; empty where each step uses them at once.

    The row is followed, with a gradient of zero and any state, for each outcome of each condition
    of the update. Gradients wait where an outcome decides if other arrays enter the leaf or an
    array of the state (`optax.MultiSteps`, a lookahead), or if such an array is set anew. Steps
    that use no gradient of any row (`optax.apply_if_finite`) do not count.

    Conditions are truths that all rows share, and comparisons of a row's whole numbers, such as its
    own count. A number that is zero in some steps counts where a condition selects it, and not
    where it is computed.
    """
    rows, outputs = _arrays_with_rows(analysis, leaf), analysis.outputs
    cases: list[_Followed] = []
    said: dict[Var, str] = {}
    pending: list[Mapping[Var, _Kind]] = [{}]
    while pending:
        seen = _follow(analysis, leaf, assumed=pending.pop())
        if seen.loop:
            return f"{seen.loop} is not followed turn by turn"
        if seen.open:
            said[seen.open.var] = seen.open.said
            pending += [{**seen.assumed, seen.open.var: x} for x in seen.open.outcomes]
        elif not _skips(analysis, leaf, seen.assumed):
            cases.append(seen)
        if len(cases) + len(pending) > MOST_CASES:
            return "its update has too many conditions to follow a row through all of them"
    names = {v: n for n, v in rows.items()}
    for n, v in rows.items():
        reads = [_reads(case.kind(outputs[n])) for case in cases]
        others = frozenset[Var]().union(*reads) - {v}
        if cause := _decider(cases, [bool(x - {v}) for x in reads], said):
            waiting = ", ".join(sorted(names[x] for x in others))
            return (
                f"{waiting} enter{'s' * (len(others) == 1)} {n} only in steps that {cause} selects"
            )
        if cause := _decider(cases, [v in x for x in reads], said):
            return f"{n} is set anew only in steps that {cause} selects"
    return ""


def _arrays_with_rows(analysis: RowAnalysis, leaf: str) -> dict[str, Var]:
    """Return inputs that have rows of a leaf, and that the update gives back."""
    of_leaf = lambda v: (
        leaf in leaves_of([analysis.layout(v)]) and isinstance(analysis.layout(v), RowAxis)
    )
    named = {n: v for n, v in analysis.inputs.items() if isinstance(n, str)}
    return {n: v for n, v in named.items() if n in analysis.outputs and of_leaf(v)}


def _follow(
    analysis: RowAnalysis,
    leaf: str,
    begins: Mapping[Any, Any] | None = None,
    assumed: Mapping[Var, _Kind] | None = None,
    *,
    any_gradient: bool = False,
) -> _Followed:
    """Follow a row through an update.

    Args:
      begins: arrays of the state that are one number, by name.
      assumed: outcomes of conditions.
      any_gradient: whether the row has a gradient; it is zero otherwise.
    """
    seen = _Followed(leaf, analysis.flow, analysis.half.inner.eqns, assumed or {})
    known = begins or {}
    seen.kinds |= {
        v: known[n] if n in known else Alias(v)
        for n, v in analysis.inputs.items()
        if seen.is_row(v)
    }
    gradient = analysis.inputs.get(Gradient(leaf))
    if gradient is not None:
        seen.kinds[gradient] = (
            Alias(gradient) if any_gradient else np.zeros((), gradient.aval.dtype)
        )
    seen.run()
    return seen


def _skips(analysis: RowAnalysis, leaf: str, assumed: Mapping[Var, _Kind]) -> bool:
    """Return True if rows stay as they are, with any gradient, where conditions have these
    outcomes."""
    seen = _follow(analysis, leaf, assumed=assumed, any_gradient=True)
    rows = _arrays_with_rows(analysis, leaf)
    return all(are_equal(seen.kind(analysis.outputs[n]), Alias(v)) for n, v in rows.items())


def _decider(cases: Sequence[_Followed], holds: Sequence[bool], said: Mapping[Var, str]) -> str:
    """Return the condition that decides something, for people; empty where it holds in all cases,
    or in none."""
    yes, no = (
        [c for c, x in zip(cases, holds, strict=True) if x is wanted] for wanted in (True, False)
    )
    found: list[list[Var]] = []
    for a, b in itertools.product(yes, no):
        found.append([v for v, x in a.assumed.items() if v in b.assumed and b.assumed[v] != x])
    return said[min(found, key=len)[0]] if found else ""


def constant_outputs(program: Program) -> dict[str, Any]:
    """Return the outputs of an init that repeat one number, with that number, by name."""
    seen = _Followed("", Flow({}), program.inner.eqns, {})
    kinds = {n: seen.kind(a) for n, a in program.outvars.items()}
    return {n: k for n, k in kinds.items() if isinstance(k, np.ndarray)}


class _Followed:
    """Kinds of values at one row, in an update or a branch of it.

    Attributes:
      assumed: outcomes of conditions.
      open: a condition that enters rows and whose outcome is not assumed; None where there is none.
      loop: a loop that rows enter; empty where there is none.
    """

    def __init__(
        self,
        leaf: str,
        flow: Flow,
        eqns: Sequence[JaxprEqn],
        assumed: Mapping[Var, _Kind],
        parent: _Followed | None = None,
        given: Mapping[Var, Atom] | None = None,
    ) -> None:
        self.leaf, self.flow, self.eqns, self.assumed = leaf, flow, eqns, assumed
        self.kinds: dict[Var, _Kind] = {}
        self.counts = self.positions = self.loop = ""
        self.open: _Condition | None = None
        self._made_by = {v: e for e in eqns for v in e.outvars}
        self._parent, self._given = parent, given or {}

    def is_row(self, a: Atom) -> bool:
        """Return True if a value has rows of the leaf."""
        layout = self.flow.layout(a)
        return isinstance(layout, RowAxis) and layout.leaf == self.leaf

    def kind(self, a: Atom) -> _Kind:
        """Return the kind of a value at such a row; a shared number is its own kind."""
        if isinstance(a, Literal):
            return np.asarray(a.val, a.aval.dtype) if not np.ndim(a.val) else _OTHER
        if a in self.assumed:
            return self.assumed[a]
        if a not in self.kinds:
            eqn = self._made_by.get(a)
            plain = eqn is not None and (facts_of(eqn).elementwise or bool(moved_operands(eqn)))
            self.kinds[a] = (
                _made(eqn, [*map(self.kind, eqn.invars)], a)
                if plain and eqn is not None
                else _OTHER
            )
        return self.kinds[a]

    def run(self) -> None:
        """Follow all equations."""
        for i, eqn in enumerate(self.eqns):
            step = self.flow.steps.get(i)
            if step is None or not any(
                isinstance(x, RowAxis) and x.leaf == self.leaf for x in step.operands
            ):
                continue
            self._look_for_conditions(eqn)
            if eqn.primitive.name == COND:
                self._cond(eqn, step)
                continue
            if eqn.primitive.name in (SCAN, WHILE):
                self.loop = self.loop or _said(eqn)
            for a, row in zip(eqn.invars, step.operands, strict=True):
                alike = (
                    row is None
                    or not isinstance(self.flow.layout(a), Shared)
                    or self._is_alike(a, row.axis)
                )
                self.positions = self.positions or ("" if alike else _said(eqn))
            given = [*map(self.kind, eqn.invars)]
            if step.reduce:
                neutral = isinstance(given[0], np.ndarray) and given[0] == _NEUTRAL.get(
                    step.reduce, np.nan
                )
                self.counts = self.counts or ("" if neutral else _said(eqn))
                continue
            for v in eqn.outvars:
                self.kinds[v] = _made(eqn, given, v)

    def _look_for_conditions(self, eqn: JaxprEqn) -> None:
        """Note a condition that enters rows here: a truth, or one that a shared number is made
        of."""
        for a in eqn.invars:
            if not isinstance(a, Literal) and (a.aval.dtype == bool or not self.is_row(a)):
                self._open_first(a)
        if eqn.primitive.name == COND:
            self._set_open(eqn.invars[0], range(len(bodies(eqn))), eqn)

    def _open_first(self, a: Atom) -> None:
        """Note the first condition that a value is made of."""
        stack, seen = [a], set[Var]()
        while stack and self.open is None:
            a = stack.pop()
            if isinstance(a, Literal) or a in seen or isinstance(self.kind(a), np.ndarray):
                continue
            seen.add(a)
            eqn = self._made_by.get(a)
            if eqn is None and a in self._given and self._parent is not None:
                self._parent._open_first(self._given[a])
                self.open = self._parent.open
            elif eqn is not None and _passes_on(eqn):
                stack += eqn.invars
            elif a.aval.dtype == bool and (not self.is_row(a) or _compares_whole_numbers(eqn)):
                self._set_open(a, (False, True), eqn)

    def _set_open(self, a: Atom, outcomes: Sequence[Any], eqn: JaxprEqn | None) -> None:
        if (
            self.open is None
            and not isinstance(a, Literal)
            and not isinstance(self.kind(a), np.ndarray)
        ):
            found = tuple(np.asarray(x, a.aval.dtype) for x in outcomes)
            self.open = _Condition(
                a, found, _said(eqn) if eqn is not None else "a condition of its state"
            )

    def _cond(self, eqn: JaxprEqn, step: Step) -> None:
        """Follow the branch that is taken, or what all branches make alike."""

        def run(number: int, branch: Any, given: list[_Kind]) -> tuple[None, list[_Kind]]:
            inner = opened(branch)
            outer = dict(zip(inner.invars, eqn.invars[1:], strict=True))
            inside = _Followed(
                self.leaf, step.bodies[number], inner.eqns, self.assumed, self, outer
            )
            inside.kinds |= zip(inner.invars, given, strict=True)
            inside.run()
            self.counts = self.counts or inside.counts
            self.positions = self.positions or inside.positions
            self.loop = self.loop or inside.loop
            self.open = self.open or inside.open
            return None, [*map(inside.kind, inner.outvars)]

        entered = enter(_BRANCHES, eqn, [*map(self.kind, eqn.invars)], run)
        self.kinds |= zip(eqn.outvars, entered.outs, strict=True)

    def _is_alike(self, a: Atom, axis: int) -> bool:
        """Return True if a shared value is the same at each row."""
        if isinstance(a, Literal) or not a.aval.ndim or a.aval.shape[axis] == 1:
            return True
        eqn = self._made_by.get(a)
        if eqn is None:
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            dims, shape = eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
            return axis not in dims or shape[dims.index(axis)] == 1 != a.aval.shape[axis]
        like = facts_of(eqn).elementwise
        return like and all(
            self._is_alike(x, axis) for x in eqn.invars if x.aval.ndim == a.aval.ndim
        )


def _passes_on(eqn: JaxprEqn) -> bool:
    """Return True if conditions are to be looked for in the operands of an equation."""
    is_logic = eqn.primitive.name in ("and", "or", "xor", "not")
    makes_truths = any(v.aval.dtype == bool for v in eqn.outvars) and not is_logic
    return bool(moved_operands(eqn)) or (facts_of(eqn).elementwise and not makes_truths)


def _compares_whole_numbers(eqn: JaxprEqn | None) -> bool:
    """Return True if a truth is about whole numbers, such as a count."""
    return eqn is not None and any(jnp.issubdtype(a.aval.dtype, jnp.integer) for a in eqn.invars)


def _reads(kind: _Kind) -> frozenset[Var]:
    """Return the inputs with rows that a value is computed from."""
    if isinstance(kind, Alias):
        return frozenset([kind.var])
    return kind.reads if isinstance(kind, _Other) else frozenset()


def _made(eqn: JaxprEqn, given: Sequence[_Kind], out: Var) -> _Kind:
    """Return the kind of an equation's result. Reductions are within a row."""
    divides = eqn.primitive.name == "div"
    is_factor = lambda i: not (divides and is_number(given[i], 0))
    kind = fold(eqn, list(eqn.outvars).index(out), given, is_factor, number_by_jax)
    return _Other(frozenset[Var]().union(*map(_reads, given))) if kind is None else kind


def _join(one: _Kind, other: _Kind) -> _Kind:
    return one if are_equal(one, other) else _Other(_reads(one) | _reads(other))


_BRANCHES = ForwardAnalysis[_Kind](
    _join,
    rule=lambda eqn, ins: None,
    default=lambda aval, value: _OTHER,
    branch=lambda index: int(index) if is_number(index) else None,
)


def _said(eqn: JaxprEqn) -> str:
    where = origin_of(eqn) or line_of(eqn)
    return eqn.primitive.name + (f" ({where})" if where else "")
