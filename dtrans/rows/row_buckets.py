"""Assignment of a table's rows to servers by row id modulo a number of buckets.

Row `n` is in bucket `n % count`, and each server has a block of buckets, from `start` to `stop`.
When servers are added or removed, complete buckets move to other servers. In many embedding tables
the most frequent rows have the lowest ids. With ranges of rows, one server would have all frequent
rows; with buckets, each server has some.

A server stores its rows in increasing order: row `n` is at index `n // count * (stop - start) + n %
count - start`.
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
    """Rows of a table on one server: the rows with `start <= id % count < stop`.

    Attributes:
      start, stop: range of buckets of this server.
      count: number of buckets of the table.
      size: number of rows of the table.

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
        """Convert indices in the server's array to ids of rows of the table."""
        return places // self._width * self.count + self.start + places % self._width

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Convert ids of rows of the table to indices in the server's array."""
        return ids // self.count * self._width + ids % self.count - self.start

    def among(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions in `ids` of the rows that this server has.

        An id equal to `size` is padding, and its position is omitted.
        """
        bucket = ids % self.count
        return np.flatnonzero((bucket >= self.start) & (bucket < self.stop) & (ids < self.size))

    def parts_of(self, ids: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Select this server's rows from several arrays of row ids.

        Returns:
          For each array: the positions of the server's ids in the array, and the indices of these
            rows in the server's array.
        """
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
        """Convert to the rows of an array that has `row.width` rows for each row of the table."""
        return RowBuckets(*(n * row.width for n in dataclasses.astuple(self)))

    @property
    def index(self) -> np.ndarray:
        """NumPy index that selects these rows of an array."""
        return self.numbers()

    def __str__(self) -> str:
        return f"buckets {self.start}:{self.stop} of {self.count}"


class BucketRows:
    """Rows of some buckets; lets `dtrans.rows.writer` write an update for only these rows.

    It implements `dtrans.rows.writer.BlockRows`. The written program computes the ids of the rows
    when it runs.
    """

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
