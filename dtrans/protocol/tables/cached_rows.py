"""Rows of a table that a GEO-SGD trainer stores: all rows that it has looked up.

    local    the trainer's value of a row
    old      the value on which the trainer and the servers last agreed
    state    the optimizer's state of a row

A *push* sends changes of the rows that steps have looked up since the last push. A *pull* receives
the rows that other trainers have changed. The formulas are those of
`dtrans.protocol.trainer.geo_steps`. A push leaves a remainder of local - old in each row. This
remainder is pushed only after the next lookup of the row.

Source: `GeoSgdCommunicator::SendUpdateSparseVars` and `RecvUpdateSparseVars` in
paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.id_slots import IdSlots


LEAST = 64  # initial capacity in rows


@dataclasses.dataclass(frozen=True, eq=False)
class CachedSnapshot:
    """Snapshot of a trainer's rows of one table, for a restart of the trainer after a failure.

    It has the trainer's changes of the rows, but not the servers' values, which the new process
    receives from the servers.

    Attributes:
      ids: sorted ids of the rows.
      is_touched: mask of the rows that the next push sends.
      changes: local - old of each row.
      state: arrays of the optimizer's state of these rows.
      pending: deltas in a push without an answer; None if no push is pending.
    """

    ids: np.ndarray
    is_touched: np.ndarray
    changes: np.ndarray
    state: Sequence[np.ndarray]
    pending: RowGradient | None = None


class CachedRows:
    """Copy of a table's rows on one trainer of GEO-SGD: the rows that the trainer has looked up.

    The trainer changes its rows for some steps. Then it sends ("pushes") its changes to the
    servers, and receives ("pulls") the changes of other trainers.

    Args:
      types: shape and dtype of the table, and then of each array of its optimizer state. The first
        dimension of each shape is ignored.
      state: function from row ids to the initial optimizer state of these rows; None if the
        optimizer has no state.
    """

    def __init__(
        self,
        types: Sequence[Any],
        state: Callable[[np.ndarray], Sequence[np.ndarray]] | None = None,
    ) -> None:
        self._slots = IdSlots()
        self._state = state
        # The local rows, followed by the arrays of their optimizer state
        self._stored = [np.empty((LEAST, *t.shape[1:]), t.dtype) for t in types]
        self._old = np.empty_like(self._stored[0])
        # Rows that steps have looked up since the last push: a mask of slots, and lists of slots
        self._is_touched = np.zeros(LEAST, bool)
        self._touched: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def ids(self) -> np.ndarray:
        """Ids of the stored rows, in the order in which they were added."""
        return self._slots.ids

    @property
    def old(self) -> np.ndarray:
        """Value of each row in `ids` after the last exchange with the servers."""
        return self._old[: len(self)]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the stored rows, their state and their old values."""
        return len(self) * sum(x[:1].nbytes for x in (*self._stored, self._old))

    def missing(self, ids: np.ndarray) -> np.ndarray:
        """Return those of the ids that have no stored row."""
        return ids[self._slots.find(ids) < 0]

    def add(
        self, ids: np.ndarray, rows: np.ndarray, state: Sequence[np.ndarray] | None = None
    ) -> None:
        """Store new rows.

        Args:
          ids: ids of rows that are not stored yet.
          rows: values of these rows from the servers.
          state: optimizer state of these rows; by default the initial state.
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
        if state is None and self._state is not None:
            state = self._state(ids)
        for array, x in zip(self._stored, (rows, *(state or ())), strict=True):
            array[at] = x
        self._old[at] = rows

    def take(self, ids: np.ndarray, size: int) -> list[np.ndarray]:
        """Return copies of some rows and of their optimizer state, for a step that looks them up.

        The first array has the rows, and each further one an array of the state.

        Args:
          ids: ids of the rows.
          size: number of rows of each result. Results are padded with zeros.
        """
        slots = self._slots.find(ids)
        found = [np.zeros((size, *x.shape[1:]), x.dtype) for x in self._stored]
        for rows, x in zip(found, self._stored, strict=True):
            rows[: len(ids)] = x[slots]
        return found

    def put(self, ids: np.ndarray, new: Sequence[Any]) -> None:
        """Store the new values of the rows that a step has updated, and their new optimizer state.

        Args:
          ids: ids of the rows.
          new: new local rows, followed by new arrays of the state. Padding at the end is ignored.
        """
        slots = self._slots.find(ids)
        for array, x in zip(self._stored, new, strict=True):
            array[slots] = np.asarray(x)[: len(ids)]
        fresh = slots[~self._is_touched[slots]]
        self._is_touched[fresh] = True
        self._touched.append(fresh)

    def pushed(self, trainers: int) -> RowGradient:
        """Return the changes to send to the servers, and count them as sent.

        These are 1/trainers of the changes of the rows that steps have looked up since the last
        call. With 2 trainers, a row that has changed by 0.6 gives 0.3. The remainder is sent later.

        Args:
          trainers: number of trainers of the job.
        """
        ids, local, old = self._unpushed()
        deltas = (local - old) / np.asarray(trainers, old.dtype)
        self._agree(ids, None, old + deltas)
        return RowGradient(ids, deltas)

    def pulled(self, server: RowGradient) -> None:
        """Add the changes that other trainers have made to this trainer's rows.

        The trainer's own changes that it has not sent yet stay.

        Args:
          server: ids of the rows that other trainers have changed, and the servers' values.
        """
        ids, rows, local, old = self._known(server)
        self._agree(ids, local + (rows - old), rows)

    # `plan.verify()` traces `pushed` and `pulled`, and replaces the functions below. So these
    # functions only copy rows.

    def _unpushed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows that steps have looked up since the last call.

        A push sends their changes.

        Returns:
          The row ids, the local values, and the values on which the trainer and the servers last
          agreed.
        """
        slots = np.concatenate([np.empty(0, np.int32), *self._touched])
        self._is_touched[slots], self._touched = False, []
        slots = slots[np.argsort(self._slots.ids[slots])]
        return self._slots.ids[slots], self._stored[0][slots], self._old[slots]

    def _known(self, server: RowGradient) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Select the received rows that this trainer stores.

        Returns:
          Their ids, received values, local values, and the values on which the trainer and the
          servers last agreed.
        """
        slots = self._slots.find(server.ids)
        is_here = slots >= 0
        slots = slots[is_here]
        return server.ids[is_here], server.rows[is_here], self._stored[0][slots], self._old[slots]

    def _agree(self, ids: np.ndarray, local: np.ndarray | None, old: np.ndarray) -> None:
        """Set the old values of rows and, unless `local` is None, the local values."""
        slots = self._slots.find(ids)
        self._old[slots] = old
        if local is not None:
            self._stored[0][slots] = local

    # -- snapshots ---------------------------------------------------------------------------------

    def snapshot(self, pending: RowGradient | None) -> CachedSnapshot:
        """Return a snapshot of the rows, which the trainer writes for a restart after a failure.

        Args:
          pending: changes that the trainer has sent, but that no server has acknowledged yet; or
            None.
        """
        slots = np.argsort(self.ids)
        local, *state = (x[slots] for x in self._stored)
        changes = local - self._old[slots]
        return CachedSnapshot(self.ids[slots], self._is_touched[slots], changes, state, pending)

    def resume(self, snapshot: CachedSnapshot) -> None:
        """Continue with the rows of a snapshot, in a trainer that was restarted after a failure.

        The snapshot has only the trainer's changes. The next pull must contain all these rows, and
        adds the servers' values.

        Args:
          snapshot: the snapshot. This object must have no rows yet.
        """
        self.add(snapshot.ids, np.zeros_like(snapshot.changes), snapshot.state)
        slots = self._slots.find(snapshot.ids)
        self._stored[0][slots] = snapshot.changes
        self._is_touched[slots] = snapshot.is_touched
        self._touched = [slots[snapshot.is_touched]]

    # -- as arrays -------------------------------------------------------------------------------

    def arrays(self, size: int) -> list[np.ndarray]:
        """Return all data as arrays of a fixed length, for a checkpoint.

        The first arrays are the row ids, and a mask of the rows with changes to send. Then come the
        local rows and the arrays of their optimizer state. The last array has the values on which
        the trainer and the servers last agreed.

        Args:
          size: length of each array. The row ids are padded with the value `size`, and the other
            arrays with zeros.
        """
        count = len(self)
        parts = [x[:count] for x in (self._is_touched.astype(np.int32), *self._stored, self._old)]
        behind = size - count
        zeros = [np.concatenate([x, np.zeros((behind, *x.shape[1:]), x.dtype)]) for x in parts]
        return [np.concatenate([self.ids, np.full(behind, size, np.int32)]), *zeros]

    @classmethod
    def from_arrays(cls, ids: np.ndarray, is_touched: np.ndarray, *rows: np.ndarray) -> CachedRows:
        """Return the rows that were saved in a checkpoint, from the result of `arrays`.

        Args:
          ids: row ids.
          is_touched: mask of the rows with changes that the trainer must send.
          rows: local rows, the arrays of their state, and the values on which the trainer and the
            servers last agreed.
        """
        size = len(ids)
        found = cls(rows[:-1])
        found._slots.add(ids[ids < size])
        *found._stored, found._old = rows
        found._is_touched = is_touched.astype(bool)
        found._touched = [np.flatnonzero(found._is_touched).astype(np.int32)]
        return found


def _longer(x: np.ndarray, size: int) -> np.ndarray:
    """Return a copy of an array that is extended to `size` rows with undefined values."""
    return np.concatenate([x, np.empty((size - len(x), *x.shape[1:]), x.dtype)])
