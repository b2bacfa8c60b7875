"""What an update does to rows whose gradient is zero.

Rows that nobody looked up have a gradient of zero. Where the update then leaves a row, and its part of the optimizer's
state, as they are, it is enough to update the rows that were looked up: it is what one device does. What each value of
the update is at such a row is followed through its equations: one number for all of it, an array of the state as it
was, or something else. A number times zero is zero here, though it may be infinite.

Where something is reduced over rows (a clip by the norm of the gradients), such rows must add nothing to it.

A row that nobody has looked up yet may rest though others move: Adam's moments begin with zero, and stay so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import COND, ELEMENTWISE, Atom, JaxprEqn, Literal, Var, bodies, line_of, opened, origin_of
from dtrans.ir.program import Program
from dtrans.rows.analysis import RowAnalysis
from dtrans.rows.flow import Flow
from dtrans.rows.layout import RowAxis, Shared, leaves_of
from dtrans.rows.rules import Step
from dtrans.step.cut import Gradient


@dataclasses.dataclass(frozen=True)
class _Same:
    """An input, as it was, or times a number."""

    var: Var
    factor: float = 1.0


_OTHER = object()
_Kind = Any  # a number, `_Same`, or `_OTHER`

_NEUTRAL = {"sum": 0, "or": False, "and": True, "xor": False}  # what adds nothing to a reduction


@dataclasses.dataclass(frozen=True)
class ZeroGradient:
    """What an update does to rows of a leaf whose gradient is zero.

    Attributes:
      moves: what changes though nobody looked it up: the leaf, or arrays of the state.
      counts: the equation by which such rows enter what is reduced over all of them; empty where none does.
      positions: the equation that makes of a row's number what enters it; empty where none does.
      state: the arrays of the optimizer's state that have a row for each row of the leaf.
      unlike: those of them whose rows are not along dimension 0.
      rests: what arrays of the state have at rows that do not move, by name: what they begin with, where such rows rest
        until they are looked up for the first time. None where they do not.
      decays: the factor of each array of the state that moves, where all that moves the row is such arrays, and each is
        multiplied by one number in every step; empty elsewhere.
    """

    moves: tuple[str, ...]
    counts: str
    positions: str
    state: tuple[str, ...]
    unlike: tuple[str, ...]
    rests: Mapping[str, Any] | None
    decays: Mapping[str, float]


def at_zero_gradient(analysis: RowAnalysis, leaf: str, begins: Mapping[Any, Any]) -> ZeroGradient:
    """Follow a row with a gradient of zero through an update that lets the leaf be cut.

    Args:
      begins: arrays of the optimizer's state that begin as one number: that, by name.
    """
    inputs, outputs = analysis.inputs, analysis.outputs

    def followed(begins: Mapping[Any, Any]) -> _Followed:
        seen = _Followed(leaf, analysis.flow, analysis.half.inner.eqns)
        seen.kinds |= {v: begins[n] if n in begins else _Same(v) for n, v in inputs.items() if seen.is_row(v)}
        gradient = inputs.get(Gradient(leaf))
        if gradient is not None:
            seen.kinds[gradient] = np.zeros((), gradient.aval.dtype)
        before = dict(seen.kinds)
        seen.run()
        seen.moves = tuple(n for n, v in rows.items() if not _equal(seen.kind(outputs[n]), before[v]))
        return seen

    of_leaf = lambda v: leaf in leaves_of([analysis.layout(v)]) and isinstance(analysis.layout(v), RowAxis)
    rows = {n: v for n, v in inputs.items() if isinstance(n, str) and n in outputs and of_leaf(v)}
    seen = followed({})
    state = tuple(n for n in rows if n != leaf)
    unlike = tuple(n for n in state if analysis.layout(inputs[n]) != RowAxis(leaf, 0))
    begun = {n: begins[n] for n in state if n in begins}
    rests = None if followed(begun).moves else begun
    after = {n: seen.kind(outputs[n]) for n in state}
    scaled = {n: k.factor for n, k in after.items() if n in seen.moves and isinstance(k, _Same) and k.var is rows[n]}
    gone = {n: np.zeros((), rows[n].aval.dtype) for n in scaled}
    decay = {n for n in seen.moves if n != leaf} == scaled.keys() and all(abs(c) < 1 for c in scaled.values())
    decays = scaled if decay and not followed(gone).moves else {}
    return ZeroGradient(seen.moves, seen.counts, seen.positions, state, unlike, rests, decays)


def numbers_of(program: Program) -> dict[str, Any]:
    """Those outputs of an init that are one number: that, by name."""
    seen = _Followed("", Flow({}), program.inner.eqns)
    kinds = {n: seen.kind(a) for n, a in program.outvars.items()}
    return {n: k for n, k in kinds.items() if isinstance(k, np.ndarray)}


class _Followed:
    """What values are at a row with a gradient of zero, in an update or a branch of it."""

    def __init__(self, leaf: str, flow: Flow, eqns: Sequence[JaxprEqn]) -> None:
        self.leaf, self.flow, self.eqns = leaf, flow, eqns
        self.kinds: dict[Var, _Kind] = {}
        self.counts = self.positions = ""
        self.moves: tuple[str, ...] = ()
        self._made_by = {v: e for e in eqns for v in e.outvars}

    def is_row(self, a: Atom) -> bool:
        """Whether a value has rows of the leaf."""
        layout = self.flow.layout(a)
        return isinstance(layout, RowAxis) and layout.leaf == self.leaf

    def kind(self, a: Atom) -> _Kind:
        """What a value is at such a row; a shared one, if it is one number."""
        if isinstance(a, Literal):
            return np.asarray(a.val, a.aval.dtype) if not np.ndim(a.val) else _OTHER
        if a not in self.kinds:
            eqn = self._made_by.get(a)
            plain = eqn is not None and eqn.primitive.name in {"broadcast_in_dim", *ELEMENTWISE}
            self.kinds[a] = _made(eqn, [*map(self.kind, eqn.invars)], a) if plain and eqn is not None else _OTHER
        return self.kinds[a]

    def run(self) -> None:
        """Follow all equations."""
        for i, eqn in enumerate(self.eqns):
            step = self.flow.steps.get(i)
            if step is None or not any(isinstance(x, RowAxis) and x.leaf == self.leaf for x in step.operands):
                continue
            if eqn.primitive.name == COND:
                self._cond(eqn, step)
                continue
            for a, row in zip(eqn.invars, step.operands, strict=True):
                alike = row is None or not isinstance(self.flow.layout(a), Shared) or self._is_alike(a, row.axis)
                self.positions = self.positions or ("" if alike else _said(eqn))
            given = [*map(self.kind, eqn.invars)]
            if step.reduce:
                neutral = isinstance(given[0], np.ndarray) and given[0] == _NEUTRAL.get(step.reduce, np.nan)
                self.counts = self.counts or ("" if neutral else _said(eqn))
                continue
            for v in eqn.outvars:
                self.kinds[v] = _made(eqn, given, v)

    def _cond(self, eqn: JaxprEqn, step: Step) -> None:
        """What all branches make alike."""
        made = []
        for branch, flow in zip(bodies(eqn), step.bodies, strict=True):
            inner = opened(branch)
            inside = _Followed(self.leaf, flow, inner.eqns)
            inside.kinds |= {v: self.kind(a) for v, a in zip(inner.invars, eqn.invars[1:], strict=True)}
            inside.run()
            self.counts = self.counts or inside.counts
            self.positions = self.positions or inside.positions
            made.append([*map(inside.kind, inner.outvars)])
        for v, *kinds in zip(eqn.outvars, *made, strict=True):
            self.kinds[v] = kinds[0] if all(_equal(k, kinds[0]) for k in kinds) else _OTHER

    def _is_alike(self, a: Atom, axis: int) -> bool:
        """Whether a shared value is the same at each row."""
        if isinstance(a, Literal) or not a.aval.ndim or a.aval.shape[axis] == 1:
            return True
        eqn = self._made_by.get(a)
        if eqn is None:
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            dims, shape = eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
            return axis not in dims or shape[dims.index(axis)] == 1 != a.aval.shape[axis]
        like = eqn.primitive.name in ELEMENTWISE
        return like and all(self._is_alike(x, axis) for x in eqn.invars if x.aval.ndim == a.aval.ndim)


def _made(eqn: JaxprEqn, given: Sequence[_Kind], out: Var) -> _Kind:
    """What an equation makes of its operands at such a row."""
    name = eqn.primitive.name
    is_zero = lambda k: isinstance(k, np.ndarray) and k == 0
    if name in ("copy", "copy_p", "optimization_barrier", "reshape", "broadcast_in_dim", "squeeze", "transpose"):
        kept = isinstance(given[0], np.ndarray) or out.aval.shape == eqn.invars[0].aval.shape
        return given[0] if kept else _OTHER
    if name == "reduce_sum" and is_zero(given[0]):  # within a row
        return np.zeros((), out.aval.dtype)
    if name == "convert_element_type" and isinstance(given[0], _Same):
        return given[0] if out.aval.dtype == eqn.invars[0].aval.dtype else _OTHER
    if name == "select_n":
        which, *cases = given
        if isinstance(which, np.ndarray):
            return cases[int(which)]
        return cases[0] if all(_equal(c, cases[0]) for c in cases) else _OTHER
    if name not in ELEMENTWISE:
        return _OTHER
    zero = np.zeros((), out.aval.dtype)
    if name == "mul" and any(map(is_zero, given)):
        return zero
    if name == "mul" and [isinstance(k, _Same) for k in given].count(True) == 1:
        of, by = given if isinstance(given[0], _Same) else reversed(given)
        return dataclasses.replace(of, factor=of.factor * float(by)) if isinstance(by, np.ndarray) else _OTHER
    if name == "div" and is_zero(given[0]) and not is_zero(given[1]):
        return zero
    if name in ("add", "add_any") and any(map(is_zero, given)):
        return given[1] if is_zero(given[0]) else given[0]
    if name == "sub" and is_zero(given[1]):
        return given[0]
    if all(isinstance(k, np.ndarray) for k in given) and not eqn.effects:
        made = eqn.primitive.bind(*map(jnp.asarray, given), **eqn.params)
        return np.asarray(made[0] if eqn.primitive.multiple_results else made)
    return _OTHER


def _equal(a: _Kind, b: _Kind) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(a == b)
    return isinstance(a, _Same) and a == b


def _said(eqn: JaxprEqn) -> str:
    where = origin_of(eqn) or line_of(eqn)
    return eqn.primitive.name + (f" ({where})" if where else "")
