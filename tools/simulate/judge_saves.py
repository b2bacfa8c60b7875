"""Checks of the checkpoints that trainers request in a job with snapshots.

- If a trainer receives the answer that a checkpoint is saved, each server has written it, at the
  request's number of steps.
- A synchronous server has written the state of one device after this step. This device uses the
  trainers of the last generation that computed the step. The state may precede an eviction.
- A trainer receives an error only if the write of a server fails, or the server's disk is full.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dtrans.run.net.generation_log import members_of_steps
from tools.simulate.between_steps import Answered
from tools.simulate.case import Case
from tools.simulate.launcher import SimulatedLauncher
from tools.simulate.one_device import on_one_device
from tools.simulate.server_role import SimulatedServer
from tools.simulate.storage import checkpoint_name
from tools.simulate.trainer_role import SimulatedTrainer


# number of steps and arrays of each written checkpoint
Written = tuple[int, Mapping[str, bytes]]


def faults_of_saves_with_snapshots(case: Case, launcher: SimulatedLauncher) -> Iterator[str]:
    """Yield the promises about checkpoints that a job with snapshots violated."""
    if all(x.kind != "save" for x in case.requests):
        return
    written = collections.defaultdict[tuple[str, str], list[Written]](list)
    for process in launcher.processes:
        if isinstance(process, SimulatedServer):
            for name, steps, state in process.storage.all_written:
                written[process.endpoint, name].append((steps, state))
    for process in launcher.processes:
        if not isinstance(process, SimulatedTrainer):
            continue
        for answer in process.between.answers:
            if answer.request.kind == "save" and answer.result:
                yield from _faults_of_error(case, process, answer)
            elif answer.request.kind == "save":
                for endpoint in case.endpoints:
                    name = checkpoint_name(case, answer.request)
                    of_server = written[endpoint, name]
                    if not _is_saved(case, launcher, answer, of_server):
                        yield (
                            f"{process.name} received the answer that {name} is saved after "
                            f"{answer.request.step} steps in generation {answer.generation}, but "
                            f"pserver {endpoint} has not written this state"
                        )


def _faults_of_error(case: Case, trainer: SimulatedTrainer, answer: Answered) -> Iterator[str]:
    request, error = answer.request, answer.result
    full = {x.who for x in case.events if x.kind == "full"} | {f"pserver {request.fails}"}
    if not any(f"{name} could not" in error for name in full):
        name = checkpoint_name(case, request)
        yield f"{trainer.name} received an unexpected error about {name}: {error}"


def _is_saved(
    case: Case, launcher: SimulatedLauncher, answer: Answered, written: Sequence[Written]
) -> bool:
    """Return True if a server has written the checkpoint of an answer."""
    step = answer.request.step
    states = [state for steps, state in written if steps == step]
    if not case.sync_mode:  # servers have no common step
        return bool(states)
    records = launcher.records[: answer.generation + 1]
    members = members_of_steps(records, 0, max(case.steps))
    device = on_one_device(case, members)
    values = device.values[step], device.before[step][0]
    return any(_are_equal(state, one) for state in states for one in values)


def _are_equal(saved: Mapping[str, bytes], state: Mapping[str, np.ndarray]) -> bool:
    """Return True if a server's arrays are those of the state, and there is at least one."""
    return bool(saved) and all(x == state[n].tobytes() for n, x in saved.items())
