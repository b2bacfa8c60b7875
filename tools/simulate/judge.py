"""Checks of a job that has ended.

- Every role ends in time: without an error, or with an error of dtrans.
- If no event affects the job, all roles end without an error. Trainers that leave early are treated
  according to `on_trainer_exit`. A short break of a connection after its trainer has left does not
  affect the job.
- A role that ends without an error has done all of its work: a trainer its steps, a server the
  steps of all trainers.
- Parameters that a synchronous trainer received equal the parameters of one device, bit for bit.
  The check computes one device's steps, so it finds a gradient that was used twice, not at all, or
  in another order.
- Rows that a synchronous trainer looked up equal one device's rows before this step, bit for bit.
  Announced rows may lack as many updates as their table allows. At the end, tables equal one
  device's tables.
- With GEO-SGD and one trainer, the servers have the trainer's parameters at the end, up to
  rounding. After each pull, the trainer's `old` rows equal the server's rows at one time, bit for
  bit. They include all earlier pushes of the trainer.
- A checkpoint that is reported as saved was written. It contains the state between two steps, after
  the trainer's number of steps. Reports, exports and changed rows of tables equal the results of
  one device. On an asynchronous server, they equal a state between two steps of the trainer.
- A synchronous server evicts rows when all trainers have requested it. An asynchronous server does
  not evict rows with a pending gradient.
- A second process with the id of a trainer, and processes with another plan or token, are refused
  with an error that names the cause. These processes and malformed messages do not affect the job.
- An asynchronous server applies each gradient once, and in the order of its trainer. Its answers
  are values that the block has had. It has applied all gradients of each trainer that ends without
  an error. Rows are never older than rows that the trainer received before. If a trainer waits for
  its gradients, rows include exactly its earlier steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dtrans.errors import DtransError
from dtrans.protocol.tables.table_rows import runs_of
from dtrans.protocol.transport import RETRY
from tools.simulate.case import COMMUNICATING, Case
from tools.simulate.geo_trainer import GeoSgdTrainer
from tools.simulate.judge_answers import faults_of_answers, faults_of_block, faults_of_saves
from tools.simulate.judge_guests import faults_of_guests, is_harmless
from tools.simulate.one_device import on_one_device
from tools.simulate.process import Process
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_role import SimulatedTrainer
from tools.simulate.updates import (
    SimulatedBlocks,
    gradient,
    initial,
    round_part as _part,
    updates_in,
)


def faults(
    case: Case,
    servers: Mapping[str, SimulatedServer],
    of_job: list[SimulatedTrainer],
    guests: Sequence[Process] = (),
) -> Iterator[str]:
    """Yield the promises that a job violated.

    Args:
      case: the simulated case.
      servers: each server, by endpoint.
      of_job: trainers of the job.
      guests: processes of `case.guests`. A guest may be the only process of its trainer that joined
        the job.
    """
    trainers = [*of_job, *(x for x in guests if isinstance(x, SimulatedTrainer))]
    for role in (*servers.values(), *of_job, *guests):
        yield from faults_of_role(role)
    yield from faults_of_guests(case, of_job, guests)
    uneven = len(set(case.steps)) > 1 and case.sync_mode and case.on_trainer_exit == "error"
    harmless = (
        case.orderly
        and all(is_harmless(guest, of_job) for guest in case.guests)
        and (case.harmless or _breaks_at_the_end(case, of_job))
    )
    if harmless and not uneven:
        for role in (*servers.values(), *of_job):
            if role.error is not None:
                yield f"{role.name} ended with an error, but no event affects it: {role.error}"
    device = on_one_device(case) if case.sync_mode else None
    expected = device.values if device is not None else []
    for t in trainers:
        if (
            t.error is None
            and t.ended is not None
            and (not t.pulled or t.pulled[-1][0] != case.sends[t.k])
        ):
            yield (
                f"{t.name} ended without an error, but the parameters that it received last do not "
                f"include all of its {case.sends[t.k]} sends"
            )
        for step, pulled in t.pulled if expected else ():
            for n, x in pulled.items():
                if x.tobytes() != expected[step][n].tobytes():
                    yield (
                        f"{t.name} received {x} as {n} after step {step}, but one device has "
                        f"{expected[step][n]}"
                    )
        for step, ids, rows in t.looked_up if expected else ():
            had = expected[updates_in(case, t.k, step)]
            one = np.concatenate([had[n] for n in case.tables])[ids]
            if len(t.pulled) > step + 1 and rows.tobytes() != one.tobytes():
                yield f"{t.name} looked up {rows} for step {step}, but one device has {one}"
        for step, number, found in t.reduced:
            total = functools.reduce(
                np.add, [_part(k, step, number) for k, n in enumerate(case.steps) if n > step]
            )
            if found.tobytes() != total.tobytes():
                yield f"{t.name} received a wrong sum in round {number} of step {step}"
    for server in servers.values():
        steps = server.machine.kind.step
        if (
            case.sync_mode
            and server.ended is not None
            and server.error is None
            and steps != max(case.steps)
        ):
            yield f"{server.name} ended without an error after {steps} of {max(case.steps)} steps"
        elif case.sync_mode and server.ended is not None and server.error is None:
            for n, x in server.machine.kind.state.items():
                if x.tobytes() != expected[steps][n].tobytes():
                    yield (
                        f"{server.name} has {x} as {n} at the end, but one device has "
                        f"{expected[steps][n]}"
                    )
    yield from faults_of_saves(case, servers, trainers)
    if device is not None:
        yield from faults_of_answers(case, device, servers, trainers)
    else:
        for server in servers.values():
            yield from _faults_of_blocks(case, server, trainers)
    if (
        case.mode == "geo"
        and case.trainers == 1
        and of_job[0].error is None
        and of_job[0].ended is not None
    ):
        yield from _faults_of_geo(case, servers)
    if uneven and harmless and all(t.error is None for t in of_job):
        yield (
            "trainers made different numbers of steps with on_trainer_exit='error', but no trainer "
            "failed"
        )


def _breaks_at_the_end(case: Case, trainers: list[SimulatedTrainer]) -> bool:
    """Return True if connections break only briefly, and after their trainers have left."""
    left_at = {name: at for t in trainers for name, at in t.left_at.items()}
    for event in case.events:
        if event.kind != "break" or event.seconds > RETRY / 2 or case.moves:
            return False
        if event.time < left_at.get(event.who, math.inf):
            return False
    return True


def faults_of_role(role: Process) -> Iterator[str]:
    """Yield a role that did not end, or ended with an exception that is not an error of dtrans."""
    if role.killed:
        return
    if role.ended is None:
        yield f"{role.name} did not end"
    elif role.error is not None and not isinstance(role.error, DtransError):
        yield f"{role.name} ended with {type(role.error).__name__}: {role.error}"


def _faults_of_blocks(
    case: Case, server: SimulatedServer, trainers: list[SimulatedTrainer]
) -> Iterator[str]:
    """Yield wrong updates and answers of an asynchronous server."""
    update = server.update
    assert isinstance(update, SimulatedBlocks)
    done = [t for t in trainers if t.error is None and t.ended is not None]
    if len(done) == case.trainers and not server.killed and update.begun != sum(case.sends):
        yield f"{server.name} has begun {update.begun} of {sum(case.sends)} steps"
    for block in update.history:
        known = [0] * case.trainers  # number of steps of each trainer in the block's current value
        after = [tuple(known)]  # value of `known` for each value that the block has had
        for name, found in update.log:
            if name == block and not found:
                after.append(after[-1])  # an eviction uses no gradient
            elif name == block:
                source = next(
                    (t for t in trainers if _steps_in(case, t, block, known[t.k], found)), None
                )
                if source is None:
                    yield (
                        f"{server.name} applied a gradient to {block} that was not sent, or was "
                        "already applied"
                    )
                    return
                known[source.k] += _steps_in(case, source, block, known[source.k], found)
                after.append(tuple(known))
        for t in done:
            count, due = known[t.k], case.sends[t.k]
            if count < due and not server.killed:
                yield (
                    f"{server.name} applied {count} gradients of {t.name} to {block}, but the "
                    f"trainer sent {due}"
                )
        yield from faults_of_block(case, server, block, after, trainers)
        values = dict(zip(update.history[block], after, strict=True))
        if block in case.tables:
            yield from (_faults_of_stored_rows if case.mode == "geo" else _faults_of_rows)(
                case, server, block, after, trainers
            )
            continue
        for t in trainers:
            for steps, pulled in t.pulled:
                had = values.get(pulled[block].tobytes())
                if had is None or had[t.k] < steps:
                    yield (
                        f"{t.name} received, after {steps} of its steps, a value of {block} that "
                        f"includes {had and had[t.k]} of them"
                    )


def _faults_of_rows(
    case: Case,
    server: SimulatedServer,
    block: str,
    after: list[tuple[int, ...]],
    trainers: list[SimulatedTrainer],
) -> Iterator[str]:
    """Yield wrong rows that trainers received from an asynchronous server.

    Args:
      case: the simulated case.
      server: the server.
      block: name of the block.
      after: for each value that the block has had, the number of steps of each trainer in it.
      trainers: the trainers.
    """
    assert isinstance(server.update, SimulatedBlocks)
    values = [np.frombuffer(x, np.float32) for x in server.update.history[block]]
    number = list(case.tables).index(block)
    for t in trainers:
        at = 0
        for step, ids, rows in t.looked_up:
            if step >= len(t.pushed.get(block, [])):
                break  # the trainer failed in this step, and may not have received the rows
            run = runs_of(tuple(case.tables.values()))[number]
            mine = run.among(ids)
            here, found = run.local(ids[mine]), rows[mine]
            had = [known[t.k] for known in after]
            # with a communicator, a step may begin before earlier gradients are used
            ahead = case.mode == "communicator"
            due = [i for i, n in enumerate(had) if i >= at and (n == step or (ahead and n < step))]
            moments = [i for i in due if np.array_equal(values[i][here], found)]
            if not moments:
                yield (
                    f"{t.name} received {found} as rows of {block} for step {step}, but the block "
                    "did not have these values then"
                )
                return
            at = moments[0]
            evicted = [
                i for n, i, x in server.update.evicted if n == block and np.isin(here, x).any()
            ]
            early = [i for i in evicted if had[i] <= step]
            # the gradient of a trainer that failed may never arrive
            arrives = had[-1] > step
            if arrives and early and max(early) > max(moments):
                yield (
                    f"{server.name} evicted rows of {block} that {t.name} had looked up for step "
                    f"{step}, before the step's gradient arrived"
                )


def _faults_of_stored_rows(
    case: Case,
    server: SimulatedServer,
    block: str,
    after: list[tuple[int, ...]],
    trainers: list[SimulatedTrainer],
) -> Iterator[str]:
    """Yield wrong `old` rows of GEO-SGD trainers. `_faults_of_rows` describes the arguments."""
    assert isinstance(server.update, SimulatedBlocks)
    values = [np.frombuffer(x, np.float32) for x in server.update.history[block]]
    run = runs_of(tuple(case.tables.values()))[list(case.tables).index(block)]
    for t in trainers:
        assert isinstance(t, GeoSgdTrainer)
        at = 0
        for pushes, ids, old in t.agreed:
            mine = (ids >= run.start) & (ids < run.start + run.rows)
            here, found = run.local(ids[mine]), old[mine]
            due = (i for i, known in enumerate(after) if i >= at and known[t.k] == pushes)
            now = next((i for i in due if np.array_equal(values[i][here], found)), None)
            if now is None:
                yield (
                    f"{t.name} has {found} as old rows of {block} after {pushes} pushes, but the "
                    "server never had these values"
                )
                return
            at = now


def _faults_of_geo(case: Case, servers: Mapping[str, SimulatedServer]) -> Iterator[str]:
    """Yield parameters on servers that differ from those of the only GEO-SGD trainer."""
    for server in servers.values():
        assert isinstance(server.update, SimulatedBlocks)
        for block, values in server.update.history.items():
            if block in case.tables:
                continue
            size = case.blocks[block]
            changes = [gradient(block, size, 0, step) for step in range(case.steps[0])]
            expected, found = (
                sum(changes, initial(block, size)),
                np.frombuffer(values[-1], np.float32),
            )
            if not np.allclose(found, expected, rtol=1e-4, atol=1e-5):
                yield (
                    f"{server.name} has {found} as {block} at the end, but its only trainer has "
                    f"{expected}"
                )


def _steps_in(case: Case, t: SimulatedTrainer, block: str, since: int, found: bytes) -> int:
    """Return the number of steps that a trainer's gradient sums; 0 for other gradients.

    Args:
      t: the trainer.
      block: name of the block.
      since: number of the trainer's steps that were already applied.
      found: bytes of the gradient.
    """
    sent = t.pushed.get(block, [])[since:]
    most = case.communicator.max_merge_var_num if case.mode in COMMUNICATING else 1
    total = None
    for count, x in enumerate(sent[:most], 1):
        total = x if total is None else total + x
        if total.tobytes() == found:
            return count
    return 0
