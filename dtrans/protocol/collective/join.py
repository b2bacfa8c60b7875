"""Rendezvous of the trainers of a collective job.

    leader (trainer 0)      asks each member to join, and sends `go` when all members have joined
    member (any other)      answers the leader, and waits for `go`

All trainers have the same list of endpoints, and trainer k listens at endpoint k. A member refuses
a leader with another list. The leader proves its identity to a member by a key or password. The
members' answers prove that they have the job's token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.wait_reminder import WaitReminder


log = logging.getLogger("dtrans.rendezvous")
GRACE = 5.0  # seconds after the leader's deadline in which a member waits for an `abort`


class JoinLeader:
    """Trainer 0's side of the rendezvous.

    Args:
      endpoints: endpoints of all trainers.
      secret: the job's token.
      nonce: random word of this rendezvous; members derive their proofs from it and the token.
      now: time at which the rendezvous begins.

    Attributes:
      missing: ids of the trainers that have not answered yet.
      joined: ids of the trainers that have joined.
      strangers: maps the id of a missing trainer to the reason why the process at the trainer's
        endpoint cannot join.
      reminder: times at which trainer 0 logs the missing trainers.

    Example:
      >>> from dtrans.protocol import wire
      >>> from dtrans.protocol.collective.join import JoinLeader, JoinMember
      >>> endpoints = ("a:1", "b:2")
      >>> first = JoinLeader(endpoints, "secret", "nonce", now=0)
      >>> other = JoinMember(1, endpoints, "secret", deadline=60, now=0)
      >>> answer = other.heard(b"it", [first.question(1)], now=1)
      >>> first.heard(1, [answer])
      >>> first.missing, other.heard(b"it", [wire.header("go")], now=2), other.met
      ([], None, True)
    """

    def __init__(self, endpoints: Sequence[str], secret: str, nonce: str, *, now: float) -> None:
        self._endpoints, self._secret, self._nonce = endpoints, secret, nonce
        self.missing = list(range(1, len(endpoints)))
        self.joined: list[int] = []
        self.strangers: dict[int, str] = {}
        self.reminder = WaitReminder()
        self.reminder.begin(now)

    def question(self, k: int) -> bytes:
        """Return the message that asks trainer k to join."""
        return wire.header("meet", trainer=k, endpoints=list(self._endpoints), nonce=self._nonce)

    def heard(self, k: int, parts: Sequence[Any]) -> None:
        """Handle an answer from the process at trainer k's endpoint.

        Raises:
          PeerError: trainer k refuses to join.
          WireError: the process belongs to another job, or its answer is malformed.
        """
        if k not in self.missing:
            return  # trainer k has joined already, and was asked again on a second connection
        try:
            message = self._answer(k, parts)
        except WireError as e:
            self.strangers[k] = (
                f"; the process at {self._endpoints[k]} is not part of this job: it sent {e}"
            )
            raise
        self.missing.remove(k)
        self.strangers.pop(k, None)
        if message.op != "here":
            raise PeerError(
                f"trainer {k} ({self._endpoints[k]}) refused trainer 0: {message['reason']}"
            )
        self.joined.append(k)

    def barred(self, k: int, why: str) -> None:
        """Record why the process at trainer k's endpoint rejects this process.

        The wait continues, because the right process may start there later.

        Args:
          k: id of the trainer.
          why: reason for the rejection.
        """
        self.strangers[k] = f"; {self._endpoints[k]} does not admit trainer 0: {why}"

    def lost(self, k: int) -> None:
        """Handle the end of the connection to trainer k. The trainer has to join again."""
        if k in self.joined:
            self.joined.remove(k)
            self.missing.append(k)

    def _answer(self, k: int, parts: Sequence[Any]) -> wire.Message:
        message = wire.parse(parts)
        if message.op not in ("here", "refuse"):
            raise WireError(
                f"a `{message.op}` message; trainer 0 expected `here` or `refuse` from trainer {k}"
            )
        proof = message.fields.get("proof")
        if not token.is_shown(proof, self._secret, f"{message.op} {self._nonce}"):
            raise WireError(f"a `{message.op}` message without a proof of the job's token")
        return message

    def say_that_it_waits(self, now: float) -> None:
        """Write a log line that names the missing trainers, if one is due."""
        waited = self.reminder.due(now)
        if waited:
            log.warning("trainer 0 has waited %.0f s for %s", waited, self._absent())

    def late(self, deadline: float) -> DeadlineError:
        """Return the error for a passed deadline. The error names the missing trainers."""
        return DeadlineError(f"trainer 0 waited {deadline:g} s for {self._absent()}")

    def _absent(self) -> str:
        absent = " and ".join(f"trainer {k} ({self._endpoints[k]})" for k in self.missing)
        return f"{absent} to join{''.join(self.strangers.values())}"


class JoinMember:
    """A member's side of the rendezvous: any trainer except trainer 0.

    Args:
      trainer: id of this trainer.
      endpoints: endpoints of all trainers, as configured in this process.
      secret: the job's token.
      deadline: seconds to wait for trainer 0's question. After the question, the wait for `go`
        has the same limit.
      now: time at which the rendezvous begins.

    Attributes:
      limit: time at which this trainer gives up.
      met: True once all trainers have joined.
      refused: reason why this trainer has refused trainer 0; empty if there was no refusal.
      reminder: times at which this trainer logs what it waits for.
    """

    def __init__(
        self, trainer: int, endpoints: Sequence[str], secret: str, *, deadline: float, now: float
    ) -> None:
        self._trainer, self._endpoints = trainer, endpoints
        self._secret, self._deadline = secret, deadline
        self._asked = b""  # address of the process that last sent trainer 0's question
        self.limit = now + deadline
        self.met = False
        self.refused = ""
        self.reminder = WaitReminder()
        self.reminder.begin(now)

    @property
    def wakes(self) -> float:
        """Time of the next log line or of the deadline, whichever is earlier."""
        return min(self.limit, self.reminder.next)

    def heard(self, sender: bytes, parts: Sequence[Any], now: float) -> bytes | None:
        """Handle a message. Return the answer to send, or None.

        Args:
          sender: address of the sender.
          parts: frames of the message.
          now: the current time, in seconds.

        Raises:
          PeerError: trainer 0 gave up because of an error.
          DeadlineError: trainer 0 gave up at its deadline.
          WireError: the message is malformed.
        """
        message = wire.parse(parts)
        if message.op == "meet":
            return self._meet(sender, message, now)
        if sender == self._asked and message.op == "abort":
            kind = DeadlineError if message.fields.get("late") else PeerError
            raise kind(
                f"trainer {self._trainer} stopped because trainer 0 gave up: {message['reason']}"
            )
        self.met = self.met or (sender == self._asked and message.op == "go")
        return None

    def _meet(self, sender: bytes, message: wire.Message, now: float) -> bytes:
        nonce = message.fields.get("nonce", "")
        trainer, endpoints = message["trainer"], message["endpoints"]
        if [trainer, endpoints] != [self._trainer, list(self._endpoints)]:
            expected = f"trainer {trainer} of {wire.brief(','.join(map(str, endpoints)))}"
            mine = f"trainer {self._trainer} of {','.join(self._endpoints)}"
            self.refused = f"this process is {mine}, but trainer 0 expects {expected}"
            return wire.header(
                "refuse", reason=self.refused, proof=token.shown(self._secret, f"refuse {nonce}")
            )
        if sender != self._asked:
            # GRACE makes the leader's deadline pass first. The leader's `abort` names the missing
            # trainers.
            self._asked, self.limit = sender, now + self._deadline + GRACE
        return wire.header("here", proof=token.shown(self._secret, f"here {nonce}"))

    def say_that_it_waits(self, now: float) -> None:
        """Log what this trainer waits for, if a log line is due."""
        waited = self.reminder.due(now)
        if waited:
            log.warning("trainer %d has waited %.0f s %s", self._trainer, waited, self._awaited())

    def late(self) -> DeadlineError:
        """Return the error for a passed deadline. The error says what this trainer waited for."""
        waited = self._deadline + (GRACE if self._asked else 0.0)
        return DeadlineError(f"trainer {self._trainer} waited {waited:g} s {self._awaited()}")

    def _awaited(self) -> str:
        here, first = self._endpoints[self._trainer], self._endpoints[0]
        action = "to reach the other trainers" if self._asked else "to connect"
        return f"at {here} for trainer 0 ({first}) {action}"
