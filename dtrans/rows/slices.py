"""A part of an array: some entries along one axis.

    Slice(0, 3, 5)                   rows 3 to 8, known when the program is written
    Slice(0, Start(write, 12), 5)    5 rows from where a value of the program says: each shard has others
    Slice(0, Start(write), 5)        5 rows, of which a vector has the numbers

What is a part of a value, how much of it, and how it is cut out or counted, is said here for all three; the rest of
`dtrans.rows` makes parts of values without making these whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, Literal
from dtrans.ir.array_fns import resized, rows_from
from dtrans.ir.builder import Builder


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Where entries are, as far as only a running program knows it; two are equal if they are the same object.

    Attributes:
      write: writes the value: a scalar, from where on; or a vector, the numbers of all entries. It is asked once.
      reach: of a scalar: how far the entries of all such parts reach, padding included; zeros are behind the end.
        None for a vector.
    """

    write: Callable[[Builder], Atom]
    reach: int | None = None
    _made: dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_numbers(self) -> bool:
        """Whether each entry has its own number."""
        return self.reach is None

    def value(self, b: Builder) -> Atom:
        """The scalar, or the vector."""
        if 0 not in self._made:
            self._made[0] = self.write(b)
        atom: Atom = self._made[0]
        return atom

    def widened(self, width: int) -> Start:
        """The same entries, each of them `width` smaller ones."""
        if width == 1:
            return self
        if width not in self._made:
            write = _each_widened(width) if self.is_numbers else _widened(width)
            reach = None if self.reach is None else self.reach * width
            self._made[width] = Start(lambda b: b.call(write, self.value(b))[0], reach)
        start: Start = self._made[width]
        return start


@dataclasses.dataclass(frozen=True)
class Slice:
    """`size` entries along `axis`, from `start` on; or those whose numbers `start` has."""

    axis: int
    start: int | Start
    size: int

    @property
    def first(self) -> int:
        """The first entry, where it is known which they are."""
        assert not isinstance(self.start, Start)
        return self.start

    @property
    def stop(self) -> int:
        """Behind the last entry, where it is known which they are."""
        return self.first + self.size

    def is_all(self, aval: Any) -> bool:
        """Whether a value has no other entries."""
        return not isinstance(self.start, Start) and self.size == aval.shape[self.axis]

    def of(self, aval: Any) -> Any:
        """The type of this part of a value."""
        return resized(aval, self.axis, self.size)

    def along(self, axis: int) -> Slice:
        """The same entries of another axis."""
        return dataclasses.replace(self, axis=axis)

    def moved(self, by: int) -> Slice:
        """The same entries, in a value that begins `by` entries earlier: for entries that are known."""
        return Slice(self.axis, self.first + by, self.size)

    def widened(self, width: int) -> Slice:
        """The same entries, each of them `width` smaller ones."""
        start = self.start.widened(width) if isinstance(self.start, Start) else self.start * width
        return Slice(self.axis, start, self.size * width)

    def cut(self, b: Builder, value: Atom) -> Atom:
        """This part of a value that is there."""
        if isinstance(self.start, Start):
            reach = self.start.reach
            fn = _taken(self.axis) if reach is None else rows_from(self.axis, self.size, reach)
            return b.call(fn, value, self.start.value(b))[0]
        if isinstance(value, Literal) or not b.is_constant(value) or not isinstance(value.aval.dtype, np.dtype):
            return b.part(value, self.axis, self.start, self.stop)
        index = (slice(None),) * self.axis + (slice(self.start, self.stop),)
        return b.constant(np.asarray(b.constant_value(value))[index].copy())  # a view would keep the rest

    def counted(self, b: Builder, dtype: Any, shape: tuple[int, ...], axis: int) -> Atom:
        """This part, of this shape, of what counts entries along `axis`."""
        if axis != self.axis:
            return b.call(_counted(np.dtype(dtype), shape, axis, 0))[0]
        if isinstance(self.start, Start):
            fn = _numbered if self.start.is_numbers else _counted_from
            return b.call(fn(np.dtype(dtype), shape, axis), self.start.value(b))[0]
        return b.call(_counted(np.dtype(dtype), shape, axis, self.start))[0]


# small functions, each traced once for its arguments. Counted in 32 bits: small types round, or wrap, as in the whole


@functools.cache
def _counted(dtype: Any, shape: tuple[int, ...], axis: int, start: int) -> Callable[[], jax.Array]:
    def fn() -> jax.Array:
        if not start:
            return jax.lax.broadcasted_iota(dtype, shape, axis)
        return (jax.lax.broadcasted_iota(jnp.int32, shape, axis) + jnp.asarray(start, jnp.int32)).astype(dtype)

    return fn


@functools.cache
def _counted_from(dtype: Any, shape: tuple[int, ...], axis: int) -> Callable[[jax.Array], jax.Array]:
    return lambda start: (jax.lax.broadcasted_iota(jnp.int32, shape, axis) + start).astype(dtype)


@functools.cache
def _numbered(dtype: Any, shape: tuple[int, ...], axis: int) -> Callable[[jax.Array], jax.Array]:
    return lambda numbers: jax.lax.broadcast_in_dim(numbers, shape, [axis]).astype(dtype)


@functools.cache
def _taken(axis: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, numbers: jnp.take(x, numbers, axis, mode="clip")


@functools.cache
def _widened(width: int) -> Callable[[jax.Array], jax.Array]:
    return lambda start: start * width


@functools.cache
def _each_widened(width: int) -> Callable[[jax.Array], jax.Array]:
    return lambda numbers: (numbers[:, None] * width + jnp.arange(width, dtype=numbers.dtype)).ravel()
