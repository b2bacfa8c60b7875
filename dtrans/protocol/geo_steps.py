"""GEO-SGD beside a trainer's steps: when what has changed is sent, and when what others have
changed is taken in.

    old      what local parameters and the servers' agreed on
    push     d = (local - old) / trainers is put into the communicator's queue; old + d is the new old
    pull     what the communicator has received since: local + (server - old), and the server's is the new old

Of what a trainer changes, a push gives the servers 1/trainers, and what is left stays between local
and old, to be divided again with the next one: so says Paddle's code. In the end the servers have
all of it, of every trainer: their parameters move by the sum of what trainers do, not by the mean.

One push is under way at a time. A step that is to push and finds one under way waits for it.

Source: `GeoSgdCommunicator::SendUpdateDenseVars` and `RecvUpdateDenseVars` in
paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


Values = Sequence[Any]  # the parameters, in an order of the caller's


class GeoQueue(Protocol):
    """What sends and receives for a trainer."""

    def put(self, deltas: Values, /) -> None:
        """Let a push be sent."""

    def received(self) -> int:
        """How many pushes are in what was received last."""

    def newest(self) -> Values:
        """The parameters that were received last."""


class GeoArithmetic(Protocol):
    """How parameters are added to one another."""

    def copied(self, values: Values, /) -> Values:
        """The same, in memory that nobody else writes to."""

    def pushed(self, local: Values, old: Values, trainers: int, /) -> tuple[Values, Values]:
        """What a push sends, rounded as it is sent, and what local parameters and the servers'
        agree on from then."""

    def pulled(self, local: Values, server: Values, old: Values, /) -> Values:
        """Local parameters with what others have changed."""


class GeoSteps:
    """The local side of one trainer.

    Args:
      queue: of its own.
      arithmetic: of its arrays.
      trainers: how many there are.
      values: the parameters that it starts from.

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
        """Take the parameters that a step has made; they are pushed every so many steps.

        The next step begins with `local` when it no longer `waits`.
        """
        self._steps += 1
        self._due, self._blocks, self.local = self._steps == every, block_on_pull, values
        self.go_on()

    @property
    def owes(self) -> bool:
        """Return True if steps were made since the last push."""
        return self._steps > 0

    @property
    def waits(self) -> bool:
        """Return True if the answer to the last push has to come before `go_on`."""
        return self._taken < self._pushed and (self._due or self._blocks)

    def finish(self) -> None:
        """Push the remaining changes, when it no longer `waits`."""
        if self.owes:
            self._due, self._blocks = True, False
            self.go_on()

    def go_on(self) -> None:
        """Take in what has come, and push if that is due and no push is under way."""
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
