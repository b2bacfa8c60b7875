"""A block of a table in a server's own memory: rows are taken out, updated by a program for as
many, and put back.

Programs are made for a few numbers of rows
(`dtrans.parameter_server.tables.touched_rows.room_for`). Where there are fewer, zeros lie behind
them, and so are gradients: what a program makes of these goes nowhere.

Rows are made when they are first asked for (`dtrans.run.parameter_server.tables.new_rows`). Where
an update moves rows too that nobody looked up, they are behind, and catch up before anybody reads
them (`dtrans.run.parameter_server.tables.missed_steps`).

One number of each row says whether it is there, and which step changed it last. Rows that no step
has updated for long may be given up on request: whoever asks for such a row again gets it as the
init makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.checkpoint.orbax_io import check_first
from dtrans.checkpoint.saved_rows import ArrayLike, SavedTable, TableArray, TableRows
from dtrans.errors import StateError, WireError
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.served import RowGradient
from dtrans.run.parameter_server.tables.lazy_memory import LazyArray
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.new_rows import MadeRows, NewRows, RowMaker
from dtrans.run.parameter_server.tables.row_snapshot import RowSnapshot
from dtrans.run.parameter_server.update import ServerUpdate


CHUNK = 1 << 16  # rows that are compared with new ones at once


class TableMemory:
    """One block.

    Args:
      update: of the server.
      table: the block; its updates are not of all rows.
      state: the initial values, by name.

    Attributes:
      held: the memory of the block, and of the state that has rows of it, by name.
      reads: what has to be known of each update, by name.
      count: how many rows are made.
      evicted: how many were given up so far.
      step: how many updates were made, with those before the checkpoint that it goes on from.
      maker: makes rows; None where they cannot be made again.
      missed: the steps that rows have missed, where an update moves all of them.
      changed_at: of each row, when it has changed (`dtrans.checkpoint.saved_rows.RowSegment`); 0
        where it is new.
    """

    def __init__(self, update: ServerUpdate, table: TableBlock, state: Mapping[str, Any]) -> None:
        self.table = table
        begins = [state[n] for n in table.arrays]
        saved = _saved_rows(table, begins)
        self.maker: RowMaker | None = None
        self._lazy: list[LazyArray] = []
        self._snapshots: list[RowSnapshot] = []
        if saved is not None:
            self.maker = (
                None if saved.begins is None else RowMaker(saved.begins.eqn, saved.begins.args)
            )
        elif all(isinstance(x, NewRows | MadeRows) for x in begins):
            self.maker = begins[0].maker
        if saved is not None or self.maker is not None:
            self._lazy = [LazyArray(x.shape, x.dtype) for x in begins]
            self.held = {n: x.array for n, x in zip(table.arrays, self._lazy, strict=True)}
        else:
            self.held = {n: np.array(x) for n, x in zip(table.arrays, begins, strict=True)}
        self.count = 0 if self._lazy else table.rows
        self.evicted = self.step = 0
        self.changed_at = (
            np.zeros(table.rows, np.int64) if self._lazy else np.ones(table.rows, np.int64)
        )
        if saved is not None:
            self._take_saved(saved)
        elif self.maker and not isinstance(begins[0], NewRows):
            self._take_over([np.asarray(x) for x in begins], self.maker)
        self.missed: MissedSteps | None = None
        if table.moves:
            self.missed = MissedSteps(
                update, table, None if self.maker and not self.count else self.held
            )
            if 0 < self.count < table.rows and self.missed.rests:
                self.missed.rest(np.flatnonzero(self.changed_at <= 0))
        self.reads = () if self.missed is None else tuple(self.missed.reads)

    def _take_saved(self, saved: TableRows) -> None:
        """Begin with the rows of a checkpoint. Raises StateError where the init makes others than
        that of its job."""
        if self.maker is not None and isinstance(saved, SavedTable):
            ids, probe = saved.probe
            for n, old, new in zip(saved.names, probe, self.maker(ids), strict=True):
                check_first(n, old, new)
        self.step, self.evicted = saved.step, saved.evicted
        for segment in saved.segments():
            for x, rows in zip(self.held.values(), segment.rows, strict=True):
                x[segment.present] = rows
            self.changed_at[segment.ids] = segment.changed
            self.count += len(segment.present)

    def _take_over(self, begins: Sequence[np.ndarray], maker: RowMaker) -> None:
        """Keep the rows that are not as the init makes them."""
        for at in range(0, self.table.rows, CHUNK):
            ids = np.arange(at, min(at + CHUNK, self.table.rows))
            some = [x[ids] for x in begins]
            is_new = np.all(
                [_same_bits(x, new) for x, new in zip(some, maker(ids), strict=True)], axis=0
            )
            for x, rows in zip(self.held.values(), some, strict=True):
                x[ids[~is_new]] = rows[~is_new]
            self.changed_at[ids[~is_new]] = 1
            self.count += len(ids) - int(is_new.sum())

    def rows(self, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Rows of the block as they are.

        Args:
          train: whether they are to be updated. What is only looked at is not kept where it is as
            the init has it.
        """
        made = self.changed_at[ids] > 0
        new = ids[~made]
        if not train and len(new) and (self.missed is None or self.missed.rests):
            assert self.maker is not None
            there = ids[made]
            self._catch_up(there)
            found = np.empty(
                (len(ids), *self.held[self.table.name].shape[1:]), self.held[self.table.name].dtype
            )
            found[made] = self.held[self.table.name][there]
            found[~made] = self.maker(new)[0]
            return found
        self._make(new)
        self._catch_up(ids)
        return self.held[self.table.name].take(ids, 0, mode="clip")

    def take(self, ids: np.ndarray, size: int) -> dict[str, np.ndarray]:
        """Rows of the block and of its state, and zeros behind them: `size` of each."""
        self._make(ids[self.changed_at[ids] <= 0])
        self._catch_up(ids)
        return {n: _rows_and_zeros(x, ids, size) for n, x in self.held.items()}

    def put(
        self, ids: np.ndarray, made: Mapping[str, Any], values: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Write rows where they belong: an update was made of them. The memory that they are in.

        Args:
          values: what `reads` names.
        """
        self._before(ids)
        for n, x in self.held.items():
            x[ids] = np.asarray(made[n])[: len(ids)]
        self.step += 1
        self.changed_at[ids] = self.step + 1
        if self.missed is not None and self.missed.add(ids, values):
            # too much is kept of steps: what is not made has missed them too
            if not self.missed.rests:
                self._make(np.flatnonzero(self.changed_at <= 0))
            self._catch_up(np.flatnonzero(self.changed_at > 0))
            self.missed.forget()
        return self.held

    def evict(self, unused_for: int, under_way: np.ndarray) -> int:
        """Give rows up that none of so many last steps has updated; how many they are.

        They are as the init makes them from now on, with their state, and no part of the limit.

        Args:
          under_way: rows of which a gradient is to come, which stay.

        Raises:
          StateError: rows that cannot be made again.
        """
        if self.maker is None:
            raise StateError(
                f"rows of {self.table.name} cannot be given up, since they cannot be made again: "
                "its server began with "
                "all of them, from an init that makes something of all rows, or from a checkpoint: "
                "say "
                "job.serve(state, init=(...,)), with the arguments of the init"
            )
        if self.missed is not None and not self.missed.rests:
            raise StateError(
                f"rows of {self.table.name} cannot be given up: its update moves those too that "
                "nobody has looked up"
            )
        is_old = (self.changed_at > 0) & (self.changed_at <= max(0, self.step + 1 - unused_for))
        is_old[under_way] = False
        gone = np.flatnonzero(is_old)
        self._before(gone)
        # who has asked for changes after this step has yet to hear of it
        self.changed_at[gone] = -(self.step + 2)
        if self.missed is not None:
            self.missed.rest(gone)
        self.count -= len(gone)
        self.evicted += len(gone)
        for x in self._lazy:
            x.give_back(self.changed_at <= 0, gone)
        return len(gone)

    def changed(self, since: int) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of rows that steps after this one have changed, and of those that were given
        up since."""
        is_changed = self.changed_at > since + 1
        if self.missed is not None and since < self.step and self.table.leaf_moves:
            is_changed |= self.missed.moving
        return np.flatnonzero(is_changed), np.flatnonzero(self.changed_at < -(since + 1))

    @property
    def nbytes(self) -> int:
        """What the rows that are made weigh, with their state."""
        return self.count * sum(x[:1].nbytes for x in self.held.values())

    def final(self) -> dict[str, ArrayLike]:
        """The block and its state after the last update: what stands for arrays of all rows."""
        table = RowSnapshot(self)
        return {n: _Final(self, n, table) for n in self.held}

    def snapshot(self, patience: float) -> dict[str, ArrayLike]:
        """The block and its state as they are now, for a thread that reads them while the block
        goes on.

        Args:
          patience: seconds that updates wait for a thread that makes no progress.
        """
        table = RowSnapshot(self, goes_on=True, patience=patience)
        self._snapshots.append(table)
        return {n: TableArray(x, table, i) for i, (n, x) in enumerate(self.held.items())}

    def _before(self, ids: np.ndarray) -> None:
        """Let those who read the block keep rows that are about to change."""
        if self._snapshots:
            self._snapshots = [x for x in self._snapshots if not x.is_over]
            for x in self._snapshots:
                x.keep(ids)

    def whole(self, name: str) -> np.ndarray:
        """An array with all rows. Those that are as the init has them are made for it, and not
        kept."""
        self._catch_up(np.flatnonzero(self.changed_at > 0))
        new = np.flatnonzero(self.changed_at <= 0)
        if not len(new):
            return self.held[name]
        if self.missed is not None and not self.missed.rests:
            self._make(new)
            self._catch_up(new)
            return self.held[name]
        assert self.maker is not None
        found = self.held[name].copy()
        found[new] = self.maker(new)[list(self.held).index(name)]
        return found

    def _make(self, ids: np.ndarray) -> None:
        """Make rows that are not there. Raises WireError where they are too many."""
        if not len(ids):
            return
        assert self.maker is not None
        limit = self.table.limit
        if limit is not None and self.count + len(ids) > limit:
            raise WireError(
                f"{self.table.name} has {self.count} rows, {len(ids)} new ones are looked up, and "
                f"its limit is {limit} rows: raise limit= of dtrans.Rows, give up rows that are "
                "not used (job.tables.evict), or take more pservers"
            )
        self._before(ids)
        for x, rows in zip(self.held.values(), self.maker(ids), strict=True):
            x[ids] = rows
        self.changed_at[ids] = np.maximum(1, -self.changed_at[ids])
        self.count += len(ids)

    def _catch_up(self, ids: np.ndarray) -> None:
        if self.missed is not None:
            behind = self.missed.behind(ids)
            self._before(behind)
            self.missed.make_up(behind, self.held)


class _Final(ArrayLike):
    """A block, or an array of its state, of which some rows are new: whoever reads it makes
    them."""

    def __init__(self, memory: TableMemory, name: str, table: TableRows) -> None:
        super().__init__(memory.held[name], table)
        self._memory, self._name = memory, name

    def materialize(self) -> np.ndarray:
        return self._memory.whole(self._name)


def _saved_rows(table: TableBlock, begins: Sequence[Any]) -> TableRows | None:
    """The rows that a block and its state begin with, where these are there one by one."""
    found = {x.table if isinstance(x, ArrayLike) else None for x in begins}
    saved = found.pop()
    return saved if not found and saved is not None and saved.names == table.arrays else None


def _rows_and_zeros(x: np.ndarray, ids: np.ndarray, size: int) -> np.ndarray:
    """Rows of an array, and zeros behind them, `size` in all."""
    found = np.empty((size, *x.shape[1:]), x.dtype)
    # they are there; it copies twice where it has to look
    np.take(x, ids, 0, out=found[: len(ids)], mode="clip")
    found[len(ids) :] = 0
    return found


def _same_bits(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether each row has the same bits in both."""
    of_bytes = lambda x: np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)
    return np.asarray((of_bytes(some) == of_bytes(others)).all(1))


def memory_of(update: ServerUpdate, state: Mapping[str, Any]) -> dict[str, TableMemory]:
    """The blocks of tables of which an update is of some rows alone, by name."""
    return {n: TableMemory(update, t, state) for n, t in update.tables.items() if not t.updates_all}


def among(ids: np.ndarray, size: int, gradient: RowGradient) -> np.ndarray:
    """A gradient of rows as one of `size` rows, whose first are of the rows in `ids`; others are
    zero."""
    count = len(gradient.ids)
    if count == len(ids):  # it is of all of them
        found = np.empty((size, *gradient.rows.shape[1:]), gradient.rows.dtype)
        found[:count], found[count:] = gradient.rows, 0
        return found
    found = np.zeros((size, *gradient.rows.shape[1:]), gradient.rows.dtype)
    found[np.searchsorted(ids, gradient.ids)] = gradient.rows
    return found
