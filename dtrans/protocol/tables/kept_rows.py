"""The rows of a table that a trainer of GEO-SGD keeps: those that it has looked up, and no array of
all.

    local    as the trainer's steps have made them, and what was pulled
    old      what local rows and the servers' agreed on
    state    the optimizer's, of each row

A push is of the rows that steps have looked up since the last one: d = (local - old) / trainers,
and old + d is the new old. A pull is of rows that others have changed: local + (server - old), and
the server's is the new old. It is the arithmetic of `dtrans.protocol.geo_steps`, row by row. What
is left between local and old of a row that is not looked up again stays there.

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
      state: makes the state of rows as the init does, by their numbers; None where there is no
        state.
    """

    def __init__(
        self,
        types: Sequence[Any],
        state: Callable[[np.ndarray], Sequence[np.ndarray]] | None = None,
    ) -> None:
        self._slots = IdSlots()
        self._state = state
        # local rows, and their state
        self._held = [np.empty((LEAST, *t.shape[1:]), t.dtype) for t in types]
        self._old = np.empty_like(self._held[0])
        self._is_touched = np.zeros(LEAST, bool)
        self._touched: list[
            np.ndarray
        ] = []  # slots of rows that were looked up since the last push

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

    def add(
        self, ids: np.ndarray, rows: np.ndarray, state: Sequence[np.ndarray] | None = None
    ) -> None:
        """Keep rows that were not here, as servers have them.

        Args:
          state: of these rows; by default as the init makes it.
        """
        if not len(ids):
            return
        at = slice(len(self), len(self) + len(ids))
        self._slots.add(ids)
        if at.stop > len(self._old):
            size = 2 * at.stop
            *self._held, self._old = (_longer(x, size) for x in (*self._held, self._old))
            self._is_touched = _longer(self._is_touched, size)
        self._is_touched[at] = False
        begun = state if state is not None else [] if self._state is None else self._state(ids)
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
        ids, local, old = self._unpushed()
        deltas = (local - old) / np.asarray(trainers, old.dtype)
        self._agree(ids, None, old + deltas)
        return RowGradient(ids, deltas)

    def pulled(self, server: RowGradient) -> None:
        """Take in rows that others have changed."""
        ids, rows, local, old = self._known(server)
        self._agree(ids, local + (rows - old), rows)

    # Rows move here, and floats are computed above: where a step is traced, the two are apart.

    def _unpushed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows that were looked up since the last push: their numbers, local and old
        rows."""
        slots = np.concatenate([np.empty(0, np.int32), *self._touched])
        self._is_touched[slots], self._touched = False, []
        slots = slots[np.argsort(self._slots.ids[slots])]
        return self._slots.ids[slots], self._held[0][slots], self._old[slots]

    def _known(self, server: RowGradient) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the numbers of those of some rows that are here: these rows, local and old
        ones."""
        slots = self._slots.find(server.ids)
        is_here = slots >= 0
        slots = slots[is_here]
        return server.ids[is_here], server.rows[is_here], self._held[0][slots], self._old[slots]

    def _agree(self, ids: np.ndarray, local: np.ndarray | None, old: np.ndarray) -> None:
        """Write what local rows and the servers' agree on, and local rows where they change."""
        slots = self._slots.find(ids)
        self._old[slots] = old
        if local is not None:
            self._held[0][slots] = local

    # -- as arrays -------------------------------------------------------------------------------

    def arrays(self, size: int) -> list[np.ndarray]:
        """Return the numbers of rows, which of them a push owes, local rows, their state, and old
        rows.

        Args:
          size: of each array; it is the number of no row.
        """
        count = len(self)
        parts = [x[:count] for x in (self._is_touched.astype(np.int32), *self._held, self._old)]
        behind = size - count
        zeros = [np.concatenate([x, np.zeros((behind, *x.shape[1:]), x.dtype)]) for x in parts]
        return [np.concatenate([self.ids, np.full(behind, size, np.int32)]), *zeros]

    @classmethod
    def from_arrays(cls, ids: np.ndarray, is_touched: np.ndarray, *rows: np.ndarray) -> KeptRows:
        """Return what `arrays` were made of.

        Args:
          rows: local rows, their state, and old rows.
        """
        size = len(ids)
        kept = cls(rows[:-1])
        kept._slots.add(ids[ids < size])
        *kept._held, kept._old = rows
        kept._is_touched = is_touched.astype(bool)
        kept._touched = [np.flatnonzero(kept._is_touched).astype(np.int32)]
        return kept


def _longer(x: np.ndarray, size: int) -> np.ndarray:
    """An array with room for more rows."""
    return np.concatenate([x, np.empty((size - len(x), *x.shape[1:]), x.dtype)])
