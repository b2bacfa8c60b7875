"""Rules of primitives on `Real` values: arithmetic in the field, decisions by the shadow.

    ARITHMETIC   sums, products, quotients, contractions: exact in the field
    STRUCTURE    what moves elements, and computes nothing
    DECISIONS    what depends on the order of floats
    HASHED       transcendental functions: keyed hashes of their arguments

A rule takes an equation and its operands, and returns a list of outputs. A primitive without a rule
makes its outputs `Unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn, is_reversed
from dtrans.errors import BatchError
from dtrans.verification import field, field_values as values
from dtrans.verification.field import Array
from dtrans.verification.field_values import (
    Complex,
    NearTie,
    Real,
    UnfollowedError,
    choose,
    from_integers,
    parted,
    real,
)
from dtrans.verification.numpy_rules import ELEMENTWISE, OTHERS, gather_places, threefry_bits
from dtrans.verification.rationals import elements_of


Rule = Callable[[JaxprEqn, list[Any]], list[Any]]


def shadow_of(x: Any) -> Any:
    """Return what NumPy computes with: the shadow of floats, other arrays unchanged."""
    return x.shadow if isinstance(x, (Real, Complex)) else x


def elements_in(x: Any) -> Array:
    """Return the elements of floats, or of integers as floats."""
    return x.elements if isinstance(x, Real) else elements_of(x, np.int64)


def _shadow_type(eqn: JaxprEqn) -> Any:
    return jax.ShapeDtypeStruct(eqn.outvars[0].aval.shape, np.dtype(np.float64))


def by_jax(eqn: JaxprEqn, operands: Sequence[Any], **params: Any) -> list[Any]:
    """Carry out a primitive with JAX, in 64 bits where operands are shadows."""
    with jax.enable_x64(True):
        bound = eqn.primitive.get_bind_params({**eqn.params, **params})
        try:
            out = eqn.primitive.bind(*operands, **bound)
        except NotImplementedError as error:  # JAX cannot lower it on this platform
            raise UnfollowedError(str(error)) from error
        made = list(out) if eqn.primitive.multiple_results else [out]
        return [x if values.is_key(x) else np.asarray(x) for x in made]


def _shadows(eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
    """Return the shadow of the first output of an equation."""
    name, given = eqn.primitive.name, [shadow_of(x) for x in operands]
    with np.errstate(all="ignore"):
        if name in ELEMENTWISE:
            return ELEMENTWISE[name](*given)
        if name in OTHERS:
            return OTHERS[name](eqn.params, given, _shadow_type(eqn))[0]
    return by_jax(eqn, given)[0]


# -- arithmetic ------------------------------------------------------------------------------------


def _exactly(fn: Callable[..., Array]) -> Rule:
    """Make the rule of an elementwise operation of the field."""

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return [real(fn(*map(elements_in, operands)), _shadows(eqn, operands))]

    return rule


def _divide(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = map(elements_in, operands)
    if y.ndim and y.strides and not any(y.strides):  # one number, broadcast
        inverse = np.broadcast_to(field.inverse(y.reshape(-1)[:1])[0], y.shape)
    else:
        inverse = field.inverse(y)
    return [real(field.multiply(x, inverse), _shadows(eqn, operands))]


def _integer_pow(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    with np.errstate(all="ignore"):
        return [real(field.power(x.elements, eqn.params["y"]), x.shadow ** float(eqn.params["y"]))]


def _dot_general(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (contract, batch), (x, y) = eqn.params["dimension_numbers"], operands
    left = _as_matrices(elements_in(x), batch[0], contract[0], last=True)
    right = _as_matrices(elements_in(y), batch[1], contract[1], last=False)
    made = field.matrix_product(left, right).reshape(eqn.outvars[0].aval.shape)
    left, right = (
        _as_matrices(np.asarray(shadow_of(a), np.float64), batch[k], contract[k], last=not k)
        for k, a in enumerate((x, y))
    )
    with np.errstate(all="ignore"):
        return [real(made, (left @ right).reshape(made.shape))]


def _as_matrices(x: Array, batch: Sequence[int], contract: Sequence[int], *, last: bool) -> Array:
    """Return an operand as a stack of matrices, whose last (or first) dimension is contracted."""
    free = [d for d in range(x.ndim) if d not in (*batch, *contract)]
    order = (*batch, *free, *contract) if last else (*batch, *contract, *free)
    moved = x.transpose(order)
    sizes = [int(np.prod([x.shape[d] for d in dims])) for dims in (free, contract)]
    stack = [x.shape[d] for d in batch]
    return moved.reshape(*stack, *(sizes if last else sizes[::-1]))


def _reduce_sum(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), axes = operands, tuple(eqn.params["axes"])
    return [real(field.total(x.elements, axes), x.shadow.sum(axes))]


def _turned(fn: Callable[[Array, int], Array], x: Array, eqn: JaxprEqn) -> Array:
    """Apply a cumulative operation in the direction of an equation."""
    axis = eqn.params["axis"]
    if not is_reversed(eqn):
        return fn(x, axis)
    return np.flip(fn(np.flip(x, axis), axis), axis)


def _cumsum(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    elements = _turned(field.cumulative_total, x.elements, eqn)
    return [real(elements, _turned(np.cumsum, x.shadow, eqn))]


def _cumulative_product(x: Array, axis: int) -> Array:
    found = np.moveaxis(x.copy(), axis, 0)
    for k in range(1, len(found)):
        found[k] = field.multiply(found[k - 1], found[k])
    return np.moveaxis(found, 0, axis)


def _cumprod(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    elements = _turned(_cumulative_product, x.elements, eqn)
    return [real(elements, _turned(np.cumprod, x.shadow, eqn))]


def _reduce_prod(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), axes = operands, tuple(eqn.params["axes"])
    kept = [d for d in range(len(x.shape)) if d not in axes]
    flat = x.elements.transpose(*kept, *axes).reshape(*(x.shape[d] for d in kept), -1)
    found = np.ones(flat.shape[:-1], np.uint64)
    for k in range(flat.shape[-1]):
        found = field.multiply(found, flat[..., k])
    return [real(found, x.shadow.prod(axes))]


def _convolution(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Convolve limbs of 16 bits in float64, which is exact, and put them together."""
    params = {"preferred_element_type": np.dtype(np.float64)}
    limbs = [field.limbs(elements_in(x), field.SHORT) for x in operands]
    convolve = lambda a, b: by_jax(eqn, [a, b], **params)[0]
    sums = []
    for k in range(2 * len(limbs[0]) - 1):
        pairs = [(i, k - i) for i in range(len(limbs[0])) if 0 <= k - i < len(limbs[1])]
        sums.append(sum(convolve(limbs[0][i], limbs[1][j]) for i, j in pairs))
    shadow = convolve(*(np.asarray(shadow_of(x), np.float64) for x in operands))
    return [real(field.from_limbs(sums, field.SHORT), shadow)]


# -- structure -------------------------------------------------------------------------------------


def _structure(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Move elements and shadows alike, with the rule of NumPy."""
    rule, out = OTHERS[eqn.primitive.name], eqn.outvars[0].aval
    elements = rule(eqn.params, [_moved_part(x, "elements") for x in operands], out)
    shadows = rule(eqn.params, [_moved_part(x, "shadow") for x in operands], out)
    return [Real(np.asarray(e), np.asarray(s)) for e, s in zip(elements, shadows, strict=True)]


def _moved_part(x: Any, part: str) -> Any:
    return getattr(x, part) if isinstance(x, Real) else x


def _by_index(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Let JAX move the places of elements instead of the elements."""
    x, *rest = operands
    if eqn.primitive.name == "gather":
        p = eqn.params
        found = gather_places(x.shape, rest[0], p["dimension_numbers"], p["slice_sizes"], p["mode"])
    else:
        places = np.arange(x.shadow.size, dtype=np.int64).reshape(x.shape)
        (found,) = by_jax(eqn, [places, *rest])
    fill = _fill_of(eqn, rest)
    flat = Real(
        np.append(x.elements.ravel(), fill.elements), np.append(x.shadow.ravel(), fill.shadow)
    )
    return [values.take(flat, found)]


def move_rows(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Let a function of the host move the places of entries instead of entries; place 0 has zero.

    Raises:
      UnfollowedError: a number of a row that there is not, or rows of integers.
    """
    numbers, rows = operands[: eqn.params["count"]], operands[eqn.params["count"] :]
    if not all(isinstance(x, Real) for x in rows):
        raise UnfollowedError("rows of integers")
    ends = np.cumsum([1, *(x.shadow.size for x in rows)])
    places = [
        np.arange(end - x.shadow.size, end).reshape(x.shape)
        for x, end in zip(rows, ends[1:], strict=True)
    ]
    zero = Real(np.zeros(1, np.uint64), np.zeros(1))
    every = [zero, *rows]
    flat = Real(
        *(
            np.concatenate([getattr(x, part).ravel() for x in every])
            for part in ("elements", "shadow")
        )
    )
    try:
        found = eqn.params["fn"](numbers, places)
    except BatchError as error:
        raise UnfollowedError(str(error)) from error
    outs = zip(found, eqn.outvars, strict=True)
    return [
        values.take(flat, x) if values.is_float(v.aval.dtype) else np.asarray(x) for x, v in outs
    ]


def _fill_of(eqn: JaxprEqn, rest: Sequence[Any]) -> Real:
    """Return what stands where there is no element: the padding, or what a gather fills in."""
    given = [r for r in rest if isinstance(r, Real)]
    if given:
        return given[0]
    fill = eqn.params.get("fill_value")
    nothing = np.nan if fill is None else float(fill)
    return values.lifted(np.asarray(nothing), np.float64)


def _select(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    which, *cases = operands
    which = np.broadcast_to(np.asarray(which).astype(int), cases[0].shape)
    elements = np.choose(which, [elements_in(c) for c in cases])
    return [Real(elements, np.choose(which, [shadow_of(c) for c in cases]))]


def _convert(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), wanted = operands, np.dtype(eqn.outvars[0].aval.dtype)
    if values.is_float(wanted):
        return [x if isinstance(x, Real) else from_integers(x)]
    if wanted.kind == "b":
        return [x.shadow != 0]
    return [np.trunc(_settled(x).shadow).astype(wanted)]


def _settled(x: Real) -> Real:
    """Return floats whose shadows are integers wherever their elements are the integers beside
    them."""
    nearest = np.rint(x.shadow)
    with np.errstate(invalid="ignore"):
        close = np.abs(x.shadow - nearest) <= values.NEAR * np.maximum(np.abs(nearest), 1)
    small = np.isfinite(x.shadow) & (np.abs(x.shadow) < 2.0**62)
    integers = np.where(small, nearest, 0).astype(np.int64)
    whole = close & (x.elements == elements_of(integers, np.int64))
    if np.any(close & small & ~whole):
        raise NearTie
    return Real(x.elements, np.where(whole, nearest, x.shadow))


def _bitcast(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), out = operands, eqn.outvars[0].aval
    if isinstance(x, Real):
        raise UnfollowedError("the bits of a float")
    same_width = x.dtype != bool and x.dtype.itemsize == np.dtype(out.dtype).itemsize
    made = x.view(np.dtype(out.dtype)) if same_width else by_jax(eqn, [x])[0]
    # millions of random bits become floats: their fractions would take too long to look for
    return [values.exact(made, out.dtype)]


def _scatter_places(eqn: JaxprEqn, x: Any, indices: Any, updates: Any) -> Array:
    """Return for each element of the updates of a scatter its place in the flat operand, or -1."""
    d = eqn.params["dimension_numbers"]
    window = iter(updates.shape[k] for k in d.update_window_dims)
    taken = (*d.inserted_window_dims, *getattr(d, "operand_batching_dims", ()))
    sizes = [1 if k in taken else next(window) for k in range(len(x.shape))]
    batching = (getattr(d, f"{k}_batching_dims", ()) for k in ("operand", "scatter_indices"))
    numbers = jax.lax.GatherDimensionNumbers(
        d.update_window_dims, d.inserted_window_dims, d.scatter_dims_to_operand_dims, *batching
    )
    return gather_places(x.shape, indices, numbers, sizes, eqn.params["mode"])


def _scatter_add(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, indices, updates = operands
    places = _scatter_places(eqn, x, indices, updates).ravel()
    kept = places >= 0
    where, size = places[kept], x.shadow.size
    sums = field.add_at(size, where, elements_in(updates).ravel()[kept]).reshape(x.shape)
    added = np.bincount(where, shadow_of(updates).ravel()[kept], size).reshape(x.shape)
    if eqn.primitive.name == "scatter-sub":
        return [real(field.subtract(x.elements, sums), x.shadow - added)]
    return [real(field.add(x.elements, sums), x.shadow + added)]


def _scatter(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, indices, updates = operands
    places = _scatter_places(eqn, x, indices, updates).ravel()
    kept = places >= 0
    elements, shadow = x.elements.ravel().copy(), x.shadow.ravel().copy()
    elements[places[kept]] = elements_in(updates).ravel()[kept]
    shadow[places[kept]] = shadow_of(updates).ravel()[kept]
    return [Real(elements.reshape(x.shape), shadow.reshape(x.shape))]


def _rounds(places: Array) -> list[Array]:
    """Return numbers of updates in rounds: no place occurs twice in one."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    first = np.searchsorted(ordered, ordered, "left")
    turn = np.arange(len(ordered)) - first
    found = [order[turn == k] for k in range(int(turn.max(initial=-1)) + 1)]
    return [r[places[r] >= 0] for r in found]


def _scatter_by(combine: Callable[[Real, Real], Real]) -> Rule:
    """Make the rule of a scatter that combines what is at a place with each update of it."""

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        x, indices, updates = operands
        places = _scatter_places(eqn, x, indices, updates).ravel()
        found = Real(
            elements_in(x).ravel().copy(), np.asarray(shadow_of(x), np.float64).ravel().copy()
        )
        given = Real(
            elements_in(updates).ravel(), np.asarray(shadow_of(updates), np.float64).ravel()
        )
        for turn in _rounds(places):
            where = places[turn]
            new = combine(values.take(found, where), values.take(given, turn))
            found.elements[where], found.shadow[where] = new.elements, new.shadow
        return [Real(found.elements.reshape(x.shape), found.shadow.reshape(x.shape))]

    return rule


_scatter_mul = _scatter_by(
    lambda x, y: real(field.multiply(x.elements, y.elements), x.shadow * y.shadow)
)


def _scatter_extreme(sign: int) -> Rule:
    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        better = _larger if sign > 0 else _smaller
        return _scatter_by(lambda x, y: better(eqn, [x, y])[0])(eqn, operands)

    return rule


def _windows(eqn: JaxprEqn, shape: Sequence[int]) -> Array:
    """Return for each place of a windowed reduction the flat places of its window; -1 for
    padding."""
    p = eqn.params
    dims, strides, padding = p["window_dimensions"], p["window_strides"], p["padding"]
    dilated = [p.get(k) or (1,) * len(shape) for k in ("base_dilation", "window_dilation")]
    if any(d != 1 for ds in dilated for d in ds):
        raise UnfollowedError("dilated windows")
    places = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    padded = np.pad(places, [(int(a), int(b)) for a, b in padding], constant_values=-1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, tuple(dims))
    kept = windows[tuple(slice(None, None, s) for s in strides)]
    return kept.reshape(*kept.shape[: len(shape)], -1)


def _window_sum(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    places = _windows(eqn, x.shape)
    rows = values.take(
        Real(np.append(x.elements.ravel(), np.uint64(0)), np.append(x.shadow.ravel(), 0.0)), places
    )
    return [real(field.total(rows.elements, (-1,)), rows.shadow.sum(-1))]


def _best_in_window(eqn: JaxprEqn, x: Real, sign: int) -> Array:
    """Return the flat place of the largest (sign 1) or smallest number of each window."""
    places = _windows(eqn, x.shape)
    flat = Real(
        np.append(x.elements.ravel(), np.uint64(0)), np.append(x.shadow.ravel(), -sign * np.inf)
    )
    rows = values.take(flat, places)
    best = np.argmax(sign * rows.shadow, -1)[..., None]
    _one_of_equals(rows, best)
    return np.take_along_axis(places, best, -1)[..., 0]


def _one_of_equals(rows: Real, best: Array) -> None:
    """Raise NearTie where rounding alone parts the best number of a row from another."""
    shape = rows.shape
    pick = lambda a: np.broadcast_to(np.take_along_axis(a, best, -1), shape)
    parted(Real(pick(rows.elements), pick(rows.shadow)), rows)


def _window_extreme(sign: int) -> Rule:
    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        (x,) = operands
        flat = Real(x.elements.ravel(), x.shadow.ravel())
        return [values.take(flat, _best_in_window(eqn, x, sign))]

    return rule


def _select_and_scatter_add(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    source, x = operands
    name = eqn.params["select_prim"].name
    if name not in ("ge", "le"):
        raise UnfollowedError(f"windows that are selected by {name}")
    where = _best_in_window(eqn, x, 1 if name == "ge" else -1).ravel()
    size = x.shadow.size
    sums = field.add_at(size, where, source.elements.ravel()).reshape(x.shape)
    return [real(sums, np.bincount(where, source.shadow.ravel(), size).reshape(x.shape))]


def _psum_of_axes(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Sum over dimensions of arrays: a collective whose axis was mapped by `vmap`."""
    axes = tuple(eqn.params["axes"])
    return [real(field.total(x.elements, axes), x.shadow.sum(axes)) for x in operands]


# -- decisions -------------------------------------------------------------------------------------


def _compare(decide: Callable[[Array, Array, Array], Array]) -> Rule:
    """Make the rule of a comparison: of where two values are equal, less, and no numbers."""

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        x, y = (a if isinstance(a, Real) else from_integers(a) for a in operands)
        equal, less = parted(x, y)
        return [decide(equal, less, np.isnan(x.shadow) | np.isnan(y.shadow))]

    return rule


def _total_order(name: str) -> Rule:
    """Make the rule of a comparison that gives NaN a place, for operands without one."""

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if any(np.isnan(shadow_of(x)).any() for x in operands):
            raise UnfollowedError("the place of NaN in an order")
        return REAL[name](eqn, operands)

    return rule


def _larger(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = operands
    _, less = parted(x, y)
    return [choose((less | np.isnan(y.shadow)) & ~np.isnan(x.shadow), y, x)]


def _smaller(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    x, y = operands
    equal, less = parted(x, y)
    return [choose((less | equal | np.isnan(x.shadow)) & ~np.isnan(y.shadow), x, y)]


def _clamp(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    low, x, high = operands
    (raised,) = _larger(eqn, [x, low])
    return _smaller(eqn, [raised, high])


def _taken(x: Real, places: Array) -> Real:
    """Return one number of each row, with a last dimension of 1."""
    return Real(
        np.take_along_axis(x.elements, places, -1), np.take_along_axis(x.shadow, places, -1)
    )


def _like(x: Real, other: Real) -> Real:
    """Return a value broadcast to the shape of another."""
    return Real(np.broadcast_to(x.elements, other.shape), np.broadcast_to(x.shadow, other.shape))


def _extreme(sign: int, *, place: bool) -> Rule:
    """Make the rule of a maximum (sign 1) or minimum over axes, or of its place."""

    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        (x,), axes = operands, tuple(eqn.params["axes"])
        kept = [d for d in range(len(x.shape)) if d not in axes]
        shape = [x.shape[d] for d in kept]
        flat = lambda a: a.transpose(*kept, *axes).reshape(*shape, -1)
        moved = Real(flat(x.elements), flat(x.shadow))
        order = np.where(np.isnan(moved.shadow), np.inf, sign * moved.shadow)
        # elements that are equal have shadows that rounding has parted: the first of them counts
        best = np.argmax(order, -1)[..., None]
        top = _taken(moved, best)
        equal, beats = (
            parted(_like(top, moved), moved) if sign > 0 else parted(moved, _like(top, moved))
        )
        if beats.any():  # near ties, which elements decide
            key = np.where(beats, moved.elements, np.uint64(0) if sign > 0 else ~np.uint64(0))
            winner = (np.argmax if sign > 0 else np.argmin)(key, -1)[..., None]
            top = _taken(moved, np.where(beats.any(-1, keepdims=True), winner, best))
            equal = moved.elements == top.elements
        first = np.argmax(equal | np.isnan(moved.shadow), -1)
        if place:
            return [first.astype(eqn.outvars[0].aval.dtype)]
        return [values.take(top, (..., 0))]

    return rule


def _cumulative_extreme(sign: int) -> Rule:
    def rule(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        (x,), axis = operands, eqn.params["axis"]
        step = -1 if is_reversed(eqn) else 1
        moved = [np.moveaxis(a, axis, 0)[::step] for a in (x.elements, x.shadow)]
        rows = [Real(moved[0][0], moved[1][0])] if len(moved[0]) else []
        better = _larger if sign > 0 else _smaller
        for k in range(1, len(moved[0])):
            rows += better(eqn, [rows[-1], Real(moved[0][k], moved[1][k])])
        back = lambda parts: np.moveaxis(np.stack(parts)[::step], 0, axis)
        if not rows:
            return [x]
        return [Real(back([r.elements for r in rows]), back([r.shadow for r in rows]))]

    return rule


def _sort(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    axis, count = eqn.params["dimension"], eqn.params["num_keys"]
    keys = [shadow_of(x) for x in operands[:count]]
    order = np.lexsort([_nan_last(k) for k in reversed(keys)], axis)
    pick = lambda a: np.take_along_axis(a, order, axis)
    made = [
        Real(pick(x.elements), pick(x.shadow)) if isinstance(x, Real) else pick(x) for x in operands
    ]
    _check_order(made[:count], axis)
    return made


def _nan_last(x: Array) -> Array:
    return np.where(np.isnan(x), np.inf, x) if x.dtype.kind == "f" else x


def _check_order(keys: Sequence[Any], axis: int) -> None:
    """Raise NearTie where neighbours in the order are parted by rounding alone."""
    for key in keys:
        if isinstance(key, Real):
            moved = [np.moveaxis(a, axis, 0) for a in (key.elements, key.shadow)]
            parted(Real(moved[0][:-1], moved[1][:-1]), Real(moved[0][1:], moved[1][1:]))


def _top_k(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), k, axis = operands, eqn.params["k"], eqn.params.get("axis", -1)
    order = np.argsort(-x.shadow, axis, kind="stable")
    pick = lambda a: np.take_along_axis(a, order, axis)
    ordered = Real(pick(x.elements), pick(x.shadow))
    _check_order([ordered], axis)
    first = [slice(None)] * len(x.shape)
    first[axis] = slice(0, k)
    places = order[tuple(first)].astype(eqn.outvars[1].aval.dtype)
    return [values.take(ordered, tuple(first)), places]


def _approx_top_k(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Return the largest or smallest numbers: all of them, as CPUs do."""
    (x,), axis = operands, eqn.params["reduction_dimension"]
    size = eqn.outvars[0].aval.shape[axis]
    sign = 1 if eqn.params["is_max_k"] else -1
    order = np.argsort(-sign * x.shadow, axis, kind="stable")
    ordered = Real(*(np.take_along_axis(a, order, axis) for a in (x.elements, x.shadow)))
    _check_order([ordered], axis)
    first = tuple(
        slice(0, size) if d == axis % x.shadow.ndim else slice(None) for d in range(x.shadow.ndim)
    )
    return [values.take(ordered, first), order[first].astype(eqn.outvars[1].aval.dtype)]


def _absolute(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,) = operands
    negative = x.shadow < 0
    return [Real(np.where(negative, field.negative(x.elements), x.elements), np.abs(x.shadow))]


def _to_integer(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Round to an integer, or to a sign."""
    (x,) = operands
    settled = _settled(x) if eqn.primitive.name != "sign" else x
    shadow = np.asarray(_shadows(eqn, [settled]))
    return [real(elements_of(shadow, np.float64), shadow)]


# -- functions that the field lacks ----------------------------------------------------------------


# values of functions of one operand at 0 and at 1, if they are rational
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
    """Hash the operands; at 0 and 1 many functions have a value in the field.

    A norm of zeros is zero then: optimizers ask for that.
    """
    name, shadow = eqn.primitive.name, np.asarray(_shadows(eqn, operands))
    kind = {k: v for k, v in eqn.params.items() if k != "accuracy"}
    made = values.hashed((name, sorted(kind.items())), *operands, shadow=shadow)
    for at, known in ((0, AT_ZERO), (1, AT_ONE)):
        if name in known:
            there = elements_in(operands[0]) == np.uint64(at)
            exact = np.full(shadow.shape, known[name])
            made = choose(there, Real(exact.astype(np.uint64), exact.astype(np.float64)), made)
    return [made]


def _running_hash(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Hash everything up to each place of an axis."""
    (x,) = operands

    def running(elements: Array, axis: int) -> Array:
        rows = np.moveaxis(elements, axis, 0)
        found: list[Array] = []
        for row in rows:
            found.append(field.hashed(eqn.primitive.name, *found[-1:], row))
        return np.moveaxis(np.stack(found), 0, axis) if found else elements

    return [real(_turned(running, x.elements, eqn), by_jax(eqn, [x.shadow])[0])]


def _random_gamma(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Hash the key of each number with its parameter."""
    keys, x = operands
    words = np.asarray(jax.random.key_data(keys)).astype(np.uint64)
    each = [words[..., k] for k in range(words.shape[-1])]
    (shadow,) = by_jax(eqn, [keys, shadow_of(x)])
    name = (eqn.primitive.name, eqn.params["log_space"])
    return [real(field.hashed(name, *each, elements_in(x)), shadow)]


def _copy(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    return list(operands)


# they say where an array is, or on which axes it varies, and compute nothing
PLACES = ("sharding_constraint", "reshard", "mesh_cast", "device_put", "pvary")

_MOVED_BY_NUMPY = (
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "concatenate", "stack", "unstack", "split", "rev", "slice",
    "dynamic_slice", "dynamic_update_slice", "pad",
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
    **dict.fromkeys(("copy", "copy_p", "reduce_precision", "optimization_barrier", "name", "stop_gradient"), _copy),
    **dict.fromkeys((*PLACES, "gradient"), _copy),
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
    "is_finite": lambda eqn, operands: [np.isfinite(operands[0].shadow)],
    **dict.fromkeys(
        (
            "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "cos",
            "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "igamma",
            "igamma_grad_a", "igammac", "lgamma", "log", "log1p", "log2", "logistic", "nextafter", "polygamma", "pow",
            "random_gamma_grad", "regularized_incomplete_beta", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
            "zeta",
        ),
        _hash,
    ),
}  # fmt: skip

# and compute nothing
MOVES = frozenset(name for name, rule in REAL.items() if rule in (_structure, _by_index))


def plain(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Carry out an equation whose operands are integers, booleans or keys."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
    if name in PLACES:
        return operands
    if any(map(values.is_key, operands)):
        made = with_keys(eqn, operands)
    elif name in ELEMENTWISE:
        made = [ELEMENTWISE[name](*operands)]
    elif name in OTHERS:
        made = OTHERS[name](eqn.params, operands, out)
    else:
        made = by_jax(eqn, operands)
    return [_as_type(x, v.aval) for x, v in zip(made, eqn.outvars, strict=True)]


def with_keys(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Carry out an equation on random keys: NumPy moves them and draws bits, as far as it can."""
    name, (keys, *rest) = eqn.primitive.name, operands
    partitionable: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    is_threefry = partitionable and str(jax.random.key_impl(keys)) == "threefry2x32"
    # with further parameters it is this package's own, which draws some rows
    is_whole = eqn.params.keys() == {"shape", "bit_width"}
    if name == "random_bits" and is_threefry and is_whole and not keys.shape:
        words = np.asarray(jax.random.key_data(keys))
        return [threefry_bits(words, eqn.params["shape"], eqn.params["bit_width"])]
    if name in _MOVED_BY_NUMPY and not any(map(values.is_key, rest)):
        data = np.asarray(jax.random.key_data(keys))
        places = np.arange(keys.size, dtype=np.int64).reshape(keys.shape)
        each = OTHERS[name](eqn.params, [places, *rest], eqn.outvars[0].aval)
        flat = data.reshape(-1, data.shape[-1])
        return [
            jax.random.wrap_key_data(flat[where], impl=jax.random.key_impl(keys)) for where in each
        ]
    return by_jax(eqn, operands)


def _as_type(x: Any, aval: Any) -> Any:
    if values.is_key(x):
        return x
    if values.is_float(aval.dtype):
        return values.lifted(np.asarray(x, np.float64), aval.dtype)
    if values.is_complex(aval.dtype):
        return values.lifted(np.asarray(x, np.complex128), aval.dtype)
    return np.asarray(x).astype(aval.dtype).reshape(aval.shape)
