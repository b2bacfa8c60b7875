"""An asynchronous parameter server: it updates each block when a trainer's gradient of it arrives.

    every trainer:  hello                             once
                    recv                              the initial values
                    prefetch..., send..., recv        every step
                    complete                          once

Trainers do not wait for each other. The first complete gradient of a trainer's step runs the
lr_sched block. So a count in the optimizer's state counts the steps of all trainers, and a schedule
has the value of this trainer's step. `recv` returns the newest values. With one trainer the result
is that of sequential training.

One loop takes the messages and updates one block at a time. That acts as a lock for each block: no
update is lost, as it is if threads add to a block without a lock (Hogwild). Gradients of several
steps that a trainer's communicator has merged are one update, and count as their steps.

A trainer asks for rows of tables before it uses them (`prefetch`), and receives the newest values.
Their gradients arrive as others do. Trainers of GEO-SGD store the rows that they have asked for. A
trainer that asks for parameters first receives the stored rows that others have changed
(`changed_rows`).

With delay compensation (`dtrans.parameter_server.dc_asgd`), the server stores what each trainer has
received; rows of tables until their gradients are used.

A trainer that fails or is lost ends alone. Its complete gradients stay, and incomplete ones are
dropped. The server ends when every trainer has closed, and with an error when all have failed.

Source of the behaviour: `RunAsyncLoop` in
paddle/fluid/operators/distributed_ops/listen_and_serv_op.cc.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dtrans.errors import PeerError, WireError
from dtrans.ops import BACKUP, MAX_MERGED, backup_of
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server.server_peers import ServerPeers
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry, answer, log, wanted
from dtrans.protocol.server_blocks import BlockUpdate, ServerBlocks
from dtrans.protocol.tables.changed_rows import UnseenChanges
from dtrans.protocol.tables.row_requests import RowRequests
from dtrans.protocol.tables.stored_tables import StoredTables, check_eviction, evict


@dataclasses.dataclass
class StepUpdates:
    """Updates by the gradients of one step of a trainer, each block once.

    Attributes:
      values: outputs of the lr_sched block for this step; None before its first complete gradient.
      used: the updated blocks.
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
        """Update the blocks whose gradients are all here, and return their names.

        Args:
          blocks: computes new state.
          state: name to array; updated in place.
          arrived: names of the complete gradients.
          inputs: these gradients by name, and the parameters that the trainer received, if updates
            read them.
          steps: number of steps whose gradients are merged.
        """
        ready = blocks.ready(arrived, self.used)
        if ready and self.values is None:
            for _ in range(steps):  # a schedule counts every step of merged gradients
                changed, self.values = blocks.begin(state)
                state |= changed
        for block in ready:
            assert self.values is not None
            state |= blocks.apply(block, inputs, state, self.values)
            self.used.add(block)
        return ready


@dataclasses.dataclass
class _Step:
    """Progress of one trainer in its step."""

    grads: Inbox
    number: int = 0
    count: int = 0  # steps so far; a message may have the gradients of several
    read: int = 0  # steps of other trainers in the parameters that it received last
    staleness: int | None = None  # steps of other trainers that its last gradients lacked
    updates: StepUpdates = dataclasses.field(default_factory=StepUpdates)


class AsyncServer:
    """Handler of messages of a server whose trainers do not wait for each other.

    Args:
      served: the server's blocks.
      update: computes new state from gradients, block by block.
      state: name to array; the initial values.
      trainers: of the server.
      say: sends a message.

    Attributes:
      tables: the server's blocks of tables, if any.
    """

    step = 0  # that trainers are welcomed at; each counts its own
    word, idle = "asynchronous", "serving"

    def __init__(
        self,
        served: ServerBlocks,
        update: BlockUpdate,
        state: dict[str, Any],
        trainers: TrainerRegistry,
        say: Say,
    ) -> None:
        self.endpoint = served.endpoint
        self.state = state
        self.peers = ServerPeers(served.endpoint, (), on_trainer_exit="")
        self._trainers = trainers
        self._say = say
        self._served = served
        self._blocks = update
        self._steps: dict[int, _Step] = {}
        self._pool = BufferPool()
        self._requests = RowRequests(served.endpoint, served.tables)
        self._changed = UnseenChanges(served.tables, trainers.count)
        self._failed: set[int] = set()
        self._count = 0  # steps of all trainers
        self.tables: StoredTables | None = None

    def step_count(self) -> int:
        """Return the number of steps that the furthest trainer has made."""
        return max((step.count for step in self._steps.values()), default=0)

    def progress(self) -> dict[int, int]:
        """Return the number of steps that each trainer has made; empty if this server gets no
        gradient."""
        counts = bool(self._served.gradients or self._served.tables)
        return {k: step.count for k, step in self._steps.items()} if counts else {}

    def staleness(self, k: int) -> int | None:
        """Return the number of steps of other trainers that the last gradients of one lacked; None
        before there are any."""
        return self._steps[k].staleness if k in self._steps else None

    def doing(self, k: int) -> str:
        """Return the progress of a trainer in its step."""
        if k not in self._trainers.known:
            return "not here yet"
        return self._steps[k].grads.phase() if k in self._steps else "computing"

    def awaited(self) -> str:
        """Return an empty text: no trainer waits for another."""
        return ""

    # -- what trainers say -----------------------------------------------------------------------

    def _step_of(self, k: int) -> _Step:
        if k not in self._steps:
            types = self._served.gradients.items()
            refusal = f"is not a gradient that trainer {k} sends to pserver {self.endpoint}"
            memory = {n: self._pool.take(f"{n} of {k}", t.shape, t.dtype) for n, t in types}
            self._steps[k] = _Step(
                Inbox(memory | self._requests.memory_of(k), lambda name: f"{name} {refusal}")
            )
        return self._steps[k]

    def send(self, k: int, message: wire.Message) -> None:
        """Take gradients, and update the blocks that have all of theirs."""
        step = self._step_of(k)
        self._check_step(k, message)
        steps: Any = message.fields.get("steps", 1)
        if not 1 <= steps <= MAX_MERGED:
            raise WireError(
                f"gradients of {steps} steps, which must be a number from 1 to {MAX_MERGED}"
            )
        step.grads.take(message)
        full = step.grads.memory.keys() - step.grads.missing()
        inputs = {
            **self._requests.gradients(k, step.grads),
            **self._requests.backups(k),
            **{n + BACKUP: self.state[backup_of(n, k)] for n in self._served.backed},
        }
        for block in step.updates.take(self._blocks, self.state, full, inputs, steps):
            if block in self._changed.tables:
                gradient = self._served.tables[block].gradients[k]
                self._changed.changed(k, block, inputs[gradient].ids)
        if len(full) == len(step.grads.memory):
            step.number += 1
            step.staleness = self._count - step.count - step.read
            step.count += steps
            self._count += steps
            step.grads.clear()
            self._requests.used(k, step.grads, steps)
            step.updates = StepUpdates()

    def send_barrier(self, k: int, message: wire.Message) -> None:
        """Refuse a message that only synchronous trainers send."""
        raise WireError(
            f"send_barrier, and pserver {self.endpoint} is asynchronous: every role must plan the "
            "same mode"
        )

    def prefetch(self, k: int, message: wire.Message) -> None:
        """Answer a request for rows of a table with the newest values."""
        step = self._step_of(k)
        self._check_number(k, message)
        if "ahead" in message.fields:
            raise WireError(
                "rows are announced to synchronous servers alone: every role must plan the same "
                "mode"
            )
        asked = self._requests.take(k, message, step.grads)
        if asked is not None:
            name, ids, train = asked
            rows = self._blocks.rows(name, ids, self.state, train=train)
            if train:
                self._requests.answered(k, name, ids, rows)
                self._changed.asked(k, name, ids)
            at = {"step": message["step"], "table": name, **message.request}
            self._say(self._trainers.known[k].address, "rows", [(name, rows)], **at)

    def row_ids(self, k: int, message: wire.Message) -> None:
        """Take the row ids of the gradient that follows."""
        step = self._step_of(k)
        self._check_number(k, message)
        self._requests.follows(k, message, step.grads)

    def evict(self, k: int, message: wire.Message) -> None:
        """Evict rows of a table that no update has used for many steps, and that have no pending
        gradient."""
        name, unused_for = check_eviction(self.endpoint, self._served.tables, k, message)
        self._check_number(k, message)
        fields = evict(self.tables, name, unused_for, self._requests.under_way(name))
        self._say(self._trainers.known[k].address, "evicted", **fields, **message.request)

    def check_between(self, k: int, message: wire.Message) -> None:
        """Raise WireError unless a trainer is between two steps."""
        self._check_step(k, message)

    def saving(self, k: int, message: wire.Message) -> None:
        """Take the message that a trainer waits for a checkpoint; here nobody waits for the
        trainer."""
        self._check_number(k, message)

    def recv(self, k: int, message: wire.Message) -> None:
        """Answer a request for parameters."""
        t = self._trainers.known[k]
        self._check_step(k, message)
        step = self._step_of(k)
        step.read = self._count - step.count
        if "blocks" in message.fields:
            t.wants = wanted(self._served, k, message["blocks"])
        if "changed" in message.fields:
            self._tell_changed(k, message)
        values = {n: np.asarray(self.state[n]) for n in t.wants}
        self.state |= {
            backup_of(n, k): self.state[n] for n in self._served.backed.intersection(t.wants)
        }
        answer(self._say, t, message["step"], values)

    def _tell_changed(self, k: int, message: wire.Message) -> None:
        """Send a trainer its stored rows that others have changed, or note that it stores none."""
        if not self._changed.tables:
            raise WireError(
                f"trainer {k} sent `changed`, which is for tables of GEO-SGD; pserver "
                f"{self.endpoint} serves none"
            )
        if not message["changed"]:
            self._changed.forget(k)
            return
        for name in self._changed.tables:
            ids = self._changed.take(k, name)
            news = [("ids", ids), ("rows", self._blocks.rows(name, ids, self.state, train=False))]
            fields = {"step": message["step"], "table": name, "count": len(ids)}
            self._say(self._trainers.known[k].address, "changed", news, **fields)

    def _check_number(self, k: int, message: wire.Message) -> None:
        number = self._step_of(k).number
        if message["step"] != number:
            raise WireError(
                f"`{message.op}` of step {message['step']}, trainer {k} is at {number} on pserver "
                f"{self.endpoint}"
            )

    def _check_step(self, k: int, message: wire.Message) -> None:
        step = self._step_of(k)
        self._check_number(k, message)
        if message.op != "send" and step.grads.begun:
            short = min(step.grads.missing())
            raise WireError(
                f"`{message.op}` of step {step.number}, but not all of {short} was sent"
            )

    def complete(self, k: int, message: wire.Message) -> None:
        """Let a trainer leave that has taken its last step."""
        t = self._trainers.known[k]
        t.done = True
        self._say(t.address, "goodbye")
        if self._step_of(k).grads.begun:
            log.warning(
                "pserver %s used only what was whole of the last step of trainer %d",
                self.endpoint,
                k,
            )
        self._requests.used(k, self._step_of(k).grads)
        self._changed.forget(k)

    def abort(self, k: int, message: wire.Message) -> None:
        """Let a trainer leave that has failed."""
        self._say(self._trainers.known[k].address, "goodbye")
        self._leave(k, f"trainer {k} failed: {message['reason']}")

    def _leave(self, k: int, reason: str) -> None:
        """Mark a trainer as failed; the others continue, if there are any."""
        self._trainers.known[k].done = self._trainers.known[k].failed = True
        self._failed.add(k)
        self._requests.used(k, self._step_of(k).grads)
        self._changed.forget(k)
        if len(self._failed) == self._trainers.count:
            raise PeerError(reason)
        log.warning("pserver %s continues without a trainer: %s", self.endpoint, reason)

    # -- others ----------------------------------------------------------------------------------

    def take_peer(self, address: bytes, message: wire.Message) -> bool:
        """Return False: an asynchronous server takes no messages of other servers."""
        return False

    def look(self, now: float) -> None:
        """Continue without lost trainers; raise for trainers that never came."""
        for k, why in self._trainers.lost(now).items():
            self._leave(k, why)
        self._trainers.absent(now)
