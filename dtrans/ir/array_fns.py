"""Small functions of arrays that transforms write equations with.

`Builder.call` traces each once for a type: they are cached by their arguments, so that equal ones
are one function.
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
    """To another type."""
    return lambda x: x.astype(dtype)


def scalar(value: float) -> Literal:
    """A number as an operand."""
    array = np.asarray(value, jnp.result_type(float))
    return Literal(array[()], jax.typeof(array))


@functools.cache
def times(by: float) -> Callable[[jax.Array], jax.Array]:
    """Multiplied by a number."""
    return lambda x: x * by


def padded_to(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Append zeros along one axis; for random keys, copies of the first key, as there is no key
    that is zero."""
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
    """The same, of one operand."""
    return lambda x: padded_to(x, axis, size)


@functools.cache
def rows_from(axis: int, count: int, size: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`count` entries from a start on, of a value that is padded with zeros to `size` entries."""

    def fn(x: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(padded_to(x, axis, size), start, count, axis)

    return fn


def parts_of(x: jax.Array, axis: int, count: int) -> jax.Array:
    """The equal parts of an array along a dimension, on a leading axis."""
    cut = jnp.reshape(x, (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]))
    return jnp.moveaxis(cut, axis, 0)


def in_one(parts: jax.Array, axis: int) -> jax.Array:
    """The inverse of `parts_of`."""
    return jax.lax.collapse(jnp.moveaxis(parts, 0, axis), axis, axis + 2)


def sum_type(dtype: Any) -> Any:
    """Return the type that arrays of a type are added up in: 16 bits may be too few for a sum."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if small else dtype


@functools.cache  # a server asks in each step
def is_key(dtype: Any) -> bool:
    """Whether it is that of keys of random generators."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def words(x: Any) -> Any:
    """What is sent of an array: the words of keys."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def words_type(aval: Any) -> Any:
    """The type of that."""
    if not is_key(aval.dtype):
        return aval
    made = jax.eval_shape(words, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return ShapedArray(made.shape, made.dtype)


@functools.cache
def keys_of(impl: str) -> Callable[[jax.Array], jax.Array]:
    """Keys, from their words."""
    return lambda x: jax.random.wrap_key_data(x, impl=impl)


def together(*xs: jax.Array) -> Sequence[jax.Array]:
    """All of them, once all are there."""
    made: Sequence[jax.Array] = jax.lax.optimization_barrier(xs)
    return made
