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

Source: `GeoSgdCommunicator::SendUpdateDenseVars` and `RecvUpdateDenseVars` in
paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


Values = Sequence[Any]  # one array for each parameter, in the order of the caller's parameters


class GeoQueue(Protocol):
    """Interface to a trainer's communicator."""

    def put(self, deltas: Values, /) -> None:
        """Put the deltas of a push into the queue."""

    def received(self) -> int:
        """Return the number of pushes that the newest parameters include."""

    def newest(self) -> Values:
        """Return the newest parameters."""


class GeoArithmetic(Protocol):
    """Interface to computations with the trainer's arrays."""

    def copied(self, values: Values, /) -> Values:
        """Copy parameters to new memory."""

    def pushed(self, local: Values, old: Values, trainers: int, /) -> tuple[Values, Values]:
        """Return the deltas of a push, rounded to the dtype that is sent, and the new `old`."""

    def pulled(self, local: Values, server: Values, old: Values, /) -> Values:
        """Return local + (server - old)."""


class GeoSteps:
    """Pushes and pulls of one trainer.

    Args:
      queue: the trainer's communicator.
      arithmetic: computations with the trainer's arrays.
      trainers: number of trainers.
      values: initial parameters.

    Attributes:
      local: parameters after the last step.
    """

    def __init__(
        self, queue: GeoQueue, arithmetic: GeoArithmetic, trainers: int, values: Values
    ) -> None:
        self._queue, self._arithmetic, self._trainers = queue, arithmetic, trainers
        self._old = arithmetic.copied(values)
        self.local: Values = self._old
        self._steps = 0  # number of steps since the last push
        self._pushed = 0  # number of pushes
        self._taken = 0  # number of pushes that the last pull includes
        self._due = False  # True if the trainer must push as soon as no push is pending
        self._blocks = False  # True if the step waits for the pull that follows its own push

    def step(self, values: Values, every: int, *, block_on_pull: bool) -> None:
        """Store the parameters after a step, and push after every `every` steps.

        When `waits` is False, the next step may begin with the parameters `local`.

        Args:
          values: parameters after the step.
          every: number of steps between two pushes.
          block_on_pull: True if the step also waits for the pull that follows its own push.
        """
        self._steps += 1
        self._due, self._blocks, self.local = self._steps == every, block_on_pull, values
        self.go_on()

    @property
    def owes(self) -> bool:
        """True if steps were made since the last push."""
        return self._steps > 0

    @property
    def waits(self) -> bool:
        """True if the step must wait for the answer to the last push. The caller calls `go_on`."""
        return self._taken < self._pushed and (self._due or self._blocks)

    def finish(self) -> None:
        """Push the changes since the last push. Call it only when `waits` is False."""
        if self.owes:
            self._due, self._blocks = True, False
            self.go_on()

    def go_on(self) -> None:
        """Pull if new parameters have arrived. Then push if a push is due and none is pending."""
        self.local = self._pull(self.local)
        if self._due and self._taken == self._pushed:
            self._due = False
            self._push(self.local)

    def _push(self, values: Values) -> None:
        deltas, self._old = self._arithmetic.pushed(values, self._old, self._trainers)
        self._queue.put(deltas)
        self._pushed += 1
        self._steps = 0

    def _pull(self, values: Values) -> Values:
        if self._taken == self._pushed or self._queue.received() < self._pushed:
            return values
        server = self._queue.newest()
        self._taken = self._pushed
        pulled = self._arithmetic.pulled(values, server, self._old)
        self._old = self._arithmetic.copied(server)
        return pulled
