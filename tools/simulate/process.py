"""A role of a simulation, as a process: it takes one event at a time.

While it computes or pauses, events wait in its queue, as messages wait in sockets. A pause stops
all of a process, its signs of life too; one that is killed says nothing more.
"""

from __future__ import annotations

import collections
from typing import Any

from tools.simulate.clock import Clock


class Process:
    """A role. Its work is `handle`, for each event; `spend` says that an event takes time.

    Attributes:
      error: what ended it, if anything did.
      ended: when it ended, well or with an error; None while it runs, and of one that was killed.
      killed: whether it was.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock = name, clock
        self.error: BaseException | None = None
        self.ended: float | None = None
        self.killed = False
        self.begun = False
        self.spent = 0.0  # by the event that is being handled
        self._queue: collections.deque[tuple[Any, ...]] = collections.deque()
        self._free = 0.0
        self._scheduled = False

    @property
    def there(self) -> bool:
        """Return True while it runs."""
        return self.begun and not self.killed and self.ended is None

    @property
    def over(self) -> bool:
        """Return True if it ran and has ended."""
        return self.killed or self.ended is not None

    @property
    def paused(self) -> bool:
        """Return True while it computes or pauses."""
        return self.clock.now < self._free

    def deliver(self, event: tuple[Any, ...]) -> None:
        """Let it take an event when it comes to it."""
        self._queue.append(event)
        self._schedule()

    def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        self._free = max(self._free, self.clock.now) + seconds

    def spend(self, seconds: float) -> None:
        """Let the event that is being handled take so long."""
        self.spent += seconds

    def kill(self) -> None:
        """End without a word."""
        if self.over:
            return
        self.killed = True
        self.close()

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""

    def handle(self, event: tuple[Any, ...]) -> None:
        """Take one event."""
        raise NotImplementedError

    def end(self, error: BaseException | None) -> None:
        """Be over."""
        self.error, self.ended = error, self.clock.now
        self.close()

    def _schedule(self) -> None:
        if self._queue and not self._scheduled and self.there:
            self._scheduled = True
            self.clock.at(self._free, self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self.there and not self.paused and self._queue:
            self.spent = 0.0
            self.handle(self._queue.popleft())
            self._free = self.clock.now + self.spent
        self._schedule()
