"""A trainer's links to its servers, and what waits for their answers, one turn at a time.

A link is made to the server's endpoint; a server on the same host answers with a local address, and
the trainer moves there.

Each turn waits until something comes or a time has come (`wakes`), and takes it. Real trainers make
turns until what they wait for is `done`; simulated ones make a turn when something happens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.trainer.operation import Operation, PendingAnswer, nothing
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.protocol.transport import DOOR, LINGER, Event, Link, Transport


class ServerLink:
    """A trainer's connection to one server.

    Args:
      terms: arguments of `TrainerLine`, without `say`.

    Attributes:
      line: the messages of both.
      link: that they are sent by.

    Raises:
      ConfigError: nothing protects messages to this endpoint.
    """

    def __init__(self, transport: Transport, **terms: Any) -> None:
        self.line = TrainerLine(**terms, say=self._say)
        self.line.before_it_speaks = self._note_changes
        self.link: Link
        self._transport = transport
        self._first: Link | None = None  # the server is not yet known to miss nothing of it
        self._open(self.line.endpoint)

    def _open(self, address: str) -> None:
        self.line.opened(local=address != self.line.endpoint)
        self.link = self._transport.connect(address, user=DOOR, role=self.line.me)

    def _say(self, frames: list[Any]) -> None:
        self.link.send(frames)

    def _note_changes(self) -> None:
        for event in self.link.changes():
            self.take(event)

    def greet(self) -> Operation[None]:
        """Wait until the server has welcomed this trainer, and move to its local address."""
        what = "an answer to `hello` (is it running, and is this its endpoint?)"
        request = f"`hello` of {self.line.me}"
        answer = PendingAnswer(self.line, request, "welcome", {}, what, ends=self._is_settled)
        return Operation([answer], nothing)

    def _is_settled(self, welcome: Mapping[str, Any]) -> bool:
        """Take a welcome. Return False if another is to come by the local address."""
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
        """Take an event of the link. Return the message if it is an answer.

        Raises:
          PeerError: the server refuses. WireError: not a message of this protocol.
        """
        if event.kind == "message":
            return self.line.heard(event.frames, self._transport.now())
        if event.kind == "connected":
            self.line.connected()
        elif event.kind == "broken":
            self.line.broken(self._transport.now())
        elif event.kind == "barred":
            raise self.line.barred(event.reason)
        return None

    def close(self, linger: float = 0.0) -> None:
        """Close it. Sent messages have so many seconds to leave, unless the server has ended."""
        if self._first is not None:
            self._first.close()
        self.link.close(0.0 if self.line.gone else linger)


class OperationWait:
    """Waits for the answers of an operation.

    Args:
      links: by endpoint, to all servers that the operation asks.
      operation: closed if an error ends the wait.
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
        """Return True if all answers are here."""
        return self.operation.done

    @property
    def wakes(self) -> float:
        """Return the time of the next turn, if nothing comes before."""
        line = self.operation.waits_for.line
        # a connection that has ended is looked at once more, for the last words of the server
        return -math.inf if line.gone else line.wakes

    def turn(self) -> bool:
        """Make one turn. Return True if something has come.

        Raises:
          DeadlineError: an answer is late. PeerError: a server refuses, or has gone. WireError: not
            a message of this protocol.
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
        for event in transport.poll(self.wakes, link.link):
            any_came = True
            message = link.take(event)
            if message is not None:
                self.operation.take(message)
                self._begin()
                break
        if not any_came and is_last_look:
            raise line.went_away()
        if not any_came:
            line.look(transport.now())
        return any_came


class LastWords:
    """Says why a trainer ends, and waits until the server has heard it.

    A synchronous server ends, another says goodbye. No error of the server counts any more.
    """

    def __init__(self, transport: Transport, link: ServerLink, reason: str) -> None:
        self._transport, self._link = transport, link
        self.wakes = transport.now() + LINGER
        link.line.tell("abort", reason=reason)

    @property
    def done(self) -> bool:
        """Return True if the server has heard it, or had its time."""
        return self._link.line.gone or self._transport.now() >= self.wakes

    def turn(self) -> bool:
        """Make one turn. Return True if something has come."""
        any_came, line = False, self._link.line
        for event in self._transport.poll(self.wakes, self._link.link):
            any_came = True
            if event.kind != "message":
                self._link.take(event)
                continue
            with contextlib.suppress(WireError):
                line.gone = line.gone or wire.parse(event.frames).op == "goodbye"
        return any_came
