"""Processes of a simulated case, and the schedule of its events."""

from __future__ import annotations

import dataclasses
import functools
from random import Random

from tools.simulate.case import COMMUNICATING, Case, Event, Guest
from tools.simulate.clock import Clock
from tools.simulate.geo_trainer import GeoSgdTrainer
from tools.simulate.launcher import SimulatedLauncher
from tools.simulate.network import SLOWEST, Network, drawn_delay
from tools.simulate.noise_maker import NoiseMaker
from tools.simulate.process import Process
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_role import (
    JOB,
    CommunicatingTrainer,
    Origin,
    SimulatedTrainer,
)


BREAK = 0.01  # seconds between the end of a role and the start of its role in the second job


class SimulatedJob:
    """Processes of a case.

    Attributes:
      servers: each server of the job, by endpoint.
      trainers: trainers of the job.
      guests: processes of `case.guests`, in the same order.
      returned: new processes of killed servers, which events start.
      next_servers: each server of the second job, by endpoint; empty without a second job.
      next_trainers: trainers of the second job; empty if there is none.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.random, self.clock = case, Random(case.seed), Clock()
        delay = drawn_delay(self.random, case.delay, SLOWEST)
        self.network = Network(self.clock, delay, case.patience)
        self.launcher: SimulatedLauncher | None = None
        if case.snapshots:
            self.launcher = SimulatedLauncher(case, self.clock, self.random, self._new_role)
        self.servers = {ep: self._server(ep) for ep in case.endpoints}
        self.trainers = [self._trainer(k) for k in range(case.trainers)]
        self.guests = [self._guest(guest) for guest in case.guests]
        returns = [e.who.partition(" ")[2] for e in case.events if e.kind == "return"]
        self.returned = [self._server(ep, "returned ") for ep in returns]
        self.next_servers: dict[str, SimulatedServer] = {}
        self.next_trainers: list[SimulatedTrainer] = []
        if case.is_followed:
            self.next_servers = {ep: self._server(ep, "next ") for ep in case.endpoints}
            origin = Origin("next ")
            self.next_trainers = [self._trainer(k, origin) for k in range(case.trainers)]

    def _server(self, endpoint: str, prefix: str = "") -> SimulatedServer:
        return SimulatedServer(self.case, endpoint, self.clock, self.random, self.network, prefix)

    def _trainer(self, k: int, origin: Origin = JOB) -> SimulatedTrainer:
        terms = self.clock, self.random, self.network
        return _kind_of_trainer(self.case)(self.case, k, *terms, origin)

    def _new_role(self, name: str) -> SimulatedServer | SimulatedTrainer:
        """Return a new process for a role of a job with snapshots."""
        assert self.launcher is not None
        terms = self.clock, self.random, self.network, self.launcher
        return new_role(self.case, name, *terms)

    def _guest(self, guest: Guest) -> SimulatedTrainer | NoiseMaker:
        if guest.kind == "noise":
            return NoiseMaker(self.case, guest, "noise", self.clock, self.random, self.network)
        origin = Origin(f"{guest.kind} ")
        if guest.kind == "stale":
            origin = dataclasses.replace(origin, plan="two")
        elif guest.kind == "stranger":
            origin = dataclasses.replace(origin, token="another")
        return self._trainer(guest.trainer, origin)

    @property
    def roles(self) -> list[SimulatedServer | SimulatedTrainer]:
        """Servers and trainers of the job."""
        return [*self.servers.values(), *self.trainers]

    @property
    def next_roles(self) -> list[SimulatedServer | SimulatedTrainer]:
        """Servers and trainers of the second job, in the order of `roles`."""
        return [*self.next_servers.values(), *self.next_trainers]

    @property
    def processes(self) -> list[Process]:
        """All processes, including those that were never started."""
        return [*self.roles, *self.guests, *self.returned, *self.next_roles]

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until all processes have ended, or until the time limit of a job that hangs."""
        if self.launcher is not None:
            self._run_launcher(self.launcher)
            return
        for role in self.roles:
            self.clock.at(self.random.random() * 0.2, functools.partial(_start, role))
        for guest, process in zip(self.case.guests, self.guests, strict=True):
            self.clock.at(guest.time, process.start)
        returned = iter(self.returned)
        for event in self.case.events:
            if event.kind == "return":
                self._schedule_return(event, next(returned))
            else:
                self._schedule(event)
        for role, following in zip(self.roles, self.next_roles, strict=False):
            role.when_ended = functools.partial(self._follow, following)
        self._running = [*self.roles, *self.guests]
        # The limit allows several consecutive waits that last until their deadline.
        self.clock.run(10 * max(self.case.deadline, 30.0) + 400.0, self._is_over)

    def _run_launcher(self, launcher: SimulatedLauncher) -> None:
        """Run a job with snapshots, whose events affect the current process of a role."""
        launcher.begin()
        for event in self.case.events:
            if event.kind == "full":
                continue  # `SimulatedLauncher.has_full_disk` reads the event
            self.clock.at(event.time, functools.partial(self._affect, launcher, event))
        self.clock.run(1000.0, lambda: launcher.is_over)
        self.servers = {ep: launcher.roles[f"pserver {ep}"] for ep in self.case.endpoints}
        self.trainers = [launcher.roles[f"trainer {k}"] for k in range(self.case.trainers)]

    def _affect(self, launcher: SimulatedLauncher, event: Event) -> None:
        role = launcher.roles.get(event.who)
        if event.kind == "host":
            for name, server in launcher.roles.items():
                if name.startswith(f"pserver {event.who}:"):
                    server.kill()
        elif role is None:
            self._disturb(event)
        elif event.kind == "crash":
            role.kill()
        else:
            role.pause(event.seconds)
            if event.kind == "stop" and event.seconds > self.network.patience:
                rest, patience = event.seconds - self.network.patience, self.network.patience
                break_all = functools.partial(self.network.break_all, event.who, rest)
                self.clock.at(self.clock.now + patience, break_all)

    def _follow(self, role: SimulatedServer | SimulatedTrainer) -> None:
        """Start a role of the second job, after the same process has ended the first job."""
        self._running.append(role)
        self.clock.at(self.clock.now + BREAK, role.start)

    def _is_over(self) -> bool:
        running = self._running
        while running and running[-1].over:
            running.pop()
        return not running

    def _schedule_return(self, event: Event, returned: SimulatedServer) -> None:
        def start() -> None:
            if self.servers[returned.endpoint].killed:
                self._running.append(returned)
                returned.start()

        self.clock.at(event.time, start)

    def _schedule(self, event: Event) -> None:
        clock, network = self.clock, self.network
        names: dict[str, Process] = {x.name: x for x in (*self.roles, *self.guests)}
        role = names.get(event.who)
        if event.kind == "twice":
            network.doubled[event.who] = int(event.seconds)
        elif event.kind == "garble":
            network.garbled[event.who] = int(event.seconds)
        elif event.kind == "late":
            network.late[event.who] = event.seconds
        elif role is None:
            clock.at(event.time, lambda: self._disturb(event))
        elif event.kind == "crash":
            clock.at(event.time, role.kill)
        else:
            clock.at(event.time, lambda: role.pause(event.seconds))
        if event.kind == "stop" and event.seconds > network.patience:
            rest = event.seconds - network.patience
            clock.at(event.time + network.patience, lambda: network.break_all(event.who, rest))

    def _disturb(self, event: Event) -> None:
        """Break the connection of an event, or stop it for some seconds."""
        for connection in self.network.connections:
            if connection.name != event.who:
                continue
            if event.kind == "break":
                connection.break_off(event.seconds)
                continue
            for way in (event.way,) if event.kind == "hold" else (0, 1):
                connection.hold(way, event.seconds)


def new_role(
    case: Case,
    name: str,
    clock: Clock,
    random: Random,
    network: Network,
    launcher: SimulatedLauncher,
) -> SimulatedServer | SimulatedTrainer:
    """Return a new process for a role of a job with snapshots."""
    kind, _, which = name.partition(" ")
    terms = clock, random, network
    if kind == "pserver":
        return SimulatedServer(case, which, *terms, launcher=launcher)
    return _kind_of_trainer(case)(case, int(which), *terms, launcher=launcher)


def _kind_of_trainer(case: Case) -> type[SimulatedTrainer]:
    if case.mode == "geo":
        return GeoSgdTrainer
    return CommunicatingTrainer if case.mode in COMMUNICATING else SimulatedTrainer


def _start(role: SimulatedServer | SimulatedTrainer) -> None:
    if not role.over:
        role.start()
