"""Bins: vectors that pack the arrays that a rank owns, with one length for all ranks.

All ranks run one program, in which a variable has the same shape on every rank. But ranks own
arrays of different shapes. So each rank's arrays are concatenated into vectors, one for each dtype.
Zeros pad the vectors to the length of the longest:

    rank 0    w1 w1 w1 w1 b1 b1
    rank 1    w2 w2 w2 b2  0  0

The concatenation of these rows is the input of a `reduce_scatter`, and the output of an
`all_gather`.
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
from dtrans.engine.layout import Sliced
from dtrans.errors import ConfigError
from dtrans.ir.pytree import is_under


@dataclasses.dataclass(frozen=True)
class BinSlot:
    """Position of an array in a bin, the vector that packs one rank's arrays.

    Attributes:
      bin: the name of the bin, such as "grads/float32".
      rank: the rank that owns the array.
      start: the position of the array's first element in the bin.
      shape, dtype: the shape and type of the array.
    """

    bin: str
    rank: int
    start: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    def overlap(self, part: BinPart) -> range:
        """Return the positions in a rank's vector that this array and `part` have in common."""
        if part.bin != self.bin:
            return range(0)
        return range(max(self.start, part.start), min(self.start + self.size, part.stop))


@dataclasses.dataclass(frozen=True)
class BinPart:
    """Range of positions in the vectors (bins) that pack each rank's arrays.

    Elements `start` to `stop` of all ranks' vectors are communicated together.
    """

    bin: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements that the part has in one rank's vector."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """Name of the part, such as "grads/float32/1024"."""
        return f"{self.bin}/{self.start}"


@dataclasses.dataclass(frozen=True, eq=False)
class Bins:
    """Layout of vectors (bins) that pack the arrays of each owner, one vector for each dtype.

    Attributes:
      ranks: the number of owners.
      places: the position of each array, by name.
      types: the type of one rank's vector, by the name of the bin.

    Example:
      >>> import jax.numpy as jnp
      >>> from dtrans.zero.by_leaf.packing import Bins
      >>> arrays = {"w": jnp.ones((2, 2)), "b": jnp.full(3, 2.0)}
      >>> bins = Bins.from_types(arrays, {"w": 0, "b": 1}, 2, "state")
      >>> packed = bins.pack(arrays)
      >>> packed["state/float32"].tolist(), bins.padding  # in bytes
      ([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 0.0], 4)
      >>> bins.unpack(packed)["b"].tolist()
      [2.0, 2.0, 2.0]
    """

    ranks: int
    places: Mapping[str, BinSlot]
    types: Mapping[str, Any]

    @classmethod
    def from_types(
        cls, types: Mapping[str, Any], owner: Mapping[str, int], ranks: int, root: str
    ) -> Bins:
        """Assign each array a position in its owner's vector, in the order of `types`.

        Args:
          types: the arrays, or their types, by name.
          owner: the rank that owns each array.
          ranks: the number of ranks.
          root: names of bins are `root`, a slash, and the dtype.

        Raises:
          ConfigError: an array has a type that cannot be concatenated, such as a random key.
        """
        places: dict[str, BinSlot] = {}
        loads: dict[str, list[int]] = {}  # elements on each rank, by bin
        dtypes: dict[str, Any] = {}
        for n, t in types.items():
            if jnp.issubdtype(t.dtype, jax.dtypes.extended):
                raise ConfigError(
                    f"{n} has type {t.dtype}, which no rank can own alone; use partition='rows'"
                )
            name = f"{root}/{t.dtype}"
            bin_loads = loads.setdefault(name, [0] * ranks)
            places[n] = BinSlot(name, owner[n], bin_loads[owner[n]], tuple(t.shape), t.dtype)
            bin_loads[owner[n]] += places[n].size
            dtypes[name] = t.dtype
        # collectives reject empty arrays, so a bin has at least one element
        bin_types = {n: ShapedArray((max(1, *x),), dtypes[n]) for n, x in loads.items()}
        return cls(ranks, places, bin_types)

    @property
    def sliced(self) -> dict[str, Sliced]:
        """Vectors of all ranks, one after the other, as sliced arrays: each rank has one slice."""
        return {
            n: Sliced(0, t.size * self.ranks, t.size, self.ranks) for n, t in self.types.items()
        }

    @property
    def padding(self) -> int:
        """Bytes of padding, summed over all ranks."""
        stored = sum(t.size * t.dtype.itemsize for t in self.types.values()) * self.ranks
        return stored - sum(p.size * jnp.dtype(p.dtype).itemsize for p in self.places.values())

    def of_rank(self, rank: int) -> dict[str, BinSlot]:
        """Return the positions of the arrays that a rank owns, by name."""
        return {n: p for n, p in self.places.items() if p.rank == rank}

    def parts(self, limit: float) -> list[BinPart]:
        """Divide the packed vectors into parts that are communicated separately.

        A part is at least as long as the largest array of its dtype.

        Args:
          limit: the size of a part in bytes, summed over all ranks.
        """
        found = []
        for name, t in self.types.items():
            largest = max(p.size for p in self.places.values() if p.bin == name)
            size = int(max(1, largest, min(t.size, limit // (self.ranks * t.dtype.itemsize))))
            bounds = [*range(0, t.size, size), t.size]
            found += [BinPart(name, a, b) for a, b in itertools.pairwise(bounds)]
        return found

    def arrays_in(self, part: BinPart) -> list[str]:
        """Return the names of the arrays with elements in a part; [] for padding alone."""
        return [n for n, p in self.places.items() if p.overlap(part)]

    # -- from arrays to bins ---------------------------------------------------------------------

    def pack_rank(self, rank: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Pack the arrays of one rank into one vector per dtype (bins)."""
        return {n: _concatenate(self._rows(p, rank, values)) for n, p in self._full_parts()}

    def pack(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Pack all arrays; return the vectors of all ranks, one after the other, by name."""
        return {n: self.pack_part(p, values) for n, p in self._full_parts()}

    def pack_part(self, part: BinPart, values: Mapping[str, Any]) -> Any:
        """Pack the same range of all ranks' vectors, one rank after the other.

        Args:
          part: the range.
          values: the arrays by name.
        """
        rows = []
        for rank in range(self.ranks):
            rows += self._rows(part, rank, values)
        return _concatenate(rows)

    def _full_parts(self) -> list[tuple[str, BinPart]]:
        return [(n, BinPart(n, 0, t.size)) for n, t in self.types.items()]

    def _rows(self, part: BinPart, rank: int, values: Mapping[str, Any]) -> list[Any]:
        """Return a range of one rank's packed vector, as a list of vectors to concatenate.

        Args:
          part: the range.
          rank: the rank.
          values: the arrays by name.
        """
        rows, filled = [], part.start
        for n, p in self.of_rank(rank).items():
            overlap = p.overlap(part)
            if not overlap:
                continue
            row = jax.lax.convert_element_type(values[n], p.dtype).reshape(p.size)
            if len(overlap) != p.size:
                start = overlap.start - p.start
                row = jax.lax.slice(row, (start,), (start + len(overlap),))
            rows.append(row)
            filled += len(overlap)
        if filled < part.stop:
            rows.append(jnp.zeros(part.stop - filled, self.types[part.bin].dtype))
        return rows

    # -- from bins to arrays ---------------------------------------------------------------------

    def array_of(self, name: str, bins: Mapping[str, Any]) -> Any:
        """Extract one array from the packed vectors of its owner.

        Args:
          name: the name of the array.
          bins: the owner's vectors by name.
        """
        p = self.places[name]
        return jax.lax.slice(bins[p.bin], (p.start,), (p.start + p.size,)).reshape(p.shape)

    def from_parts(self, parts: Mapping[BinPart, Any]) -> dict[str, Any]:
        """Extract all arrays from parts of the packed vectors of all ranks.

        Args:
          parts: maps each part to its elements; all parts together must cover the vectors.
        """
        found = {}
        for n, p in self.places.items():
            rows = []
            for part, x in parts.items():
                overlap = p.overlap(part)
                if overlap:
                    first = p.rank * part.size - part.start
                    start, stop = first + overlap.start, first + overlap.stop
                    rows.append(jax.lax.slice(x, (start,), (stop,)))
            array = _concatenate(rows) if rows else jnp.zeros(0, p.dtype)
            found[n] = array.reshape(p.shape)
        return found

    def unpack(self, bins: Mapping[str, Any]) -> dict[str, Any]:
        """Extract all arrays from the packed vectors of all ranks."""
        return self.from_parts({p: bins[n] for n, p in self._full_parts()})


def unused_root(name: str, names: Collection[str]) -> str:
    """Return a prefix that no name has yet: `name`, with underscores at its end if necessary."""
    while any(is_under(n, [name]) for n in names):
        name += "_"
    return name


def _concatenate(rows: list[Any]) -> Any:
    return rows[0] if len(rows) == 1 else jax.lax.concatenate(rows, 0)
