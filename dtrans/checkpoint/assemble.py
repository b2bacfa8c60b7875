"""Assembly of arrays from slices, as an overview lists them: from one cut to another.

A slice is a box of its origin: along each axis a range of entries, or buckets of them. The target
is a box too, and is filled from its intersections with the sources. Copies of the same box must
agree.

Results are in NumPy's memory; random keys are the words of their data.
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
Shared = tuple[RowSet | np.ndarray, ...]  # an intersection: along each axis a range, or the ids


def full_slice(name: str, aval: Any, endpoint: str = "") -> VarDistributed:
    """Return a row of an overview that covers all of an array."""
    shape = tuple(aval.shape)
    return VarDistributed(name, shape, name, shape, aval.dtype, 0, 0, 0, False, "Param", endpoint)


def group_by_origin(rows: Iterable[VarDistributed]) -> dict[str, list[VarDistributed]]:
    """Group rows of an overview by array."""
    found: dict[str, list[VarDistributed]] = {}
    for row in rows:
        found.setdefault(row.origin_name, []).append(row)
    return found


def overlaps(a: VarDistributed, b: VarDistributed) -> bool:
    """Return True if two slices of one array have entries in common."""
    return _intersect(_box(a), _box(b)) is not None


def assemble_slice(
    target: VarDistributed,
    rows: Sequence[VarDistributed],
    read: Callable[[VarDistributed], np.ndarray],
    *,
    may_differ: bool = False,
) -> np.ndarray:
    """Assemble a slice of an array from other slices, in the form of `as_numpy`.

    Args:
      target: the slice to assemble.
      rows: slices of the same array.
      read: returns the entries of a slice; called for slices that overlap `target`.
      may_differ: copies may come from different steps; read the first one then, with a
        `CheckpointWarning`.

    Raises:
      StateError: the slices do not cover the target, or copies differ.

    Example:
      >>> import dataclasses, numpy as np
      >>> w = full_slice("params/w", np.zeros(5))
      >>> cut = lambda start, stop: dataclasses.replace(
      ...     w, slice_shape=(stop - start,), offset=start, is_slice=True)
      >>> read = lambda row: np.arange(5.0)[row.index]
      >>> assemble_slice(cut(2, 5), [cut(0, 3), cut(3, 5)], read).tolist()
      [2.0, 3.0, 4.0]
    """
    shape, dtype = numpy_type(target.slice_shape, target.dtype)
    out, wanted, found = np.empty(shape, dtype), _box(target), 0
    boxes: dict[Box, list[VarDistributed]] = {}
    for row in rows:
        boxes.setdefault(_box(row), []).append(row)
    for box, copies in boxes.items():
        common = _intersect(wanted, box)
        if common is not None:
            values = _choose_copy(copies, [read(row) for row in copies], may_differ=may_differ)
            out[_index_in(common, wanted)] = values[_index_in(common, box)]
            found += _size(common)
    if found != _size(wanted):
        places = ", ".join(dict.fromkeys(row.endpoint for row in rows)) or "no server"
        raise StateError(
            f"{target.origin_name}: {found} of {_size(wanted)} elements are there, on {places}; "
            "pass the pieces or states of all servers"
        )
    return out


def _choose_copy(
    rows: Sequence[VarDistributed], values: Sequence[np.ndarray], *, may_differ: bool
) -> np.ndarray:
    """Return one of several copies. Raises StateError if they differ, unless they may."""
    first = values[0]
    for row, other in zip(rows[1:], values[1:], strict=True):
        if not same_values(first, other):
            difference = (
                f"{row.slice_name} differs on {rows[0].endpoint} and {row.endpoint}: "
                f"{_shown(first)} and {_shown(other)}"
            )
            if not may_differ:
                raise StateError(f"{difference}; pass states of one job, at one step")
            text = f"{difference}, saved during asynchronous steps: the first copy is used"
            warnings.warn(CheckpointWarning(text), stacklevel=2)
            break
    return first


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two copies are equal up to rounding.

    Servers compile their programs separately, so the last bits of values that all of them compute
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
    """Return the entries of a row along each axis of its origin."""
    sizes = enumerate(row.slice_shape)
    return tuple(
        row.rows if row.is_slice and i == row.axis else RowRange(0, size) for i, size in sizes
    )


def _intersect(a: Box, b: Box) -> Shared | None:
    """Return the intersection of two boxes; None if it is empty."""
    shared = tuple(_intersect_rows(x, y) for x, y in zip(a, b, strict=True))
    return shared if all(_count(x) > 0 for x in shared) else None


def _intersect_rows(a: RowSet, b: RowSet) -> RowSet | np.ndarray:
    if a == b:
        return a
    if isinstance(a, RowRange) and isinstance(b, RowRange):
        return RowRange(max(a.start, b.start), min(a.stop, b.stop))
    # ids of the smaller set are looked up in the larger one
    few, other = (a, b) if a.rows <= b.rows else (b, a)
    numbers = few.numbers()
    return numbers[other.among(numbers)]


def _index_in(shared: Shared, outer: Box) -> tuple[slice | np.ndarray, ...]:
    """Return an intersection as an index into the array of the box `outer`."""
    return tuple(_local_index(x, o) for x, o in zip(shared, outer, strict=True))


def _local_index(shared: RowSet | np.ndarray, outer: RowSet) -> slice | np.ndarray:
    if isinstance(shared, np.ndarray):
        return outer.local(shared)
    if shared == outer:
        return slice(None)
    return slice(shared.start - outer.start, shared.stop - outer.start)


def _count(shared: RowSet | np.ndarray) -> int:
    return len(shared) if isinstance(shared, np.ndarray) else shared.rows


def _size(box: Shared) -> int:
    return math.prod(map(_count, box))


# -- arrays ----------------------------------------------------------------------------------------


def type_of(x: Any) -> str:
    """Return the type of a value as text: `float32[4, 2]`."""
    return f"{x.dtype}{list(x.shape)}"


def as_numpy(x: Any) -> np.ndarray:
    """Convert a value to NumPy; a random key to the words of its data."""
    return np.asarray(words(x))


def as_jax(data: np.ndarray, dtype: Any, device: jax.Device | None = None) -> jax.Array:
    """Convert a result of `as_numpy` back, in new memory on a device, by default JAX's."""
    array = jnp.array(data, device=device)
    if not is_key(dtype):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.zeros((), dtype)))


def copy_array(x: Any) -> jax.Array:
    """Copy a value to new memory."""
    return as_jax(as_numpy(x), x.dtype)


def numpy_type(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype of `as_numpy`."""
    if is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return data.shape, data.dtype
    return shape, np.dtype(dtype)
