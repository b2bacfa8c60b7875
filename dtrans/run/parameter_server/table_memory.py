"""A block of a table in a server's own memory: rows are taken out, updated by a program for as many, and put back.

Programs are made for a few numbers of rows (`dtrans.parameter_server.tables.touched_rows.room_for`). Where there are
fewer, zeros lie behind them, and so are gradients: what a program makes of these goes nowhere.

Rows are made when they are first asked for (`dtrans.run.parameter_server.new_rows`). Where an update moves rows too
that nobody looked up, they are behind, and catch up before anybody reads them
(`dtrans.run.parameter_server.missed_steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrans.errors import WireError
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.served import RowGradient
from dtrans.run.parameter_server.missed_steps import MissedSteps
from dtrans.run.parameter_server.new_rows import ArrayLike, NewRows, RowMaker
from dtrans.run.parameter_server.update import ServerUpdate


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
    """

    def __init__(self, update: ServerUpdate, table: TableBlock, state: Mapping[str, Any]) -> None:
        self.table = table
        begins = [state[n] for n in table.held]
        self._maker: RowMaker | None = None
        if all(isinstance(x, NewRows) for x in begins):
            self._maker = begins[0].maker
            # the system gives memory that was not written to when it is
            self.held = {n: np.zeros(x.shape, x.dtype) for n, x in zip(table.held, begins, strict=True)}
        else:
            self.held = {n: np.array(x) for n, x in zip(table.held, begins, strict=True)}
        self.count = 0 if self._maker else table.rows
        self._is_made = np.full(table.rows, self._maker is None)
        self._missed: MissedSteps | None = None
        if table.moves:
            self._missed = MissedSteps(update, table, None if self._maker else self.held)
        self.reads = () if self._missed is None else tuple(self._missed.reads)

    def rows(self, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Rows of the block as they are.

        Args:
          train: whether they are to be updated. What is only looked at is not kept where it is as the init has it.
        """
        new = ids[~self._is_made[ids]]
        if not train and len(new) and (self._missed is None or self._missed.rests):
            assert self._maker is not None
            there = ids[self._is_made[ids]]
            self._catch_up(there)
            found = np.empty((len(ids), *self.held[self.table.name].shape[1:]), self.held[self.table.name].dtype)
            found[self._is_made[ids]] = self.held[self.table.name][there]
            found[~self._is_made[ids]] = self._maker(new)[0]
            return found
        self._make(new)
        self._catch_up(ids)
        return self.held[self.table.name].take(ids, 0, mode="clip")

    def take(self, ids: np.ndarray, size: int) -> dict[str, np.ndarray]:
        """Rows of the block and of its state, and zeros behind them: `size` of each."""
        self._make(ids[~self._is_made[ids]])
        self._catch_up(ids)
        return {n: _rows_and_zeros(x, ids, size) for n, x in self.held.items()}

    def put(self, ids: np.ndarray, made: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Write rows where they belong: an update was made of them. The memory that they are in.

        Args:
          values: what `reads` names.
        """
        for n, x in self.held.items():
            x[ids] = np.asarray(made[n])[: len(ids)]
        if self._missed is not None and self._missed.add(ids, values):
            # too much is kept of steps: what is not made has missed them too
            if not self._missed.rests:
                self._make(np.flatnonzero(~self._is_made))
            self._catch_up(np.flatnonzero(self._is_made))
            self._missed.forget()
        return self.held

    @property
    def report(self) -> str:
        """How many rows are made, and what they weigh."""
        row = sum(x[:1].nbytes for x in self.held.values())
        return f"{self.table.name}: {self.count:,} of {self.table.rows:,} rows are made, {self.count * row:,} bytes"

    def final(self) -> dict[str, Any]:
        """The block and its state after the last update: arrays, or what stands for them while some rows are new."""
        self._catch_up(np.flatnonzero(self._is_made))
        return dict(self.held) if self.count == self.table.rows else {n: _Final(self, n) for n in self.held}

    def whole(self, name: str) -> np.ndarray:
        """An array with all rows. Those that are as the init has them are made for it, and not kept."""
        new = np.flatnonzero(~self._is_made)
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
                "rows: raise limit= of dtrans.Rows, or give it to more pservers"
            )
        for x, rows in zip(self.held.values(), self._maker(ids), strict=True):
            x[ids] = rows
        self._is_made[ids] = True
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
