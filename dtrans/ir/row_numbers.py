"""Proofs that an integer array *counts* a dimension: its entry at index i is i, as in `arange`.

With such a proof, `dtrans.ir.batched_gathers` recognizes lookups of one entry in each row.

The proof follows an `iota` through equations that leave its numbers unchanged: broadcasts, lossless
casts, wrapping of negative indices, and clamps without effect, also into calls, loops and branches.
Any other value, e.g. `iota + 1` or a permutation, is unknown.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn, has_bodies, opened
from dtrans.ir.interpret import Facts, ForwardAnalysis, forward_jaxpr


@dataclasses.dataclass(frozen=True)
class Count:
    """Property of an array: each entry equals its index along `axis`, which has `size` entries."""

    axis: int
    size: int


@dataclasses.dataclass(frozen=True)
class Same:
    """Property of an array: all entries equal `value`."""

    value: int


Known = Count | Same | None
# facts about an array: about all its entries, then about each index of its last dimension;
# () if nothing is known
Fact = tuple[Known, ...]

Entry = int | None  # index in the last dimension; None for the value with all its entries


_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
# the last dimension of gather indices has an entry for each indexed dimension, so it is short
_MOST_COMPONENTS = 16


def numbers_of(jaxpr: Any) -> Facts[Fact]:
    """Find the integer arrays of a jaxpr that are constant, or count a dimension like `arange`."""
    return forward_jaxpr(_NUMBERS, jaxpr, [()] * len(opened(jaxpr).invars))


def known_of(fact: Fact, component: Entry = None) -> Known:
    """Return the property of an array x, or of `x[..., component]`; None if it is unknown.

    Args:
      fact: the properties of x, and of all its components.
      component: an index in the last dimension; None for x itself.
    """
    place = 0 if component is None else 1 + component
    if place < len(fact):
        return fact[place]
    return None


def _of_equation(eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact] | None:
    if has_bodies(eqn):
        return None
    if not eqn.outvars or not _counts(eqn.outvars[0].aval):
        return [()] * len(eqn.outvars)
    facts = tuple(_output_fact(eqn, ins, component) for component in _entries(eqn.outvars[0].aval))
    return [facts] + [()] * (len(eqn.outvars) - 1)


def _output_fact(eqn: JaxprEqn, ins: Sequence[Fact], component: Entry) -> Known:
    """Return the property of an equation's output `y` or of `y[..., component]`, or None."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "iota":
        d, size = eqn.params["dimension"], out.shape[eqn.params["dimension"]]
        if not _fits(size - 1, out.dtype):
            return None
        if component is not None and d == out.ndim - 1:
            return Same(component)
        return Count(d, size)
    if name == "broadcast_in_dim" and len(eqn.invars) == 1:
        return _broadcast(eqn, ins[0], component)
    if name == "concatenate" and component is not None and eqn.params["dimension"] == out.ndim - 1:
        return _concatenated(eqn, ins, component)
    if component is None and name in ("reshape", "squeeze", "transpose"):
        return _moved(eqn, known_of(ins[0]))
    if name in _BY_ENTRY and all(a.aval.shape in ((), out.shape) for a in eqn.invars):
        operands = zip(eqn.invars, ins, strict=True)
        return _BY_ENTRY[name](
            eqn, [known_of(fact, component if a.aval.ndim else None) for a, fact in operands]
        )
    return None


def _counts(aval: Any) -> bool:
    """Return True for non-empty arrays of integers or booleans."""
    kind = np.dtype(aval.dtype).kind if isinstance(aval.dtype, np.dtype) else ""
    return kind in ("b", "i", "u") and 0 not in aval.shape


def _entries(aval: Any) -> tuple[Entry, ...]:
    """List the parts of an array that are analysed: None for the array x, and c for `x[..., c]`.

    The parts `x[..., c]` are analysed only if the last axis is short.
    """
    if aval.ndim and aval.shape[-1] <= _MOST_COMPONENTS:
        return (None, *range(aval.shape[-1]))
    return (None,)


def _broadcast(eqn: JaxprEqn, fact: Fact, component: Entry) -> Known:
    (x,), dims, shape = eqn.invars, eqn.params["broadcast_dimensions"], eqn.params["shape"]
    inner = component
    if component is not None and len(shape) - 1 not in dims:
        inner = None  # all components have the same fact
    elif component is not None and x.aval.shape[-1] == 1:
        inner = 0
    known = known_of(fact, inner)
    if not isinstance(known, Count):
        return known
    to = dims[known.axis]
    if shape[to] == known.size:
        return Count(to, known.size)
    return Same(0)


def _concatenated(eqn: JaxprEqn, ins: Sequence[Fact], component: int) -> Known:
    for a, fact in zip(eqn.invars, ins, strict=True):
        if component < a.aval.shape[-1]:
            return known_of(fact, component)
        component -= a.aval.shape[-1]
    return None


def _of_constant(aval: Any, value: Any) -> Fact:
    if value is None or not _counts(aval):
        return ()
    array = np.asarray(value)
    return tuple(_of_value(array if k is None else array[..., k]) for k in _entries(aval))


def _of_value(value: np.ndarray[Any, Any]) -> Known:
    """Return `Count` or `Same` for a constant array; None if neither applies."""
    first, last = value.flat[0], value.flat[-1]
    if first == last and np.all(value == first):
        of_one_row = value.shape == (1,) and value.dtype.kind != "b" and value[0] == 0
        if of_one_row:
            return Count(0, 1)
        return Same(int(first))
    for d, size in enumerate(value.shape):
        if first != 0 or last != size - 1:
            continue
        sizes = [1] * value.ndim
        sizes[d] = size
        along = np.arange(size).reshape(sizes)
        if np.array_equal(value, np.broadcast_to(along, value.shape)):
            return Count(d, size)
    return None


def _fits(number: int, dtype: Any) -> bool:
    """Return True if an integer type can represent a number."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iu":
        return False
    return bool(np.iinfo(dtype).min <= number <= np.iinfo(dtype).max)


def _moved(eqn: JaxprEqn, known: Known) -> Known:
    """Return the property of a transposed, squeezed or reshaped array; `known` is the operand's."""
    if not isinstance(known, Count):
        return known
    axis, name = known.axis, eqn.primitive.name
    if name == "transpose":
        return Count(list(eqn.params["permutation"]).index(axis), known.size)
    if name == "squeeze":
        gone = eqn.params["dimensions"]
        if axis in gone:
            return Same(0)
        return Count(axis - sum(d < axis for d in gone), known.size)
    if eqn.params["dimensions"] is not None:
        return None
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    for d, size in enumerate(new):
        if size == known.size and math.prod(new[d + 1 :]) == math.prod(old[axis + 1 :]):
            return Count(d, size)
    return None


def _ends(known: Count | Same) -> tuple[int, int]:
    """Return the smallest and the largest entry of an array with this property."""
    if isinstance(known, Count):
        return (0, known.size - 1)
    return (known.value, known.value)


def _cast(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    (known,) = of
    if known is None:
        return None
    dtype = eqn.outvars[0].aval.dtype
    if all(_fits(n, dtype) for n in _ends(known)):
        return known
    return None


def _added(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    a, b = of
    if b == Same(0):
        return a
    if a == Same(0) and eqn.primitive.name == "add":
        return b
    return None


def _multiplied(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    a, b = of
    if b == Same(1):
        return a
    return b if a == Same(1) else None


def _compared(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    a, b = of
    if a is None or b is None:
        return None
    compare = _COMPARE[eqn.primitive.name]
    answers = {compare(x, y) for x in _ends(a) for y in _ends(b)}
    if len(answers) == 1:
        return Same(int(answers.pop()))
    return None


def _selected(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    which, *cases = of
    if not isinstance(which, Same) or not 0 <= which.value < len(cases):
        return None
    return cases[which.value]


def _clamped(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    low, known, high = of
    if not (isinstance(low, Same) and isinstance(high, Same)) or known is None:
        return None
    least, largest = _ends(known)
    if low.value <= least and largest <= high.value:
        return known
    return None


def _bounded(eqn: JaxprEqn, of: Sequence[Known]) -> Known:
    known, bound = of if isinstance(of[1], Same) else of[::-1]
    if known is None or not isinstance(bound, Same):
        return None
    least, largest = _ends(known)
    if eqn.primitive.name == "max":
        has_no_effect = bound.value <= least
    else:
        has_no_effect = bound.value >= largest
    return known if has_no_effect else None


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


def _turn(fact: Fact) -> Fact:
    """Convert the properties of a scanned array to those of the slice in one iteration."""
    return _with_axes_moved(fact, -1)


def _stack(fact: Fact) -> Fact:
    return _with_axes_moved(fact, 1)


def _with_axes_moved(fact: Fact, by: int) -> Fact:
    found: list[Known] = []
    for known in fact:
        if isinstance(known, Count):
            axis = known.axis + by
            known = Count(axis, known.size) if axis >= 0 else None
        found.append(known)
    return tuple(found)


def _fitted(fact: Fact, aval: Any) -> Fact:
    """Drop properties of components that a slice of this type does not have."""
    return fact[: len(_entries(aval))]


def _join(one: Fact, other: Fact) -> Fact:
    return tuple(x if x == y else None for x, y in zip(one, other, strict=False))


_NUMBERS = ForwardAnalysis[Fact](_join, _of_equation, _of_constant, _turn, _stack, _fitted)
