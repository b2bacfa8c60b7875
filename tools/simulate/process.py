"""Process of a simulated role, which takes a step after an event or at a scheduled time.

While a process computes or pauses, events wait in its queue, as messages wait in sockets. A paused
process sends no heartbeats either. A killed process sends nothing more.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

from dtrans.protocol.transport import Event
from tools.simulate.clock import Clock, Slot


TIMER = "timer"  # channel of the next wake-up of a process


class Process:
    """Process of a role. Subclasses implement `step`, which calls `spend` for its duration.

    Attributes:
      name: name of the process.
      number: in a job with snapshots, number of the generation in which the process was started. It
        identifies the process of a role, because a launcher replaces it in a later generation.
      clock: virtual clock.
      error: exception that ended the process; None if there was none.
      ended: time at which it ended, with or without an error; None if it runs or was killed.
      killed: True if it was killed.
      killed_at: time at which it was killed.
      begun: True if it was started.
      spent: virtual seconds spent by the current step.
      when_ended: function that is called after the process has ended without an error.
      when_over: function that is called when the process has ended or was killed, or None.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock, self.number = name, clock, 0
        self.error: BaseException | None = None
        self.ended: float | None = None
        self.killed, self.killed_at = False, math.inf
        self.begun = False
        self.spent = 0.0
        self._queue: collections.deque[Any] = collections.deque()
        self._free = 0.0
        self._scheduled = False
        self._took = False  # True if the current step has handled an event
        self._wakes: float | None = None
        self._is_due = False  # True if a step must be taken even without an event
        self.when_ended: Callable[[], None] = lambda: None
        self.when_over: Callable[[], None] | None = None

    @property
    def there(self) -> bool:
        """True while the process runs."""
        return self.begun and not self.killed and self.ended is None

    @property
    def over(self) -> bool:
        """True if the process has ended or was killed."""
        return self.killed or self.ended is not None

    @property
    def paused(self) -> bool:
        """True while the process computes or pauses."""
        return self.clock.now < self._free

    @property
    def now(self) -> float:
        """Time of this process: the start of its step plus the seconds that the step has spent."""
        return self.clock.now + self.spent

    def deliver(self, event: Any) -> None:
        """Add an event to the queue."""
        self._queue.append(event)
        self._schedule()

    def next_event(self, source: object = None, *, changes_only: bool = False) -> Event | None:
        """Remove and return the first event in the queue; None if there is none.

        Args:
          source: only return events of this source; by default, of all sources.
          changes_only: only return connection events.
        """
        for i, event in enumerate(self._queue):
            if not isinstance(event, Event):
                continue  # the process's script takes this event
            is_of_source = source is None or event.source is source
            if is_of_source and not (changes_only and event.kind == "message"):
                del self._queue[i]
                self._took = True
                return event
        return None

    def forget(self, source: object) -> None:
        """Drop all queued events of a source."""
        while self.next_event(source) is not None:
            pass

    def wake_at(self, time: float) -> None:
        """Schedule a step at a time."""
        if time == self._wakes:
            return

        def wake() -> None:
            self._is_due = True
            self._schedule()

        self._wakes = time
        self.clock.at(time, wake, Slot(self, TIMER))

    def pause(self, seconds: float) -> None:
        """Stop the process for some seconds."""
        self._free = max(self._free, self.clock.now) + seconds

    def spend(self, seconds: float) -> None:
        """Add seconds to the duration of the current step."""
        self.spent += seconds

    def kill(self) -> None:
        """End the process without a last message."""
        if self.over:
            return
        self.killed, self.killed_at = True, self.clock.now
        self.close()
        if self.when_over is not None:
            self.when_over()

    def start(self) -> None:
        """Start the work of the role."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections. Messages that were sent still arrive."""

    def step(self) -> None:
        """Handle the queued events, and continue the work of the role."""
        raise NotImplementedError

    def end(self, error: BaseException | None) -> None:
        """End the process."""
        self.error, self.ended = error, self.clock.now
        self.close()
        if error is None:
            self.when_ended()
        if self.when_over is not None:
            self.when_over()

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
                return  # the role waits for an event that is not in the queue
        self._schedule()
