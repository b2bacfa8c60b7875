"""Rules of equations that depend on the order of floats, such as comparisons, maxima and sorts.

Float64 values decide the order. A rule raises `NearTie` if rounding could change its decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn, is_reversed
from dtrans.verification import field, field_values as values
from dtrans.verification.field import Array
from dtrans.verification.field_values import NoRuleError, Real, choose, ordered, real
from dtrans.verification.movement_rules import settle_integers
from dtrans.verification.rank_collectives import mapped
from dtrans.verification.rationals import elements_of
from dtrans.verification.rule_values import (
    Rule,
    approx_of,
    axes_last,
    compute_approx,
    for_each_operand,
)


def _compare(decide: Callable[[Array, Array, Array], Array]) -> Rule:
    """Return the rule of a comparison of x and y.

    Args:
      decide: function of three masks that returns the result: x == y, x < y, and x or y is NaN.
    """

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        x, y = map(values.as_real, operands)
        equal, less = ordered(x, y)
        return [decide(equal, less, np.isnan(x.approx) | np.isnan(y.approx))]

    return rule


def _total_order(name: str) -> Rule:
    """Return the rule of a comparison that also orders NaN, such as `lt_to`.

    Operands with NaN are not supported. Without NaN, the rule is that of the ordinary comparison
    `name`.
    """

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if any(np.isnan(approx_of(x)).any() for x in operands):
            raise NoRuleError("the equation orders NaN")
        return ORDER[name](eqn, operands)

    return rule


def take_larger(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Return the larger of two numbers, elementwise; NaN if one of them is NaN."""
    x, y = operands
    _, less = ordered(x, y)
    return [choose((less | np.isnan(y.approx)) & ~np.isnan(x.approx), y, x)]


def take_smaller(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Return the smaller of two numbers, elementwise; NaN if one of them is NaN."""
    x, y = operands
    equal, less = ordered(x, y)
    return [choose((less | equal | np.isnan(x.approx)) & ~np.isnan(y.approx), x, y)]


def _clamp(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    low, x, high = operands
    (raised,) = take_larger(eqn, [x, low])
    return take_smaller(eqn, [raised, high])


def take_places(x: Real, places: Array, axis: int = -1) -> Real:
    """Return the numbers at the indices `places` along an axis."""
    elements = np.take_along_axis(x.elements, places, axis)
    return Real(elements, np.take_along_axis(x.approx, places, axis))


def broadcast_like(x: Real, other: Real) -> Real:
    """Broadcast a value to the shape of another value."""
    return Real(np.broadcast_to(x.elements, other.shape), np.broadcast_to(x.approx, other.shape))


def _extreme(sign: int, *, place: bool) -> Rule:
    """Return the rule of a maximum or minimum over axes.

    Args:
      sign: 1 for the maximum, -1 for the minimum.
      place: True to return the index of the number (argmax, argmin).
    """

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        (x,), axes = operands, tuple(eqn.params["axes"])
        rows = axes_last(x, axes)
        order = np.where(np.isnan(rows.approx), np.inf, sign * rows.approx)
        best = np.argmax(order, -1)[..., None]
        top = take_places(rows, best)
        pair = (broadcast_like(top, rows), rows)
        equal, beats = ordered(*pair[::sign])
        if beats.any():  # within `ties_by_elements`, elements decide near ties
            key = np.where(beats, rows.elements, np.uint64(0) if sign > 0 else ~np.uint64(0))
            winner = (np.argmax if sign > 0 else np.argmin)(key, -1)[..., None]
            top = take_places(rows, np.where(beats.any(-1, keepdims=True), winner, best))
            equal = rows.elements == top.elements
        # float64 values of equal elements may differ by rounding, so the first equal element is
        # chosen
        first = np.argmax(equal | np.isnan(rows.approx), -1)
        if place:
            return [first.astype(eqn.outvars[0].aval.dtype)]
        return [values.take(top, (..., 0))]

    return rule


def _cumulative_extreme(sign: int) -> Rule:
    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        (x,), axis = operands, eqn.params["axis"]
        step = -1 if is_reversed(eqn) else 1
        better = take_larger if sign > 0 else take_smaller
        moved = mapped(lambda a: np.moveaxis(a, axis, 0)[::step], x)
        rows: list[Real] = []
        for k in range(len(moved.approx)):
            row = values.take(moved, k)
            if rows:
                (row,) = better(eqn, [rows[-1], row])
            rows.append(row)
        if not rows:
            return [x]
        return [mapped(lambda *parts: np.moveaxis(np.stack(parts)[::step], 0, axis), *rows)]

    return rule


def _sort(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    axis, count = eqn.params["dimension"], eqn.params["num_keys"]
    keys = [approx_of(x) for x in operands[:count]]
    order = np.lexsort([_nan_last(k) for k in reversed(keys)], axis)
    outputs = [mapped(lambda a: np.take_along_axis(a, order, axis), x) for x in operands]
    _check_order(outputs[:count], axis)
    return outputs


def _nan_last(x: Array) -> Array:
    return np.where(np.isnan(x), np.inf, x) if x.dtype.kind == "f" else x


def _check_order(keys: Sequence[Any], axis: int) -> None:
    """Raise NearTie if neighbours in a sorted array differ only by rounding."""
    for key in keys:
        if isinstance(key, Real):
            moved = mapped(lambda a: np.moveaxis(a, axis, 0), key)
            ordered(values.take(moved, slice(-1)), values.take(moved, slice(1, None)))


def _top_k(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), axis = operands, eqn.params.get("axis", -1)
    return _best(eqn, x, axis, eqn.params["k"], sign=1)


def _best(eqn: JaxprEqn, x: Real, axis: int, count: int, sign: int) -> list[Any]:
    """Return the `count` largest or smallest numbers along an axis, and their indices.

    `sign` is 1 for the largest numbers, and -1 for the smallest.
    """
    order = np.argsort(-sign * x.approx, axis, kind="stable")
    sorted_x = take_places(x, order, axis)
    _check_order([sorted_x], axis)
    index = [slice(None)] * len(x.shape)
    index[axis] = slice(0, count)
    places = order[tuple(index)].astype(eqn.outvars[1].aval.dtype)
    return [values.take(sorted_x, tuple(index)), places]


def _approx_top_k(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate an approximate top-k exactly, as XLA does on CPUs."""
    (x,), axis = operands, eqn.params["reduction_dimension"]
    sign = 1 if eqn.params["is_max_k"] else -1
    return _best(eqn, x, axis, eqn.outvars[0].aval.shape[axis], sign)


def _absolute(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    negative = x.approx < 0
    return [Real(np.where(negative, field.negative(x.elements), x.elements), np.abs(x.approx))]


def _to_integer(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Apply a function that returns integers: floor, ceil, round or sign."""
    (x,) = operands
    if eqn.primitive.name != "sign":
        x = settle_integers(x)
    approx = np.asarray(compute_approx(eqn, [x]))
    return [real(elements_of(approx, np.float64), approx)]


ORDER: Mapping[str, Rule] = {
    "eq": _compare(lambda equal, less, nan: equal & ~nan),
    "ne": _compare(lambda equal, less, nan: ~equal | nan),
    "lt": _compare(lambda equal, less, nan: less & ~nan),
    "le": _compare(lambda equal, less, nan: (less | equal) & ~nan),
    **{f"{n}_to": _total_order(n) for n in ("eq", "lt", "le")},
    "gt": _compare(lambda equal, less, nan: ~less & ~equal & ~nan),
    "ge": _compare(lambda equal, less, nan: ~less & ~nan),
    "max": take_larger,
    "min": take_smaller,
    "clamp": _clamp,
    "reduce_max": _extreme(1, place=False),
    "reduce_min": _extreme(-1, place=False),
    "pmax": for_each_operand(_extreme(1, place=False)),
    "pmin": for_each_operand(_extreme(-1, place=False)),
    "argmax": _extreme(1, place=True),
    "argmin": _extreme(-1, place=True),
    "cummax": _cumulative_extreme(1),
    "cummin": _cumulative_extreme(-1),
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _approx_top_k,
    "abs": _absolute,
    **dict.fromkeys(("sign", "floor", "ceil", "round"), _to_integer),
    "is_finite": lambda eqn, operands: [np.isfinite(operands[0].approx)],
}
