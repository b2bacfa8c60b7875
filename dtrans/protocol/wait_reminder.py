"""Times of log lines: a waiting process logs every ten seconds what it waits for."""

from __future__ import annotations

import math


SAY = 10.0  # seconds between two log lines


class WaitReminder:
    """Timer of a waiting process, which logs every ten seconds what it waits for.

    Attributes:
      next: time of the next log line.

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
        """Start a wait at time `now`. A second call with the same time changes nothing."""
        if now != self._since:
            self._since, self.next = now, now + SAY

    def due(self, now: float) -> float:
        """Return the duration of the wait in seconds if a log line is due, else 0."""
        if now < self.next:
            return 0.0
        self.next = now + SAY
        return now - self._since
