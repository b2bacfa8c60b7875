"""State of a synchronous server, and its update, one step at a time.

An optimizer may need values of several servers, such as a gradient norm. Then the update pauses at
each exchange of vectors between servers, and continues when the other servers' vectors have
arrived.

Updates of embedding tables touch only the rows that trainers have looked up
(`dtrans.run.parameter_server.tables`). One block updates the rows of a group of tables
(`dtrans.run.parameter_server.tables.table_groups`). If an optimizer must touch every row, the
update scatters the gradients of rows into zeros. It then updates the table like any other
parameter.

A large update can be divided into parts (`dtrans.run.parameter_server.update_parts`). Each part
runs as soon as its gradients have arrived. The state before the step stays valid until the last
part is complete. If several parts update one array, the array is stored in pieces (`RowPieces`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dtrans.ir.array_fns import words
from dtrans.ir.selection import subset
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.row_pieces import RowPieces
from dtrans.protocol.server.exchange import Exchange
from dtrans.protocol.server.trainer_registry import log, named
from dtrans.protocol.server_blocks import RowGradient, UpdatePart, Vectors
from dtrans.run.parameter_server.tables.grouped_rows import GroupedRows
from dtrans.run.parameter_server.tables.row_updates import RowUpdates
from dtrans.run.parameter_server.tables.sent_tables import sent_arrays
from dtrans.run.parameter_server.tables.server_tables import ServerTables
from dtrans.run.parameter_server.tables.table_groups import (
    TableGroup,
    group_tables,
    size_groups,
)
from dtrans.run.parameter_server.tables.table_memory import (
    final_arrays,
    memory_of,
    snapshot_arrays,
    take_together,
)
from dtrans.run.parameter_server.update import (
    CompiledUpdate,
    ServerUpdate,
    compile_merge,
    copy_state,
)
from dtrans.run.parameter_server.update_parts import PartUpdate, UpdateByParts


class SyncUpdate:
    """State of one synchronous server, and its compiled update.

    Args:
      update: the server's update, which uses the gradients of all trainers.
      state: the initial values, by name. With parts, the object copies them.
      trainers: the number of trainers.
      like: an earlier object for the same update; its compiled functions are used again.
      steps: number of updates that `state` already contains.
      keeps_old: True to store the state before the newest one, too.
      merges: True if `begin` takes the gradients that `merge` returns.
      parts: parts of the update that run as soon as their gradients arrive. With parts, the object
        also stores the optimizer state before the newest one. The next update reuses the memory of
        this older state.

    Attributes:
      state: the arrays by name, with tables in `TableMemory`, and divided arrays as `RowPieces`.
      values: the parameters as NumPy arrays or `RowPieces`. Messages are sent from their memory.
      exchange: the exchange with other servers at which the update pauses; None between updates.
      server_tables: reports and evicts rows of tables.
      spent: names of the state arrays that an update overwrites, to reuse their memory.
      before: function that is called before each update.
      old: the state before the newest one; None before the first update, during an update, and
        without `keeps_old`. Its tables are snapshots, which have the old values of changed rows.
    """

    def __init__(
        self,
        update: ServerUpdate,
        state: Mapping[str, Any],
        trainers: int,
        like: SyncUpdate | None = None,
        steps: int = 0,
        *,
        keeps_old: bool = False,
        merges: bool = False,
        parts: Sequence[PartUpdate] = (),
    ) -> None:
        self.parts: Sequence[UpdatePart] = [x.part for x in parts]
        before = None if like is None else like._by_parts
        self._by_parts: UpdateByParts = UpdateByParts(parts, before)
        self.exchange: Exchange | None = None
        spent = itertools.chain.from_iterable(phase.spent for phase in update.phases)
        self.spent = frozenset(spent)
        self.before: Callable[[], object] = lambda: None
        self._tables = memory_of(update, state)
        self._grouped = GroupedRows(self._tables)
        self._steps = steps
        self.server_tables = ServerTables(
            update.endpoint,
            update.tables,
            self._tables,
            lambda: self.state,
            lambda name: self._steps,
        )
        # Values of the current step; rows without a gradient read them later, when they catch up.
        self._watched: dict[str, Any] = {}
        watched = itertools.chain.from_iterable(table.reads for table in self._tables.values())
        self._with_all = dataclasses.replace(update, watched=frozenset(watched))
        self._update = self._with_all.merged() if merges else self._with_all
        self._grad_names: dict[frozenset[int], frozenset[str]] = {}
        self._merges, self._trainers = merges, frozenset(range(trainers))
        # trainers whose gradients the newest update uses
        self._present: frozenset[int] = self._trainers if like is None else like._present
        # (ids of the trainers whose gradients are used, rows of each group) -> compiled update
        self._compiled: dict[tuple[frozenset[int], tuple[int, ...]], CompiledUpdate] = {}
        # ids of the trainers whose gradients are merged -> compiled function
        self._merging: dict[frozenset[int], Callable[..., dict[str, jax.Array]]] = {}
        if like is not None:
            self._compiled, self._merging = like._compiled, like._merging
        self._run: Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]] | None = None
        by_rows = {n: update.tables[n] for n in self._tables}
        self._groups: Sequence[TableGroup] = (
            group_tables(update, by_rows) if like is None else like._groups
        )
        self._by_rows = RowUpdates(update.tables, self._take, self._put, self._groups, self._admit)
        self.old: dict[str, Any] | None = None
        self._keeps_old = keeps_old
        # with `keeps_old` or parts: arrays whose memory the next update reuses
        self._unused: dict[str, Any] = {}
        arrays = itertools.chain.from_iterable(t.table.arrays for t in self._tables.values())
        self._dense_spent = self.spent.difference(arrays)
        self._old_tables: dict[str, Any] = {}
        self._reuses_old = keeps_old or bool(parts)
        if parts:
            self._unused = self._by_parts.divide(subset(state, self._dense_spent))
            state = self._by_parts.divide(state)
        elif keeps_old:
            self._unused = copy_state(subset(state, self._dense_spent))
        self.state: dict[str, Any] = dict(state)
        for table in self._tables.values():
            self.state |= table.arrays
        self._publish()

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """Begin the update of a step, and run it up to the first exchange with other servers.

        Args:
          grads: gradients by name.
          present: ids of the trainers that contribute gradients to the update.
          step: the number of the step.

        Returns:
          The vectors to send to other servers; None if the update is complete.
        """
        if not self._merges:
            self._note_present(present, step)
        if self.parts:
            for number in self._by_parts.missing:
                self.update_part(number, grads, present, step)
            self._end({**self.state, **self._by_parts.end()})
            return None
        self.before()
        compiled = lambda sizes: self._compile(present, sizes)
        self._watched = {}
        unused, self._unused, self.old = self._unused, {}, None
        if self._keeps_old:
            self._remember_tables()
        self._run = self._by_rows.run(compiled, grads, present, self.state, self._watched, unused)
        return self.go_on(None)

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """Continue the update up to its next exchange with other servers.

        Args:
          arrived: the other servers' vectors of the last exchange; None at the start.

        Returns:
          The vectors to send to other servers; None if the update is complete.
        """
        assert self._run is not None
        try:
            if arrived is None:
                self.exchange, outgoing = next(self._run)
            else:
                self.exchange, outgoing = self._run.send(arrived)
        except StopIteration as end:
            self._run = self.exchange = None
            self._end(end.value)
            return None
        return outgoing

    def _end(self, new: dict[str, Any]) -> None:
        """Replace the state by the result of an update; make the new parameters ready to send."""
        self._steps += 1
        if self._keeps_old:
            self.old = {**self.state, **self._old_tables}
        if self._reuses_old:
            self._unused = subset(self.state, self._dense_spent)
        self.state = new
        if self._update.exchanges:
            # Later messages overwrite the memory of gradients and received vectors. So this method
            # waits until the computation has read them.
            jax.block_until_ready(self.state)
        self._publish()

    def update_part(
        self, number: int, grads: Mapping[str, Any], present: frozenset[int], step: int
    ) -> Mapping[str, Any]:
        """Run one part of the update early; `begin` runs the remaining parts later.

        Args:
          number: index of the part.
          grads: gradients by name; the gradients of the part must be among them.
          present: ids of the trainers that contribute gradients to the update.
          step: the number of the step.

        Returns:
          The new parameters of the part, by name.
        """
        if len(self._by_parts.missing) == len(self.parts):
            self.before()
            self._watched, self.old = {}, None
        return self._by_parts.run(number, grads, present, self.state, self._unused)

    def _compile(self, present: frozenset[int], sizes: Mapping[str, int]) -> CompiledUpdate:
        """Return the compiled update for the present trainers, and for these numbers of table rows.

        The first call with the same arguments compiles the update.

        Args:
          present: ids of the trainers that contribute gradients to the update.
          sizes: maps the name of each group of tables to the number of rows to update.
        """
        key = present, tuple(sizes.values())
        if key in self._compiled:
            return self._compiled[key]
        update = self._with_all
        if sizes:
            update = size_groups(update, self._groups, sizes)
        if self._merges:
            update = update.merged()
        elif present < self._trainers:
            update = update.sent_by(present)
        self._compiled[key] = CompiledUpdate(update, keeps_old=self._reuses_old)
        return self._compiled[key]

    def merge(
        self, grads: Mapping[str, Any], present: frozenset[int], step: int
    ) -> Mapping[str, Any]:
        """Return the sums of gradients over trainers, by name, for this server and its backup.

        Args:
          grads: gradients of all trainers, by name.
          present: ids of the trainers that contribute gradients to the sums.
          step: the number of the step.
        """
        self._note_present(present, step)
        if present not in self._merging:
            self._merging[present] = compile_merge(self._with_all, present)
        if present not in self._grad_names:
            self._grad_names[present] = frozenset(self._with_all.sent_by(present).grad_types)
        merge, names = self._merging[present], self._grad_names[present]
        merged = self._by_rows.merge(merge, names, grads, present)
        # Later messages overwrite the memory of the gradients.
        jax.block_until_ready([x for x in merged.values() if isinstance(x, jax.Array)])
        return merged

    def _note_present(self, present: frozenset[int], step: int) -> None:
        """Write to the log if a trainer has left, so that updates no longer use its gradients.

        Args:
          present: ids of the trainers that contribute gradients to the next update.
          step: the number of the step.
        """
        if present < self._present:
            _log_gone(self._update.endpoint, self._trainers - present, present, step)
        self._present = present

    def newest(self) -> dict[str, Any]:
        """Return the state after the last update by name, with a snapshot of each table."""
        return {**self.state, **snapshot_arrays(self._tables)}

    def evict(self, name: str, unused_for: int) -> None:
        """Evict rows of a table's block, in a backup's copy of another server's state.

        Args:
          name: name of the block.
          unused_for: a row without a gradient in the last `unused_for` steps is evicted.
        """
        self.server_tables.evict(name, unused_for, np.empty(0, np.int32))

    def state_blocks(self) -> tuple[list[tuple[str, np.ndarray]], dict[str, int]]:
        """Return the full state as arrays that can be sent to a backup server.

        `dtrans.run.parameter_server.tables.sent_tables` describes the arrays of tables.

        Returns:
          A list of pairs (name, array). And for the arrays of tables, a dict from name to number of
          rows.
        """
        blocks, rows = sent_arrays(self._tables)
        for n, x in self.state.items():
            if n not in rows:
                blocks.append((n, np.asarray(words(x))))
        return blocks, rows

    def _publish(self) -> None:
        """Wait until the new parameters are computed, and store them in `values` for messages."""
        names = (*self._update.params, *self._update.tables)
        self.values = {n: _sent(self.state[n]) for n in names if n not in self._tables}

    # -- tables ----------------------------------------------------------------------------------

    def _take(
        self,
        group: TableGroup,
        ids: Mapping[str, np.ndarray],
        size: int,
        state: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        return take_together([(self._tables[t.name], ids[t.name]) for t in group.tables], size)

    def _admit(
        self, table: TableBlock, gradients: Mapping[str, RowGradient]
    ) -> Mapping[str, RowGradient]:
        return self._tables[table.name].admit(gradients)

    def _put(
        self, table: TableBlock, ids: np.ndarray, new: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return self._tables[table.name].put(ids, new, self._watched)

    def create_rows(self, ids: Mapping[str, np.ndarray]) -> None:
        """Create the table rows that do not exist yet, in one call for several tables if possible.

        Args:
          ids: ids of the rows in each table's block, by the block's name.
        """
        self._grouped.create(ids)

    def rows(self, name: str, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Return current rows of a block (a table's rows on this server).

        Args:
          name: name of the block.
          ids: ids of the rows in the block.
          train: True if gradients of these rows will follow.
        """
        if name in self._tables:
            return self._tables[name].rows(ids, train=train)
        rows: np.ndarray = self.values[name][ids]
        return rows

    def tables(self) -> dict[str, Any]:
        """Return all rows of tables, and their optimizer state, after the last step, by name."""
        return final_arrays(self._tables)

    def _remember_tables(self) -> None:
        """Start to record the old values of rows that the next update changes, for `old`.

        The old values of the previous step are dropped.
        """
        for x in self._old_tables.values():
            x.table.close()
        self._old_tables = snapshot_arrays(self._tables)

    def snapshot(self, patience: float) -> dict[str, Any]:
        """Return a snapshot of each table, for another thread to read during updates.

        Args:
          patience: seconds that updates wait for a reader that makes no progress.
        """
        return snapshot_arrays(self._tables, patience)


def _sent(x: Any) -> Any:
    """Wait until a parameter is computed; return it as a NumPy array or `RowPieces`."""
    if isinstance(x, RowPieces):
        return RowPieces([np.asarray(words(array)) for array in x.arrays])
    return np.asarray(words(x))


def _log_gone(endpoint: str, gone: frozenset[int], present: frozenset[int], step: int) -> None:
    log.warning(
        "pserver %s continues without %s: step %d and later steps use gradients of %s",
        endpoint,
        named(sorted(gone)),
        step + 1,
        named(sorted(present)),
    )
