"""Writer of the collectives that convert values on a shard from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtrans._jax import Atom, Var
from dtrans.engine.array_fns import take_entries
from dtrans.engine.layout import Shards, UnevenShards
from dtrans.ir.array_fns import padded
from dtrans.ir.builder import Builder
from dtrans.ops import all_gather_p, all_reduce_p, reduce_scatter_p
from dtrans.ops.all_to_all import all_to_all_p
from dtrans.rows.layout import RowAxis


class ShardCollectives:
    """Writer of collectives over the shards of a program.

    Args:
      b: the builder of the program.
      shards: number and mesh axes of the shards.
    """

    def __init__(self, b: Builder, shards: Shards) -> None:
        self.b, self.shards = b, shards

    def all_reduce(self, op: str, terms: Sequence[Atom]) -> list[Var]:
        """Write one all-reduce of several values; return their reductions.

        Args:
          op: the reduction, such as "sum".
          terms: the term of this shard for each value.
        """
        return self.b.bind(
            all_reduce_p, *terms, op=op, name=self.shards.label, owners=(), over=self.shards.over
        )

    def reduce_scatter(self, term: Atom, row: RowAxis) -> Atom:
        """Write a reduce-scatter of a partial sum; return this shard's piece in layout `row`."""
        padded_size = self.shards.padded_size(term.aval.shape[row.axis], row)
        (wide,) = self.b.call(padded(row.axis, padded_size), term)
        return self.b.bind(reduce_scatter_p, wide, **self._shared_params(), axis=row.axis)[0]

    def all_gather(self, piece: Atom, size: int, row: RowAxis) -> Atom:
        """Write an all-gather of a value; return the full value without padding.

        Args:
          piece: the piece of this shard.
          size: the size of the full dimension, without padding.
          row: the layout of the piece.
        """
        if isinstance(self.shards, UnevenShards):
            # a collective needs parts of equal sizes, so pad this shard's piece
            (piece,) = self.b.call(padded(row.axis, self.shards.largest(size)), piece)
        (wide,) = self.b.bind(all_gather_p, piece, **self._shared_params(), axis=row.axis)
        if row.order is None and self.shards.is_even:
            return self.b.trim(wide, row.axis, size)
        # shards do not have consecutive entries: sort the entries, and drop the padding
        entries = self.shards.entries(size, row).reshape(-1)
        places = np.flatnonzero(entries >= 0)
        at = places[np.argsort(entries[places])].astype(np.int32)
        return self.b.call(take_entries(row.axis), wide, self.b.constant(at))[0]

    def all_to_all(self, piece: Atom, size: int, before: RowAxis, row: RowAxis) -> Atom:
        """Write an all-to-all that shards a value along another dimension; return the new piece.

        Args:
          piece: the piece of this shard, in layout `before`.
          size: the size of the dimension that was sharded, without padding.
          before: the layout of the value.
          row: the new layout.
        """
        padded_size = self.shards.padded_size(piece.aval.shape[row.axis], row)
        (wide,) = self.b.call(padded(row.axis, padded_size), piece)
        (joined,) = self.b.bind(
            all_to_all_p, wide, **self._shared_params(), cut=row.axis, joined=before.axis
        )
        return self.b.trim(joined, before.axis, size)

    def _shared_params(self) -> dict[str, Any]:
        shards = self.shards
        return {"name": shards.label, "over": shards.over, "size": shards.count}
