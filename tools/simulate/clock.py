"""Virtual clock, which runs events in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class Slot(NamedTuple):
    """Place of an event in the order of all events, for a driver that chooses the next event.

    Attributes:
      process: process that handles the event; None for the launcher.
      channel: name of a channel. Events of one channel keep their order.
      event: description of the event.
    """

    process: Any
    channel: Any
    event: Any = ""


class Clock:
    """Virtual clock.

    Events with equal times run in the order in which they were scheduled. Slots of events are not
    used here (`tools.simulate.choice_clock`).

    Attributes:
      now: virtual seconds since the start of the simulation.

    Example:
      >>> from tools.simulate.clock import Clock
      >>> clock, seen = Clock(), []
      >>> clock.at(2.0, lambda: seen.append("b"))
      >>> clock.at(1.0, lambda: seen.append("a"))
      >>> clock.run(10.0)
      >>> seen, clock.now
      (['a', 'b'], 2.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, do: Callable[[], None], slot: Slot | None = None) -> None:
        """Schedule a function. A time before `now` counts as `now`."""
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), do))

    def forget(self, channel: Hashable) -> None:
        """Note that the events of a channel have no effect any more."""

    def run(self, until: float, over: Callable[[], bool] = lambda: False) -> None:
        """Run events until a time, until no event is left, or until `over` returns True."""
        while self._events and self._events[0][0] <= until and not over():
            self.now, _, do = heapq.heappop(self._events)
            do()
