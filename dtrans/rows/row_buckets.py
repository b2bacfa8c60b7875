"""Assignment of a leaf's rows to buckets by their ids.

Row `n` is in bucket `n % count`, and a block of the leaf has the buckets `start` to `stop`. When
blocks are added or removed, complete buckets move. In many tables the most frequent rows have the
lowest ids. With ranges of rows, one block would have all frequent rows; with buckets, each block
has some.

A block has its rows in increasing order: row `n` is at index
`n // count * (stop - start) + n % count - start`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
    """Rows of a block: the rows in buckets `start` to `stop`; row `n` is in bucket `n % count`.

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
        """Return the ids of these rows in increasing order."""
        return self.in_leaf(np.arange(self.rows))

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """Convert indices in this block to ids of rows."""
        return places // self._width * self.count + self.start + places % self._width

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Convert ids of rows to indices in this block."""
        return ids // self.count * self._width + ids % self.count - self.start

    def among(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions in `ids` of the rows that this block has.

        An id equal to `size` is padding, and its position is omitted.
        """
        bucket = ids % self.count
        return np.flatnonzero((bucket >= self.start) & (bucket < self.stop) & (ids < self.size))

    def parts_of(self, ids: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each array of ids: positions (see `among`), and indices in this block."""
        numbers = ids[0] if len(ids) == 1 else np.concatenate(ids)
        at = self.among(numbers)
        local = self.local(numbers[at])
        if len(ids) == 1:
            return [(at, local)]
        starts = np.cumsum([0, *map(len, ids)])
        ends = np.searchsorted(at, starts)
        at -= np.repeat(starts[:-1], np.diff(ends))
        bounds = ends.tolist()
        return [(at[a:b], local[a:b]) for a, b in itertools.pairwise(bounds)]

    def along(self, row: RowAxis) -> RowBuckets:
        """Return these rows as entries of a value that has `row.width` entries for each row."""
        return RowBuckets(*(n * row.width for n in dataclasses.astuple(self)))

    @property
    def index(self) -> np.ndarray:
        """NumPy index that selects these rows of an array."""
        return self.numbers()

    def __str__(self) -> str:
        return f"buckets {self.start}:{self.stop} of {self.count}"


class BucketRows:
    """Rows of some buckets, for the writer of one program (`dtrans.rows.writer.BlockRows`)."""

    def __init__(self, rows: RowBuckets) -> None:
        self._rows = rows
        self._start = Start(lambda b: b.call(_all_numbers(rows))[0])

    def of(self, row: RowAxis) -> Slice:
        """Return the slice that selects these rows of a value with layout `row`."""
        return Slice(row.axis, self._start, self._rows.rows).widened(row.width)

    def inside(self, b: Builder) -> BucketRows:
        """Return the same rows for the body of a loop or branch that `b` builds."""
        return BucketRows(self._rows)

    def operands(self) -> Sequence[Atom]:
        """Return (): a body needs no additional operands, because it computes the ids of rows."""
        return ()


@functools.cache
def _all_numbers(rows: RowBuckets) -> Callable[[], jax.Array]:
    """Return a function without arguments that returns the ids of all rows of the block."""
    return lambda: numbers_at(rows)(jnp.arange(rows.rows, dtype=jnp.int32))


@functools.cache
def numbers_at(rows: RowBuckets) -> Callable[[jax.Array], jax.Array]:
    """Return a function that converts indices in the block to ids of rows."""
    width = rows.stop - rows.start
    return lambda places: places // width * rows.count + rows.start + places % width
