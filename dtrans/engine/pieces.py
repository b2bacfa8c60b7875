"""Pieces of one shard: their offsets, and tables with a row for each shard.

A piece is the part of a sharded value that a shard has. All shards run the same program, in which
`trainer_index` returns the index of the shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from dtrans._jax import Atom, ShapedArray, Var
from dtrans.engine.array_fns import row_of_shard, select_before, select_slots
from dtrans.engine.layout import Shards, UnevenShards
from dtrans.ir.array_fns import times
from dtrans.ir.builder import Builder
from dtrans.ops import identity_of, trainer_index_p
from dtrans.rows.layout import RowAxis, RowOrder
from dtrans.rows.slices import Slice, Start, int32


_INDEX = ShapedArray((), np.dtype(np.int32))


class Pieces:
    """Offsets of this shard's pieces, and lookups in tables with one row for each shard.

    All shards run the same program. So offsets are not numbers, but values that the program
    computes from the shard's index. This class writes these equations once, and returns their
    outputs to all later calls.

    Args:
      b: builder of the program.
      shards: number and mesh axes of the shards.

    Attributes:
      takes_index: True if the program has the shard's index as its first input, as bodies of loops
        do. Otherwise a `trainer_index` equation computes the index.
    """

    def __init__(self, b: Builder, shards: Shards) -> None:
        self.b = b
        self.shards = shards
        self._starts: dict[tuple[int, RowOrder | None], Start] = {}
        self.takes_index = False
        self._index: Atom | None = None
        # key of a table, ((shape, dtype), bytes) -> row of this shard
        self._rows: dict[tuple[Any, bytes], Atom] = {}

    def index(self) -> Atom:
        """Return the shard's index, as an int32 scalar."""
        if isinstance(self.shards, UnevenShards):
            return int32(self.shards.index)
        if self._index is None and self.takes_index:
            self._index = Var(_INDEX)
            self.b.invars.insert(0, self._index)
        if self._index is None:
            with self._for_all():
                (self._index,) = self.b.bind(trainer_index_p, over=self.shards.over)
        return self._index

    @property
    def reads_index(self) -> bool:
        """True if an equation of this program reads the shard's index."""
        return self._index is not None

    @contextlib.contextmanager
    def _for_all(self) -> Iterator[None]:
        """Write the equations in this context without a source line.

        Equations of several source lines read the outputs, so no single line is right.
        """
        source, self.b.source = self.b.source, None
        yield
        self.b.source = source

    def of(self, size: int, row: RowAxis) -> Slice:
        """Return the slice of an array that is this shard's piece.

        For 4 shards and a dimension of 10 entries, each piece has 3 entries: shard 1 has the slice
        3 to 6, and the last shard's slice is padded.

        Args:
          size: length of the divided dimension in the full array, without padding.
          row: layout of the piece: which dimension is divided, and in which order.
        """
        local, order = self.shards.local(size, row), row.order
        if isinstance(self.shards, UnevenShards):
            return Slice(row.axis, self.shards.first(size), local)
        if (local, order) not in self._starts:

            def write(b: Builder) -> Atom:
                if order is not None:
                    return self.shard_row(np.maximum(self.shards.entries(size, row), 0))
                with self._for_all():
                    return b.call(times(local), self.index())[0]

            self._starts[local, order] = Start(write, self.shards.padded_size(size, row))
        return Slice(row.axis, self._starts[local, order], local)

    def shard_row(self, table: np.ndarray) -> Atom:
        """Return the row of a table that belongs to this shard; integers become int32.

        The table has one row for each shard, such as the ids of the entries in its piece. The
        program contains the whole table, and selects a row by the shard's index.
        """
        if table.dtype != bool:
            table = table.astype(np.int32)
        key = (table.shape, table.dtype), table.tobytes()
        if key not in self._rows:
            with self._for_all():
                if (table == table[0]).all():
                    self._rows[key] = self.b.constant(table[0])
                else:
                    (self._rows[key],) = self.b.call(
                        row_of_shard, self.b.constant(table), self.index()
                    )
        return self._rows[key]

    def start(self, size: int, row: RowAxis) -> Atom:
        """Return the position in the full array at which this shard's piece begins.

        Args:
          size: length of the divided dimension in the full array, without padding.
          row: layout of the piece, without an order: its entries are consecutive.
        """
        assert row.order is None
        start = self.of(size, row).start
        return start.value(self.b) if isinstance(start, Start) else int32(start)

    def without_padding(self, piece: Atom, size: int, row: RowAxis, op: str) -> Atom:
        """Replace a piece's padding by a number that leaves a reduction unchanged (0 for a sum).

        Args:
          piece: the padded piece.
          size: length of the divided dimension in the full array, without padding.
          row: layout of the piece.
          op: the reduction: "sum", "max", and so on.
        """
        if not self.shards.pads(size, row):
            return piece
        (fill,) = self.b.call(identity_of(op, piece.aval.shape, piece.aval.dtype))
        if row.order is not None:
            real = self.shard_row(self.shards.entries(size, row) >= 0)
            return self.b.call(select_slots(row.axis), piece, real, fill)[0]
        return self.b.call(select_before(row.axis, size), piece, self.start(size, row), fill)[0]
