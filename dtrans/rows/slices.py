"""Slices of an array along one axis.

    Slice(0, 3, 5)                   rows 3 to 8, known when the program is written
    Slice(0, Start(write, 12), 5)    5 rows from a start that the running program computes
    Slice(0, Start(write), 5)        5 rows with ids that the running program computes

`dtrans.rows.parts` computes slices of values without the full values.
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
    """Start of a slice, or ids of rows, that the program computes when it runs.

    Attributes:
      write: function that writes the equations of a scalar start or a vector of ids; called once.
      padded_size: for a scalar start, the size to which the program first pads the array with
        zeros, so that no slice ends outside of it.
    """

    write: Callable[[Builder], Atom]
    padded_size: int = 0
    _cache: dict[int, Any] = dataclasses.field(default_factory=dict)

    def value(self, b: Builder) -> Atom:
        """Return the scalar start or the vector of ids."""
        if 0 not in self._cache:
            self._cache[0] = self.write(b)
        atom: Atom = self._cache[0]
        return atom

    def widened(self, width: int) -> Start:
        """Return the start, or the ids, for an axis on which each row takes `width` entries.

        A reshape from (10, 4) to (20, 2) gives each row 2 entries of the first axis. The start 3
        then becomes 6, and the ids `[3]` become `[6, 7]`.
        """
        if width not in self._cache:
            self._cache[width] = Start(
                lambda b: b.call(_widened(width), self.value(b))[0], self.padded_size * width
            )
        start: Start = self._cache[width]
        return start


@dataclasses.dataclass(frozen=True)
class Slice:
    """Selection of `size` entries along `axis`: a range, or entries with given ids.

    A range begins at `start`, an integer or a scalar of the running program. If `start` computes a
    vector, the vector has the ids.
    """

    axis: int
    start: int | Start
    size: int

    @property
    def first(self) -> int:
        """Index of the first entry; `start` must be an integer."""
        assert not isinstance(self.start, Start)
        return self.start

    @property
    def stop(self) -> int:
        """Index after the last entry; `start` must be an integer."""
        return self.first + self.size

    def is_all(self, aval: Any) -> bool:
        """Return True if the slice is a full axis of a value of this type."""
        return not isinstance(self.start, Start) and self.size == aval.shape[self.axis]

    def type_in(self, aval: Any) -> Any:
        """Return the type of this slice, given the type `aval` of the full value."""
        return resized(aval, self.axis, self.size)

    def along(self, axis: int) -> Slice:
        """Return the slice with the same entries along another axis."""
        return dataclasses.replace(self, axis=axis)

    def moved(self, by: int) -> Slice:
        """Return the slice moved by `by` entries; `start` must be an integer."""
        return Slice(self.axis, self.first + by, self.size)

    def widened(self, width: int) -> Slice:
        """Return the slice for an axis on which each entry takes `width` entries."""
        if width == 1:
            return self
        start = self.start.widened(width) if isinstance(self.start, Start) else self.start * width
        return Slice(self.axis, start, self.size * width)

    def take_from(self, b: Builder, value: Atom) -> Atom:
        """Write equations that slice a full value, and return the slice.

        A constant is sliced now, without an equation.
        """
        if isinstance(self.start, Start):
            fn = _picked(self.axis, self.size, self.start.padded_size)
            return b.call(fn, value, self.start.value(b))[0]
        if (
            isinstance(value, Literal)
            or not b.is_constant(value)
            or not isinstance(value.aval.dtype, np.dtype)
        ):
            return b.part(value, self.axis, self.start, self.stop)
        index = (slice(None),) * self.axis + (slice(self.start, self.stop),)
        # a copy, because a view would keep the full array alive
        return b.constant(np.asarray(b.constant_value(value))[index].copy())

    def counted(self, b: Builder, aval: Any) -> Atom:
        """Write a counter (`iota`) along the axis that has only the entries of this slice."""
        start = self.start.value(b) if isinstance(self.start, Start) else int32(self.start)
        return b.call(_counted(np.dtype(aval.dtype), aval.shape, self.axis), start)[0]


def int32(number: int) -> Literal:
    """Return a number as a literal of an equation."""
    return Literal(np.int32(number), jax.typeof(np.int32(number)))


# These functions are cached, so that `Builder.call` traces each at most twice: for a scalar start,
# and for a vector of ids.


@functools.cache
def _picked(axis: int, size: int, reach: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    run = rows_from(axis, size, reach)

    def fn(x: jax.Array, at: jax.Array) -> jax.Array:
        if at.ndim:
            return jnp.take(x, at, axis, mode="clip")
        return run(x, at)

    return fn


@functools.cache
def _counted(dtype: Any, shape: tuple[int, ...], axis: int) -> Callable[[jax.Array], jax.Array]:
    def fn(at: jax.Array) -> jax.Array:
        # count in 32 bits and cast, so that small types round or wrap as in the full array
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
