"""A trainer's links to its servers, and the loops that wait for the servers' answers.

The trainer first connects to the server's endpoint. If the server's welcome contains a local
address that the trainer can reach, the trainer reconnects there.

A loop is driven by its method `turn`, which waits for an event, or until the time `wakes`, and
handles it. Real trainers call it until the loop is `done`, and the simulator calls it at each
event.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.trainer.operation import Operation, PendingAnswer, nothing
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.transport import LINGER, ROLE_USER, Event, Link, Transport


class ServerLink:
    """A trainer's line to one server, over a transport.

    Args:
      terms: arguments of `TrainerLine` except `say`.

    Attributes:
      line: requests and answers of the trainer.
      link: link over which they are sent.

    Raises:
      ConfigError: the server is on another host, and neither a token nor keys protect the messages.
    """

    def __init__(self, transport: Transport, **terms: Any) -> None:
        self.line = TrainerLine(**terms, say=self._say)
        self.line.before_it_speaks = self._note_changes
        self.link: Link
        self._transport = transport
        self._first: Link | None = None  # link to the endpoint, until the local one is welcomed
        self._early: collections.deque[wire.Message] = collections.deque()
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
        """Return the operation that waits for the welcome, and moves to the local address."""
        what = "an answer to `hello` (is it running, and is this its endpoint?)"
        request = f"`hello` of {self.line.me}"
        answer = PendingAnswer(self.line, request, "welcome", {}, what, ends=self._is_settled)
        return Operation([answer], nothing)

    def _is_settled(self, welcome: Mapping[str, Any]) -> bool:
        """Accept a welcome. Return False if the trainer now connects to the local address."""
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
        """Handle an event of the link. Return the message if it is the awaited answer.

        Raises:
          PeerError: the server refused the trainer.
          WireError: the message is malformed.
        """
        message = self.receive(event)
        return None if message is None else self.line.answer(message, self._transport.now())

    def take_early(self, event: Event) -> None:
        """Handle an event while the trainer waits for another server.

        A broken connection is resumed at once, because the other server may wait for this one.
        Answers are stored for `early_answers`.

        Raises:
          PeerError: the server refused the trainer.
          WireError: the message is malformed.
        """
        message = self.receive(event)
        if message is not None:
            self._early.append(message)

    def early_answers(self) -> Iterator[wire.Message]:
        """Handle the messages that `take_early` has stored; yield the awaited answers."""
        while self._early:
            answer = self.line.answer(self._early.popleft(), self._transport.now())
            if answer is not None:
                yield answer

    def receive(self, event: Event) -> wire.Message | None:
        """Handle an event of the link; return its message, or None if only the connection changed.

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
        """Close the link. Pending messages are sent for `linger` seconds if the server is alive."""
        if self._first is not None:
            self._first.close()
        self.link.close(0.0 if self.line.gone else linger)


class OperationWait:
    """Loop that waits for the answers of an operation.

    Args:
      links: the link of each server that takes part in the operation, by endpoint.
      operation: the operation. If `turn` raises an error, it closes the operation.
    """

    def __init__(
        self, transport: Transport, links: Mapping[str, ServerLink], operation: Operation[Any]
    ) -> None:
        self.operation = operation
        self._transport, self._links = transport, links
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
        # After the end of a connection, one poll without a wait reads the server's last messages.
        return -math.inf if line.gone else line.wakes

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
        line, any_came = link.line, False
        line.say_that_it_waits(transport.now())
        is_last_look = line.gone
        for message in link.early_answers():
            self._take(message)
            return True
        for event in transport.poll(self.wakes):
            if event.source is not link.link:
                self._take_early(event)
                continue
            any_came = True
            answer = link.take(event)
            if answer is not None:
                self._take(answer)
                break
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


class LastWords:
    """Loop that sends `abort`, the reason of a trainer's failure, and waits for the server.

    A synchronous server then ends, and an asynchronous one sends `goodbye`. Errors from the server
    are ignored.
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
            with contextlib.suppress(PeerError, WireError):
                message = self._link.receive(event)
                line.gone |= message is not None and message.op == "goodbye"
        return any_came
