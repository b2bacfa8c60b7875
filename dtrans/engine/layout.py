"""Layouts of a value over the shards of a program.

    SHARED                    replicated: every shard has the full value
    RowAxis(_, axis, width)   sharded along `axis`; `width` adjacent entries (a run) stay together
    RowAxis(.., order)        sharded; `order` lists the runs of each shard (after concatenations)
    PARTIAL                   partial sum: the value is the sum of one term on each shard

The part of a sharded value that a shard has is its *piece*. All pieces have ceil(runs / shards)
runs, so the last pieces may end with padding. Padding may have any value: before an operation mixes
entries, the engine replaces padding by a neutral number.

`RowAxis` and `SHARED` come from the row analysis (`dtrans.rows.layout`), because the engine uses
the rules of that analysis. In the row analysis, a `RowAxis` names a leaf; in the engine, the name
is empty.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from dtrans._jax import Atom, resized
from dtrans.errors import ConfigError
from dtrans.rows.layout import RowAxis, RowOrder, Shared


class Partial:
    """Layout of a partial sum: each shard has a term, and the value is their sum."""


PARTIAL: Final = Partial()

ShardLayout = Shared | RowAxis | Partial


def sharded_along(axis: int, width: int = 1) -> RowAxis:
    """Return the layout of a value that is sharded along an axis."""
    return RowAxis("", axis, width)


@dataclasses.dataclass(frozen=True)
class Sliced:
    """Division of one array into equal slices, one for each device of a mesh axis.

    For example, 4 devices divide a dimension of 10 entries into slices of 3 entries, and the last
    slice has 2 entries of padding.

    Attributes:
      axis: the dimension that is sliced.
      size: the length of that dimension, without padding.
      part: the length of a slice along that dimension, with padding.
      degree: the number of devices.
      width: the number of adjacent entries that always stay on one device, because they belong to
        one row.
    """

    axis: int
    size: int
    part: int
    degree: int
    width: int = 1

    @classmethod
    def from_shape(cls, shape: Sequence[int], axis: int, degree: int, width: int = 1) -> Sliced:
        """Divide an array into the shortest slices of equal length, with padding at the end.

        Args:
          shape: the shape of the array.
          axis, degree, width: the attributes.

        Example:
          >>> from dtrans.engine.layout import Sliced
          >>> Sliced.from_shape((10, 3), axis=0, degree=4).part
          3
        """
        part = -(-shape[axis] // width // degree) * width
        return cls(axis, shape[axis], part, degree, width)

    @property
    def row(self) -> RowAxis:
        """Layout of the slices."""
        return sharded_along(self.axis, self.width)

    @property
    def padded(self) -> int:
        """Length of the sliced dimension, with padding."""
        return self.part * self.degree

    def rank_type(self, aval: Any) -> Any:
        """Return the type of a rank's slice."""
        return resized(aval, self.axis, self.part)

    def padded_type(self, aval: Any) -> Any:
        """Return the type of the full array with its padding."""
        return resized(aval, self.axis, self.padded)


@dataclasses.dataclass(frozen=True)
class Shards:
    """Number, mesh axes and options of the shards of a program.

    Attributes:
      count: number of shards.
      over: names of the mesh axes that the shards form.
      noun: word for a shard in errors, such as "trainer".
      label: `name` parameter of the collectives that the engine writes.
      shares_work: True if sharding saves computation, as over a batch. False if it only saves
        memory: then operands are gathered before a loop whose body would communicate more bytes.
      finite_padding: True to pad with copies of real entries, for programs that are differentiated
        later. The derivative of padding is multiplied by 0, and must be finite.
      gathers_in_loops: True to shard a loop whose body gathers, even if this communicates more
        bytes than gathering the operands once. Over a sequence, the loop then stores smaller
        activations.
    """

    count: int
    over: tuple[str, ...]
    noun: str = "trainer"
    label: str = "split"
    shares_work: bool = True
    finite_padding: bool = False
    gathers_in_loops: bool = False

    def local(self, size: int, row: RowAxis) -> int:
        """Return the length of this shard's piece of a dimension, with padding.

        Args:
          size: length of the dimension in the full array.
          row: layout of the piece.
        """
        if row.order is not None:
            return len(row.order.slots[0]) * row.width
        return -(-(size // row.width) // self.count) * row.width

    def padded_size(self, size: int, row: RowAxis) -> int:
        """Return the total size of all pieces, padding included; `size` excludes padding."""
        return self.local(size, row) * self.count

    @property
    def is_even(self) -> bool:
        """True if all pieces have equal sizes."""
        return True

    def longest_run(self, size: int) -> int:
        """Return the largest w such that pieces consist of complete runs of w adjacent entries.

        A layout with this `width` then describes the same pieces. This requires that pieces have no
        padding.
        """
        return size // self.count

    def pads(self, size: int, row: RowAxis) -> bool:
        """Return True if some piece of a dimension of this size has padding."""
        if row.order is not None:
            return any(-1 in slots for slots in row.order.slots)
        return self.padded_size(size, row) != size

    def entries(self, size: int, row: RowAxis) -> np.ndarray:
        """Return an array [shards, piece size]: the global index of each entry; -1 for padding."""
        if row.order is None:
            found = np.arange(self.padded_size(size, row)).reshape(self.count, -1)
            return np.where(found < size, found, -1)
        slots = np.asarray(row.order.slots)[..., None]
        found = np.where(slots < 0, -1, slots * row.width + np.arange(row.width))
        return found.reshape(self.count, -1)

    def ordered(self, axis: int, size: int, entries: np.ndarray) -> RowAxis:
        """Return the simplest layout in which the shards' pieces have the given entries.

        Concatenations and slices move entries within a shard. Then a piece no longer contains
        consecutive entries of the result, and its layout must list them.

        Args:
          axis: sharded axis.
          size: number of entries along the axis.
          entries: index in the full array of each entry of each piece, as `Shards.entries` returns
            it.
        """
        plain = sharded_along(axis)
        if np.array_equal(entries, self.entries(size, plain)):
            return plain
        width = _longest_runs(size, entries)
        first = entries[:, ::width]
        slots = np.where(first < 0, -1, first // width)
        row = RowAxis("", axis, width, RowOrder(tuple(map(tuple, slots.tolist()))))
        runs = dataclasses.replace(row, order=None)
        if np.array_equal(entries, self.entries(size, runs)):
            return self.plain(runs, size)
        return row

    def plain(self, row: RowAxis, size: int) -> RowAxis:
        """Return the simplest layout with the same pieces, so that equal layouts compare as equal.

        If no piece has padding, the runs of this layout have width 1.
        """
        if row.order is not None:
            return self.ordered(int(row.axis), size, self.entries(size, row))
        # int(), because some parameters of JAX primitives are NumPy integers
        return sharded_along(int(row.axis), row.width if self.pads(size, row) else 1)

    def part_type(self, aval: Any, layout: ShardLayout) -> Any:
        """Return the type of a shard's part of a value: its piece, its term, or the full value."""
        if not isinstance(layout, RowAxis):
            return aval
        return resized(aval, layout.axis, self.local(aval.shape[layout.axis], layout))

    def part_types(self, atoms: Iterable[Atom], layouts: Iterable[ShardLayout]) -> list[Any]:
        """Return the types of a shard's parts of several values; see `part_type`."""
        return [self.part_type(a.aval, x) for a, x in zip(atoms, layouts, strict=True)]


@dataclasses.dataclass(frozen=True)
class UnevenShards(Shards):
    """Shards with different numbers of rows, for trainers of different speeds.

    Each trainer then has its own program, and this object describes one of them. No piece has
    padding. All programs communicate in the same order. For a collective, each trainer pads its
    value to the size of the largest piece.

    Attributes:
      shares: number of rows of each shard. The rows of a shard follow those of the shard before it.
      index: index of the shard for which the program is written.
    """

    shares: tuple[int, ...] = ()
    index: int = 0

    @property
    def is_even(self) -> bool:
        return False

    def local(self, size: int, row: RowAxis) -> int:
        # Compute the entries of all shards, not only of this one: a shard whose share is invalid
        # raises an error. So either all shards get a program, or none does.
        return [self._entries_of(size, share) for share in self.shares][self.index]

    def padded_size(self, size: int, row: RowAxis) -> int:
        return size

    def longest_run(self, size: int) -> int:
        return math.gcd(*(self._entries_of(size, share) for share in self.shares))

    def largest(self, size: int) -> int:
        """Return the size of the largest piece of a dimension with `size` entries."""
        return self._entries_of(size, max(self.shares))

    def entries(self, size: int, row: RowAxis) -> np.ndarray:
        found = np.full((self.count, self.largest(size)), -1)
        stop = 0
        for entries, share in zip(found, self.shares, strict=True):
            count = self._entries_of(size, share)
            entries[:count] = np.arange(stop, stop + count)
            stop += count
        return found

    def first(self, size: int) -> int:
        """Return the index in the full array of the first entry of this shard's piece."""
        return self._entries_of(size, sum(self.shares[: self.index]))

    def _entries_of(self, size: int, rows: int) -> int:
        entries, rest = divmod(size * rows, sum(self.shares))
        if rest:
            raise ConfigError(
                f"an array of the step has a dimension of {size} entries, which cannot be divided "
                f"in proportion to the rows of the {self.noun}s "
                f"({' : '.join(map(str, self.shares))}); leave out speeds of dtrans.Batch"
            )
        return entries


def _longest_runs(size: int, entries: np.ndarray) -> int:
    """Return the length of the longest runs into which all pieces can be divided.

    A run of length w has w consecutive entries, or w entries of padding. It begins at a multiple of
    w, both in the piece and in the full array.
    """
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
    """Note that a sharded value had to be gathered on every shard, with the reason.

    A plan prints these notes, since an all-gather of a large value is slow and needs memory.

    Attributes:
      shape, dtype: type of the full value.
      nbytes: size of the full value in bytes.
      reason: the equation or output that reads the full value, such as `sort of f32[8,10]
        (model/head)`.
      line: source line of this equation, such as `model.py:12`; empty if unknown.
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    reason: str
    line: str = ""

    def __str__(self) -> str:
        reader = f"{self.reason} ({self.line})" if self.line else self.reason
        return f"{self.dtype}{list(self.shape)} for {reader}"
