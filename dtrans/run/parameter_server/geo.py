"""GEO-SGD in a trainer's process: when what has changed is sent, and when what others have changed is taken in.

    old      what local parameters and the server's agreed on
    push     d = (local - old) / trainers is put into the communicator's queue; old + d is the new old
    pull     what the communicator has received since: local + (server - old), and the server's is the new old

Of what a trainer changes, a push gives the servers 1/trainers, and what is left stays between local and old, to be
divided again with the next one: so says Paddle's code. In the end the servers have all of it, of every trainer: their
parameters move by the sum of what trainers do, not by the mean.

One push is under way at a time. A step that is to push and finds one under way waits for it.

Source: `GeoSgdCommunicator::SendUpdateDenseVars` and `RecvUpdateDenseVars` in
paddle/fluid/operators/distributed/communicator.cc.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from dtrans.errors import StateError
from dtrans.protocol.traffic import Leaf
from dtrans.run.parameter_server.communicator import Communicator


class GeoTrainer:
    """The local side of one trainer.

    Args:
      communicator: of its own, which receives the parameters by their position.
      leaves: the parameters, as deltas to be sent.
      trainers: how many there are.
      values: the parameters that it starts from.
    """

    def __init__(
        self, communicator: Communicator, leaves: Sequence[Leaf], trainers: int, values: Sequence[Any]
    ) -> None:
        self._communicator = communicator
        self._leaves = leaves
        self._trainers = trainers
        self._old = _copied(list(values))
        self._local = self._old
        self._steps = 0  # since the last push
        self._pushed = 0
        self._taken = 0  # pushes whose answer is in the parameters

    def step(self, values: Sequence[Any], every: int, *, block_on_pull: bool) -> Sequence[Any]:
        """What a step goes on with that has made `values`; every so many steps they are pushed."""
        self._steps += 1
        values = self._pull(values)
        if self._steps == every:
            if self._taken < self._pushed:
                self._communicator.barrier()
                values = self._pull(values)
            self._push(values)
            if block_on_pull:
                self._communicator.barrier()
                values = self._pull(values)
        self._local = values
        return values

    def finish(self) -> None:
        """Push what was not. Raises StateError where that is not there any more."""
        if not self._steps:
            return
        if any(x.is_deleted() for x in self._local):
            raise StateError(
                "the parameters of the last step were donated to another computation, and what has changed in them "
                "since the last push is lost: close the executor before"
            )
        if self._taken < self._pushed:
            self._communicator.barrier()
            self._local = self._pull(self._local)
        self._push(self._local)

    def _push(self, values: Sequence[Any]) -> None:
        deltas, self._old = _pushed(self._trainers)(list(values), self._old)
        self._communicator.put(list(zip(self._leaves, deltas, strict=True)))
        self._pushed += 1
        self._steps = 0

    def _pull(self, values: Sequence[Any]) -> Sequence[Any]:
        if self._taken == self._pushed or self._communicator.received() < self._pushed:
            return values
        newest = self._communicator.newest()
        server = jax.device_put([newest[str(i)] for i in range(len(self._leaves))])
        self._taken = self._pushed
        pulled = _pulled(list(values), server, self._old)
        self._old = _copied(server)
        return pulled


@jax.jit
def _copied(values: list[Any]) -> list[jax.Array]:
    # the memory of what was received is written again when nobody refers to it, and a user may donate what they have
    return [x.copy() for x in values]


@functools.cache
def _pushed(trainers: int) -> Any:
    def fn(local: list[Any], old: list[Any]) -> tuple[list[Any], list[Any]]:
        deltas = [((x - o) / trainers).astype(o.dtype) for x, o in zip(local, old, strict=True)]
        deltas = jax.lax.optimization_barrier(deltas)  # rounded as they are sent, so that old is what the server has
        return deltas, [o + d for o, d in zip(old, deltas, strict=True)]

    return jax.jit(fn)


@jax.jit
def _pulled(local: list[Any], server: list[Any], old: list[Any]) -> list[Any]:
    return [x + (s - o) for x, s, o in zip(local, server, old, strict=True)]
