"""An array out of slices of it, as an overview lists them: some rows of what was cut in one way,
from what was cut in another.

A slice is a box of its origin: which entries along each axis, a run of them or buckets. An array
that is wanted is a box too, and is filled with what it shares with those that there are. A box that
is there twice must hold the same.

What is put together lies in NumPy's memory, and random keys as the words they are made of.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.errors import CheckpointWarning, StateError
from dtrans.ir.array_fns import is_key, words
from dtrans.parameter_server.overview import VarDistributed
from dtrans.rows.writer import RowRange, RowSet


Box = tuple[RowSet, ...]
Shared = tuple[RowSet | np.ndarray, ...]  # along each axis: what both have, or its numbers


def whole(name: str, aval: Any, endpoint: str = "") -> VarDistributed:
    """A row of an overview that is all of a parameter."""
    shape = tuple(aval.shape)
    return VarDistributed(name, shape, name, shape, aval.dtype, 0, 0, 0, False, "Param", endpoint)


def by_origin(rows: Iterable[VarDistributed]) -> dict[str, list[VarDistributed]]:
    """The rows of each array."""
    found: dict[str, list[VarDistributed]] = {}
    for row in rows:
        found.setdefault(row.origin_name, []).append(row)
    return found


def overlap(a: VarDistributed, b: VarDistributed) -> bool:
    """Whether two slices of one array share anything."""
    return _common(_box(a), _box(b)) is not None


def joined(
    target: VarDistributed,
    rows: Sequence[VarDistributed],
    read: Callable[[VarDistributed], np.ndarray],
    *,
    may_differ: bool = False,
) -> np.ndarray:
    """A slice of an array, out of those of it that there are; as `as_numpy` has it.

    Args:
      target: what is wanted.
      rows: slices of the same array.
      read: what one of them holds; called for those that share something with `target`.
      may_differ: copies of one array may be of several steps; the first is taken then, with a
        `CheckpointWarning`.

    Raises:
      StateError: they do not hold all of it, or what is there twice is not the same.

    Example:
      >>> import dataclasses, numpy as np
      >>> w = whole("params/w", np.zeros(5))
      >>> cut = lambda start, stop: dataclasses.replace(w, slice_shape=(stop - start,), offset=start, is_slice=True)
      >>> joined(cut(2, 5), [cut(0, 3), cut(3, 5)], lambda row: np.arange(5.0)[row.index]).tolist()
      [2.0, 3.0, 4.0]
    """
    shape, dtype = stored(target.slice_shape, target.dtype)
    made, wanted, found = np.empty(shape, dtype), _box(target), 0
    copies: dict[Box, list[VarDistributed]] = {}
    for row in rows:
        copies.setdefault(_box(row), []).append(row)
    for box, of in copies.items():
        common = _common(wanted, box)
        if common is not None:
            held = _agreed(of, [read(row) for row in of], may_differ=may_differ)
            made[_inside(common, wanted)] = held[_inside(common, box)]
            found += _size(common)
    if found != _size(wanted):
        raise StateError(
            f"{target.origin_name}: {found} of {_size(wanted)} elements are there, on "
            + (", ".join(dict.fromkeys(row.endpoint for row in rows)) or "no server")
        )
    return made


def _agreed(
    rows: Sequence[VarDistributed], values: Sequence[np.ndarray], *, may_differ: bool
) -> np.ndarray:
    """One of several copies. Raises StateError where they differ, and may not."""
    first = values[0]
    for row, other in zip(rows[1:], values[1:], strict=True):
        if not same_values(first, other):
            told = (
                f"{row.slice_name} is not the same on {rows[0].endpoint} and {row.endpoint}: "
                f"{_shown(first)} and {_shown(other)}"
            )
            if not may_differ:
                raise StateError(f"{told}; are these states of one job, at one step?")
            said = f"{told}, saved while asynchronous trainers went on: the first is taken"
            warnings.warn(CheckpointWarning(said), stacklevel=2)
            break
    return first


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two copies are one value.

    Each server compiles what it does by itself, so that the last bits of what all of them compute
    may differ.
    """
    if a.tobytes() == b.tobytes():
        return True
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return False
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    rtol = float(jnp.finfo(a.dtype).eps) ** 0.5
    a, b = a.astype(wide), b.astype(wide)
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return bool(np.allclose(a, b, rtol=0, atol=rtol * scale, equal_nan=True))


def _shown(x: np.ndarray) -> str:
    return np.array2string(x, threshold=6, edgeitems=2, separator=", ").replace("\n", "")


# -- boxes -----------------------------------------------------------------------------------------


def _box(row: VarDistributed) -> Box:
    """What a row has along each axis of its origin."""
    sizes = enumerate(row.slice_shape)
    return tuple(
        row.rows if row.is_slice and i == row.axis else RowRange(0, size) for i, size in sizes
    )


def _common(a: Box, b: Box) -> Shared | None:
    """What two boxes share, if anything."""
    shared = tuple(_of_both(x, y) for x, y in zip(a, b, strict=True))
    return shared if all(_count(x) > 0 for x in shared) else None


def _of_both(a: RowSet, b: RowSet) -> RowSet | np.ndarray:
    if a == b:
        return a
    if isinstance(a, RowRange) and isinstance(b, RowRange):
        return RowRange(max(a.start, b.start), min(a.stop, b.stop))
    few, other = (a, b) if a.rows <= b.rows else (b, a)
    numbers = few.numbers()
    return numbers[other.among(numbers)]


def _inside(shared: Shared, outer: Box) -> tuple[slice | np.ndarray, ...]:
    """What is shared as an index of the array that `outer` is."""
    return tuple(_place(x, o) for x, o in zip(shared, outer, strict=True))


def _place(shared: RowSet | np.ndarray, outer: RowSet) -> slice | np.ndarray:
    if isinstance(shared, np.ndarray):
        return outer.local(shared)
    return (
        slice(None)
        if shared == outer
        else slice(shared.start - outer.start, shared.stop - outer.start)
    )


def _count(shared: RowSet | np.ndarray) -> int:
    return len(shared) if isinstance(shared, np.ndarray) else shared.rows


def _size(box: Shared) -> int:
    return math.prod(map(_count, box))


# -- arrays ----------------------------------------------------------------------------------------


def type_of(x: Any) -> str:
    """`float32[4, 2]`."""
    return f"{x.dtype}{list(x.shape)}"


def as_numpy(x: Any) -> np.ndarray:
    """A value as NumPy has it."""
    return np.asarray(words(x))


def as_jax(data: np.ndarray, dtype: Any, device: jax.Device | None = None) -> jax.Array:
    """The inverse of `as_numpy`, in memory of its own; on the default device, unless another is
    given."""
    array = jnp.array(data, device=device)
    return (
        jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.zeros((), dtype)))
        if is_key(dtype)
        else array
    )


def copied(x: Any) -> jax.Array:
    """The same value, in memory of its own."""
    return as_jax(as_numpy(x), x.dtype)


def stored(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of `as_numpy`."""
    if is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return data.shape, data.dtype
    return shape, np.dtype(dtype)
