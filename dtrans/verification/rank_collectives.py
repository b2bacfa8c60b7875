"""Meanings of JAX's collectives on values of all ranks, in NumPy.

Ranks are the places of a mesh in row-major order. A collective over some axes joins the ranks that
agree on all other axes: a group. Each function here takes the values of one group, in its order,
and returns one output for each of its members.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.verification import field
from dtrans.verification.field_values import Complex, Real, choose, is_key, parted, real


Group = Callable[[list[Any], Mapping[str, Any]], list[Any]]


def groups_of(axes: Mapping[str, int], over: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks that a collective over some axes joins.

    Example:
      >>> from dtrans.verification.rank_collectives import groups_of
      >>> groups_of({"a": 2, "b": 2}, ("b",)), groups_of({"a": 2, "b": 2}, ("a",))
      ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    ranks = np.arange(int(np.prod([*axes.values()]))).reshape([*axes.values()])
    names = list(axes)
    kept = [k for k, n in enumerate(names) if n not in over]
    joined = [names.index(n) for n in over]
    size = int(np.prod([axes[n] for n in over]))
    return [[int(r) for r in row] for row in ranks.transpose(*kept, *joined).reshape(-1, size)]


def summed(parts: Sequence[Any]) -> Any:
    """Return the sum of the values of a group, in the order of its ranks."""
    if isinstance(parts[0], Complex):
        return Complex(summed([p.real for p in parts]), summed([p.imag for p in parts]))
    if isinstance(parts[0], Real):
        elements = functools.reduce(field.add, [p.elements for p in parts])
        return real(elements, sum(p.shadow for p in parts))
    return functools.reduce(np.add, parts)


def largest(parts: Sequence[Any]) -> Any:
    """Return the largest of the values of a group, entry by entry."""
    return functools.reduce(_larger, parts)


def smallest(parts: Sequence[Any]) -> Any:
    """Return the smallest of the values of a group, entry by entry."""
    return functools.reduce(_smaller, parts)


def _larger(x: Any, y: Any) -> Any:
    return choose(parted(x, y)[1], y, x) if isinstance(x, Real) else np.maximum(x, y)


def _smaller(x: Any, y: Any) -> Any:
    return choose(parted(y, x)[1], y, x) if isinstance(x, Real) else np.minimum(x, y)


def mapped(fn: Callable[..., Any], *xs: Any) -> Any:
    """Apply a function that moves elements to values of one kind."""
    if isinstance(xs[0], Complex):
        return Complex(mapped(fn, *(x.real for x in xs)), mapped(fn, *(x.imag for x in xs)))
    if isinstance(xs[0], Real):
        return Real(fn(*(x.elements for x in xs)), fn(*(x.shadow for x in xs)))
    if is_key(xs[0]):
        data = fn(*(np.asarray(jax.random.key_data(x)) for x in xs))
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(xs[0]))
    return fn(*xs)


def joined(parts: Sequence[Any], axis: int) -> Any:
    """Return the values of a group, one behind the other along a dimension."""
    return mapped(lambda *xs: np.concatenate(xs, axis), *parts)


def _same_for_all(fn: Callable[[Sequence[Any]], Any]) -> Group:
    return lambda parts, params: [fn(parts)] * len(parts)


def _all_gather(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    axis = params["all_gather_dimension"]
    if params["tiled"]:
        return [joined(parts, axis)] * len(parts)
    return [mapped(lambda *xs: np.stack(xs, axis), *parts)] * len(parts)


def _reduce_scatter(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    axis, whole = params["scatter_dimension"], summed(parts)
    cut = lambda k: mapped(lambda x: np.split(x, len(parts), axis)[k], whole)
    if params["tiled"]:
        return [cut(k) for k in range(len(parts))]
    return [mapped(lambda x: np.squeeze(x, axis), cut(k)) for k in range(len(parts))]


def _all_to_all(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    # with tiled=False `jax.lax.all_to_all` adds and removes dimensions of its own, beside the
    # primitive
    cut, to = params["split_axis"], params["concat_axis"]
    pieces = [
        [mapped(lambda x, k=k: np.split(x, len(parts), cut)[k], p) for p in parts]
        for k in range(len(parts))
    ]
    return [joined(row, to) for row in pieces]


def _broadcast(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    # before JAX 0.7 this was the name of pvary, which has no source
    return [parts[params["source"]]] * len(parts) if "source" in params else parts


def _permute(parts: list[Any], params: Mapping[str, Any]) -> list[Any]:
    made = [mapped(np.zeros_like, p) for p in parts]
    for source, target in params["perm"]:
        made[target] = parts[source]
    return made


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
