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

from collections.abc import Generator, Sequence
from typing import Any, Protocol


Values = Sequence[Any]  # the parameters, in an order of the caller's
Waits = Generator[
    None, None, Values
]  # yields where it waits until all that was put is in what was received


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

    def step(self, values: Values, every: int, *, block_on_pull: bool) -> Waits:
        """What a step goes on with that has made `values`; every so many steps they are pushed."""
        self._steps += 1
        values = self._pull(values)
        if self._steps == every:
            if self._taken < self._pushed:
                yield
                values = self._pull(values)
            self._push(values)
            if block_on_pull:
                yield
                values = self._pull(values)
        self.local = values
        return values

    @property
    def owes(self) -> bool:
        """Whether steps were made since the last push."""
        return self._steps > 0

    def finish(self) -> Waits:
        """Push what was not."""
        if self.owes:
            if self._taken < self._pushed:
                yield
                self.local = self._pull(self.local)
            self._push(self.local)
        return self.local

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
