"""Rendezvous of the trainers of a collective job: the questions of trainer 0 and their answers.

    leader (trainer 0)    asks every other trainer until all have joined, and then tells them so
    member (any other)    answers the leader if both have the same endpoints, and waits for its word

The list of endpoints says which process is which trainer. Both sides prove that they have the job's
token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.wait_reminder import WaitReminder


log = logging.getLogger("dtrans.rendezvous")
GRACE = 5.0  # seconds that members give the leader to tell them that its deadline has passed


class JoinLeader:
    """Trainer 0's side of the rendezvous.

    Args:
      endpoints: endpoints of all trainers.
      secret: the job's token.
      nonce: random word of this rendezvous; the members' answers prove the token with it.
      now: the time at which it begins.

    Attributes:
      missing: ids of the trainers that have not answered yet.
      joined: ids of the trainers that have joined.
      reminder: the times at which trainer 0 logs for whom it waits.

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
        # of missing trainers: the reason for which another process answers at their endpoint
        self.strangers: dict[int, str] = {}
        self.reminder = WaitReminder()
        self.reminder.begin(now)

    def question(self, k: int) -> bytes:
        """Return the question to trainer k."""
        return wire.header("meet", trainer=k, endpoints=list(self._endpoints), nonce=self._nonce)

    def heard(self, k: int, parts: Sequence[Any]) -> None:
        """Take an answer of trainer k.

        Raises:
          PeerError: the trainer refuses.
          WireError: an answer of another job, which changes nothing.
        """
        if k not in self.missing:
            return  # it was asked on two connections, and answers twice
        try:
            message = self._answer(parts)
        except WireError as e:
            self.strangers[k] = (
                f"; at {self._endpoints[k]} is something that is not of this job: {e}"
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
        """Note that a process at trainer k's endpoint refuses this connection; another may replace
        it."""
        self.strangers[k] = f"; {self._endpoints[k]} does not let trainer 0 in: {why}"

    def lost(self, k: int) -> None:
        """Note that the connection to trainer k has ended: another process may replace it."""
        if k in self.joined:
            self.joined.remove(k)
            self.missing.append(k)

    def _answer(self, parts: Sequence[Any]) -> wire.Message:
        message = wire.parse(parts)
        if message.op not in ("here", "refuse"):
            raise WireError(f"it says `{message.op}`")
        if not token.is_shown(
            message.fields.get("proof"), self._secret, f"{message.op} {self._nonce}"
        ):
            raise WireError(f"it says `{message.op}`, and has not the job's token")
        return message

    def say_that_it_waits(self, now: float) -> None:
        """Log for whom trainer 0 waits, if that is due."""
        waited = self.reminder.due(now)
        if waited:
            log.warning("trainer 0 has waited %.0f s for %s", waited, self._absent())

    def late(self, deadline: float) -> DeadlineError:
        """Return the error for a deadline that has passed; it names the missing trainers."""
        return DeadlineError(f"trainer 0 waited {deadline:g} s for {self._absent()}")

    def _absent(self) -> str:
        absent = " and ".join(f"trainer {k} ({self._endpoints[k]})" for k in self.missing)
        return f"{absent} to come{''.join(self.strangers.values())}"


class JoinMember:
    """The side of another trainer.

    Args:
      trainer: its id.
      endpoints: endpoints of all trainers, as this one knows them.
      secret: the job's token.
      deadline: seconds to wait for trainer 0, and again for the others.
      now: the time at which it begins.

    Attributes:
      limit: the time at which it gives up.
      met: True once all trainers have joined.
      refused: the reason for which it has refused trainer 0, if it has.
      reminder: the times at which it logs for whom it waits.
    """

    def __init__(
        self, trainer: int, endpoints: Sequence[str], secret: str, *, deadline: float, now: float
    ) -> None:
        self._trainer, self._endpoints, self._secret, self._deadline = (
            trainer,
            endpoints,
            secret,
            deadline,
        )
        self._asked = b""
        self.limit = now + deadline
        self.met = False
        self.refused = ""
        self.reminder = WaitReminder()
        self.reminder.begin(now)

    @property
    def wakes(self) -> float:
        """The time of the next reminder, or of the deadline."""
        return min(self.limit, self.reminder.next)

    def heard(self, sender: bytes, parts: Sequence[Any], now: float) -> bytes | None:
        """Take a message; return the answer to it, if there is one.

        Raises:
          PeerError, DeadlineError: trainer 0 gave up.
          WireError: the message is malformed; it changes nothing.
        """
        message = wire.parse(parts)
        if message.op == "meet":
            return self._meet(sender, message, now)
        if sender == self._asked and message.op == "abort":
            kind = DeadlineError if message.fields.get("late") else PeerError
            raise kind(f"trainer {self._trainer} was told to give up: {message['reason']}")
        self.met = self.met or (sender == self._asked and message.op == "go")
        return None

    def _meet(self, sender: bytes, message: wire.Message, now: float) -> bytes:
        nonce = message.fields.get("nonce", "")
        trainer, endpoints = message["trainer"], message["endpoints"]
        if [trainer, endpoints] != [self._trainer, list(self._endpoints)]:
            said = f"trainer {trainer} of {wire.brief(','.join(map(str, endpoints)))}"
            mine = f"trainer {self._trainer} of {','.join(self._endpoints)}"
            self.refused = f"this is {mine}, and trainer 0 takes it for {said}"
            return wire.header(
                "refuse", reason=self.refused, proof=token.shown(self._secret, f"refuse {nonce}")
            )
        if sender != self._asked:
            # the leader's deadline passes first, and its word says which trainers are missing
            self._asked, self.limit = sender, now + self._deadline + GRACE
        return wire.header("here", proof=token.shown(self._secret, f"here {nonce}"))

    def say_that_it_waits(self, now: float) -> None:
        """Log for whom this trainer waits, if that is due."""
        waited = self.reminder.due(now)
        if waited:
            log.warning("trainer %d has waited %.0f s %s", self._trainer, waited, self._awaited())

    def late(self) -> DeadlineError:
        """Return the error for a deadline that has passed; it says what trainer 0 has not done."""
        waited = self._deadline + (GRACE if self._asked else 0.0)
        return DeadlineError(f"trainer {self._trainer} waited {waited:g} s {self._awaited()}")

    def _awaited(self) -> str:
        here, first = self._endpoints[self._trainer], self._endpoints[0]
        return (
            f"at {here} for trainer 0 ({first}) "
            f"{'to find the others' if self._asked else 'to come'}"
        )
