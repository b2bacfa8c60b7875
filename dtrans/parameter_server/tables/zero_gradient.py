"""Effect of an update on rows whose gradient is zero.

Rows that no trainer looked up have a gradient of zero. If the update leaves these rows and their
optimizer state unchanged, servers need to update only the rows that were looked up.

The analysis evaluates the update for one row with zero gradient. It uses abstract values: a known
number, an array of the state that is unchanged at this row, or an unknown value. It assumes x * 0 =
0 for all x, even if x could be infinite. If the update reduces over rows (a clip by the norm of the
gradients), the row must not change the result.

Some optimizers change a row with zero gradient after its first lookup, but not before: Adam's
moments begin with zero and stay zero.

A *lazy* update (`dtrans.Rows(update="lazy")`) runs on looked-up rows only. This works for Adam:
each step uses a row's gradient at once, and only the decay of the moments of other rows is missing.
It does not work for `optax.MultiSteps`, which accumulates gradients until a later step: the later
step must update all rows with accumulated gradients. `find_accumulation` detects such optimizers.
It evaluates the update for each outcome of each condition.
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
from dtrans.ir.dataflow import producers_of
from dtrans.ir.folding import Alias, are_equal, fold, is_number, number_by_jax
from dtrans.ir.interpret import ForwardAnalysis, enter
from dtrans.ir.program import Program
from dtrans.ir.selection import invert, values_at
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.flow import Flow
from dtrans.rows.layout import RowAxis, Shared, leaves_of
from dtrans.rows.rules import Step
from dtrans.step.halves import Gradient


@dataclasses.dataclass(frozen=True)
class _Other:
    """Value that the analysis of an update does not know, except for the inputs it depends on.

    Attributes:
      reads: inputs on which the value depends; each is an array with one entry for each row.
    """

    reads: frozenset[Var] = frozenset()


_OTHER = _Other()
# Type of an abstract value: a number (NumPy array), `Alias` (an unchanged input), or `_Other`.
_Kind = Any


@dataclasses.dataclass(frozen=True)
class _Condition:
    """Boolean, or index of a branch of a `cond`, that selects the new values of a row.

    Attributes:
      var: the variable of the boolean or index.
      outcomes: its possible values, such as True and False.
      text: description for users of the equation that computes the condition.
    """

    var: Var
    outcomes: tuple[np.ndarray, ...]
    text: str


MOST_CASES = 256  # largest number of combinations of outcomes that `find_accumulation` evaluates

_NEUTRAL = {"sum": 0, "or": False, "and": True, "xor": False}  # neutral elements of reductions


@dataclasses.dataclass(frozen=True)
class ZeroGradient:
    """Effect of one optimizer step on a row of a parameter, if the row's gradient is zero.

    In a step, most rows of an embedding table have a gradient of zero. If the update does not
    change these rows, servers update only the other rows.

    Attributes:
      changes: names of the arrays that change in this row: the parameter, or optimizer state.
      reduction_over_rows: description of a reduction over all rows, if this row changes its result;
        otherwise empty. (A norm of gradients does not change, for example, because the row's
        gradient is zero.)
      index_dependence: description of an equation that computes a row's value from the row's index;
        empty if there is none.
      state: names of the arrays of the optimizer state that have a row for each row of the
        parameter.
      state_on_other_axis: names of arrays in `state` whose rows are not along dimension 0.
      initial_values: the initial values of arrays in `state`, by name, if rows keep them until
        their first gradient. None if some array changes before.
    """

    changes: tuple[str, ...]
    reduction_over_rows: str
    index_dependence: str
    state: tuple[str, ...]
    state_on_other_axis: tuple[str, ...]
    initial_values: Mapping[str, Any] | None


def at_zero_gradient(analysis: RowAnalysis, leaf: str, begins: Mapping[Any, Any]) -> ZeroGradient:
    """Return the effect of an update on rows of `leaf` that have a gradient of zero.

    Args:
      analysis: the analysis of the update's rows (`dtrans.rows`).
      leaf: a leaf that the optimizer updates row by row.
      begins: the arrays that the init fills with one number, such as zero; a dict from name to this
        number.
    """
    rows = _arrays_with_rows(analysis, leaf)
    followed, moves = _moves(analysis, leaf, rows, {})
    state = tuple(n for n in rows if n != leaf)
    unlike = tuple(n for n in state if analysis.layout(rows[n]) != RowAxis(leaf, 0))
    initial = {n: begins[n] for n in state if n in begins}
    _, initial_moves = _moves(analysis, leaf, rows, initial)
    initial_values = None if initial_moves else initial
    return ZeroGradient(moves, followed.counts, followed.positions, state, unlike, initial_values)


def _moves(
    analysis: RowAnalysis, leaf: str, rows: Mapping[str, Var], begins: Mapping[Any, Any]
) -> tuple[_FollowedRow, tuple[str, ...]]:
    """Evaluate the update for a row with zero gradient; also return the names of changed arrays.

    Args:
      rows: the arrays with rows of the leaf, by name.
      begins: arrays that are filled with one known number; a dict from name to this number.
    """
    followed = _follow(analysis, leaf, begins=begins)
    moves = []
    for n, v in rows.items():
        if not are_equal(followed.kind(analysis.outputs[n]), begins.get(n, Alias(v))):
            moves.append(n)
    return followed, tuple(moves)


def find_accumulation(analysis: RowAnalysis, leaf: str) -> str:
    """Return the reason why an update does not use a row's gradient at once; empty if it does.

    For example, `optax.MultiSteps` accumulates gradients for a later step. The function evaluates
    the update for a row with zero gradient and unknown state, once for each outcome of each
    condition in the update. An update accumulates gradients if one of these answers differs between
    two outcomes:

    - Does the new leaf, or a new state array, depend on other arrays (`optax.MultiSteps`, a
      lookahead)?
    - Does the new leaf, or a new state array, depend on its own old value?

    Outcomes with which a step ignores the gradients of all rows (`optax.apply_if_finite`) are left
    out.

    A condition is a boolean that all rows share, or a comparison of integers of the row, such as a
    step count for each row. Not detected: a factor that is zero in some steps, if it is computed
    rather than selected by a condition.
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
        others = set[Var]()
        reads_others: list[bool] = []
        reads_itself: list[bool] = []
        for case in cases:
            reads = _reads(case.kind(outputs[n]))
            others |= reads - {v}
            reads_others.append(bool(reads - {v}))
            reads_itself.append(v in reads)
        if cause := _decider(cases, reads_others, text_of):
            waiting = ", ".join(sorted(values_at(names, others)))
            verb = "enter" if len(others) > 1 else "enters"
            return f"{waiting} {verb} {n} only in steps that {cause} selects"
        if cause := _decider(cases, reads_itself, text_of):
            return f"{n} is replaced only in steps that {cause} selects"
    return ""


def _arrays_with_rows(analysis: RowAnalysis, leaf: str) -> dict[str, Var]:
    """Return the leaf, and the arrays of its state that have a row for each row of the leaf."""
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
    """Evaluate an update for one row of a leaf, as far as the row's values are known.

    The result contains for each variable a known number, an unchanged input, or an unknown value.

    Args:
      begins: arrays of the state that are filled with one known number; a dict from name to this
        number.
      assumed: maps the variable of a condition to the assumed outcome.
      any_gradient: True for a row with an unknown gradient; False for a gradient of zero.
    """
    followed = _FollowedRow(leaf, analysis.flow, analysis.half.inner.eqns, assumed or {})
    known = begins or {}
    for n, v in analysis.inputs.items():
        if followed.is_row(v):
            followed.kinds[v] = known.get(n, Alias(v))
    gradient = analysis.inputs.get(Gradient(leaf))
    if gradient is not None:
        followed.kinds[gradient] = np.zeros((), gradient.aval.dtype)
        if any_gradient:
            followed.kinds[gradient] = Alias(gradient)
    followed.run()
    return followed


def _skips(analysis: RowAnalysis, leaf: str, assumed: Mapping[Var, _Kind]) -> bool:
    """Return True if, with these outcomes of conditions, the update changes no row at all.

    For example, `optax.apply_if_finite` skips the update if a gradient is not finite.

    Args:
      analysis: the analysis of the update's rows (`dtrans.rows`).
      leaf: name of the table.
      assumed: the outcome of each condition in the update, by the condition's variable.
    """
    followed = _follow(analysis, leaf, assumed=assumed, any_gradient=True)
    rows = _arrays_with_rows(analysis, leaf)
    return all(are_equal(followed.kind(analysis.outputs[n]), Alias(v)) for n, v in rows.items())


def _decider(
    cases: Sequence[_FollowedRow], holds: Sequence[bool], text_of: Mapping[Var, str]
) -> str:
    """Describe the condition on which a property of an update depends; empty if there is none.

    The update was evaluated several times, with different outcomes of its conditions. The function
    compares each evaluation that has the property with each one that lacks it. From the most
    similar pair, it takes a condition with different outcomes.

    Args:
      cases: the evaluations of the update.
      holds: for each evaluation, True if it has the property.
      text_of: maps the variable of a condition to the condition's description.
    """
    yes: list[_FollowedRow] = []
    no: list[_FollowedRow] = []
    for case, has_property in zip(cases, holds, strict=True):
        (yes if has_property else no).append(case)
    differences: list[list[Var]] = []
    for a, b in itertools.product(yes, no):
        different = []
        for v, outcome in a.assumed.items():
            if v in b.assumed and b.assumed[v] != outcome:
                different.append(v)
        differences.append(different)
    if not differences:
        return ""
    return text_of[min(differences, key=len)[0]]


def constant_outputs(program: Program) -> dict[str, Any]:
    """Return the outputs of an init that are filled with one number, as {name: number}.

    For Adam, these are the moments, which begin with zeros.
    """
    followed = _FollowedRow("", Flow({}), program.inner.eqns, {})
    found = {}
    for n, a in program.outvars.items():
        kind = followed.kind(a)
        if isinstance(kind, np.ndarray):
            found[n] = kind
    return found


class _FollowedRow:
    """Evaluation of an optimizer step for one row that has a gradient of zero.

    Each variable has an abstract value in this row: a known number, an unchanged input (`Alias`),
    or unknown. If a boolean with an unknown value selects the values of a row, the caller evaluates
    the step again for True and for False.

    Args:
      leaf: name of the parameter.
      flow: the analysis of the equations' rows (`dtrans.rows`).
      eqns: the equations, in order.
      assumed: outcomes of conditions that this evaluation assumes, by variable.
      parent: for a branch, the evaluation of the equations around it; None for the whole step.
      outer: for each input of a branch, the operand that the `cond` passes to it.

    Attributes:
      kinds: abstract values of all variables that were read (dict by variable).
      counts, positions: as in `ZeroGradient`.
      open: the first condition that selects values of the row, and has an outcome that is neither
        known nor assumed. None if there is none.
      loop: description of a loop that reads rows; empty if there is none.
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
        self._producers = producers_of(eqns)
        self._parent, self._outer = parent, outer or {}

    def is_row(self, a: Atom) -> bool:
        """Return True if a value has rows of the leaf."""
        layout = self.flow.layout(a)
        return isinstance(layout, RowAxis) and layout.leaf == self.leaf

    def kind(self, a: Atom) -> _Kind:
        """Return the abstract value of an atom in this row.

        It is a number, an unchanged input (`Alias`), or `_Other` if the value is unknown.
        """
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
        """Find out what is known about the outputs of all equations, in one row of the leaf."""
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
                if row is None or not isinstance(self.flow.layout(a), Shared):
                    continue
                # The operand does not come from the leaf's arrays, but differs between rows, such
                # as an `iota`.
                if not self._is_alike(a, row.axis):
                    self.positions = self.positions or _text(eqn)
            kinds = [*map(self.kind, eqn.invars)]
            if step.reduce:
                neutral = _NEUTRAL.get(step.reduce, np.nan)
                if not isinstance(kinds[0], np.ndarray) or kinds[0] != neutral:
                    self.counts = self.counts or _text(eqn)
                continue
            for v in eqn.outvars:
                self.kinds[v] = _result_kind(eqn, kinds, v)

    def _is_row_layout(self, layout: Any) -> bool:
        return isinstance(layout, RowAxis) and layout.leaf == self.leaf

    def _find_condition(self, eqn: JaxprEqn) -> None:
        """Search an equation for a condition that selects its outputs and has an unknown outcome.

        A condition is a boolean operand, or the branch index of a `cond`. This method stores the
        first one in `open`. The caller then evaluates the step again for each of its outcomes.
        """
        for a in eqn.invars:
            if not isinstance(a, Literal) and (a.aval.dtype == bool or not self.is_row(a)):
                self._open_first(a)
        if eqn.primitive.name == COND:
            self._set_open(eqn.invars[0], range(len(bodies(eqn))), eqn)

    def _open_first(self, a: Atom) -> None:
        """Search the operands of a value backward for an unknown condition, and store it.

        Nothing changes if `open` already has a condition.
        """
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
        """Store a condition in `open`, unless its outcome is known or `open` has one already.

        Args:
          a: the boolean or branch index.
          outcomes: its possible values.
          eqn: the equation that computes it, for the description; None for an input.
        """
        if self.open is not None or isinstance(a, Literal) or isinstance(self.kind(a), np.ndarray):
            return
        values = tuple(np.asarray(x, a.aval.dtype) for x in outcomes)
        text = "a condition of its state"
        if eqn is not None:
            text = _text(eqn)
        self.open = _Condition(a, values, text)

    def _cond(self, eqn: JaxprEqn, step: Step) -> None:
        """Evaluate a `cond`: the branch that runs, or all branches if the condition is unknown."""

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
        """Return True if all entries of an array along `axis` are known to be equal."""
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
    """Return True if the search for a condition continues at the operands of an equation.

    This is the case for elementwise arithmetic, for `and`, `or`, `xor` and `not`, and for equations
    that move entries. The search stops at a comparison, such as `a < b`, because its result is
    itself a condition.
    """
    is_logic = eqn.primitive.name in ("and", "or", "xor", "not")
    compares = any(v.aval.dtype == bool for v in eqn.outvars) and not is_logic
    return bool(moved_operands(eqn)) or (facts_of(eqn).elementwise and not compares)


def _compares_integers(eqn: JaxprEqn | None) -> bool:
    """Return True for an equation that reads integers, such as step counts."""
    return eqn is not None and any(jnp.issubdtype(a.aval.dtype, jnp.integer) for a in eqn.invars)


def _reads(kind: _Kind) -> frozenset[Var]:
    """Return the inputs that determine a value, among the leaf and its optimizer state."""
    if isinstance(kind, Alias):
        return frozenset([kind.var])
    if isinstance(kind, _Other):
        return kind.reads
    return frozenset()


def _result_kind(eqn: JaxprEqn, kinds: Sequence[_Kind], out: Var) -> _Kind:
    """Return the abstract value of an equation's output.

    The equation is elementwise in rows, or reduces within each row.

    Args:
      eqn: the equation.
      kinds: the abstract values of its operands.
      out: one of its outputs.
    """
    # `fold` assumes x * 0 = 0. It may assume 0 / x = 0 only if the divisor x is not 0.
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
    """Return a description of an equation for users: its name and its line."""
    line = origin_of(eqn) or line_of(eqn)
    if not line:
        return eqn.primitive.name
    return f"{eqn.primitive.name} ({line})"
