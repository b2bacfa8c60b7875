"""The words of a process that waits for long: whom it waits for, every ten seconds."""

from __future__ import annotations

import math


SAY = 10.0  # seconds between two words of one that waits


class WaitReminder:
    """Times at which to say that a wait goes on.

    Attributes:
      next: the next of them.

    Example:
      >>> from dtrans.protocol.wait_reminder import WaitReminder
      >>> reminder = WaitReminder()
      >>> reminder.begin(100.0)
      >>> [reminder.due(now) for now in (105.0, 110.5, 111.0, 121.0)]
      [0.0, 10.5, 0.0, 21.0]
    """

    def __init__(self) -> None:
        self.next = math.inf
        self._since = math.nan

    def begin(self, now: float) -> None:
        """Note when a wait began; a wait that is noted already goes on."""
        if now != self._since:
            self._since, self.next = now, now + SAY

    def due(self, now: float) -> float:
        """Return the seconds that the wait has lasted where it is time to say so, else 0."""
        if now < self.next:
            return 0.0
        self.next = now + SAY
        return now - self._since
