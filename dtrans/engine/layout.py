"""How a value lies on the shards of a tensor-parallel program.

    SHARED                    every shard has all of it, and all have the same
    RowAxis(_, axis, width)   each shard has a piece along `axis`: whole runs of `width` entries, ceil(runs / shards)
    RowAxis(.., order)        as before, with the runs that `order` names (concatenations, strided slices, ...)
    PARTIAL                   each shard has a term of it; their sum is the value

Pieces are equally large. Where the shards do not divide the runs, the last pieces have padding
behind what is real; it may hold anything, and nothing that mixes entries looks at it.

`RowAxis` is that of the row analysis (`dtrans.rows.layout`), of a leaf without a name, so that one
set of rules serves both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from dtrans._jax import resized
from dtrans.rows.layout import SHARED, RowAxis, RowOrder, Shared


class Partial:
    """Each shard has a term of a sum."""


PARTIAL: Final = Partial()

Placed = Shared | RowAxis | Partial


def cut_along(axis: int, width: int = 1) -> RowAxis:
    """The layout of a value that is cut along an axis."""
    return RowAxis("", axis, width)


def rows_only(x: Placed) -> Shared | RowAxis:
    """A layout as rules look at it: a sum is whole to them, once it is made."""
    return x if isinstance(x, RowAxis) else SHARED


def rows_or_none(x: Placed) -> RowAxis | None:
    """How a value is cut; None for one that is not."""
    return x if isinstance(x, RowAxis) else None


@dataclasses.dataclass(frozen=True)
class Shards:
    """Shards of a program.

    Attributes:
      count: number of shards.
      over: named axes of the shards.
      noun: name of a shard in errors.
      label: name of the communication that the engine writes.
      shares_work: True if pieces save work, as those of a batch do. False if they save memory
        alone: a loop then gathers its operands if its body would move more bytes.
      finite_padding: True if padding needs the finite derivatives of real entries, as the program
        is to be differentiated: what a sum leaves out has a derivative of zero times that.
    """

    count: int
    over: tuple[str, ...]
    noun: str = "trainer"
    label: str = "split"
    shares_work: bool = True
    finite_padding: bool = False

    def local(self, size: int, row: RowAxis) -> int:
        """How many entries of `size` each shard has, padding included."""
        if row.order is not None:
            return len(row.order.slots[0]) * row.width
        return -(-(size // row.width) // self.count) * row.width

    def whole(self, size: int, row: RowAxis) -> int:
        """How many entries all pieces have together."""
        return self.local(size, row) * self.count

    def pads(self, size: int, row: RowAxis) -> bool:
        """Return True if some piece has padding."""
        if row.order is not None:
            return any(-1 in slots for slots in row.order.slots)
        return self.whole(size, row) != size

    def entries(self, size: int, row: RowAxis) -> np.ndarray:
        """Return the numbers of the entries that shards have along the axis: [count, local], with
        -1 for padding."""
        if row.order is None:
            found = np.arange(self.whole(size, row)).reshape(self.count, -1)
            return np.where(found < size, found, -1)
        slots = np.asarray(row.order.slots)[..., None]
        found = np.where(slots < 0, -1, slots * row.width + np.arange(row.width))
        return found.reshape(self.count, -1)

    def ordered(self, axis: int, size: int, entries: np.ndarray) -> RowAxis:
        """Return the layout of shards that have these entries, under its plainest name.

        Args:
          entries: as the method of this name returns them.
        """
        plain = cut_along(axis)
        if np.array_equal(entries, self.entries(size, plain)):
            return plain
        width = _longest_runs(size, entries)
        first = entries[:, ::width]
        slots = np.where(first < 0, -1, first // width)
        row = RowAxis("", axis, width, RowOrder(tuple(map(tuple, slots.tolist()))))
        runs = dataclasses.replace(row, order=None)
        return self.plain(runs, size) if np.array_equal(entries, self.entries(size, runs)) else row

    def plain(self, row: RowAxis, size: int) -> RowAxis:
        """The layout under its plainest name: without padding, the width of runs makes no
        difference."""
        if row.order is not None:
            return self.ordered(int(row.axis), size, self.entries(size, row))
        return cut_along(
            int(row.axis), row.width if self.pads(size, row) else 1
        )  # JAX has NumPy's integers in places

    def cut(self, aval: Any, layout: Placed) -> Any:
        """The type of a shard's piece."""
        if not isinstance(layout, RowAxis):
            return aval
        return resized(aval, layout.axis, self.local(aval.shape[layout.axis], layout))


def _longest_runs(size: int, entries: np.ndarray) -> int:
    """Return the largest width of runs that entries and padding consist of, all at multiples of
    it."""
    begins = np.ones(entries.shape, bool)
    before, here = entries[:, :-1], entries[:, 1:]
    begins[:, 1:] = np.where(here < 0, before >= 0, (before < 0) | (here != before + 1))
    shards, slots = np.nonzero(begins)
    first = entries[shards, slots]
    return int(
        np.gcd.reduce([size, entries.shape[1], *slots.tolist(), *first[first >= 0].tolist()])
    )


def nbytes(aval: Any) -> int:
    """Bytes of a value; a key of a random generator counts as one word."""
    return int(aval.size) * int(getattr(aval.dtype, "itemsize", 4))


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A value that was cut, and is made whole.

    Attributes:
      shape, dtype: of the whole.
      nbytes: of the whole.
      reason: what needs it whole: `sort of f32[8,10] (model/head)`, or which output.
      line: the user's line that needs it, `model.py:12`; empty where that is not known.
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    reason: str
    line: str = ""
