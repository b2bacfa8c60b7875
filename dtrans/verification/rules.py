"""Rules of primitives on `Real` values: exact arithmetic on elements, decisions by float64 values.

    arithmetic   sums, products, quotients, contractions: exact in the field
    structure    equations that only move elements
    decisions    equations that depend on the order of floats
    functions    transcendental functions: keyed hashes of their arguments

A rule is a function of an equation and its operands that returns the list of outputs. The outputs
of a primitive without a rule are `Unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn, is_reversed
from dtrans.errors import BatchError
from dtrans.ir.dataflow import avals
from dtrans.ir.selection import values_at
from dtrans.verification import field, field_values as values
from dtrans.verification.field import Array
from dtrans.verification.field_values import (
    Complex,
    NearTie,
    Real,
    UnfollowedError,
    choose,
    ordered,
    real,
)
from dtrans.verification.numpy_rules import ELEMENTWISE, OTHERS, gather_places, threefry_bits
from dtrans.verification.rank_collectives import mapped
from dtrans.verification.rationals import elements_of


Rule = Callable[[JaxprEqn, list[Any]], list[Any]]


def approx_of(x: Any) -> Any:
    """Return the float64 values of an array of floats; return any other array unchanged."""
    return x.approx if isinstance(x, (Real, Complex)) else x


def approx_of_all(operands: Sequence[Any]) -> list[Any]:
    """Replace each operand that is an array of floats by its float64 values."""
    return [approx_of(x) for x in operands]


def elements_in(x: Any) -> Array:
    """Return the elements of an array; integers and booleans are converted to floats."""
    return values.as_real(x).elements


def _approx_type(eqn: JaxprEqn) -> Any:
    return jax.ShapeDtypeStruct(eqn.outvars[0].aval.shape, np.dtype(np.float64))


def by_jax(eqn: JaxprEqn, operands: Sequence[Any], **params: Any) -> list[Any]:
    """Evaluate an equation with JAX in 64 bits.

    Args:
      eqn: the equation.
      operands: float64 arrays in place of floats, and other arrays.
      **params: parameters that replace those of the equation.

    Raises:
      UnfollowedError: JAX cannot lower the primitive on this platform.
    """
    with jax.enable_x64(True):
        bound = eqn.primitive.get_bind_params({**eqn.params, **params})
        try:
            out = eqn.primitive.bind(*operands, **bound)
        except NotImplementedError as error:
            raise UnfollowedError(str(error)) from error
        outputs = out if eqn.primitive.multiple_results else [out]
        return list(map(values.as_numpy, outputs))


def _approx_outputs(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    """Return the first output of an equation, computed in float64."""
    name, approx_values = eqn.primitive.name, approx_of_all(operands)
    with np.errstate(all="ignore"):
        if name in ELEMENTWISE:
            return ELEMENTWISE[name](*approx_values)
        if name in OTHERS:
            return OTHERS[name](eqn.params, approx_values, _approx_type(eqn))[0]
    return by_jax(eqn, approx_values)[0]


def axes_last(x: Real, axes: Sequence[int]) -> Real:
    """Merge the dimensions `axes` of an array into one, which becomes the last dimension."""
    others = [d for d in range(len(x.shape)) if d not in axes]
    shape = values_at(x.shape, others)
    merge = lambda a: a.transpose(*others, *axes).reshape(*shape, -1)
    return Real(merge(x.elements), merge(x.approx))


# -- arithmetic ------------------------------------------------------------------------------------


def _exactly(fn: Callable[..., Array]) -> Rule:
    """Return a rule that applies `fn`, a function of field elements, to the operands."""

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return [real(fn(*map(elements_in, operands)), _approx_outputs(eqn, operands))]

    return rule


def _divide(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = map(elements_in, operands)
    if y.ndim and y.strides and not any(y.strides):  # y is one number, broadcast to all entries
        inverse = np.broadcast_to(field.inverse(y.reshape(-1)[:1])[0], y.shape)
    else:
        inverse = field.inverse(y)
    return [real(field.multiply(x, inverse), _approx_outputs(eqn, operands))]


def _integer_pow(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    with np.errstate(all="ignore"):
        return [real(field.power(x.elements, eqn.params["y"]), x.approx ** float(eqn.params["y"]))]


def _dot_general(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (contract, batch), (x, y) = eqn.params["dimension_numbers"], operands
    as_left = lambda a: _as_matrices(a, batch[0], contract[0], last=True)
    as_right = lambda a: _as_matrices(a, batch[1], contract[1], last=False)
    elements = field.matrix_product(as_left(elements_in(x)), as_right(elements_in(y)))
    approx_values = [np.asarray(approx_of(a), np.float64) for a in (x, y)]
    with np.errstate(all="ignore"):
        approx = as_left(approx_values[0]) @ as_right(approx_values[1])
    shape = eqn.outvars[0].aval.shape
    return [real(elements.reshape(shape), approx.reshape(shape))]


def _as_matrices(x: Array, batch: Sequence[int], contract: Sequence[int], *, last: bool) -> Array:
    """Reshape an operand of a contraction to a stack of matrices.

    Args:
      x: the operand.
      batch: its batch dimensions, which become the stack.
      contract: its contracted dimensions, which become one dimension of the matrices.
      last: True if the contracted dimension is the matrices' last dimension, False if it is the
        first.
    """
    free = [d for d in range(x.ndim) if d not in (*batch, *contract)]
    rows = math.prod(values_at(x.shape, free))
    inner = math.prod(values_at(x.shape, contract))
    stack = values_at(x.shape, batch)
    if last:
        return x.transpose(*batch, *free, *contract).reshape(*stack, rows, inner)
    return x.transpose(*batch, *contract, *free).reshape(*stack, inner, rows)


def _reduce_sum(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), axes = operands, tuple(eqn.params["axes"])
    return [real(field.total(x.elements, axes), x.approx.sum(axes))]


def _in_direction(fn: Callable[[Array, int], Array], x: Array, eqn: JaxprEqn) -> Array:
    """Apply a cumulative function along an axis; go backward if the equation is reversed."""
    axis = eqn.params["axis"]
    if not is_reversed(eqn):
        return fn(x, axis)
    return np.flip(fn(np.flip(x, axis), axis), axis)


def _cumsum(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    elements = _in_direction(field.cumulative_total, x.elements, eqn)
    return [real(elements, _in_direction(np.cumsum, x.approx, eqn))]


def _cumulative_product(x: Array, axis: int) -> Array:
    found = np.moveaxis(x.copy(), axis, 0)
    for k in range(1, len(found)):
        found[k] = field.multiply(found[k - 1], found[k])
    return np.moveaxis(found, 0, axis)


def _cumprod(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    elements = _in_direction(_cumulative_product, x.elements, eqn)
    return [real(elements, _in_direction(np.cumprod, x.approx, eqn))]


def _reduce_prod(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), axes = operands, tuple(eqn.params["axes"])
    flat = axes_last(x, axes).elements
    found = np.ones(flat.shape[:-1], np.uint64)
    for k in range(flat.shape[-1]):
        found = field.multiply(found, flat[..., k])
    return [real(found, x.approx.prod(axes))]


def _convolution(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Convolve by limbs of 16 bits, because float64 adds the products of such limbs exactly."""
    x, y = operands
    float64 = np.dtype(np.float64)
    convolve = lambda a, b: by_jax(eqn, [a, b], preferred_element_type=float64)[0]
    left = field.limbs(elements_in(x), field.SHORT)
    right = field.limbs(elements_in(y), field.SHORT)
    sums: list[Any] = [0] * (len(left) + len(right) - 1)
    for i, one in enumerate(left):
        for j, other in enumerate(right):
            sums[i + j] = sums[i + j] + convolve(one, other)
    approx = convolve(np.asarray(approx_of(x), float64), np.asarray(approx_of(y), float64))
    return [real(field.from_limbs(sums, field.SHORT), approx)]


# -- structure -------------------------------------------------------------------------------------


def _structure(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Apply the rule in `numpy_rules` to the field elements, and to the float64 values."""
    rule, out = OTHERS[eqn.primitive.name], eqn.outvars[0].aval
    elements = rule(eqn.params, _parts(operands, "elements"), out)
    approx_values = rule(eqn.params, _parts(operands, "approx"), out)
    outs = []
    for part, approx in zip(elements, approx_values, strict=True):
        outs.append(Real(np.asarray(part), np.asarray(approx)))
    return outs


def _parts(operands: Sequence[Any], name: str) -> list[Any]:
    """Return the attribute `name` of floats, and other operands unchanged."""
    return [getattr(x, name) if isinstance(x, Real) else x for x in operands]


def _by_index(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate an equation that only moves entries: apply it to indices, then look entries up."""
    x, *rest = operands
    if eqn.primitive.name == "gather":
        p = eqn.params
        found = gather_places(x.shape, rest[0], p["dimension_numbers"], p["slice_sizes"], p["mode"])
    else:
        places = np.arange(x.approx.size, dtype=np.int64).reshape(x.shape)
        (found,) = by_jax(eqn, [places, *rest])
    # Index -1 selects the fill value, which `_flat_with` appends.
    return [values.take(_flat_with(x, _fill_of(eqn, rest)), found)]


def _flat_with(x: Real, last: Real) -> Real:
    """Return a flat array with one more number at its end."""
    elements = np.append(x.elements.ravel(), last.elements)
    return Real(elements, np.append(x.approx.ravel(), last.approx))


_ZERO = Real(np.zeros(1, np.uint64), np.zeros(1))


def move_rows(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate `move_rows` (`dtrans.ops.moved_rows`): its function `fn` moves indices of entries.

    Index 0 stands for the number zero.

    Raises:
      UnfollowedError: a row id does not exist, or the rows are integers.
    """
    numbers, rows = operands[: eqn.params["count"]], operands[eqn.params["count"] :]
    if not all(isinstance(x, Real) for x in rows):
        raise UnfollowedError("the rows are integers")
    places = []
    elements, approx_values = [_ZERO.elements], [_ZERO.approx]
    end = 1
    for x in rows:
        start, end = end, end + x.approx.size
        places.append(np.arange(start, end).reshape(x.shape))
        elements.append(x.elements.ravel())
        approx_values.append(x.approx.ravel())
    flat = Real(np.concatenate(elements), np.concatenate(approx_values))
    try:
        found = eqn.params["fn"](numbers, places)
    except BatchError as error:
        raise UnfollowedError(str(error)) from error
    outs: list[Any] = []
    for x, v in zip(found, eqn.outvars, strict=True):
        outs.append(values.take(flat, x) if values.is_float(v.aval.dtype) else np.asarray(x))
    return outs


def _fill_of(eqn: JaxprEqn, rest: Sequence[Any]) -> Real:
    """Return the number that fills entries without a source: padding, or a gather's fill value."""
    padding = next((r for r in rest if isinstance(r, Real)), None)
    if padding is not None:
        return padding
    fill = eqn.params.get("fill_value")
    number = np.nan if fill is None else float(fill)
    return values.lifted(np.asarray(number), np.float64)


def _select(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    which, *cases = operands
    which = np.broadcast_to(np.asarray(which).astype(int), cases[0].shape)
    elements = np.choose(which, [*map(elements_in, cases)])
    return [Real(elements, np.choose(which, [*map(approx_of, cases)]))]


def _convert(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), wanted = operands, np.dtype(eqn.outvars[0].aval.dtype)
    if values.is_float(wanted):
        return [values.as_real(x)]
    if wanted.kind == "b":
        return [x.approx != 0]
    return [np.trunc(_settled(x).approx).astype(wanted)]


def _settled(x: Real) -> Real:
    """Replace the float64 value of each entry that is an integer in the field by this integer.

    Raises:
      NearTie: a float64 value is near an integer, but the field element is another number. Then
        rounding would decide the result of a cast to integers.
    """
    nearest = np.rint(x.approx)
    with np.errstate(invalid="ignore"):
        close = np.abs(x.approx - nearest) <= values.NEAR * np.maximum(np.abs(nearest), 1)
    small = np.isfinite(x.approx) & (np.abs(x.approx) < 2.0**62)
    integers = np.where(small, nearest, 0).astype(np.int64)
    is_integer = close & (x.elements == elements_of(integers, np.int64))
    if np.any(close & small & ~is_integer):
        raise NearTie
    return Real(x.elements, np.where(is_integer, nearest, x.approx))


def _bitcast(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), out = operands, eqn.outvars[0].aval
    if isinstance(x, Real):
        raise UnfollowedError("it reads the bits of a float")
    same_width = x.dtype != bool and x.dtype.itemsize == np.dtype(out.dtype).itemsize
    if same_width:
        found = x.view(np.dtype(out.dtype))
    else:
        (found,) = by_jax(eqn, [x])
    # `values.lifted` would search for simple fractions, which takes too long for millions of
    # numbers.
    return [values.exact(found, out.dtype)]


def _scatter_places(eqn: JaxprEqn, x: Any, indices: Any, updates: Any) -> Array:
    """Return, for each entry of a scatter's updates, the flat index that it updates, or -1."""
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
        better = _larger if sign > 0 else _smaller
        return _scatter_by(lambda x, y: better(eqn, [x, y])[0])(eqn, operands)

    return rule


def _windows(eqn: JaxprEqn, shape: Sequence[int]) -> Array:
    """Return, for each window of a windowed reduction, flat indices of entries; -1 for padding."""
    p = eqn.params
    dims, strides, padding = p["window_dimensions"], p["window_strides"], p["padding"]
    dilation = (*(p.get("base_dilation") or ()), *(p.get("window_dilation") or ()))
    if any(d != 1 for d in dilation):
        raise UnfollowedError("its windows are dilated")
    places = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    padded = np.pad(places, np.asarray(padding, int), constant_values=-1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, tuple(dims))
    strided = windows[tuple(slice(None, None, s) for s in strides)]
    return strided.reshape(*strided.shape[: len(shape)], -1)


def _window_sum(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    rows = values.take(_flat_with(x, _ZERO), _windows(eqn, x.shape))
    return [real(field.total(rows.elements, (-1,)), rows.approx.sum(-1))]


def _best_in_window(eqn: JaxprEqn, x: Real, sign: int) -> Array:
    """Return, for each window, the flat index of its largest number (sign 1) or smallest (-1)."""
    places = _windows(eqn, x.shape)
    worst = Real(_ZERO.elements, np.array([-sign * np.inf]))
    rows = values.take(_flat_with(x, worst), places)
    best = np.argmax(sign * rows.approx, -1)[..., None]
    _one_of_equals(rows, best)
    return np.take_along_axis(places, best, -1)[..., 0]


def _one_of_equals(rows: Real, best: Array) -> None:
    """Raise NearTie if another number of a row differs from the best one only by rounding.

    Args:
      rows: the numbers, one row for each choice.
      best: index of the best number in each row.
    """
    ordered(_like(_at_places(rows, best), rows), rows)


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
        raise UnfollowedError(f"its windows are selected by {name}")
    where = _best_in_window(eqn, x, 1 if name == "ge" else -1).ravel()
    size = x.approx.size
    sums = field.add_at(size, where, source.elements.ravel()).reshape(x.shape)
    return [real(sums, np.bincount(where, source.approx.ravel(), size).reshape(x.shape))]


def _psum_of_axes(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Sum over dimensions of the operands; `vmap` turns a `psum` over its axis into such a sum."""
    axes = tuple(eqn.params["axes"])
    return [real(field.total(x.elements, axes), x.approx.sum(axes)) for x in operands]


# -- decisions -------------------------------------------------------------------------------------


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
    """Return the rule of a comparison by total order, which also orders NaN.

    Operands with NaN are not supported. For all other operands, the rule is that of the ordinary
    comparison `name`.
    """

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if any(np.isnan(approx_of(x)).any() for x in operands):
            raise UnfollowedError("it orders NaN")
        return REAL[name](eqn, operands)

    return rule


def _larger(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = operands
    _, less = ordered(x, y)
    return [choose((less | np.isnan(y.approx)) & ~np.isnan(x.approx), y, x)]


def _smaller(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = operands
    equal, less = ordered(x, y)
    return [choose((less | equal | np.isnan(x.approx)) & ~np.isnan(y.approx), x, y)]


def _clamp(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    low, x, high = operands
    (raised,) = _larger(eqn, [x, low])
    return _smaller(eqn, [raised, high])


def _at_places(x: Real, places: Array, axis: int = -1) -> Real:
    """Return the numbers at the indices `places` along an axis."""
    elements = np.take_along_axis(x.elements, places, axis)
    return Real(elements, np.take_along_axis(x.approx, places, axis))


def _like(x: Real, other: Real) -> Real:
    """Broadcast a value to the shape of another value."""
    return Real(np.broadcast_to(x.elements, other.shape), np.broadcast_to(x.approx, other.shape))


def _extreme(sign: int, *, place: bool) -> Rule:
    """Return the rule of a maximum (sign 1) or minimum (sign -1) over axes.

    If `place` is True, the rule returns the index of the number (argmax, argmin).
    """

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        (x,), axes = operands, tuple(eqn.params["axes"])
        rows = axes_last(x, axes)
        order = np.where(np.isnan(rows.approx), np.inf, sign * rows.approx)
        best = np.argmax(order, -1)[..., None]
        top = _at_places(rows, best)
        pair = (_like(top, rows), rows)
        equal, beats = ordered(*pair[::sign])
        if beats.any():  # within `ties_by_elements`, elements decide near ties
            key = np.where(beats, rows.elements, np.uint64(0) if sign > 0 else ~np.uint64(0))
            winner = (np.argmax if sign > 0 else np.argmin)(key, -1)[..., None]
            top = _at_places(rows, np.where(beats.any(-1, keepdims=True), winner, best))
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
        better = _larger if sign > 0 else _smaller
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
    """Return the `count` largest (sign 1) or smallest numbers along an axis, and their indices."""
    order = np.argsort(-sign * x.approx, axis, kind="stable")
    sorted_x = _at_places(x, order, axis)
    _check_order([sorted_x], axis)
    index = [slice(None)] * len(x.shape)
    index[axis] = slice(0, count)
    places = order[tuple(index)].astype(eqn.outvars[1].aval.dtype)
    return [values.take(sorted_x, tuple(index)), places]


def _approx_top_k(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Return the largest or smallest numbers exactly; on CPUs, XLA does the same."""
    (x,), axis = operands, eqn.params["reduction_dimension"]
    sign = 1 if eqn.params["is_max_k"] else -1
    return _best(eqn, x, axis, eqn.outvars[0].aval.shape[axis], sign)


def _absolute(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    negative = x.approx < 0
    return [Real(np.where(negative, field.negative(x.elements), x.elements), np.abs(x.approx))]


def _to_integer(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Apply a function whose results are integers: floor, ceil, round, sign."""
    (x,) = operands
    if eqn.primitive.name != "sign":
        x = _settled(x)
    approx = np.asarray(_approx_outputs(eqn, [x]))
    return [real(elements_of(approx, np.float64), approx)]


# -- functions that the field lacks ----------------------------------------------------------------


# Values of functions of one operand at 0, and at 1, if these values are rational.
AT_ZERO: Mapping[str, int] = {
    **dict.fromkeys(
        ("asin", "asinh", "atan", "atanh", "cbrt", "erf", "erf_inv", "expm1", "log1p"), 0
    ),
    **dict.fromkeys(("sin", "sinh", "sqrt", "tan", "tanh"), 0),
    **dict.fromkeys(("bessel_i0e", "cos", "cosh", "erfc", "exp", "exp2"), 1),
}
AT_ONE: Mapping[str, int] = {
    **dict.fromkeys(("cbrt", "rsqrt", "sqrt"), 1),
    **dict.fromkeys(("acos", "acosh", "log", "log2"), 0),
    "exp2": 2,
}


def _hash(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Hash the operands, but use the exact value at 0 and 1 if the function has a rational value.

    So the norm of zeros is zero, and optimizers that test for zero take the right branch.
    """
    name, approx = eqn.primitive.name, np.asarray(_approx_outputs(eqn, operands))
    params = dict(eqn.params)
    params.pop("accuracy", None)
    found = values.hashed((name, sorted(params.items())), *operands, approx=approx)
    for at, known in ((0, AT_ZERO), (1, AT_ONE)):
        if name in known:
            there = elements_in(operands[0]) == np.uint64(at)
            exact = np.full(approx.shape, known[name])
            found = choose(there, Real(exact.astype(np.uint64), exact.astype(np.float64)), found)
    return [found]


def _running_hash(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Hash, for each index along an axis, all entries up to this index."""
    (x,) = operands

    def running(elements: Array, axis: int) -> Array:
        if not elements.shape[axis]:
            return elements
        found: list[Array] = []
        for row in np.moveaxis(elements, axis, 0):
            found.append(field.hashed(eqn.primitive.name, *found[-1:], row))
        return np.moveaxis(np.stack(found), 0, axis)

    return [real(_in_direction(running, x.elements, eqn), by_jax(eqn, [x.approx])[0])]


def _random_gamma(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Hash, for each random number, the key and the parameter of the gamma distribution."""
    keys, x = operands
    words = np.asarray(jax.random.key_data(keys)).astype(np.uint64)
    each = np.moveaxis(words, -1, 0)
    (approx,) = by_jax(eqn, [keys, approx_of(x)])
    name = (eqn.primitive.name, eqn.params["log_space"])
    return [real(field.hashed(name, *each, elements_in(x)), approx)]


def _copy(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    return list(operands)


# Primitives that change where an array is, or along which mesh axes it varies, but no value.
PLACES = ("sharding_constraint", "reshard", "mesh_cast", "device_put", "pvary")

_MOVED_BY_NUMPY = (
    "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "pad", "reshape",
    "rev", "slice", "split", "squeeze", "stack", "transpose", "unstack",
)  # fmt: skip
_COPIED = (
    *PLACES, "copy", "copy_p", "gradient", "name", "optimization_barrier", "reduce_precision",
    "stop_gradient",
)  # fmt: skip
_HASHED = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt",
    "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "igamma",
    "igamma_grad_a", "igammac", "lgamma", "log", "log1p", "log2", "logistic", "nextafter",
    "polygamma", "pow", "random_gamma_grad", "regularized_incomplete_beta", "rem", "rsqrt", "sin",
    "sinh", "sqrt", "tan", "tanh", "zeta",
)  # fmt: skip
REAL: Mapping[str, Rule] = {
    **dict.fromkeys(("add", "add_any"), _exactly(field.add)),
    "sub": _exactly(field.subtract),
    "mul": _exactly(field.multiply),
    "neg": _exactly(field.negative),
    "square": _exactly(lambda x: field.multiply(x, x)),
    "one_minus_square": _exactly(lambda x: field.subtract(np.uint64(1), field.multiply(x, x))),
    "div": _divide,
    "integer_pow": _integer_pow,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "reduce_sum": _reduce_sum,
    "psum": _psum_of_axes,
    "reduce_window_sum": _window_sum,
    "reduce_window_max": _window_extreme(1),
    "reduce_window_min": _window_extreme(-1),
    "select_and_scatter_add": _select_and_scatter_add,
    "reduce_prod": _reduce_prod,
    "cumsum": _cumsum,
    "cumprod": _cumprod,
    "scatter-add": _scatter_add,
    "scatter-sub": _scatter_add,
    "scatter": _scatter,
    "scatter-mul": _scatter_mul,
    "scatter-max": _scatter_extreme(1),
    "scatter-min": _scatter_extreme(-1),
    "select_n": _select,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    **dict.fromkeys(_COPIED, _copy),
    **dict.fromkeys(_MOVED_BY_NUMPY, _structure),
    **dict.fromkeys(("gather", "expand_dims", "tile"), _by_index),
    "eq": _compare(lambda equal, less, nan: equal & ~nan),
    "ne": _compare(lambda equal, less, nan: ~equal | nan),
    "lt": _compare(lambda equal, less, nan: less & ~nan),
    "le": _compare(lambda equal, less, nan: (less | equal) & ~nan),
    **{f"{n}_to": _total_order(n) for n in ("eq", "lt", "le")},
    "gt": _compare(lambda equal, less, nan: ~less & ~equal & ~nan),
    "ge": _compare(lambda equal, less, nan: ~less & ~nan),
    "max": _larger,
    "min": _smaller,
    "clamp": _clamp,
    "reduce_max": _extreme(1, place=False),
    "reduce_min": _extreme(-1, place=False),
    "argmax": _extreme(1, place=True),
    "argmin": _extreme(-1, place=True),
    "cummax": _cumulative_extreme(1),
    "cummin": _cumulative_extreme(-1),
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _approx_top_k,
    "cumlogsumexp": _running_hash,
    "random_gamma": _random_gamma,
    "abs": _absolute,
    **dict.fromkeys(("sign", "floor", "ceil", "round"), _to_integer),
    "is_finite": lambda eqn, operands: [np.isfinite(operands[0].approx)],
    **dict.fromkeys(_HASHED, _hash),
}

# Primitives that only move elements.
MOVES = frozenset(name for name, rule in REAL.items() if rule in (_structure, _by_index))


def plain(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate an equation whose operands are integers, booleans or keys."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
    if name in PLACES:
        return operands
    if any(map(values.is_key, operands)):
        outputs = with_keys(eqn, operands)
    elif name in ELEMENTWISE:
        outputs = [ELEMENTWISE[name](*operands)]
    elif name in OTHERS:
        outputs = OTHERS[name](eqn.params, operands, out)
    else:
        outputs = by_jax(eqn, operands)
    return [_as_type(x, aval) for x, aval in zip(outputs, avals(eqn.outvars), strict=True)]


def with_keys(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate an equation on random keys; use NumPy if possible, otherwise JAX."""
    name, (keys, *rest) = eqn.primitive.name, operands
    partitionable: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    is_threefry = partitionable and str(jax.random.key_impl(keys)) == "threefry2x32"
    # dtrans has a primitive `random_bits`, too, which draws only some rows. It has more parameters
    # than JAX's.
    is_plain = eqn.params.keys() == {"shape", "bit_width"}
    if name == "random_bits" and is_threefry and is_plain and not keys.shape:
        words = np.asarray(jax.random.key_data(keys))
        return [threefry_bits(words, eqn.params["shape"], eqn.params["bit_width"])]
    if name in _MOVED_BY_NUMPY and not any(map(values.is_key, rest)):
        data = np.asarray(jax.random.key_data(keys))
        places = np.arange(keys.size, dtype=np.int64).reshape(keys.shape)
        each = OTHERS[name](eqn.params, [places, *rest], eqn.outvars[0].aval)
        flat, impl = data.reshape(-1, data.shape[-1]), jax.random.key_impl(keys)
        return [jax.random.wrap_key_data(flat[where], impl=impl) for where in each]
    return by_jax(eqn, operands)


def _as_type(x: Any, aval: Any) -> Any:
    if values.is_key(x):
        return x
    if values.is_float(aval.dtype):
        return values.lifted(np.asarray(x, np.float64), aval.dtype)
    if values.is_complex(aval.dtype):
        return values.lifted(np.asarray(x, np.complex128), aval.dtype)
    return np.asarray(x).astype(aval.dtype).reshape(aval.shape)
