"""Steps of an asynchronous server's trainers: the gradients that arrive, and their updates.

Trainers do not wait for each other, so their current steps have different numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server_blocks import BlockUpdate, ServerBlocks
from dtrans.protocol.tables.row_requests import RowRequests


@dataclasses.dataclass
class StepUpdates:
    """Updates that one step of a trainer causes: one update of each block.

    Attributes:
      values: outputs of the learning rate schedules (lr_sched) for this step; None before the
        first complete gradient.
      used: names of the updated blocks.
    """

    values: Mapping[str, Any] | None = None
    used: set[str] = dataclasses.field(default_factory=set)

    def take(
        self,
        blocks: BlockUpdate,
        state: dict[str, Any],
        arrived: Collection[str],
        inputs: Mapping[str, Any],
        steps: int = 1,
    ) -> list[str]:
        """Update each block with a complete gradient, and return the names of these blocks.

        Args:
          blocks: computes the new state of a block.
          state: arrays by name; updated in place.
          arrived: names of the complete gradients.
          inputs: gradients by name. With delay compensation, `inputs` also contains the parameters
            that the trainer has received.
          steps: number of steps of the trainer from which the gradients are merged.
        """
        ready = blocks.ready(arrived, self.used)
        if ready and self.values is None:
            # A learning rate schedule counts each of the merged steps.
            for _ in range(steps):
                changed, self.values = blocks.begin(state)
                state |= changed
        for block in ready:
            assert self.values is not None
            state |= blocks.apply(block, inputs, state, self.values)
            self.used.add(block)
        return ready


@dataclasses.dataclass
class AsyncStep:
    """Progress of one trainer.

    Attributes:
      grads: gradients of the current step, as they arrive.
      number: number of the current step in the trainer's messages.
      read: number of steps of other trainers that the trainer's newest parameters include.
      staleness: number of other trainers' steps that are missing in the parameters from which the
        trainer computed its last gradients; None before the first gradients.
      updates: updates with the gradients of the current step.
    """

    grads: Inbox
    number: int = 0
    read: int = 0
    staleness: int | None = None
    updates: StepUpdates = dataclasses.field(default_factory=StepUpdates)


class AsyncSteps:
    """Current steps of one server's trainers.

    Args:
      served: the server's blocks.
      requests: requests for table rows. Gradients of these rows arrive in the inboxes of the steps.

    Attributes:
      begun: current step of each trainer that has sent a message, by trainer id.
    """

    def __init__(self, served: ServerBlocks, requests: RowRequests) -> None:
        self._served, self._requests = served, requests
        self._pool = BufferPool()
        self.begun: dict[int, AsyncStep] = {}

    def of_trainer(self, k: int) -> AsyncStep:
        """Return trainer k's current step; begin the first step if there is none."""
        if k not in self.begun:
            types = self._served.gradients.items()
            refusal = f"is not a gradient that trainer {k} sends to pserver {self._served.endpoint}"
            memory = {n: self._pool.take(f"{n} of {k}", t.shape, t.dtype) for n, t in types}
            inbox = Inbox(memory | self._requests.memory_of(k), lambda name: f"{name} {refusal}")
            self.begun[k] = AsyncStep(inbox)
        return self.begun[k]

    def check_number(self, k: int, message: wire.Message) -> AsyncStep:
        """Return trainer k's current step; raise WireError if `message` is from another step."""
        step = self.of_trainer(k)
        if message["step"] != step.number:
            raise WireError(
                f"trainer {k} sent `{message.op}` of step {message['step']}, but pserver "
                f"{self._served.endpoint} expects messages of step {step.number} from trainer {k}"
            )
        return step

    def check_between(self, k: int, message: wire.Message) -> AsyncStep:
        """Return trainer k's current step; raise WireError if one of its gradients has arrived."""
        step = self.check_number(k, message)
        if step.grads.begun:
            short = min(step.grads.missing())
            raise WireError(
                f"trainer {k} sent `{message.op}` of step {step.number} before gradient {short} "
                "was complete"
            )
        return step
