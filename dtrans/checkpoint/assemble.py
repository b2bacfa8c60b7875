"""Assembly of a slice of an array from other slices, with other boundaries.

A job may continue with another number of servers than the job that saved the checkpoint. So its
slices overlap several saved slices. A slice covers a *box* of the full array. Along each dimension,
the box has a range of indices. Along dimension 0, it may have the rows of some buckets instead
(`dtrans.rows.row_buckets`). The result is filled from the intersections of its box with the boxes
of the other slices. Slices with the same box must be equal.

Results are NumPy arrays; random keys are represented by their key data.
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
Shared = tuple[RowSet | np.ndarray, ...]  # intersection of boxes: indices along each dimension


def full_slice(name: str, aval: Any, endpoint: str = "") -> VarDistributed:
    """Describe a full array as a slice that covers all of it."""
    shape = tuple(aval.shape)
    return VarDistributed(name, shape, name, shape, aval.dtype, 0, 0, 0, False, "Param", endpoint)


def group_by_origin(rows: Iterable[VarDistributed]) -> dict[str, list[VarDistributed]]:
    """Group slices by the array that contains them: name of the array -> slices."""
    found: dict[str, list[VarDistributed]] = {}
    for row in rows:
        found.setdefault(row.origin_name, []).append(row)
    return found


def overlaps(a: VarDistributed, b: VarDistributed) -> bool:
    """Return True if two slices of one array have elements in common."""
    return _intersect(_box(a), _box(b)) is not None


def assemble_slice(
    target: VarDistributed,
    rows: Sequence[VarDistributed],
    read: Callable[[VarDistributed], np.ndarray],
    *,
    may_differ: bool = False,
) -> np.ndarray:
    """Assemble a slice of an array from other slices of the array; return a NumPy array.

    Args:
      target: the slice to assemble.
      rows: the available slices of the same array.
      read: returns the values of a slice; called only for slices that overlap `target`.
      may_differ: True if copies of a slice may come from different steps. If they differ, the first
        copy is used, with a `CheckpointWarning`.

    Raises:
      StateError: the slices do not cover the target, or copies of a slice differ.

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
            f"{target.origin_name} has {_size(wanted)} elements, but only {found} were found, on "
            f"{places}; pass the pieces or states of all servers"
        )
    return out


def _choose_copy(
    rows: Sequence[VarDistributed], values: Sequence[np.ndarray], *, may_differ: bool
) -> np.ndarray:
    """Return the first of several copies of a slice.

    If copies differ, warn if `may_differ`; otherwise raise StateError.
    """
    first = values[0]
    for row, other in zip(rows[1:], values[1:], strict=True):
        if not same_values(first, other):
            difference = (
                f"{row.slice_name} differs on {rows[0].endpoint} and {row.endpoint}: "
                f"{_format_array(first)} and {_format_array(other)}"
            )
            if not may_differ:
                raise StateError(
                    f"{difference}; pass states that one job returned after the same step"
                )
            text = (
                f"{difference}; the servers saved them during asynchronous steps, so the first is "
                "used"
            )
            warnings.warn(CheckpointWarning(text), stacklevel=2)
            break
    return first


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two copies of an array are equal up to rounding.

    If several servers compute the same value, the last bits can differ, since each server compiles
    its own program.
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


def _format_array(x: np.ndarray) -> str:
    return np.array2string(x, threshold=6, edgeitems=2, separator=", ").replace("\n", "")


# -- boxes -----------------------------------------------------------------------------------------


def _box(row: VarDistributed) -> Box:
    """Return the indices that a slice covers in the full array, along each dimension (a *box*)."""
    box: list[RowSet] = [RowRange(0, size) for size in row.slice_shape]
    if row.is_slice:
        box[row.axis] = row.rows
    return tuple(box)


def _intersect(a: Box, b: Box) -> Shared | None:
    """Return the indices along each dimension that two slices share; None if they share none."""
    shared = []
    for x, y in zip(a, b, strict=True):
        common = _intersect_rows(x, y)
        if _count(common) <= 0:
            return None
        shared.append(common)
    return tuple(shared)


def _intersect_rows(a: RowSet, b: RowSet) -> RowSet | np.ndarray:
    if a == b:
        return a
    if isinstance(a, RowRange) and isinstance(b, RowRange):
        return RowRange(max(a.start, b.start), min(a.stop, b.stop))
    # Buckets: the smaller set is listed, and its ids are looked up in the larger one.
    few, other = sorted((a, b), key=lambda rows: rows.rows)
    numbers = few.numbers()
    return numbers[other.among(numbers)]


def _index_in(shared: Shared, outer: Box) -> tuple[slice | np.ndarray, ...]:
    """Convert the indices `shared` of the full array to a NumPy index into the slice `outer`."""
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
    """Return a description of an array's type: `float32[4, 2]`."""
    return f"{x.dtype}{list(x.shape)}"


def as_numpy(x: Any) -> np.ndarray:
    """Convert an array to NumPy; random keys become their key data."""
    return np.asarray(words(x))


def as_jax(data: np.ndarray, dtype: Any, device: jax.Device | None = None) -> jax.Array:
    """Convert a result of `as_numpy` back to a JAX array, in new memory.

    Args:
      data: the NumPy array.
      dtype: the type of the original array.
      device: the device of the result; None for JAX's default device.
    """
    array = jnp.array(data, device=device)
    if not is_key(dtype):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.zeros((), dtype)))


def copy_array(x: Any) -> jax.Array:
    """Copy an array to new memory on the default device."""
    return as_jax(as_numpy(x), x.dtype)


def numpy_type(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype of an array after `as_numpy`; random keys become key data."""
    if is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return data.shape, data.dtype
    return shape, np.dtype(dtype)
