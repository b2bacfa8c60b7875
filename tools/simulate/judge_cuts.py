"""Checks of a job with cuts that has ended (`dtrans.protocol.epochs`).

- The job ends without an error, whatever roles were lost.
- In every epoch, all parameters and rows that a process of a trainer received have the bits of one
  device after the same step.
- In every epoch, the running mean of a trainer's gradients has the bits of one process that takes
  all steps of the trainer.
- A trainer skips no step: after parameters of step s come those of step s + 1, or of a cut.
- A loss repeats at most two intervals of cuts and one step.
- With cuts at losses, the loss of a trainer repeats no step that a trainer has completed, and at
  most one update of a server. Servers write these cuts in time, unless they are stopped.
- At the end, servers have the state of one device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from dtrans.errors import LostPeerError
from tools.simulate.case import Case
from tools.simulate.judge_alone import faults_of_alone
from tools.simulate.launcher import SimulatedLauncher
from tools.simulate.one_device import values_of
from tools.simulate.process import Process
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_role import SimulatedTrainer
from tools.simulate.updates import initial_mean, round_part, running_mean


def faults_of_cuts(case: Case, launcher: SimulatedLauncher) -> Iterator[str]:
    """Yield the promises that a job with cuts violated."""
    for process in launcher.processes:
        yield from _faults_of_end(process, is_last=launcher.roles[process.name] is process)
    if not case.sync_mode:
        yield from faults_of_alone(case, launcher)
        return
    expected = _values_of(case)
    yield from faults_so_far(case, launcher)
    for name, role in launcher.roles.items():
        if isinstance(role, SimulatedServer) and role.error is None and role.ended is not None:
            if role.machine.kind.step != max(case.steps):
                yield f"{name} ended after {role.machine.kind.step} of {max(case.steps)} steps"
            for n, x in role.machine.kind.state.items():
                if x.tobytes() != expected[-1][n].tobytes():
                    yield f"{name} has {x} as {n} at the end, but one device has {expected[-1][n]}"


def faults_so_far(case: Case, launcher: SimulatedLauncher) -> Iterator[str]:
    """Yield the promises that a job with cuts has violated before its end."""
    expected = _values_of(case)
    for newest, cut in launcher.rewinds:
        # A server begins a cut when the previous one is written. So the slowest server has made
        # fewer than two steps of cuts since the last common one, and the others one step more.
        if newest - cut > 2 * case.cuts + 1:
            yield f"the job went back from step {newest} to step {cut}"
    for end in launcher.ends:
        if end.newest - end.cut > 1 or end.received > end.cut:
            yield f"one role was lost, but the job lost complete steps: {end}"
    if launcher.late and all(event.kind in ("crash", "cut") for event in case.events):
        yield f"{launcher.late[0]} did not begin to write its newest states in time"
    for process in launcher.processes:
        if isinstance(process, SimulatedTrainer):
            yield from _faults_of_trainer(case, process, expected)
            yield from _faults_of_mean(process)


_values_of = functools.cache(values_of)


def _faults_of_end(process: Process, *, is_last: bool) -> Iterator[str]:
    if process.killed:
        if is_last:
            yield f"{process.name} was killed, and not started again"
    elif process.ended is None:
        yield f"{process.name} did not end"
    elif process.error is not None and (is_last or not _may_end(process)):
        yield f"{process.name} ended with {type(process.error).__name__}: {process.error}"


def _may_end(process: Process) -> bool:
    """Return True if a process has ended because it could not go back: a trainer that left.

    Other processes that lose a role report it, and do not wait until their deadline.
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


def _faults_of_trainer(
    case: Case, t: SimulatedTrainer, expected: list[dict[str, np.ndarray]]
) -> Iterator[str]:
    before: int | None = None
    for step, pulled in t.pulled:
        if before is not None and step > before + 1:
            yield f"{t.name} received step {step} after step {before}"
        before = step
        for n, x in pulled.items():
            if x.tobytes() != expected[step][n].tobytes():
                yield (
                    f"{t.name} received {x} as {n} after step {step}, but one device has "
                    f"{expected[step][n]}"
                )
    for step, ids, rows in t.looked_up:
        table = np.concatenate([expected[step][n] for n in case.tables])
        if rows.tobytes() != table[ids].tobytes():
            yield f"{t.name} looked up {rows} for step {step}, but one device has {table[ids]}"
    if t.error is None and t.ended is not None and (before is None or before < case.steps[t.k]):
        yield f"{t.name} ended after {before} of {case.steps[t.k]} steps"
    for step, number, found in t.reduced:
        parts = [round_part(k, step, number) for k, n in enumerate(case.steps) if n > step]
        if found.tobytes() != functools.reduce(np.add, parts).tobytes():
            yield f"{t.name} received a wrong sum in round {number} of step {step}"
