"""Small functions of arrays that shards are written with; each is traced once for its arguments and
types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode as Mode


Array = jax.Array


@functools.cache
def kept(axis: int, size: int) -> Callable[[Array, Array, Array], Array]:
    """Entries before `size`, counted from a start; others as in `nothing`."""

    def fn(x: Array, start: Array, nothing: Array) -> Array:
        return jnp.where(
            jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + start < size, x, nothing
        )

    return fn


@functools.cache
def kept_slots(axis: int) -> Callable[[Array, Array, Array], Array]:
    """Return a function that keeps the entries at which a vector along an axis is true; others are
    as in `nothing`."""

    def fn(x: Array, kept: Array, nothing: Array) -> Array:
        return jnp.where(jax.lax.broadcast_in_dim(kept, x.shape, [axis]), x, nothing)

    return fn


@functools.cache
def taken(axis: int) -> Callable[[Array, Array], Array]:
    """Return a function that takes the entries with the given numbers along an axis."""
    return lambda x, at: jnp.take(x, at, axis, mode="clip")


@functools.cache
def broadcast_to(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """Return a function that repeats a scalar."""
    return lambda x: jnp.broadcast_to(x, shape)


def of_shard(table: Array, index: Array) -> Array:
    """Return the row of a table that belongs to a shard."""
    return jax.lax.dynamic_index_in_dim(table, index, 0, keepdims=False)


def on_first(x: Array, start: Array) -> Array:
    """The value on the first shard, zero on others."""
    return jnp.where(start == 0, x, jnp.zeros_like(x))


def _wide(x: Array) -> Array:
    """Integers that can be compared with positions."""
    return x if x.dtype.itemsize == 8 else x.astype(jnp.int32)


def _with(indices: Array, component: int, value: Array) -> Array:
    """Indices with another component."""
    wide = _wide(indices)
    at = jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    return jnp.where(at == component, value[..., None], wide)


def _owned(
    indices: Array, component: int, start: Array, local: int, size: int, clip: bool
) -> tuple[Array, Array]:
    """Positions along the dimension that is cut, and which of them are this shard's."""
    at = _wide(indices)[..., component]
    if clip:
        at = jnp.clip(at, 0, size - 1)
    return at, (at >= start) & (at < start + local) & (at < size)


@functools.cache
def picked(
    component: int, size: int, numbers: Any, sizes: tuple[int, ...], mode: Any, fill: Any
) -> Callable[[Array, Array, Array], Array]:
    """A shard's term of a gather that picks single entries along the dimension that is cut.

    Args:
      component: which one of an index is along that dimension.
      size: of that dimension.
      numbers, sizes, mode, fill: of the gather.
    """
    axis = numbers.start_index_map[component]

    def fn(x: Array, indices: Array, start: Array) -> Array:
        # out of bounds, a gather that promised not to be is clamped
        at, own = _owned(indices, component, start, x.shape[axis], size, mode != Mode.FILL_OR_DROP)
        found = jax.lax.gather(
            x,
            _with(indices, component, jnp.where(own, at - start, 0)),
            numbers,
            sizes,
            mode=mode,
            fill_value=fill,
        )
        batch = [d for d in range(found.ndim) if d not in numbers.offset_dims]
        spread: Callable[[Array], Array] = lambda m: jax.lax.broadcast_in_dim(m, found.shape, batch)
        others = jnp.zeros_like(found)
        if mode == Mode.FILL_OR_DROP:  # what is beyond all shards is the first one's
            beyond = ((at < 0) | (at >= size)) & (start == 0)
            others = jnp.where(
                spread(beyond), jnp.full_like(found, _fill(found.dtype, fill)), others
            )
        return jnp.where(spread(own), found, others)

    return fn


def _fill(dtype: Any, fill: Any) -> Any:
    """What a gather gives out of bounds: what it says, or else what `jax.lax.gather` documents."""
    if fill is not None:
        return fill
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype == np.bool_:
        return True
    limits = jnp.iinfo(dtype)
    return limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max


@functools.cache
def own_indices(
    component: int, size: int, local: int, clip: bool
) -> Callable[[Array, Array], Array]:
    """Indices into a shard's piece; those of others are out of its bounds."""

    def fn(indices: Array, start: Array) -> Array:
        at, own = _owned(indices, component, start, local, size, clip)
        return _with(indices, component, jnp.where(own, at - start, local))

    return fn


@functools.cache
def best_local(
    axis: int, size: int, largest: bool
) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
    """The best entry of a shard along an axis, and where in the whole it is (an integer all the
    way)."""

    def fn(x: Array, start: Array, nothing: Array) -> tuple[Array, Array]:
        x = kept(axis, size)(x, start, nothing)
        at = (jax.lax.argmax if largest else jax.lax.argmin)(x, axis, jnp.int32)
        found = jnp.take_along_axis(x, jnp.expand_dims(at, axis), axis, mode="promise_in_bounds")
        return jnp.squeeze(found, axis), at + start

    return fn


@functools.cache
def candidates(size: int) -> Callable[[Array, Array, Array], Array]:
    """The positions of those shards that have the best of all; the lowest of them is the answer.

    NaN is better than anything, as it is on one device. What a maximum makes of one over devices is
    not relied on: such positions are moved below all others. Positions of padding are none.
    """

    def fn(found: Array, best: Array, at: Array) -> Array:
        limits = jnp.iinfo(at.dtype)
        has = jnp.where(found == best, at, limits.max)
        return jnp.where(at < size, jnp.where(found != found, at + limits.min, has), limits.max)

    return fn


def decided(lowest: Array) -> Array:
    """The position that is meant by the lowest candidate."""
    return jnp.where(lowest < 0, lowest - jnp.iinfo(lowest.dtype).min, lowest)
