"""How several trainers share a batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.errors import BatchError
from dtrans.trees import TreeSpec, as_array


def shared_batch(
    specs: Sequence[TreeSpec], batch: Sequence[Any], trainers: int, whole: Collection[str], whole_option: str
) -> list[tuple[Any, str]]:
    """The arrays of a batch, and how trainers share each: `split` on dim 0, `replicated`, or `key` (each has its own).

    Args:
      specs: the structure of each batch argument.
      whole: names of arrays that every trainer gets whole.
      whole_option: how a user says so, for errors.

    Raises:
      BatchError: arrays that differ in their number of rows, or that the trainers do not divide.
    """
    if len(batch) != len(specs):
        raise BatchError(f"the step takes {len(specs)} batch arguments, {len(batch)} were given")
    arrays: list[tuple[Any, str]] = []
    rows: dict[int, str] = {}
    for i, (spec, arg) in enumerate(zip(specs, batch, strict=True)):
        for name, x in zip(spec.names, spec.flatten(as_array(arg), f"batch argument {i}"), strict=True):
            share = _share(name, x, trainers, whole)
            arrays.append((x, share))
            if share == "split":
                rows.setdefault(x.shape[0], name)
    for count, name in rows.items():
        if count % trainers:
            raise BatchError(
                f"{name} has {count} rows, which {trainers} trainers do not divide: "
                f"give batches of a multiple of {trainers}"
            )
    if len(rows) > 1:
        listed = " and ".join(f"{name} has {count}" for count, name in rows.items())
        raise BatchError(
            f"the arrays of a batch are split over the trainers on dim 0, but {listed} rows; "
            f"name what every trainer needs whole in {whole_option}"
        )
    return arrays


def _share(name: str, x: Any, trainers: int, whole: Collection[str]) -> str:
    """How trainers share one array of the batch."""
    if trainers == 1 or name in whole:
        return "replicated"
    if x.ndim:
        return "split"
    return "key" if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else "replicated"


def part_types(arrays: Sequence[tuple[Any, str]], trainers: int) -> list[jax.ShapeDtypeStruct]:
    """The types of one trainer's part."""
    return [
        jax.ShapeDtypeStruct((x.shape[0] // trainers, *x.shape[1:]) if share == "split" else x.shape, x.dtype)
        for x, share in arrays
    ]
