"""Which integers of a jaxpr count a dimension: the number of a row, at every row.

A value counts a dimension if it is made of an `iota` of it by what changes no number: broadcasts, casts that it fits
into, the treatment of negative indices, clamps that do not bite. It may come into a call, a loop or a branch, or out of
one. A value that begins elsewhere, is reversed or permuted counts nothing: what is not proven is not known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import (
    COND,
    REMAT,
    SCAN,
    WHILE,
    Atom,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    call_body,
    constants,
    opened,
    scan_counts,
    while_counts,
)


@dataclasses.dataclass(frozen=True)
class Count:
    """The number of an entry along a dimension, which has `size` of them."""

    axis: int
    size: int


@dataclasses.dataclass(frozen=True)
class Same:
    """One number everywhere."""

    value: int


Known = Count | Same | None
Given = Callable[["int | None"], Known]


_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_DEPTH = 40  # of equations between an iota and the index that is made of it; more are not looked through


class Numbers:
    """What is known of the integers of a jaxpr; it is found when it is asked for."""

    def __init__(self, jaxpr: Any, given: Mapping[Var, Given]) -> None:
        inner = opened(jaxpr)
        self.given = given
        self.values = dict(zip(inner.constvars, constants(jaxpr), strict=False))
        self.made_by = {v: (e, i) for e in inner.eqns for i, v in enumerate(e.outvars)}
        self.found: dict[tuple[Var, int | None], Known] = {}

    def components(self, indices: Atom) -> list[Atom]:
        """The components of indices, if they are joined of them; nothing else."""
        eqn = self.made_by[indices][0] if isinstance(indices, Var) and indices in self.made_by else None
        if eqn is None or eqn.primitive.name != "concatenate" or eqn.params["dimension"] != indices.aval.ndim - 1:
            return []
        return list(eqn.invars) if all(a.aval.shape[-1] == 1 for a in eqn.invars) else []

    def known(self, atom: Atom, component: int | None = None, depth: int = 0) -> Known:
        """What is known of a value, or of one entry of its last dimension."""
        kind = np.dtype(atom.aval.dtype).kind if isinstance(atom.aval.dtype, np.dtype) else ""
        if kind not in ("b", "i", "u") or depth > _DEPTH or 0 in atom.aval.shape:
            return None
        if isinstance(atom, Literal):
            return _of_value(np.asarray(atom.val), component)
        if (atom, component) not in self.found:
            self.found[atom, component] = self._asked(atom, component, depth + 1)
        return self.found[atom, component]

    def _asked(self, var: Var, component: int | None, depth: int) -> Known:
        if var in self.values:
            return _of_value(np.asarray(self.values[var]), component)
        if var in self.given:
            return self.given[var](component)
        if var not in self.made_by:
            return None
        eqn, out = self.made_by[var]
        name = eqn.primitive.name
        if name == "iota":
            d, size = eqn.params["dimension"], var.aval.shape[eqn.params["dimension"]]
            counts = Count(d, size) if _fits(size - 1, var.aval.dtype) else None
            if component is not None and d == var.aval.ndim - 1:
                return Same(component) if counts else None
            return counts
        if name == "broadcast_in_dim" and len(eqn.invars) == 1:
            return self._broadcast(eqn, component, depth)
        if name == "concatenate" and component is not None and eqn.params["dimension"] == var.aval.ndim - 1:
            return self._concatenated(eqn, component, depth)
        if component is None and name in ("reshape", "squeeze", "transpose"):
            return _moved(eqn, self.known(eqn.invars[0], None, depth))
        if name == SCAN or name in REMAT or call_body(eqn, rules=False) is not None:
            return self._of_body(eqn, out, component, depth)
        if name in _BY_ENTRY and all(a.aval.shape in ((), var.aval.shape) for a in eqn.invars):
            of = [self.known(a, component if a.aval.ndim else None, depth) for a in eqn.invars]
            return _BY_ENTRY[name](eqn, of)
        return None

    def _of_body(self, eqn: JaxprEqn, out: int, component: int | None, depth: int) -> Known:
        """What is known of what a body makes; of a scan, stacked."""
        (body,), (given,) = bodies(eqn), given_to_bodies(eqn, functools.partial(self.known, depth=depth))
        inner = opened(body)
        known = Numbers(body, dict(zip(inner.invars, given, strict=True))).known(inner.outvars[out], component, depth)
        if eqn.primitive.name != SCAN:
            return known
        if out < scan_counts(eqn)[1]:
            return None
        return Count(known.axis + 1, known.size) if isinstance(known, Count) else known

    def _broadcast(self, eqn: JaxprEqn, component: int | None, depth: int) -> Known:
        (x,), dims, shape = eqn.invars, eqn.params["broadcast_dimensions"], eqn.params["shape"]
        inner = component
        if component is not None and len(shape) - 1 not in dims:
            inner = None  # all components are the same
        elif component is not None and x.aval.shape[-1] == 1:
            inner = 0
        known = self.known(x, inner, depth)
        if not isinstance(known, Count):
            return known
        to = dims[known.axis]
        return Count(to, known.size) if shape[to] == known.size else Same(0)

    def _concatenated(self, eqn: JaxprEqn, component: int, depth: int) -> Known:
        for a in eqn.invars:
            if component < a.aval.shape[-1]:
                return self.known(a, component, depth)
            component -= a.aval.shape[-1]
        return None


def _of_value(value: np.ndarray[Any, Any], component: int | None) -> Known:
    """What is known of a constant."""
    value = value if component is None else value[..., component]
    if not value.size:
        return None
    if np.all(value == value.flat[0]):
        of_one_row = value.shape == (1,) and value.dtype.kind != "b" and value[0] == 0
        return Count(0, 1) if of_one_row else Same(int(value.flat[0]))
    for d, size in enumerate(value.shape):
        along = np.arange(size).reshape([-1 if k == d else 1 for k in range(value.ndim)])
        if np.array_equal(value, np.broadcast_to(along, value.shape)):
            return Count(d, size)
    return None


def _fits(number: int, dtype: Any) -> bool:
    """Whether a type of integers has a number."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iu":
        return False
    return bool(np.iinfo(dtype).min <= number <= np.iinfo(dtype).max)


def _moved(eqn: JaxprEqn, known: Known) -> Known:
    """What is known of a value whose dimensions are others."""
    if not isinstance(known, Count):
        return known
    axis, name = known.axis, eqn.primitive.name
    if name == "transpose":
        return Count(list(eqn.params["permutation"]).index(axis), known.size)
    if name == "squeeze":
        gone = eqn.params["dimensions"]
        return Same(0) if axis in gone else Count(axis - sum(d < axis for d in gone), known.size)
    if eqn.params["dimensions"] is not None:
        return None
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    for d, size in enumerate(new):
        if size == known.size and math.prod(new[d + 1 :]) == math.prod(old[axis + 1 :]):
            return Count(d, size)
    return None


def _ends(known: Count | Same) -> tuple[int, int]:
    """The least and the largest number."""
    return (0, known.size - 1) if isinstance(known, Count) else (known.value, known.value)


def _cast(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    (known,) = of
    return known if known is not None and all(_fits(n, eqn.outvars[0].aval.dtype) for n in _ends(known)) else None


def _added(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    a, b = of
    if b == Same(0):
        return a
    return b if a == Same(0) and eqn.primitive.name == "add" else None


def _multiplied(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    a, b = of
    return a if b == Same(1) else b if a == Same(1) else None


def _compared(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    a, b = of
    if a is None or b is None:
        return None
    compare = _COMPARE[eqn.primitive.name]
    answers = {compare(x, y) for x in _ends(a) for y in _ends(b)}
    return Same(int(answers.pop())) if len(answers) == 1 else None


def _selected(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    which, *cases = of
    return cases[which.value] if isinstance(which, Same) and 0 <= which.value < len(cases) else None


def _clamped(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    low, known, high = of
    if not (isinstance(low, Same) and isinstance(high, Same)) or known is None:
        return None
    least, largest = _ends(known)
    return known if low.value <= least and largest <= high.value else None


def _bounded(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    known, bound = of if isinstance(of[1], Same) else of[::-1]
    if known is None or not isinstance(bound, Same):
        return None
    least, largest = _ends(known)
    idle = bound.value <= least if eqn.primitive.name == "max" else bound.value >= largest
    return known if idle else None


_BY_ENTRY: Mapping[str, Callable[[JaxprEqn, Sequence[Known]], Known]] = {
    "convert_element_type": _cast,
    "copy": lambda eqn, of: of[0],
    "add": _added,
    "sub": _added,
    "mul": _multiplied,
    **dict.fromkeys(_COMPARE, _compared),
    "select_n": _selected,
    "clamp": _clamped,
    "max": _bounded,
    "min": _bounded,
}


def given_to_bodies(eqn: JaxprEqn, known: Callable[[Atom, int | None], Known]) -> list[list[Given]]:
    """For each body of a call, a loop or a branch, what is known of its inputs; none for another equation.

    Args:
      known: of the values around it.
    """
    name = eqn.primitive.name
    outer: list[Given] = [functools.partial(known, a) for a in eqn.invars]
    if name == COND:
        return [outer[1:]] * len(bodies(eqn))
    if name == WHILE:  # nothing of what is carried
        of_cond, of_body = while_counts(eqn)
        return [outer[:of_cond], outer[of_cond : of_cond + of_body]]
    if name == SCAN:
        consts, carried = scan_counts(eqn)
        in_turns: list[Given] = [functools.partial(_of_turn, g) for g in outer[consts + carried :]]
        return [[*outer[:consts], *[_unknown] * carried, *in_turns]]
    return [outer] if name in REMAT or call_body(eqn, rules=False) is not None else []


def _unknown(component: int | None) -> Known:
    return None


def _of_turn(given: Given, component: int | None) -> Known:
    """What is known of a turn's part of a stack."""
    known = given(component)
    if isinstance(known, Count):
        return Count(known.axis - 1, known.size) if known.axis else None
    return known
