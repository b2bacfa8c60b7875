"""Loops of the rendezvous (`dtrans.protocol.collective.join`) over a transport.

`LeaderLoop` runs in trainer 0 and `MemberLoop` in each other trainer. Both count and drop messages
that are malformed or of another job.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.collective.join import JoinLeader, JoinMember
from dtrans.protocol.refusals import Refusals
from dtrans.protocol.transport import LINGER, Door, Event, Link, Transport


log = logging.getLogger("dtrans.rendezvous")
FIRST = "the first trainer"  # the user name of trainer 0 at the other trainers
AGAIN = 1.0  # seconds until trainer 0 asks again a trainer that answered with another job's message


class LeaderLoop:
    """Loop of trainer 0: asks every other trainer, and tells them when all have joined.

    Args:
      endpoints: endpoints of all trainers.
      reached: the same, as this process connects to them.
      secret: the job's token.
      deadline: seconds until which all have to answer.

    Raises:
      ConfigError: nothing protects a connection to another trainer.
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
        self._trainers: dict[object, int] = {}  # link to the trainer at its other end
        for k, endpoint in enumerate(reached[1:], 1):
            link = transport.connect(endpoint, user=FIRST, role="trainer 0")
            self._links[k], self._trainers[link] = link, k

    @property
    def is_done(self) -> bool:
        """Return True once all trainers have joined."""
        return not self.machine.missing

    @property
    def wakes(self) -> float:
        """Time until which `step` waits at most."""
        return min(self._limit, self._next_question)

    def step(self) -> None:
        """Wait until something comes, or until `wakes`, and take it.

        Raises:
          DeadlineError: the deadline has passed, and some trainers have not answered.
          PeerError: a trainer refuses.
        """
        has_heard = False
        for event in self._transport.poll(self.wakes):
            has_heard |= event.kind == "message"
            self._take(event)
        now = self._transport.now()
        # an answer that came in time may be behind the message of this step
        if self.machine.missing and not has_heard and now >= self._limit:
            raise self.machine.late(self._deadline)
        self.machine.say_that_it_waits(now)
        if now >= self._next_question:
            self._next_question = now + AGAIN
            for k in self.machine.strangers:  # the right process may listen there by now
                self._ask(k)

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
                self._refusals.note("trainer 0 dropped what came from %s: %s", where, e)

    def end(self, error: BaseException | None) -> None:
        """Tell the other trainers that all have joined, or why trainer 0 gives up."""
        is_late = isinstance(error, DeadlineError)
        reason = f"trainer 0 failed: {type(error).__name__}: {error}"
        if isinstance(error, PeerError):
            reason = str(error)
        # A trainer that refused has ended. One that has yet to come hears of an error. It does not
        # hear of a deadline: its own says which trainer it waited for.
        listeners = [*self.machine.joined, *([] if is_late else self.machine.missing)]
        words = wire.header("go")
        if error is not None:
            words = wire.header("abort", reason=reason, late=is_late)
        for k, link in self._links.items():
            if k in self.machine.missing and k in listeners:
                self._ask(k)  # a trainer hears only the one that has asked it
            if k in listeners:
                link.send([words])
            link.close(LINGER if k in listeners else 0.0)


class MemberLoop:
    """Loop of another trainer: answers trainer 0, and waits until all have joined.

    Args:
      trainer: its id.
      endpoints: endpoints of all trainers, as this one knows them.
      secret: the job's token.
      deadline: seconds to wait for trainer 0, and again for the other trainers.
    """

    def __init__(
        self,
        transport: Transport,
        door: Door,
        trainer: int,
        endpoints: Sequence[str],
        *,
        secret: str,
        deadline: float,
    ) -> None:
        self._transport, self._door, self._me = transport, door, f"trainer {trainer}"
        now = transport.now()
        self.machine = JoinMember(trainer, endpoints, secret, deadline=deadline, now=now)
        self._refusals = Refusals(log)

    @property
    def is_done(self) -> bool:
        """Return True once all trainers have joined."""
        return self.machine.met

    @property
    def wakes(self) -> float:
        """Time until which `step` waits at most."""
        return self.machine.wakes

    def step(self) -> None:
        """Wait until something comes, or until `wakes`, and take it.

        Raises:
          DeadlineError: trainer 0 or another trainer did not come.
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
            self._door.send(event.address, [answer])
        if self.machine.refused:
            raise PeerError(f"trainer 0 has different endpoints: {self.machine.refused}")

    def end(self, error: BaseException | None) -> None:
        """Close the door; a refusal has time to leave."""
        self._door.close(LINGER if isinstance(error, PeerError) else 0.0)
