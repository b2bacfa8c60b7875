"""Checks of a job of GEO-SGD with snapshots (`dtrans.protocol.trainer.geo_steps`).

- A server applies the changes of each step of a trainer at most once, whichever roles fail.
- A server that has not failed has applied all pushes of the job.
- A server that has not failed has the sum of each trainer's changes, except changes that were lost
  with a failed trainer, or not pushed.
- A trainer that starts again loses only changes after its snapshot that servers have not
  received.
- The step after which this trainer continues is at most one interval of snapshots after its
snapshot.
- Rows of a table that a trainer stores have values that its server had at one moment.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dtrans.protocol.tables.table_rows import runs_of
from tools.simulate.case import Case
from tools.simulate.geo_trainer import GeoSgdTrainer, Push, Return
from tools.simulate.launcher import SimulatedLauncher
from tools.simulate.server_role import SimulatedServer
from tools.simulate.updates import SimulatedBlocks, gradient


# bytes of the deltas of a server's blocks -> (id of the trainer, push with these deltas)
PushesByDelta = Mapping[tuple[bytes, ...], tuple[int, Push]]


@dataclasses.dataclass(frozen=True)
class _Checked:
    """Pushes of one trainer that a server has applied to a block.

    Attributes:
      case: the simulated case.
      processes: processes of the trainer.
      endpoint: endpoint of the server.
      block: name of the block.
      pushes: the pushes, in order.
    """

    case: Case
    processes: Sequence[GeoSgdTrainer]
    endpoint: str
    block: str
    pushes: Sequence[Push]

    @property
    def name(self) -> str:
        """Name of the trainer."""
        return self.processes[-1].name

    def next_step(self, end: int) -> int:
        """Return the first step of the push after the push that ends at step `end`.

        A trainer that starts again without a snapshot does not repeat a push that some servers
        lack.
        """
        for process in self.processes:
            begin = process.returned
            if (
                begin is not None
                and begin.snapshot is None
                and begin.received[self.endpoint] == end
            ):
                return begin.step
        return end

    def changes(self, first: int, end: int) -> np.ndarray:
        """Return the sum of the trainer's changes in some steps."""
        total = self.zeros()
        for step in range(first, end):
            total += self.change(step)
        return total

    def change(self, step: int) -> np.ndarray:
        """Return the trainer's change in a step."""
        if self.block in self.case.tables:
            return self.processes[-1].row_changes[step][self.block]
        k = self.processes[-1].k
        return gradient(self.block, self.case.blocks[self.block], k, step)

    def zeros(self) -> np.ndarray:
        """Return zeros with the shape of the block."""
        return np.zeros((self.case.blocks | self.case.tables)[self.block])

    def times_sent(self, step: int, count: int) -> np.ndarray:
        """Return how often pushes up to `count` steps have contained each change of a step."""
        sent = self.zeros()
        for push in self.pushes:
            if step < push.end <= count:
                sent += push.rows.get(self.block, 1.0)
        return sent


def faults_of_geo_snapshots(case: Case, launcher: SimulatedLauncher) -> Iterator[str]:
    """Yield the promises that a job of GEO-SGD with snapshots violated."""
    trainers: dict[int, list[GeoSgdTrainer]] = {k: [] for k in range(case.trainers)}
    for process in launcher.processes:
        if isinstance(process, GeoSgdTrainer) and process.geo is not None:
            trainers[process.k].append(process)
    for processes in trainers.values():
        for process in processes:
            yield from _faults_of_lag(case, process)
    for endpoint in case.endpoints:
        servers = _processes_of(launcher, endpoint)
        for server in servers:
            if server.loaded is not None and server.loaded.server is server.blocks:
                yield f"{server.name} was not lost, but went back to its own snapshot"
                return
        blocks = [n for n in (*case.blocks, *case.tables) if n.startswith(f"{endpoint}/")]
        pushes, by_trainer = _index(trainers, blocks), dict[int, list[Push]]()
        applied = [_applied(servers, servers[-1], block) for block in blocks]
        if len(set(map(len, applied))) > 1:
            yield f"pserver {endpoint} applied a part of a push"
            continue
        for entries in zip(*applied, strict=True):
            if entries not in pushes:
                yield f"pserver {endpoint} applied changes that nobody pushed"
                continue
            k, push = pushes[entries]
            by_trainer.setdefault(k, []).append(push)
        for block, k in itertools.product(blocks, trainers):
            checked = _Checked(case, trainers[k], endpoint, block, by_trainer.get(k, ()))
            yield from _faults_of_order(checked)
            if len(servers) == 1 and trainers[k]:
                yield from _faults_of_sum(checked, case.steps[k])
            if len(servers) == 1 and block in case.tables:
                yield from _faults_of_old_rows(checked, servers[0])


def _index(trainers: Mapping[int, Sequence[GeoSgdTrainer]], blocks: Sequence[str]) -> PushesByDelta:
    found = {}
    for k, processes in trainers.items():
        for process in processes:
            for push in process.pushes:
                found[tuple(push.deltas[n].tobytes() for n in blocks)] = k, push
    return found


def _faults_of_old_rows(checked: _Checked, server: SimulatedServer) -> Iterator[str]:
    """Yield stored rows of a trainer with `old` values that the server never had together."""
    case, block = checked.case, checked.block
    assert isinstance(server.update, SimulatedBlocks)
    values = [np.frombuffer(x, np.float32) for x in server.update.history[block]]
    run = runs_of(tuple(case.tables.values()))[list(case.tables).index(block)]
    for process in checked.processes:
        at = 0
        for _, ids, old in process.agreed:
            mine = (ids >= run.start) & (ids < run.start + run.rows)
            here, found = run.local(ids[mine]), old[mine]
            later = range(at, len(values))
            moment = next((i for i in later if np.array_equal(values[i][here], found)), None)
            if moment is None:
                yield (
                    f"{process.name} has {found} as old rows of {block}, but the server never had "
                    "these values"
                )
                return
            at = moment


def _processes_of(launcher: SimulatedLauncher, endpoint: str) -> list[SimulatedServer]:
    found = []
    for process in launcher.processes:
        is_server = isinstance(process, SimulatedServer) and process.endpoint == endpoint
        if is_server and process.begun:
            found.append(process)
    return found


def _applied(
    servers: Sequence[SimulatedServer], server: SimulatedServer, block: str
) -> list[bytes]:
    """Return the changes of a block by a process, plus the changes in the snapshot at its start."""
    assert server.blocks is not None
    log = [x for name, x in server.blocks.log if name == block]
    snapshot = server.loaded
    if snapshot is None:
        return log
    writer = next(x for x in servers if x.blocks is snapshot.server)
    before = _applied(servers, writer, block)
    assert writer.blocks is not None
    since = [name for name, _ in writer.blocks.log].count(block) - snapshot.begun
    return before[: len(before) - since] + log


def _faults_of_lag(case: Case, process: GeoSgdTrainer) -> Iterator[str]:
    if process.returned is None:
        return
    snapshot, step = process.returned.snapshot, process.returned.step
    before = 0 if snapshot is None else snapshot.step
    if step - before > case.snapshots:
        yield f"{process.name} continued after step {step}, with the snapshot of step {before}"


def _faults_of_order(checked: _Checked) -> Iterator[str]:
    end = 0
    for push in checked.pushes:
        if push.first < end:
            yield (
                f"pserver {checked.endpoint} applied changes of {checked.name} after step "
                f"{push.first} to {checked.block} twice"
            )
        end = push.end


def _faults_of_sum(checked: _Checked, steps: int) -> Iterator[str]:
    """Yield a wrong sum of changes on a server that has not failed."""
    end = 0
    for push in checked.pushes:
        if push.first != checked.next_step(end):
            yield (
                f"pserver {checked.endpoint} lacks changes of {checked.name} from step {end} to "
                f"{push.first}"
            )
        end = push.end
    last, block = checked.processes[-1], checked.block
    if last.error is not None or last.ended is None:
        return
    if checked.next_step(end) != steps:
        yield f"pserver {checked.endpoint} has {end} of {steps} steps of {checked.name}"
    total = last.rest()[block].astype(float)
    for push in checked.pushes:
        total += push.deltas[block]
    since = 0  # changes before this step were lost earlier
    for i, process in enumerate(checked.processes):
        if process.returned is None:
            continue
        lost = _lost(checked, i, process.returned)
        expected = _expected_loss(checked, process.returned, since)
        since = process.returned.step
        if not np.allclose(lost, expected, rtol=1e-4, atol=1e-5):
            yield f"{process.name} lost changes {lost} of {block}, expected {expected}"
        total += lost
    wanted = checked.changes(0, steps)
    if not np.allclose(total, wanted, rtol=1e-4, atol=1e-5):
        yield (
            f"pserver {checked.endpoint} has changes {total} of {checked.name} in {block}, "
            f"expected {wanted}"
        )


def _lost(checked: _Checked, i: int, returned: Return) -> np.ndarray:
    """Return the changes that a trainer lost when its i-th process started."""
    count = returned.received[checked.endpoint]
    rest = _rest_before(checked, i, count) + checked.changes(count, returned.step)
    return rest - returned.changes[checked.block]


def _rest_before(checked: _Checked, i: int, count: int) -> np.ndarray:
    """Return the changes of the first `count` steps that earlier processes did not push."""
    applied = {(push.end, push.deltas[checked.block].tobytes()) for push in checked.pushes}
    for process in reversed(checked.processes[:i]):
        for push in reversed(process.pushes):
            is_applied = (push.end, push.deltas[checked.block].tobytes()) in applied
            if push.end == count and is_applied:
                return push.rest[checked.block].astype(float)
        if process.returned is not None:
            later = checked.changes(count, process.returned.step)
            return process.returned.changes[checked.block] - later
    return checked.zeros()


def _expected_loss(checked: _Checked, returned: Return, since: int) -> np.ndarray:
    """Return the changes, made after the snapshot, that were in no push before the failure."""
    count = returned.received[checked.endpoint]
    snapshot_step = 0 if returned.snapshot is None else returned.snapshot.step
    total = checked.zeros()
    for step in range(max(snapshot_step, since), returned.step):
        sent = checked.times_sent(step, count)
        total += checked.change(step) * (1 - 1 / checked.case.trainers) ** sent
    return total
