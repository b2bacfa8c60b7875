"""The rows of a table that a trainer of GEO-SGD keeps: those that it has looked up, and no array of all.

    local    as the trainer's steps have made them, and what was pulled
    old      what local rows and the servers' agreed on
    state    the optimizer's, of each row

A push is of the rows that steps have looked up since the last one: d = (local - old) / trainers, and old + d is the new
old. A pull is of rows that others have changed: local + (server - old), and the server's is the new old. It is the
arithmetic of `dtrans.protocol.geo_steps`, row by row. What is left between local and old of a row that is not
looked up again stays there.

Source: `GeoSgdCommunicator::SendUpdateSparseVars` and `RecvUpdateSparseVars` in
paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtrans.protocol.served import RowGradient
from dtrans.protocol.tables.id_slots import IdSlots


LEAST = 64  # rows that there is room for at first


class KeptRows:
    """The rows of one table.

    Args:
      types: of the table and of each array of its state: all but the number of rows.
      state: makes the state of rows as the init does, by their numbers; None where there is no state.
    """

    def __init__(self, types: Sequence[Any], state: Callable[[np.ndarray], Sequence[np.ndarray]] | None = None) -> None:
        self._slots = IdSlots()
        self._state = state
        self._held = [np.empty((LEAST, *t.shape[1:]), t.dtype) for t in types]  # local rows, and their state
        self._old = np.empty_like(self._held[0])
        self._is_touched = np.zeros(LEAST, bool)
        self._touched: list[np.ndarray] = []  # slots of rows that were looked up since the last push

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def ids(self) -> np.ndarray:
        """The numbers of the rows that are here, in the order in which they came."""
        return self._slots.ids

    @property
    def old(self) -> np.ndarray:
        """What these rows and the servers' agreed on last."""
        return self._old[: len(self)]

    @property
    def nbytes(self) -> int:
        """The memory of the rows that are here."""
        return len(self) * sum(x[:1].nbytes for x in (*self._held, self._old))

    def missing(self, ids: np.ndarray) -> np.ndarray:
        """Those of some numbers whose rows are not here."""
        return ids[self._slots.find(ids) < 0]

    def add(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Keep rows that were not here, as servers have them."""
        if not len(ids):
            return
        at = slice(len(self), len(self) + len(ids))
        self._slots.add(ids)
        if at.stop > len(self._old):
            size = 2 * at.stop
            *self._held, self._old = (_longer(x, size) for x in (*self._held, self._old))
            self._is_touched = _longer(self._is_touched, size)
        self._is_touched[at] = False
        begun = [] if self._state is None else self._state(ids)
        for held, made in zip(self._held, (rows, *begun), strict=True):
            held[at] = made
        self._old[at] = rows

    def take(self, ids: np.ndarray, size: int) -> list[np.ndarray]:
        """Rows with their state, and zeros behind them: `size` of each."""
        slots = self._slots.find(ids)
        found = [np.zeros((size, *x.shape[1:]), x.dtype) for x in self._held]
        for rows, x in zip(found, self._held, strict=True):
            rows[: len(ids)] = x[slots]
        return found

    def put(self, ids: np.ndarray, made: Sequence[Any]) -> None:
        """A step has looked these rows up, and made new ones of them and of their state."""
        slots = self._slots.find(ids)
        for held, x in zip(self._held, made, strict=True):
            held[slots] = np.asarray(x)[: len(ids)]
        new = slots[~self._is_touched[slots]]
        self._is_touched[new] = True
        self._touched.append(new)

    def pushed(self, trainers: int) -> RowGradient:
        """What a push sends."""
        slots = np.concatenate([np.empty(0, np.int32), *self._touched])
        self._is_touched[slots], self._touched = False, []
        slots = slots[np.argsort(self._slots.ids[slots])]
        old = self._old[slots]
        deltas = (self._held[0][slots] - old) / np.asarray(trainers, old.dtype)
        self._old[slots] = old + deltas
        return RowGradient(self._slots.ids[slots], deltas)

    def pulled(self, server: RowGradient) -> None:
        """Take in rows that others have changed."""
        slots = self._slots.find(server.ids)
        slots, rows = slots[slots >= 0], server.rows[slots >= 0]
        self._held[0][slots] += rows - self._old[slots]
        self._old[slots] = rows


def _longer(x: np.ndarray, size: int) -> np.ndarray:
    """An array with room for more rows."""
    return np.concatenate([x, np.empty((size - len(x), *x.shape[1:]), x.dtype)])
