"""An asynchronous parameter server: each block is updated when its gradient comes, by whichever
trainer sent it.

    every trainer:  hello                             once
                    recv                              the initial values
                    prefetch..., send..., recv        every step
                    complete                          once

Nobody waits for anybody. A trainer's first whole gradient of a step makes the lr_sched block run,
so that a count in the optimizer's state is that of all trainers' steps, and its values are those of
this trainer's step; `recv` gives what is newest. With one trainer that is sequential training. One
loop takes the messages and updates one block at a time, which is one lock for each block and more:
no update is lost, as it is where threads add to a block without one (Hogwild). Gradients of several
steps that a trainer's communicator has merged are one update, and as many steps.

Rows of tables are asked for before (`prefetch`), and are what they are then; their gradients come
as others do.

Trainers of GEO-SGD keep the rows that they have asked for, and send what they have changed in some.
Who asks for parameters is told, before the answer, of the rows that it has and that others have
changed since (`changed_rows`).

Where gradients are compensated for their delay (`dtrans.parameter_server.dc_asgd`), what a trainer
receives is kept for it; of rows of tables, until their gradients are used.

A trainer that fails, or is lost, ends only itself: what it had sent stays, what was half sent is
not used. The server ends when every trainer has closed, and with an error when all have failed.

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
from dtrans.protocol.presence import Presence, Say, answer, log, wanted
from dtrans.protocol.served import BlockUpdate, ServedBlocks
from dtrans.protocol.server_peers import ServerPeers
from dtrans.protocol.tables.changed_rows import UnseenChanges
from dtrans.protocol.tables.held_tables import HeldTables, check_eviction, evict
from dtrans.protocol.tables.row_requests import RowRequests


@dataclasses.dataclass
class StepUpdates:
    """Updates by the gradients of one step of a trainer, each block once.

    Attributes:
      values: the outputs of the lr_sched block for this step; None before its first whole gradient.
      used: the blocks that are updated.
    """

    values: Mapping[str, Any] | None = None
    used: set[str] = dataclasses.field(default_factory=set)

    def take(
        self,
        blocks: BlockUpdate,
        state: dict[str, Any],
        arrived: Collection[str],
        given: Mapping[str, Any],
        steps: int = 1,
    ) -> list[str]:
        """Update the blocks whose gradients have all come, and return their names.

        Args:
          blocks: makes new state.
          state: name to array; brought up to date in place.
          arrived: the gradients that are whole.
          given: these by name, and the parameters that the trainer received, where updates read
            them.
          steps: the number of steps whose gradients are merged.
        """
        ready = blocks.ready(arrived, self.used)
        if ready and self.values is None:
            for _ in range(
                steps
            ):  # schedules count steps, also where gradients of several are merged
                made, self.values = blocks.begin(state)
                state |= made
        for block in ready:
            assert self.values is not None
            state |= blocks.apply(block, given, state, self.values)
            self.used.add(block)
        return ready


@dataclasses.dataclass
class _Step:
    """What a trainer has sent of the step it is at."""

    grads: Inbox
    number: int = 0
    made: int = 0  # steps; a message may have the gradients of several
    read: int = 0  # steps of other trainers in the parameters that it received last
    staleness: int | None = None  # steps of other trainers that its last gradients lacked
    updates: StepUpdates = dataclasses.field(default_factory=StepUpdates)


class AsyncServer:
    """What becomes of messages where trainers do not wait for each other.

    Args:
      served: what the server holds.
      update: makes new state of gradients, block by block.
      state: name to array; the initial values.
      trainers: of the server.
      say: sends a message.

    Attributes:
      tables: what the server has of tables, if any.
    """

    step = 0  # that trainers are welcomed at; each counts its own
    word, idle = "asynchronous", "serving"

    def __init__(
        self,
        served: ServedBlocks,
        update: BlockUpdate,
        state: dict[str, Any],
        trainers: Presence,
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
        self._made = 0  # steps of all trainers
        self.tables: HeldTables | None = None

    def made(self) -> int:
        """Return the number of steps that the furthest trainer has made."""
        return max((step.made for step in self._steps.values()), default=0)

    def progress(self) -> dict[int, int]:
        """Return the number of steps that each trainer has made; nothing, where this server gets no
        gradient."""
        counts = bool(self._served.gradients or self._served.tables)
        return {k: step.made for k, step in self._steps.items()} if counts else {}

    def staleness(self, k: int) -> int | None:
        """Return how many steps of other trainers the last gradients of one lacked; None before
        there are any."""
        return self._steps[k].staleness if k in self._steps else None

    def doing(self, k: int) -> str:
        """Return how far a trainer is in its step."""
        if k not in self._trainers.known:
            return "not here yet"
        return self._steps[k].grads.phase() if k in self._steps else "computing"

    def awaited(self) -> str:
        """Return nothing: nobody waits for anybody."""
        return ""

    # -- what trainers say -----------------------------------------------------------------------

    def _step_of(self, k: int) -> _Step:
        if k not in self._steps:
            types = self._served.gradients.items()
            told = f"is not a gradient that trainer {k} sends to pserver {self.endpoint}"
            memory = {n: self._pool.take(f"{n} of {k}", t.shape, t.dtype) for n, t in types}
            self._steps[k] = _Step(
                Inbox(memory | self._requests.memory_of(k), lambda name: f"{name} {told}")
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
        given = {
            **self._requests.gradients(k, step.grads),
            **self._requests.backups(k),
            **{n + BACKUP: self.state[backup_of(n, k)] for n in self._served.backed},
        }
        for block in step.updates.take(self._blocks, self.state, full, given, steps):
            if block in self._changed.tables:
                self._changed.changed(k, block, given[self._served.tables[block].gradients[k]].ids)
        if len(full) == len(step.grads.memory):
            step.number += 1
            step.staleness = self._made - step.made - step.read
            step.made += steps
            self._made += steps
            step.grads.clear()
            self._requests.used(k, step.grads, steps)
            step.updates = StepUpdates()

    def send_barrier(self, k: int, message: wire.Message) -> None:
        """Refuse what only synchronous trainers say."""
        raise WireError(
            f"send_barrier, and pserver {self.endpoint} is asynchronous: every role must plan the "
            "same mode"
        )

    def prefetch(self, k: int, message: wire.Message) -> None:
        """Take a request for rows of a table, and answer with what is newest."""
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
        """Take the numbers of the rows that a gradient is of, which follows."""
        step = self._step_of(k)
        self._check_number(k, message)
        self._requests.follows(k, message, step.grads)

    def evict(self, k: int, message: wire.Message) -> None:
        """Give up rows of a table that no update was made of for long, and of which no gradient is
        to come."""
        name, unused_for = check_eviction(self.endpoint, self._served.tables, k, message)
        self._check_number(k, message)
        told = evict(self.tables, name, unused_for, self._requests.under_way(name))
        self._say(self._trainers.known[k].address, "evicted", **told, **message.request)

    def check_between(self, k: int, message: wire.Message) -> None:
        """Raise WireError unless a trainer is between two steps."""
        self._check_step(k, message)

    def saving(self, k: int, message: wire.Message) -> None:
        """Take the word that a trainer waits for a checkpoint, for which nobody waits here."""
        self._check_number(k, message)

    def recv(self, k: int, message: wire.Message) -> None:
        """Answer a request for parameters."""
        t = self._trainers.known[k]
        self._check_step(k, message)
        step = self._step_of(k)
        step.read = self._made - step.made
        t.wants = (
            wanted(self._served, k, message["blocks"]) if "blocks" in message.fields else t.wants
        )
        if "changed" in message.fields:
            self._tell_changed(k, message)
        values = {n: np.asarray(self.state[n]) for n in t.wants}
        self.state |= {
            backup_of(n, k): self.state[n] for n in self._served.backed.intersection(t.wants)
        }
        answer(self._say, t, message["step"], values)

    def _tell_changed(self, k: int, message: wire.Message) -> None:
        """Tell a trainer which of its rows others have changed, and what they are; or note that it
        has none."""
        if not self._changed.tables:
            raise WireError(
                f"trainer {k} keeps rows, and pserver {self.endpoint} has no table of which it may"
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
        """Let a trainer leave that is done."""
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
        """A trainer has failed: the others go on, if there are any."""
        self._trainers.known[k].done = self._trainers.known[k].failed = True
        self._failed.add(k)
        self._requests.used(k, self._step_of(k).grads)
        self._changed.forget(k)
        if len(self._failed) == self._trainers.count:
            raise PeerError(reason)
        log.warning("pserver %s goes on without a trainer: %s", self.endpoint, reason)

    # -- others ----------------------------------------------------------------------------------

    def take_peer(self, address: bytes, message: wire.Message) -> bool:
        """Take a message of another server; False, since there is none that it needs."""
        return False

    def look(self, now: float) -> None:
        """Go on without whoever is lost; raise for those who never came."""
        for k, why in self._trainers.lost(now).items():
            self._leave(k, why)
        self._trainers.absent(now)
