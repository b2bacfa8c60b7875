"""A part of an array: some entries along one axis.

    Slice(0, 3, 5)                   rows 3 to 8, known when the program is written
    Slice(0, Start(write, 12), 5)    5 rows from where a value of the program says: each shard has others
    Slice(0, Start(write), 5)        5 rows, of which a vector has the numbers

What is a part of a value, how much of it, and how it is cut out or counted, is said here for all
three; the rest of `dtrans.rows` makes parts of values without making these whole.
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
    """Where entries are, as far as only a running program knows it; two are equal if they are the
    same object.

    Attributes:
      write: writes the value: a scalar, from where on; or a vector, the numbers of all entries. It
        is asked once.
      reach: of a scalar: how far the entries of all such parts reach, padding included; zeros are
        behind the end.
    """

    write: Callable[[Builder], Atom]
    reach: int = 0
    _made: dict[int, Any] = dataclasses.field(default_factory=dict)

    def value(self, b: Builder) -> Atom:
        """The scalar, or the vector."""
        if 0 not in self._made:
            self._made[0] = self.write(b)
        atom: Atom = self._made[0]
        return atom

    def widened(self, width: int) -> Start:
        """The same entries, each of them `width` smaller ones."""
        if width not in self._made:
            self._made[width] = Start(
                lambda b: b.call(_widened(width), self.value(b))[0], self.reach * width
            )
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
        """The same entries, in a value that begins `by` entries earlier: for entries that are
        known."""
        return Slice(self.axis, self.first + by, self.size)

    def widened(self, width: int) -> Slice:
        """The same entries, each of them `width` smaller ones."""
        if width == 1:
            return self
        start = self.start.widened(width) if isinstance(self.start, Start) else self.start * width
        return Slice(self.axis, start, self.size * width)

    def cut(self, b: Builder, value: Atom) -> Atom:
        """This part of a value that is there."""
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
        return b.constant(
            np.asarray(b.constant_value(value))[index].copy()
        )  # a view would keep the rest

    def counted(self, b: Builder, aval: Any) -> Atom:
        """This part of what counts entries along the axis, of the type that it has."""
        start = self.start.value(b) if isinstance(self.start, Start) else _literal(self.start)
        return b.call(_counted(np.dtype(aval.dtype), aval.shape, self.axis), start)[0]


def _literal(number: int) -> Literal:
    return Literal(np.int32(number), jax.typeof(np.int32(number)))


# small functions, each traced once for its arguments and for where entries are: a scalar, or a
# vector


@functools.cache
def _picked(axis: int, size: int, reach: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    run = rows_from(axis, size, reach)
    return lambda x, at: jnp.take(x, at, axis, mode="clip") if at.ndim else run(x, at)


@functools.cache
def _counted(dtype: Any, shape: tuple[int, ...], axis: int) -> Callable[[jax.Array], jax.Array]:
    def fn(at: jax.Array) -> jax.Array:
        # in 32 bits: small types round, or wrap, as in the whole
        if at.ndim:
            return jax.lax.broadcast_in_dim(at, shape, [axis]).astype(dtype)
        return (jax.lax.broadcasted_iota(jnp.int32, shape, axis) + at).astype(dtype)

    return fn


@functools.cache
def _widened(width: int) -> Callable[[jax.Array], jax.Array]:
    def fn(at: jax.Array) -> jax.Array:
        return (
            (at[:, None] * width + jnp.arange(width, dtype=at.dtype)).ravel()
            if at.ndim
            else at * width
        )

    return fn
