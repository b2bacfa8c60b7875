"""JAX's collectives on the values of all ranks, in NumPy.

Ranks are the devices of a mesh in row-major order. A collective over some axes connects the ranks
of a group: ranks with equal coordinates on all other axes. The rule of a collective takes the
values of the ranks of one group, in order, and returns one output for each rank.

`shard` splits an array over the ranks, as a `PartitionSpec` states. `assemble` joins the pieces of
the ranks. If the spec replicates the array over some ranks, `shard` gives these ranks the same
Python object. The evaluation then computes once for all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.ir.selection import values_at
from dtrans.verification import field
from dtrans.verification.field_values import (
    Complex,
    Real,
    Replicas,
    Unknown,
    choose,
    is_key,
    ordered,
    real,
    same,
)


Ranked = tuple[Any, ...]  # The value of a variable on each rank.
Group = Callable[[list[Any], Mapping[str, Any]], list[Any]]


def groups_of(axes: Mapping[str, int], over: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks that a collective over some axes connects.

    Example:
      >>> from dtrans.verification.rank_collectives import groups_of
      >>> groups_of({"a": 2, "b": 2}, ("b",)), groups_of({"a": 2, "b": 2}, ("a",))
      ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    sizes, names = [*axes.values()], [*axes]
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    others = [k for k, n in enumerate(names) if n not in over]
    joined_axes = [names.index(n) for n in over]
    group_size = math.prod(values_at(axes, over))
    groups: list[list[int]] = (
        ranks.transpose(*others, *joined_axes).reshape(-1, group_size).tolist()
    )
    return groups


def summed(parts: Sequence[Any]) -> Any:
    """Add up the values of a group, in the order of its ranks."""
    if isinstance(parts[0], Complex):
        real_part = summed([p.real for p in parts])
        return Complex(real_part, summed([p.imag for p in parts]))
    if isinstance(parts[0], Real):
        elements = functools.reduce(field.add, [p.elements for p in parts])
        return real(elements, sum(p.approx for p in parts))
    return functools.reduce(np.add, parts)


def largest(parts: Sequence[Any]) -> Any:
    """Return the entrywise maximum of the values of a group."""
    return functools.reduce(_larger, parts)


def smallest(parts: Sequence[Any]) -> Any:
    """Return the entrywise minimum of the values of a group."""
    return functools.reduce(_smaller, parts)


def _larger(x: Any, y: Any) -> Any:
    if not isinstance(x, Real):
        return np.maximum(x, y)
    _, less = ordered(x, y)
    return choose(less, y, x)


def _smaller(x: Any, y: Any) -> Any:
    if not isinstance(x, Real):
        return np.minimum(x, y)
    _, less = ordered(y, x)
    return choose(less, y, x)


def mapped(fn: Callable[..., Any], *xs: Any) -> Any:
    """Apply a NumPy function, which only moves entries, to values of the same kind.

    For floats, apply the function to the field elements, and then to the float64 values. For random
    keys, apply the function to the words of the keys.
    """
    if isinstance(xs[0], Complex):
        real_part = mapped(fn, *(x.real for x in xs))
        return Complex(real_part, mapped(fn, *(x.imag for x in xs)))
    if isinstance(xs[0], Real):
        elements = fn(*(x.elements for x in xs))
        return Real(elements, fn(*(x.approx for x in xs)))
    if is_key(xs[0]):
        data = fn(*(np.asarray(jax.random.key_data(x)) for x in xs))
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(xs[0]))
    return fn(*xs)


def joined(parts: Sequence[Any], axis: int) -> Any:
    """Concatenate the values of a group along a dimension."""
    return mapped(lambda *xs: np.concatenate(xs, axis), *parts)


def _same_for_all(fn: Callable[[Sequence[Any]], Any]) -> Group:
    return lambda parts, params: [fn(parts)] * len(parts)


def _all_gather(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    axis = params["all_gather_dimension"]
    if params["tiled"]:
        return [joined(parts, axis)] * len(parts)
    return [mapped(lambda *xs: np.stack(xs, axis), *parts)] * len(parts)


def _reduce_scatter(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    axis, total = params["scatter_dimension"], summed(parts)
    pieces = [_piece(total, len(parts), axis, k) for k in range(len(parts))]
    if params["tiled"]:
        return pieces
    return [mapped(lambda x: np.squeeze(x, axis), piece) for piece in pieces]


def _all_to_all(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    # This also covers tiled=False: `jax.lax.all_to_all` then adds and removes dimensions with other
    # primitives.
    found = []
    for k in range(len(parts)):
        pieces = [_piece(p, len(parts), params["split_axis"], k) for p in parts]
        found.append(joined(pieces, params["concat_axis"]))
    return found


def _piece(value: Any, count: int, axis: int, number: int) -> Any:
    """Split a value into `count` equal pieces along a dimension; return piece `number`."""
    return mapped(lambda x: np.split(x, count, axis)[number], value)


def _broadcast(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    # Before JAX 0.7 `pbroadcast` was the name of `pvary`, which has no parameter `source`, and
    # changes no value.
    if "source" not in params:
        return parts
    return [parts[params["source"]]] * len(parts)


def _permute(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    # Ranks that receive nothing get zeros.
    outputs = [mapped(np.zeros_like, p) for p in parts]
    for source, target in params["perm"]:
        outputs[target] = parts[source]
    return outputs


GROUPS: Mapping[str, Group] = {
    "psum": _same_for_all(summed),
    "psum_invariant": _same_for_all(summed),
    "pmax": _same_for_all(largest),
    "pmin": _same_for_all(smallest),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _permute,
    "pbroadcast": _broadcast,
}


# -- pieces of an array ----------------------------------------------------------------------------


def shard(axes: Mapping[str, int], x: Any, spec: Any) -> Ranked:
    """Return the piece of an array for each rank of a mesh.

    Args:
      axes: size of each mesh axis, by name.
      x: the array.
      spec: the `PartitionSpec` of the array.
    """
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
                take_piece = functools.partial(_part, count=size, axis=d, number=k)
                pieces[r] = mapped(take_piece, pieces[r])

    # Ranks with equal coordinates share one object.
    first: dict[tuple[int, ...], Any] = {}
    keys = [_coordinates(axes, spec, r) for r in range(count)]
    for key, piece in zip(keys, pieces, strict=True):
        first.setdefault(key, piece)
    return tuple(values_at(first, keys))


def assemble(axes: Mapping[str, int], pieces: Ranked, spec: Any) -> Any:
    """Assemble an array from the ranks' pieces, or return `Replicas` if their copies differ."""
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
