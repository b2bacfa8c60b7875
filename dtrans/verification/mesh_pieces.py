"""Pieces of an array on a mesh: an array is sharded by a `PartitionSpec`, or assembled from pieces.

A piece is the value of one rank. Ranks with equal coordinates on the axes of a spec have the same
object as their piece, so the evaluation computes with it once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrans.ir.selection import values_at
from dtrans.verification.field_values import Replicas, Unknown, same
from dtrans.verification.rank_collectives import groups_of, joined, mapped


Ranked = tuple[Any, ...]  # the value of each rank


def shard(axes: Mapping[str, int], x: Any, spec: Any) -> Ranked:
    """Return the piece of an array for each rank of a mesh."""
    count = math.prod(axes.values())
    if isinstance(x, Unknown):
        return (x,) * count
    pieces: list[Any] = [x] * count
    for d, entry in enumerate(spec):
        names = _axis_names(entry)
        if not names:
            continue
        size = math.prod(values_at(axes, names))
        for ranks in groups_of(axes, names):
            for k, r in enumerate(ranks):
                cut = functools.partial(_part, count=size, axis=d, number=k)
                pieces[r] = mapped(cut, pieces[r])

    # ranks with equal coordinates get the object of the first such rank
    first: dict[tuple[int, ...], Any] = {}
    keys = [_coordinates(axes, spec, r) for r in range(count)]
    for key, piece in zip(keys, pieces, strict=True):
        first.setdefault(key, piece)
    return tuple(values_at(first, keys))


def assemble(axes: Mapping[str, int], pieces: Ranked, spec: Any) -> Any:
    """Assemble an array from the ranks' pieces; `Replicas` if copies on the ranks differ."""
    for value in pieces:
        if isinstance(value, Unknown):
            return value
    parts = list(pieces)
    for d, entry in reversed(list(enumerate(spec))):
        names = _axis_names(entry)
        if not names:
            continue
        larger: list[Any] = [None] * len(parts)
        for ranks in groups_of(axes, names):
            one = joined(values_at(parts, ranks), d)
            for r in ranks:
                larger[r] = one
        parts = larger
    if any(p is not parts[0] and not same(p, parts[0]) for p in parts):
        return Replicas("the copies on the ranks differ", tuple(parts), axes)
    return parts[0]


def _part(x: Any, *, count: int, axis: int, number: int) -> Any:
    return np.split(x, count, axis)[number]


def _axis_names(entry: Any) -> list[str]:
    """Return the mesh axes in one entry of a `PartitionSpec`."""
    if entry is None:
        return []
    return [entry] if isinstance(entry, str) else list(entry)


def _coordinates(axes: Mapping[str, int], spec: Any, rank: int) -> tuple[int, ...]:
    """Return the coordinates of a rank on the axes of a spec."""
    used: set[str] = set()
    for entry in spec:
        used.update(_axis_names(entry))
    found = []
    for name, index in zip(axes, np.unravel_index(rank, [*axes.values()]), strict=True):
        if name in used:
            found.append(int(index))
    return tuple(found)
