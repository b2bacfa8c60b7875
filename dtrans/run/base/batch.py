"""How several trainers share a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import is_traced
from dtrans.errors import BatchError
from dtrans.ir.pytree import TreeSpec, as_array


# The dimension along which trainers have parts of an array of the batch; or `replicated`; or `key`:
# each has its own.
Share = int | str


def batch_arrays(
    specs: Sequence[TreeSpec], batch: Sequence[Any], types: Mapping[str, Any]
) -> list[Any]:
    """The arrays of a batch, whose arguments must be of the structures in `specs`.

    Args:
      types: of the arrays that the step was traced with, by name; their number of dimensions
        counts.

    Raises:
      BatchError, TraceError: they are not.
    """
    if len(batch) != len(specs):
        raise BatchError(f"the step takes {len(specs)} batch arguments, {len(batch)} were given")
    found: list[Any] = []
    for i, (spec, arg) in enumerate(zip(specs, batch, strict=True)):
        arrays = spec.flatten(as_array(arg), f"batch argument {i}")
        for name, x in zip(spec.names, arrays, strict=True):
            if x.ndim != types[name].ndim:
                raise BatchError(
                    f"{name} is of shape {tuple(x.shape)}, the step was traced with "
                    f"{types[name].str_short()}"
                )
            of_python = x.ndim == 0 and getattr(x, "weak_type", False)
            if (
                of_python
                and x.dtype.kind in "biuf"
                and jnp.issubdtype(types[name].dtype, jnp.floating)
            ):
                continue
            if (
                not jnp.issubdtype(x.dtype, jax.dtypes.extended)
                and jax.dtypes.canonicalize_dtype(x.dtype) != types[name].dtype
            ):
                raise BatchError(
                    f"{name} is {x.dtype}, the step was traced with {types[name].str_short()}: "
                    "cast it, or trace the "
                    "step with arrays of this type"
                )
        found += arrays
    return found


def on_one_device(x: Any) -> Any:
    """Return an array where one device computes: arrays of a mesh, or of another device, are
    moved."""
    if not isinstance(x, jax.Array) or is_traced(x) or not x.committed:
        return x
    one = jax.local_devices()[0]
    return x if x.devices() == {one} else jax.device_put(x, one)


def shared_batch(
    names: Sequence[str],
    arrays: Sequence[Any],
    trainers: int,
    whole: Collection[str],
    whole_option: str,
) -> list[tuple[Any, Share]]:
    """The arrays of a batch, and how trainers share each.

    Args:
      names: of the arrays.
      whole: names of arrays that every trainer gets whole.
      whole_option: how a user says so, for errors.

    Raises:
      BatchError: arrays that differ in their number of rows, or that the trainers do not divide.
    """
    shared = [
        (x, share_of(name, x, trainers, whole)) for name, x in zip(names, arrays, strict=True)
    ]
    check_rows(rows_of(names, shared), trainers, whole_option)
    return shared


def rows_of(names: Sequence[str], shared: Sequence[tuple[Any, Share]]) -> dict[str, int]:
    """How many rows each array has that trainers have parts of."""
    return {
        n: x.shape[share]
        for n, (x, share) in zip(names, shared, strict=True)
        if isinstance(share, int)
    }


def check_rows(
    given: Mapping[str, int],
    trainers: int,
    whole_option: str,
    who: str = "",
    uneven: bool = False,
    noun: str = "trainer",
) -> None:
    """Raises BatchError for arrays that differ in their number of rows, or that the trainers do not
    divide."""
    rows: dict[int, str] = {}
    for name, count in given.items():
        rows.setdefault(count, name)
    for count, name in rows.items():
        if count % trainers and not uneven:
            raise BatchError(
                f"{name} has {count} rows, which {who or f'{trainers} {noun}s'} do not divide: "
                f"give batches of a multiple of {trainers}"
            )
    if len(rows) > 1:
        listed = " and ".join(f"{name} has {count}" for count, name in rows.items())
        raise BatchError(
            f"the arrays of a batch are split over the {noun}s, but {listed} rows; "
            f"name what every {noun} needs whole in {whole_option}"
        )


def share_of(name: str, x: Any, trainers: int, whole: Collection[str]) -> Share:
    """How trainers share one array of the batch, where each takes the step on its part alone."""
    if trainers == 1 or name in whole:
        return "replicated"
    if x.ndim:
        return 0
    return "key" if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else "replicated"


def even_rows(x: Any, axis: int, trainers: int) -> Any:
    """An array with rows behind, such that the trainers divide it. They are like the last one, and
    enter nothing."""
    return with_rows(x, axis, -(-x.shape[axis] // trainers) * trainers)


def with_rows(x: Any, axis: int, count: int) -> Any:
    """An array with so many rows: those behind are like the last one, or zero where there is
    none."""
    rows = x.shape[axis]
    if rows:
        return x if rows == count else jnp.take(x, np.minimum(np.arange(count), rows - 1), axis)
    return jnp.zeros((*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype)


def check_uneven(rows: int, trainers: int, taken: bool) -> None:
    """Raise BatchError for `dtrans.UnevenPart`s of rows that trainers divide, or where they must
    have equal parts."""
    if not taken or not rows % trainers:
        raise BatchError(
            f"these are parts of a batch of {rows} rows for trainers that do not divide it: "
            + (f"{trainers} do" if taken else "those of this plan must have equal parts")
        )


def uneven_rows(
    names: Sequence[str], arrays: Sequence[tuple[Any, Share]], whole: int, part: int, size: int
) -> list[Any]:
    """A process's part of a batch that trainers do not divide, with rows behind where it has fewer
    than others.

    Args:
      arrays: of this process, and how trainers share each.
      whole: how many rows all processes have.
      part: the number of this process.
      size: how many rows a process has that has as many as any other.

    Raises:
      BatchError: arrays of another number of rows.
    """
    mine = min(max(whole - part * size, 0), size)
    for n, (x, share) in zip(names, arrays, strict=True):
        if isinstance(share, int) and x.shape[share] != mine:
            raise BatchError(
                f"{n} has {x.shape[share]} rows here, and part {part} of a batch of {whole} rows "
                f"has {mine}: "
                "job.shard_batch(*batch) cuts them so"
            )
    return [with_rows(x, share, size) if isinstance(share, int) else x for x, share in arrays]


def part_types(arrays: Sequence[tuple[Any, Share]], trainers: int) -> list[jax.ShapeDtypeStruct]:
    """The types of one trainer's part; where trainers do not divide the rows, padded."""
    return [resized(x, share, lambda rows: -(-rows // trainers)) for x, share in arrays]


def whole_types(parts: Sequence[tuple[Any, Share]], trainers: int) -> list[jax.ShapeDtypeStruct]:
    """The types of a global batch of which each trainer gives such a part."""
    return [resized(x, share, lambda rows: rows * trainers) for x, share in parts]


def resized(x: Any, share: Share, rows: Callable[[int], int]) -> jax.ShapeDtypeStruct:
    """The type of an array with another number of rows, from how many it has."""
    if isinstance(share, str):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(
        (*x.shape[:share], rows(x.shape[share]), *x.shape[share + 1 :]), x.dtype
    )
