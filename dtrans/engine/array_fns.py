"""Small array functions that programs of shards call.

Factories are cached, so that `Builder.call` traces each function once for each type. A *piece* is
the part of a sharded array that a shard has. `start` is the index of the first entry of a piece in
the full dimension.
"""

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
    """Return a function (x, start, fill) that replaces the padding of a piece by `fill`.

    Entry i of the piece is padding if `start + i >= size`.
    """

    def fn(x: Array, start: Array, fill: Array) -> Array:
        at = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(at + start < size, x, fill)

    return fn


@functools.cache
def select_slots(axis: int) -> Callable[[Array, Array, Array], Array]:
    """Return a function (x, mask, fill) that replaces entries by `fill` where the mask is False.

    The mask has one entry for each position along `axis`.
    """

    def fn(x: Array, mask: Array, fill: Array) -> Array:
        return jnp.where(jax.lax.broadcast_in_dim(mask, x.shape, [axis]), x, fill)

    return fn


@functools.cache
def take_entries(axis: int) -> Callable[[Array, Array], Array]:
    """Return a function (x, indices) that selects entries along an axis."""
    return lambda x, at: jnp.take(x, at, axis, mode="clip")


@functools.cache
def broadcast_to(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """Return a function that broadcasts a scalar to a shape."""
    return lambda x: jnp.broadcast_to(x, shape)


def row_of_shard(table: Array, index: Array) -> Array:
    """Return row `index` of a table that has one row for each shard."""
    return jax.lax.dynamic_index_in_dim(table, index, 0, keepdims=False)


def on_first(x: Array, start: Array) -> Array:
    """Return x on the first shard (`start` is 0), and zeros on others, so that their sum is x."""
    return jnp.where(start == 0, x, jnp.zeros_like(x))


def _wide(x: Array) -> Array:
    """Convert indices to at least 32 bits, so that sums with positions do not overflow."""
    if x.dtype.itemsize == 8:
        return x
    return x.astype(jnp.int32)


def _with(indices: Array, component: int, value: Array) -> Array:
    """Replace one component of gather or scatter indices by `value`."""
    wide = _wide(indices)
    at = jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    return jnp.where(at == component, value[..., None], wide)


def _owned(
    indices: Array, component: int, start: Array, local: int, size: int, clip: bool
) -> tuple[Array, Array]:
    """Return positions in the full dimension, and a mask: True for those in this shard's piece.

    Args:
      indices: the indices of a gather or scatter.
      component: the number of their component that counts along the sharded dimension.
      start: position of the piece's first entry in the full dimension.
      local: length of the piece.
      size: length of the full dimension.
      clip: True to clip indices that are out of bounds.
    """
    at = _wide(indices)[..., component]
    if clip:
        at = jnp.clip(at, 0, size - 1)
    return at, (at >= start) & (at < start + local) & (at < size)


@functools.cache
def pick_entries(
    component: int, size: int, numbers: Any, sizes: tuple[int, ...], mode: Any, fill: Any
) -> Callable[[Array, Array, Array], Array]:
    """Return a function (piece, indices, start) that computes a shard's term of a gather.

    The gather looks up single entries along the sharded dimension. A shard's term has the entries
    that this shard has, and zeros elsewhere. The sum of all terms is the gather's output.

    Args:
      component: number of the index component that refers to the sharded dimension.
      size: size of the sharded dimension.
      numbers, sizes, mode, fill: parameters of the gather.
    """
    axis = numbers.start_index_map[component]

    def fn(x: Array, indices: Array, start: Array) -> Array:
        # XLA also clamps out-of-bounds indices in mode PROMISE_IN_BOUNDS
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
        if mode == Mode.FILL_OR_DROP:  # shards are summed, so only the first one fills
            beyond = ((at < 0) | (at >= size)) & (start == 0)
            others = jnp.where(
                spread(beyond), jnp.full_like(found, _fill(found.dtype, fill)), others
            )
        return jnp.where(spread(is_local), found, others)

    return fn


def _fill(dtype: Any, fill: Any) -> Any:
    """Return the fill value of a gather: `fill`, or the default of `jax.lax.gather`."""
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
    """Return a function (indices, start) that converts global indices to indices in a piece.

    Indices on other shards become `local`, which is out of bounds.
    """

    def fn(indices: Array, start: Array) -> Array:
        at, is_local = _owned(indices, component, start, local, size, clip)
        return _with(indices, component, jnp.where(is_local, at - start, local))

    return fn


@functools.cache
def best_local(
    axis: int, size: int, largest: bool
) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
    """Return a function (x, start, fill) that finds the largest or smallest entries of a piece.

    The function returns these entries, and their indices in the full dimension.
    """

    def fn(x: Array, start: Array, fill: Array) -> tuple[Array, Array]:
        x = select_before(axis, size)(x, start, fill)
        at = (jax.lax.argmax if largest else jax.lax.argmin)(x, axis, jnp.int32)
        found = jnp.take_along_axis(x, jnp.expand_dims(at, axis), axis, mode="promise_in_bounds")
        return jnp.squeeze(found, axis), at + start

    return fn


@functools.cache
def argmax_marks(size: int) -> Callable[[Array, Array, Array], Array]:
    """Return a function that computes a shard's candidate for the index of an argmax or argmin.

    Its arguments are the best entry of the shard, the best entry of all shards, and the position of
    the former.

    The result is the lowest candidate of all shards. If a shard has the global best entry, its
    candidate is the position of that entry. Otherwise it is the largest integer. A NaN wins, as on
    one device: its candidate is its position minus 2**31. Positions in padding never win.
    """

    def fn(found: Array, best: Array, at: Array) -> Array:
        limits = jnp.iinfo(at.dtype)
        has = jnp.where(found == best, at, limits.max)
        return jnp.where(at < size, jnp.where(found != found, at + limits.min, has), limits.max)

    return fn


def decode_position(lowest: Array) -> Array:
    """Convert the lowest candidate of `argmax_marks` back to a position."""
    return jnp.where(lowest < 0, lowest - jnp.iinfo(lowest.dtype).min, lowest)
