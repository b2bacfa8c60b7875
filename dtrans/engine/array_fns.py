"""Small functions of arrays that programs of shards call; each is traced once per signature."""

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
def select_before(axis: int, size: int) -> Callable[[Array, Array, Array], Array]:
    """Return a function that replaces entries from index `size` on, counted from a start."""

    def fn(x: Array, start: Array, nothing: Array) -> Array:
        return jnp.where(
            jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + start < size, x, nothing
        )

    return fn


@functools.cache
def select_slots(axis: int) -> Callable[[Array, Array, Array], Array]:
    """Return a function that keeps entries where a mask along an axis is true, and fills others."""

    def fn(x: Array, mask: Array, nothing: Array) -> Array:
        return jnp.where(jax.lax.broadcast_in_dim(mask, x.shape, [axis]), x, nothing)

    return fn


@functools.cache
def take_entries(axis: int) -> Callable[[Array, Array], Array]:
    """Return a function that selects entries by index along an axis."""
    return lambda x, at: jnp.take(x, at, axis, mode="clip")


@functools.cache
def broadcast_to(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """Return a function that broadcasts a scalar to a shape."""
    return lambda x: jnp.broadcast_to(x, shape)


def row_of_shard(table: Array, index: Array) -> Array:
    """Return a shard's row of a table with one row per shard."""
    return jax.lax.dynamic_index_in_dim(table, index, 0, keepdims=False)


def on_first(x: Array, start: Array) -> Array:
    """Return the value on the first shard, zeros on others."""
    return jnp.where(start == 0, x, jnp.zeros_like(x))


def _wide(x: Array) -> Array:
    """Convert indices to integers of at least 32 bits, which can be compared with positions."""
    return x if x.dtype.itemsize == 8 else x.astype(jnp.int32)


def _with(indices: Array, component: int, value: Array) -> Array:
    """Replace one component of indices."""
    wide = _wide(indices)
    at = jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    return jnp.where(at == component, value[..., None], wide)


def _owned(
    indices: Array, component: int, start: Array, local: int, size: int, clip: bool
) -> tuple[Array, Array]:
    """Return positions along the sharded dimension, and a mask of those on this shard."""
    at = _wide(indices)[..., component]
    if clip:
        at = jnp.clip(at, 0, size - 1)
    return at, (at >= start) & (at < start + local) & (at < size)


@functools.cache
def pick_entries(
    component: int, size: int, numbers: Any, sizes: tuple[int, ...], mode: Any, fill: Any
) -> Callable[[Array, Array, Array], Array]:
    """Return a function that computes a shard's term of a gather of single entries.

    Args:
      component: component of an index that points along the sharded dimension.
      size: size of that dimension.
      numbers, sizes, mode, fill: parameters of the gather.
    """
    axis = numbers.start_index_map[component]

    def fn(x: Array, indices: Array, start: Array) -> Array:
        # XLA clamps out-of-bounds indices in mode PROMISE_IN_BOUNDS, too
        at, is_local = _owned(
            indices, component, start, x.shape[axis], size, mode != Mode.FILL_OR_DROP
        )
        found = jax.lax.gather(
            x,
            _with(indices, component, jnp.where(is_local, at - start, 0)),
            numbers,
            sizes,
            mode=mode,
            fill_value=fill,
        )
        batch = [d for d in range(found.ndim) if d not in numbers.offset_dims]
        spread: Callable[[Array], Array] = lambda m: jax.lax.broadcast_in_dim(m, found.shape, batch)
        others = jnp.zeros_like(found)
        if mode == Mode.FILL_OR_DROP:  # the first shard fills entries that are out of bounds
            beyond = ((at < 0) | (at >= size)) & (start == 0)
            others = jnp.where(
                spread(beyond), jnp.full_like(found, _fill(found.dtype, fill)), others
            )
        return jnp.where(spread(is_local), found, others)

    return fn


def _fill(dtype: Any, fill: Any) -> Any:
    """Return the fill value of a gather: the explicit one, or the default of `jax.lax.gather`."""
    if fill is not None:
        return fill
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype == np.bool_:
        return True
    limits = jnp.iinfo(dtype)
    return limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max


@functools.cache
def local_indices(
    component: int, size: int, local: int, clip: bool
) -> Callable[[Array, Array], Array]:
    """Return a function that maps global indices to a shard's piece.

    Indices on other shards become out of bounds.
    """

    def fn(indices: Array, start: Array) -> Array:
        at, is_local = _owned(indices, component, start, local, size, clip)
        return _with(indices, component, jnp.where(is_local, at - start, local))

    return fn


@functools.cache
def best_local(
    axis: int, size: int, largest: bool
) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
    """Return a function that finds a shard's best entry along an axis and its global position."""

    def fn(x: Array, start: Array, nothing: Array) -> tuple[Array, Array]:
        x = select_before(axis, size)(x, start, nothing)
        at = (jax.lax.argmax if largest else jax.lax.argmin)(x, axis, jnp.int32)
        found = jnp.take_along_axis(x, jnp.expand_dims(at, axis), axis, mode="promise_in_bounds")
        return jnp.squeeze(found, axis), at + start

    return fn


@functools.cache
def argmax_marks(size: int) -> Callable[[Array, Array, Array], Array]:
    """Return a function that marks the positions of shards that have the global best entry.

    The lowest mark is the answer of argmax or argmin; shards without the best entry return the
    largest integer. NaN wins, as on one device. A maximum over devices may drop NaN, so positions
    of NaN are shifted below all others. Positions in padding never win.
    """

    def fn(found: Array, best: Array, at: Array) -> Array:
        limits = jnp.iinfo(at.dtype)
        has = jnp.where(found == best, at, limits.max)
        return jnp.where(at < size, jnp.where(found != found, at + limits.min, has), limits.max)

    return fn


def decode_position(lowest: Array) -> Array:
    """Return the position that the lowest mark of `argmax_marks` stands for."""
    return jnp.where(lowest < 0, lowest - jnp.iinfo(lowest.dtype).min, lowest)
