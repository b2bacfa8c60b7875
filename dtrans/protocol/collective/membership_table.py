"""Table of a collective job's trainers: the progress and the end of each trainer.

All trainers perform the same collective operations in the same order. If another trainer ended
after n operations, this trainer cannot complete operation n + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


GRACE = 0.3  # seconds to wait for a trainer's last message after the end of its connection


@dataclasses.dataclass(frozen=True)
class ExitStatus:
    """End of a trainer.

    Attributes:
      operations: number of collective operations, such as all-reduces, that the trainer performed;
        0 if unknown.
      reason: the trainer's error; empty if the trainer ended successfully.
    """

    operations: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a trainer.

    Attributes:
      operations: number of collective operations that the trainer has begun.
      where: line of the user's code that the trainer executes, as "file:line".
      steps: number of steps that the trainer has made; None if it does not count steps.
    """

    operations: int
    where: str
    steps: int | None = None


class MembershipTable:
    """State of all trainers, as one trainer knows it.

    Args:
      me: id of this trainer.
      names: name of each trainer in error and log texts.

    Attributes:
      begun: number of collective operations that this trainer has begun.
      doing: maps the id of each other trainer to its last known progress.
      ended: maps the id of each ended trainer to its exit status.

    Example:
      >>> from dtrans.protocol.collective.membership_table import ExitStatus, MembershipTable
      >>> members = MembershipTable(0, ["trainer 0", "trainer 1"])
      >>> members.note(1, ExitStatus(5))
      True
      >>> members.begun = 6
      >>> members.failure()
      'trainer 1 has finished after 5 operations of the job, but this trainer has begun 6'
    """

    def __init__(self, me: int, names: Sequence[str]) -> None:
        self.begun = 0
        self.doing: dict[int, Progress] = {}
        self.ended: dict[int, ExitStatus] = {}
        self._me, self._names = me, names
        self._broken: dict[int, float] = {}

    def note(self, trainer: int, how: ExitStatus) -> bool:
        """Record the end of a trainer. Return True if the end was not known yet."""
        if trainer in self.ended or trainer == self._me or not 0 <= trainer < len(self._names):
            return False
        self.ended[trainer] = how
        return True

    def behind(self) -> str:
        """Return the progress of the live trainers that are behind this trainer.

        The text is empty if no trainer is behind.
        """
        late = []
        for k, progress in sorted(self.doing.items()):
            if progress.operations < self.begun and k not in self.ended:
                late.append(
                    f"{self._names[k]} has begun {progress.operations}, and is at {progress.where}"
                )
        return "; ".join(late)

    def broken(self, trainer: int, now: float, grace: float = GRACE) -> None:
        """Handle the end of a trainer's connection.

        The trainer may still reconnect. Its last message, such as a report of its end, may also
        arrive late.

        Args:
          trainer: id of the trainer.
          now: the current time, in seconds.
          grace: seconds to wait for a reconnection or a late message. Afterwards the trainer counts
            as ended.
        """
        self._broken.setdefault(trainer, now + grace)

    def back(self, trainer: int) -> None:
        """Handle the reconnection of a trainer."""
        self._broken.pop(trainer, None)

    def is_broken(self, trainer: int) -> bool:
        """Return True if a trainer has lost its connection and has not reconnected."""
        return trainer in self._broken

    def due(self) -> float | None:
        """Return the time at which to call `silent`; None if all live trainers are connected."""
        waiting = [t for k, t in self._broken.items() if k not in self.ended]
        return min(waiting, default=None)

    def silent(self, now: float) -> list[int]:
        """Mark trainers as ended if they did not reconnect in time; return their ids."""
        why = ExitStatus(0, "its connection ended without a goodbye")
        return [k for k, t in self._broken.items() if now >= t and self.note(k, why)]

    def failed(self) -> list[int]:
        """Return the ids of the trainers that have failed."""
        return sorted(k for k, how in list(self.ended.items()) if how.reason)

    def why(self, trainer: int) -> str:
        """Return a text that describes the end of a trainer; empty if it has not ended."""
        how = self.ended.get(trainer)
        if how is None:
            return ""
        if how.reason:
            return f"{self._names[trainer]} has ended: {how.reason}"
        return f"{self._names[trainer]} has finished"

    def failure(self) -> str:
        """Return the reason why this trainer cannot continue; empty if it can."""
        known = list(self.ended.items())  # a copy, because another thread may add an entry
        for k, how in known:
            if how.reason:
                return self.why(k)
        for k, how in known:
            if how.operations < self.begun:
                return (
                    f"{self.why(k)} after {how.operations} operations of the job, but this trainer "
                    f"has begun {self.begun}"
                )
        return ""
