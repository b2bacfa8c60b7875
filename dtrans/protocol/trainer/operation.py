"""Requests of a trainer and the answers that it waits for, as explicit state.

An operation is a queue of answers. Whoever runs it hands it each message of the line that it
waits for (`waits_for`), until it is `done`. It holds no generator and no closure: it can be copied
together with the lines and the memory that it writes to.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from dtrans.errors import PeerError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.trainer.trainer_line import TrainerLine


T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class PendingAnswer:
    """A server's answer to one request, in one message or several.

    Attributes:
      line: to the server.
      request: description of the request, for errors.
      op, fields: of each of its messages.
      what: description of the answer, for errors.
      number: of the request; 0 if it has none.
      ask: op and fields of the request, if it is sent when its turn comes and not before.
      memory: for its blocks, by name; None if the answer has no blocks.
      room: makes the memory from the first message, if that says how large the blocks are.
      lists_blocks: the description lists the missing blocks.
      skips: messages with another op are ignored.
      ends: takes the fields of a message that is whole, and returns True if it is the last one.
      saving: lines that hear of it when the server says that this trainer has to wait.
      reply: fields of the last message.
    """

    line: TrainerLine
    request: str
    op: str
    fields: Mapping[str, Any]
    what: str
    number: int = 0
    ask: tuple[str, Mapping[str, Any]] | None = None
    memory: Mapping[str, np.ndarray] | None = None
    room: Callable[[wire.Message], Mapping[str, np.ndarray]] | None = None
    lists_blocks: bool = False
    skips: bool = False
    ends: Callable[[Mapping[str, Any]], bool] | None = None
    saving: Sequence[TrainerLine] = ()
    reply: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inbox = None if self.memory is None else self._inbox_of(self.memory)

    def _inbox_of(self, memory: Mapping[str, np.ndarray]) -> Inbox:
        return Inbox(memory, functools.partial(_NOT_ASKED, self.line.endpoint))

    def __str__(self) -> str:
        if not self.lists_blocks or self._inbox is None:
            return self.what
        missing = self._inbox.missing()
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        return f"{self.what} ({some or 'no blocks'})"

    def begin(self) -> bool:
        """Begin to wait; send the request if that is due. Return True if the answer is here."""
        if self.ask is not None:
            self.number = self.line.ask(self.ask[0], **self.ask[1])
        self.line.awaited, self.line.saving = self.number, self.saving
        early = self.line.saved.get(self.number)
        return early is not None and self.take(early)

    def take(self, message: wire.Message) -> bool:
        """Take a message. Return True if it completes the answer.

        Raises:
          PeerError: the message answers something else. WireError: its blocks do not fit.
        """
        if message.op != self.op and self.skips:
            return False
        if message.op != self.op or any(message[n] != x for n, x in self.fields.items()):
            raise PeerError(
                f"pserver {self.line.endpoint} answered {self.request} with `{message.op}`"
            )
        self.reply = message.fields
        if self._inbox is None and self.room is not None:
            self.memory = self.room(message)
            self._inbox = self._inbox_of(self.memory)
        if self._inbox is not None:
            self._inbox.take(message)
            return not self._inbox.missing()
        return self.ends is None or self.ends(message.fields)


_NOT_ASKED = "pserver {} sent {}, which was not asked for".format


class Operation(Generic[T]):
    """Answers that are awaited one after the other.

    Args:
      answers: in this order.
      finish: makes the result from them, or raises for answers that say that a server could not.

    Attributes:
      done: all answers are here.
      result: of `finish`.
    """

    def __init__(
        self, answers: Sequence[PendingAnswer], finish: Callable[[Sequence[PendingAnswer]], T]
    ) -> None:
        self.done = False
        self.result: T
        self._answers, self._finish, self._at = answers, finish, 0
        self._begin()

    @property
    def waits_for(self) -> PendingAnswer:
        """Return the answer whose messages come next."""
        return self._answers[self._at]

    def take(self, message: wire.Message) -> None:
        """Take a message of the awaited line. Raises as `PendingAnswer.take` and `finish`."""
        if self.waits_for.take(message):
            self._at += 1
            self._begin()

    def _begin(self) -> None:
        while self._at < len(self._answers):
            if not self.waits_for.begin():
                return
            self._at += 1
        self.close()
        self.result = self._finish(self._answers)
        self.done = True

    def close(self) -> None:
        """Await nothing more: messages that still come are answers to nobody."""
        for answer in self._answers:
            answer.line.stop_waiting(answer.number)


def nothing(answers: Sequence[PendingAnswer]) -> None:
    """Finish an operation that has no result."""
