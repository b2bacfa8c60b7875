"""Requests of one trainer to one server, and the answers that the trainer waits for.

The trainer sends gradients and requests over a `server_connection`. A request may have a number,
which the server's answer repeats. The trainer waits for one answer at a time. While the server
itself waits for trainers or other servers, it sends `waiting` messages. Each of them restarts the
trainer's deadline for the answer.

Read `server_link` next: it connects a `TrainerLine` to a transport.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import DeadlineError, LostPeerError
from dtrans.protocol import wire
from dtrans.protocol.tables.rows_ahead import ComingRows
from dtrans.protocol.trainer.server_connection import ServerConnection
from dtrans.protocol.wait_reminder import WaitReminder


log = logging.getLogger("dtrans.trainer")


class TrainerLine(ServerConnection):
    """Requests of one trainer to one server, and the server's answers.

    Args:
      deadline: seconds without a message from the server after which an answer is late.
      terms, named_terms: arguments of `ServerConnection`.

    Attributes:
      step: step number of the next messages.
      level: for compressed gradients with sizes that change between steps, the index of the sizes
        of the next gradients.
      ahead: table rows that the trainer has requested early, for later steps.
      awaited: request number of the answer that the trainer waits for; 0 if it has no number.
      saved: maps the request number of each `save` to the answer; None until the answer arrives.
      saving: lines to other servers. Whenever this server sends `waiting`, the trainer sends
        `saving` on these lines, so that the other servers extend the trainer's deadline.
      patience: time at which the awaited answer is late.
      reminder: times at which the trainer logs what it waits for.
    """

    def __init__(self, *terms: Any, deadline: float, **named_terms: Any) -> None:
        super().__init__(*terms, **named_terms)
        self.step = self.level = 0
        self.ahead = ComingRows(self.endpoint)
        self.awaited = self._asked = 0
        self.saved: dict[int, wire.Message | None] = {}
        self.saving: Sequence[TrainerLine] = ()
        self.patience = 0.0
        self.reminder = WaitReminder()
        self._deadline = deadline
        self._since = 0.0
        self._waits_for: object = ""
        self._reason = ""  # the server's last `waiting`: what the server waits for

    @property
    def steps_so_far(self) -> int:
        """Number of this trainer's steps, also before a reconnection.

        Steps that a communicator (background thread) sends do not count.
        """
        # an asynchronous trainer numbers its steps from 0 on each connection
        return self.step if self._hello["sync_mode"] else self.count + self.step

    # -- requests --------------------------------------------------------------------------------

    def ask(self, op: str, **fields: Any) -> int:
        """Send a request with a new number, which the answer repeats; return this number."""
        self.tell(op, step=self.step, request=self.new_request(), **fields)
        return self._asked

    def new_request(self) -> int:
        """Return an unused request number."""
        self._asked += 1
        return self._asked

    def save(self, name: str, steps: int, arrays: Sequence[tuple[str, Any]]) -> int:
        """Request a checkpoint; return the number of the request.

        Args:
          name: name of the checkpoint.
          steps: number of steps that this trainer has made.
          arrays: name and array of each array of this trainer that the server saves.
        """
        fields = {"step": self.step, "request": self.new_request(), "name": name, "made": steps}
        if not arrays:
            self.tell("save", **fields)
        for pieces, frames in wire.messages(arrays):
            self._say("save", frames, pieces=pieces, **fields)
        return self._asked

    def send_blocks(
        self, gradients: Iterable[tuple[str, Any]], /, steps: int = 1, **last: Any
    ) -> None:
        """Send gradients of this step without copying them.

        Args:
          gradients: name and array of each gradient.
          steps: number of steps from which these gradients are merged.
          last: additional fields of the last message.
        """
        fields: dict[str, Any] = {"step": self.step}
        if steps != 1:
            fields["steps"] = steps
        if self.level:
            fields["level"] = self.level
        *first_messages, (pieces, frames) = wire.messages(gradients)
        for first_pieces, first_frames in first_messages:
            self._say("send", first_frames, pieces=first_pieces, **fields)
        self._say("send", frames, pieces=pieces, **fields, **last)

    def exchange(self, number: int, values: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        """Send this trainer's values for a collective that the server computes within a step.

        The n-th such collective in a step is its round n.

        Args:
          number: number of the round in the step.
          values: pairs of an array and the collective, [name, arguments], that merges the trainers'
            arrays.
        """
        table = [[x.dtype.name, list(x.shape), list(way)] for x, way in values]
        blocks = [(str(i), x) for i, (x, _) in enumerate(values)]
        for pieces, frames in wire.messages(blocks):
            fields = {"round": number, "values": table, "pieces": pieces}
            self._say("exchange", frames, step=self.step, **fields)

    def prefetch(
        self, ids: Mapping[str, np.ndarray], *, train: bool, ahead: int = 0, request: int = 0
    ) -> None:
        """Request rows of tables.

        Args:
          ids: row ids in each block of a table, by the block's name.
          train: True if a gradient of these rows follows.
          ahead: number of steps from the current step to the step that uses the rows.
          request: number of the request; 0 if it has none.
        """
        fields: dict[str, Any] = {"train": train}
        if ahead:
            fields["ahead"] = ahead
        if request:
            fields["request"] = request
        self._send_ids("prefetch", ids, fields)

    def row_ids(self, ids: Mapping[str, np.ndarray]) -> None:
        """Send ids of table rows. Gradients of these rows follow in the next messages.

        Args:
          ids: row ids in the server's part of the table, by the gradient's name.
        """
        self._send_ids("row_ids", ids, {})

    def _send_ids(self, op: str, ids: Mapping[str, np.ndarray], fields: Mapping[str, Any]) -> None:
        counts = {n: len(x) for n, x in ids.items()}
        blocks = [(n, x.astype(np.int32, copy=False)) for n, x in ids.items()]
        for pieces, frames in wire.messages(blocks):
            self._say(op, frames, step=self.step, counts=counts, **fields, pieces=pieces)

    def end_step(
        self, gradients: Sequence[tuple[str, Any]], /, *, sent: bool, barrier: bool, **fields: Any
    ) -> None:
        """End a step: send the remaining gradients, and request parameters in the same message.

        If a synchronous trainer needs several messages for the gradients, the request precedes
        them. So the server can answer while it still receives gradients.

        Args:
          gradients: gradients of this step that have not been sent yet.
          sent: True if other gradients of this step have already been sent.
          barrier: True to send `send_barrier` after the gradients.
          fields: fields of the `recv` message.
        """
        then = ["send_barrier", "recv"] if barrier else ["recv"]
        if barrier and sum(x.nbytes for _, x in gradients) > wire.MESSAGE_BYTES:
            self.tell("recv", step=self.step + 1, **fields)
            self.send_blocks(gradients, then=["send_barrier"])
        elif gradients:
            self.send_blocks(gradients, then=then, **fields)
        elif barrier:
            self.tell("send_barrier", step=self.step, then=["recv"], **fields)
        self.step += bool(gradients) or sent or barrier
        if not gradients and not barrier:
            self.tell("recv", step=self.step, **fields)

    # -- answers ---------------------------------------------------------------------------------

    def admit(self, welcome: Mapping[str, Any]) -> str:
        """Accept a welcome, and set `step` to the server's step. See `ServerConnection.admit`."""
        local = super().admit(welcome)
        self.step = welcome["step"]
        return local

    def wait(self, what: object, now: float) -> None:
        """Start to wait for an answer.

        Args:
          what: description of the answer for log lines and errors. `str` is called only for them.
        """
        self._since, self._waits_for, self._reason = now, what, ""
        self.patience = now + self._deadline
        self.reminder.begin(now)

    def stop_waiting(self, number: int) -> None:
        """Stop waiting for an answer, and forget it if it has arrived early.

        Args:
          number: number of the request.
        """
        self.awaited, self.saving, self._waits_for = 0, (), ""
        self.saved.pop(number, None)

    @property
    def wakes(self) -> float:
        """Time at which `look` must be called next."""
        return min(self.patience, self.reminder.next, self.retries_until)

    def answer(self, message: wire.Message, now: float) -> wire.Message | None:
        """Handle a message of the server; return it only if it is the awaited answer.

        The server may send `waiting`, for which the trainer extends its deadline. It may also send
        rows for a later step.

        Args:
          message: the message.
          now: the current time in seconds.
        """
        if message.op == "waiting":
            self.patience = now + self._deadline
            self._reason = f", which waited for {message['reason']}"
            for line in self.saving:
                line.tell("saving", step=line.step)
            return None
        if message.op == "rows" and "ahead" in message.fields:
            self.ahead.take(message)
            return None
        number = message.fields.get("request", self.awaited)
        if number in self.saved:
            self.saved[number] = message
        # An answer with another number belongs to a request that the trainer has given up.
        return message if number == self.awaited else None

    def went_away(self, what: str = "") -> LostPeerError:
        """Return the error to raise if the server has ended while the trainer waits.

        Args:
          what: description of the awaited answer; by default the description passed to `wait`.
        """
        awaited = what or self._waits_for
        return LostPeerError(
            f"pserver {self.endpoint} went away while {self.me} waited for {awaited}",
            f"pserver {self.endpoint}",
        )

    def say_that_it_waits(self, now: float) -> None:
        """Log what the trainer waits for, if a log line is due."""
        waited = self.reminder.due(now)
        if waited:
            who = f"pserver {self.endpoint}{self._reason}"
            log.warning("%s has waited %.0f s for %s: %s", self.me, waited, who, self._waits_for)

    def look(self, now: float) -> None:
        """Raise DeadlineError if the awaited answer is late.

        If a reconnection takes too long, the server counts as ended (`gone`).

        Args:
          now: the current time in seconds.
        """
        self.give_up(now)
        if now >= self.patience:
            who = f"pserver {self.endpoint}{self._reason}"
            raise DeadlineError(
                f"{self.me} waited {now - self._since:.1f} s for {who}: {self._waits_for}"
            )
