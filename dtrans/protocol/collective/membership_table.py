"""Table of a collective job's trainers: which ones have ended, and if this one can continue.

All trainers carry out the same operations in the same order. So a trainer waits in vain for one
that has ended after fewer operations than it has begun.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


GRACE = 0.3  # seconds that a trainer's last message may come after the end of its connection


@dataclasses.dataclass(frozen=True)
class ExitStatus:
    """End of a trainer.

    Attributes:
      operations: number that it has carried out; unknown if it ended without a word.
      reason: its error; empty if it ended well.
    """

    operations: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a trainer.

    Attributes:
      operations: number that it has begun.
      where: place in its own code.
      steps: number that it has made; None if it counts none.
    """

    operations: int
    where: str
    steps: int | None = None


class MembershipTable:
    """State of all trainers, as one of them knows it.

    Args:
      me: id of this trainer.
      names: names of the trainers in messages.

    Attributes:
      begun: number of operations that this trainer has begun.
      doing: last progress of the other trainers.
      ended: the trainers that have ended.

    Example:
      >>> from dtrans.protocol.collective.membership_table import ExitStatus, MembershipTable
      >>> members = MembershipTable(0, ["trainer 0", "trainer 1"])
      >>> members.note(1, ExitStatus(5))
      True
      >>> members.begun = 6
      >>> members.failure()
      'trainer 1 has come to its end after 5 operations of the job, and this one has begun 6'
    """

    def __init__(self, me: int, names: Sequence[str]) -> None:
        self.begun = 0
        self.doing: dict[int, Progress] = {}
        self.ended: dict[int, ExitStatus] = {}
        self._me, self._names = me, names
        self._broken: dict[int, float] = {}

    def note(self, trainer: int, how: ExitStatus) -> bool:
        """Note that a trainer has ended; return True if that is new."""
        if trainer in self.ended or trainer == self._me or not 0 <= trainer < len(self._names):
            return False
        self.ended[trainer] = how
        return True

    def behind(self) -> str:
        """Return the trainers that have begun fewer operations than this one, and their progress;
        empty if there are none."""
        late = [
            (k, d)
            for k, d in sorted(self.doing.items())
            if d.operations < self.begun and k not in self.ended
        ]
        return "; ".join(
            f"{self._names[k]} has begun {d.operations}, and is at {d.where}" for k, d in late
        )

    def broken(self, trainer: int, now: float, grace: float = GRACE) -> None:
        """Note that the connection of a trainer has ended. Its last message may still be unread.

        Args:
          grace: seconds in which the connection may be made again.
        """
        self._broken.setdefault(trainer, now + grace)

    def back(self, trainer: int) -> None:
        """Note that the connection of a trainer is made again."""
        self._broken.pop(trainer, None)

    def is_broken(self, trainer: int) -> bool:
        """Return True if the connection of a trainer has ended."""
        return trainer in self._broken

    def due(self) -> float | None:
        """Return the time at which to call `silent`; None if no connection has ended."""
        waiting = [t for k, t in self._broken.items() if k not in self.ended]
        return min(waiting, default=None)

    def silent(self, now: float) -> list[int]:
        """Note the trainers that have ended without a word, and return them."""
        why = ExitStatus(0, "its connection ended without a goodbye")
        return [k for k, t in self._broken.items() if now >= t and self.note(k, why)]

    def failed(self) -> list[int]:
        """Return the trainers that have failed."""
        return sorted(k for k, how in list(self.ended.items()) if how.reason)

    def why(self, trainer: int) -> str:
        """Return how a trainer has ended, for messages; empty if it has not."""
        how = self.ended.get(trainer)
        if how is None:
            return ""
        return f"{self._names[trainer]} has " + (
            f"ended: {how.reason}" if how.reason else "come to its end"
        )

    def failure(self) -> str:
        """Return the reason for which this trainer cannot continue; empty if it can."""
        known = list(self.ended.items())  # a copy: another thread may note one meanwhile
        for k, how in known:
            if how.reason:
                return self.why(k)
        for k, how in known:
            if how.operations < self.begun:
                return (
                    f"{self.why(k)} after {how.operations} operations of the job, and this one "
                    f"has begun {self.begun}"
                )
        return ""
