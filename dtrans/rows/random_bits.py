"""Random bits of a block of rows, without those of the others.

`jax.random.normal`, `uniform`, `truncated_normal` and others draw one array of random bits with the
equation `random_bits[bit_width=32 shape=(4096, 1024)]`, then continue entry by entry. With a
counter-based generator the bits of entry i are a hash of the key and i (its row-major index in 64
bits). The bits of rows `start:stop` are then hashes of their own counters. The equation for that is
`block_bits_p`, which prints as `random_bits` too, with the rows next to the full shape. Its rows
may start at a value of the program, or be a vector of ids.

JAX counts with its default implementation, `threefry2x32`, in its default mode,
`jax_threefry_partitionable`. Bits may have any width (8, 16, 32, 64), and keys any shape. It does
not count with other implementations: `rbg` passes the full shape to a generator of XLA. Nor does it
in the former mode, in which entry i depends on the number of entries. An equation keeps the mode in
which it was traced, and so does the one for a block.

Source: `_threefry_random_bits_partitionable` and `iota_2x32_shape` in jax/_src/random (0.10.2); the
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
    """Return True if random bits depend on the key and each entry's index only, in this mode.

    Example:
      >>> import jax
      >>> counts(jax.random.key(0).dtype), counts(jax.random.key(0, impl="rbg").dtype)
      (True, False)
    """
    # JAX plans to remove the option, with the value True
    mode: bool = getattr(jax.config, "jax_threefry_partitionable", True)
    return mode and bool(key_type == _threefry_type())


def is_counted(eqn: Any) -> bool:
    """Return True if a counter makes the bits of a `random_bits` equation, in its traced mode."""
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
    """Return entries `start` to `stop` along `axis` of the bits of each key for a `shape`.

    Args:
      keys: keys, of any shape.
      at: a scalar that is added to `start` and `stop`; or the indices of `stop` entries.
      bit_width: bits of an entry.
      shape: shape of the full array.
      axis, start, stop: the block of entries.

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
    counted = counts(keys.dtype)  # an equation is compiled in the mode in which it was traced
    dtype = jnp.dtype(f"uint{bit_width}")

    def of_one(key: jax.Array) -> jax.Array:
        if not counted:
            bits = jax.random.bits(key, tuple(shape), dtype)
            run = jnp.arange(start, stop)
            return jnp.take(bits, run if at is None else at if at.ndim else at + run, axis)
        words = jax.random.key_data(key)
        high, low = counters(shape, axis, start, stop, at)
        # the hash needs four operands of one shape; a vmap of `at` must map all of them
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
    """Return the row-major indices of entries `start` to `stop` along `axis`: high and low words.

    Args:
      shape: shape of the full array.
      axis, start, stop: the block of entries.
      at: as in `block_bits`.

    Example:
      >>> high, low = counters((6, 2), 0, 2, 5)
      >>> low.tolist(), int(high.max())
      ([[4, 5], [6, 7], [8, 9]], 0)
    """
    block = (*shape[:axis], stop - start, *shape[axis + 1 :])
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = start * strides[axis]
    high, low = (jnp.full(block, word, jnp.uint32) for word in _words(first))
    # 32-bit words work without jax_enable_x64; small arrays leave the high word 0
    wide = math.prod(shape) > 2**32
    for d, stride in enumerate(strides):
        if block[d] == 1 and (at is None or d != axis):
            continue
        index = jax.lax.broadcasted_iota(jnp.uint32, block, d)
        if at is not None and d == axis:
            first_row = at.astype(jnp.uint32)
            index = (
                jax.lax.broadcast_in_dim(first_row, block, [d]) if at.ndim else index + first_row
            )
        step_high, step_low = (jnp.asarray(word, jnp.uint32) for word in _words(stride))
        more = index * step_low
        low = low + more
        if wide:
            carry = (low < more).astype(jnp.uint32)
            high = (
                high
                + index * step_high
                + jax.lax.mulhi(index, jnp.broadcast_to(step_low, block))
                + carry
            )
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
