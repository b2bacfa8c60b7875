"""The state of a synchronous server, and the update of one step at a time.

An update that reduces over rows is made in phases, with an exchange between servers after each but the last: it stops
there, and goes on when it is given what the other servers have sent.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import jax
import numpy as np

from dtrans.ir.array_fns import words
from dtrans.protocol.exchange import Exchange
from dtrans.protocol.presence import log, named
from dtrans.protocol.served import Vectors
from dtrans.run.parameter_server.update import CompiledUpdate, ServerUpdate


class SyncUpdate:
    """The updates of one server.

    Args:
      update: by the gradients of all trainers.
      state: name to array; the initial values.
      trainers: how many there are.

    Attributes:
      values: the parameters as memory to send from.
      exchange: the one that the update waits for.
    """

    def __init__(self, update: ServerUpdate, state: dict[str, Any], trainers: int) -> None:
        self.state = state
        self.exchange: Exchange | None = None
        self._whole = update
        self._all = frozenset(range(trainers))
        self._updates = {self._all: CompiledUpdate(update)}  # by whose gradients they are made of
        self._run: Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]] | None = None
        self._publish()

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """Make a step of the gradients of some of the trainers, as far as the first exchange; see `go_on`."""
        update = self._update_of(present, step)
        self._run = update.run({n: grads[n] for n in update.update.grad_types}, self.state)
        return self.go_on(None)

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """Make the step as far as the next exchange, and return the vectors for other servers; None when it is made.

        Args:
          arrived: what other servers have sent for the exchange before.
        """
        assert self._run is not None
        try:
            self.exchange, outgoing = next(self._run) if arrived is None else self._run.send(arrived)
        except StopIteration as made:
            self._run = self.exchange = None
            # the memory of its gradients and of what other servers sent is written again, so nothing may still read it
            self.state = jax.block_until_ready(made.value) if self._whole.exchanges else made.value
            self._publish()
            return None
        return outgoing

    def _update_of(self, present: frozenset[int], step: int) -> CompiledUpdate:
        """What makes the new state; of every set of trainers one is compiled."""
        if present not in self._updates:
            gone = named(sorted(self._all - present))
            told = "pserver %s goes on without %s, which left: step %d and later ones are of %s"
            log.warning(told, self._whole.endpoint, gone, step + 1, named(sorted(present)))
            self._updates[present] = CompiledUpdate(self._whole.sent_by(present))
        return self._updates[present]

    def _publish(self) -> None:
        """The parameters as memory to send from; waits until they are made."""
        self.values = {n: np.asarray(words(self.state[n])) for n in self._whole.params}
