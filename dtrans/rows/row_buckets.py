"""Rows of a leaf that are dealt out by their numbers.

Row `n` lies in bucket `n % count`, and a part of the leaf has a run of buckets. Which rows a bucket
has does not depend on how many parts there are, so that buckets move whole when there are more or
fewer. Rows that are read most often have low numbers in many tables (words by frequency): a run of
rows has all of these, and a run of buckets its share.

In a part rows keep their order: `n` is at `n // count * (stop - start) + n % count - start`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom
from dtrans.ir.builder import Builder
from dtrans.rows.layout import RowAxis
from dtrans.rows.slices import Slice, Start


@dataclasses.dataclass(frozen=True)
class RowBuckets:
    """The rows of a leaf in buckets `start` to `stop`.

    Attributes:
      start, stop: which buckets.
      count: how many buckets there are.
      size: how many rows the leaf has.

    Example:
      >>> import numpy as np
      >>> from dtrans.rows.row_buckets import RowBuckets
      >>> part = RowBuckets(1, 3, count=4, size=10)
      >>> part.rows, part.numbers().tolist(), part.local(np.array([2, 5, 9])).tolist()
      (5, [1, 2, 5, 6, 9], [1, 2, 4])
      >>> part.among(np.array([0, 2, 5, 8, 9])).tolist()
      [1, 2, 4]
    """

    start: int
    stop: int
    count: int
    size: int

    @property
    def rows(self) -> int:
        """How many rows."""
        whole, rest = divmod(self.size, self.count)
        return whole * self._width + min(max(rest - self.start, 0), self._width)

    @property
    def _width(self) -> int:
        return self.stop - self.start

    def numbers(self) -> np.ndarray:
        """The numbers of these rows in the leaf, increasing."""
        return self.in_leaf(np.arange(self.rows))

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """The numbers in the leaf of rows at these places among them."""
        return places // self._width * self.count + self.start + places % self._width

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Where rows of these are among them, by their numbers in the leaf."""
        return ids // self.count * self._width + ids % self.count - self.start

    def among(self, ids: np.ndarray) -> np.ndarray:
        """Where in some numbers those of these rows are; the number behind the last row may be
        among them."""
        bucket = ids % self.count
        return np.flatnonzero((bucket >= self.start) & (bucket < self.stop) & (ids < self.size))

    def along(self, row: RowAxis) -> RowBuckets:
        """Where these rows are along the axis of a value that has them."""
        return RowBuckets(*(n * row.width for n in dataclasses.astuple(self)))

    @property
    def index(self) -> np.ndarray:
        """What picks these rows of an array."""
        return self.numbers()

    def __str__(self) -> str:
        return f"buckets {self.start}:{self.stop} of {self.count}"


class DealtRows:
    """Rows in buckets as a writer asks for them (`dtrans.rows.writer.BlockRows`), in one
    program."""

    def __init__(self, rows: RowBuckets) -> None:
        self._rows = rows
        self._start = Start(lambda b: b.call(_all_numbers(rows))[0])

    def of(self, row: RowAxis) -> Slice:
        """Where they are along the axis of a value that has them."""
        return Slice(row.axis, self._start, self._rows.rows).widened(row.width)

    def inside(self, b: Builder) -> DealtRows:
        """Return the same rows in a body."""
        return DealtRows(self._rows)

    def operands(self) -> Sequence[Atom]:
        """Return nothing: a body makes their numbers."""
        return ()


@functools.cache
def _all_numbers(rows: RowBuckets) -> Callable[[], jax.Array]:
    """A function that makes the numbers of all rows."""
    return lambda: numbers_at(rows)(jnp.arange(rows.rows, dtype=jnp.int32))


@functools.cache
def numbers_at(rows: RowBuckets) -> Callable[[jax.Array], jax.Array]:
    """A function from where rows are among these to their numbers in the leaf."""
    width = rows.stop - rows.start
    return lambda places: places // width * rows.count + rows.start + places % width
