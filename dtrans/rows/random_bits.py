"""Random bits of a block of rows, computed without the bits of other rows.

`jax.random.normal`, `uniform`, `truncated_normal` and other samplers draw one array of random bits
with the equation `random_bits[bit_width=32 shape=(4096, 1024)]`. A *counter-based* generator hashes
the key and the row-major index of an entry (64 bits) to the bits of the entry. So the primitive
`block_bits_p` can compute the bits of rows `start:stop` alone. A printed program shows it as
`random_bits`, with the rows and the full shape as parameters. The start of the rows may also be
computed by the program. So may a vector of row ids.

JAX's default implementation `threefry2x32` is counter-based in its default mode,
`jax_threefry_partitionable`, for bits of any width and keys of any shape. `rbg` is not, because it
passes the full shape to a generator of XLA. Without `jax_threefry_partitionable`, the bits of an
entry depend on the number of entries. An equation keeps the mode in which it was traced.

Source: `_threefry_random_bits_partitionable` and `iota_2x32_shape` in jax/_src/random (0.10.2). The
hash itself is public, `jax.extend.random`. Tests compare with `jax.random.bits`, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ShapedArray, new_primitive, threefry2x32_p


def counts(key_type: Any) -> bool:
    """Return True if, in JAX's present mode, each random entry depends on its key and index only.

    Example:
      >>> import jax
      >>> counts(jax.random.key(0).dtype), counts(jax.random.key(0, impl="rbg").dtype)
      (True, False)
    """
    # JAX plans to remove this option; its behaviour will be that of True
    mode: bool = getattr(jax.config, "jax_threefry_partitionable", True)
    return mode and bool(key_type == _threefry_type())


def is_counted(eqn: Any) -> bool:
    """Return True if a `random_bits` equation computes each entry from its key and index only."""
    mode = getattr(getattr(eqn, "ctx", None), "threefry_partitionable", True)
    known = set(eqn.params) == {"bit_width", "shape"}
    return known and mode and bool(eqn.invars[0].aval.dtype == _threefry_type())


@functools.cache
def _threefry_type() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def block_bits(
    keys: jax.Array,
    at: jax.Array | None = None,
    *,
    bit_width: int,
    shape: Sequence[int],
    axis: int,
    start: int,
    stop: int,
) -> jax.Array:
    """Draw random bits of `shape` for each key; return entries `start` to `stop` along `axis`.

    Args:
      keys: keys, of any shape.
      at: a scalar that is added to `start` and `stop`; or a vector with the indices of the entries.
      bit_width: bits of an entry.
      shape: shape of the full array.
      axis, start, stop: the entries to return.

    Example:
      >>> import jax
      >>> key = jax.random.key(0)
      >>> rows = block_bits(key, bit_width=32, shape=(6, 2), axis=0, start=2, stop=5)
      >>> bool((rows == jax.random.bits(key, (6, 2))[2:5]).all())
      True
      >>> numbers = jax.numpy.array([4, 0, 4])
      >>> rows = block_bits(key, numbers, bit_width=32, shape=(6, 2), axis=0, start=0, stop=3)
      >>> bool((rows == jax.random.bits(key, (6, 2))[numbers]).all())
      True
    """
    counted = counts(keys.dtype)  # JAX compiles an equation in the mode of its trace
    dtype = jnp.dtype(f"uint{bit_width}")

    def of_one(key: jax.Array) -> jax.Array:
        if not counted:
            bits = jax.random.bits(key, tuple(shape), dtype)
            index = jnp.arange(start, stop)
            if at is not None:
                index = at if at.ndim else at + index
            return jnp.take(bits, index, axis)
        words = jax.random.key_data(key)
        high, low = counters(shape, axis, start, stop, at)
        # The hash needs four operands of one shape. If vmap maps `at`, it maps `zero` too, and so
        # all four operands.
        zero = jnp.uint32(0) if at is None else low & jnp.uint32(0)
        high, low = _hash(words[0] ^ zero, words[1] ^ zero, high ^ zero, low)
        if bit_width == 64:
            return (high.astype(dtype) << jnp.asarray(32, dtype)) | low.astype(dtype)
        return (high ^ low).astype(dtype)

    for _ in range(keys.ndim):
        of_one = jax.vmap(of_one)
    return of_one(keys)


def _hash(key0: jax.Array, key1: jax.Array, high: jax.Array, low: jax.Array) -> Sequence[jax.Array]:
    words: Sequence[jax.Array] = threefry2x32_p.bind(key0, key1, high, low)
    return words


def counters(
    shape: Sequence[int], axis: int, start: int, stop: int, at: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the row-major indices of entries `start` to `stop` along `axis`, in two uint32 arrays.

    The first array has the high words of the 64-bit indices, the second the low words.

    Args:
      shape: shape of the full array.
      axis, start, stop: the entries.
      at: see `block_bits`.

    Example:
      >>> high, low = counters((6, 2), 0, 2, 5)
      >>> low.tolist(), int(high.max())
      ([[4, 5], [6, 7], [8, 9]], 0)
    """
    block = (*shape[:axis], stop - start, *shape[axis + 1 :])
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = start * strides[axis]
    high, low = (jnp.full(block, word, jnp.uint32) for word in _words(first))
    # 64-bit integers would need jax_enable_x64; the high word of small arrays is 0
    wide = math.prod(shape) > 2**32
    for d, stride in enumerate(strides):
        if block[d] == 1 and (at is None or d != axis):
            continue
        index = jax.lax.broadcasted_iota(jnp.uint32, block, d)
        if at is not None and d == axis:
            first_row = at.astype(jnp.uint32)
            if at.ndim:
                index = jax.lax.broadcast_in_dim(first_row, block, [d])
            else:
                index = index + first_row
        step_high, step_low = (jnp.asarray(word, jnp.uint32) for word in _words(stride))
        more = index * step_low
        low = low + more
        if wide:
            carry = (low < more).astype(jnp.uint32)
            high += index * step_high + carry
            high += jax.lax.mulhi(index, jnp.broadcast_to(step_low, block))
    return high, low


def _words(number: int) -> tuple[int, int]:
    return number >> 32, number & 0xFFFFFFFF


def _type(
    keys: Any, *at: Any, bit_width: int, shape: Sequence[int], axis: int, start: int, stop: int
) -> Any:
    block = (*shape[:axis], stop - start, *shape[axis + 1 :])
    return ShapedArray((*keys.shape, *block), jnp.dtype(f"uint{bit_width}"))


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    return jax.vmap(functools.partial(block_bits, **params), in_axes=tuple(dims))(*args), 0


block_bits_p = new_primitive(
    "random_bits",
    types=_type,
    impl=jax.jit(block_bits, static_argnames=("bit_width", "shape", "axis", "start", "stop")),
    batch=_batch,
)
