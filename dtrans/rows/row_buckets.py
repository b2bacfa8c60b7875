"""Rows of a leaf in buckets by their ids.

Row `n` is in bucket `n % count`, and a part of the leaf has consecutive buckets. The rows of a
bucket do not depend on the number of parts: buckets move as units when parts are added or removed.
In many tables the most frequent rows have low ids (words by frequency). A range of rows would get
all of them, while consecutive buckets get their share.

Rows keep their order inside a part: `n` is at `n // count * (stop - start) + n % count - start`.
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
    """Rows of a leaf in buckets `start` to `stop`.

    Attributes:
      start, stop: range of buckets.
      count: number of buckets of the leaf.
      size: number of rows of the leaf.

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
        """Number of rows."""
        per_bucket, rest = divmod(self.size, self.count)
        return per_bucket * self._width + min(max(rest - self.start, 0), self._width)

    @property
    def _width(self) -> int:
        return self.stop - self.start

    def numbers(self) -> np.ndarray:
        """Return the ids of these rows, increasing."""
        return self.in_leaf(np.arange(self.rows))

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """Return the ids of rows, from their positions in this part."""
        return places // self._width * self.count + self.start + places % self._width

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions in this part of rows, from their ids."""
        return ids // self.count * self._width + ids % self.count - self.start

    def among(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions in `ids` of this part's rows; the leaf's size may be among the
        ids."""
        bucket = ids % self.count
        return np.flatnonzero((bucket >= self.start) & (bucket < self.stop) & (ids < self.size))

    def along(self, row: RowAxis) -> RowBuckets:
        """Return the buckets of a value in which each row has `width` entries."""
        return RowBuckets(*(n * row.width for n in dataclasses.astuple(self)))

    @property
    def index(self) -> np.ndarray:
        """NumPy index that selects these rows of an array."""
        return self.numbers()

    def __str__(self) -> str:
        return f"buckets {self.start}:{self.stop} of {self.count}"


class BucketRows:
    """Rows in buckets, for a writer of one program (`dtrans.rows.writer.BlockRows`)."""

    def __init__(self, rows: RowBuckets) -> None:
        self._rows = rows
        self._start = Start(lambda b: b.call(_all_numbers(rows))[0])

    def of(self, row: RowAxis) -> Slice:
        """Return the slice of these rows along the axis of a value."""
        return Slice(row.axis, self._start, self._rows.rows).widened(row.width)

    def inside(self, b: Builder) -> BucketRows:
        """Return the same rows for a body."""
        return BucketRows(self._rows)

    def operands(self) -> Sequence[Atom]:
        """Return no values: a body computes the ids itself."""
        return ()


@functools.cache
def _all_numbers(rows: RowBuckets) -> Callable[[], jax.Array]:
    """Return a function that computes the ids of all rows."""
    return lambda: numbers_at(rows)(jnp.arange(rows.rows, dtype=jnp.int32))


@functools.cache
def numbers_at(rows: RowBuckets) -> Callable[[jax.Array], jax.Array]:
    """Return a function from positions in this part to ids."""
    width = rows.stop - rows.start
    return lambda places: places // width * rows.count + rows.start + places % width
