"""Updates of servers, written for the rows that trainers looked up.

`dtrans.slicing.server_update` writes them, for blocks with a capacity. Looked-up rows come first,
with the rows of their state; the remaining rows have a gradient of zero. Programs are compiled for
a few capacities only. Those of updates are powers of two (`room_for`). Programs that initialise
rows, or apply missed steps, have capacities with a ratio of eight (`rooms`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dtrans.rows.writer import RowRange, RowSet
from dtrans.slicing.blocks import Block, Placement


LEAST = 16  # the least capacity, in rows
MOST = 1 << 16  # the most rows that one call initialises, or applies missed steps to


@dataclasses.dataclass(frozen=True, eq=False)
class TableBlock:
    """A server's rows of a table.

    Attributes:
      leaf: name of the table.
      name: name of the block.
      span: the block's rows of the table.
      arrays: names of the block, and of state arrays that have a row for each of its rows.
      gradients: trainer to the name under which it sends the gradient of rows.
      updates_all: True if each update touches all rows.
      moves: True if rows that no trainer looked up change too, or their state. They catch up before
        a trainer reads them.
      leaf_moves: True if such rows of the leaf change, not only those of its state.
      rests: state array to the value at which its rows do not change; None if all rows change.
      limit: the most rows that servers may create.
      on_trainers: True if trainers store the rows that they looked up (GEO-SGD).
      staleness: the most updates that prefetched rows may lack.
    """

    leaf: str
    name: str
    span: RowSet
    arrays: tuple[str, ...]
    gradients: Mapping[int, str]
    updates_all: bool
    moves: bool = False
    rests: Mapping[str, Any] | None = None
    limit: int | None = None
    on_trainers: bool = False
    leaf_moves: bool = False
    staleness: int = 0

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return self.span.rows


@dataclasses.dataclass(frozen=True, eq=False)
class ServedTables:
    """Tables of one server.

    Attributes:
      blocks: the server's blocks of tables, by name.
      sized: returns the `listen_and_serv` equation for blocks with these numbers of rows, by name.
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
    """Cut `count` rows into runs: yield each run's start and stop, and its program's capacity.

    A program takes longer to compile than to run a thousand times. So there are few capacities,
    each eight times the one before. A run gets the least one that covers half the remaining rows.
    """
    start = 0
    while start < count:
        size = LEAST
        while size < MOST and 2 * size < count - start:
            size *= 8
        yield start, min(start + size, count), size
        start += size


def resized(placement: Placement, sizes: Mapping[str, int]) -> Placement:
    """Return a placement whose blocks have different numbers of rows, by name."""

    def resize(b: Block) -> Block:
        if b.name not in sizes:
            return b
        return dataclasses.replace(
            b, span=RowRange(0, sizes[b.name]), shape=(sizes[b.name], *b.shape[1:])
        )

    return placement.map(resize)


def mark_tables(placement: Placement, tables: Mapping[str, Any]) -> Placement:
    """Return a placement with the blocks of tables marked; updates see them as runs of rows.

    Args:
      tables: a mapping or set with the names of tables.
    """
    return placement.map(lambda b: dataclasses.replace(b, is_table=True) if b.leaf in tables else b)
