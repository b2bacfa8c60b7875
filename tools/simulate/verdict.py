"""One case, from its seed to its verdict; many; and a smaller case that fails as one does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from dtrans.protocol import presence, trainer_line, wire
from tools.simulate.case import COMMUNICATING, Case, Event, Guest, drawn
from tools.simulate.clock import Clock
from tools.simulate.judge import faults
from tools.simulate.network import Network, drawn_delay
from tools.simulate.noise_maker import NoiseMaker
from tools.simulate.process import Process
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_role import (
    CommunicatingTrainer,
    GeoSgdTrainer,
    Origin,
    SimulatedTrainer,
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of a simulated case.

    Attributes:
      case: that it is of.
      faults: what the job did that it must not have done; empty, where it held.
      ends: role to how it ended.
      seconds: of virtual time, until the last role had ended.
      left_at: connection of a trainer to when it said there that it had done.
    """

    case: Case
    faults: tuple[str, ...]
    ends: dict[str, str]
    seconds: float
    left_at: dict[str, float]

    def __str__(self) -> str:
        ends = "".join(f"\n  {name}: {how}" for name, how in self.ends.items())
        wrong = "".join(f"\n  {x}" for x in self.faults)
        return f"seed {self.case.seed}: {self.case}\nends after {self.seconds:.1f} s{ends}" + (
            f"\nwrong{wrong}" if wrong else "\nas it must be"
        )


def simulated(case: Case) -> Verdict:
    """Run a case.

    Example:
      >>> from tools.simulate.case import Case
      >>> from tools.simulate.verdict import simulated
      >>> case = Case(seed=0, mode="sync", steps=(2, 2), servers=((3,), (4, 1)))
      >>> print(simulated(case).ends)
      {'pserver 127.0.0.1:1': 'well', 'pserver 127.0.0.1:2': 'well', 'trainer 0': 'well', 'trainer
      1': 'well'}
    """
    usual = wire.MESSAGE_BYTES
    # there are many cases, and a verdict says what became of each
    presence.log.disabled = trainer_line.log.disabled = True
    wire.MESSAGE_BYTES = case.message_bytes
    try:
        return _simulated(case)
    finally:
        wire.MESSAGE_BYTES = usual
        presence.log.disabled = trainer_line.log.disabled = False


def _simulated(case: Case) -> Verdict:
    random, clock = Random(case.seed), Clock()
    network = Network(clock, drawn_delay(random, case.delay), case.patience)
    servers = {ep: SimulatedServer(case, ep, clock, random, network) for ep in case.endpoints}
    trainer_of: type[SimulatedTrainer] = SimulatedTrainer
    if case.mode in COMMUNICATING:
        trainer_of = GeoSgdTrainer if case.mode == "geo" else CommunicatingTrainer
    trainers = [trainer_of(case, k, clock, random, network) for k in range(case.trainers)]
    roles: dict[str, Process] = {r.name: r for r in (*servers.values(), *trainers)}
    begins = lambda role, start: clock.at(
        random.random() * 0.2, lambda: None if role.over else start()
    )
    guests = [
        _guest(guest, f"{guest.kind} ", trainer_of, case, clock, random, network)
        for guest in case.guests
    ]
    roles |= {guest.name: guest for guest in guests}
    for server in servers.values():
        begins(server, server.start)
    for trainer in trainers:
        begins(trainer, trainer.start)
    for guest, process in zip(case.guests, guests, strict=True):
        clock.at(guest.time, process.start)
    for event in case.events:
        _schedule(event, clock, network, roles)
    running = list(roles.values())

    def over() -> bool:
        while running and running[-1].over:
            running.pop()
        return not running

    # long enough for one wait after another of what may have to give up
    clock.run(10 * max(case.deadline, 30.0) + 400.0, over)
    ends = {name: "killed" if r.killed else _end(r) for name, r in roles.items()}
    left_at = {name: at for t in trainers for name, at in t.left_at.items()}
    found = tuple(faults(case, servers, trainers, guests))
    return Verdict(case, found, ends, clock.now, left_at)


def _guest(
    guest: Guest,
    prefix: str,
    trainer_of: Callable[..., SimulatedTrainer],
    case: Case,
    *at: Any,
) -> SimulatedTrainer | NoiseMaker:
    """Return the process of a guest; a trainer has `prefix` before its name."""
    if guest.kind == "noise":
        return NoiseMaker(case, guest, "noise", *at)
    origins = {
        "second": Origin(prefix),
        "stale": Origin(prefix, plan="two"),
        "stranger": Origin(prefix, token="another"),
    }
    return trainer_of(case, guest.trainer, *at, origins[guest.kind])


def _end(role: Process) -> str:
    if role.ended is None:
        return "not at all"
    return "well" if role.error is None else f"{type(role.error).__name__}: {role.error}"


def _schedule(event: Event, clock: Clock, network: Network, roles: dict[str, Process]) -> None:
    role = roles.get(event.who)
    if role is not None:
        clock.at(
            event.time, role.kill if event.kind == "crash" else lambda: role.pause(event.seconds)
        )
    if event.kind == "stop" and event.seconds > network.patience:
        left = event.seconds - network.patience
        clock.at(event.time + network.patience, lambda: network.break_all(event.who, left))
    if role is not None:
        return

    def happen() -> None:
        for c in network.connections:
            if c.name == event.who:
                if event.kind == "cut":
                    c.break_off(event.seconds)
                else:
                    for way in (event.way,) if event.kind == "hold" else (0, 1):
                        c.hold(way, event.seconds)

    if event.kind == "twice":
        network.doubled[event.who] = int(event.seconds)
    else:
        clock.at(event.time, happen)


def verdicts(seeds: range) -> Iterator[Verdict]:
    """Run the cases of many seeds."""
    for seed in seeds:
        yield simulated(drawn(seed))


def smaller(verdict: Verdict) -> Verdict:
    """A case that is smaller and still wrong, found by leaving out one thing after another."""
    best = verdict
    while True:
        for case in reduced(best.case):
            found = simulated(case)
            if found.faults:
                best = found
                break
        else:
            return best


def reduced(case: Case) -> Iterator[Case]:
    """The case with one thing less: an event, a round, a trainer, a server, a step or a block."""
    replace = dataclasses.replace
    for i in range(len(case.events)):
        yield replace(case, events=case.events[:i] + case.events[i + 1 :])
    for i in range(len(case.guests)):
        yield replace(case, guests=case.guests[:i] + case.guests[i + 1 :])
    for name, plain in (
        ("rounds", 0),
        ("moves", False),
        ("delay", 0.002),
        ("message_bytes", wire.MESSAGE_BYTES),
        ("every", 1),
        ("pace", 0.1),
        ("table", 0),
        ("ahead", 0),
        ("staleness", 0),
        ("moves_rows", False),
    ):
        if getattr(case, name) != plain:
            yield replace(case, **{name: plain})
    named = " ".join([e.who for e in case.events] + [f"trainer {x.trainer}" for x in case.guests])
    if case.trainers > 1 and f"trainer {case.trainers - 1}" not in named:
        yield replace(case, steps=case.steps[:-1])
    if len(case.servers) > 1 + (case.mode == "exchange") and case.endpoints[-1] not in named:
        yield replace(case, servers=case.servers[:-1])
    for k, n in enumerate(case.steps):
        if n > 1:
            yield replace(case, steps=(*case.steps[:k], n - 1, *case.steps[k + 1 :]))
    for i, row in enumerate(case.servers):
        if len(row) > 1:
            yield replace(case, servers=(*case.servers[:i], row[:-1], *case.servers[i + 1 :]))
