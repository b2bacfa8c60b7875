"""A role of a simulation, as a process: it takes a step when an event has come, or at a time.

While it computes or pauses, events wait in its queue, as messages wait in sockets. A pause stops
all of a process, its signs of life too; one that is killed says nothing more.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

from dtrans.protocol.transport import Event
from tools.simulate.clock import Clock


class Process:
    """A role. Its work is `step`; `spend` says that it takes time.

    Attributes:
      error: the exception that ended it; None without one.
      ended: when it ended, well or with an error; None while it runs, and of one that was killed.
      killed, killed_at: if it was, and when.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock = name, clock
        self.error: BaseException | None = None
        self.ended: float | None = None
        self.killed, self.killed_at = False, math.inf
        self.begun = False
        self.spent = 0.0  # by the step that is being taken
        self._queue: collections.deque[Any] = collections.deque()
        self._free = 0.0
        self._scheduled = False
        self._took = False  # an event, in this step
        self._wakes: float | None = None
        self._is_due = False  # to take a step though no event has come
        self.when_ended: Callable[[], None] = lambda: None  # called after it has ended well

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

    @property
    def now(self) -> float:
        """The time of this process: of its step, and what that has spent."""
        return self.clock.now + self.spent

    def deliver(self, event: Any) -> None:
        """Let it take an event when it comes to it."""
        self._queue.append(event)
        self._schedule()

    def next_event(self, source: object = None, *, changes_only: bool = False) -> Event | None:
        """Take the first event that has come: of one source, or of all; of connections only, or
        any."""
        for i, event in enumerate(self._queue):
            if not isinstance(event, Event):
                continue  # of the process's script
            is_of_source = source is None or event.source is source
            if is_of_source and not (changes_only and event.kind == "message"):
                del self._queue[i]
                self._took = True
                return event
        return None

    def forget(self, source: object) -> None:
        """Drop the events of a source that have come."""
        while self.next_event(source) is not None:
            pass

    def wake_at(self, time: float) -> None:
        """Take a step at a time, if nothing happens before."""
        if time == self._wakes:
            return

        def wake() -> None:
            self._is_due = True
            self._schedule()

        self._wakes = time
        self.clock.at(time, wake)

    def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        self._free = max(self._free, self.clock.now) + seconds

    def spend(self, seconds: float) -> None:
        """Let the step that is being taken last so long."""
        self.spent += seconds

    def kill(self) -> None:
        """End without a word."""
        if self.over:
            return
        self.killed, self.killed_at = True, self.clock.now
        self.close()

    def close(self) -> None:
        """Close the connections; what was sent still arrives."""

    def step(self) -> None:
        """Do what is to be done now."""
        raise NotImplementedError

    def end(self, error: BaseException | None) -> None:
        """Be over."""
        self.error, self.ended = error, self.clock.now
        self.close()
        if error is None:
            self.when_ended()

    def _schedule(self) -> None:
        if (self._queue or self._is_due) and not self._scheduled and self.there:
            self._scheduled = True
            self.clock.at(self._free, self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self.there and not self.paused and (self._queue or self._is_due):
            self._is_due = self._took = False
            self.step()
            self._free, self.spent = self.now, 0.0
            if not (self._took or self._is_due):
                return  # nothing in the queue is for this step: it waits for something else
        self._schedule()
