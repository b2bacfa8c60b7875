"""Pending answers to a trainer's requests.

An operation is a queue of pending answers. Its first incomplete answer is `waits_for`. The caller
passes each message from this answer's server to the operation, until the operation is `done`. An
operation contains no generators, so the simulator can deep-copy it together with the connections
and the memory that it writes to.
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
    """Answer to one request that a trainer awaits from a server. It may need several messages.

    Attributes:
      line: the trainer's requests to the server.
      request: description of the request for errors.
      op: op that each message of the answer must have.
      fields: values of header fields that each message of the answer must have.
      what: description of the answer for errors and log lines.
      number: number of the request; 0 if it has none.
      ask: op and fields of a request that is sent when all previous answers are complete; None if
        the request is already sent.
      memory: maps the name of each block to its memory; None if the answer has no blocks.
      room: function that allocates `memory` from the first message, which contains the sizes.
      lists_blocks: True to append the names of missing blocks to the description.
      skips: True to ignore messages with another op; False to raise an error for them.
      ends: returns True if the message with these fields is the answer's last message. By default,
        the first message is the last one.
      saving: lines to other servers. Whenever this server sends `waiting`, the trainer sends
        `saving` on these lines, so that the other servers extend the trainer's deadline.
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
        return f"{self.what} ({some_names(self._inbox.missing()) or 'no blocks'})"

    @property
    def is_early(self) -> bool:
        """True if this answer arrived earlier, while the trainer waited for another answer."""
        return self.line.saved.get(self.number) is not None

    def begin(self) -> bool:
        """Start to wait for this answer, after the previous answers are complete.

        If the attribute `ask` has a request, it is sent now. The method does not block.

        Returns:
          True if the answer has arrived earlier and is complete.
        """
        if self.ask is not None:
            self.number = self.line.ask(self.ask[0], **self.ask[1])
        self.line.awaited, self.line.saving = self.number, self.saving
        early = self.line.saved.get(self.number)
        return early is not None and self.take(early)

    def take(self, message: wire.Message) -> bool:
        """Handle a message of the server. Return True if the answer is then complete.

        Raises:
          PeerError: the message answers another request.
          WireError: an array in the message is not expected, or has another size.
        """
        if message.op != self.op and self.skips:
            return False
        if message.op != self.op or any(message[n] != x for n, x in self.fields.items()):
            fields = f" with {self.fields}" if self.fields else ""
            raise PeerError(
                f"pserver {self.line.endpoint} answered {self.request} with `{message.op}`; "
                f"{self.line.me} expected `{self.op}`{fields}"
            )
        self.reply = message.fields
        if self._inbox is None and self.room is not None:
            self.memory = self.room(message)
            self._inbox = self._inbox_of(self.memory)
        if self._inbox is not None:
            self._inbox.take(message)
            return not self._inbox.missing()
        return self.ends is None or self.ends(message.fields)


_NOT_ASKED = "pserver {} sent {}, which was not requested".format


def some_names(names: Sequence[str]) -> str:
    """Return at most three of the names as one text, such as "a, b, c, ...", for log lines."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class Operation(Generic[T]):
    """Requests of a trainer to several servers, for example the end of a step or a checkpoint.

    The operation awaits the servers' answers one after the other, and then computes a result.

    Args:
      answers: the answers, in the order in which they are awaited.
      finish: computes the result from the complete answers. It raises an exception if a server
        has reported an error.

    Attributes:
      done: True if all answers are complete.
      result: result of `finish`.
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
        """First incomplete answer."""
        return self._answers[self._at]

    @property
    def next_answers(self) -> Sequence[PendingAnswer]:
        """Answers that the operation awaits after the current one (`waits_for`)."""
        return self._answers[self._at + 1 :]

    def take(self, message: wire.Message) -> None:
        """Handle a message from the server of the answer `waits_for`.

        Raises:
          DtransError: an error of `PendingAnswer.take` or of `finish`.
        """
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
        """Stop waiting for answers. Answers that arrive later are dropped."""
        for answer in self._answers:
            answer.line.stop_waiting(answer.number)


def nothing(answers: Sequence[PendingAnswer]) -> None:
    """Return None. Operations without a result pass this function as `finish`."""
