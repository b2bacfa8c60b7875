"""Effect of an update on rows whose gradient is zero.

Rows that no trainer looked up have a gradient of zero. If the update leaves such rows and their
optimizer state unchanged, servers update only the rows that were looked up. The analysis follows
each value of the update at such a row through the equations. A value is one number for all such
rows, an unchanged array of the state, or another value. A number times zero counts as zero, though
the number may be infinite.

If the update reduces over rows (a clip by the norm of the gradients), such rows must be neutral.

A row that no trainer has looked up yet may rest though others move: Adam's moments begin with zero,
and stay zero.

A lazy update leaves such rows out. It loses no gradient if each step uses a row's gradient at once,
as Adam does; only the decay of moments is left out. An accumulator (`optax.MultiSteps`) keeps
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
from dtrans.ir.selection import invert, values_at
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.flow import Flow
from dtrans.rows.layout import RowAxis, Shared, leaves_of
from dtrans.rows.rules import Step
from dtrans.step.cut import Gradient


@dataclasses.dataclass(frozen=True)
class _Other:
    """Computed value.

    Attributes:
      reads: row-wise inputs that the value depends on.
    """

    reads: frozenset[Var] = frozenset()


_OTHER = _Other()
_Kind = Any  # a number, `Alias`, or `_Other`


@dataclasses.dataclass(frozen=True)
class _Condition:
    """Condition that decides about the update of rows.

    Attributes:
      var: the condition.
      outcomes: its possible values.
      text: the equation that computes it, for users.
    """

    var: Var
    outcomes: tuple[np.ndarray, ...]
    text: str


MOST_CASES = 256  # the most combinations of outcomes that are followed

_NEUTRAL = {"sum": 0, "or": False, "and": True, "xor": False}  # neutral elements of reductions


@dataclasses.dataclass(frozen=True)
class ZeroGradient:
    """Effect of an update on rows of a leaf whose gradient is zero.

    Attributes:
      moves: the leaf, and arrays of the state, that change at rows that no trainer looked up.
      counts: the equation by which such rows enter a reduction over all rows; empty if none does.
      positions: the equation by which a row's id enters the row; empty if none does.
      state: arrays of the optimizer state that have a row for each row of the leaf.
      unlike: arrays in `state` whose rows are not along dimension 0.
      rests: array of the state to its initial value, if rows do not change before their first
        lookup; None if they do.
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
      analysis: row analysis of the update.
      leaf: the leaf.
      begins: array of the optimizer state to its initial number, for arrays that begin as one.
    """
    rows = _arrays_with_rows(analysis, leaf)
    followed, moves = _moves(analysis, leaf, rows, {})
    state = tuple(n for n in rows if n != leaf)
    unlike = tuple(n for n in state if analysis.layout(rows[n]) != RowAxis(leaf, 0))
    initial = {n: begins[n] for n in state if n in begins}
    _, initial_moves = _moves(analysis, leaf, rows, initial)
    rests = None if initial_moves else initial
    return ZeroGradient(moves, followed.counts, followed.positions, state, unlike, rests)


def _moves(
    analysis: RowAnalysis, leaf: str, rows: Mapping[str, Var], begins: Mapping[Any, Any]
) -> tuple[_FollowedRow, tuple[str, ...]]:
    """Return a followed row, and the arrays that change at it."""
    followed = _follow(analysis, leaf, begins=begins)
    moves = []
    for n, v in rows.items():
        if not are_equal(followed.kind(analysis.outputs[n]), begins.get(n, Alias(v))):
            moves.append(n)
    return followed, tuple(moves)


def find_waiting(analysis: RowAnalysis, leaf: str) -> str:
    """Return why gradients of a row wait for a later step; empty if each step uses them at once.

    The search follows a row with a gradient of zero and any state, for each outcome of each
    condition of the update. Gradients wait if an outcome decides about either of these:

    - Other arrays enter the leaf or an array of the state (`optax.MultiSteps`, a lookahead).
    - Such an array is replaced.

    Steps that use no gradient of any row (`optax.apply_if_finite`) do not count.

    Conditions are booleans that all rows share, and comparisons of a row's integers, such as its
    count. A number that is zero in some steps counts if a condition selects it, but not if it is
    computed.
    """
    rows, outputs = _arrays_with_rows(analysis, leaf), analysis.outputs
    cases: list[_FollowedRow] = []
    text_of: dict[Var, str] = {}
    pending: list[Mapping[Var, _Kind]] = [{}]
    while pending:
        followed = _follow(analysis, leaf, assumed=pending.pop())
        condition = followed.open
        if followed.loop:
            return f"{followed.loop} is not followed iteration by iteration"
        if condition:
            text_of[condition.var] = condition.text
            for outcome in condition.outcomes:
                pending.append({**followed.assumed, condition.var: outcome})
        elif not _skips(analysis, leaf, followed.assumed):
            cases.append(followed)
        if len(cases) + len(pending) > MOST_CASES:
            return "its update has too many conditions to follow a row through all of them"

    names = invert(rows)
    for n, v in rows.items():
        reads = [_reads(case.kind(outputs[n])) for case in cases]
        others = frozenset[Var]().union(*reads) - {v}
        if cause := _decider(cases, [bool(x - {v}) for x in reads], text_of):
            waiting = ", ".join(sorted(values_at(names, others)))
            verb = "enter" if len(others) > 1 else "enters"
            return f"{waiting} {verb} {n} only in steps that {cause} selects"
        if cause := _decider(cases, [v in x for x in reads], text_of):
            return f"{n} is replaced only in steps that {cause} selects"
    return ""


def _arrays_with_rows(analysis: RowAnalysis, leaf: str) -> dict[str, Var]:
    """Return the inputs with rows of a leaf that are also outputs of the update, by name."""
    found = {}
    for n, v in analysis.inputs.items():
        layout = analysis.layout(v)
        has_rows = isinstance(layout, RowAxis) and leaf in leaves_of([layout])
        if isinstance(n, str) and n in analysis.outputs and has_rows:
            found[n] = v
    return found


def _follow(
    analysis: RowAnalysis,
    leaf: str,
    begins: Mapping[Any, Any] | None = None,
    assumed: Mapping[Var, _Kind] | None = None,
    *,
    any_gradient: bool = False,
) -> _FollowedRow:
    """Follow a row through an update.

    Args:
      begins: array of the state to its number, for arrays that are one number.
      assumed: outcomes of conditions.
      any_gradient: True if the row has a gradient; it is zero otherwise.
    """
    followed = _FollowedRow(leaf, analysis.flow, analysis.half.inner.eqns, assumed or {})
    known = begins or {}
    for n, v in analysis.inputs.items():
        if followed.is_row(v):
            followed.kinds[v] = known[n] if n in known else Alias(v)
    gradient = analysis.inputs.get(Gradient(leaf))
    if gradient is not None:
        zero = np.zeros((), gradient.aval.dtype)
        followed.kinds[gradient] = Alias(gradient) if any_gradient else zero
    followed.run()
    return followed


def _skips(analysis: RowAnalysis, leaf: str, assumed: Mapping[Var, _Kind]) -> bool:
    """Return True if rows stay unchanged for any gradient, with these outcomes of conditions."""
    followed = _follow(analysis, leaf, assumed=assumed, any_gradient=True)
    rows = _arrays_with_rows(analysis, leaf)
    return all(are_equal(followed.kind(analysis.outputs[n]), Alias(v)) for n, v in rows.items())


def _decider(
    cases: Sequence[_FollowedRow], holds: Sequence[bool], text_of: Mapping[Var, str]
) -> str:
    """Return the condition that decides about a property, for users; empty if none does.

    Args:
      holds: True for the cases with the property.
      text_of: condition to its text.
    """
    yes = [case for case, x in zip(cases, holds, strict=True) if x]
    no = [case for case, x in zip(cases, holds, strict=True) if not x]
    differences: list[list[Var]] = []
    for a, b in itertools.product(yes, no):
        differences.append(
            [v for v, x in a.assumed.items() if v in b.assumed and b.assumed[v] != x]
        )
    if not differences:
        return ""
    return text_of[min(differences, key=len)[0]]


def constant_outputs(program: Program) -> dict[str, Any]:
    """Return the outputs of an init that repeat one number, with that number, by name."""
    followed = _FollowedRow("", Flow({}), program.inner.eqns, {})
    kinds = {n: followed.kind(a) for n, a in program.outvars.items()}
    return {n: kind for n, kind in kinds.items() if isinstance(kind, np.ndarray)}


class _FollowedRow:
    """Kinds of values at one row, in an update or a branch of it.

    Args:
      leaf: the leaf.
      flow: the row analysis of the equations.
      eqns: the equations.
      assumed: outcomes of conditions.
      parent: the row outside of a branch; None for an update.
      outer: a branch's inputs to the values outside.

    Attributes:
      kinds: value to its kind.
      counts, positions: as in `ZeroGradient`.
      open: a condition that enters rows and whose outcome is not assumed; None if there is none.
      loop: a loop that rows enter; empty if there is none.
    """

    def __init__(
        self,
        leaf: str,
        flow: Flow,
        eqns: Sequence[JaxprEqn],
        assumed: Mapping[Var, _Kind],
        parent: _FollowedRow | None = None,
        outer: Mapping[Var, Atom] | None = None,
    ) -> None:
        self.leaf, self.flow, self.eqns, self.assumed = leaf, flow, eqns, assumed
        self.kinds: dict[Var, _Kind] = {}
        self.counts = self.positions = self.loop = ""
        self.open: _Condition | None = None
        self._producers = {v: e for e in eqns for v in e.outvars}
        self._parent, self._outer = parent, outer or {}

    def is_row(self, a: Atom) -> bool:
        """Return True if a value has rows of the leaf."""
        layout = self.flow.layout(a)
        return isinstance(layout, RowAxis) and layout.leaf == self.leaf

    def kind(self, a: Atom) -> _Kind:
        """Return the kind of a value at such a row; a shared number is its own kind."""
        if isinstance(a, Literal):
            if np.ndim(a.val):
                return _OTHER
            return np.asarray(a.val, a.aval.dtype)
        if a in self.assumed:
            return self.assumed[a]
        if a not in self.kinds:
            self.kinds[a] = _OTHER
            eqn = self._producers.get(a)
            if eqn is not None and (facts_of(eqn).elementwise or moved_operands(eqn)):
                self.kinds[a] = _result_kind(eqn, [*map(self.kind, eqn.invars)], a)
        return self.kinds[a]

    def run(self) -> None:
        """Follow all equations."""
        for i, eqn in enumerate(self.eqns):
            step = self.flow.steps.get(i)
            if step is None or not any(map(self._is_row_layout, step.operands)):
                continue
            self._find_condition(eqn)
            if eqn.primitive.name == COND:
                self._cond(eqn, step)
                continue
            if eqn.primitive.name in (SCAN, WHILE):
                self.loop = self.loop or _text(eqn)
            for a, row in zip(eqn.invars, step.operands, strict=True):
                is_shared = row is not None and isinstance(self.flow.layout(a), Shared)
                alike = row is None or not is_shared or self._is_alike(a, row.axis)
                self.positions = self.positions or ("" if alike else _text(eqn))
            kinds = [*map(self.kind, eqn.invars)]
            if step.reduce:
                neutral = isinstance(kinds[0], np.ndarray) and kinds[0] == _NEUTRAL.get(
                    step.reduce, np.nan
                )
                self.counts = self.counts or ("" if neutral else _text(eqn))
                continue
            for v in eqn.outvars:
                self.kinds[v] = _result_kind(eqn, kinds, v)

    def _is_row_layout(self, layout: Any) -> bool:
        return isinstance(layout, RowAxis) and layout.leaf == self.leaf

    def _find_condition(self, eqn: JaxprEqn) -> None:
        """Note a condition that enters rows: a boolean, or a condition of a shared number."""
        for a in eqn.invars:
            if not isinstance(a, Literal) and (a.aval.dtype == bool or not self.is_row(a)):
                self._open_first(a)
        if eqn.primitive.name == COND:
            self._set_open(eqn.invars[0], range(len(bodies(eqn))), eqn)

    def _open_first(self, a: Atom) -> None:
        """Note the first condition that enters a value."""
        stack, seen = [a], set[Var]()
        while stack and self.open is None:
            a = stack.pop()
            if isinstance(a, Literal) or a in seen or isinstance(self.kind(a), np.ndarray):
                continue
            seen.add(a)
            eqn = self._producers.get(a)
            if eqn is None and a in self._outer and self._parent is not None:
                self._parent._open_first(self._outer[a])
                self.open = self._parent.open
            elif eqn is not None and _conditions_are_in_operands(eqn):
                stack += eqn.invars
            elif a.aval.dtype == bool and (not self.is_row(a) or _compares_integers(eqn)):
                self._set_open(a, (False, True), eqn)

    def _set_open(self, a: Atom, outcomes: Sequence[Any], eqn: JaxprEqn | None) -> None:
        """Note a condition, unless there is one or its value is known."""
        if self.open is not None or isinstance(a, Literal) or isinstance(self.kind(a), np.ndarray):
            return
        values = tuple(np.asarray(x, a.aval.dtype) for x in outcomes)
        text = "a condition of its state" if eqn is None else _text(eqn)
        self.open = _Condition(a, values, text)

    def _cond(self, eqn: JaxprEqn, step: Step) -> None:
        """Follow the branch that runs, or the common results of all branches."""

        def run(number: int, branch: Any, kinds: list[_Kind]) -> tuple[None, list[_Kind]]:
            inner = opened(branch)
            outer = dict(zip(inner.invars, eqn.invars[1:], strict=True))
            inside = _FollowedRow(
                self.leaf, step.bodies[number], inner.eqns, self.assumed, self, outer
            )
            inside.kinds |= zip(inner.invars, kinds, strict=True)
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
        eqn = self._producers.get(a)
        if eqn is None:
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            dims, shape = eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
            return axis not in dims or shape[dims.index(axis)] == 1 != a.aval.shape[axis]
        if not facts_of(eqn).elementwise:
            return False
        return all(self._is_alike(x, axis) for x in eqn.invars if x.aval.ndim == a.aval.ndim)


def _conditions_are_in_operands(eqn: JaxprEqn) -> bool:
    """Return True if the search for conditions continues in the operands of an equation."""
    is_logic = eqn.primitive.name in ("and", "or", "xor", "not")
    compares = any(v.aval.dtype == bool for v in eqn.outvars) and not is_logic
    return bool(moved_operands(eqn)) or (facts_of(eqn).elementwise and not compares)


def _compares_integers(eqn: JaxprEqn | None) -> bool:
    """Return True if a boolean compares integers, such as counts."""
    return eqn is not None and any(jnp.issubdtype(a.aval.dtype, jnp.integer) for a in eqn.invars)


def _reads(kind: _Kind) -> frozenset[Var]:
    """Return the row-wise inputs that a value depends on."""
    if isinstance(kind, Alias):
        return frozenset([kind.var])
    return kind.reads if isinstance(kind, _Other) else frozenset()


def _result_kind(eqn: JaxprEqn, kinds: Sequence[_Kind], out: Var) -> _Kind:
    """Return the kind of an equation's result; reductions are within a row.

    Args:
      kinds: the kinds of its operands.
    """
    # 0 / 0 is not 0: a zero divisor hides nothing
    divides = eqn.primitive.name == "div"
    is_factor = lambda i: not (divides and is_number(kinds[i], 0))
    kind = fold(eqn, list(eqn.outvars).index(out), kinds, is_factor, number_by_jax)
    if kind is not None:
        return kind
    return _Other(frozenset[Var]().union(*map(_reads, kinds)))


def _join(one: _Kind, other: _Kind) -> _Kind:
    if are_equal(one, other):
        return one
    return _Other(_reads(one) | _reads(other))


_BRANCHES = ForwardAnalysis[_Kind](
    _join,
    rule=lambda eqn, ins: None,
    default=lambda aval, value: _OTHER,
    branch=lambda index: int(index) if is_number(index) else None,
)


def _text(eqn: JaxprEqn) -> str:
    """Return the name and the line of an equation, for users."""
    line = origin_of(eqn) or line_of(eqn)
    return eqn.primitive.name + (f" ({line})" if line else "")
