"""A synchronous parameter server.

    every trainer:  hello                             once
                    recv                              the initial values
                    send..., send_barrier, recv       every step
                    complete                          once

Gradients are received into memory that is reused. When all trainers have sent `send_barrier`, one
compiled call computes the new state, and the requested blocks go out. Serving ends when every
trainer has sent `complete`. One that does so before the others has left: `on_trainer_exit` of
`dtrans.pserver` says how later updates count it.

    before:              prefetch...      lookups of table rows, also for a later step
    in the middle:       exchange...      values that trainers exchange
    between two steps:   evict            table rows to evict, from all trainers

    every other server:  peer             once
                         partials...      every step and level

An update that reduces over rows has several phases, with an exchange between servers after each but
the last. Serving continues meanwhile.

A trainer that waits hears every few seconds for whom. The job ends with an error that names a
trainer or server which never comes, falls silent, or keeps others waiting beyond the deadline. A
message that violates the protocol is refused and logged, and changes nothing.

The parts: `step_waits` (who is late), `server_peers` (other servers), `trainer_rounds` (exchanges),
and in `tables` `row_answers` (lookups) and `stored_tables` (evictions).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import PeerError, StateError, WireError
from dtrans.ir.selection import subset
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server.server_peers import JointUpdate, ServerPeers
from dtrans.protocol.server.step_waits import StepWaits, TrainerTurn
from dtrans.protocol.server.trainer_registry import (
    Say,
    TrainerExits,
    TrainerRegistry,
    answer,
    wanted,
)
from dtrans.protocol.server.trainer_rounds import TrainerRounds
from dtrans.protocol.server_blocks import ServerBlocks, StepUpdate
from dtrans.protocol.tables.row_answers import RowAnswers
from dtrans.protocol.tables.stored_tables import PendingEvictions, StoredTables, check_eviction


class SyncServer:
    """Handler of messages of a synchronous server, whose updates use all trainers.

    Args:
      served: the server's blocks.
      update: computes new state from gradients.
      trainers: the server's trainers.
      say: sends a message.

    Attributes:
      tables: the server's blocks of tables, if any.
      peers: the other servers.
    """

    word, idle = "synchronous", "serving"

    def __init__(
        self, served: ServerBlocks, update: StepUpdate, trainers: TrainerRegistry, say: Say
    ) -> None:
        self.endpoint, self.on_trainer_exit = served.endpoint, served.on_trainer_exit
        self.tables: StoredTables | None = None
        self._served, self._update = served, update
        self._trainers, self._say = trainers, say
        self.peers = ServerPeers(
            served.endpoint,
            served.exchanges,
            on_trainer_exit=self.on_trainer_exit,
            plan=trainers.plan,
        )
        self._joint = JointUpdate(update, self.peers, trainers, say)
        self._rows = RowAnswers(served, update, trainers, say)
        self._rounds = TrainerRounds(trainers.count)
        self._evictions = PendingEvictions()
        self._exits = TrainerExits(self.on_trainer_exit, trainers)

        pool = BufferPool()
        self._grads = {n: pool.take(n, t.shape, t.dtype) for n, t in served.gradients.items()}
        self._turns = {k: TrainerTurn(self._inbox(k)) for k in range(trainers.count)}
        self._waits = StepWaits(
            trainers, self._joint, self._turns, self._rounds, self._evictions, say
        )

    def _inbox(self, k: int) -> Inbox:
        """Return memory for the gradients of trainer k, which may send no other ones."""
        of_rows = {n for t in self._served.tables.values() for n in t.gradients.values()}
        names = {sent[k] for sent in self._served.sent} - of_rows
        memory = subset(self._grads, names) | self._rows.requests.memory_of(k)
        refusal = f"is not a gradient that trainer {k} sends to pserver {self.endpoint}"
        return Inbox(memory, lambda name: f"{name} {refusal}")

    # -- status ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the number of updates that are complete."""
        return self._joint.step

    @property
    def state(self) -> dict[str, Any]:
        """Return the state: name to array."""
        return self._update.state

    def step_count(self) -> int:
        """Return the number of updates that the state has. Raises StateError in the middle of
        one."""
        if self._joint.exchange is not None:
            raise StateError(f"step {self.step + 1} is made in part: it waits for other servers")
        return self.step

    def progress(self) -> dict[int, int]:
        """Return the number of steps of each trainer."""
        return dict.fromkeys(self._trainers.known, self.step)

    def staleness(self, k: int) -> None:
        """Return nothing: no gradient of a synchronous trainer is stale."""

    def doing(self, k: int) -> str:
        """Return the progress of a trainer in this step."""
        return self._waits.doing(k)

    def awaited(self) -> str:
        """Return what trainers wait for, and from whom; empty if no trainer waits."""
        return self._waits.awaited()

    def look(self, now: float) -> None:
        """Raise for whoever is too late, and tell the trainers that wait for whom they wait."""
        self._waits.look(now)

    # -- messages of trainers --------------------------------------------------------------------

    def send(self, k: int, message: wire.Message) -> None:
        """Take gradients."""
        turn = self._open_turn(k, message, "gradients of")
        self._evictions.check_none(k, self.step)
        if not turn.grads.begun:
            self._rows.begin(k, message, turn.grads)
        turn.grads.take(message)

    def send_barrier(self, k: int, message: wire.Message) -> None:
        """Note that a trainer has sent all its gradients."""
        turn = self._in_turn(k, message)
        if turn.at_barrier:
            raise WireError(f"a second send_barrier of step {self.step}")
        short = sorted(turn.grads.missing())
        if short:
            progress = turn.grads.progress(short[0])
            raise WireError(f"send_barrier of step {self.step}, but {short[0]} has {progress}")
        turn.at_barrier = True
        self._exits.check(self._trainers.left, [k], self.step)
        self._step_if_all_sent()

    def exchange(self, k: int, message: wire.Message) -> None:
        """Take a trainer's part of what all of them exchange."""
        self._open_turn(k, message, "an exchange of")
        self._rounds.take(k, message)
        self._exits.check(self._trainers.left, [k], self.step)
        self._exchange_if_all_sent()

    def prefetch(self, k: int, message: wire.Message) -> None:
        """Take a request for rows of a table, and answer it."""
        turn = self._open_turn(k, message, "a `prefetch` of")
        trains_now = message["train"] and "ahead" not in message.fields
        if trains_now:
            self._evictions.check_none(k, self.step)
        self._rows.take(k, message, turn.grads)
        turn.looks_up |= trains_now

    def evict(self, k: int, message: wire.Message) -> None:
        """Take a request to evict rows; they are evicted when all trainers have asked."""
        rows = check_eviction(self.endpoint, self._served.tables, k, message)
        if self._in_turn(k, message).begun:
            raise WireError(f"an `evict` in the middle of step {self.step}")
        self._evictions.ask(k, rows, message.request, self.step)
        for other in self._trainers.present:
            if self._turns[other].begun:
                self._evictions.check_none(other, self.step)
        self._exits.check(self._trainers.left, [k], self.step)
        self._evict_if_all_said()

    def check_between(self, k: int, message: wire.Message) -> None:
        """Raise WireError unless a trainer, and so the server, is between two steps."""
        self._open_turn(k, message, f"a `{message.op}` in")

    def saving(self, k: int, message: wire.Message) -> None:
        """Note that a trainer waits for a checkpoint, and is not late."""
        self._in_turn(k, message)
        self._waits.note_saving(k)

    def recv(self, k: int, message: wire.Message) -> None:
        """Take a request for parameters."""
        t, turn, step = self._trainers.known[k], self._turns[k], message["step"]
        wants = t.wants
        if "blocks" in message.fields:
            wants = wanted(self._served, k, message["blocks"])
        if "changed" in message.fields:
            raise WireError(
                f"trainer {k} keeps rows, which no trainer of a synchronous pserver does"
            )
        if step not in (self.step, self.step + 1) or (step > self.step and not turn.at_barrier):
            raise WireError(f"`recv` of step {step}, pserver {self.endpoint} is at {self.step}")
        t.wants, turn.waits = wants, True
        if step == self.step:
            self._answer(k)

    def complete(self, k: int, message: wire.Message) -> None:
        """Let a trainer leave that has taken its last step."""
        t, turn = self._trainers.known[k], self._turns[k]
        t.done = True
        self._rows.forget_trainer(k)
        self._say(t.address, "goodbye")
        if turn.at_barrier or turn.grads.begun or self._rounds.begun(k):
            after = ", after its send_barrier" if turn.at_barrier else ""
            raise PeerError(f"trainer {k} closed in the middle of step {self.step + 1}{after}")
        self._exits.check([k], set(self._waits.waiting()) - {k}, self.step)
        if not self.step:
            self._forget([k])  # it never sent a gradient: its memory was never written
        self._evict_if_all_said()
        self._step_if_all_sent()
        self._exchange_if_all_sent()

    def abort(self, k: int, message: wire.Message) -> None:
        """End with a trainer that has failed."""
        self._trainers.known[k].done = self._trainers.known[k].failed = True
        raise PeerError(f"trainer {k} failed: {message['reason']}")

    def _in_turn(self, k: int, message: wire.Message) -> TrainerTurn:
        """Return the progress of trainer k. Raises WireError for a message of another step."""
        if message["step"] != self.step:
            raise WireError(
                f"`{message.op}` of step {message['step']}, pserver {self.endpoint} is at "
                f"{self.step}"
            )
        return self._turns[k]

    def _open_turn(self, k: int, message: wire.Message, what: str) -> TrainerTurn:
        """Return the progress of trainer k. Raises WireError after its send_barrier, too."""
        turn = self._in_turn(k, message)
        if turn.at_barrier:
            raise WireError(f"{what} step {self.step} after its send_barrier")
        return turn

    # -- when all trainers have spoken -----------------------------------------------------------

    def _step_if_all_sent(self) -> None:
        """Begin the update if all trainers are at the barrier."""
        at_barrier = [k for k, turn in self._turns.items() if turn.at_barrier]
        if self._trainers.all_said(at_barrier):
            self._make_step()

    def _exchange_if_all_sent(self) -> None:
        """Answer the open round if the parts of all trainers are here."""
        if not self._trainers.all_said(self._rounds.waiting()):
            return
        self._waits.restart()
        at = {"step": self.step, "round": self._rounds.number}
        for k, values in self._rounds.answers(self._trainers.present).items():
            table = [[x.dtype.name, list(x.shape)] for x in values]
            blocks = [(str(i), x) for i, x in enumerate(values)]
            address = self._trainers.known[k].address
            self._say(address, "exchanged", blocks, **at, values=table)

    def _evict_if_all_said(self) -> None:
        """Evict rows if all trainers have asked for it."""
        if not self._trainers.all_said(self._evictions.asked):
            return
        self._waits.restart()
        name, answers = self._evictions.carry_out(self.tables)
        self._rows.forget_table(name)
        for k, fields in answers.items():
            self._say(self._trainers.known[k].address, "evicted", **fields)

    # -- updates ---------------------------------------------------------------------------------

    def _make_step(self) -> None:
        """Begin the update: all gradients are here."""
        counted = self._exits.counted()
        _check_arguments(self._served.arguments, self._grads, sorted(counted), self.step)
        inboxes = {k: turn.grads for k, turn in self._turns.items()}
        grads = {**self._grads, **self._rows.gradients(inboxes, counted)}
        self._continue(self._joint.begin(grads, counted))

    def take_peer(self, address: bytes, message: wire.Message) -> bool:
        """Take a message of another server; return False for anyone else's."""
        if not self._joint.take(address, message):
            return False
        if self._joint.can_go_on:
            self._continue(self._joint.go_on())
        return True

    def _continue(self, complete: bool) -> None:
        """Finish the step if its update is complete; otherwise the wait for servers begins."""
        self._waits.restart()
        if complete:
            self._finish()

    def _finish(self) -> None:
        """Begin the next step, and answer the trainers that wait."""
        for turn in self._turns.values():
            turn.at_barrier = turn.looks_up = False
            turn.grads.clear()
        self._forget(self._trainers.left)
        self._rows.send_changed(self.step)
        for k in self._trainers.known:
            if self._turns[k].waits:
                self._answer(k)

    def _forget(self, trainers: Collection[int]) -> None:
        """Zero the gradients of trainers that left, where they have counted once more."""
        for k in self._exits.spend(trainers):
            grads = self._turns[k].grads
            for x in grads.memory.values():
                x.fill(0)
            self._rows.requests.used(k, grads)

    def _answer(self, k: int) -> None:
        self._turns[k].waits = False
        answer(self._say, self._trainers.known[k], self.step, self._update.values)


def _check_arguments(
    arguments: Mapping[str, Mapping[int, str]],
    grads: Mapping[str, np.ndarray],
    trainers: Sequence[int],
    step: int,
) -> None:
    """Raise PeerError if trainers differ in a step argument that the update reads."""
    for argument, sent in arguments.items():
        first, *others = trainers
        value = grads[sent[first]]
        for k in others:
            other = grads[sent[k]]
            if other.tobytes() != value.tobytes():
                raise PeerError(
                    f"{argument} of step {step + 1} is {wire.brief(value.tolist())} on trainer "
                    f"{first}, and {wire.brief(other.tolist())} on trainer {k}: the update reads "
                    "it, and there is one update; give all trainers the same"
                )
