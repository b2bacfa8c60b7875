"""The trainers of collectives meet: what the first says to each other one, what it is answered, and when all are there.

    the first   asks every other, again where something answers that is not of this job, until all are there
    an other    answers who asks it with the right endpoints, and waits for the word that all are there

What they agree on is the list of endpoints, which says who is who. Both sides show that they have the job's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrans.errors import DeadlineError, PeerError, WireError
from dtrans.protocol import token, wire


GRACE = 5.0  # seconds that the others give the first to tell them that time is up


class MeetingFirst:
    """What trainer 0 knows.

    Args:
      endpoints: of all trainers.
      secret: the job's token.
      nonce: a word of this meeting, of which the others show something.

    Attributes:
      missing: the numbers of those that are not there yet.
      here: of those that are.

    Example:
      >>> from dtrans.protocol import wire
      >>> from dtrans.protocol.meeting import MeetingFirst, MeetingOther
      >>> endpoints = ("a:1", "b:2")
      >>> first = MeetingFirst(endpoints, "secret", "nonce")
      >>> other = MeetingOther(1, endpoints, "secret", deadline=60, now=0)
      >>> answer = other.heard(b"it", [first.question(1)], now=1)
      >>> first.heard(1, [answer])
      >>> first.missing, other.heard(b"it", [wire.header("go")], now=2), other.met
      ([], None, True)
    """

    def __init__(self, endpoints: Sequence[str], secret: str, nonce: str) -> None:
        self._endpoints, self._secret, self._nonce = endpoints, secret, nonce
        self.missing = list(range(1, len(endpoints)))
        self.here: list[int] = []
        self.others: dict[int, str] = {}  # what was said, that is not of this job, where somebody is missing

    def question(self, k: int) -> bytes:
        """What trainer k is asked."""
        return wire.header("meet", trainer=k, endpoints=list(self._endpoints), nonce=self._nonce)

    def heard(self, k: int, parts: Sequence[Any]) -> None:
        """Take an answer.

        Raises:
          PeerError: the trainer refuses.
          WireError: it is not of this job, and changes nothing.
        """
        if k not in self.missing:
            return  # it was asked again, and answered twice
        try:
            message = self._answer(parts)
        except WireError as e:
            self.others[k] = f"; at {self._endpoints[k]} is something that is not of this job: {e}"
            raise
        self.missing.remove(k)
        self.others.pop(k, None)
        if message.op != "here":
            raise PeerError(f"trainer {k} ({self._endpoints[k]}) refused trainer 0: {message['reason']}")
        self.here.append(k)

    def barred(self, k: int, why: str) -> None:
        """Note that a trainer, or somebody in its place, does not let trainer 0 in: it may be right later."""
        self.others[k] = f"; {self._endpoints[k]} does not let trainer 0 in: {why}"

    def _answer(self, parts: Sequence[Any]) -> wire.Message:
        message = wire.parse(parts)
        if message.op not in ("here", "refuse"):
            raise WireError(f"it says `{message.op}`")
        if not token.is_shown(message.fields.get("proof"), self._secret, f"{message.op} {self._nonce}"):
            raise WireError(f"it says `{message.op}`, and has not the job's token")
        return message

    def late(self, deadline: float) -> DeadlineError:
        """What is wrong where time is up."""
        absent = " and ".join(f"trainer {k} ({self._endpoints[k]})" for k in self.missing)
        return DeadlineError(f"trainer 0 waited {deadline:g} s for {absent} to come{''.join(self.others.values())}")


class MeetingOther:
    """What another trainer knows.

    Args:
      trainer: its number.
      endpoints: of all trainers, as it was told.
      secret: the job's token.
      deadline: seconds to wait for trainer 0, and again for the others.

    Attributes:
      limit: the time until when it waits.
      met: all are there.
      refused: why it has refused trainer 0, if it has.
    """

    def __init__(self, trainer: int, endpoints: Sequence[str], secret: str, *, deadline: float, now: float) -> None:
        self._trainer, self._endpoints, self._secret, self._deadline = trainer, endpoints, secret, deadline
        self._asked = b""
        self.limit = now + deadline
        self.met = False
        self.refused = ""

    def heard(self, sender: bytes, parts: Sequence[Any], now: float) -> bytes | None:
        """Take a message; what to answer, if anything.

        Raises:
          PeerError, DeadlineError: the first gave up.
          WireError: it is no message of this protocol, and changes nothing.
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
        told = [message["trainer"], message["endpoints"]]
        if told != [self._trainer, list(self._endpoints)]:
            said = f"trainer {told[0]} of {wire.brief(','.join(map(str, told[1])))}"
            mine = f"trainer {self._trainer} of {','.join(self._endpoints)}"
            self.refused = f"this is {mine}, and trainer 0 takes it for {said}"
            return wire.header("refuse", reason=self.refused, proof=token.shown(self._secret, f"refuse {nonce}"))
        if sender != self._asked:  # its own deadline ends before this one, and then it says who is missing
            self._asked, self.limit = sender, now + self._deadline + GRACE
        return wire.header("here", proof=token.shown(self._secret, f"here {nonce}"))

    def late(self) -> DeadlineError:
        """What is wrong where time is up."""
        waited, what = (self._deadline + GRACE, "to find the others") if self._asked else (self._deadline, "to come")
        return DeadlineError(
            f"trainer {self._trainer} waited {waited:g} s at {self._endpoints[self._trainer]} for trainer 0 "
            f"({self._endpoints[0]}) {what}"
        )
