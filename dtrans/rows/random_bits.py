"""Random bits of a block, without those of the rest.

`jax.random.normal`, `uniform`, `truncated_normal` and their like draw one array of random bits, by
the equation `random_bits[bit_width=32 shape=(4096, 1024)]`, and do the rest entry by entry. Where
JAX counts, the bits of entry i are a hash of the key and of i alone (i counts the entries in
row-major order, as 64 bits), so those of the rows `start:stop` need no others: hash the counters of
these rows. The equation for that is `block_bits_p`, which shows as `random_bits` too, with the rows
beside the shape of the whole. Its rows may be counted from a value, or be given by their numbers.

JAX counts with its default implementation, `threefry2x32`, in its default mode,
`jax_threefry_partitionable`, for bits of every width (8, 16, 32, 64) and for one key or an array of
keys. It does not with other implementations (`rbg` hands the whole shape to a generator of the
compiler's), nor in the mode of old, where entry i depends on how many there are. An equation
remembers the mode that it was traced in, and so does the one for a block of its bits.

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
    """Whether the random bits of keys of this type are a function of the key and of each entry's
    number, in this mode.

    Example:
      >>> import jax
      >>> counts(jax.random.key(0).dtype), counts(jax.random.key(0, impl="rbg").dtype)
      (True, False)
    """
    mode: bool = getattr(
        jax.config, "jax_threefry_partitionable", True
    )  # an option that is to go, and stay on
    return mode and bool(key_type == _threefry_type())


def is_counted(eqn: Any) -> bool:
    """Whether the bits of a `random_bits` equation are, in the mode that it was traced in."""
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
    """Entries `start` to `stop` along `axis` of the bits that each key gives for an array of
    `shape`.

    Args:
      at: where `start` is counted from, as a scalar; or the numbers of the entries themselves,
        `stop` of them.

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
    counted = counts(keys.dtype)  # at the time of compiling: an equation is compiled in its mode
    dtype = jnp.dtype(f"uint{bit_width}")

    def of_one(key: jax.Array) -> jax.Array:
        if not counted:
            bits = jax.random.bits(key, tuple(shape), dtype)
            run = jnp.arange(start, stop)
            return jnp.take(bits, run if at is None else at if at.ndim else at + run, axis)
        words = jax.random.key_data(key)
        high, low = counters(shape, axis, start, stop, at)
        zero = (
            jnp.uint32(0) if at is None else low & jnp.uint32(0)
        )  # under a vmap of `at` all four are mapped:
        high, low = _hash(
            words[0] ^ zero, words[1] ^ zero, high ^ zero, low
        )  # the hash wants one shape
        if bit_width == 64:
            return (high.astype(dtype) << jnp.asarray(32, dtype)) | low.astype(dtype)
        return (high ^ low).astype(dtype)

    for _ in range(keys.ndim):
        of_one = jax.vmap(of_one)
    return of_one(keys)


def _hash(key0: jax.Array, key1: jax.Array, high: jax.Array, low: jax.Array) -> Sequence[jax.Array]:
    made: Sequence[jax.Array] = threefry2x32_p.bind(key0, key1, high, low)
    return made


def counters(
    shape: Sequence[int], axis: int, start: int, stop: int, at: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The row-major numbers of entries `start` to `stop` along `axis` of an array, as two words,
    the high one first.

    Args:
      at: as `block_bits` takes it.

    Example:
      >>> high, low = counters((6, 2), 0, 2, 5)
      >>> low.tolist(), int(high.max())
      ([[4, 5], [6, 7], [8, 9]], 0)
    """
    block = (*shape[:axis], stop - start, *shape[axis + 1 :])
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = start * strides[axis]
    high, low = (jnp.full(block, word, jnp.uint32) for word in _words(first))
    # words are 32 bits, with or without jax_enable_x64; of an array of fewer entries the high one
    # stays 0
    wide = math.prod(shape) > 2**32
    for d, stride in enumerate(strides):
        if block[d] == 1 and (at is None or d != axis):
            continue
        index = jax.lax.broadcasted_iota(jnp.uint32, block, d)
        if at is not None and d == axis:
            own = at.astype(jnp.uint32)
            index = jax.lax.broadcast_in_dim(own, block, [d]) if at.ndim else index + own
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
