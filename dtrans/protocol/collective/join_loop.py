"""Loops of the rendezvous (`dtrans.protocol.collective.join`) over a transport.

`LeaderLoop` runs in trainer 0, and `MemberLoop` runs in each other trainer. Both loops drop and
count malformed messages, and messages from processes of another job.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.collective.join import JoinLeader, JoinMember
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.transport import LINGER, Event, Link, Listener, Transport


log = logging.getLogger("dtrans.rendezvous")
FIRST = "the first trainer"  # user name under which trainer 0 connects to the other trainers
# Seconds until trainer 0 asks again, where a process of another job listens at a trainer's endpoint
AGAIN = 1.0


class LeaderLoop:
    """Loop of trainer 0: asks the other trainers to join, and sends `go` when all have joined.

    Args:
      endpoints: endpoints of all trainers.
      reached: addresses to which this process connects: one for each of the `endpoints`.
      secret: the job's token.
      deadline: seconds within which all trainers must answer.

    Attributes:
      machine: state machine of the rendezvous.

    Raises:
      ConfigError: a trainer is on another host, and neither a token nor keys protect the messages.
    """

    def __init__(
        self,
        transport: Transport,
        endpoints: Sequence[str],
        reached: Sequence[str],
        *,
        secret: str,
        deadline: float,
    ) -> None:
        self._transport, self._endpoints, self._deadline = transport, endpoints, deadline
        start = transport.now()
        self.machine = JoinLeader(endpoints, secret, token.new_token(), now=start)
        self._limit, self._next_question = start + deadline, start + AGAIN
        self._refusals = Refusals(log)
        self._links: dict[int, Link] = {}
        self._trainers: dict[object, int] = {}  # link -> id of the trainer
        for k, endpoint in enumerate(reached[1:], 1):
            link = transport.connect(endpoint, user=FIRST, role="trainer 0")
            self._links[k], self._trainers[link] = link, k

    @property
    def is_done(self) -> bool:
        """True once all trainers have joined."""
        return not self.machine.missing

    @property
    def wakes(self) -> float:
        """Time at which `step` must be called, even without an event."""
        return min(self._limit, self._next_question)

    def step(self) -> None:
        """Wait for events until the time `wakes`, and handle them.

        Raises:
          DeadlineError: the deadline has passed, and some trainers have not answered.
          PeerError: a trainer refuses to join.
        """
        has_heard = False
        for event in self._transport.poll(self.wakes):
            has_heard |= event.kind == "message"
            self._take(event)
        now = self._transport.now()
        # After a message, another poll may find an answer that arrived in time.
        if self.machine.missing and not has_heard and now >= self._limit:
            raise self.machine.late(self._deadline)
        self.machine.say_that_it_waits(now)
        if now >= self._next_question:
            self._next_question = now + AGAIN
            for k in self.machine.strangers:
                self._ask(k)  # Trainer k's own process may have started by now.

    def _ask(self, k: int) -> None:
        self._links[k].send([self.machine.question(k)])

    def _take(self, event: Event) -> None:
        k = self._trainers[event.source]
        if event.kind == "barred":
            self.machine.barred(k, event.reason)
        elif event.kind == "connected":
            self._ask(k)
        elif event.kind == "broken":
            self.machine.lost(k)
        elif event.kind == "message":
            try:
                self.machine.heard(k, event.frames)
            except WireError as e:
                where = self._endpoints[k]
                self._refusals.note("trainer 0 dropped a message from %s: %s", where, e)

    def end(self, error: BaseException | None) -> None:
        """Send `go` to the other trainers, or `abort` if the rendezvous failed.

        Args:
          error: error of the rendezvous; None if it succeeded.
        """
        message = wire.header("go")
        listeners = list(self.machine.joined)
        if error is not None:
            is_late = isinstance(error, DeadlineError)
            reason = f"trainer 0 failed: {type(error).__name__}: {error}"
            if isinstance(error, PeerError):
                reason = str(error)
            message = wire.header("abort", reason=reason, late=is_late)
            # Missing trainers receive the error, too, unless the deadline has passed. After the
            # deadline, each missing trainer raises an error that names trainer 0.
            if not is_late:
                listeners += self.machine.missing
        for k, link in self._links.items():
            if k not in listeners:
                link.close()
                continue
            if k in self.machine.missing:
                # A trainer accepts `abort` only from a process that has asked it to join.
                self._ask(k)
            link.send([message])
            link.close(LINGER)


class MemberLoop:
    """Loop of a trainer other than trainer 0: answers trainer 0, and waits until all have joined.

    Args:
      listener: this trainer's listener, to which trainer 0 connects.
      trainer: id of this trainer.
      endpoints: endpoints of all trainers, as configured in this process.
      secret: the job's token.
      deadline: seconds to wait for trainer 0's question. After the question, the wait for `go`
        has the same limit.

    Attributes:
      machine: state machine of the rendezvous.
    """

    def __init__(
        self,
        transport: Transport,
        listener: Listener,
        trainer: int,
        endpoints: Sequence[str],
        *,
        secret: str,
        deadline: float,
    ) -> None:
        self._transport, self._listener, self._me = transport, listener, f"trainer {trainer}"
        now = transport.now()
        self.machine = JoinMember(trainer, endpoints, secret, deadline=deadline, now=now)
        self._refusals = Refusals(log)

    @property
    def is_done(self) -> bool:
        """True once all trainers have joined."""
        return self.machine.met

    @property
    def wakes(self) -> float:
        """Time at which `step` must be called, even without an event."""
        return self.machine.wakes

    def step(self) -> None:
        """Wait for events until the time `wakes`, and handle them.

        Raises:
          DeadlineError: trainer 0 did not connect in time, or another trainer did not join in time.
          PeerError: trainer 0 gave up, or has different endpoints.
        """
        has_heard = False
        for event in self._transport.poll(self.wakes):
            if event.kind == "message":
                has_heard = True
                self._take(event)
        now = self._transport.now()
        if not has_heard:
            if now >= self.machine.limit:
                raise self.machine.late()
            self.machine.say_that_it_waits(now)

    def _take(self, event: Event) -> None:
        try:
            answer = self.machine.heard(event.address, event.frames, self._transport.now())
        except WireError as e:
            self._refusals.note("%s dropped %s", self._me, e)
            return
        if answer is not None:
            self._listener.send(event.address, [answer])
        if self.machine.refused:
            raise PeerError(f"trainer 0 has different endpoints: {self.machine.refused}")

    def end(self, error: BaseException | None) -> None:
        """Close the listener. If this trainer has refused trainer 0, first send the refusal."""
        self._listener.close(LINGER if self.machine.refused else 0.0)
