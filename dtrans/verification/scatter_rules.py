"""Rules that evaluate scatters and reductions over windows in a finite field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.ir.selection import values_at
from dtrans.verification import field, field_values as values
from dtrans.verification.field import Array
from dtrans.verification.field_values import NoRuleError, Real, ordered, real
from dtrans.verification.movement_rules import ZERO, append_number
from dtrans.verification.numpy_rules import gather_places
from dtrans.verification.order_rules import broadcast_like, take_larger, take_places, take_smaller
from dtrans.verification.rule_values import Rule, approx_of, elements_in


def _scatter_places(eqn: JaxprEqn, x: Any, indices: Any, updates: Any) -> Array:
    """Return the flat index that each entry of a scatter's updates changes; -1 for no index."""
    d = eqn.params["dimension_numbers"]
    window = iter(values_at(updates.shape, d.update_window_dims))
    without_window = (*d.inserted_window_dims, *getattr(d, "operand_batching_dims", ()))
    sizes = [1 if k in without_window else next(window) for k in range(len(x.shape))]
    batching = [getattr(d, f"{k}_batching_dims", ()) for k in ("operand", "scatter_indices")]
    numbers = jax.lax.GatherDimensionNumbers(
        d.update_window_dims, d.inserted_window_dims, d.scatter_dims_to_operand_dims, *batching
    )
    return gather_places(x.shape, indices, numbers, sizes, eqn.params["mode"])


def _scatter_add(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, indices, updates = operands
    places = _scatter_places(eqn, x, indices, updates).ravel()
    inside = places >= 0
    where, size = places[inside], x.approx.size
    sums = field.add_at(size, where, elements_in(updates).ravel()[inside]).reshape(x.shape)
    added = np.bincount(where, approx_of(updates).ravel()[inside], size).reshape(x.shape)
    if eqn.primitive.name == "scatter-sub":
        return [real(field.subtract(x.elements, sums), x.approx - added)]
    return [real(field.add(x.elements, sums), x.approx + added)]


def _scatter(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, indices, updates = operands
    places = _scatter_places(eqn, x, indices, updates).ravel()
    inside = places >= 0
    elements, approx = x.elements.ravel().copy(), x.approx.ravel().copy()
    elements[places[inside]] = elements_in(updates).ravel()[inside]
    approx[places[inside]] = approx_of(updates).ravel()[inside]
    return [Real(elements.reshape(x.shape), approx.reshape(x.shape))]


def _rounds(places: Array) -> list[Array]:
    """Split the updates of a scatter into rounds with at most one update per index.

    NumPy's indexed assignment applies only one of several updates of an index.

    Args:
      places: index that each update changes; -1 for no index.

    Returns:
      For each round, the positions of its updates.
    """
    order = np.argsort(places, kind="stable")
    ordered_places = places[order]
    first = np.searchsorted(ordered_places, ordered_places, "left")
    round_of = np.arange(len(ordered_places)) - first
    rounds = []
    for k in range(int(round_of.max(initial=-1)) + 1):
        updates = order[round_of == k]
        rounds.append(updates[places[updates] >= 0])
    return rounds


def _scatter_by(combine: Callable[[Real, Real], Real]) -> Rule:
    """Return the rule of a scatter that combines the number at an index with its updates."""

    def flat(x: Any) -> Real:
        approx = np.asarray(approx_of(x), np.float64)
        return Real(elements_in(x).ravel().copy(), approx.ravel().copy())

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        x, indices, updates = operands
        places = _scatter_places(eqn, x, indices, updates).ravel()
        found, terms = flat(x), flat(updates)
        for positions in _rounds(places):
            where = places[positions]
            new = combine(values.take(found, where), values.take(terms, positions))
            found.elements[where], found.approx[where] = new.elements, new.approx
        return [Real(found.elements.reshape(x.shape), found.approx.reshape(x.shape))]

    return rule


_scatter_mul = _scatter_by(
    lambda x, y: real(field.multiply(x.elements, y.elements), x.approx * y.approx)
)


def _scatter_extreme(sign: int) -> Rule:
    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        better = take_larger if sign > 0 else take_smaller
        return _scatter_by(lambda x, y: better(eqn, [x, y])[0])(eqn, operands)

    return rule


def _windows(eqn: JaxprEqn, shape: Sequence[int]) -> Array:
    """Return the entries in each window of a windowed reduction, such as a pooling.

    Returns:
      For each window, the flat indices of its entries; -1 for padding.
    """
    p = eqn.params
    dims, strides, padding = p["window_dimensions"], p["window_strides"], p["padding"]
    dilation = (*(p.get("base_dilation") or ()), *(p.get("window_dilation") or ()))
    if any(d != 1 for d in dilation):
        raise NoRuleError("the windows are dilated")
    places = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    padded = np.pad(places, np.asarray(padding, int), constant_values=-1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, tuple(dims))
    strided = windows[tuple(slice(None, None, s) for s in strides)]
    return strided.reshape(*strided.shape[: len(shape)], -1)


def _window_sum(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    rows = values.take(append_number(x, ZERO), _windows(eqn, x.shape))
    return [real(field.total(rows.elements, (-1,)), rows.approx.sum(-1))]


def _best_in_window(eqn: JaxprEqn, x: Real, sign: int) -> Array:
    """Return, for each window, the flat index of its largest number (sign 1) or smallest (-1)."""
    places = _windows(eqn, x.shape)
    worst = Real(ZERO.elements, np.array([-sign * np.inf]))
    rows = values.take(append_number(x, worst), places)
    best = np.argmax(sign * rows.approx, -1)[..., None]
    _one_of_equals(rows, best)
    return np.take_along_axis(places, best, -1)[..., 0]


def _one_of_equals(rows: Real, best: Array) -> None:
    """Raise NearTie if another number of a row differs from the best one only by rounding.

    Args:
      rows: the numbers, one row for each choice.
      best: index of the best number in each row.
    """
    ordered(broadcast_like(take_places(rows, best), rows), rows)


def _window_extreme(sign: int) -> Rule:
    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        (x,) = operands
        flat = Real(x.elements.ravel(), x.approx.ravel())
        return [values.take(flat, _best_in_window(eqn, x, sign))]

    return rule


def _select_and_scatter_add(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    source, x = operands
    name = eqn.params["select_prim"].name
    if name not in ("ge", "le"):
        raise NoRuleError(f"the windows are selected by {name}")
    where = _best_in_window(eqn, x, 1 if name == "ge" else -1).ravel()
    size = x.approx.size
    sums = field.add_at(size, where, source.elements.ravel()).reshape(x.shape)
    return [real(sums, np.bincount(where, source.approx.ravel(), size).reshape(x.shape))]


SCATTERS: Mapping[str, Rule] = {
    "scatter-add": _scatter_add,
    "scatter-sub": _scatter_add,
    "scatter": _scatter,
    "scatter-mul": _scatter_mul,
    "scatter-max": _scatter_extreme(1),
    "scatter-min": _scatter_extreme(-1),
    "reduce_window_sum": _window_sum,
    "reduce_window_max": _window_extreme(1),
    "reduce_window_min": _window_extreme(-1),
    "select_and_scatter_add": _select_and_scatter_add,
}
