"""Updates of embedding tables that touch only the rows that trainers have looked up.

An update reads these rows (`take`), computes new rows, and writes the new rows back (`put`). A
server process stores tables in NumPy memory (`table_memory`). On a mesh, a table is an array on its
server's device. `put` then returns a new array. If the old array is donated, the new array reuses
its memory.

The number of rows changes from step to step. To compile few functions, the rows are padded to one
of a few numbers (`capacity_for`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.ir.selection import retain, subset
from dtrans.parameter_server.tables.touched_rows import TableBlock, capacity_for
from dtrans.protocol.server.exchange import Exchange
from dtrans.protocol.server_blocks import RowGradient, Vectors
from dtrans.protocol.tables.table_rows import sorted_once
from dtrans.run.parameter_server.tables.table_groups import TableGroup, single_tables
from dtrans.run.parameter_server.tables.table_memory import scatter_rows
from dtrans.run.parameter_server.update import CompiledUpdate


Rows = Mapping[str, Any]


class RowUpdates:
    """A server's updates with gradients of table rows: read the rows, update them, store them.

    Args:
      tables: the server's blocks (rows of a table on this server), by name.
      take: function that returns rows of a group of blocks and of their optimizer state, padded
        with zeros.
      put: function that stores new rows of a block and of its optimizer state. It returns these
        arrays, by name.
      groups: groups of tables that the update handles together. By default, each table is a group.
      admit: function that drops the gradients of some rows: a row filter has not stored these rows
        yet. By default, all rows are stored.
    """

    def __init__(
        self,
        tables: Mapping[str, TableBlock],
        take: Callable[[TableGroup, Mapping[str, np.ndarray], int, Rows], Rows],
        put: Callable[[TableBlock, np.ndarray, Rows, Rows], Rows],
        groups: Sequence[TableGroup] | None = None,
        admit: Callable[[TableBlock, Mapping[str, RowGradient]], Rows] | None = None,
    ) -> None:
        self._tables, self._take, self._put, self._admit = tables, take, put, admit
        self._by_rows = {n: t for n, t in tables.items() if not t.updates_all}
        self._block_of: dict[str, str] = {}  # name of a gradient -> name of its block
        for n, t in tables.items():
            self._block_of |= dict.fromkeys(t.gradients.values(), n)
        self._groups = single_tables(self._by_rows) if groups is None else groups
        # name of a group -> number of its rows in the compiled update
        self._room: dict[str, int] = {}
        # name of a block -> number of its rows in the compiled function that merges gradients
        self._room_of_merge: dict[str, int] = {}

    def run(
        self,
        compiled: Callable[[Mapping[str, int]], CompiledUpdate],
        grads: Rows,
        present: Collection[int],
        state: Rows,
        watched: dict[str, Any] | None = None,
        unused: Mapping[str, Any] = {},
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Run one update as a generator, which pauses when it needs values of other servers.

        `CompiledUpdate.run` describes the generator. This method reads the rows with a gradient,
        runs the compiled update, and stores the new rows.

        Args:
          compiled: function that returns the compiled update for a number of rows of each group.
          grads: gradients by name; a gradient of a table is a `RowGradient`.
          present: ids of the trainers that contribute gradients to the update.
          state: the state before the step.
          watched: an output argument: the method adds the values that `ServerUpdate.watched` names.
          unused: as for `CompiledUpdate.run`.
        """
        if self._admit is not None:
            for t in self._by_rows.values():
                if t.row_filter is not None:
                    sent = [t.gradients[k] for k in sorted(present)]
                    grads = {**grads, **self._admit(t, subset(grads, sent))}
        ids = self._ids(grads, present)
        counts = {group.name: group.count(ids) for group in self._groups}
        sizes = _grow(self._room, counts)
        update = compiled(sizes)
        places, rooms = dict(ids), dict(sizes)
        for n, t in self._tables.items():
            if t.updates_all:
                places[n], rooms[n] = np.arange(t.rows), t.rows
        names = update.update.grad_types
        gradients: dict[str, Any] = retain(grads, names)
        for group in self._groups:
            if len(group.tables) > 1:
                gradients |= group.gradients(grads, names, ids, sizes[group.name])
        gradients = self._scattered(gradients, places, rooms)

        inputs = dict(state)
        for group in self._groups:
            inputs |= self._take(group, ids, sizes[group.name], state)
        new = yield from update.run(gradients, inputs, watched, unused)
        for group in self._groups:
            new |= self._put_group(group, ids, new, state)
        return new

    def _put_group(
        self, group: TableGroup, ids: Mapping[str, np.ndarray], new: Rows, state: Rows
    ) -> Rows:
        """Store the new rows of all tables in a group; return the arrays of these tables."""
        if len(group.tables) == 1:
            return self._put(group.tables[0], ids[group.name], new, state)
        found: dict[str, Any] = {}
        for t, rows in group.split(new, ids):
            found |= self._put(t, ids[t.name], rows, state)
        return found

    def merge(
        self,
        merge: Callable[[Rows], Rows],
        names: Collection[str],
        grads: Rows,
        present: Collection[int],
    ) -> dict[str, Any]:
        """Sum gradients over trainers, before they are sent to a backup server.

        Args:
          merge: compiled function that sums arrays.
          names: names of the gradients that `merge` reads.
          grads: gradients by name.
          present: ids of the trainers that contribute gradients to the sums.

        Returns:
          The sums by name. Gradients of tables are `RowGradient`s.
        """
        ids = self._ids(grads, present)
        sizes = _grow(self._room_of_merge, {n: len(x) for n, x in ids.items()})
        for n, t in self._tables.items():
            if t.updates_all:
                ids[n] = all_ids(t, grads, present)
                sizes[n] = capacity_for(len(ids[n]))
        merged: dict[str, Any] = {}
        for name, x in merge(self._scattered(retain(grads, names), ids, sizes)).items():
            block = self._block_of.get(name)
            if block is not None:
                x = RowGradient(ids[block], np.asarray(x)[: len(ids[block])])
            merged[name] = x
        return merged

    def _scattered(
        self, grads: Rows, ids: Mapping[str, np.ndarray], sizes: Mapping[str, int]
    ) -> dict[str, Any]:
        """Convert gradients of rows to arrays that have one row for each id, with zeros in between.

        Args:
          grads: gradients by name. Gradients that are arrays stay the same.
          ids: ids of rows, by block.
          sizes: number of rows of the arrays, by block.
        """
        arrays = dict(grads)
        for name, x in grads.items():
            block = self._block_of.get(name)
            if block is not None and isinstance(x, RowGradient):
                arrays[name] = scatter_rows(ids[block], sizes[block], x)
        return arrays

    def _ids(self, grads: Rows, present: Collection[int]) -> dict[str, np.ndarray]:
        """Return the sorted ids of all rows that have a gradient, by block."""
        return {n: all_ids(t, grads, present) for n, t in self._by_rows.items()}


def _grow(sizes: dict[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Choose the padded numbers of rows for one step, so that few functions are compiled.

    One compiled function has the rows of all blocks, so each new combination of numbers is
    compiled. To have few combinations, all numbers stay the same while they suffice. When one block
    needs more rows, the numbers of all blocks grow to a quarter more than needed. A number may be
    larger than the block's number of rows.

    Args:
      sizes: current number of rows of each block or group, by name; updated in place. Empty at
        first.
      counts: number of rows that this step needs, by name.
    """
    if not sizes:
        sizes |= {n: capacity_for(count) for n, count in counts.items()}
    elif any(count > sizes[n] for n, count in counts.items()):
        for n, count in counts.items():
            sizes[n] = max(sizes[n], capacity_for(count * 5 // 4))
    return dict(sizes)


def all_ids(
    table: TableBlock, grads: Mapping[str, RowGradient], present: Collection[int]
) -> np.ndarray:
    """Return the sorted ids of the rows for which the given trainers have sent gradients.

    Args:
      table: the block.
      grads: gradients by name.
      present: ids of the trainers.
    """
    ids = [grads[table.gradients[k]].ids for k in sorted(present)]
    return ids[0] if len(ids) == 1 else sorted_once(np.concatenate(ids))


# -- tables on devices -----------------------------------------------------------------------------


def take_padded(
    group: TableGroup, ids: Mapping[str, np.ndarray], size: int, state: Rows
) -> dict[str, jax.Array]:
    """Return a table's rows and their state from a device, padded to `size` with zeros.

    Args:
      group: a group that consists of this table only.
      ids: ids of the rows, by block.
      size: the number of rows of the result.
      state: the block and its optimizer state, by name.
    """
    (table,) = group.tables
    return take_rows(table, pad_ids(ids[table.name], size, table.rows), state)


def take_rows(table: TableBlock, ids: Any, state: Rows) -> dict[str, jax.Array]:
    """Return rows of a table and of its optimizer state; zeros for ids beyond the table."""
    return {n: _take(state[n], ids) for n in table.arrays}


def put_rows(table: TableBlock, ids: Any, new: Rows, state: Rows) -> dict[str, jax.Array]:
    """Return a table and its optimizer state with some new rows; ignore ids beyond the table."""
    return {n: _put(state[n], ids, new[n]) for n in table.arrays}


def put_padded(
    table: TableBlock, ids: np.ndarray, new: Rows, state: Rows, *, donate: bool = True
) -> dict[str, jax.Array]:
    """Return a table and its optimizer state on a device, with some new rows.

    Args:
      table: the table's block.
      ids: the ids of the rows that the update has changed.
      new: rows by name. Rows after the first len(ids) are padding.
      state: the state before the step.
      donate: True to reuse the memory of the block and of its state.
    """
    put, found = _put_donated if donate else _put, {}
    for n in table.arrays:
        found[n] = put(state[n], pad_ids(ids, len(new[n]), table.rows), new[n])
    return found


def read_rows(block: jax.Array, ids: np.ndarray) -> np.ndarray:
    """Copy rows of a device array to the host."""
    size = capacity_for(len(ids))
    return np.asarray(_take(block, pad_ids(ids, size, len(block))))[: len(ids)]


def pad_ids(ids: np.ndarray, size: int, rows: int) -> np.ndarray:
    """Pad row ids to length `size` with the table's number of rows, which is no valid id.

    For a table of 9 rows, [1, 4] and size 4 give [1, 4, 9, 9].
    """
    return np.concatenate([ids, np.full(size - len(ids), rows)]).astype(np.int32)


@jax.jit
def _take(block: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(block, ids, 0, mode="fill", fill_value=0)


def _with(block: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return block.at[ids].set(rows, mode="drop")


_put = jax.jit(_with)
_put_donated = jax.jit(_with, donate_argnums=0)
