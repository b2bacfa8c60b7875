"""Requests of one trainer to one server, and the answers that it waits for.

The trainer sends gradients and requests over a `server_connection`. A request may have a number,
which the server's answer repeats. One answer at a time is awaited. Its deadline begins again with
each `waiting` of the server, which names the trainers or servers that it waits for.

Read `server_link` next: it drives a line over a transport.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import DeadlineError, PeerError
from dtrans.protocol import wire
from dtrans.protocol.tables.rows_ahead import ComingRows
from dtrans.protocol.trainer.server_connection import ServerConnection
from dtrans.protocol.wait_reminder import WaitReminder


log = logging.getLogger("dtrans.trainer")


class TrainerLine(ServerConnection):
    """Requests of one trainer to one server.

    Args:
      deadline: seconds without a message of the server after which an answer is late.
      terms: arguments of `ServerConnection`.

    Attributes:
      step: number of the step that the next messages belong to.
      ahead: announced rows of later steps.
      awaited: number of the awaited request; 0 for a request without one.
      saved: request number to the answer to a `save`; None for an answer that is to come.
      saving: lines whose servers hear `saving` while this server lets the trainer wait.
      patience: the time at which the awaited answer is late.
      reminder: the times at which the trainer logs what it waits for.
    """

    def __init__(self, *terms: Any, deadline: float, **named_terms: Any) -> None:
        super().__init__(*terms, **named_terms)
        self.step = 0
        self.ahead = ComingRows(self.endpoint)
        self.awaited = self._asked = 0
        self.saved: dict[int, wire.Message | None] = {}
        self.saving: Sequence[TrainerLine] = ()
        self.patience = 0.0
        self.reminder = WaitReminder()
        self._deadline = deadline
        self._since = 0.0
        self._waits_for: object = ""
        self._reason = ""  # of the server's last `waiting`

    # -- requests --------------------------------------------------------------------------------

    def ask(self, op: str, **fields: Any) -> int:
        """Send a request, and return its number, which the answer repeats."""
        self.tell(op, step=self.step, request=self.new_request(), **fields)
        return self._asked

    def new_request(self) -> int:
        """Return the number of a new request."""
        self._asked += 1
        return self._asked

    def send_blocks(
        self, gradients: Iterable[tuple[str, Any]], /, steps: int = 1, **last: Any
    ) -> None:
        """Send gradients of this step from the memory that they are in.

        Args:
          gradients: name and array of each.
          steps: number of steps whose gradients they sum.
          last: fields of the last message.
        """
        fields = {} if steps == 1 else {"steps": steps}
        *messages, (pieces, frames) = wire.messages(gradients)
        for some, arrays in messages:
            self._say([wire.header("send", step=self.step, pieces=some, **fields), *arrays])
        fields |= last
        self._say([wire.header("send", step=self.step, pieces=pieces, **fields), *frames])

    def exchange(self, number: int, values: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        """Send this trainer's part of a round of `trainer_rounds`.

        Args:
          number: of the round.
          values: arrays, each with the collective and its arguments that merge it with the others.
        """
        table = [[x.dtype.name, list(x.shape), list(way)] for x, way in values]
        blocks = [(str(i), x) for i, (x, _) in enumerate(values)]
        for frames in wire.framed("exchange", blocks, step=self.step, round=number, values=table):
            self._say(frames)

    def prefetch(
        self, table: str, ids: np.ndarray, *, train: bool, ahead: int = 0, request: int = 0
    ) -> None:
        """Ask for rows of a block of a table.

        Args:
          table: name of the block.
          ids: row ids in the block.
          train: a step is made of the rows.
          ahead: number of steps until the step that uses them.
          request: number of the request, if it has one.
        """
        fields = {"step": self.step, "table": table, "count": len(ids), "train": train}
        if ahead:
            fields["ahead"] = ahead
        if request:
            fields["request"] = request
        self._send_ids("prefetch", ids, fields)

    def row_ids(self, gradient: str, ids: np.ndarray) -> None:
        """Announce the row ids, in a block of a table, of the gradient that follows."""
        fields = {"step": self.step, "gradient": gradient, "count": len(ids)}
        self._send_ids("row_ids", ids, fields)

    def _send_ids(self, op: str, ids: np.ndarray, fields: Mapping[str, Any]) -> None:
        for frames in wire.framed(op, [("ids", ids.astype(np.int32, copy=False))], **fields):
            self._say(frames)

    def end_step(
        self, gradients: Sequence[tuple[str, Any]], /, *, sent: bool, barrier: bool, **fields: Any
    ) -> None:
        """End a step and ask for parameters, in one message with the last gradients.

        Args:
          gradients: the last ones of this step, if any.
          sent: gradients of this step were sent before.
          barrier: a `send_barrier` follows the gradients.
          fields: of the `recv` that follows.
        """
        then = ["send_barrier", "recv"] if barrier else ["recv"]
        if gradients:
            self.send_blocks(gradients, then=then, **fields)
        elif barrier:
            self.tell("send_barrier", step=self.step, then=["recv"], **fields)
        self.step += bool(gradients) or sent or barrier
        if not gradients and not barrier:
            self.tell("recv", step=self.step, **fields)

    # -- answers ---------------------------------------------------------------------------------

    def admit(self, welcome: Mapping[str, Any]) -> str:
        """Take the fields of a welcome, as `ServerConnection.admit`."""
        local = super().admit(welcome)
        self.step = welcome["step"]
        return local

    def wait(self, what: object, now: float) -> None:
        """Begin to wait for an answer; `what` describes it in messages."""
        self._since, self._waits_for, self._reason = now, what, ""
        self.patience = now + self._deadline
        self.reminder.begin(now)

    def stop_waiting(self, number: int) -> None:
        """Await no answer, and release the answer to a request, whose memory may be large."""
        self.awaited, self.saving, self._waits_for = 0, (), ""
        self.saved.pop(number, None)

    @property
    def wakes(self) -> float:
        """The time at which to call `look` next."""
        return min(self.patience, self.reminder.next, self.retries_until)

    def heard(self, frames: Sequence[Any], now: float) -> wire.Message | None:
        """Take a message of the server. Return it if it is the awaited answer.

        Raises:
          PeerError: the server refuses. WireError: not a message of this protocol.
        """
        message = wire.parse(frames)
        if self._count(message):
            return None
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
        # a message with another number answers a request that was given up
        return message if number == self.awaited else None

    def went_away(self, what: str = "") -> PeerError:
        """Return the error for a server that has gone while the trainer waited for an answer."""
        awaited = what or self._waits_for
        return PeerError(f"pserver {self.endpoint} went away while {self.me} waited for {awaited}")

    def say_that_it_waits(self, now: float) -> None:
        """Log what the trainer waits for, if that is due."""
        waited = self.reminder.due(now)
        if waited:
            who = f"pserver {self.endpoint}{self._reason}"
            log.warning("%s has waited %.0f s for %s: %s", self.me, waited, who, self._waits_for)

    def look(self, now: float) -> None:
        """Raise DeadlineError if the awaited answer is late."""
        self.give_up(now)
        if now >= self.patience:
            who = f"pserver {self.endpoint}{self._reason}"
            raise DeadlineError(
                f"{self.me} waited {now - self._since:.1f} s for {who}: {self._waits_for}"
            )
