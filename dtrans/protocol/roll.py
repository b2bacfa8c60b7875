"""Which of a job's trainers have ended, and whether this one can go on without them.

The trainers of collectives are in step: each carries out the same operations in the same order. So
a trainer that has come to its end after fewer operations than another has begun is one that this
other would wait for in vain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


GRACE = 0.3  # seconds that the last words of a trainer may come behind the end of its connection


@dataclasses.dataclass(frozen=True)
class Ended:
    """A trainer has ended.

    Attributes:
      operations: how many it has carried out; nobody knows, where it was not in the right way.
      reason: what failed; empty, where it came to its end.
    """

    operations: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Doing:
    """What a trainer does.

    Attributes:
      operations: how many it has begun.
      where: it is in its own code.
      steps: how many it has made; None where it counts none.
    """

    operations: int
    where: str
    steps: int | None = None


class Roll:
    """What one trainer knows of the others.

    Args:
      me: its number.
      names: what messages call the trainers.

    Attributes:
      begun: how many operations it has begun.
      doing: what the others have said last that they do.
      ended: those that have ended.

    Example:
      >>> from dtrans.protocol.roll import Ended, Roll
      >>> roll = Roll(0, ["trainer 0", "trainer 1"])
      >>> roll.note(1, Ended(5))
      True
      >>> roll.begun = 6
      >>> roll.failure()
      'trainer 1 has come to its end after 5 operations of the job, and this one has begun 6'
    """

    def __init__(self, me: int, names: Sequence[str]) -> None:
        self.begun = 0
        self.doing: dict[int, Doing] = {}
        self.ended: dict[int, Ended] = {}
        self._me, self._names = me, names
        self._broken: dict[int, float] = {}

    def note(self, trainer: int, how: Ended) -> bool:
        """Note that a trainer has ended; whether that is new."""
        if trainer in self.ended or trainer == self._me or not 0 <= trainer < len(self._names):
            return False
        self.ended[trainer] = how
        return True

    def behind(self) -> str:
        """Those that have begun fewer operations than this one, and what they do; empty, where
        there are none."""
        late = [
            (k, d)
            for k, d in sorted(self.doing.items())
            if d.operations < self.begun and k not in self.ended
        ]
        return "; ".join(
            f"{self._names[k]} has begun {d.operations}, and is at {d.where}" for k, d in late
        )

    def broken(self, trainer: int, now: float, grace: float = GRACE) -> None:
        """Note that the connection of a trainer has ended. Its last words may still be waiting to
        be read.

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
        """The time at which to look for `silent` ones, if there are any."""
        waiting = [t for k, t in self._broken.items() if k not in self.ended]
        return min(waiting, default=None)

    def silent(self, now: float) -> list[int]:
        """Those that have ended without a word, and are noted so."""
        why = Ended(0, "its connection ended without a goodbye")
        return [k for k, t in self._broken.items() if now >= t and self.note(k, why)]

    def failed(self) -> list[int]:
        """Those that have ended before their time."""
        return sorted(k for k, how in list(self.ended.items()) if how.reason)

    def why(self, trainer: int) -> str:
        """How a trainer has ended, for messages; empty, where it has not."""
        how = self.ended.get(trainer)
        if how is None:
            return ""
        return f"{self._names[trainer]} has " + (
            f"ended: {how.reason}" if how.reason else "come to its end"
        )

    def failure(self) -> str:
        """Why this trainer cannot go on; empty, where it can."""
        known = list(self.ended.items())  # another thread may note one meanwhile
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
