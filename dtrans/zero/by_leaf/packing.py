"""Bins: how arrays that differ from rank to rank become arrays of one shape on all.

A program that is one for all ranks has arrays of the same shapes on each of them. What a rank owns
is laid out in vectors, one for each dtype, array behind array, and padded with zeros to the length
of the longest:

    rank 0    w1 w1 w1 w1 b1 b1
    rank 1    w2 w2 w2 b2  0  0

Of all ranks together a bin is the one vector of these rows, one behind the other, which is how
`reduce_scatter` takes it and `all_gather` gives it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import ShapedArray
from dtrans.errors import ConfigError
from dtrans.ir.pytree import is_under
from dtrans.zero.choose_slices import Sliced


@dataclasses.dataclass(frozen=True)
class BinSlot:
    """Place of an array in a bin.

    Attributes:
      bin: the name of the bin.
      rank: the rank of the owner.
      start: the position of its first element in the bin.
      shape, dtype: the shape and type of the array.
    """

    bin: str
    rank: int
    start: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """Return the number of elements of the array."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class BinPart:
    """Elements `start` to `stop` of a bin, on each rank."""

    bin: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Return the part's name."""
        return f"{self.bin}/{self.start}"


@dataclasses.dataclass(frozen=True, eq=False)
class Bins:
    """Layout of arrays of several owners in bins, one bin per type.

    Attributes:
      ranks: the number of owners.
      places: name of each array to its place.
      types: name to type of each bin, as one rank has it.

    Example:
      >>> import jax.numpy as jnp
      >>> from dtrans.zero.by_leaf.packing import Bins
      >>> arrays = {"w": jnp.ones((2, 2)), "b": jnp.full(3, 2.0)}
      >>> bins = Bins.of(arrays, {"w": 0, "b": 1}, 2, "state")
      >>> packed = bins.packed(arrays)
      >>> packed["state/float32"].tolist(), bins.padding
      ([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 0.0], 4)
      >>> bins.unpacked(packed)["b"].tolist()
      [2.0, 2.0, 2.0]
    """

    ranks: int
    places: Mapping[str, BinSlot]
    types: Mapping[str, Any]

    @classmethod
    def of(cls, types: Mapping[str, Any], owner: Mapping[str, int], ranks: int, root: str) -> Bins:
        """Lay arrays out, those of a rank in their order.

        Args:
          types: of the arrays, by name.
          owner: the rank of each.
          ranks: how many there are.
          root: what the names of the bins begin with; the dtype comes behind.

        Raises:
          ConfigError: an array of something that cannot lie beside others, such as a random key.
        """
        places: dict[str, BinSlot] = {}
        filled: dict[str, list[int]] = {}
        for n, t in types.items():
            if jnp.issubdtype(t.dtype, jax.dtypes.extended):
                raise ConfigError(
                    f"{n} is of type {t.dtype}, which no rank can own alone; use partition='rows'"
                )
            name = f"{root}/{t.dtype}"
            loads = filled.setdefault(name, [0] * ranks)
            places[n] = BinSlot(name, owner[n], loads[owner[n]], tuple(t.shape), t.dtype)
            loads[owner[n]] += places[n].size
        dtypes = {p.bin: p.dtype for p in places.values()}
        # a bin of arrays without elements has one of padding: collectives want something to move
        return cls(
            ranks, places, {n: ShapedArray((max(1, *f),), dtypes[n]) for n, f in filled.items()}
        )

    @property
    def cuts(self) -> dict[str, Sliced]:
        """The bins of all ranks together, as slices of them are on each."""
        return {
            n: Sliced(0, t.size * self.ranks, t.size, self.ranks) for n, t in self.types.items()
        }

    @property
    def padding(self) -> int:
        """Bytes that all ranks together hold of nothing."""
        there = sum(t.size * t.dtype.itemsize for t in self.types.values()) * self.ranks
        return there - sum(p.size * jnp.dtype(p.dtype).itemsize for p in self.places.values())

    def of_rank(self, rank: int) -> dict[str, BinSlot]:
        """Return the places of a rank's arrays."""
        return {n: p for n, p in self.places.items() if p.rank == rank}

    # -- on arrays -------------------------------------------------------------------------------

    def packed_of(self, rank: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the bins of one rank from its arrays."""
        own = self.of_rank(rank)
        return {
            n: _joined(self._rows(BinPart(n, 0, t.size), own, values), t.dtype)
            for n, t in self.types.items()
        }

    def packed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the bins of all ranks from all arrays."""
        return {n: self.packed_part(BinPart(n, 0, t.size), values) for n, t in self.types.items()}

    def packed_part(self, part: BinPart, values: Mapping[str, Any]) -> Any:
        """Return a part of one bin of all ranks from the arrays in it."""
        return _joined(
            [x for k in range(self.ranks) for x in self._rows(part, self.of_rank(k), values)],
            self.types[part.bin].dtype,
        )

    def parts(self, limit: float) -> list[BinPart]:
        """Cut bins into parts of about `limit` bytes over all ranks, at least of one array."""
        found = []
        for name, t in self.types.items():
            largest = max(p.size for p in self.places.values() if p.bin == name)
            size = int(max(1, largest, min(t.size, limit // (self.ranks * t.dtype.itemsize))))
            bounds = [*range(0, t.size, size), t.size]
            found += [BinPart(name, a, b) for a, b in itertools.pairwise(bounds)]
        return found

    def inside(self, part: BinPart) -> list[str]:
        """Return the arrays that lie in a part, or reach into it; none for padding."""
        of = [(n, p) for n, p in self.places.items() if p.bin == part.bin]
        return [n for n, p in of if max(p.start, part.start) < min(p.start + p.size, part.stop)]

    def _rows(
        self, part: BinPart, own: Mapping[str, BinSlot], values: Mapping[str, Any]
    ) -> list[Any]:
        """Return the arrays, or parts of them, in a part of a rank's bin, with padding."""
        rows, filled = [], part.start
        for n in self.inside(part):
            if n in own:
                p = own[n]
                start, stop = (
                    max(part.start, p.start) - p.start,
                    min(part.stop, p.start + p.size) - p.start,
                )
                row = jax.lax.convert_element_type(values[n], p.dtype).reshape(p.size)
                rows.append(
                    row if stop - start == p.size else jax.lax.slice(row, (start,), (stop,))
                )
                filled += stop - start
        return rows + (
            [jnp.zeros(part.stop - filled, self.types[part.bin].dtype)]
            if filled < part.stop
            else []
        )

    def array_of(self, name: str, bins: Mapping[str, Any]) -> Any:
        """Return one array from the bins of its rank."""
        p = self.places[name]
        return jax.lax.slice(bins[p.bin], (p.start,), (p.start + p.size,)).reshape(p.shape)

    def from_parts(self, parts: Mapping[BinPart, Any]) -> dict[str, Any]:
        """Return all arrays from parts of the bins of all ranks."""
        found = {}
        for n, p in self.places.items():
            rows = []
            for part, x in parts.items():
                start, stop = max(p.start, part.start), min(p.start + p.size, part.stop)
                if part.bin == p.bin and start < stop:
                    first = p.rank * (part.stop - part.start) - part.start
                    rows.append(jax.lax.slice(x, (first + start,), (first + stop,)))
            found[n] = (_joined(rows, p.dtype) if rows else jnp.zeros(0, p.dtype)).reshape(p.shape)
        return found

    def unpacked(self, bins: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arrays from the bins of all ranks."""
        return self.from_parts({BinPart(n, 0, t.size): bins[n] for n, t in self.types.items()})


def free_name(name: str, taken: Collection[str]) -> str:
    """Return an unused root for names of bins: `name`, with underscores if needed."""
    while any(is_under(n, [name]) for n in taken):
        name += "_"
    return name


def _joined(rows: list[Any], dtype: Any) -> Any:
    return rows[0] if len(rows) == 1 else jax.lax.concatenate([x.astype(dtype) for x in rows], 0)
