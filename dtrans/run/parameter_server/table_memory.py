"""A block of a table in a server's own memory: rows are taken out, updated by a program for as many, and put back.

Programs are made for a few numbers of rows (`dtrans.parameter_server.tables.touched_rows.room_for`). Where there are
fewer, zeros lie behind them, and so are gradients: what a program makes of these goes nowhere.

Where an update moves rows too that nobody looked up, they are behind, and catch up before anybody reads them
(`dtrans.run.parameter_server.missed_steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.served import RowGradient
from dtrans.run.parameter_server.missed_steps import MissedSteps, padded
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
    """

    def __init__(self, update: ServerUpdate, table: TableBlock, state: Mapping[str, Any]) -> None:
        self.table = table
        self.held = {n: np.array(state[n]) for n in table.held}
        self._missed = MissedSteps(update, table, self.held) if table.moves else None
        self.reads = () if self._missed is None else tuple(self._missed.reads)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the block as they are."""
        self._catch_up(ids)
        return self.held[self.table.name][ids]

    def take(self, ids: np.ndarray, size: int) -> dict[str, np.ndarray]:
        """Rows of the block and of its state, and zeros behind them: `size` of each."""
        self._catch_up(ids)
        return {n: padded(x[ids], size) for n, x in self.held.items()}

    def put(self, ids: np.ndarray, made: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Write rows where they belong: an update was made of them. The memory that they are in.

        Args:
          values: what `reads` names.
        """
        for n, x in self.held.items():
            x[ids] = np.asarray(made[n])[: len(ids)]
        if self._missed is not None:
            self._missed.add(ids, values, self.held)
        return self.held

    def finish(self) -> None:
        """Let all rows be as after the last update."""
        self._catch_up(np.arange(self.table.rows))

    def _catch_up(self, ids: np.ndarray) -> None:
        if self._missed is not None:
            self._missed.make_up(ids, self.held)


def memory_of(update: ServerUpdate, state: Mapping[str, Any]) -> dict[str, TableMemory]:
    """The blocks of tables of which an update is of some rows alone, by name."""
    return {n: TableMemory(update, t, state) for n, t in update.tables.items() if not t.whole}


def among(ids: np.ndarray, size: int, gradient: RowGradient) -> np.ndarray:
    """A gradient of rows as one of `size` rows, whose first are of the rows in `ids`; others are zero."""
    found = np.zeros((size, *gradient.rows.shape[1:]), gradient.rows.dtype)
    found[np.searchsorted(ids, gradient.ids)] = gradient.rows
    return found
