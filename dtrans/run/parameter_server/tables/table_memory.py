"""A block of a table in a server's NumPy memory, whose updates read and write some rows.

Updates are compiled for a few numbers of rows
(`dtrans.parameter_server.tables.touched_rows.room_for`). Rows, state and gradients are padded with
zeros to such a number, and the outputs for padding are dropped.

A row *exists* if it is stored. It is initialized and stored on its first use in a step
(`dtrans.run.parameter_server.tables.new_rows`). If updates also change rows without gradients,
these rows catch up before they are read (`dtrans.run.parameter_server.tables.missed_steps`).

`changed_at` records whether each row exists, and which step has last changed the row. Rows without
a recent update can be evicted. An evicted row has its initial value when it is used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.checkpoint.orbax_io import check_first
from dtrans.checkpoint.saved_rows import ArrayLike, SavedTable, TableArray, TableRows
from dtrans.errors import StateError, WireError
from dtrans.ir.selection import values_at
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.server_blocks import RowGradient
from dtrans.run.parameter_server.tables.lazy_memory import LazyArray
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.new_rows import KnownRows, NewRows, RowMaker
from dtrans.run.parameter_server.tables.row_snapshot import RowSnapshot
from dtrans.run.parameter_server.update import ServerUpdate


CHUNK = 1 << 16  # number of rows that are compared with their initial values at once


class TableMemory:
    """Rows of one block, and of its optimizer state.

    Args:
      update: the server's update.
      table: the block of the table.
      state: the initial values, by name.

    Attributes:
      table: the block of the table.
      arrays: maps names to NumPy arrays: the block, and each array of optimizer state that has a
        row for each row of the block.
      reads: names of the values that `put` needs from each update.
      count: the number of rows that exist.
      evicted: the number of evicted rows so far.
      step: the number of updates, including those before a checkpoint.
      maker: initializes rows; None if rows cannot be initialized again.
      missed: missed steps of rows; None if updates change only rows with a gradient.
      changed_at: one number for each row: positive if the row exists, negative if it was evicted,
        and 0 before its first use. The absolute value tells when the row last changed (see
        `dtrans.checkpoint.saved_rows.RowSegment`).
    """

    def __init__(self, update: ServerUpdate, table: TableBlock, state: Mapping[str, Any]) -> None:
        self.table = table
        initial = values_at(state, table.arrays)
        saved = _saved_rows(table, initial)
        self.maker = _maker_of(saved, initial)
        self._lazy: list[LazyArray] = []
        self._snapshots: list[RowSnapshot] = []
        if saved is not None or self.maker is not None:
            self._lazy = [LazyArray(x.shape, x.dtype) for x in initial]
            arrays = [x.array for x in self._lazy]
        else:
            arrays = [np.array(x) for x in initial]
        self.arrays = dict(zip(table.arrays, arrays, strict=True))
        self.count = 0 if self._lazy else table.rows
        self.evicted = self.step = 0
        self.changed_at = np.full(table.rows, 0 if self._lazy else 1, np.int64)
        if saved is not None:
            self._load(saved)
        elif self.maker and not isinstance(initial[0], NewRows):
            self._store_changed([np.asarray(x) for x in initial], self.maker)
        self.missed: MissedSteps | None = None
        if table.moves:
            self.missed = MissedSteps(
                update, table, None if self.maker and not self.count else self.arrays
            )
            if 0 < self.count < table.rows and self.missed.rests:
                self.missed.rest(np.flatnonzero(self.changed_at <= 0))
        self.reads = () if self.missed is None else tuple(self.missed.reads)

    def _load(self, saved: TableRows) -> None:
        """Store the rows of a checkpoint.

        Raises:
          StateError: this job's init and the init of the checkpoint's job return different rows.
        """
        if self.maker is not None and isinstance(saved, SavedTable):
            ids, probe = saved.probe
            for n, old, new in zip(saved.names, probe, self.maker(ids), strict=True):
                check_first(n, old, new)
        self.step, self.evicted = saved.step, saved.evicted
        for segment in saved.segments():
            for x, rows in zip(self.arrays.values(), segment.rows, strict=True):
                x[segment.present] = rows
            self.changed_at[segment.ids] = segment.changed
            self.count += len(segment.present)

    def _store_changed(self, initial: Sequence[np.ndarray], maker: RowMaker) -> None:
        """Store only the rows that differ from the initial rows of `maker`."""
        for at in range(0, self.table.rows, CHUNK):
            ids = np.arange(at, min(at + CHUNK, self.table.rows))
            chunks = [x[ids] for x in initial]
            is_new = np.ones(len(ids), bool)
            for x, new in zip(chunks, maker(ids), strict=True):
                is_new &= _equal_bits(x, new)
            for x, rows in zip(self.arrays.values(), chunks, strict=True):
                x[ids[~is_new]] = rows[~is_new]
            self.changed_at[ids[~is_new]] = 1
            self.count += len(ids) - int(is_new.sum())

    def rows(self, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Return current rows of the block.

        Args:
          ids: increasing ids.
          train: True if a gradient of these rows will follow; new rows are then initialized and
            stored. If False, new rows are initialized and not stored.
        """
        rows = self.arrays[self.table.name]
        exists = self.changed_at[ids] > 0
        new = ids[~exists]
        if not train and len(new) and (self.missed is None or self.missed.rests):
            assert self.maker is not None
            self._catch_up(ids[exists])
            found = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
            found[exists] = rows[ids[exists]]
            found[~exists] = self.maker(new)[0]
            return found
        self._make(new)
        self._catch_up(ids)
        return rows.take(ids, 0, mode="clip")

    def take(self, ids: np.ndarray, size: int) -> dict[str, np.ndarray]:
        """Return rows of the block and of its state, padded to `size` with zeros."""
        self._make(ids[self.changed_at[ids] <= 0])
        self._catch_up(ids)
        return {n: _pad_rows(x, ids, size) for n, x in self.arrays.items()}

    def put(
        self, ids: np.ndarray, new: Mapping[str, Any], values: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Store the rows that an update has computed; return `arrays`.

        Args:
          ids: increasing ids of the rows.
          new: the new rows of each array, by name. Rows after the first len(ids) are padding.
          values: the update's values with the names `reads`.
        """
        self._before(ids)
        for n, x in self.arrays.items():
            x[ids] = np.asarray(new[n])[: len(ids)]
        self.step += 1
        self.changed_at[ids] = self.step + 1
        if self.missed is not None and self.missed.add(ids, values):
            # The records of missed steps use too much memory. All rows catch up, so that the
            # records can be dropped. If updates change even rows before their first use, these
            # rows are initialized now.
            if not self.missed.rests:
                self._make(np.flatnonzero(self.changed_at <= 0))
            self._catch_up(np.flatnonzero(self.changed_at > 0))
            self.missed.forget()
        return self.arrays

    def evict(self, unused_for: int, under_way: np.ndarray) -> int:
        """Evict the rows without a gradient in the last `unused_for` steps; return how many.

        Evicted rows do not exist any more. Their next use initializes them again.

        Args:
          unused_for: the number of steps.
          under_way: ids of rows whose gradient has not arrived yet. These rows are not evicted.

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
        is_old = (self.changed_at > 0) & (self.changed_at <= max(0, self.step + 1 - unused_for))
        is_old[under_way] = False
        gone = np.flatnonzero(is_old)
        self._before(gone)
        # Evicted rows are marked with the next step, because a call of `changed` may have
        # reported the current step already.
        self.changed_at[gone] = -(self.step + 2)
        if self.missed is not None:
            self.missed.rest(gone)
        self.count -= len(gone)
        self.evicted += len(gone)
        for x in self._lazy:
            x.give_back(self.changed_at <= 0, gone)
        return len(gone)

    def changed(self, since: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the changed and of the evicted rows after the step `since`."""
        is_changed = self.changed_at > since + 1
        if self.missed is not None and since < self.step and self.table.leaf_moves:
            is_changed |= self.missed.moving
        return np.flatnonzero(is_changed), np.flatnonzero(self.changed_at < -(since + 1))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that exist, and of their optimizer state."""
        return self.count * sum(x[:1].nbytes for x in self.arrays.values())

    def final(self) -> dict[str, ArrayLike]:
        """Return placeholders for the final arrays of the block and of its state, by name."""
        table = RowSnapshot(self)
        return {n: _FinalArray(self, n, table) for n in self.arrays}

    def snapshot(self, patience: float | None = None) -> dict[str, ArrayLike]:
        """Return a snapshot of the block and of its state, to be read by a thread during updates.

        Args:
          patience: as for `RowSnapshot`.
        """
        table = RowSnapshot(self, is_live=True, patience=patience)
        self._snapshots.append(table)
        return {n: TableArray(x, table, i) for i, (n, x) in enumerate(self.arrays.items())}

    def _before(self, ids: np.ndarray) -> None:
        """Copy rows into snapshots that a thread still reads, before an update changes them."""
        if self._snapshots:
            self._snapshots = [x for x in self._snapshots if not x.is_over]
            for x in self._snapshots:
                x.save(ids)

    def materialize(self, name: str) -> np.ndarray:
        """Return the array of this name with all rows. Rows that do not exist are initialized."""
        self._catch_up(np.flatnonzero(self.changed_at > 0))
        new = np.flatnonzero(self.changed_at <= 0)
        if not len(new):
            return self.arrays[name]
        if self.missed is not None and not self.missed.rests:
            self._make(new)
            self._catch_up(new)
            return self.arrays[name]
        assert self.maker is not None
        found = self.arrays[name].copy()
        found[new] = self.maker(new)[list(self.arrays).index(name)]
        return found

    def _make(self, ids: np.ndarray) -> None:
        """Initialize and store rows that do not exist.

        Raises:
          WireError: the number of rows would exceed the table's limit.
        """
        if not len(ids):
            return
        assert self.maker is not None
        limit = self.table.limit
        if limit is not None and self.count + len(ids) > limit:
            raise WireError(
                f"{self.table.name} has {self.count} rows and a limit of {limit} rows, but "
                f"{len(ids)} new rows were looked up; raise dtrans.Rows(limit=...), evict unused "
                "rows (job.tables.evict), or use more pservers"
            )
        self._before(ids)
        for x, rows in zip(self.arrays.values(), self.maker(ids), strict=True):
            x[ids] = rows
        self.changed_at[ids] = np.maximum(1, -self.changed_at[ids])
        self.count += len(ids)

    def _catch_up(self, ids: np.ndarray) -> None:
        if self.missed is not None:
            behind = self.missed.behind(ids)
            self._before(behind)
            self.missed.make_up(behind, self.arrays)


class _FinalArray(ArrayLike):
    """Placeholder for a block, or for an array of its state. It converts to all rows."""

    def __init__(self, memory: TableMemory, name: str, table: TableRows) -> None:
        super().__init__(memory.arrays[name], table)
        self._memory, self._name = memory, name

    def materialize(self) -> np.ndarray:
        return self._memory.materialize(self._name)


def _maker_of(saved: TableRows | None, initial: Sequence[Any]) -> RowMaker | None:
    """Return the initializer of a block's rows; None if rows cannot be initialized again."""
    if saved is not None:
        return None if saved.begins is None else RowMaker(saved.begins.eqn, saved.begins.args)
    if all(isinstance(x, NewRows | KnownRows) for x in initial):
        maker: RowMaker = initial[0].maker
        return maker
    return None


def _saved_rows(table: TableBlock, initial: Sequence[Any]) -> TableRows | None:
    """Return the rows from a checkpoint that contain a block and its state; None without them."""
    found = {x.table if isinstance(x, ArrayLike) else None for x in initial}
    saved = found.pop()
    if found or saved is None or saved.names != table.arrays:
        return None
    return saved


def _pad_rows(x: np.ndarray, ids: np.ndarray, size: int) -> np.ndarray:
    """Return rows of an array, padded to `size` with zeros."""
    found = np.empty((size, *x.shape[1:]), x.dtype)
    # The default mode copies twice. With valid ids, "clip" returns the same rows.
    np.take(x, ids, 0, out=found[: len(ids)], mode="clip")
    found[len(ids) :] = 0
    return found


def _equal_bits(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return a mask of the rows that have the same bits in both arrays."""
    equal = _as_bytes(some) == _as_bytes(others)
    return np.asarray(equal.all(1))


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)


def memory_of(update: ServerUpdate, state: Mapping[str, Any]) -> dict[str, TableMemory]:
    """Return the memory of each block whose updates touch only some rows, by name."""
    memory = {}
    for n, t in update.tables.items():
        if not t.updates_all:
            memory[n] = TableMemory(update, t, state)
    return memory


def final_arrays(memory: Mapping[str, TableMemory]) -> dict[str, Any]:
    """Return placeholders for the final arrays of blocks and of their state, by name."""
    found: dict[str, Any] = {}
    for table in memory.values():
        found |= table.final()
    return found


def snapshot_arrays(
    memory: Mapping[str, TableMemory], patience: float | None = None
) -> dict[str, Any]:
    """Return snapshots of blocks and of their state, by name. A thread reads them during updates.

    Args:
      memory: the blocks, by name.
      patience: as for `RowSnapshot`.
    """
    found: dict[str, Any] = {}
    for table in memory.values():
        found |= table.snapshot(patience)
    return found


def scatter_rows(ids: np.ndarray, size: int, gradient: RowGradient) -> np.ndarray:
    """Scatter a gradient of rows into an array of `size` rows.

    Args:
      ids: increasing ids of the first len(ids) rows of the array. Later rows are zero.
      size: the number of rows of the array; at least len(ids).
      gradient: gradients of rows whose ids are a subset of `ids`.
    """
    count = len(gradient.ids)
    if count == len(ids):  # Every row has a gradient, so no search is needed.
        found = np.empty((size, *gradient.rows.shape[1:]), gradient.rows.dtype)
        found[:count], found[count:] = gradient.rows, 0
        return found
    found = np.zeros((size, *gradient.rows.shape[1:]), gradient.rows.dtype)
    found[np.searchsorted(ids, gradient.ids)] = gradient.rows
    return found
