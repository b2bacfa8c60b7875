"""Groups of embedding tables that one small program (optimize block) updates together.

A model may have many tables with a few updated rows each, and one update for each would be slow.
The optimize blocks (small programs) of tables with equal rows and one optimizer differ only in
names. Such tables form a *group*. One block then updates the rows of all tables of the group. Each
of its arrays has the rows of the first table, then those of the next tables, then padding. A group
has the name of its first table. Any other table is a group of one table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.ir.fingerprint import canonical_text
from dtrans.ops import OptimizeBlock
from dtrans.parameter_server.tables.touched_rows import LEAST, TableBlock
from dtrans.run.parameter_server.tables.table_memory import fill_rows
from dtrans.run.parameter_server.update import ServerUpdate


@dataclasses.dataclass(frozen=True, eq=False)
class TableGroup:
    """Embedding tables that one small program (optimize block) updates together.

    Attributes:
      tables: the blocks (rows on this server) of the tables.
    """

    tables: tuple[TableBlock, ...]

    @property
    def name(self) -> str:
        """Name of the group: the name of its first table."""
        return self.tables[0].name

    def count(self, ids: Mapping[str, np.ndarray]) -> int:
        """Return the total number of rows to update.

        Args:
          ids: ids of the rows to update in each table, by name.
        """
        return sum(len(ids[t.name]) for t in self.tables)

    def spans(self, ids: Mapping[str, np.ndarray]) -> list[tuple[TableBlock, slice]]:
        """Return the positions of each table's rows in the arrays of the group, as (table, slice).

        Args:
          ids: ids of the rows to update in each table, by name.
        """
        found, start = [], 0
        for t in self.tables:
            stop = start + len(ids[t.name])
            found.append((t, slice(start, stop)))
            start = stop
        return found

    def gradients(
        self,
        grads: Mapping[str, Any],
        names: Container[str],
        ids: Mapping[str, np.ndarray],
        size: int,
    ) -> dict[str, np.ndarray]:
        """Return the gradients of all tables, as one array for each trainer.

        The array has the name of the trainer's gradient of the first table.

        Args:
          grads: gradients by name; gradients of tables are `RowGradient`s.
          names: names of the gradients that the update reads.
          ids: row ids in each table, by name.
          size: number of rows of each array.
        """
        found = {}
        for k, name in self.tables[0].gradients.items():
            if name not in names:
                continue
            rows = grads[name].rows
            array = np.empty((size, *rows.shape[1:]), rows.dtype)
            for t, at in self.spans(ids):
                fill_rows(array[at], ids[t.name], grads[t.gradients[k]])
            array[self.count(ids) :] = 0
            found[name] = array
        return found

    def split(
        self, new: Mapping[str, Any], ids: Mapping[str, np.ndarray]
    ) -> list[tuple[TableBlock, dict[str, np.ndarray]]]:
        """Divide the arrays of the group into arrays for each table.

        Args:
          new: the arrays of the group, by name.
          ids: ids of the rows in each table, by name.
        """
        arrays = [np.asarray(new[n]) for n in self.tables[0].arrays]
        found = []
        for t, at in self.spans(ids):
            found.append((t, {n: x[at] for n, x in zip(t.arrays, arrays, strict=True)}))
        return found


def single_tables(tables: Mapping[str, TableBlock]) -> list[TableGroup]:
    """Return groups in which each table is alone, so that each table has its own update."""
    return [TableGroup((t,)) for t in tables.values()]


def group_tables(update: ServerUpdate, tables: Mapping[str, TableBlock]) -> list[TableGroup]:
    """Find the tables of a server that can be updated together; return groups of tables.

    Args:
      update: the server's update.
      tables: the blocks of tables with updates that change only some rows, by name.
    """
    if len(tables) < 2 or len(update.phases) != 1 or update.phases[0].ends is not None:
        return single_tables(tables)
    # With equal numbers of rows, the blocks of tables of different lengths can be compared.
    blocks = update.sized(dict.fromkeys(tables, LEAST)).blocks
    owners = dict[str, str]()  # name of an array or of a gradient -> name of its table
    for t in tables.values():
        owners |= dict.fromkeys((*t.arrays, *t.gradients.values()), t.name)
    blocks_of: dict[str, list[OptimizeBlock]] = {n: [] for n in tables}
    shared: set[str] = set()  # tables that share a block with other tables
    for block in blocks:
        sent = itertools.chain.from_iterable(g.sent.values() for g in block.grads)
        names = (*block.in_names, *block.out_names, *sent)
        touched = {owners[n] for n in names if n in owners}
        for name in touched:
            blocks_of[name].append(block)
        if len(touched) > 1:
            shared |= touched

    groups: dict[Hashable, list[TableBlock]] = {}
    for t in tables.values():
        kind = t.name if t.name in shared else _kind(t, blocks_of[t.name])
        groups.setdefault(kind, []).append(t)
    return [TableGroup(tuple(x)) for x in groups.values()]


def _kind(table: TableBlock, blocks: Sequence[OptimizeBlock]) -> Hashable:
    """Return a key that is equal for two tables if they can be updated together.

    Args:
      table: the block of a table.
      blocks: the optimize blocks (small programs) that read or write the table's arrays, or read
        its gradients.
    """
    if len(blocks) != 1 or blocks[0].name != table.name or len(blocks[0].grads) != 1:
        return table.name
    (block,), (gradient,) = blocks, blocks[0].grads
    if not set(table.arrays).issuperset(block.out_names):
        return table.name
    # In the result, numbers replace the names of the table's arrays and of its gradient.
    numbers = {n: i for i, n in enumerate((*table.arrays, gradient.name))}
    inputs = tuple(numbers.get(n, n) for n in block.in_names)
    outputs = tuple(numbers.get(n, n) for n in block.out_names)
    text = canonical_text(block.jaxpr)
    return text, inputs, outputs, block.role, gradient.op, tuple(table.gradients)


def size_groups(
    update: ServerUpdate, groups: Sequence[TableGroup], sizes: Mapping[str, int]
) -> ServerUpdate:
    """Return an update in which one optimize block (small program) updates each group of tables.

    Args:
      update: the server's update.
      groups: the groups of its tables.
      sizes: number of rows of each group, by name.
    """
    others: dict[str, int] = {}
    for group in groups:
        others |= dict.fromkeys((t.name for t in group.tables[1:]), LEAST)
    sized = update.sized({**others, **sizes})
    blocks = tuple(b for b in sized.blocks if b.name not in others)
    params = {**sized.eqn.params, "optimize_blocks": blocks}
    return dataclasses.replace(sized, eqn=sized.eqn.replace(params=params))
