"""A server's update, written for the rows that were looked up.

The same writer makes it (`dtrans.slicing.server_update`), of blocks with as many rows as there is
room for: rows that were looked up lie one behind the other, with the rows of the state that belong
to them, and where there are fewer, rows whose gradient is zero. Programs are made for a few sizes:
powers of two for updates (`room_for`), and sizes eight times each other for what makes rows, or
makes up for missed steps (`rooms`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dtrans.rows.writer import RowRange, RowSet
from dtrans.slicing.blocks import Block, Placement


LEAST = 16  # rows that a program has room for at least
MOST = 1 << 16  # rows that one call of a program makes, or makes up for


@dataclasses.dataclass(frozen=True, eq=False)
class TableBlock:
    """A server's rows of a table.

    Attributes:
      leaf: the table.
      name: the block's name.
      span: its rows of the table.
      held: the block, and the arrays of the optimizer's state that have a row for each of its rows.
      gradients: trainer to the name under which it sends the gradient of rows.
      whole: whether each update touches all rows.
      moves: whether rows that no trainer looked up change too, or their state: they catch up before
        they are read.
      leaf_moves: whether the rows of the leaf, not only of its state, do so.
      rests: array of the state to its value at rows that do not change all the same; None if there
        are none.
      limit: the greatest number of rows that servers may create.
      kept: whether trainers store the rows that they have asked for (GEO-SGD).
      staleness: the greatest number of updates that prefetched rows may lack.
    """

    leaf: str
    name: str
    span: RowSet
    held: tuple[str, ...]
    gradients: Mapping[int, str]
    whole: bool
    moves: bool = False
    rests: Mapping[str, Any] | None = None
    limit: int | None = None
    kept: bool = False
    leaf_moves: bool = False
    staleness: int = 0

    @property
    def rows(self) -> int:
        """Return the number of its rows."""
        return self.span.rows


@dataclasses.dataclass(frozen=True, eq=False)
class ServedTables:
    """The tables of one server.

    Attributes:
      blocks: by the names of blocks.
      sized: makes the `listen_and_serv` equation of an update of so many rows of each block.
    """

    blocks: Mapping[str, TableBlock]
    sized: Callable[[Mapping[str, int]], Any]

    def __repr__(self) -> str:
        return ", ".join(self.blocks)


def room_for(count: int) -> int:
    """Return the capacity of a program that updates `count` rows."""
    size = LEAST
    while size < count:
        size *= 2
    return size


def rooms(count: int) -> Iterator[tuple[int, int, int]]:
    """Cut so many rows into runs for programs of few sizes: start and stop of each run, and the
    size of its program.

    A program takes longer to compile than to run some thousand times, so that sizes are eight times
    each other, and one that has room for twice as many rows as are left is not taken where a
    smaller one will do.
    """
    start = 0
    while start < count:
        size = LEAST
        while size < MOST and 2 * size < count - start:
            size *= 8
        yield start, min(start + size, count), size
        start += size


def resized(placement: Placement, sizes: Mapping[str, int]) -> Placement:
    """Return a placement whose blocks of tables have other numbers of rows, by their names."""

    def block(b: Block) -> Block:
        if b.name not in sizes:
            return b
        return dataclasses.replace(
            b, span=RowRange(0, sizes[b.name]), shape=(sizes[b.name], *b.shape[1:])
        )

    return placement.map(block)


def of_tables(placement: Placement, tables: Mapping[str, Any]) -> Placement:
    """Return the placement with blocks of tables written as runs of rows, also a block that has all
    of them."""
    return placement.map(lambda b: dataclasses.replace(b, is_table=True) if b.leaf in tables else b)
