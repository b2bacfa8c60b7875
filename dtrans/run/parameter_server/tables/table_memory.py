"""Rows of an embedding table in one server's memory, which lookups read and updates change.

A *block* has the rows of a table on one server. A row *exists* if it is stored. It is initialized
and stored on its first use in a step (`dtrans.run.parameter_server.tables.new_rows`).

Updates are compiled for a few numbers of rows
(`dtrans.parameter_server.tables.touched_rows.capacity_for`). Rows, state and gradients are padded
with zeros to such a number, and the outputs for padding are dropped.

With an optimizer such as Adam, an update also changes rows without gradients. These rows skip the
update. They make up for skipped updates before they are read
(`dtrans.run.parameter_server.tables.missed_steps`).

With a row filter, lookups create no rows. Before each update, the filter counts the update for each
row with a gradient. It drops the gradients of rows that it does not admit (store) yet.

`dtrans.run.parameter_server.tables.stored_rows` stores the rows, and the step that has last changed
each row. Rows without a recent update can be evicted. An evicted row has its initial value when it
is used again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.checkpoint.orbax_io import check_first
from dtrans.checkpoint.saved_rows import (
    ArrayLike,
    SavedTable,
    TableArray,
    TableRows,
    split_counts,
)
from dtrans.errors import StateError, WireError
from dtrans.ir.selection import values_at
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.row_directory import (
    DirectoryPart,
    RowDirectory,
    find_together,
    put_together,
)
from dtrans.protocol.tables.table_rows import are_among, sorted_once
from dtrans.run.parameter_server.tables.missed_steps import RESTS, MissedSteps
from dtrans.run.parameter_server.tables.new_rows import KnownRows, NewRows, RowMaker
from dtrans.run.parameter_server.tables.row_draws import RowDraws
from dtrans.run.parameter_server.tables.row_snapshot import RowSnapshot
from dtrans.run.parameter_server.tables.stored_rows import StoredRows
from dtrans.run.parameter_server.update import ServerUpdate


CHUNK = 1 << 16  # number of rows that are compared with their initial values at once


class TableMemory:
    """Memory of one block (an embedding table's rows on one server) and of its optimizer state.

    Args:
      update: the server's update.
      table: description of the block.
      state: the initial values, by name.

    Attributes:
      table: description of the block.
      stored: the rows that exist.
      arrays: NumPy arrays by name: the block, and each array of optimizer state that has a row for
        each row of the block. The index of a row is its slot in `stored`.
      reads: names of the values that `put` needs from each update.
      evicted: the number of evicted rows so far.
      step: the number of updates, including updates before the restored checkpoint.
      maker: initializes rows; None if rows cannot be initialized again.
      missed: updates that rows have skipped; None if updates change only rows with a gradient.
    """

    def __init__(
        self,
        update: ServerUpdate,
        table: TableBlock,
        state: Mapping[str, Any],
        directory: DirectoryPart,
    ) -> None:
        self.table = table
        initial = values_at(state, table.arrays)
        saved = _saved_rows(table, initial)
        self.maker = _maker_of(saved, initial)
        self._snapshots: list[RowSnapshot] = []
        # Cache: the ids of the last search, their slots, and True if all of these rows are known to
        # exist. A step reads rows and writes the same rows.
        self._found: tuple[np.ndarray | None, np.ndarray, bool] = None, np.empty(0, np.int64), False
        types = dict(zip(table.arrays, initial, strict=True))
        arrays: list[np.ndarray] = []
        if saved is None and self.maker is None:
            arrays = [np.array(x) for x in initial]
        self.stored = StoredRows(types, directory if self.maker is not None else None, arrays)
        self.arrays = self.stored.arrays
        self.evicted = self.step = 0
        if saved is not None:
            self._load(saved)
        elif self.maker and not isinstance(initial[0], NewRows):
            self._store_changed([np.asarray(x) for x in initial], self.maker)
        self.missed: MissedSteps | None = None
        if table.changes_other_rows:
            self.missed = MissedSteps(update, table, self.stored.seen)
            self.missed.start_from(self.arrays, self.stored.count)
        self.reads = () if self.missed is None else tuple(self.missed.reads)
        self._draws: RowDraws | None = None

    @property
    def count(self) -> int:
        """The number of rows that exist."""
        return self.stored.count

    def _load(self, saved: TableRows) -> None:
        """Load the rows that a checkpoint contains.

        Raises:
          StateError: this job's init and the init of the checkpoint's job return different rows.
        """
        if self.maker is not None and isinstance(saved, SavedTable):
            ids, probe = saved.probe
            for n, old, new in zip(saved.names, probe, self.maker(ids), strict=True):
                check_first(n, old, new)
        self.step, self.evicted = saved.step, saved.evicted
        for segment in saved.segments():
            exists = segment.changed > 0
            self.stored.add(segment.ids[exists], segment.rows, segment.changed[exists])
            self.stored.mark_missing(segment.ids[~exists], segment.changed[~exists])

    def _store_changed(self, initial: Sequence[np.ndarray], maker: RowMaker) -> None:
        """Store only rows that differ from the initial values; `maker` computes these values."""
        for at in range(0, self.table.rows, CHUNK):
            ids = np.arange(at, min(at + CHUNK, self.table.rows))
            chunks = [x[ids] for x in initial]
            is_new = np.ones(len(ids), bool)
            for x, new in zip(chunks, maker(ids), strict=True):
                is_new &= _equal_bits(x, new)
            self.stored.add(ids[~is_new], [x[~is_new] for x in chunks], 1)

    def rows(self, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Return current rows, for a trainer's lookup.

        Args:
          ids: sorted ids.
          train: True if a gradient of these rows will follow. New rows are then stored, unless the
            table has a row filter. If False, new rows are only computed.
        """
        rows, slots = self.arrays[self.table.name], self._slots(ids)
        creates = train and self.table.row_filter is None
        if not creates and (self.missed is None or self.missed.rests):
            exists = slots >= 0
            if not exists.all():
                assert self.maker is not None
                self._catch_up(slots[exists])
                found = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
                found[exists] = rows[slots[exists]]
                found[~exists] = self.maker(ids[~exists])[0]
                return found
        return rows.take(self._current(ids, slots), 0, mode="clip")

    def admit(self, gradients: Mapping[str, RowGradient]) -> Mapping[str, RowGradient]:
        """Remove the gradients of rows that the table's row filter does not store yet.

        Without a row filter, all gradients are returned.

        Args:
          gradients: the gradients of this block, by name. With delay compensation, the values also
            include the rows that the trainer has received.

        Raises:
          StateError: the number of rows would exceed the table's limit.
        """
        if self.table.row_filter is None:
            return gradients
        ids = sorted_once(np.concatenate([x.ids for x in gradients.values()]))
        admitted = ids[self._filter(ids)]
        found = {}
        for n, x in gradients.items():
            at = are_among(x.ids, admitted)
            found[n] = RowGradient(x.ids[at], x.rows[at])
        return found

    def _filter(self, ids: np.ndarray) -> np.ndarray:
        """Apply the row filter: count an update for each row; return a mask of the rows to update.

        A row is updated if it is stored already, or if the filter decides to store it now.

        Args:
          ids: sorted ids of the rows with a gradient.
        """
        how, exists = self.table.row_filter, self.stored.slots(ids) >= 0
        assert how is not None
        new = ids[~exists]
        if not len(new):
            return exists
        counts = self.stored.counts(new) + 1
        is_admitted = counts >= how.count
        if how.count == 1:
            is_admitted = self._draw(new) < how.probability
        # The error ends the server, unlike the WireError of `store`, which ends only one trainer.
        # Without this trainer, the server would repeat the update, and count it twice.
        if why := self._limit_error(int(is_admitted.sum())):
            raise StateError(why)
        if how.count > 1:
            waiting = new[~is_admitted]
            self._before(waiting)
            self.stored.set_counts(waiting, counts[~is_admitted])
            self._found = None, waiting, False
        is_changed = exists.copy()
        is_changed[~exists] = is_admitted
        return is_changed

    def _draw(self, ids: np.ndarray) -> np.ndarray:
        """Return a random number in [0, 1) for each row, for the filter's decision."""
        if self._draws is None:
            assert self.maker is not None
            self._draws = RowDraws(self.table.leaf, self.maker.args)
        return self._draws(self.table.span.in_leaf(ids), self.step)

    def take(self, ids: np.ndarray, size: int) -> dict[str, np.ndarray]:
        """Return rows and their optimizer state for an update, padded to `size` rows with zeros."""
        return take_together([(self, ids)], size)

    def copy_rows(self, ids: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Copy rows of the block and of its state into arrays that have one row for each id."""
        slots = self._current(ids, self._slots(ids))
        for x, rows in zip(self.arrays.values(), arrays, strict=True):
            # The default mode copies twice. With valid slots, "clip" returns the same rows.
            x.take(slots, 0, out=rows, mode="clip")

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        """Return each row's index in the arrays, negative for rows that are not stored."""
        if ids is not self._found[0]:
            self._found = ids, self.stored.slots(ids), False
        return self._found[1]

    def _current(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Bring rows up to date before they are read; return their indices in the arrays.

        Rows that do not exist are initialized. Rows that have skipped updates make up for them.

        Args:
          ids: the ids of the rows.
          slots: the index of each row in the arrays; negative for rows that do not exist.
        """
        if ids is not self._found[0] or not self._found[2]:
            is_new = slots < 0
            if is_new.any():
                slots[is_new] = self._make(ids[is_new], slots[is_new])
        self._found = ids, slots, True
        self._catch_up(slots)
        return slots

    def put(
        self, ids: np.ndarray, new: Mapping[str, Any], values: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Store the rows that an update has computed; return the block's arrays by name.

        Args:
          ids: sorted ids of the rows.
          new: the new rows of each array, by name. Rows after the first len(ids) are padding.
          values: the update's values with the names `reads`.
        """
        self._before(ids)
        slots = self._slots(ids)
        for n, x in self.arrays.items():
            x[slots] = np.asarray(new[n])[: len(ids)]
        self.step += 1
        self.stored.changed_at[slots] = self.step + 1
        if self.missed is not None and self.missed.add(slots, values):
            # The records of missed steps use too much memory. All rows catch up, so that the
            # records can be dropped. If updates also change rows that were never used, these rows
            # are initialized now.
            if not self.missed.rests:
                missing = self.stored.missing_ids()
                if len(missing):
                    self._make(missing, self.stored.slots(missing))
            self._catch_up(np.arange(self.count))
            self.missed.forget()
        return self.arrays

    def evict(self, unused_for: int, under_way: np.ndarray) -> int:
        """Free the rows without a gradient in the last `unused_for` steps; return their number.

        Evicted rows do not exist any more. Their next use initializes them again.

        Args:
          unused_for: the number of steps.
          under_way: ids of rows with a gradient that has not arrived yet. These rows are not
            evicted.

        Raises:
          StateError: rows cannot be initialized again.
        """
        if self.maker is None:
            raise StateError(
                f"rows of {self.table.name} cannot be evicted, because the server cannot "
                "initialize them again: it started from a checkpoint, or the init reduces over "
                "rows; after a restore, call job.serve(state, init=(...,)) with the arguments of "
                "the init"
            )
        if self.missed is not None and not self.missed.rests:
            raise StateError(
                f"rows of {self.table.name} cannot be evicted, because its update also changes "
                "rows that no step has looked up; use dtrans.Rows(update='lazy')"
            )
        is_old = self.stored.changed_at[: self.count] <= max(0, self.step + 1 - unused_for)
        slots = self.stored.slots(under_way)
        is_old[slots[slots >= 0]] = False
        gone = np.flatnonzero(is_old)
        # A snapshot finds a row by its slot, so rows that move to other slots are saved, too.
        self._before(self.stored.ids(np.concatenate([gone, self.stored.to_move(gone)])))
        # Evicted rows are marked with the next step, because a call of `changed` may have
        # reported the current step already.
        self.stored.remove(gone, -(self.step + 2))
        self._found = None, gone, False
        self.evicted += len(gone)
        return len(gone)

    def changed(self, since: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays of row ids: rows changed after a step, and rows evicted after it.

        Args:
          since: the number of the step.
        """
        evicted, at = self.stored.evicted()
        gone = evicted[at < -(since + 1)]
        is_changed = self.stored.changed_at[: self.count] > since + 1
        if self.missed is not None and since < self.step and self.table.leaf_moves:
            if not self.missed.rests:
                return np.arange(self.table.rows), gone
            is_changed |= self.stored.seen[: self.count] < RESTS
        return np.sort(self.stored.ids(np.flatnonzero(is_changed))), gone

    @property
    def nbytes(self) -> int:
        """Bytes of memory for the rows that exist, their optimizer state and their hash table."""
        return self.stored.nbytes

    def final(self) -> dict[str, ArrayLike]:
        """Return the block's final arrays by name, as placeholders: NumPy converts them later.

        So a table that does not fit into memory as one array can still be saved.
        """
        table = RowSnapshot(self)
        return {n: _FinalArray(self, n, table) for n in self.arrays}

    def snapshot(self, patience: float | None = None) -> dict[str, ArrayLike]:
        """Return a snapshot of the block and its optimizer state, by name.

        A thread can read the snapshot while updates change the block.

        Args:
          patience: as for `RowSnapshot`.
        """
        table = RowSnapshot(self, is_live=True, patience=patience)
        self._snapshots.append(table)
        return {n: TableArray(x, table, i) for i, (n, x) in enumerate(self.arrays.items())}

    def _before(self, ids: np.ndarray) -> None:
        """Copy rows into the snapshots that threads still read, before the rows change."""
        if self._snapshots:
            self._snapshots = [x for x in self._snapshots if not x.is_over]
            for x in self._snapshots:
                x.save(ids)

    def materialize(self, name: str) -> np.ndarray:
        """Return one array of the block with all rows. Missing rows are initialized.

        Args:
          name: name of the array: the block, or an array of its optimizer state.
        """
        slots = np.arange(self.count)
        self._catch_up(slots)
        if self.count < self.table.rows and self.missed is not None and not self.missed.rests:
            new = self.stored.missing_ids()
            slots = np.arange(self.table.rows)
            self._current(new, self.stored.slots(new))
        array, ids = self.arrays[name], self.stored.ids(slots)
        if ids is slots:
            return array  # Each slot is the id of its row.
        found = np.empty_like(array)
        found[ids] = array[: len(slots)]
        new = self.stored.missing_ids()
        if len(new):
            assert self.maker is not None
            found[new] = self.maker(new)[list(self.arrays).index(name)]
        return found

    def must_find(self, ids: np.ndarray) -> bool:
        """Return True if the slots (indices in memory) of rows are unknown before a search."""
        return self.stored.has_gaps and ids is not self._found[0]

    def note_slots(self, ids: np.ndarray, slots: np.ndarray, *, all_exist: bool) -> None:
        """Record the slots (indices in memory) of rows, after a search in several tables.

        The next read of the same rows needs no search.

        Args:
          ids: the ids of the rows.
          slots: the slot of each row; negative for rows that do not exist.
          all_exist: True if no slot is negative.
        """
        self._found = ids, slots, all_exist

    def _make(self, ids: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Initialize and store rows that do not exist; return their slots (indices in memory).

        Args:
          ids: the ids of the rows.
          missing: the value that the hash table has for each row: a negative number in place of a
            slot.
        """
        assert self.maker is not None
        return store_together([NewTableRows(self, ids, missing, self.maker(ids))])[0]

    def check_limit(self, count: int) -> None:
        """Raise WireError if `count` new rows would exceed the table's limit."""
        if why := self._limit_error(count):
            raise WireError(why)

    def append(
        self, ids: np.ndarray, rows: Sequence[np.ndarray], changed: np.ndarray
    ) -> np.ndarray:
        """Store rows that do not exist; return their slots (indices in memory).

        The caller enters the slots into the hash table.

        Args:
          ids: the ids of the rows.
          rows: the initial rows of each array.
          changed: a number for the last change of each row, as in `RowSegment.changed`.
        """
        self._before(ids)
        slots = self.stored.append(ids, rows, changed)
        self._found = None, slots, False
        if self.missed is not None:
            self.missed.start(slots)
        return slots

    def _limit_error(self, count: int) -> str:
        """Return an error message if `count` new rows exceed the table's limit, else ""."""
        limit = self.table.limit
        if limit is None or self.count + count <= limit:
            return ""
        return (
            f"{self.table.name} has {self.count} rows and a limit of {limit} rows, but the step "
            f"needs {count} more; raise dtrans.Rows(limit=...), evict unused rows "
            "(job.tables.evict), or use more pservers"
        )

    def _catch_up(self, slots: np.ndarray) -> None:
        if self.missed is not None:
            behind = self.missed.behind(slots)
            self._before(self.stored.ids(behind))
            self.missed.make_up(behind, self.arrays)


class _FinalArray(ArrayLike):
    """Placeholder for one array of a table at the end of a job; it converts to all rows."""

    def __init__(self, memory: TableMemory, name: str, table: TableRows) -> None:
        super().__init__(memory.arrays[name], table)
        self._memory, self._name = memory, name

    def materialize(self) -> np.ndarray:
        return self._memory.materialize(self._name)


def _maker_of(saved: TableRows | None, initial: Sequence[Any]) -> RowMaker | None:
    """Return the object that initializes a block's rows; None if they cannot be initialized again.

    Args:
      saved: the rows of a checkpoint, or None.
      initial: the initial values of the block and of its optimizer state.
    """
    if saved is not None:
        return None if saved.begins is None else RowMaker(saved.begins.eqn, saved.begins.args)
    if all(isinstance(x, NewRows | KnownRows) for x in initial):
        maker: RowMaker = initial[0].maker
        return maker
    return None


def _saved_rows(table: TableBlock, initial: Sequence[Any]) -> TableRows | None:
    """Return the checkpoint's rows of a block, if the block and its state come from one checkpoint.

    Otherwise, return None.
    """
    found = {x.table if isinstance(x, ArrayLike) else None for x in initial}
    saved = found.pop()
    if found or saved is None or saved.names != table.arrays:
        return None
    return saved


def _equal_bits(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return a mask of the rows that have the same bits in both arrays."""
    equal = _as_bytes(some) == _as_bytes(others)
    return np.asarray(equal.all(1))


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)


def memory_of(update: ServerUpdate, state: Mapping[str, Any]) -> dict[str, TableMemory]:
    """Create the memory of each table block with updates that change only some rows, by name.

    Args:
      update: the server's update.
      state: the initial values, by name.
    """
    memory: dict[str, TableMemory] = {}
    directory, start = RowDirectory(), 0
    for n, t in update.tables.items():
        if not t.updates_all:
            part = DirectoryPart(directory, range(start, start + t.rows))
            memory[n] = TableMemory(update, t, state, part)
            start += t.rows
    return memory


@dataclasses.dataclass(frozen=True, eq=False)
class NewTableRows:
    """Rows of one block that do not exist, with their initial values.

    Attributes:
      memory: the block.
      ids: the ids of the rows.
      missing: the value that the hash table has for each row: a negative number in place of a slot.
      rows: the initial rows of each array.
    """

    memory: TableMemory
    ids: np.ndarray
    missing: np.ndarray
    rows: Sequence[np.ndarray]


def store_together(new: Sequence[NewTableRows]) -> list[np.ndarray]:
    """Store new rows of several blocks; return the slots (indices in memory) of each block's rows.

    Raises:
      WireError: the number of rows would exceed a table's limit. No row is stored.
    """
    for x in new:
        x.memory.check_limit(len(x.ids))
    # The next call of `changed` must return rows that were evicted before.
    _, evicted = split_counts(np.concatenate([x.missing for x in new]))
    changed, slots, start = np.maximum(1, -evicted), [], 0
    for x in new:
        stop = start + len(x.ids)
        slots.append(x.memory.append(x.ids, x.rows, changed[start:stop]))
        start = stop
    parts = [x.memory.stored.directory for x in new]
    ids = [x.ids for x in new]
    put_together(parts, ids, slots, [x.missing for x in new])
    return slots


def find_slots(tables: Sequence[tuple[TableMemory, np.ndarray]]) -> list[np.ndarray]:
    """Return the slots (indices in memory) of rows of several blocks, as views of one array.

    One search finds the rows of all blocks. A search in each of many blocks would take longer than
    the update of their rows.

    Args:
      tables: blocks with a hash table, each with the ids of its rows.
    """
    ids = [x for _, x in tables]
    slots = find_together([t.stored.directory for t, _ in tables], ids)
    ends = itertools.accumulate(map(len, ids), initial=0)
    return [slots[start:stop] for start, stop in itertools.pairwise(ends)]


def take_together(
    tables: Sequence[tuple[TableMemory, np.ndarray]], size: int
) -> dict[str, np.ndarray]:
    """Return the rows of a group of tables that one update changes together, padded with zeros.

    The rows of all tables follow each other in one array. There is one array for the tables, and
    one for each array of their optimizer state.

    Args:
      tables: blocks (a table's rows on this server) that form a group, each with the ids of its
        rows.
      size: number of rows of each array of the result, which is padded with zeros.

    Returns:
      The arrays, by the names of the first block's arrays.
    """
    sought = [x for x in tables if x[0].must_find(x[1])]
    if len(sought) > 1:
        for (memory, ids), slots in zip(sought, find_slots(sought), strict=True):
            memory.note_slots(ids, slots, all_exist=False)
    found = {}
    for n, x in tables[0][0].arrays.items():
        found[n] = np.empty((size, *x.shape[1:]), x.dtype)
    start = 0
    for memory, ids in tables:
        stop = start + len(ids)
        memory.copy_rows(ids, [x[start:stop] for x in found.values()])
        start = stop
    for x in found.values():
        x[start:] = 0
    return found


def final_arrays(memory: Mapping[str, TableMemory]) -> dict[str, Any]:
    """Return the final arrays of all blocks by name, as placeholders: NumPy converts them later."""
    found: dict[str, Any] = {}
    for table in memory.values():
        found |= table.final()
    return found


def snapshot_arrays(
    memory: Mapping[str, TableMemory], patience: float | None = None
) -> dict[str, Any]:
    """Return snapshots of all blocks by name, which a thread can read during updates.

    Args:
      memory: the blocks, by name.
      patience: as for `RowSnapshot`.
    """
    found: dict[str, Any] = {}
    for table in memory.values():
        found |= table.snapshot(patience)
    return found


def scatter_rows(ids: np.ndarray, size: int, gradient: RowGradient) -> np.ndarray:
    """Write gradients of some rows into a larger array, with zeros for the other rows.

    For example, ids [2, 5], size 4 and a gradient of row 5 give the rows (0, gradient, 0, 0).

    Args:
      ids: sorted ids of the first len(ids) rows of the array. Later rows are zero.
      size: the number of rows of the array; at least len(ids).
      gradient: gradients of rows; their ids are a subset of `ids`.
    """
    found = np.empty((size, *gradient.rows.shape[1:]), gradient.rows.dtype)
    fill_rows(found[: len(ids)], ids, gradient)
    found[len(ids) :] = 0
    return found


def fill_rows(array: np.ndarray, ids: np.ndarray, gradient: RowGradient) -> None:
    """Write gradients of some rows into an array, in place; write zeros into the other rows.

    Args:
      array: the array, with one row for each id.
      ids: increasing ids of the array's rows.
      gradient: gradients of rows; their ids are a subset of `ids`.
    """
    if len(gradient.ids) == len(ids):  # Every row has a gradient, so no search is needed.
        array[...] = gradient.rows
        return
    array[...] = 0
    array[np.searchsorted(ids, gradient.ids)] = gradient.rows
