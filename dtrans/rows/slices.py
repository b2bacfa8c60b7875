"""Slices of an array along one axis.

    Slice(0, 3, 5)                   rows 3 to 8, known when the program is written
    Slice(0, Start(write, 12), 5)    5 rows from a start that the running program computes
    Slice(0, Start(write), 5)        5 rows whose ids a vector of the program has

This module defines size, type, extraction and counters for all three. The rest of `dtrans.rows`
computes slices of values without the full values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, Literal, resized
from dtrans.ir.array_fns import rows_from
from dtrans.ir.builder import Builder


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Position of entries that only the running program knows.

    Two are equal if they are the same object.

    Attributes:
      write: writes the value, once: a scalar start, or a vector with the ids of all entries.
      reach: of a scalar: the end of the entries of all such slices, padding included; zeros follow
        the end of the array.
    """

    write: Callable[[Builder], Atom]
    reach: int = 0
    _cache: dict[int, Any] = dataclasses.field(default_factory=dict)

    def value(self, b: Builder) -> Atom:
        """Return the scalar or the vector."""
        if 0 not in self._cache:
            self._cache[0] = self.write(b)
        atom: Atom = self._cache[0]
        return atom

    def widened(self, width: int) -> Start:
        """Return the same entries, each of them `width` smaller ones."""
        if width not in self._cache:
            self._cache[width] = Start(
                lambda b: b.call(_widened(width), self.value(b))[0], self.reach * width
            )
        start: Start = self._cache[width]
        return start


@dataclasses.dataclass(frozen=True)
class Slice:
    """Slice along `axis`: `size` entries from `start` on, or the entries whose ids `start` has."""

    axis: int
    start: int | Start
    size: int

    @property
    def first(self) -> int:
        """First entry, if the entries are known."""
        assert not isinstance(self.start, Start)
        return self.start

    @property
    def stop(self) -> int:
        """End of the entries, if they are known."""
        return self.first + self.size

    def is_all(self, aval: Any) -> bool:
        """Return True if the slice covers the axis of a value."""
        return not isinstance(self.start, Start) and self.size == aval.shape[self.axis]

    def of(self, aval: Any) -> Any:
        """Return the type of this slice of a value."""
        return resized(aval, self.axis, self.size)

    def along(self, axis: int) -> Slice:
        """Return the same entries of another axis."""
        return dataclasses.replace(self, axis=axis)

    def moved(self, by: int) -> Slice:
        """Return the same known entries in a value that begins `by` entries earlier."""
        return Slice(self.axis, self.first + by, self.size)

    def widened(self, width: int) -> Slice:
        """Return the same entries, each of them `width` smaller ones."""
        if width == 1:
            return self
        start = self.start.widened(width) if isinstance(self.start, Start) else self.start * width
        return Slice(self.axis, start, self.size * width)

    def cut(self, b: Builder, value: Atom) -> Atom:
        """Take this slice of an existing value."""
        if isinstance(self.start, Start):
            fn = _picked(self.axis, self.size, self.start.reach)
            return b.call(fn, value, self.start.value(b))[0]
        if (
            isinstance(value, Literal)
            or not b.is_constant(value)
            or not isinstance(value.aval.dtype, np.dtype)
        ):
            return b.part(value, self.axis, self.start, self.stop)
        index = (slice(None),) * self.axis + (slice(self.start, self.stop),)
        # a view would keep the full array alive
        return b.constant(np.asarray(b.constant_value(value))[index].copy())

    def counted(self, b: Builder, aval: Any) -> Atom:
        """Return this slice of a counter along the axis, with the type `aval`."""
        start = self.start.value(b) if isinstance(self.start, Start) else _literal(self.start)
        return b.call(_counted(np.dtype(aval.dtype), aval.shape, self.axis), start)[0]


def _literal(number: int) -> Literal:
    return Literal(np.int32(number), jax.typeof(np.int32(number)))


# Small functions, cached so that each is traced once for a scalar and once for a vector.


@functools.cache
def _picked(axis: int, size: int, reach: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    run = rows_from(axis, size, reach)
    return lambda x, at: jnp.take(x, at, axis, mode="clip") if at.ndim else run(x, at)


@functools.cache
def _counted(dtype: Any, shape: tuple[int, ...], axis: int) -> Callable[[jax.Array], jax.Array]:
    def fn(at: jax.Array) -> jax.Array:
        # counted in 32 bits: small types then round, or wrap, as in the full array
        if at.ndim:
            return jax.lax.broadcast_in_dim(at, shape, [axis]).astype(dtype)
        return (jax.lax.broadcasted_iota(jnp.int32, shape, axis) + at).astype(dtype)

    return fn


@functools.cache
def _widened(width: int) -> Callable[[jax.Array], jax.Array]:
    def fn(at: jax.Array) -> jax.Array:
        if not at.ndim:
            return at * width
        return (at[:, None] * width + jnp.arange(width, dtype=at.dtype)).ravel()

    return fn
