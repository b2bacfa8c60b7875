"""An asynchronous parameter server: each block is updated when its gradient comes, by whichever trainer sent it.

    every trainer:  hello                             once
                    recv                              the initial values
                    send..., recv                     every step
                    complete                          once

Nobody waits for anybody. A trainer's first whole gradient of a step makes the lr_sched block run, so that a count in
the optimizer's state is that of all trainers' steps, and its values are those of this trainer's step; `recv` gives what
is newest. With one trainer that is sequential training. One loop takes the messages and updates one block at a time,
which is one lock for each block and more: no update is lost, as it is where threads add to a block without one
(Hogwild). Gradients of several steps that a trainer's communicator has merged are one update, and as many steps.

Where gradients are compensated for their delay (`dtrans.parameter_server.dc_asgd`), what a trainer receives is kept for
it.

A trainer that fails, or falls silent, ends only itself: what it had sent stays, what was half sent is not used. The
server ends when every trainer has closed, and with an error when all have failed.

Source of the behaviour: `RunAsyncLoop` in paddle/fluid/operators/distributed_ops/listen_and_serv_op.cc.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dtrans.errors import PeerError, WireError
from dtrans.ops import BACKUP, MAX_MERGED, backup_of
from dtrans.run.net import wire
from dtrans.run.net.buffers import BufferPool
from dtrans.run.net.inbox import Inbox
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.presence import Presence, Say, answer, log, wanted
from dtrans.run.parameter_server.server_peers import ServerPeers
from dtrans.run.parameter_server.update import ServerUpdate


@dataclasses.dataclass
class _Step:
    """What a trainer has sent of the step it is at."""

    grads: Inbox
    number: int = 0
    values: Mapping[str, Any] | None = None  # what the lr_sched block made for it
    used: set[str] = dataclasses.field(default_factory=set)  # blocks that are updated


class AsyncServer:
    """What becomes of messages where trainers do not wait for each other. Arguments are those of `SyncServer`."""

    step = 0  # that trainers are welcomed at; each counts its own

    def __init__(self, update: ServerUpdate, state: dict[str, Any], trainers: Presence, say: Say) -> None:
        self.endpoint = update.endpoint
        self.state = state
        self.peers = ServerPeers(update.endpoint, (), on_trainer_exit="")
        self._trainers = trainers
        self._say = say
        self._update = update
        self._blocks = BlockUpdates(update)
        self._steps: dict[int, _Step] = {}
        self._pool = BufferPool()
        self._failed: set[int] = set()
        # the blocks of which it keeps what each trainer has
        self._backed = {n for n in update.params if backup_of(n, 0) in update.types}

    # -- what trainers say -----------------------------------------------------------------------

    def _step_of(self, k: int) -> _Step:
        if k not in self._steps:
            types = self._update.grad_types.items()
            told = f"is not a gradient that trainer {k} sends to pserver {self.endpoint}"
            memory = {n: self._pool.take(f"{n} of {k}", t.shape, t.dtype) for n, t in types}
            self._steps[k] = _Step(Inbox(memory, lambda name: f"{name} {told}"))
        return self._steps[k]

    def send(self, k: int, message: wire.Message) -> None:
        """Take gradients, and update the blocks that have all of theirs."""
        step = self._step_of(k)
        self._check_step(k, message)
        steps: Any = message.fields.get("steps", 1)
        if not 1 <= steps <= MAX_MERGED:
            raise WireError(f"gradients of {steps} steps, which must be a number from 1 to {MAX_MERGED}")
        step.grads.take(message)
        full = step.grads.memory.keys() - step.grads.missing()
        ready = self._blocks.ready(full, step.used)
        if ready and step.values is None:
            for _ in range(steps):  # a count is of steps, also where their gradients are merged
                made, step.values = self._blocks.begin(self.state)
                self.state |= made
        given = {**step.grads.memory, **{n + BACKUP: self.state[backup_of(n, k)] for n in self._backed}}
        for block in ready:
            assert step.values is not None
            made = self._blocks.apply(block, given, self.state, step.values)
            self.state |= jax.block_until_ready(made)  # the memory of gradients is written again with the next step
            step.used.add(block)
        if len(full) == len(step.grads.memory):
            step.number += 1
            step.grads.clear()
            step.values, step.used = None, set()

    def send_barrier(self, k: int, message: wire.Message) -> None:
        """Refuse what only synchronous trainers say."""
        raise WireError(
            f"send_barrier, and pserver {self.endpoint} is asynchronous: every role must plan the same mode"
        )

    def recv(self, k: int, message: wire.Message) -> None:
        """Answer a request for parameters."""
        t = self._trainers.known[k]
        self._check_step(k, message)
        t.wants = wanted(self._update, k, message["blocks"]) if "blocks" in message.fields else t.wants
        values = {n: np.asarray(self.state[n]) for n in t.wants}
        self.state |= {backup_of(n, k): self.state[n] for n in self._backed.intersection(t.wants)}
        answer(self._say, t, message["step"], values)

    def _check_step(self, k: int, message: wire.Message) -> None:
        step = self._step_of(k)
        if message["step"] != step.number:
            raise WireError(
                f"`{message.op}` of step {message['step']}, trainer {k} is at {step.number} on pserver {self.endpoint}"
            )
        if message.op != "send" and step.grads.begun:
            short = min(step.grads.missing())
            raise WireError(f"`{message.op}` of step {step.number}, but not all of {short} was sent")

    def complete(self, k: int, message: wire.Message) -> None:
        """Let a trainer leave that is done."""
        t = self._trainers.known[k]
        t.done = True
        self._say(t.address, "goodbye")
        if self._step_of(k).grads.begun:
            log.warning("pserver %s used only what was whole of the last step of trainer %d", self.endpoint, k)

    def abort(self, k: int, message: wire.Message) -> None:
        """Let a trainer leave that has failed."""
        self._say(self._trainers.known[k].address, "goodbye")
        self._leave(k, f"trainer {k} failed: {message['reason']}")

    def _leave(self, k: int, reason: str) -> None:
        """A trainer has failed: the others go on, if there are any."""
        self._trainers.known[k].done = self._trainers.known[k].failed = True
        self._failed.add(k)
        if len(self._failed) == self._trainers.count:
            raise PeerError(reason)
        log.warning("pserver %s goes on without a trainer: %s", self.endpoint, reason)

    # -- others ----------------------------------------------------------------------------------

    def take_peer(self, address: bytes, message: wire.Message) -> bool:
        """Take a message of another server; False, since there is none that it needs."""
        return False

    def look(self, now: float) -> None:
        """Go on without whoever has fallen silent; raise for those who never came."""
        for k, why in self._trainers.silent(now).items():
            self._leave(k, why)
        self._trainers.absent(now)
