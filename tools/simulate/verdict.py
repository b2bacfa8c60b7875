"""Runs of simulated cases, their verdicts, and the search for a smaller case that fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from dtrans.protocol import wire
from dtrans.protocol.server import trainer_registry
from dtrans.protocol.trainer import trainer_line
from tools.simulate.case import Case, Event
from tools.simulate.draw import drawn
from tools.simulate.job import SimulatedJob
from tools.simulate.judge import faults, faults_of_role
from tools.simulate.judge_events import faults_of_garbled, faults_of_returns
from tools.simulate.judge_snapshots import faults_of_snapshots
from tools.simulate.process import Process
from tools.simulate.server_role import SimulatedServer


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of a simulated case.

    Attributes:
      case: the simulated case.
      faults: descriptions of violated promises; empty if all promises hold.
      ends: description of each process's end, by name.
      seconds: virtual time at which the last role ended.
      left_at: time at which a trainer sent `complete` on a connection, by the connection's name.
      restarts: in a job with snapshots, `SimulatedLauncher.restarts`.
    """

    case: Case
    faults: tuple[str, ...]
    ends: dict[str, str]
    seconds: float
    left_at: dict[str, float]
    restarts: tuple[str, ...] = ()

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
    # The log is not needed, because a verdict contains the end of each role.
    trainer_registry.log.disabled = trainer_line.log.disabled = True
    wire.MESSAGE_BYTES = case.message_bytes
    try:
        return _simulated(case)
    finally:
        wire.MESSAGE_BYTES = usual
        trainer_registry.log.disabled = trainer_line.log.disabled = False


def _simulated(case: Case) -> Verdict:
    job = SimulatedJob(case)
    job.run()
    ends = {x.name: _end(x) for x in job.processes if x.begun or x.killed}
    if job.launcher is not None:
        ends = {f"{x.name} ({i})": _end(x) for i, x in enumerate(job.launcher.processes)}
        of_snapshots, restarts = (
            tuple(faults_of_snapshots(case, job.launcher)),
            job.launcher.restarts,
        )
        return Verdict(case, of_snapshots, ends, job.clock.now, {}, (*restarts,))
    left_at = {name: at for t in job.trainers for name, at in t.left_at.items()}
    found = [
        *faults(case, _judged_servers(job), job.trainers, job.guests),
        *faults_of_returns(case, job.servers, job.trainers),
        *faults_of_garbled(case, job.servers, job.trainers),
    ]
    for server in job.returned:
        found += faults_of_role(server) if server.begun else ()
    found += _faults_of_next(job)
    return Verdict(case, tuple(found), ends, job.clock.now, left_at)


def _judged_servers(job: SimulatedJob) -> dict[str, SimulatedServer]:
    """Return the process of each server that the trainers were connected to.

    A server is omitted if some trainers were connected to a killed process, and others to the
    process that replaced it.
    """
    servers = dict(job.servers)
    for new in job.returned:
        old, endpoint = job.servers[new.endpoint], new.endpoint
        times = [t.welcomed_at[endpoint] for t in job.trainers if endpoint in t.welcomed_at]
        if new.begun and times and max(times) > old.killed_at:
            servers[endpoint] = new
            if min(times) < old.killed_at:
                del servers[endpoint]
    return servers


def _faults_of_next(job: SimulatedJob) -> Iterator[str]:
    """Yield the promises that the second job violated.

    A role of the second job starts when its process has ended the first job. For the other roles,
    this is the same as a pause.
    """
    ends = [role.ended for role in job.roles if role.ended is not None]
    wait = Event("pause", 0.0, "the second job", max(ends, default=0.0) - min(ends, default=0.0))
    case = dataclasses.replace(job.case, events=(wait,), guests=(), is_followed=False)
    servers = {ep: server for ep, server in job.next_servers.items() if server.begun}
    trainers = [t for t in job.next_trainers if t.begun]
    if len(servers) == len(case.endpoints) and len(trainers) == case.trainers:
        yield from faults(case, servers, trainers)
    else:
        for role in (*servers.values(), *trainers):
            yield from faults_of_role(role)


def _end(role: Process) -> str:
    if role.killed:
        return "killed"
    if role.ended is None:
        return "not at all"
    return "well" if role.error is None else f"{type(role.error).__name__}: {role.error}"


def verdicts(seeds: range, draw: Callable[[int], Case] = drawn) -> Iterator[Verdict]:
    """Yield the verdict on the case of each seed.

    Args:
      seeds: the seeds.
      draw: returns the case of a seed.
    """
    for seed in seeds:
        yield simulated(draw(seed))


def smaller(verdict: Verdict) -> Verdict:
    """Return the verdict on the smallest case found that still violates a promise."""
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
    """Yield smaller cases. Each lacks an event, request, guest, option, role, step or block."""
    replace = dataclasses.replace
    for i in range(len(case.events)):
        yield replace(case, events=case.events[:i] + case.events[i + 1 :])
    for i in range(len(case.requests)):
        yield replace(case, requests=case.requests[:i] + case.requests[i + 1 :])
    for i in range(len(case.guests)):
        yield replace(case, guests=case.guests[:i] + case.guests[i + 1 :])
    for name, plain in (
        ("is_followed", False),
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
        ("snapshots", min(case.snapshots, 1)),
        ("has_means", False),
        ("has_results", False),
        ("replicas", 0),
        ("at_loss", bool(case.replicas)),
        ("replaces", False),
        ("quorum", 0),
    ):
        if getattr(case, name) != plain:
            yield replace(case, **{name: plain})
    named = " ".join(e.who for e in case.events)
    named += "".join(f" trainer {x.trainer}" for x in case.guests)
    named += "".join(f" trainer {k}" for x in case.requests for k in x.trainers)
    if case.trainers > 1 and f"trainer {case.trainers - 1}" not in named:
        yield replace(case, steps=case.steps[:-1])
    least = 1 + (case.mode == "exchange" or case.replicas > 0)
    if len(case.servers) > least and case.endpoints[-1] not in named:
        yield replace(case, servers=case.servers[:-1])
    for k, n in enumerate(case.steps):
        if n > 1:
            yield replace(case, steps=(*case.steps[:k], n - 1, *case.steps[k + 1 :]))
    for i, row in enumerate(case.servers):
        if len(row) > 1:
            yield replace(case, servers=(*case.servers[:i], row[:-1], *case.servers[i + 1 :]))
