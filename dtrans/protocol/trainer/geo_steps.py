"""GEO-SGD: exchange of parameter changes between a trainer and the servers every few steps.

    local    the trainer's parameters
    old      the value on which the trainer and the servers last agreed
    push     sends d = (local - old) / trainers, and sets old = old + d
    pull     receives the servers' value `server`, and sets local = local + (server - old) and
             old = server

A push sends 1/trainers of the difference between local and old, as in Paddle. Later pushes send the
remainder, so after many pushes the servers have added the sum of all trainers' changes. The servers
do not compute the mean of the changes.

Only one push is pending at a time: a step that must push waits for the answer to the previous push.

After the failure of a process, each surviving trainer connects to the servers again (`rejoin`). It
pulls, and repeats the pending push on the servers that have not received this push. So each
surviving server applies each push once. A trainer that starts again begins with the servers'
parameters, and adds earlier changes that it had not pushed (`resume`).

Source: `GeoSgdCommunicator::SendUpdateDenseVars` and `RecvUpdateDenseVars` in
paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedSnapshot
from dtrans.protocol.tables.table_rows import BlockRowSet


Values = Sequence[Any]  # one array for each parameter, in the order of the caller's parameters


class GeoQueue(Protocol):
    """Interface of `GeoSteps` to the communicator, which exchanges messages with the servers."""

    def put(self, deltas: Values, steps: int, /) -> None:
        """Send changes of parameters (deltas) to the servers, in the background.

        Args:
          deltas: one array for each parameter.
          steps: number of steps in which these changes were made.
        """

    def repeat(self, deltas: Values, steps: int, endpoints: Collection[str], /) -> None:
        """Send changes again, after a failure, to the servers that have not received them.

        Args:
          deltas, steps: as for `put`.
          endpoints: endpoints of these servers.
        """

    def received(self) -> int:
        """Return the number of this trainer's pushes (sent changes) in the newest parameters."""

    def newest(self) -> Values:
        """Return the newest parameters."""


class GeoArithmetic(Protocol):
    """Interface of `GeoSteps` to computations with arrays, on NumPy or on devices."""

    def copied(self, values: Values, /) -> Values:
        """Copy parameters to new memory."""

    def pushed(self, local: Values, old: Values, trainers: int, /) -> tuple[Values, Values]:
        """Compute the changes to send (a push), and the new value of `old`.

        The changes are (local - old) / trainers, rounded to the dtype that is sent.

        Args:
          local: the trainer's parameters.
          old: the value on which the trainer and the servers last agreed.
          trainers: number of trainers.

        Returns:
          The changes, and `old` plus the changes.
        """

    def pulled(self, local: Values, server: Values, old: Values, /) -> Values:
        """Add the changes of other trainers to local parameters: return local + (server - old).

        Args:
          local: the trainer's parameters.
          server: parameters from the servers.
          old: the value on which the trainer and the servers last agreed.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class GeoSnapshot:
    """Snapshot of one trainer of GEO-SGD, from which a new process continues after a failure.

    A *push* sends a part of the trainer's parameter changes to the servers.

    Attributes:
      step: number of the trainer's steps.
      pushed: number of these steps with pushed changes. It includes a pending push (one without an
        answer).
      pending: number of steps of the pending push; 0 if none is pending.
      changes: changes that were not pushed, by name of the parameter.
      deltas: deltas of the pending push, by name of the parameter; empty if none is pending.
      local: arrays that only this trainer has, such as the optimizer's state, by name.
      tables: rows that the trainer stores, by name of the table.
      pushes: for each push after the snapshot, the ids of the pushed rows, by name of the table.
        The key of a push is the number of this trainer's steps up to the push.
    """

    step: int
    pushed: int
    pending: int
    changes: Mapping[str, Any]
    deltas: Mapping[str, Any]
    local: Mapping[str, Any]
    tables: Mapping[str, CachedSnapshot] = dataclasses.field(default_factory=dict)
    pushes: Mapping[int, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)


class GeoReturn:
    """Plan by which a new process replaces a lost trainer of GEO-SGD.

    The new process starts from the lost trainer's snapshot. A push (changes of parameters sent to
    all servers) may have reached only some servers before the failure. If the lost process had not
    pushed since the snapshot, the new process repeats the pending push on the servers that lack it.
    Otherwise some servers may lack the last push, and its values are lost. The new process then
    pushes changes from the snapshot to these servers instead.

    Args:
      snapshot: the trainer's snapshot.
      received: number of the trainer's steps that each server has received, by endpoint.
      trainers: number of trainers.
      push_every: number of steps between two pushes.

    Attributes:
      count: number of the trainer's steps up to the last push.
      step: number of the trainer's steps.
      repeated: number of steps in the push that replaces the last push on the servers that lack it.
    """

    def __init__(
        self, snapshot: GeoSnapshot, received: Mapping[str, int], trainers: int, push_every: int
    ) -> None:
        self._snapshot, self._received = snapshot, received
        self._trainers, self._push_every = trainers, push_every
        self.count = max(snapshot.pushed, *received.values())
        self.step = max(snapshot.step, self.count)
        lacking = [n for n in received.values() if n < self.count]
        self.repeated = snapshot.pending
        if self.count > snapshot.pushed:
            self.repeated = self.count - max(lacking, default=self.count)

    @property
    def counts(self) -> dict[str, int]:
        """Number of the lost trainer's steps that each server must count, by endpoint.

        A server that lacks the last push (changes of parameters) counts the steps before this push.
        """
        found = {}
        for endpoint, n in self._received.items():
            found[endpoint] = self.count - (self.repeated if n < self.count else 0)
        return found

    def split(
        self, endpoint: str, change: np.ndarray, delta: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Divide the changes of a block into a part to push now and a part to keep.

        A block is a part of a parameter on one server. Each push after the snapshot has sent
        1/trainers of the remaining changes. So the changes in the snapshot are reduced accordingly.

        Args:
          endpoint: server of the block.
          change: changes of the block in the snapshot.
          delta: changes of a pending push in the snapshot; zeros if no push was pending.

        Returns:
          The changes to keep, and the changes to push to the servers that lack the last push.
        """
        received = self._received[endpoint]
        is_lacking = received < self.count
        if self.count == self._snapshot.pushed:
            return change, delta if is_lacking else np.zeros_like(delta)
        pushes = -(-max(0, received - self._snapshot.pushed) // self._push_every)
        change = change * np.asarray((1 - 1 / self._trainers) ** pushes, change.dtype)
        share = np.asarray(1 / self._trainers if is_lacking else 0, change.dtype)
        return change - share * change, share * change

    def split_rows(
        self, table: str, endpoints: Sequence[str], spans: Sequence[BlockRowSet]
    ) -> tuple[CachedSnapshot, RowGradient]:
        """Divide the changes of a table's rows into a part to push now and a part to keep.

        It is like `split`, but each push contains only some rows. `GeoSnapshot.pushes` has the rows
        of each push.

        Args:
          table: name of the table.
          endpoints: server of each block (part of the table).
          spans: set of the table's rows that each block contains.

        Returns:
          The rows with the changes to keep, and the changes to push to servers that lack the last
          push.
        """
        snapshot = self._snapshot.tables[table]
        if self.count == self._snapshot.pushed:
            return snapshot, self._lacking_rows(
                snapshot.pending or _no_rows(snapshot), endpoints, spans
            )
        received = np.empty(len(snapshot.ids), np.int64)
        for endpoint, span in zip(endpoints, spans, strict=True):
            received[span.among(snapshot.ids)] = self._received[endpoint]
        changes, is_touched = snapshot.changes.copy(), snapshot.is_touched.copy()
        repeated = _no_rows(snapshot)
        rest = np.asarray(1 - 1 / self._trainers, changes.dtype)
        for count, ids in sorted(self._snapshot.pushes.items()):
            if not self._snapshot.pushed < count <= self.count:
                continue
            is_pushed = np.isin(snapshot.ids, ids[table])
            is_touched &= ~is_pushed
            changes[is_pushed & (count <= received)] *= rest
            if count == self.count:
                lacks = is_pushed & (count > received)
                repeated = RowGradient(snapshot.ids[lacks], changes[lacks] - rest * changes[lacks])
                changes[lacks] -= repeated.rows
        return dataclasses.replace(snapshot, is_touched=is_touched, changes=changes), repeated

    def _lacking_rows(
        self, deltas: RowGradient, endpoints: Sequence[str], spans: Sequence[BlockRowSet]
    ) -> RowGradient:
        """Select the changes of rows on servers that have not received the trainer's last push."""
        lacks = np.zeros(len(deltas.ids), bool)
        for endpoint, span in zip(endpoints, spans, strict=True):
            lacks[span.among(deltas.ids)] = self._received[endpoint] < self.count
        return RowGradient(deltas.ids[lacks], np.asarray(deltas.rows)[lacks])


def _no_rows(snapshot: CachedSnapshot) -> RowGradient:
    return RowGradient(snapshot.ids[:0], snapshot.changes[:0])


class GeoSteps:
    """Driver of one trainer of GEO-SGD: decides after each step what to send and receive.

    A *push* sends a part of the trainer's parameter changes to the servers. A *pull* adds the
    changes of other trainers.

    Args:
      queue: the trainer's communicator.
      arithmetic: computations with the trainer's arrays.
      trainers: number of trainers.
      values: initial parameters.
      count: number of the trainer's steps that the servers have received before.

    Attributes:
      local: parameters after the last step.
      count: number of steps with pushed changes. It includes a pending push.
    """

    def __init__(
        self,
        queue: GeoQueue,
        arithmetic: GeoArithmetic,
        trainers: int,
        values: Values,
        count: int = 0,
    ) -> None:
        self._queue, self._arithmetic, self._trainers = queue, arithmetic, trainers
        self._old = arithmetic.copied(values)
        self.local: Values = self._old
        self.count = count
        self._steps = 0  # number of steps since the last push
        self._pushed = 0  # number of pushes
        self._taken = 0  # number of pushes that are included in the last pull
        self._due = False  # True if the trainer must push as soon as no push is pending
        self._blocks = False  # True if the step waits for the pull that follows the step's push
        # deltas of the pending push, and the number of its steps
        self._pending: tuple[Values, int] | None = None
        self._must_pull = False  # True from `rejoin` until the next pull

    def step(self, values: Values, every: int, *, block_on_pull: bool) -> None:
        """Store the parameters after a step, and send the changes (push) after every few steps.

        Then, while `waits` is True, the trainer must wait and call `go_on`. When it is False, the
        next step begins with the parameters `local`.

        Args:
          values: parameters after the step.
          every: number of steps between two pushes.
          block_on_pull: True if the step also waits for the pull that follows its own push.
        """
        self.end_step(values, every, block_on_pull=block_on_pull)
        self.go_on()

    def end_step(self, values: Values, every: int, *, block_on_pull: bool) -> None:
        """Store the parameters after a step, without sending anything yet.

        The caller must then call `go_on`, which communicates. If `go_on` fails, the caller can
        repeat it without storing the step again.

        Args:
          values, every, block_on_pull: as for `step`.
        """
        self._steps += 1
        self._due, self._blocks, self.local = self._steps >= every, block_on_pull, values

    @property
    def owes(self) -> bool:
        """True if the trainer has made steps since its last push of changes."""
        return self._steps > 0

    @property
    def waits(self) -> bool:
        """True if the next step must wait until the servers have answered the last push.

        A push sends changes of parameters. The trainer calls `go_on` until this is False.
        """
        is_pending = self._taken < self._pushed
        return self._must_pull or (is_pending and (self._due or self._blocks))

    def finish(self) -> None:
        """Send the changes since the last push, at the end of the job.

        Call it only when `waits` is False.
        """
        if self.owes:
            self._due, self._blocks = True, False
            self.go_on()

    def go_on(self) -> None:
        """Add newly received changes of other trainers, then send this trainer's changes if due.

        While an earlier push (changes that were sent) has no answer, nothing is sent.
        """
        self.local = self._pull(self.local)
        if self._due and self._taken == self._pushed and not self._must_pull:
            self._due = False
            self._push(self.local)

    def _push(self, values: Values) -> None:
        deltas, self._old = self._arithmetic.pushed(values, self._old, self._trainers)
        # `put` raises an error after a failure, and `rejoin` then repeats the push
        self._pending = deltas, self._steps
        self.count += self._steps
        self._pushed += 1
        self._steps = 0
        self._queue.put(*self._pending)

    def _pull(self, values: Values) -> Values:
        is_current = self._taken == self._pushed and not self._must_pull
        if is_current or self._queue.received() < self._pushed:
            return values
        server = self._queue.newest()
        self._taken, self._pending, self._must_pull = self._pushed, None, False
        pulled = self._arithmetic.pulled(values, server, self._old)
        self._old = self._arithmetic.copied(server)
        return pulled

    # -- failures ----------------------------------------------------------------------------------

    def counts(self, received: Mapping[str, int]) -> dict[str, int]:
        """Return how many of this trainer's steps each server must count after a failure.

        Some servers may have received the trainer's last push (changes of parameters), and others
        not. A server that lacks it counts the steps before this push, until the push is repeated.

        Args:
          received: number of this trainer's steps that each server has received, by endpoint.
        """
        repeated = self._lacking(received)
        steps = 0 if self._pending is None else self._pending[1]
        return {ep: self.count - (steps if ep in repeated else 0) for ep in received}

    def rejoin(self, received: Mapping[str, int]) -> None:
        """Continue after the failure of another process, with new connections to the servers.

        The last push (changes of parameters) is repeated on the servers that lack it. The next
        `go_on` receives the servers' parameters.

        Args:
          received: as for `counts`.
        """
        self._pushed = self._taken = 0
        self._must_pull = True
        lacking = self._lacking(received)
        if self._pending is not None and lacking:
            self._pushed = 1
            self._queue.repeat(*self._pending, lacking)

    def _lacking(self, received: Mapping[str, int]) -> list[str]:
        """Return the servers that have not received the changes that this trainer sent last."""
        if self._pending is None:
            return []
        return [ep for ep, count in received.items() if count < self.count]

    def unpushed(self, values: Values) -> list[Any]:
        """Return this trainer's changes of parameters that it has not sent to the servers yet.

        Args:
          values: the parameters before the next step.
        """
        return [x - old for x, old in zip(values, self._old, strict=True)]

    @property
    def pending(self) -> tuple[Values, int]:
        """Changes of parameters that were sent and have no answer, and the number of their steps.

        Without such a push, the result is ((), 0).
        """
        return ((), 0) if self._pending is None else self._pending

    def resume(
        self, changes: Values, deltas: Values, begin: GeoReturn, received: Mapping[str, int]
    ) -> None:
        """Continue a lost trainer in this new process, from the changes in its snapshot.

        Args:
          changes: changes to add to the servers' parameters.
          deltas: deltas to push to the servers that lack the last push.
          begin: step counts with which the process starts.
          received: as for `counts`.
        """
        self._old = [old + d for old, d in zip(self._old, deltas, strict=True)]
        self.local = [old + x for old, x in zip(self._old, changes, strict=True)]
        self.count, self._steps = begin.count, begin.step - begin.count
        self._pending = (deltas, begin.repeated) if begin.repeated else None
        self.rejoin(received)
