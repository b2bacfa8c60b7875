"""Where a shard's pieces are: one program is written for all shards, and only `trainer_index` tells
them apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from dtrans._jax import Atom, ShapedArray, Var
from dtrans.engine.array_fns import kept, kept_slots, of_shard
from dtrans.engine.layout import Shards
from dtrans.ir.array_fns import times
from dtrans.ir.builder import Builder
from dtrans.ops import identity_of, trainer_index_p
from dtrans.rows.layout import RowAxis, RowOrder
from dtrans.rows.slices import Slice, Start


_INDEX = ShapedArray((), np.dtype(np.int32))


class Pieces:
    """The pieces of one shard, in one program or body of a loop.

    Args:
      b: writes it.
      shards: of whom it is one.

    Attributes:
      takes_index: if the number of the shard is the first operand where it is read, and not an
        equation.
    """

    def __init__(self, b: Builder, shards: Shards) -> None:
        self.b = b
        self.shards = shards
        self._starts: dict[tuple[int, RowOrder | None], Start] = {}
        self.takes_index = False
        self._index: Atom | None = None
        self._rows: dict[
            tuple[Any, bytes], Atom
        ] = {}  # of tables, by their shapes, types and entries

    def index(self) -> Atom:
        """The number of the shard."""
        if self._index is None and self.takes_index:
            self._index = Var(_INDEX)
            self.b.invars.insert(0, self._index)
        if self._index is None:
            with self._for_all():
                (self._index,) = self.b.bind(trainer_index_p, over=self.shards.over)
        return self._index

    @property
    def reads_index(self) -> bool:
        """Return True if something needs the number of the shard."""
        return self._index is not None

    @contextlib.contextmanager
    def _for_all(self) -> Iterator[None]:
        """Write what every equation may read: it comes from no line, and from no derivative."""
        source, self.b.source = self.b.source, None
        yield
        self.b.source = source

    def of(self, size: int, row: RowAxis) -> Slice:
        """The piece of a dimension of `size` entries; what is behind them is padding."""
        local, order = self.shards.local(size, row), row.order
        if (local, order) not in self._starts:

            def write(b: Builder) -> Atom:
                if order is not None:
                    return self.own_row(np.maximum(self.shards.entries(size, row), 0))
                with self._for_all():
                    return b.call(times(local), self.index())[0]

            self._starts[local, order] = Start(write, self.shards.whole(size, row))
        return Slice(row.axis, self._starts[local, order], local)

    def own_row(self, table: np.ndarray) -> Atom:
        """Return the row of a table that has one row for each shard; numbers become 32 bits
        wide."""
        table = table if table.dtype == bool else table.astype(np.int32)
        key = (table.shape, table.dtype), table.tobytes()
        if key not in self._rows:
            with self._for_all():
                if (table == table[0]).all():
                    self._rows[key] = self.b.constant(table[0])
                else:
                    (self._rows[key],) = self.b.call(of_shard, self.b.constant(table), self.index())
        return self._rows[key]

    def start(self, size: int, row: RowAxis) -> Atom:
        """Return the first entry of a piece. A piece in another order has no such entry."""
        assert row.order is None
        start = self.of(size, row).start
        assert isinstance(start, Start)
        return start.value(self.b)

    def without_padding(self, piece: Atom, size: int, row: RowAxis, op: str) -> Atom:
        """A piece with what changes nothing in a reduction in the place of padding."""
        if not self.shards.pads(size, row):
            return piece
        (nothing,) = self.b.call(identity_of(op, piece.aval.shape, piece.aval.dtype))
        if row.order is not None:
            real = self.own_row(self.shards.entries(size, row) >= 0)
            return self.b.call(kept_slots(row.axis), piece, real, nothing)[0]
        return self.b.call(kept(row.axis, size), piece, self.start(size, row), nothing)[0]
