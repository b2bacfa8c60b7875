"""A block of a table in a server's own memory: rows are taken out, updated by a program for as many, and put back.

Programs are made for a few numbers of rows (`dtrans.parameter_server.tables.touched_rows.room_for`). Where there are
fewer, zeros lie behind them, and so are gradients: what a program makes of these goes nowhere.

Rows are made when they are first asked for (`dtrans.run.parameter_server.tables.new_rows`). Where an update moves rows
too that nobody looked up, they are behind, and catch up before anybody reads them
(`dtrans.run.parameter_server.tables.missed_steps`).

One number of each row says whether it is there, and which step changed it last. Rows that no step has updated for long
may be given up on request: whoever asks for such a row again gets it as the init makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import StateError, WireError
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.served import RowGradient
from dtrans.run.parameter_server.tables.lazy_memory import LazyArray
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.new_rows import ArrayLike, MadeRows, NewRows, RowMaker
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
      step: how many updates were made.
    """

    def __init__(self, update: ServerUpdate, table: TableBlock, state: Mapping[str, Any]) -> None:
        self.table = table
        begins = [state[n] for n in table.held]
        self._maker: RowMaker | None = None
        self._lazy: list[LazyArray] = []
        if all(isinstance(x, NewRows | MadeRows) for x in begins):
            self._maker = begins[0].maker
            self._lazy = [LazyArray(x.shape, x.dtype) for x in begins]
            self.held = {n: x.array for n, x in zip(table.held, self._lazy, strict=True)}
        else:
            self.held = {n: np.array(x) for n, x in zip(table.held, begins, strict=True)}
        self.count = 0 if self._maker else table.rows
        self.evicted = self.step = 0
        # for each row: n + 1 where it is made and step n changed it last, n = 0 where none has; 0 where it is new; and
        # -(n + 1) where it was given up, and so changed, before step n
        self._changed = np.zeros(table.rows, np.int64) if self._maker else np.ones(table.rows, np.int64)
        if self._maker and not isinstance(begins[0], NewRows):
            self._take_over([np.asarray(x) for x in begins], self._maker)
        self._missed: MissedSteps | None = None
        if table.moves:
            self._missed = MissedSteps(update, table, None if self._maker and not self.count else self.held)
            if 0 < self.count < table.rows and self._missed.rests:
                self._missed.rest(np.flatnonzero(self._changed <= 0))
        self.reads = () if self._missed is None else tuple(self._missed.reads)

    def _take_over(self, begins: Sequence[np.ndarray], maker: RowMaker) -> None:
        """Keep the rows that are not as the init makes them."""
        for at in range(0, self.table.rows, CHUNK):
            ids = np.arange(at, min(at + CHUNK, self.table.rows))
            some = [x[ids] for x in begins]
            is_new = np.all([_same_bits(x, new) for x, new in zip(some, maker(ids), strict=True)], axis=0)
            for x, rows in zip(self.held.values(), some, strict=True):
                x[ids[~is_new]] = rows[~is_new]
            self._changed[ids[~is_new]] = 1
            self.count += len(ids) - int(is_new.sum())

    def rows(self, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Rows of the block as they are.

        Args:
          train: whether they are to be updated. What is only looked at is not kept where it is as the init has it.
        """
        made = self._changed[ids] > 0
        new = ids[~made]
        if not train and len(new) and (self._missed is None or self._missed.rests):
            assert self._maker is not None
            there = ids[made]
            self._catch_up(there)
            found = np.empty((len(ids), *self.held[self.table.name].shape[1:]), self.held[self.table.name].dtype)
            found[made] = self.held[self.table.name][there]
            found[~made] = self._maker(new)[0]
            return found
        self._make(new)
        self._catch_up(ids)
        return self.held[self.table.name].take(ids, 0, mode="clip")

    def take(self, ids: np.ndarray, size: int) -> dict[str, np.ndarray]:
        """Rows of the block and of its state, and zeros behind them: `size` of each."""
        self._make(ids[self._changed[ids] <= 0])
        self._catch_up(ids)
        return {n: _rows_and_zeros(x, ids, size) for n, x in self.held.items()}

    def put(self, ids: np.ndarray, made: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Write rows where they belong: an update was made of them. The memory that they are in.

        Args:
          values: what `reads` names.
        """
        for n, x in self.held.items():
            x[ids] = np.asarray(made[n])[: len(ids)]
        self.step += 1
        self._changed[ids] = self.step + 1
        if self._missed is not None and self._missed.add(ids, values):
            # too much is kept of steps: what is not made has missed them too
            if not self._missed.rests:
                self._make(np.flatnonzero(self._changed <= 0))
            self._catch_up(np.flatnonzero(self._changed > 0))
            self._missed.forget()
        return self.held

    def evict(self, unused_for: int, under_way: np.ndarray) -> int:
        """Give rows up that none of so many last steps has updated; how many they are.

        They are as the init makes them from now on, with their state, and no part of the limit.

        Args:
          under_way: rows of which a gradient is to come, which stay.

        Raises:
          StateError: rows that cannot be made again.
        """
        if self._maker is None:
            raise StateError(
                f"rows of {self.table.name} cannot be given up, since they cannot be made again: its server began with "
                "all of them, from an init that makes something of all rows, or from a checkpoint: say "
                "job.serve(state, init=(...,)), with the arguments of the init"
            )
        if self._missed is not None and not self._missed.rests:
            raise StateError(
                f"rows of {self.table.name} cannot be given up: its update moves those too that nobody has looked up"
            )
        is_old = (self._changed > 0) & (self._changed <= max(0, self.step + 1 - unused_for))
        is_old[under_way] = False
        gone = np.flatnonzero(is_old)
        self._changed[gone] = -(self.step + 2)  # who has asked for changes after this step has yet to hear of it
        if self._missed is not None:
            self._missed.rest(gone)
        self.count -= len(gone)
        self.evicted += len(gone)
        for x in self._lazy:
            x.give_back(self._changed <= 0, gone)
        return len(gone)

    def changed(self, since: int) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of rows that steps after this one have changed, and of those that were given up since."""
        is_changed = self._changed > since + 1
        if self._missed is not None and since < self.step and self.table.leaf_moves:
            is_changed |= self._missed.moving
        return np.flatnonzero(is_changed), np.flatnonzero(self._changed < -(since + 1))

    @property
    def nbytes(self) -> int:
        """What the rows that are made weigh, with their state."""
        return self.count * sum(x[:1].nbytes for x in self.held.values())

    def final(self) -> dict[str, Any]:
        """The block and its state after the last update: arrays, or what stands for them while some rows are new."""
        self._catch_up(np.flatnonzero(self._changed > 0))
        return dict(self.held) if self.count == self.table.rows else {n: _Final(self, n) for n in self.held}

    def whole(self, name: str) -> np.ndarray:
        """An array with all rows. Those that are as the init has them are made for it, and not kept."""
        new = np.flatnonzero(self._changed <= 0)
        if self._missed is not None and not self._missed.rests:
            self._make(new)
            self._catch_up(new)
            return self.held[name]
        assert self._maker is not None
        found = self.held[name].copy()
        found[new] = self._maker(new)[list(self.held).index(name)]
        return found

    def _make(self, ids: np.ndarray) -> None:
        """Make rows that are not there. Raises WireError where they are too many."""
        if not len(ids):
            return
        assert self._maker is not None
        limit = self.table.limit
        if limit is not None and self.count + len(ids) > limit:
            raise WireError(
                f"{self.table.name} has {self.count} rows, {len(ids)} new ones are looked up, and its limit is {limit} "
                "rows: raise limit= of dtrans.Rows, give up rows that are not used (job.evict), or take more pservers"
            )
        for x, rows in zip(self.held.values(), self._maker(ids), strict=True):
            x[ids] = rows
        self._changed[ids] = np.maximum(1, -self._changed[ids])
        self.count += len(ids)

    def _catch_up(self, ids: np.ndarray) -> None:
        if self._missed is not None:
            self._missed.make_up(ids, self.held)


class _Final(ArrayLike):
    """A block, or an array of its state, of which some rows are new: whoever reads it makes them."""

    def __init__(self, memory: TableMemory, name: str) -> None:
        super().__init__(memory.held[name])
        self._memory, self._name = memory, name

    def made(self) -> np.ndarray:
        return self._memory.whole(self._name)


def _rows_and_zeros(x: np.ndarray, ids: np.ndarray, size: int) -> np.ndarray:
    """Rows of an array, and zeros behind them, `size` in all."""
    found = np.empty((size, *x.shape[1:]), x.dtype)
    np.take(x, ids, 0, out=found[: len(ids)], mode="clip")  # they are there; it copies twice where it has to look
    found[len(ids) :] = 0
    return found


def _same_bits(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether each row has the same bits in both."""
    of_bytes = lambda x: np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)
    return np.asarray((of_bytes(some) == of_bytes(others)).all(1))


def memory_of(update: ServerUpdate, state: Mapping[str, Any]) -> dict[str, TableMemory]:
    """The blocks of tables of which an update is of some rows alone, by name."""
    return {n: TableMemory(update, t, state) for n, t in update.tables.items() if not t.whole}


def among(ids: np.ndarray, size: int, gradient: RowGradient) -> np.ndarray:
    """A gradient of rows as one of `size` rows, whose first are of the rows in `ids`; others are zero."""
    count = len(gradient.ids)
    if count == len(ids):  # it is of all of them
        found = np.empty((size, *gradient.rows.shape[1:]), gradient.rows.dtype)
        found[:count], found[count:] = gradient.rows, 0
        return found
    found = np.zeros((size, *gradient.rows.shape[1:]), gradient.rows.dtype)
    found[np.searchsorted(ids, gradient.ids)] = gradient.rows
    return found
