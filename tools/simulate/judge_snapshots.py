"""Checks of a job with snapshots that has ended (`dtrans.protocol.generations`).

A *snapshot* is a copy of the state of all servers after a step. A *generation* lasts from one
failure of a role to the next, or until a trainer joins again.

- The job ends without an error, whichever roles fail.
- Only the members of a generation take part in it, and they are as many as the quorum.
- In every generation, all parameters and rows that a process of a trainer received have the bits of
  one device after the same step. This device computes each step with the trainers that took part in
  the last generation that computed the step.
- In every generation, the running mean of a trainer's gradients has the bits of one process that
  takes all steps of the trainer.
- A trainer skips no step: after the parameters of step s, it receives the parameters of step s + 1,
  or of a snapshot.
- A failure repeats at most two intervals of snapshots and one step, and one interval for each
  snapshot that a role could not write.
- With `at_loss`, the failure of trainers repeats no step that a trainer has completed, and at most
  one update of a server. The results of the snapshot's step were sent to trainers. With replicas,
  the same holds for the failure of one server, or of all servers on one of several hosts. Only the
  results may be missing. Servers begin to write these snapshots in time, unless their processes are
  stopped, or a slow disk still writes their previous snapshot.
- At the end, servers have the state of one device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from dtrans.errors import LostPeerError
from dtrans.run.net.generation_log import members_of_steps
from tools.simulate.case import Case
from tools.simulate.judge_alone import faults_of_alone
from tools.simulate.judge_saves import faults_of_saves_with_snapshots
from tools.simulate.launcher import SimulatedLauncher
from tools.simulate.one_device import on_one_device
from tools.simulate.process import Process
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_role import SimulatedTrainer
from tools.simulate.updates import initial_mean, round_part, running_mean


def faults_of_snapshots(case: Case, launcher: SimulatedLauncher) -> Iterator[str]:
    """Yield the promises that a job with snapshots violated."""
    for process in launcher.processes:
        is_last = launcher.roles[process.name] is process
        dropped = [f"trainer {k}" for k in launcher.generation.dropped]
        is_dropped = process.name in dropped
        yield from _faults_of_end(process, is_last=is_last, is_dropped=is_dropped)
    yield from faults_of_saves_with_snapshots(case, launcher)
    if not case.sync_mode:
        yield from faults_of_alone(case, launcher)
        return
    expected = _Expected(case, launcher).values(launcher.generation.number)
    yield from faults_so_far(case, launcher)
    for name, role in launcher.roles.items():
        if isinstance(role, SimulatedServer) and role.error is None and role.ended is not None:
            steps, count = len(expected) - 1, role.machine.kind.step
            if count != steps:
                yield f"{name} ended after {count} of {steps} steps"
                continue
            for n, x in role.machine.kind.state.items():
                if x.tobytes() != expected[-1][n].tobytes():
                    yield f"{name} has {x} as {n} at the end, but one device has {expected[-1][n]}"


def faults_so_far(case: Case, launcher: SimulatedLauncher) -> Iterator[str]:
    """Yield the promises that a job with snapshots has violated before its end."""
    expected = _Expected(case, launcher)
    for generation, (newest, snapshot) in enumerate(launcher.rewinds):
        # A server begins a snapshot only when its previous snapshot is written. So the slowest
        # server is less than two intervals of snapshots past the last common snapshot. Other
        # servers are at most one step ahead of it.
        unwritten = {step for number, step in launcher.unwritten if number == generation}
        if newest - snapshot > (2 + len(unwritten)) * case.snapshots + 1:
            yield f"the job went back from step {newest} to step {snapshot}"
    for end in launcher.ends:
        if end.newest - end.snapshot > 1 or end.received > end.snapshot or not end.has_results:
            yield f"roles were lost, and the job lost complete steps: {end}"
    harmless = ("crash", "break", "host", "full")
    if launcher.late and all(event.kind in harmless for event in case.events):
        yield f"{launcher.late[0]} did not begin to write its newest states in time"
    yield from _faults_of_members(case, launcher)
    for process in launcher.processes:
        if isinstance(process, SimulatedTrainer):
            yield from _faults_of_trainer(case, process, expected)
            yield from _faults_of_mean(process)


def _faults_of_members(case: Case, launcher: SimulatedLauncher) -> Iterator[str]:
    """Yield generations with fewer members than the quorum, and trainers that are not members."""
    members = {}
    for record in launcher.records:
        members[record.generation] = record.members
        if len(record.members) < case.quorum:
            yield (
                f"generation {record.generation} has the trainers {record.members}, but the quorum "
                f"is {case.quorum}"
            )
    for process in launcher.processes:
        if not isinstance(process, SimulatedTrainer):
            continue
        for generation, _, _ in process.begun_generations:
            if process.k not in members[generation]:
                trainers = members[generation]
                yield f"{process.name} takes part in generation {generation} of trainers {trainers}"


class _Expected:
    """Parameters of one device after each step, for each generation of a job."""

    def __init__(self, case: Case, launcher: SimulatedLauncher) -> None:
        self._case, self._records = case, launcher.records

    def values(self, generation: int) -> list[dict[str, np.ndarray]]:
        """Return the values after each step, with the steps that a generation has repeated."""
        records = self._records[: generation + 1]
        members = members_of_steps(records, 0, max(self._case.steps))
        return _values_of(self._case, tuple(members))


@functools.lru_cache(maxsize=64)
def _values_of(case: Case, members: tuple[tuple[int, ...], ...]) -> list[dict[str, np.ndarray]]:
    return on_one_device(case, members).values


def _faults_of_end(process: Process, *, is_last: bool, is_dropped: bool) -> Iterator[str]:
    if process.killed:
        if is_last and not is_dropped:
            yield f"{process.name} was killed, and not started again"
    elif process.ended is None:
        yield f"{process.name} did not end"
    elif process.error is not None and (is_last or not _may_end(process)):
        yield f"{process.name} ended with {type(process.error).__name__}: {process.error}"


def _may_end(process: Process) -> bool:
    """Return True if a process has ended because it could not go back: a trainer that left.

    Any other process whose connection to a role ends reports the role to the launcher, and does not
    wait until its deadline.
    """
    return isinstance(process, SimulatedTrainer) and isinstance(process.error, LostPeerError)


def _faults_of_mean(t: SimulatedTrainer) -> Iterator[str]:
    if t.mean is None:
        return
    expected = [initial_mean()]
    for step in range(t.case.steps[t.k]):
        expected.append(running_mean(expected[-1], t.k, step))
    for step, x in t.mean.values:
        if x.tobytes() != expected[step].tobytes():
            yield f"{t.name} has the mean {x} after step {step}, expected {expected[step]}"


def _faults_of_trainer(case: Case, t: SimulatedTrainer, expected: _Expected) -> Iterator[str]:
    before: int | None = None
    for step, _ in t.pulled:
        if before is not None and step > before + 1:
            yield f"{t.name} received step {step} after step {before}"
        before = step
    end = (0, len(t.pulled), len(t.looked_up))
    for begin, next_begin in itertools.pairwise((*t.begun_generations, end)):
        (generation, pulls, lookups), (_, last_pull, last_lookup) = begin, next_begin
        values = expected.values(generation)
        for step, pulled in t.pulled[pulls:last_pull]:
            for n, x in pulled.items():
                if x.tobytes() != values[step][n].tobytes():
                    yield (
                        f"{t.name} received {x} as {n} after step {step} in generation "
                        f"{generation}, but one device has {values[step][n]}"
                    )
        for step, ids, rows in t.looked_up[lookups:last_lookup]:
            table = np.concatenate([values[step][n] for n in case.tables])
            if rows.tobytes() != table[ids].tobytes():
                yield f"{t.name} looked up {rows} for step {step}, but one device has {table[ids]}"
    if t.error is None and t.ended is not None and (before is None or before < case.steps[t.k]):
        yield f"{t.name} ended after {before} of {case.steps[t.k]} steps"
    for step, number, found in t.reduced:
        parts = [round_part(k, step, number) for k, n in enumerate(case.steps) if n > step]
        if found.tobytes() != functools.reduce(np.add, parts).tobytes():
            yield f"{t.name} received a wrong sum in round {number} of step {step}"
