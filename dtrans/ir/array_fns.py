"""Small array functions, which transforms write into programs with `Builder.call`.

`Builder.call` caches one trace for each function object and type. So functions of this module that
return a function are cached, too: equal arguments return the same object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Literal, ShapedArray


@functools.cache
def converted(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Return a function that casts its argument to `dtype`."""
    return lambda x: x.astype(dtype)


def scalar(value: float) -> Literal:
    """Return a number as a `Literal`, which can be an operand of an equation."""
    array = np.asarray(value, jnp.result_type(float))
    return Literal(array[()], jax.typeof(array))


@functools.cache
def times(by: float) -> Callable[[jax.Array], jax.Array]:
    """Return a function that multiplies its argument by `by`."""
    return lambda x: x * by


def array_type(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array or type; a weak type becomes a strong type."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def padded_to(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Pad the end of `axis` to `size` entries, with zeros; pad random keys with the first key."""
    if x.shape[axis] == size:
        return x
    missing = size - x.shape[axis]
    if is_key(x.dtype):
        first = jax.lax.slice_in_dim(x, 0, 1, axis=axis)
        return jnp.concatenate([x, *[first] * missing], axis)
    behind = [(0, 0, 0)] * x.ndim
    behind[axis] = (0, missing, 0)
    return jax.lax.pad(x, np.zeros((), x.dtype), behind)


@functools.cache
def padded(axis: int, size: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function that calls `padded_to` with this axis and size."""
    return lambda x: padded_to(x, axis, size)


@functools.cache
def rows_from(axis: int, count: int, size: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function (x, start) that selects `count` entries of x along `axis`, from `start` on.

    The function first pads x to `size` entries along this axis.
    """

    def fn(x: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(padded_to(x, axis, size), start, count, axis)

    return fn


def parts_of(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Split an array along `axis` into `count` equal parts, and stack them on a new leading axis.

    A shape (6, 4), split along axis 0 into 2 parts, becomes (2, 3, 4). `in_one` is the inverse.
    """
    split = jnp.reshape(x, (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]))
    return jnp.moveaxis(split, axis, 0)


def in_one(parts: jax.Array, axis: int) -> jax.Array:
    """Concatenate stacked parts along `axis`; the inverse of `parts_of`."""
    return jax.lax.collapse(jnp.moveaxis(parts, 0, axis), axis, axis + 2)


def sum_type(dtype: Any) -> Any:
    """Return the dtype in which arrays of `dtype` are summed: float32 for shorter floats."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    if small:
        return np.dtype(np.float32)
    return dtype


@functools.cache  # cached, since servers call it in each step
def is_key(dtype: Any) -> bool:
    """Return True if `dtype` is a dtype of random keys (`jax.random.key`)."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def words(x: Any) -> Any:
    """Return the uint32 words of random keys; return other arrays unchanged."""
    if is_key(x.dtype):
        return jax.random.key_data(x)
    return x


def words_type(aval: Any) -> Any:
    """Return the type of `words(x)` for an `x` of type `aval`."""
    if not is_key(aval.dtype):
        return aval
    sent = jax.eval_shape(words, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return ShapedArray(sent.shape, sent.dtype)


@functools.cache
def keys_of(impl: str) -> Callable[[jax.Array], jax.Array]:
    """Return a function that converts uint32 words to random keys of an implementation."""
    return lambda x: jax.random.wrap_key_data(x, impl=impl)


def together(*xs: jax.Array) -> Sequence[jax.Array]:
    """Return the arrays after one `optimization_barrier`: XLA computes all before any is read."""
    outputs: Sequence[jax.Array] = jax.lax.optimization_barrier(xs)
    return outputs
