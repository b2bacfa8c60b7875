"""Layouts of a value over the shards of a program.

    SHARED                    replicated: every shard has the same full value
    RowAxis(_, axis, width)   sharded along `axis` in runs of `width` entries
    RowAxis(.., order)        sharded; `order` lists each shard's runs (after concatenations, say)
    PARTIAL                   partial sums: the value is the sum over shards

Pieces have equal sizes: ceil(runs / shards) runs. The last pieces end with padding if the division
has a remainder. Padding may hold any number: operations that mix entries mask it first.

`RowAxis` comes from the row analysis (`dtrans.rows.layout`), so that one set of rules serves both;
here its leaf has no name.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from dtrans._jax import resized
from dtrans.rows.layout import SHARED, RowAxis, RowOrder, Shared


class Partial:
    """Layout of a partial sum: each shard has one term."""


PARTIAL: Final = Partial()

ShardLayout = Shared | RowAxis | Partial


def cut_along(axis: int, width: int = 1) -> RowAxis:
    """Return the layout of a value that is sharded along an axis."""
    return RowAxis("", axis, width)


def rows_only(x: ShardLayout) -> Shared | RowAxis:
    """Return a layout as rules see it: a partial sum counts as replicated, once it is reduced."""
    return x if isinstance(x, RowAxis) else SHARED


def rows_or_none(x: ShardLayout) -> RowAxis | None:
    """Return the layout of a sharded value, None for other layouts."""
    return x if isinstance(x, RowAxis) else None


@dataclasses.dataclass(frozen=True)
class Shards:
    """Number, mesh axes and options of the shards of a program.

    Attributes:
      count: number of shards.
      over: named axes of the shards.
      noun: name of a shard in errors.
      label: name of the communication that the engine writes.
      shares_work: True if shards save computation, as those of a batch do. False if they only save
        memory; a loop then gathers its operands if its body would move more bytes.
      finite_padding: True if padding repeats real entries. Needed if the program is differentiated
        later: a masked entry still contributes zero times its derivative, which must be finite.
    """

    count: int
    over: tuple[str, ...]
    noun: str = "trainer"
    label: str = "split"
    shares_work: bool = True
    finite_padding: bool = False

    def local(self, size: int, row: RowAxis) -> int:
        """Return the number of entries that each shard has out of `size`, padding included."""
        if row.order is not None:
            return len(row.order.slots[0]) * row.width
        return -(-(size // row.width) // self.count) * row.width

    def padded_size(self, size: int, row: RowAxis) -> int:
        """Return the number of entries that all pieces have together, padding included."""
        return self.local(size, row) * self.count

    def pads(self, size: int, row: RowAxis) -> bool:
        """Return True if a piece has padding."""
        if row.order is not None:
            return any(-1 in slots for slots in row.order.slots)
        return self.padded_size(size, row) != size

    def entries(self, size: int, row: RowAxis) -> np.ndarray:
        """Return the indices of the entries on each shard: [count, local], with -1 for padding."""
        if row.order is None:
            found = np.arange(self.padded_size(size, row)).reshape(self.count, -1)
            return np.where(found < size, found, -1)
        slots = np.asarray(row.order.slots)[..., None]
        found = np.where(slots < 0, -1, slots * row.width + np.arange(row.width))
        return found.reshape(self.count, -1)

    def ordered(self, axis: int, size: int, entries: np.ndarray) -> RowAxis:
        """Return the simplest layout in which shards have these entries.

        Args:
          axis: sharded axis.
          size: number of entries along it.
          entries: indices as `Shards.entries` returns them.
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
        """Return the simplest equal layout: without padding, the width of runs does not matter."""
        if row.order is not None:
            return self.ordered(int(row.axis), size, self.entries(size, row))
        # some of JAX's parameters have NumPy integers
        return cut_along(int(row.axis), row.width if self.pads(size, row) else 1)

    def cut(self, aval: Any, layout: ShardLayout) -> Any:
        """Return the type of a shard's piece."""
        if not isinstance(layout, RowAxis):
            return aval
        return resized(aval, layout.axis, self.local(aval.shape[layout.axis], layout))


def _longest_runs(size: int, entries: np.ndarray) -> int:
    """Return the largest width such that entries and padding form runs at multiples of it."""
    begins = np.ones(entries.shape, bool)
    before, here = entries[:, :-1], entries[:, 1:]
    begins[:, 1:] = np.where(here < 0, before >= 0, (before < 0) | (here != before + 1))
    shards, slots = np.nonzero(begins)
    first = entries[shards, slots]
    return int(
        np.gcd.reduce([size, entries.shape[1], *slots.tolist(), *first[first >= 0].tolist()])
    )


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Record of a sharded value that an equation or output needs in full.

    Attributes:
      shape, dtype: those of the full value.
      nbytes: bytes of the full value.
      reason: its reader: `sort of f32[8,10] (model/head)`, or the name of an output.
      line: the user's line that reads it, `model.py:12`; empty if unknown.
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    reason: str
    line: str = ""
