"""Rows of a table that a GEO-SGD trainer stores: those that it has looked up.

    local    rows after the trainer's steps and pulls
    old      the values on which local rows and the servers' last agreed
    state    the optimizer's state of each row

A push has the rows that steps have looked up since the last one: d = (local - old) / trainers, and
old + d is the new old. A pull has the rows that others have changed: local + (server - old) is the
new local, and the server's value is the new old. That is the arithmetic of
`dtrans.protocol.trainer.geo_steps`, row by row. A difference between local and old stays until the
row is looked up again.

Source: `GeoSgdCommunicator::SendUpdateSparseVars` and `RecvUpdateSparseVars` in
paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.id_slots import IdSlots


LEAST = 64  # initial capacity in rows


class CachedRows:
    """Stored rows of one table.

    Args:
      types: of the table and of each array of its state, with any number of rows.
      state: returns the initial state of rows by their ids; None if there is no state.
    """

    def __init__(
        self,
        types: Sequence[Any],
        state: Callable[[np.ndarray], Sequence[np.ndarray]] | None = None,
    ) -> None:
        self._slots = IdSlots()
        self._state = state
        # local rows, and their state
        self._stored = [np.empty((LEAST, *t.shape[1:]), t.dtype) for t in types]
        self._old = np.empty_like(self._stored[0])
        self._is_touched = np.zeros(LEAST, bool)
        self._touched: list[np.ndarray] = []  # slots of rows looked up since the last push

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def ids(self) -> np.ndarray:
        """Ids of the stored rows, in the order in which they came."""
        return self._slots.ids

    @property
    def old(self) -> np.ndarray:
        """Values of these rows on which the trainer and the servers last agreed."""
        return self._old[: len(self)]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored rows."""
        return len(self) * sum(x[:1].nbytes for x in (*self._stored, self._old))

    def missing(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers whose rows are not stored."""
        return ids[self._slots.find(ids) < 0]

    def add(
        self, ids: np.ndarray, rows: np.ndarray, state: Sequence[np.ndarray] | None = None
    ) -> None:
        """Store rows that were not stored before, as servers have them.

        Args:
          state: of these rows; the initial one by default.
        """
        if not len(ids):
            return
        at = slice(len(self), len(self) + len(ids))
        self._slots.add(ids)
        if at.stop > len(self._old):
            size = 2 * at.stop
            *self._stored, self._old = (_longer(x, size) for x in (*self._stored, self._old))
            self._is_touched = _longer(self._is_touched, size)
        self._is_touched[at] = False
        if state is None:
            state = [] if self._state is None else self._state(ids)
        for array, x in zip(self._stored, (rows, *state), strict=True):
            array[at] = x
        self._old[at] = rows

    def take(self, ids: np.ndarray, size: int) -> list[np.ndarray]:
        """Return rows with their state, padded with zeros to `size`."""
        slots = self._slots.find(ids)
        found = [np.zeros((size, *x.shape[1:]), x.dtype) for x in self._stored]
        for rows, x in zip(found, self._stored, strict=True):
            rows[: len(ids)] = x[slots]
        return found

    def put(self, ids: np.ndarray, new: Sequence[Any]) -> None:
        """Store the new values of rows that a step has looked up, and of their state."""
        slots = self._slots.find(ids)
        for array, x in zip(self._stored, new, strict=True):
            array[slots] = np.asarray(x)[: len(ids)]
        fresh = slots[~self._is_touched[slots]]
        self._is_touched[fresh] = True
        self._touched.append(fresh)

    def pushed(self, trainers: int) -> RowGradient:
        """Return the rows of a push."""
        ids, local, old = self._unpushed()
        deltas = (local - old) / np.asarray(trainers, old.dtype)
        self._agree(ids, None, old + deltas)
        return RowGradient(ids, deltas)

    def pulled(self, server: RowGradient) -> None:
        """Add the changes of other trainers."""
        ids, rows, local, old = self._known(server)
        self._agree(ids, local + (rows - old), rows)

    # Rows move here, and the functions above compute: a traced step replaces only the former.

    def _unpushed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows looked up since the last push: their ids, local and old values."""
        slots = np.concatenate([np.empty(0, np.int32), *self._touched])
        self._is_touched[slots], self._touched = False, []
        slots = slots[np.argsort(self._slots.ids[slots])]
        return self._slots.ids[slots], self._stored[0][slots], self._old[slots]

    def _known(self, server: RowGradient) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the stored ones among some rows: ids, and received, local and old values."""
        slots = self._slots.find(server.ids)
        is_here = slots >= 0
        slots = slots[is_here]
        return server.ids[is_here], server.rows[is_here], self._stored[0][slots], self._old[slots]

    def _agree(self, ids: np.ndarray, local: np.ndarray | None, old: np.ndarray) -> None:
        """Write the values that both sides agree on, and local rows if they change."""
        slots = self._slots.find(ids)
        self._old[slots] = old
        if local is not None:
            self._stored[0][slots] = local

    # -- as arrays -------------------------------------------------------------------------------

    def arrays(self, size: int) -> list[np.ndarray]:
        """Return row ids, a mask of the rows that the next push must send, and the rows.

        Local rows are followed by their state and by old rows.

        Args:
          size: length of each array; row ids are padded with it.
        """
        count = len(self)
        parts = [x[:count] for x in (self._is_touched.astype(np.int32), *self._stored, self._old)]
        behind = size - count
        zeros = [np.concatenate([x, np.zeros((behind, *x.shape[1:]), x.dtype)]) for x in parts]
        return [np.concatenate([self.ids, np.full(behind, size, np.int32)]), *zeros]

    @classmethod
    def from_arrays(cls, ids: np.ndarray, is_touched: np.ndarray, *rows: np.ndarray) -> CachedRows:
        """Restore the rows from the output of `arrays`.

        Args:
          rows: local rows, their state, and old rows.
        """
        size = len(ids)
        found = cls(rows[:-1])
        found._slots.add(ids[ids < size])
        *found._stored, found._old = rows
        found._is_touched = is_touched.astype(bool)
        found._touched = [np.flatnonzero(found._is_touched).astype(np.int32)]
        return found


def _longer(x: np.ndarray, size: int) -> np.ndarray:
    """Return a longer copy of an array."""
    return np.concatenate([x, np.empty((size - len(x), *x.shape[1:]), x.dtype)])
