"""Small functions of arrays with which transforms write equations.

`Builder.call` traces each once for a type. They are cached by their arguments, so that equal
functions are one object.
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
    """Return a function that casts to a type."""
    return lambda x: x.astype(dtype)


def scalar(value: float) -> Literal:
    """Return a number as a literal operand."""
    array = np.asarray(value, jnp.result_type(float))
    return Literal(array[()], jax.typeof(array))


@functools.cache
def times(by: float) -> Callable[[jax.Array], jax.Array]:
    """Return a function that multiplies by a number."""
    return lambda x: x * by


def array_type(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array or of a type, without its weak type."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def padded_to(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Append zeros along one axis; for random keys, copies of the first key."""
    if x.shape[axis] == size:
        return x
    missing = size - x.shape[axis]
    if is_key(x.dtype):
        first = jax.lax.slice_in_dim(x, 0, 1, axis=axis)
        return jnp.concatenate([x, *[first] * missing], axis)
    behind = [(0, missing if d == axis else 0, 0) for d in range(x.ndim)]
    return jax.lax.pad(x, np.zeros((), x.dtype), behind)


@functools.cache
def padded(axis: int, size: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function that pads as `padded_to`."""
    return lambda x: padded_to(x, axis, size)


@functools.cache
def rows_from(axis: int, count: int, size: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function that takes `count` entries from a start, after padding to `size`
    entries."""

    def fn(x: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(padded_to(x, axis, size), start, count, axis)

    return fn


def parts_of(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Return the equal parts of an array along a dimension, on a leading axis."""
    cut = jnp.reshape(x, (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]))
    return jnp.moveaxis(cut, axis, 0)


def in_one(parts: jax.Array, axis: int) -> jax.Array:
    """Concatenate parts along a dimension; the inverse of `parts_of`."""
    return jax.lax.collapse(jnp.moveaxis(parts, 0, axis), axis, axis + 2)


def sum_type(dtype: Any) -> Any:
    """Return the type in which arrays of a type are summed: 32 bits for 16-bit floats."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if small else dtype


@functools.cache  # servers call it in each step
def is_key(dtype: Any) -> bool:
    """Return True for a type of random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def words(x: Any) -> Any:
    """Return the array to send: random keys become their words."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def words_type(aval: Any) -> Any:
    """Return the type of `words`."""
    if not is_key(aval.dtype):
        return aval
    sent = jax.eval_shape(words, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return ShapedArray(sent.shape, sent.dtype)


@functools.cache
def keys_of(impl: str) -> Callable[[jax.Array], jax.Array]:
    """Return a function that makes random keys from their words."""
    return lambda x: jax.random.wrap_key_data(x, impl=impl)


def together(*xs: jax.Array) -> Sequence[jax.Array]:
    """Return all values behind one barrier."""
    outputs: Sequence[jax.Array] = jax.lax.optimization_barrier(xs)
    return outputs
