"""A synchronous parameter server.

    every trainer:  hello                             once
                    recv                              the initial values
                    send..., send_barrier, recv       every step
                    complete                          once

Each gradient is kept when it arrives, in memory that is kept too. When all trainers have said
`send_barrier`, one compiled call makes the new state, and the blocks that trainers asked for go
out. Serving ends when every trainer has said `complete`. One that says so before the others has
left: `on_trainer_exit` of `dtrans.pserver` says what later updates are made of.

    before:              prefetch...                  where a step looks up rows of tables; also of a later step
    in the middle:       exchange...                  where a step is not made of its parts
    between two steps:   evict                        where rows of tables are given up; all trainers say so

    every other server:  peer                         once
                         partials...                  every step and level

An update that reduces over rows is made in phases, with an exchange between servers after each but
the last (`dtrans.protocol.server_peers`). Serving goes on meanwhile.

Who is late is always known: a trainer that waits is told whom for, every few seconds; a trainer
that never comes, falls silent, or keeps the others waiting for longer than the deadline, or a
server that does, ends the job with an error that names it, at the server and at everybody that it
serves. A message that does not follow the protocol is refused and logged, and changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from dtrans.errors import DeadlineError, PeerError, StateError, WireError
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.presence import Presence, Say, answer, log, named, wanted
from dtrans.protocol.served import ServedBlocks, StepUpdate, Vectors
from dtrans.protocol.server_peers import ServerPeers
from dtrans.protocol.tables.held_tables import HeldTables, check_eviction, evict
from dtrans.protocol.tables.row_requests import RowRequests
from dtrans.protocol.tables.rows_ahead import DueRows, RowsAhead
from dtrans.protocol.trainer_rounds import TrainerRounds
from dtrans.protocol.wait_reminder import WaitReminder


@dataclasses.dataclass
class _Turn:
    """What a trainer has done in this step."""

    grads: Inbox
    at_barrier: bool = False
    waits: bool = False
    looks_up: bool = False  # whether it has asked for rows that it trains

    @property
    def begun(self) -> bool:
        """Whether it is in the middle of this step."""
        return self.at_barrier or self.looks_up or self.grads.begun


class SyncServer:
    """What becomes of messages where updates are of all trainers.

    Args:
      served: what the server holds.
      update: makes new state of gradients.
      trainers: of the server.
      say: sends a message.

    Attributes:
      tables: what the server has of tables, if any.
    """

    word, idle = "synchronous", "serving"

    def __init__(
        self, served: ServedBlocks, update: StepUpdate, trainers: Presence, say: Say
    ) -> None:
        self.endpoint = served.endpoint
        self.on_trainer_exit = served.on_trainer_exit
        self.peers = ServerPeers(
            served.endpoint,
            served.exchanges,
            on_trainer_exit=self.on_trainer_exit,
            plan=trainers.plan,
        )
        self.step = 0
        self._late_since: float | None = None
        self._reminder = WaitReminder()
        self._trainers = trainers
        self._say = say
        self._served = served
        self._update = update
        pool = BufferPool()
        self._grads = {n: pool.take(n, t.shape, t.dtype) for n, t in served.gradients.items()}
        self._requests = RowRequests(served.endpoint, served.tables)
        self._ahead = RowsAhead(served.tables)
        self._touched: dict[str, list[np.ndarray]] = {}  # the rows of tables that the update is of
        # a trainer may send its own gradients only
        of_rows = {n for t in served.tables.values() for n in t.gradients.values()}
        of = {k: {names[k] for names in served.sent} - of_rows for k in range(trainers.count)}
        self._turns = {k: _Turn(self._inbox(k, names)) for k, names in of.items()}
        self._rounds = TrainerRounds(trainers.count)
        self.tables: HeldTables | None = None
        self._evictions: dict[
            int, tuple[str, int]
        ] = {}  # what trainers give up, who wait for the others to say so
        self._evict_requests: dict[int, dict[str, int]] = {}  # by which they know the answer
        self._saving: set[int] = (
            set()
        )  # who have said since the last look that they wait for a checkpoint
        self._spent: set[int] = set()  # of those who left, whose last gradients have counted

    def _inbox(self, k: int, names: Collection[str]) -> Inbox:
        """The memory that the gradients of one trainer come to."""
        told = f"is not a gradient that trainer {k} sends to pserver {self.endpoint}"
        memory = {n: self._grads[n] for n in names} | self._requests.memory_of(k)
        return Inbox(memory, lambda name: f"{name} {told}")

    @property
    def state(self) -> dict[str, Any]:
        """Name to array."""
        return self._update.state

    def made(self) -> int:
        """Return the number of steps that the state is after. Raises StateError where it is after
        part of one."""
        if self._update.exchange is not None:
            raise StateError(f"step {self.step + 1} is made in part: it waits for other servers")
        return self.step

    # -- what trainers say -----------------------------------------------------------------------

    def send(self, k: int, message: wire.Message) -> None:
        """Take gradients."""
        turn = self._in_turn(k, message)
        if turn.at_barrier:
            raise WireError(f"gradients of step {self.step} after its send_barrier")
        self._check_none_evicts(k)
        if not turn.grads.begun:
            for name, ids in self._ahead.begin(k, self.step):
                self._requests.begin(k, message, name, ids, turn.grads)
        turn.grads.take(message)

    def send_barrier(self, k: int, message: wire.Message) -> None:
        """All gradients of a step were sent."""
        turn = self._in_turn(k, message)
        if turn.at_barrier:
            raise WireError(f"a second send_barrier of step {self.step}")
        short = sorted(turn.grads.missing())
        if short:
            raise WireError(
                f"send_barrier of step {self.step}, but {short[0]} has "
                f"{turn.grads.progress(short[0])}"
            )
        turn.at_barrier = True
        self._check_left(k)
        self._step_if_all_sent()

    def exchange(self, k: int, message: wire.Message) -> None:
        """Take a trainer's part of what all of them exchange."""
        turn = self._in_turn(k, message)
        if turn.at_barrier:
            raise WireError(f"an exchange of step {self.step} after its send_barrier")
        self._rounds.take(k, message)
        self._check_left(k)
        self._exchange_if_all_sent()

    def prefetch(self, k: int, message: wire.Message) -> None:
        """Take a request for rows of a table, and answer it."""
        turn = self._in_turn(k, message)
        if turn.at_barrier:
            raise WireError(f"a `prefetch` of step {self.step} after its send_barrier")
        ahead = message.fields.get("ahead")
        if message["train"] and ahead is None:
            self._check_none_evicts(k)
        asked = self._requests.take(k, message, turn.grads)
        turn.looks_up |= message["train"] and ahead is None
        if asked is None:
            return
        name, ids, train = asked
        if ahead is not None:
            self._ahead.check(k, name, self.step, ahead)
        rows = self._update.rows(name, ids, train=train)
        if ahead is not None:
            due = self._ahead.announce(k, name, self.step, ahead, ids)
            if due is not None:
                self._say_ahead(due, rows)
        else:
            if train:
                self._ahead.drop(k, name, self.step)
            at = {"step": self.step, "table": name, **message.request}
            self._say(self._trainers.known[k].address, "rows", [(name, rows)], **at)

    def _say_ahead(self, due: DueRows, rows: np.ndarray) -> None:
        blocks, fields = due.message(rows)
        self._say(
            self._trainers.known[due.trainer].address, "rows", blocks, step=self.step, **fields
        )

    def evict(self, k: int, message: wire.Message) -> None:
        """Give up rows of a table that no step has updated for long, when all trainers have said
        so."""
        said = check_eviction(self.endpoint, self._served.tables, k, message)
        if self._in_turn(k, message).begun:
            raise WireError(f"an `evict` in the middle of step {self.step}")
        if k in self._evictions:
            raise WireError("a second `evict`, and the first was not answered")
        for other, before in self._evictions.items():
            if before != said:
                raise PeerError(
                    f"after step {self.step} trainer {k} gives up rows of {said[0]} that were not "
                    f"used for {said[1]} "
                    f"steps, and trainer {other} those of {before[0]} for {before[1]}: all "
                    "trainers call job.tables.evict "
                    "alike, between the same two steps"
                )
        self._evictions[k], self._evict_requests[k] = said, message.request
        for other in self._trainers.present:
            if self._turns[other].begun:
                self._check_none_evicts(other)
        self._check_left(k)
        self._evict_if_all_said()

    def _check_none_evicts(self, k: int) -> None:
        """Raise PeerError where trainer k goes on and another one waits for all to give rows up."""
        if self._evictions:
            other = min(self._evictions)
            raise PeerError(
                f"trainer {other} gives up rows of {self._evictions[other][0]} after step "
                f"{self.step}, and trainer {k} "
                "goes on without: all trainers call job.tables.evict, between the same two steps"
            )

    def _evict_if_all_said(self) -> None:
        """Give rows up when all trainers have come, and those who have not left have said so."""
        present = self._trainers.present
        if not self._evictions or not self._all_came or not set(present) <= self._evictions.keys():
            return
        (name, unused_for), *_ = self._evictions.values()
        asked = sorted(self._evictions)
        self._evictions.clear()
        self._late_since = None
        told = evict(self.tables, name, unused_for, np.empty(0, np.int32))
        self._ahead.forget_rows(name)  # as trainers do when they are told
        for k in asked:
            self._say(
                self._trainers.known[k].address, "evicted", **told, **self._evict_requests.pop(k)
            )

    def check_between(self, k: int, message: wire.Message) -> None:
        """Raise WireError unless a trainer is between two steps, and so the server between two
        updates."""
        if self._in_turn(k, message).at_barrier:
            raise WireError(f"a `{message.op}` in step {self.step} after its send_barrier")

    def saving(self, k: int, message: wire.Message) -> None:
        """Take the word that a trainer waits for a checkpoint: it is not late."""
        self._in_turn(k, message)
        self._saving.add(k)

    def recv(self, k: int, message: wire.Message) -> None:
        """Take a request for parameters."""
        t, turn, step = self._trainers.known[k], self._turns[k], message["step"]
        wants = (
            wanted(self._served, k, message["blocks"]) if "blocks" in message.fields else t.wants
        )
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
        """Let a trainer leave that is done."""
        t, turn = self._trainers.known[k], self._turns[k]
        t.done = True
        self._ahead.forget(k)
        self._say(t.address, "goodbye")
        waiting = [i for i in self._waiting() if i != k]
        if turn.at_barrier or turn.grads.begun or self._rounds.begun(k):
            after = ", after its send_barrier" if turn.at_barrier else ""
            raise PeerError(f"trainer {k} closed in the middle of step {self.step + 1}{after}")
        if waiting and self.on_trainer_exit == "error":
            raise PeerError(self._unequal(k, min(waiting)))
        if not self.step:
            self._forget([k])  # it never sent a gradient, and the memory for it holds anything
        self._evict_if_all_said()
        self._step_if_all_sent()
        self._exchange_if_all_sent()

    def abort(self, k: int, message: wire.Message) -> None:
        """End with a trainer that has failed."""
        self._trainers.known[k].done = self._trainers.known[k].failed = True
        raise PeerError(f"trainer {k} failed: {message['reason']}")

    def _in_turn(self, k: int, message: wire.Message) -> _Turn:
        if message["step"] != self.step:
            raise WireError(
                f"`{message.op}` of step {message['step']}, pserver {self.endpoint} is at "
                f"{self.step}"
            )
        return self._turns[k]

    def _at_barrier(self) -> list[int]:
        return [k for k in self._trainers.known if self._turns[k].at_barrier]

    def _waiting(self) -> list[int]:
        """The trainers that wait for others: at the barrier, in an exchange, or to give rows up."""
        return self._at_barrier() + self._rounds.waiting() + list(self._evictions)

    def doing(self, k: int) -> str:
        """Return how far a trainer is in this step."""
        if k not in self._trainers.known:
            return "not here yet"
        if k in self._saving:
            return "waiting for a checkpoint to be written"
        if k in self._waiting():
            return "waiting for the update"
        return self._turns[k].grads.phase()

    def progress(self) -> dict[int, int]:
        """Return the number of steps that each trainer has made."""
        return dict.fromkeys(self._trainers.known, self.step)

    def staleness(self, k: int) -> None:
        """Return nothing: no gradient of a synchronous trainer is stale."""

    def awaited(self) -> str:
        """Return what the server and those who wait are waiting for; empty, where nobody waits."""
        waiting, exchange = self._waiting(), self._update.exchange
        if not waiting:
            return ""
        if exchange is not None:
            missing = self.peers.missing(self.step, exchange)
            return (
                f"partial results of step {self.step + 1}, level {exchange.level}, from "
                f"{self.peers.named(missing)}"
            )
        known = self._trainers.known
        late = [k for k in range(self._trainers.count) if k not in known]
        late += [k for k in self._trainers.present if k not in waiting]
        number = self._rounds.number
        due = "gradients" if number is None else f"the exchange of round {number}"
        if self._evictions:
            due = "job.tables.evict before gradients"
        return (
            f"{due} of step {self.step + 1} from "
            f"{', '.join(f'trainer {k} ({self.doing(k)})' for k in late)}"
        )

    def _check_left(self, k: int) -> None:
        """Raise PeerError where trainer k goes on without one that has left, and may not."""
        if self._trainers.left and self.on_trainer_exit == "error":
            raise PeerError(self._unequal(min(self._trainers.left), k))

    def _unequal(self, gone: int, sends: int) -> str:
        """Why a job with on_trainer_exit="error" ends."""
        return (
            f"trainer {gone} closed after step {self.step} while trainer {sends} sends step "
            f"{self.step + 1}: "
            "with on_trainer_exit='error' all trainers make the same number of steps"
        )

    # -- steps -----------------------------------------------------------------------------------

    def _step_if_all_sent(self) -> None:
        """Make the step when all trainers have come, and those who have not left are at the
        barrier."""
        present = self._trainers.present
        if self._all_came and present and all(self._turns[k].at_barrier for k in present):
            self._make_step()

    @property
    def _all_came(self) -> bool:
        return len(self._trainers.known) == self._trainers.count

    def _exchange_if_all_sent(self) -> None:
        """Answer the open round when all trainers have come, and the parts of those who have not
        left are here."""
        present, number = self._trainers.present, self._rounds.number
        if number is None or not self._all_came or not set(present) <= set(self._rounds.waiting()):
            return
        self._late_since = None
        for k, values in self._rounds.answers(present).items():
            table = [[x.dtype.name, list(x.shape)] for x in values]
            blocks = [(str(i), x) for i, x in enumerate(values)]
            self._say(
                self._trainers.known[k].address,
                "exchanged",
                blocks,
                step=self.step,
                round=number,
                values=table,
            )

    def _make_step(self) -> None:
        """All gradients are here."""
        of = self._trainers.known if self.on_trainer_exit == "paddle" else self._trainers.present
        self._check_arguments(sorted(of))
        rows = {
            n: x
            for k, turn in self._turns.items()
            for n, x in self._requests.gradients(k, turn.grads).items()
        }
        self._touched = {
            n: [rows[t.gradients[k]].ids for k in of] for n, t in self._served.tables.items()
        }
        self._go_on(self._update.begin({**self._grads, **rows}, frozenset(of), self.step))

    def _check_arguments(self, trainers: Sequence[int]) -> None:
        """Raise PeerError where trainers have an argument of the step of which there must be
        one."""
        for argument, sent in self._served.arguments.items():
            first, *others = ((k, self._grads[sent[k]]) for k in trainers)
            for k, x in others:
                if x.tobytes() != first[1].tobytes():
                    raise PeerError(
                        f"{argument} of step {self.step + 1} is {wire.brief(first[1].tolist())} on "
                        f"trainer {first[0]}, "
                        f"and {wire.brief(x.tolist())} on trainer {k}: the update reads it, and "
                        "there is one update; "
                        "give all trainers the same"
                    )

    def _go_on(self, outgoing: Vectors | None) -> None:
        """Send what other servers need, and make the step as far as what came from them allows."""
        while outgoing is not None:
            exchange = self._update.exchange
            assert exchange is not None
            for ep, vectors in outgoing.items():
                blocks = [(v.dtype.name, v) for v in vectors]
                self._say(ep, "partials", blocks, step=self.step, level=exchange.level)
            self._late_since = None
            if self.peers.missing(self.step, exchange):
                return
            outgoing = self._update.go_on(self.peers.collected(self.step, exchange))
        self._finish()

    def _finish(self) -> None:
        """A step is made."""
        self.peers.made(self.step)
        self.step += 1
        self._late_since = None
        for turn in self._turns.values():
            turn.at_barrier = turn.looks_up = False
            turn.grads.clear()
        self._forget(self._trainers.left)
        for due in self._ahead.made(self.step, self._touched):
            self._say_ahead(due, self._update.rows(due.name, due.ids, train=True))
        for k in self._trainers.known:
            if self._turns[k].waits:
                self._answer(k)

    def _forget(self, trainers: Collection[int]) -> None:
        """Zero the gradients of trainers that left: with `on_trainer_exit="paddle"` they have
        counted once more."""
        for k in set(trainers) - self._spent if self.on_trainer_exit == "paddle" else ():
            for x in self._turns[k].grads.memory.values():
                x.fill(0)
            self._requests.used(k, self._turns[k].grads)
            self._spent.add(k)

    def _answer(self, k: int) -> None:
        self._turns[k].waits = False
        answer(self._say, self._trainers.known[k], self.step, self._update.values)

    # -- what servers say ------------------------------------------------------------------------

    def take_peer(self, address: bytes, message: wire.Message) -> bool:
        """Take a message of another server; False if it is of none."""
        if message.op == "peer":
            self._meet(address, message)
            return True
        if self.peers.name(address) is None:
            return False
        if message.op != "partials":
            raise WireError(f"a `{message.op}` message, which servers do not take from each other")
        self.peers.take(address, message, self.step)
        exchange = self._update.exchange
        if exchange is not None and not self.peers.missing(self.step, exchange):
            self._go_on(self._update.go_on(self.peers.collected(self.step, exchange)))
        return True

    def _meet(self, address: bytes, message: wire.Message) -> None:
        k = self._trainers.by_address.get(address)
        if k is not None:
            raise WireError(f"trainer {k} cannot be a pserver too")
        if self.peers.meet(address, message):
            self._say(address, "welcome", **self._trainers.welcome(message, self.step))
        else:
            self._say(
                address,
                "waiting",
                reason=f"the end of a job that pserver {message['endpoint']} is in already",
            )

    # -- who is late -----------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Raise for whoever is too late, and tell those who wait whom they wait for."""
        for why in self._trainers.lost(now).values():
            raise PeerError(f"{why}, in step {self.step + 1}")
        absent = self._trainers.absent(now)
        waiting = self._waiting()
        deadline = self._trainers.deadline
        if not waiting:
            self._saving.clear()
            # at the end servers wait for each other only where one has not heard yet that the other
            # is there
            ends = self._trainers.served and self.peers.unsettled
            self._late_since = (self._late_since or now) if ends else None
            if self._late_since is not None and now - self._late_since > deadline:
                raise DeadlineError(
                    f"pserver {self.endpoint}, whose trainers have closed, waited "
                    f"{now - self._late_since:.1f} s for "
                    f"{self.peers.named(self.peers.unsettled)} to greet it"
                )
            return
        exchange, saving, what = (
            self._update.exchange,
            self._saving.difference(waiting),
            self.awaited(),
        )
        self._late_since = now if saving else self._late_since or now
        self._reminder.begin(self._late_since)
        if exchange is not None:
            self.peers.check(self.peers.missing(self.step, exchange), what)
        self._saving.clear()
        waited = now - self._late_since
        if waited > deadline:
            raise DeadlineError(
                f"pserver {self.endpoint} and {named(waiting)} waited {waited:.1f} s for {what}"
            )
        if not absent and self._reminder.due(now):
            log.warning("pserver %s has waited %.0f s for %s", self.endpoint, waited, what)
        for k in waiting:
            self._say(
                self._trainers.known[k].address, "waiting", reason=f"{waited:.1f} s for {what}"
            )
