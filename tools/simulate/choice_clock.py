"""Clock without an order of events: a driver chooses the next event of any channel.

Events of one channel keep their order, and all other orders are possible. An event without a slot
(its place in a channel) follows the current event at once. Each process has its own time, which
only its timers advance.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Hashable
from random import Random
from typing import Any, NamedTuple

from dtrans.protocol.transport import RETRY, Event
from dtrans.protocol.wire import parse
from tools.simulate.clock import Clock, Slot
from tools.simulate.launcher import SNAPSHOT
from tools.simulate.process import TIMER, Process
from tools.simulate.trainer_role import SimulatedTrainer


START = 1000.0  # time of all processes at their start; it is larger than all durations
LATE = RETRY + 1.0  # seconds by which a late timer advances a process

# Key of a channel: name and number of a process, and the channel's name
Channel = tuple[str, int, Hashable]


class Pending(NamedTuple):
    """Pending event of a channel: its slot, and the function that handles it."""

    slot: Slot
    do: Callable[[], None]


class Change(NamedTuple):
    """Change of channels.

    Attributes:
      channel: the channel that gets a new last event. If events are dropped, the name of the
        channels that lose their events, in all processes.
      added: the added event; None if events are dropped.
    """

    channel: Any
    added: Pending | None = None


class SteadyRandom(Random):
    """Source of durations: all are zero, because the driver chooses the order of events."""

    def expovariate(self, lambd: float = 1.0) -> float:
        """Return zero."""
        return 0.0

    def random(self) -> float:
        """Return 0.5, so that events with a probability below 0.5 do not happen."""
        return 0.5


class ChoiceClock(Clock):
    """Clock whose driver chooses the next event.

    Args:
      is_current: returns True if a process is the newest process of its role.
      is_stale: returns True for an action of the launcher that can have no effect any more, given
        the name and the arguments of its function.

    Attributes:
      channels: pending events of each channel.
      changes: changes of channels by the current event.
    """

    def __init__(
        self, is_current: Callable[[Process], bool], is_stale: Callable[..., bool]
    ) -> None:
        super().__init__()
        self.now = START
        self._is_current, self._is_stale = is_current, is_stale
        self.channels: dict[Channel, collections.deque[Pending]] = {}
        self.changes: list[Change] = []
        self._next: collections.deque[Callable[[], None]] = collections.deque()

    def at(self, time: float, do: Callable[[], None], slot: Slot | None = None) -> None:
        """Add an event to the end of its channel, or run it next if it has no slot."""
        if slot is not None and _has_no_effect(slot):
            return
        if slot is None or _follows_at_once(slot):
            self._next.append(do)
            return
        channel, pending = channel_of(slot), Pending(slot, do)
        self.changes.append(Change(channel, pending))
        if not self._is_lost(slot):
            self.channels.setdefault(channel, collections.deque()).append(pending)

    def forget(self, channel: Hashable) -> None:
        """Drop the events of a channel of any process."""
        self.changes.append(Change(channel))
        for key in [x for x in self.channels if x[2] == channel]:
            del self.channels[key]

    def handle(self, do: Callable[[], None]) -> None:
        """Run an event and all events that follow it at once; note the changes of channels."""
        self.changes = []
        do()
        while self._next:
            self._next.popleft()()
        for key in [x for x, pending in self.channels.items() if self._is_lost(pending[0].slot)]:
            del self.channels[key]

    def pop(self, channel: Channel) -> Pending:
        """Remove and return the first event of a channel."""
        first = self.channels[channel].popleft()
        if not self.channels[channel]:
            del self.channels[channel]
        return first

    def _is_lost(self, slot: Slot) -> bool:
        """Return True for an event of a process that is over, and for a stale action.

        The end of a write is an exception: it still happens after its server has ended.
        """
        process = slot.process
        if process is None:
            assert isinstance(slot.channel, tuple)
            return self._is_stale(*slot.channel)
        if not process.over:
            return False
        return slot.channel != SNAPSHOT or process.killed or not self._is_current(process)


def channel_of(slot: Slot) -> Channel:
    """Return the channel of a slot. It belongs to one process, or to the launcher."""
    if slot.process is None:
        return "launcher", 0, _plain(slot.channel)
    return slot.process.name, slot.process.number, slot.channel


def _follows_at_once(slot: Slot) -> bool:
    """Return True for an event that the driver does not choose, because it follows at once.

    A process that is started begins at once, and a client greets as soon as it is connected. A
    connection without a message changes no state.
    """
    event = slot.event
    if slot.process is None:
        return bool(slot.channel[0] == "_start_unless_killed")
    return isinstance(event, Event) and event.kind == "connected"


def _has_no_effect(slot: Slot) -> bool:
    """Return True for a server's `waiting` message, which only restarts a deadline.

    To a trainer that the server has not welcomed yet, the message is an answer, which has an
    effect.
    """
    event = slot.event
    if not isinstance(event, Event) or event.kind != "message":
        return False
    if parse(event.frames).op != "waiting":
        return False
    link: Any = event.source
    return not isinstance(slot.process, SimulatedTrainer) or link.is_known


def _plain(channel: Hashable) -> Hashable:
    """Replace processes in the name of a launcher's action by their names."""
    assert isinstance(channel, tuple)
    return tuple((x.name, x.number) if isinstance(x, Process) else x for x in channel)


class LocalClock(Clock):
    """Clock of one process.

    Attributes:
      now: time of the process.
      wakes: time of the process's timer; infinity if none is set.
      state: state of the process after its last step, for the driver; None if it is not computed.
    """

    def __init__(self, clock: ChoiceClock) -> None:
        super().__init__()
        self.now, self.wakes = START, math.inf
        self.state: Any = None
        self._clock = clock
        self._wake: Callable[[], None] = lambda: None

    def at(self, time: float, do: Callable[[], None], slot: Slot | None = None) -> None:
        """Set the timer if `slot` belongs to a timer; otherwise see `ChoiceClock.at`."""
        self.state = None
        if slot is None or slot.channel != TIMER:
            self._clock.at(time, do, slot)
        elif time <= self.now:
            self._clock.at(time, do)
        else:
            self.wakes, self._wake = time, do

    def fire(self, *, late: bool = False) -> None:
        """Advance the time of the process to its timer, or further, and run the timer."""
        self.now = self.now + LATE if late else max(self.now, self.wakes)
        self.wakes, self.state = math.inf, None
        self._wake()
