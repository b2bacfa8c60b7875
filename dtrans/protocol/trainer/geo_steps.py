"""GEO-SGD: the steps after which a trainer sends its changes, and receives those of others.

    old      the values on which local parameters and the servers' last agreed
    push     puts d = (local - old) / trainers into the communicator's queue; old + d is the new old
    pull     takes the parameters received since: local + (server - old) is the new local, and the
             server's value is the new old

A push sends 1/trainers of a trainer's changes. The remainder stays between local and old, and the
next push divides it again: so does Paddle's code. In the end the servers have all changes of every
trainer: their parameters move by the sum of the trainers' changes, and not by the mean.

One push is on its way at a time. A step that has to push waits for the one before.

Source: `GeoSgdCommunicator::SendUpdateDenseVars` and `RecvUpdateDenseVars` in
paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


Values = Sequence[Any]  # the parameters, in the caller's order


class GeoQueue(Protocol):
    """A trainer's communicator."""

    def put(self, deltas: Values, /) -> None:
        """Put a push into the queue."""

    def received(self) -> int:
        """Return the number of pushes that the newest parameters have."""

    def newest(self) -> Values:
        """Return the newest parameters."""


class GeoArithmetic(Protocol):
    """Arithmetic on parameters."""

    def copied(self, values: Values, /) -> Values:
        """Copy parameters to memory that nothing else writes to."""

    def pushed(self, local: Values, old: Values, trainers: int, /) -> tuple[Values, Values]:
        """Return the deltas of a push, rounded as they are sent, and the new old values."""

    def pulled(self, local: Values, server: Values, old: Values, /) -> Values:
        """Return local parameters with the changes of other trainers."""


class GeoSteps:
    """Local side of one trainer.

    Args:
      queue: its communicator.
      arithmetic: on its arrays.
      trainers: number of trainers.
      values: the initial parameters.

    Attributes:
      local: the parameters after the last step.
    """

    def __init__(
        self, queue: GeoQueue, arithmetic: GeoArithmetic, trainers: int, values: Values
    ) -> None:
        self._queue, self._arithmetic, self._trainers = queue, arithmetic, trainers
        self._old = arithmetic.copied(values)
        self.local: Values = self._old
        self._steps = 0  # since the last push
        self._pushed = 0
        self._taken = 0  # pushes whose answer is in the parameters
        self._due = False  # a push is to be put into the queue
        self._blocks = False  # the step ends when its push is answered

    def step(self, values: Values, every: int, *, block_on_pull: bool) -> None:
        """Take the parameters after a step; push them after every `every` steps.

        The next step begins with `local` when this no longer `waits`.
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
        """True if the answer to the last push has to come before `go_on`."""
        return self._taken < self._pushed and (self._due or self._blocks)

    def finish(self) -> None:
        """Push the remaining changes, when this no longer `waits`."""
        if self.owes:
            self._due, self._blocks = True, False
            self.go_on()

    def go_on(self) -> None:
        """Take in received parameters, and push if that is due and no push is on its way."""
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
