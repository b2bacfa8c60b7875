"""Job with snapshots whose next event is chosen by a driver, and the parts of its state.

The simulated processes, their connections and the launcher are the same as in `tools.simulate.job`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from dtrans.protocol import token, wait_reminder
from dtrans.protocol.generations import Generation
from dtrans.protocol.server import server_loop
from dtrans.protocol.transport import RETRY, Event
from dtrans.protocol.wire import parse
from tools.simulate.case import Case
from tools.simulate.choice_clock import (
    Channel,
    ChoiceClock,
    LocalClock,
    Pending,
    SteadyRandom,
    channel_of,
)
from tools.simulate.clock import Slot
from tools.simulate.job import new_role
from tools.simulate.judge_snapshots import faults_of_snapshots, faults_so_far
from tools.simulate.launcher import SimulatedLauncher
from tools.simulate.network import Network, SimulatedLink
from tools.simulate.process import Process
from tools.simulate.server_role import SimulatedServer
from tools.simulate.state_digest import digest_of
from tools.simulate.trainer_role import SimulatedTrainer
from tools.simulate.updates import SimulatedSnapshot


# Key of a part of the state: its kind, and the name of a role, connection or channel
Part = tuple[str, Any]
Parts = dict[Part, Any]

GENERATION: Part = ("generation", "")
NEWEST: Part = ("newest", "")  # number of updates of the newest server
LISTENERS: Part = ("listeners", "")
GREETINGS = frozenset({"hello", "peer"})
KILLED = "killed"  # `RoleState.digest` of a process that was killed


class Choice(NamedTuple):
    """Next event of a job.

    Attributes:
      kind: one of
        "event": the first event of a channel;
        "timer": a timer of a process;
        "late": a timer that fires so late that every lost connection counts as ended;
        "kill": a process is killed;
        "break": a connection breaks.
      of: the channel, or the name of the role, or the address of the connection's client.
    """

    kind: str
    of: Any


class WatchedLauncher(SimulatedLauncher):
    """Launcher that notes which parts of its state an event of a role reads and writes.

    Attributes:
      read: parts that the current event has read.
      written: parts that the current event has written.
    """

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        self.read, self.written = set[Part](), set[Part]()

    def current(self) -> Generation:
        """Extend `SimulatedLauncher.current`."""
        self.read.add(GENERATION)
        return super().current()

    def enter(self, name: str, generation: int) -> None:
        """Extend `SimulatedLauncher.enter`."""
        snapshots = "snapshots", name.removeprefix("pserver ")
        self.read.add(snapshots)
        self.written |= {("entered", name), snapshots}
        super().enter(name, generation)

    def leave(self, name: str) -> None:
        """Extend `SimulatedLauncher.leave`."""
        self.read |= {GENERATION, ("entered", name)}
        self.written.add(("left", name))
        super().leave(name)

    def note_step(self, generation: int, step: int) -> None:
        """Extend `SimulatedLauncher.note_step`."""
        self.read |= {GENERATION, NEWEST}
        super().note_step(generation, step)

    def snapshot(self, endpoint: str, step: int) -> SimulatedSnapshot:
        """Extend `SimulatedLauncher.snapshot`."""
        self.read.add(("snapshots", endpoint))
        return super().snapshot(endpoint, step)

    def is_stale(self, action: str, *terms: Any) -> bool:
        """Return True if a pending action can have no effect any more."""
        if action == "_end_reported":
            return bool(terms[1] < self.generation.number)
        if action == "_on_end":
            return self._is_replaced(terms[0])
        return action == "_look_at_left" and terms[0] not in self._left

    def parts(self) -> Parts:
        """Return the parts of the launcher's state. Parts with None are absent."""
        generation = *dataclasses.astuple(self.generation), self._is_in_place
        found: Parts = {GENERATION: generation, NEWEST: self._newest}
        for name in self.roles:
            found["entered", name] = self._entered.get(name)
            found["left", name] = name in self._left or None
            found["starts", name] = name in self._starting or None
            found["incarnation", name] = self.incarnation(name)
        for endpoint, snapshots in self._snapshots.items():
            pieces = tuple((n, digest_of(snapshots[n], 0.0)) for n in sorted(snapshots))
            found["snapshots", endpoint] = self._snapshot_generations[endpoint], pieces
        return {part: x for part, x in found.items() if x is not None}


class ChosenJob:
    """Job with snapshots whose next event is chosen.

    Use it inside `without_times`.

    Args:
      case: the simulated case, with snapshots and without events.

    Attributes:
      clock: the clock.
      launcher: the launcher.
      events: the events so far.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.events = case, list[Choice]()
        self.clock = ChoiceClock(
            lambda x: self.launcher.roles.get(x.name) is x,
            lambda *action: self.launcher.is_stale(*action),
        )
        self._random = SteadyRandom()
        self._network = Network(self.clock, lambda: 0.0, math.inf)
        self.launcher = WatchedLauncher(case, self.clock, self._random, self._new_role)
        self.clock.handle(self.launcher.begin)

    def _new_role(self, name: str) -> Any:
        clock = LocalClock(self.clock)
        _ACTING[0] = str((name, self.launcher.generation.number))
        return new_role(self.case, name, clock, self._random, self._network, self.launcher)

    # -- events ----------------------------------------------------------------------------------

    def do(self, choice: Choice) -> None:
        """Let the chosen event happen."""
        self.events.append(choice)
        self.launcher.read, self.launcher.written = set(), set()
        self.clock.handle(self._act_of(choice))
        for link in filter(self._is_ignored, [*self._network.connections]):
            link.vanish()

    def _is_ignored(self, link: SimulatedLink) -> bool:
        """Return True if all events of a connection at its server have no effect.

        The client has closed the connection, and the server has gone to a later generation. The
        client has not greeted the server in this generation, so the server drops the connection's
        messages.
        """
        if not link.up or not link.is_closed or link.is_silent:
            return False
        server, pending = link.server, self.clock.channels.get(channel_of(link.to_server), ())
        assert isinstance(server, SimulatedServer)
        is_known = server.over or link.address in addresses_of(server)
        return not is_known and GREETINGS.isdisjoint(_event_of(x)[0] for x in pending)

    def _act_of(self, choice: Choice) -> Any:
        if choice.kind == "event":
            pending = self.clock.pop(choice.of)
            _ACTING[0] = _acting(pending.slot)
            return pending.do
        if choice.kind == "break":
            return self._link(choice.of).break_off
        role = self.launcher.roles[choice.of]
        _ACTING[0] = str((role.name, role.number))
        if choice.kind == "kill":
            return role.kill
        return functools.partial(role.clock.fire, late=choice.kind == "late")

    def _link(self, address: bytes) -> SimulatedLink:
        (link,) = [x for x in self._network.connections if x.address == address]
        return link

    def event(self, channel: Channel) -> str:
        """Return the name of the first event of a channel."""
        return _event_of(self.clock.channels[channel][0])[0]

    # -- the state -------------------------------------------------------------------------------

    def parts(self) -> Parts:
        """Return all parts of the state."""
        found: Parts = {}
        for name, role in self.launcher.roles.items():
            ended = [x.error for x in self.launcher.processes if x.name == name]
            errors = {type(error).__name__ for error in ended if error is not None}
            found["role", name] = _state_of_role(role)._replace(errors=frozenset(errors))
        self._network.connections = [x for x in self._network.connections if _may_have_effect(x)]
        for link in self._network.connections:
            found["link", link.address] = _state_of_link(link)
        for channel, pending in self.clock.channels.items():
            found["channel", channel] = tuple(_event_of(x) for x in pending)
        listeners = self._network.listeners.items()
        found[LISTENERS] = tuple((ep, x.process.number) for ep, x in sorted(listeners))
        return found | self.launcher.parts()

    def changes(self) -> list[tuple[Any, tuple[str, str] | None]]:
        """Return the changes of channels by the last event: a channel, and the added event.

        Without an added event, the channels with this name lose all their events.
        """
        changes = self.clock.changes
        return [(x.channel, None if x.added is None else _event_of(x.added)) for x in changes]

    def faults_so_far(self) -> tuple[str, ...]:
        """Return the promises that the events so far have violated."""
        return (*faults_so_far(self.case, self.launcher), *self._faults_of_restarts())

    def _faults_of_restarts(self) -> Iterator[str]:
        """Yield the kinds of restarts that are more frequent than failures.

        One failure may cause both kinds: after a restart in place, all roles start again if another
        role has left meanwhile.
        """
        failures = sum(x.kind in ("kill", "break") for x in self.events)
        for kind in ("in place", "all"):
            if (count := self.launcher.restarts.count(kind)) > failures:
                yield f"{count} restarts ({kind}) after {failures} failures"

    def faults(self) -> tuple[str, ...]:
        """Return the promises that the complete run has violated."""
        return tuple(faults_of_snapshots(self.case, self.launcher))


def addresses_of(server: SimulatedServer) -> frozenset[bytes]:
    """Return the addresses to which a server may send messages."""
    known = server.machine.trainers.by_address, server.machine.kind.peers.addresses
    early = [] if server.machine.gate is None else server.machine.gate.early
    return frozenset([*itertools.chain(*known), *early])


class RoleState(NamedTuple):
    """State of a role's current process.

    Attributes:
      number: number of the process.
      phase: "new", "runs" or "over".
      errors: names of the types of the errors with which processes of the role have ended.
      timers: the possible kinds of timer events.
      digest: digest of the process; for a process that is over, its end.
      addresses: addresses to which a server may send messages.
    """

    number: int
    phase: str
    errors: frozenset[str]
    timers: tuple[str, ...]
    digest: str
    addresses: frozenset[bytes] = frozenset()


def _state_of_role(role: Process) -> RoleState:
    """Return the state of a process; compute it only once after each step of the process."""
    assert isinstance(role.clock, LocalClock)
    if role.clock.state is None or role.over:
        role.clock.state = _new_state_of_role(role)
    state: RoleState = role.clock.state
    return state


def _new_state_of_role(role: Process) -> RoleState:
    if role.over:
        return RoleState(role.number, "over", frozenset(), (), _end_of(role))
    assert isinstance(role.clock, LocalClock)
    phase = "runs" if role.begun else "new"
    state = RoleState(
        role.number, phase, frozenset(), _timers(role), digest_of(role, role.clock.now)
    )
    if isinstance(role, SimulatedServer):
        return state._replace(addresses=addresses_of(role))
    return state


def _end_of(role: Process) -> str:
    """Return the end of a process, with the results that the judge reads."""
    if role.killed:
        return KILLED
    results: Any = ()
    if isinstance(role, SimulatedServer):
        results = role.machine.kind.step, role.machine.kind.state
    elif isinstance(role, SimulatedTrainer):
        results = [step for step, _ in role.pulled[-1:]]
    return f"ended {type(role.error).__name__} {digest_of(results, 0.0)}"


def _timers(role: Process) -> tuple[str, ...]:
    """Return the possible timer events: those within the time of a reconnection."""
    assert isinstance(role.clock, LocalClock)
    if role.clock.wakes > role.clock.now + RETRY:
        return ()
    if not isinstance(role, SimulatedServer):
        return ("timer",)
    trainers = role.machine.trainers.known.values()
    has_lost = any(t.lost is not None for t in trainers)
    return ("timer", "late") if has_lost else ("timer",)


class LinkState(NamedTuple):
    """State of a connection.

    Attributes:
      client, server: name and number of each process; no server before the first connection.
      up: True while it is established.
      is_silent: True if nothing has arrived at the server.
      closed: True if the client has closed it.
      unsent: digest of the messages that the client will send when it is established.
    """

    client: tuple[str, int]
    server: tuple[str, int] | None
    up: bool
    is_silent: bool
    closed: bool
    unsent: str


def _state_of_link(link: SimulatedLink) -> LinkState:
    server = None
    if hasattr(link, "_listener"):
        process = link._listener.process
        server = process.name, process.number
    pending = digest_of(link._pending, 0.0) if link._pending else ""
    client = link.client.name, link.client.number
    return LinkState(client, server, link.up, link.is_silent, link._closed, pending)


def _may_have_effect(link: SimulatedLink) -> bool:
    """Return False for a connection that has ended, and is not restored."""
    return link.up or bool(link.client.there and not link._closed)


def _event_of(pending: Pending) -> tuple[str, str]:
    """Return the name of an event, and the digest of its contents."""
    event = pending.slot.event
    if not isinstance(event, Event):
        return (event, "") if isinstance(event, str) else ("written", digest_of(event, 0.0))
    if event.kind != "message":
        return event.kind, ""
    message = parse(event.frames)
    return message.op, digest_of([*event.frames], 0.0)


# -- the run without times -------------------------------------------------------------------------

_ACTING = [""]  # name of the acting process, which its tokens contain


def _acting(slot: Slot) -> str:
    """Return the process that handles an event, or that an action of the launcher starts."""
    if slot.process is not None:
        return str((slot.process.name, slot.process.number))
    processes = [x for x in slot.channel if isinstance(x, Process)]
    return str(*[(x.name, x.number) for x in processes])


@contextlib.contextmanager
def without_times() -> Iterator[None]:
    """Replace durations and random words, so that a run is a function of its events.

    A server checks deadlines at every event, so that the number of checks does not depend on time.
    Log lines are never due.
    """
    usual = server_loop.TICK, server_loop.GENERATION_TICK, wait_reminder.SAY, token.new_token
    server_loop.TICK = server_loop.GENERATION_TICK = 1e-6
    wait_reminder.SAY = math.inf
    token.new_token = lambda: f"token of {_ACTING[0]}"
    try:
        yield
    finally:
        server_loop.TICK, server_loop.GENERATION_TICK, wait_reminder.SAY, token.new_token = usual
