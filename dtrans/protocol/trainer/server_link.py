"""A trainer's links to its servers, and the loops that wait for the servers' answers.

The trainer first connects to the server's endpoint. The server's welcome may contain the address of
a Unix socket. If the trainer can reach this address, it moves its connection there.

The method `turn` of a loop waits for an event, at most until the time `wakes`, and handles the
event. A real trainer calls `turn` until the loop is `done`. The simulator calls it at each event.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.generations import NewGeneration
from dtrans.protocol.trainer.operation import Operation, PendingAnswer, nothing
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.transport import LINGER, ROLE_USER, Event, Link, Transport


class ServerLink:
    """Connection of a trainer to one server, over a transport.

    Args:
      terms: arguments of `TrainerLine` except `say`.

    Attributes:
      line: the trainer's requests to the server, and the server's answers.
      link: link over which requests and answers are sent.

    Raises:
      ConfigError: the server is on another host, and neither a token nor keys protect the messages.
    """

    def __init__(self, transport: Transport, **terms: Any) -> None:
        self.line = TrainerLine(**terms, say=self._say)
        self.line.before_it_speaks = self._note_changes
        self.link: Link
        self._transport = transport
        # Link to the endpoint, while the trainer waits for a welcome at the local address
        self._first: Link | None = None
        self._early: collections.deque[wire.Message] = collections.deque()
        self._refusal: PeerError | None = None
        self._open(self.line.endpoint)

    def _open(self, address: str) -> None:
        self.line.opened(local=address != self.line.endpoint)
        self.link = self._transport.connect(address, user=ROLE_USER, role=self.line.me)

    def _say(self, frames: list[Any]) -> None:
        self.link.send(frames)

    def _note_changes(self) -> None:
        for event in self.link.changes():
            self.take(event)

    def greet(self) -> Operation[None]:
        """Return the operation that waits until the server has accepted this trainer (`welcome`).

        If the server is on this host, the connection moves to a Unix socket, which is faster.
        """
        what = "an answer to `hello` (is it running, and is this its endpoint?)"
        request = f"`hello` of {self.line.me}"
        answer = PendingAnswer(self.line, request, "welcome", {}, what, ends=self._is_settled)
        return Operation([answer], nothing)

    def _is_settled(self, welcome: Mapping[str, Any]) -> bool:
        """Accept the server's answer to `hello`.

        Return False if the trainer now moves its connection to a Unix socket.
        """
        local = self.line.admit(welcome)
        if self._first is not None:
            self._first.close()
            self._first = None
        elif local and self._transport.reaches(local):
            self._first = self.link
            self._open(local)
            return False
        return True

    def take(self, event: Event) -> wire.Message | None:
        """Handle an event of this connection; return the message if the trainer waits for it.

        Raises:
          PeerError: the server refused the trainer.
          WireError: the message is malformed.
        """
        message = self.receive(event)
        return None if message is None else self.line.answer(message, self._transport.now())

    def take_early(self, event: Event) -> None:
        """Handle an event of this connection while the trainer waits for another server.

        Changes of the connection are handled at once, because the other server may wait for this
        server. Messages and a refusal are stored for `early_answers`.

        Args:
          event: the event.

        Raises:
          WireError: the message is malformed.
        """
        try:
            message = self.receive(event)
        except PeerError as e:
            self._refusal = e
        else:
            if message is not None:
                self._early.append(message)

    @property
    def is_refused(self) -> bool:
        """True if `take_early` has stored a refusal of the server."""
        return self._refusal is not None

    @property
    def is_silent(self) -> bool:
        """True if the server has ended, and no unread message from it is stored."""
        return self.line.gone and not self._early and not self.is_refused

    def early_answers(self) -> Iterator[wire.Message]:
        """Handle messages that arrived while the trainer waited for another server.

        Yields:
          Each message for which the trainer now waits.

        Raises:
          PeerError: the server refused the trainer after these messages.
        """
        while self._early:
            answer = self.line.answer(self._early.popleft(), self._transport.now())
            if answer is not None:
                yield answer
        self.check_admitted()

    def check_admitted(self) -> None:
        """Raise PeerError if the server refused the trainer while the trainer waited for another.

        The error is raised only once.
        """
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def receive(self, event: Event) -> wire.Message | None:
        """Handle an event of the link; return its message, or None for a connection event.

        Raises:
          PeerError: the server refused the trainer.
          WireError: the message is malformed.
        """
        if event.kind == "message":
            return self.line.receive(event.frames)
        if event.kind == "connected":
            self.line.connected()
        elif event.kind == "broken":
            self.line.broken(self._transport.now())
        elif event.kind == "barred":
            raise self.line.barred(event.reason)
        return None

    def close(self, linger: float = 0.0) -> None:
        """Close the link, after at most `linger` seconds for pending messages to a live server."""
        if self._first is not None:
            self._first.close()
        self.link.close(0.0 if self.line.gone else linger)


class OperationWait:
    """Loop of a trainer that waits until servers have answered its requests.

    Call `turn` until `done` is True.

    Args:
      links: the link of each server that takes part in the operation, by endpoint.
      operation: the operation. `turn` closes the operation before it raises an error.
    """

    def __init__(
        self, transport: Transport, links: Mapping[str, ServerLink], operation: Operation[Any]
    ) -> None:
        self.operation = operation
        self._transport, self._links = transport, links
        # Links of other servers that have refused the trainer. `turn` raises a refusal only after
        # it has read all arrived answers of the awaited server. Such an answer may be the reason
        # why another trainer failed, and why the other servers refused this trainer. So every
        # trainer reports the answer, in any order of events.
        self._refused = [link for link in links.values() if link.is_refused]
        # True if any server of the job has ended
        self._has_ended = any(link.line.gone for link in links.values())
        self._begin()

    def _begin(self) -> None:
        if not self.operation.done:
            answer = self.operation.waits_for
            answer.line.wait(answer, self._transport.now())

    @property
    def done(self) -> bool:
        """True if all answers have arrived."""
        return self.operation.done

    @property
    def wakes(self) -> float:
        """Time at which `turn` must be called, even without an event."""
        line = self.operation.waits_for.line
        # After the end of a server, poll once without waiting, to read the awaited server's last
        # messages.
        is_last_look = line.gone or self._refused or self._never_answered
        return -math.inf if is_last_look else line.wakes

    @property
    def _never_answered(self) -> list[PendingAnswer]:
        """Answers after the awaited one that cannot arrive, because their servers have ended.

        The awaited server may itself wait for a server that has ended.
        """
        if not self._has_ended:
            return []
        later = self.operation.next_answers
        silent = [a for a in later if self._links[a.line.endpoint].is_silent]
        return [a for a in silent if not a.is_early]

    def turn(self) -> bool:
        """Wait for an event and handle it. Return True if there was an event.

        Raises:
          DeadlineError: an answer is late.
          PeerError: a server has refused the trainer, or has ended.
          WireError: a message is malformed.
        """
        try:
            return self._turn()
        except BaseException:
            self.operation.close()
            raise

    def _turn(self) -> bool:
        link, transport = self._links[self.operation.waits_for.line.endpoint], self._transport
        line, any_came, is_idle = link.line, False, True
        line.say_that_it_waits(transport.now())
        is_last_look, refused = line.gone, [*self._refused]
        never_answered = self._never_answered
        for early in link.early_answers():
            self._take(early)
            return True
        for event in transport.poll(self.wakes):
            is_idle = False
            if event.source is not link.link:
                self._take_early(event)
                continue
            any_came = True
            message = link.take(event)
            if message is not None:
                self._take(message)
                break
        if is_idle:
            for other in refused:
                other.check_admitted()
            for answer in never_answered:
                raise answer.line.went_away(str(answer))
        if not any_came and is_last_look:
            raise line.went_away()
        if not any_came:
            line.look(transport.now())
        return any_came

    def _take(self, answer: wire.Message) -> None:
        self.operation.take(answer)
        self._begin()

    def _take_early(self, event: Event) -> None:
        for link in self._links.values():
            if link.link is event.source:
                link.take_early(event)
                self._has_ended |= link.line.gone
                if link.is_refused:
                    self._refused.append(link)


class FailureReport:
    """Loop of a failed trainer that tells a server the reason, and waits for an answer.

    In answer, a synchronous server ends, and an asynchronous server sends `goodbye`. The loop
    ignores errors from the server.

    Args:
      transport: sends the message.
      link: the connection to the server.
      reason: the error of this trainer.
    """

    def __init__(self, transport: Transport, link: ServerLink, reason: str) -> None:
        self._transport, self._link = transport, link
        self.wakes = transport.now() + LINGER
        link.line.tell("abort", reason=reason)

    @property
    def done(self) -> bool:
        """True if the server has answered or ended, or the time `wakes` has passed."""
        return self._link.line.gone or self._transport.now() >= self.wakes

    def turn(self) -> bool:
        """Wait for events and handle them. Return True if there were any."""
        any_came, line = False, self._link.line
        for event in self._transport.poll(self.wakes):
            if event.source is not self._link.link:
                continue
            any_came = True
            try:
                message = self._link.receive(event)
                line.gone |= message is not None and message.op == "goodbye"
            except (
                NewGeneration
            ):  # the server has begun a new generation, and drops messages of the old one
                line.gone = True
            except (PeerError, WireError):
                pass
        return any_came
