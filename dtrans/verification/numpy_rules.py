"""Rules that evaluate JAX's primitives with NumPy; nothing is compiled.

`dtrans.verification` represents a float by an element of a finite field and by a float64 value
(`dtrans.verification.field_values`). The rules of this module compute float64 values, integers and
booleans. Each entry of the table `ELEMENTWISE` is a function of the operands that returns the
output. Each entry of the table `OTHERS` is a function of (parameters, operands, type of the first
output) that returns a list of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans.ir.selection import values_at


def _quotient(x: Any, y: Any) -> Any:
    """Divide integers and round toward zero.

    Division in float64 would lose bits of 64-bit integers.
    """
    floor = x // y
    return floor + ((floor < 0) & (floor * y != x)).astype(floor.dtype)


def _width(x: Any) -> int:
    """Return the number of bits of an integer."""
    return int(x.dtype.itemsize) * 8


def _unsigned_shift(x: Any, n: Any) -> Any:
    """Shift bits to the right, and fill with zeros."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    shifted = np.right_shift(x.view(unsigned), np.asarray(n).astype(unsigned))
    return np.where(np.asarray(n) < _width(x), shifted, unsigned.type(0)).view(x.dtype)


def _power(x: Any, y: Any) -> Any:
    """Raise numbers to a power; powers of floats are computed in 64 bits."""
    if np.asarray(x).dtype.kind == "f":
        x = np.asarray(x, np.float64)
    return np.power(x, y)


def _div(x: Any, y: Any) -> Any:
    if np.issubdtype(y.dtype, np.inexact):
        return x / y
    return _quotient(x, y)


# Primitives whose NumPy function has the same name.
_SAME_NAMES = (
    "abs", "cbrt", "ceil", "cos", "cosh", "exp", "exp2", "expm1", "floor", "log", "log1p", "log2",
    "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh",
)  # fmt: skip
ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SAME_NAMES},
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "pow": _power,
    "shift_left": lambda x, n: np.where(n < _width(x), np.left_shift(x, n), x.dtype.type(0)),
    "shift_right_logical": _unsigned_shift,
    "is_finite": np.isfinite,
    "div": _div,
    "rem": np.fmod,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
}


def _slices(start: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a dynamic slice; starts are clamped as in XLA."""
    found = []
    for at, size, length in zip(start, sizes, shape, strict=True):
        first = min(max(int(at), 0), length - size)
        found.append(slice(first, first + size))
    return tuple(found)


def _broadcast_in_dim(p: Any, operands: Any, out: Any) -> list[Any]:
    shape = [1] * len(p["shape"])
    for size, d in zip(operands[0].shape, p["broadcast_dimensions"], strict=True):
        shape[d] = size
    return [np.broadcast_to(operands[0].reshape(shape), p["shape"])]


def _reshape(p: Any, operands: Any, out: Any) -> list[Any]:
    (x,) = operands[:1]
    if p.get("dimensions") is not None:
        x = x.transpose(p["dimensions"])
    return [x.reshape(p["new_sizes"])]


def _dynamic_update_slice(p: Any, operands: Any, out: Any) -> list[Any]:
    new = np.array(operands[0])
    new[_slices(operands[2:], operands[1].shape, new.shape)] = operands[1]
    return [new]


def _dot_general(p: Any, operands: Any, out: Any) -> list[Any]:
    (contract, batch), (a, b) = p["dimension_numbers"], operands
    names = iter("abcdefghijklmnop")
    left = [next(names) for _ in a.shape]
    right = [next(names) for _ in b.shape]
    for pairs in (contract, batch):
        for i, j in zip(*pairs, strict=True):
            right[j] = left[i]
    to = values_at(left, batch[0])
    for operand, k in ((left, 0), (right, 1)):
        for d, name in enumerate(operand):
            if d not in contract[k] and d not in batch[k]:
                to.append(name)
    formula = f"{''.join(left)},{''.join(right)}->{''.join(to)}"
    return [np.einsum(formula, a.astype(out.dtype), b.astype(out.dtype))]


def _integer_pow(p: Any, operands: Any, out: Any) -> list[Any]:
    return [operands[0] ** p["y"]]


def _round(p: Any, operands: Any, out: Any) -> list[Any]:
    (x,) = operands
    if p["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        return [np.rint(x)]
    return [np.sign(x) * np.floor(np.abs(x) + 0.5)]


def _sort(p: Any, operands: Any, out: Any) -> list[Any]:
    axis = p["dimension"]
    if p["num_keys"] == 1:
        order = np.argsort(operands[0], axis, kind="stable")
        return [np.take_along_axis(x, order, axis) for x in operands]
    return [np.asarray(x) for x in jax.lax.sort(operands, dimension=axis, num_keys=p["num_keys"])]


def _split(p: Any, operands: Any, out: Any) -> list[Any]:
    return np.split(operands[0], np.cumsum(p["sizes"])[:-1], p["axis"])


def _iota(p: Any, operands: Any, out: Any) -> list[Any]:
    shape, axis = p["shape"], p["dimension"]
    return [np.broadcast_to(_along(np.arange(shape[axis]), axis, len(shape)), shape)]


def _slice(p: Any, operands: Any, out: Any) -> list[Any]:
    strides = p["strides"] or (1,) * operands[0].ndim
    index = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    return [operands[0][tuple(slice(*i) for i in index)]]


def _reduction(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    return lambda p, operands, out: [fn(operands[0], axis=tuple(p["axes"]))]


def _cumulative(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    def run(p: Any, operands: Any, out: Any) -> list[Any]:
        (x,), axis = operands, p["axis"]
        if not p.get("reverse"):
            return [fn(x, axis=axis)]
        return [np.flip(fn(np.flip(x, axis), axis=axis), axis)]

    return run


def _unstack(p: Any, operands: Any, out: Any) -> list[Any]:
    return list(np.moveaxis(operands[0], p["axis"], 0))


def _pad(p: Any, operands: Any, out: Any) -> list[Any]:
    x, fill = operands
    shape, strided, remaining, widths = [], [], [], []
    for size, (low, high, inner) in zip(x.shape, p["padding_config"], strict=True):
        spread = size + max(size - 1, 0) * inner
        shape.append(spread)
        strided.append(slice(None, None, inner + 1))
        # Negative padding removes entries.
        remaining.append(slice(max(-low, 0), spread - max(-high, 0)))
        widths.append((max(low, 0), max(high, 0)))
    new = np.full(shape, fill)
    new[tuple(strided)] = x
    return [np.pad(new[tuple(remaining)], widths, constant_values=np.asarray(fill).item())]


def gather_places(
    shape: Sequence[int], indices: Any, numbers: Any, sizes: Sequence[int], mode: Any
) -> Any:
    """Return, for each gathered entry, its flat index in the operand.

    The index is -1 for an entry outside of the operand, which gets the fill value.

    Args:
      shape: shape of the operand.
      indices: integers; the last dimension has an entry for each dimension of `start_index_map`.
      numbers: `jax.lax.GatherDimensionNumbers`.
      sizes: size of a window in each dimension of the operand.
      mode: `jax.lax.GatherScatterMode`.
    """
    indices = np.asarray(indices).astype(np.int64)
    batch = indices.shape[:-1]
    starts = {d: indices[..., k] for k, d in enumerate(numbers.start_index_map)}
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for d, at in batching:
        starts[d] = np.broadcast_to(_along(np.arange(batch[at]), at, len(batch)), batch)
    fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
    without_window = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(shape)) if d not in without_window]

    # A flat index is the index of the window's first entry plus the offset of the entry.
    strides = np.cumprod([1, *shape[:0:-1]])[::-1]
    first, inside = np.zeros(batch, np.int64), np.ones(batch, bool)
    for d, start in starts.items():
        last = shape[d] - sizes[d]
        inside &= (start >= 0) & (start <= last)
        first = first + strides[d] * (start if fills else np.clip(start, 0, last))
    offsets = np.zeros(values_at(sizes, window), np.int64)
    for k, d in enumerate(window):
        offsets = offsets + strides[d] * _along(np.arange(sizes[d]), k, len(window))

    widened = lambda x: x.reshape((*batch, *[1] * len(window)))
    places = widened(first) + offsets
    if fills:
        places = np.where(widened(inside), places, -1)
    return np.moveaxis(places, range(len(batch), places.ndim), numbers.offset_dims)


def _along(x: Any, axis: int, count: int) -> Any:
    """Reshape a vector to an array of `count` dimensions that extends along `axis` only."""
    shape = [1] * count
    shape[axis] = -1
    return x.reshape(shape)


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry_bits(key: Any, shape: Sequence[int], bits: int) -> Any:
    """Return the random bits that JAX draws from a key of two words.

    Each number is a hash of its index: 20 rounds of Threefry-2x32 (Salmon et al., 2011). JAX does
    the same if `jax_threefry_partitionable` is True.
    """
    counts = np.arange(int(np.prod(shape)), dtype=np.uint64).reshape(shape)
    x = [(counts >> np.uint64(32)).astype(np.uint32), counts.astype(np.uint32)]
    first, second = (np.uint32(k) for k in key)
    words = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    x = [x[0] + words[0], x[1] + words[1]]
    for four_rounds in range(5):
        for by in _ROTATIONS[four_rounds % 2]:
            x[0] = x[0] + x[1]
            x[1] = x[0] ^ ((x[1] << np.uint32(by)) | (x[1] >> np.uint32(32 - by)))
        x[0] = x[0] + words[(four_rounds + 1) % 3]
        x[1] = x[1] + words[(four_rounds + 2) % 3] + np.uint32(four_rounds + 1)
    if bits == 64:
        return (x[0].astype(np.uint64) << np.uint64(32)) | x[1]
    return (x[0] ^ x[1]).astype(f"uint{bits}")


OTHERS: Mapping[str, Callable[..., list[Any]]] = {
    "convert_element_type": lambda p, operands, out: [operands[0].astype(out.dtype)],
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": lambda p, operands, out: [operands[0].transpose(p["permutation"])],
    "squeeze": lambda p, operands, out: [operands[0].squeeze(tuple(p["dimensions"]))],
    "concatenate": lambda p, operands, out: [np.concatenate(operands, p["dimension"])],
    "stack": lambda p, operands, out: [np.stack(operands, p["axis"])],
    "unstack": _unstack,
    "split": _split,
    "rev": lambda p, operands, out: [np.flip(operands[0], p["dimensions"])],
    "slice": _slice,
    "pad": _pad,
    "iota": _iota,
    "dynamic_slice": lambda p, x, out: [x[0][_slices(x[1:], p["slice_sizes"], x[0].shape)]],
    "dynamic_update_slice": _dynamic_update_slice,
    "integer_pow": _integer_pow,
    "round": _round,
    "dot_general": _dot_general,
    "sort": _sort,
    **{f"reduce_{n}": _reduction(getattr(np, n)) for n in ("sum", "max", "min", "prod")},
    "reduce_and": _reduction(np.bitwise_and.reduce),
    "reduce_or": _reduction(np.bitwise_or.reduce),
    "argmax": lambda p, operands, out: [np.argmax(operands[0], p["axes"][0])],
    "argmin": lambda p, operands, out: [np.argmin(operands[0], p["axes"][0])],
    "cumsum": _cumulative(np.cumsum),
    "cummax": _cumulative(np.maximum.accumulate),
    "optimization_barrier": lambda p, operands, out: list(operands),
}
