"""Reminders of a process that waits: every ten seconds it logs for whom."""

from __future__ import annotations

import math


SAY = 10.0  # seconds between two reminders


class WaitReminder:
    """Times at which a process logs a wait.

    Attributes:
      next: the next of these times.

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
        """Begin a wait; the same wait may begin several times."""
        if now != self._since:
            self._since, self.next = now, now + SAY

    def due(self, now: float) -> float:
        """Return the seconds that the wait has lasted if a reminder is due, else 0."""
        if now < self.next:
            return 0.0
        self.next = now + SAY
        return now - self._since
