"""Updates of servers, written for only those table rows that trainers looked up.

A compiled program has a fixed number of rows, its *capacity*. But each step looks up another number
of rows. So an update gets the looked-up rows, and additional rows with a gradient of zero up to the
capacity. To limit the number of compiled programs, the capacity of an update is a power of two
(`capacity_for`). Two other kinds of programs have the capacities 16, 128, 1024, ...
(`split_by_capacity`). One kind initialises rows. The other applies updates late, to rows that no
trainer had looked up at the time of the update. `dtrans.slicing.server_update` writes the updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dtrans.parameter_server.tables.options import RowFilter
from dtrans.rows.writer import RowRange, RowSet
from dtrans.slicing.blocks import Block, Placement


LEAST = 16  # smallest capacity, in rows
MOST = 1 << 16  # capacities in `split_by_capacity` grow up to this number of rows


@dataclasses.dataclass(frozen=True, eq=False)
class TableBlock:
    """Part of a table's rows that one server stores.

    Attributes:
      leaf: name of the table.
      name: name of the block.
      span: the rows of the table that are in the block.
      arrays: names of the block, and of the state arrays that have a row for each row of the block.
      gradients: maps each trainer id to the name under which the trainer sends gradients of the
        block.
      updates_all: True if each update runs on all rows.
      changes_other_rows: True if an update also changes rows that no trainer looked up, or their
        optimizer state, for example by momentum. Servers apply these changes later, before a
        trainer reads the row.
      leaf_moves: True if these changes include the rows of the leaf, not only their optimizer
        state.
      initial_values: the initial value of each state array, by name, if every row keeps it until
        the row's first lookup. None if a row may change before.
      limit: the maximum number of rows of the block that the server may create; None for no limit.
      on_trainers: True if trainers store the rows that they looked up (GEO-SGD).
      staleness: the maximum number of updates that rows from `job.prefetch` may miss.
      row_filter: the condition under which the server begins to store a row; None if the first
        lookup creates the row.
    """

    leaf: str
    name: str
    span: RowSet
    arrays: tuple[str, ...]
    gradients: Mapping[int, str]
    updates_all: bool
    changes_other_rows: bool = False
    initial_values: Mapping[str, Any] | None = None
    limit: int | None = None
    on_trainers: bool = False
    leaf_moves: bool = False
    staleness: int = 0
    row_filter: RowFilter | None = None

    @property
    def rows(self) -> int:
        """The number of rows in the block."""
        return self.span.rows


@dataclasses.dataclass(frozen=True, eq=False)
class ServedTables:
    """Tables of one server.

    Attributes:
      blocks: the server's blocks of tables, by name.
      sized: function that returns a `listen_and_serv` equation for other numbers of rows:
        `sized({"params/emb.block0": 64})`. A server calls it when a step looks up more rows than
        before.
    """

    blocks: Mapping[str, TableBlock]
    sized: Callable[[Mapping[str, int]], Any]

    def __repr__(self) -> str:
        return ", ".join(self.blocks)


def capacity_for(count: int) -> int:
    """Return the capacity of a program that updates `count` rows: a power of two, at least 16."""
    size = LEAST
    while size < count:
        size *= 2
    return size


def split_by_capacity(count: int) -> Iterator[tuple[int, int, int]]:
    """Divide `count` rows among several calls of programs; yield (start, stop, capacity) of each.

    A program has a fixed number of rows, its capacity. Compiling it takes longer than a thousand
    calls. So there are few capacities, each eight times the previous one. A call uses the smallest
    capacity that covers half of the remaining rows.
    """
    start = 0
    while start < count:
        size = LEAST
        while size < MOST and 2 * size < count - start:
            size *= 8
        yield start, min(start + size, count), size
        start += size


def resized(placement: Placement, sizes: Mapping[str, int]) -> Placement:
    """Return a copy of a placement in which some blocks have other numbers of rows.

    Args:
      placement: the placement to copy.
      sizes: the new numbers of rows, by block name.
    """

    def resize(b: Block) -> Block:
        if b.name not in sizes:
            return b
        return dataclasses.replace(
            b, span=RowRange(0, sizes[b.name]), shape=(sizes[b.name], *b.shape[1:])
        )

    return placement.map(resize)


def mark_tables(placement: Placement, tables: Mapping[str, Any]) -> Placement:
    """Return the placement with `is_table` set for all blocks of tables.

    The number of a table's rows on a server changes during a job. With `is_table`, the update of a
    block can be written for any number of rows, even if the block is the full leaf.

    Args:
      placement: the placement to copy.
      tables: a mapping with the names of tables as keys.
    """

    def mark(b: Block) -> Block:
        if b.leaf not in tables:
            return b
        return dataclasses.replace(b, is_table=True)

    return placement.map(mark)
