"""Division of batches among trainers: checks of their arrays, and padding.

The `Share` of an array says which part each trainer gets. It is the dimension that is split over
the trainers, or "replicated" for an array that every trainer gets in full. For a random key it is
"key": each trainer folds its id into the key (`jax.random.fold_in`). All split arrays of a batch
have the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import is_traced
from dtrans.errors import BatchError
from dtrans.ir.array_fns import array_type
from dtrans.ir.pytree import TreeSpec, as_array


# Dimension that is split over the trainers; or "replicated"; or "key" for a PRNG key, into which
# each trainer folds its id.
Share = int | str


def batch_arrays(
    specs: Sequence[TreeSpec], batch: Sequence[Any], types: Mapping[str, Any]
) -> list[Any]:
    """Flatten the batch arguments of a step to a list of arrays, and check them.

    Args:
      specs: the structure of each argument.
      batch: the arguments.
      types: the types with which the step was traced, by name. Sizes of dimensions may differ.

    Returns:
      The arrays, in the order of the names in `specs`.

    Raises:
      BatchError: the number of arguments, or a rank or dtype, differs from the traced step.
      TraceError: the structure of an argument differs from the traced step.
    """
    if len(batch) != len(specs):
        raise BatchError(
            f"the step takes {len(specs)} batch arguments, {len(batch)} were given; pass "
            "the same arguments as to dtrans.trace"
        )
    found: list[Any] = []
    for i, (spec, arg) in enumerate(zip(specs, batch, strict=True)):
        arrays = spec.flatten(as_array(arg), f"batch argument {i}")
        for name, x in zip(spec.names, arrays, strict=True):
            _check_type(name, x, types[name])
        found += arrays
    return found


def _check_type(name: str, x: Any, traced: Any) -> None:
    """Raise BatchError if the rank or dtype of an array differs from the traced step."""
    if not hasattr(x, "ndim") or not hasattr(x, "dtype"):
        raise BatchError(
            f"{name} is a {type(x).__name__}, but the step was traced with {traced.str_short()}; "
            "pass an array, such as np.asarray(...)"
        )
    if x.ndim != traced.ndim:
        raise BatchError(
            f"{name} has shape {tuple(x.shape)}, but the step was traced with "
            f"{traced.str_short()}; pass an array with {len(traced.shape)} dimensions"
        )
    # accept a Python number, which is weakly typed: jit casts it to the traced float type
    is_python_number = x.ndim == 0 and getattr(x, "weak_type", False)
    if is_python_number and x.dtype.kind in "biuf" and jnp.issubdtype(traced.dtype, jnp.floating):
        return
    if (
        not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        and jax.dtypes.canonicalize_dtype(x.dtype) != traced.dtype
    ):
        raise BatchError(
            f"{name} is {x.dtype}, but the step was traced with {traced.str_short()}; cast the "
            "array, or trace the step with arrays of this type"
        )


def on_one_device(x: Any) -> Any:
    """Move an array from a mesh or another device to the first local device."""
    if not isinstance(x, jax.Array) or is_traced(x) or not x.committed:
        return x
    one = jax.local_devices()[0]
    if x.devices() == {one}:
        return x
    return jax.device_put(x, one)


def shared_batch(
    names: Sequence[str],
    arrays: Sequence[Any],
    trainers: int,
    unsplit: Collection[str],
    unsplit_option: str,
) -> list[tuple[Any, Share]]:
    """Decide for each array of a batch which part each trainer gets.

    Args:
      names: names of the arrays.
      arrays: the arrays.
      trainers: the number of trainers.
      unsplit: names of the arrays that every trainer takes in full.
      unsplit_option: the user's option with these names, for errors.

    Returns:
      Pairs (array, share). The share is the split dimension, "replicated" or "key" (`Share`).

    Raises:
      BatchError: the arrays have different numbers of rows, or the number of trainers does not
        divide the rows.
    """
    shared = []
    for name, x in zip(names, arrays, strict=True):
        shared.append((x, share_of(name, x, trainers, unsplit)))
    check_rows(rows_of(names, shared), trainers, unsplit_option)
    return shared


def rows_of(names: Sequence[str], shared: Sequence[tuple[Any, Share]]) -> dict[str, int]:
    """Return the number of rows of each array that is split over the trainers, by name."""
    rows: dict[str, int] = {}
    for name, (x, share) in zip(names, shared, strict=True):
        if isinstance(share, int):
            rows[name] = x.shape[share]
    return rows


def check_rows(
    counts: Mapping[str, int],
    trainers: int,
    unsplit_option: str,
    who: str = "",
    uneven: bool = False,
    noun: str = "trainer",
) -> None:
    """Check that all split arrays have the same number of rows, a multiple of `trainers`.

    Args:
      counts: number of rows of each array, by name.
      unsplit_option: the user's option with the names of unsplit arrays, for errors.
      who: name of this process's trainers in errors; "" for the default, "N trainers".
      uneven: True to accept a number of rows that is not a multiple of `trainers`.
      noun: the strategy's word for a trainer, for errors.

    Raises:
      BatchError: the numbers of rows differ, or the number of trainers does not divide them.
    """
    rows: dict[int, str] = {}
    for name, count in counts.items():
        rows.setdefault(count, name)
    for count, name in rows.items():
        if count % trainers and not uneven:
            raise BatchError(
                f"{name} has {count} rows, which cannot be split evenly over "
                f"{who or f'{trainers} {noun}s'}; pass a multiple of {trainers} rows"
            )
    if len(rows) > 1:
        listed = " and ".join(f"{name} has {count}" for count, name in rows.items())
        raise BatchError(
            f"the arrays of a batch are split over the {noun}s, but {listed} rows; "
            f"name arrays that every {noun} needs in full in {unsplit_option}"
        )


def share_of(name: str, x: Any, trainers: int, unsplit: Collection[str]) -> Share:
    """Return the part of an array that each trainer gets: 0, "replicated" or "key".

    An array is split on dimension 0 if it has dimensions, and `unsplit` does not name it. "key" is
    for random keys, into which each trainer folds its id.
    """
    if trainers == 1 or name in unsplit:
        return "replicated"
    if x.ndim:
        return 0
    return "key" if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else "replicated"


# -- padding ---------------------------------------------------------------------------------------


def pad_for_trainers(x: Any, axis: int, trainers: int) -> Any:
    """Pad dimension `axis` to a multiple of the number of trainers.

    For 3 trainers, 10 rows become 12. The step must ignore the padding.
    """
    return pad_rows(x, axis, -(-x.shape[axis] // trainers) * trainers)


def pad_rows(x: Any, axis: int, count: int) -> Any:
    """Pad dimension `axis` to `count` rows with copies of the last row.

    A row of zeros could cause a division by zero in the loss; a copy of a row does not. An array
    without rows is padded with zeros.
    """
    rows = x.shape[axis]
    if not rows:
        return jnp.zeros((*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype)
    if rows == count:
        return x
    return jnp.take(x, np.minimum(np.arange(count), rows - 1), axis)


def check_uneven(rows: int, trainers: int, is_supported: bool) -> None:
    """Raise BatchError if a user passed `dtrans.UnevenPart`s, but the step needs equal parts.

    `job.shard_batch` returns such parts only if the plan can pad them, and the number of trainers
    does not divide the rows.

    Args:
      rows: number of rows of the full batch.
      trainers: the number of trainers.
      is_supported: True if the plan can pad batches.
    """
    part = f"the batch is a dtrans.UnevenPart of {rows} rows"
    if not is_supported:
        raise BatchError(
            f"{part}, but this plan needs equal parts; pass the arrays without UnevenPart, with a "
            f"multiple of {trainers} rows"
        )
    if rows % trainers == 0:
        raise BatchError(
            f"{part}, but {trainers} trainers can divide these rows evenly; pass the arrays "
            "without UnevenPart"
        )


def uneven_rows(
    names: Sequence[str],
    arrays: Sequence[tuple[Any, Share]],
    rows: int,
    part: int,
    size: int,
    here: int | None = None,
) -> list[Any]:
    """Pad one trainer's rows of a batch that trainers cannot divide evenly.

    All trainers then have equally many rows. For 10 rows and 3 trainers, the parts have 4, 4 and 2
    rows. The last part is padded to 4.

    Args:
      names: names of the arrays.
      arrays: pairs (array of this trainer, its share).
      rows: number of rows of the full batch.
      part: index of this trainer.
      size: number of rows of a part after padding.
      here: number of rows of this part; None if only the last parts have fewer than `size` rows.

    Raises:
      BatchError: an array has another number of rows than this part of the batch.
    """
    if here is None:
        here = min(max(rows - part * size, 0), size)
    padded = []
    for n, (x, share) in zip(names, arrays, strict=True):
        if isinstance(share, str):
            padded.append(x)
            continue
        if x.shape[share] != here:
            raise BatchError(
                f"{n} has {x.shape[share]} rows, expected {here} rows in part {part} of a batch of "
                f"{rows} rows; split batches with job.shard_batch(*batch)"
            )
        padded.append(pad_rows(x, share, size))
    return padded


# -- types -----------------------------------------------------------------------------------------


def part_types(arrays: Sequence[tuple[Any, Share]], trainers: int) -> list[jax.ShapeDtypeStruct]:
    """Return shape and dtype of one trainer's part of each array, including padding."""
    return [resize(x, share, lambda rows: -(-rows // trainers)) for x, share in arrays]


def global_types(parts: Sequence[tuple[Any, Share]], trainers: int) -> list[jax.ShapeDtypeStruct]:
    """Return shape and dtype of the full batch's arrays, from those of one trainer's part."""
    return [resize(x, share, lambda rows: rows * trainers) for x, share in parts]


def resize(x: Any, share: Share, rows: Callable[[int], int]) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array with another number of rows.

    Args:
      x: the array.
      share: the dimension of its rows; "replicated" or "key" for an array without rows.
      rows: function from the number of rows of `x` to the new number.
    """
    if isinstance(share, str):
        return array_type(x)
    return jax.ShapeDtypeStruct(
        (*x.shape[:share], rows(x.shape[share]), *x.shape[share + 1 :]), x.dtype
    )
