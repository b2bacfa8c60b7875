"""Checks of a job with snapshots whose servers are asynchronous (`dtrans.protocol.generations`).

- The job ends without an error, whichever roles fail.
- A surviving server loses no step that it has received, and counts each step once.
- A server that fails goes back by less than two intervals of snapshots of its state.
  Each snapshot that a server could not write adds one interval.
- A trainer skips at most the step whose answer it has not received.
- A process of a server uses a gradient twice only if a role failed during the gradient's step.
- At the end, all servers agree on the number of each trainer's steps.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

from dtrans.protocol.server.async_server import AsyncServer
from tools.simulate.case import Case
from tools.simulate.judge_geo import faults_of_geo_snapshots
from tools.simulate.launcher import SimulatedLauncher
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_role import SimulatedTrainer
from tools.simulate.updates import SimulatedSnapshot


def faults_of_alone(case: Case, launcher: SimulatedLauncher) -> Iterator[str]:
    """Yield the promises that an asynchronous job with snapshots violated."""
    generations = launcher.generation.number
    merged = 1  # maximum number of steps in one message
    if case.mode == "geo":
        merged = case.every
        yield from faults_of_geo_snapshots(case, launcher)
    elif case.mode != "async":
        merged = case.communicator.max_merge_var_num
    for endpoint in case.endpoints:
        servers = []
        for process in launcher.processes:
            if isinstance(process, SimulatedServer) and process.endpoint == endpoint:
                servers += [process] if process.begun else []
        for old, new in itertools.pairwise(servers):
            lost = _begun_since(old, new.loaded)
            # incomplete steps count, too
            intervals = 2 + len(launcher.unwritten)
            if lost > intervals * case.snapshots + (intervals - 1) * merged + case.trainers:
                yield f"pserver {endpoint} lost {lost} steps of its trainers"
        for k, steps in enumerate(case.steps):
            count = _counts(servers[-1]).get(k, 0)
            if count != steps:
                yield f"pserver {endpoint} counts {count} of {steps} steps of trainer {k}"
        for server in servers:
            yield from _faults_of_log(case, server, generations)
    for process in launcher.processes:
        if isinstance(process, SimulatedTrainer):
            yield from _faults_of_firsts(case, process)


def _begun_since(server: SimulatedServer, snapshot: SimulatedSnapshot | None) -> int:
    """Return the number of steps that a process has begun since a snapshot, or since its start."""
    assert server.blocks is not None
    # a process that is killed while it computes has begun later steps in virtual time
    begun = sum(time <= server.killed_at for time in server.blocks.begun_at)
    has_written = snapshot is not None and snapshot.server is server.blocks
    return begun - (snapshot.begun if snapshot is not None and has_written else 0)


def _counts(server: SimulatedServer) -> dict[int, int]:
    """Return the number of steps of each trainer at the end of a process."""
    assert isinstance(server.machine.kind, AsyncServer)
    return server.machine.kind.counts.by_trainer


def _faults_of_log(case: Case, server: SimulatedServer, generations: int) -> Iterator[str]:
    assert server.blocks is not None
    used = collections.Counter(block for block, _ in server.blocks.log)
    for block, count in used.items():
        # each failure of a server repeats at most one step of each trainer: the step in progress
        if count > sum(case.steps) + generations * case.trainers:
            yield f"{server.name} used {count} gradients of {block} in {generations} generations"


def _faults_of_firsts(case: Case, t: SimulatedTrainer) -> Iterator[str]:
    for before, first in t.firsts if case.mode == "async" else ():
        if first > before + 1:
            yield f"{t.name} made {before} steps, and continued after {first}"
    if t.error is None and t.ended is not None and t.pulled[-1][0] > case.steps[t.k]:
        yield f"{t.name} made {t.pulled[-1][0]} of {case.steps[t.k]} steps"
