"""One trainer's side of its line to one server: who the server is, what is said, and which messages
are answers.

ZeroMQ makes a connection again that has ended, and what was on its way is lost. So both ends count
what they say and hear. Where a connection is made again in time, `hello` tells the server these
numbers, and the job goes on if nothing is missing; else it ends, since a step cannot be completed
as if nothing had happened. A Unix socket ends with its process only, and is not waited for. Until
the server's welcome there is nothing to lose: `hello` is said on every connection that is made,
since the first may be to a server that is about to end, and whose process serves the next job on
the same endpoint. A trainer that has said `complete` has nothing to lose either: `leaves` in the
`hello` says it again.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import DeadlineError, PeerError
from dtrans.protocol import token, wire
from dtrans.protocol.presence import RETRY
from dtrans.protocol.tables.rows_ahead import ComingRows
from dtrans.protocol.wait_reminder import WaitReminder


log = logging.getLogger("dtrans.trainer")

DOOR = "a role of parameter servers"  # as whom trainers and servers connect


class TrainerLine:
    """The line of one trainer to one server.

    Args:
      endpoint: of the server, `host:port`.
      trainer, trainers: who this is, of how many.
      session: a word of this trainer's own, the same for all servers.
      sync_mode: whether it is in step with the others.
      plan: the parts of the fingerprint of its plan.
      secret: the job's token.
      deadline: seconds without a word from the server after which it is given up.
      say: sends the frames of one message.
      retry: seconds in which a connection that has ended may be made again.

    Attributes:
      step: that the next messages are of.
      welcomed: whether the server has welcomed it on this connection.
      ahead: the rows of later steps that were announced by it.
      gone: the server has ended, or the connection to it has.
      awaited: the number of the request whose answer is waited for; 0 where that has none.
      saved: the answers to requests to save, by their numbers; None for one that is to come.
      saving: lines whose servers hear `saving` when this one says that the trainer has to wait.
      patience: the time until when it waits.
      reminder: when to say that it waits.
    """

    def __init__(
        self,
        endpoint: str,
        trainer: int,
        trainers: int,
        *,
        session: str,
        sync_mode: bool,
        plan: Mapping[str, str],
        secret: str,
        deadline: float,
        say: Callable[[list[Any]], None],
        retry: float = RETRY,
    ) -> None:
        self.endpoint = endpoint
        self.me = f"trainer {trainer}"
        self.step = 0
        self.welcomed = False
        self.gone = False
        self.patience = 0.0
        self.awaited = self._asked = 0
        self.saved: dict[int, wire.Message | None] = {}
        self.saving: Sequence[TrainerLine] = ()
        self.ahead = ComingRows(endpoint)
        self._secret, self._deadline, self._say_now, self._retry = secret, deadline, say, retry
        self._lost: float | None = None  # since when the connection is
        self._sent = self._heard = 0
        self._leaves = False  # it has said that it has done
        self._aborts = False  # it has said why it ends, and only waits until that is heard
        # what is to be said when the connection is made again, as `_say` is given it
        self._held: list[tuple[list[Any], str]] = []
        self.before_it_speaks: Callable[[], object] | None = None
        self._since, self._told = 0.0, ""
        self._waits_for: object = ""
        self.reminder = WaitReminder()
        self._hello = {
            "trainer": trainer,
            "trainers": trainers,
            "session": session,
            "order": sys.byteorder,
            "sync_mode": sync_mode,
            "plan": {**plan},
            "nonce": token.new_token(),
        }

    # -- the connection --------------------------------------------------------------------------

    def opened(self, *, local: bool = False) -> None:
        """Begin anew, on another connection; a `local` one is by a Unix socket."""
        self.welcomed = self.gone = False
        self._lost, self._hello["local"] = None, local

    def connected(self) -> None:
        """Say hello on a connection that was made, unless the server has welcomed this trainer on
        it."""
        if not self.welcomed or self._lost is not None:
            back = self._lost is not None
            counts = {"sent": self._sent, "heard": self._heard, "back": back}
            leaves = {"leaves": True} if self._leaves else {}
            self._say_now([wire.header("hello", **self._hello, **counts, **leaves)])

    def broken(self, now: float) -> None:
        """Note that an established connection has ended: what was on its way is lost."""
        if self.welcomed and (self._hello["local"] or self._aborts):
            self.gone = True
        elif self.welcomed and self._lost is None:
            self._lost = now

    @property
    def wakes(self) -> float:
        """When to call `look` next."""
        return min(self.patience, self.reminder.next, self.retries_until)

    @property
    def retries_until(self) -> float:
        """The time at which a connection that has ended is given up."""
        return math.inf if self._lost is None or self.gone else self._lost + self._retry

    def give_up(self, now: float) -> None:
        """Take the server for gone where its connection was not made again in time."""
        self.gone = self.gone or now >= self.retries_until

    def _say(self, frames: list[Any], op: str = "") -> None:
        """Say something, now or when the connection is made again.

        Args:
          op: of the message, where it may be one that is not counted.
        """
        if self.before_it_speaks is not None:
            self.before_it_speaks()
        if self._lost is not None:
            self._held.append((frames, op))
            return
        self._sent += op not in wire.UNCOUNTED
        self._leaves |= op == "complete"
        self._say_now(frames)

    def barred(self, why: str) -> PeerError:
        """Return the error where the server does not let this trainer in."""
        return PeerError(f"pserver {self.endpoint} does not let {self.me} in: {why}")

    # -- speaking --------------------------------------------------------------------------------

    def tell(self, op: str, **fields: Any) -> None:
        """Send a message that needs no answer."""
        self._aborts |= op == "abort"
        self._say([wire.header(op, **fields)], op)

    def answer_goodbye(self) -> None:
        """Let the server end. By a Unix socket nothing is lost: there it has ended already."""
        if not self._hello["local"]:
            self.tell("goodbye")

    def ask(self, op: str, **fields: Any) -> int:
        """Send a request, and return its number, which the answer repeats."""
        self.tell(op, step=self.step, request=self.new_request(), **fields)
        return self._asked

    def new_request(self) -> int:
        """Return the number of a new request."""
        self._asked += 1
        return self._asked

    def send_blocks(
        self, gradients: Iterable[tuple[str, Any]], /, steps: int = 1, **at_end: Any
    ) -> None:
        """Send gradients of this step, from the memory they are in; `steps` when they are of
        several.

        `at_end` are fields of the last message.
        """
        several = {} if steps == 1 else {"steps": steps}
        messages = list(wire.messages(gradients))
        for i, (pieces, frames) in enumerate(messages):
            fields = several | at_end if i == len(messages) - 1 else several
            self._say([wire.header("send", step=self.step, pieces=pieces, **fields), *frames])

    def exchange(self, number: int, values: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        """Send this trainer's part of round `number`: each array with the way in which those of all
        are made one."""
        table = [[x.dtype.name, list(x.shape), list(way)] for x, way in values]
        blocks = [(str(i), x) for i, (x, _) in enumerate(values)]
        for frames in wire.framed("exchange", blocks, step=self.step, round=number, values=table):
            self._say(frames)

    def prefetch(
        self, table: str, ids: np.ndarray, *, train: bool, ahead: int = 0, request: int = 0
    ) -> None:
        """Ask for rows of a block of a table, by their numbers in the block; also of a step that is
        `ahead`."""
        fields = {"step": self.step, "table": table, "count": len(ids), "train": train}
        fields |= {n: x for n, x in (("ahead", ahead), ("request", request)) if x}
        for frames in wire.framed(
            "prefetch", [("ids", ids.astype(np.int32, copy=False))], **fields
        ):
            self._say(frames)

    def row_ids(self, gradient: str, ids: np.ndarray) -> None:
        """Say of which rows of a block of a table the gradient is that follows, by their numbers in
        the block."""
        fields = {"step": self.step, "gradient": gradient, "count": len(ids)}
        for frames in wire.framed("row_ids", [("ids", ids.astype(np.int32, copy=False))], **fields):
            self._say(frames)

    def end_step(
        self, gradients: Sequence[tuple[str, Any]], /, *, sent: bool, barrier: bool, **fields: Any
    ) -> None:
        """Send, in one message, what ends a step and asks for parameters.

        Args:
          gradients: the last of this step; if there are none, `sent` says whether there were
            before.
          barrier: whether a `send_barrier` follows them.
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

    # -- listening -------------------------------------------------------------------------------

    def wait(self, what: object, now: float) -> None:
        """Begin to wait for an answer; `what` describes it where a message is made."""
        self._since, self._waits_for, self._told = now, what, ""
        self.patience = now + self._deadline
        self.reminder.begin(now)

    def stop_waiting(self, number: int) -> None:
        """Await nothing more, and release the answer to a request, whose memory may be large."""
        self.awaited, self.saving, self._waits_for = 0, (), ""
        self.saved.pop(number, None)

    def heard(self, frames: Sequence[Any], now: float) -> wire.Message | None:
        """The answer that a message is; None for one that is not.

        Raises:
          PeerError: the server refuses. WireError: not a message of this protocol.
        """
        message = wire.parse(frames)
        if message.op == "refuse":
            self.gone = bool(message.fields.get("last"))
            raise PeerError(f"pserver {self.endpoint} refused {self.me}: {message['reason']}")
        self._heard += message.op not in wire.UNCOUNTED
        if message.op == "welcome" and self.welcomed:
            self._go_on(message)
            return None
        if message.op == "waiting":
            self.patience = now + self._deadline
            self._told = f", which waited for {message['reason']}"
            for line in self.saving:
                line.tell("saving", step=line.step)
            return None
        if message.op == "rows" and "ahead" in message.fields:
            self.ahead.take(message)
            return None
        number = message.fields.get("request", self.awaited)
        if number in self.saved:
            self.saved[number] = message
        # who asked for another has given up waiting
        return message if number == self.awaited else None

    def _go_on(self, message: wire.Message) -> None:
        """Say what waits, where the server has missed nothing. Else `hello` was said twice."""
        if self._lost is None:
            return
        self._check_proof(message.fields)
        self._lost = None
        held, self._held = self._held, []
        for frames, op in held:
            self._say(frames, op)

    def went_away(self, what: str = "") -> PeerError:
        """What is wrong where the server has gone."""
        return PeerError(
            f"pserver {self.endpoint} went away while {self.me} waited for "
            f"{what or self._waits_for}"
        )

    def say_that_it_waits(self, now: float) -> None:
        """Log for whom this trainer waits, where it is time to."""
        waited = self.reminder.due(now)
        if waited:
            who = f"pserver {self.endpoint}{self._told}"
            log.warning("%s has waited %.0f s for %s: %s", self.me, waited, who, self._waits_for)

    def look(self, now: float) -> None:
        """Raise DeadlineError where the answer is too late."""
        self.give_up(now)
        if now >= self.patience:
            who = f"pserver {self.endpoint}{self._told}"
            raise DeadlineError(
                f"{self.me} waited {now - self._since:.1f} s for {who}: {self._waits_for}"
            )

    def admit(self, welcome: Mapping[str, Any]) -> str:
        """Take the fields of a welcome; return the server's local address, or nothing.

        Raises:
          PeerError: the server does not know the job's token.
        """
        self._check_proof(welcome)
        self.welcomed = True
        self.step = welcome["step"]
        return str(welcome["local"])

    def _check_proof(self, welcome: Mapping[str, Any]) -> None:
        """Raise PeerError if the sender of a welcome does not have the job's token."""
        if not token.is_shown(
            welcome.get("proof"), self._secret, f"welcome {self._hello['nonce']}"
        ):
            raise PeerError(
                f"what welcomes {self.me} as pserver {self.endpoint} has not the job's token"
            )
