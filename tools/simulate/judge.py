"""Checks of a job that has ended.

- Every role ends in time: without an error, or with an error of dtrans.
- If nothing happens that a job may notice, all roles end without an error. Trainers that leave
  early are treated as `on_trainer_exit` says. A connection that breaks for a moment after its
  trainer has left is not noticed, either.
- A role that ends without an error has done all of its work: a trainer its steps, a server the
  steps of all trainers.
- Parameters that a trainer received are those of one device, bit for bit, whatever happened later.
  They are recomputed here, which shows a gradient that counts twice, not at all, or in another
  order.
- Rows that a trainer looked up are those of one device before this step, bit for bit. Announced
  rows may lack as many updates as their table allows. Tables are those of one device in the end.
- With GEO-SGD and one trainer, servers have the trainer's parameters in the end, up to rounding.
  After each pull a trainer knows the values of its stored rows on the server at one moment, bit for
  bit. They have all that it pushed before.
- A checkpoint that is reported as saved was written. It has the state between two steps, after the
  trainer's number of steps. Reports, exports and changes of tables are those of one device. On an
  asynchronous server they are those of a moment between two steps of the trainer that asked.
- A synchronous server evicts rows when all trainers have asked for it. An asynchronous one keeps
  rows with a pending gradient.
- Strangers are refused by name: a second process with the id of a trainer, another plan, another
  token. They and malformed messages change nothing: a job that may end well does.
- An asynchronous server applies each gradient once and in its trainer's order. Its answers are
  values that the block has had, and it has heard all of every trainer that ends without an error.
  Rows of a table are never older than rows received before. They have the gradients of all earlier
  steps of a trainer that waits for them, and of no later ones.
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
from tools.simulate.judge_answers import faults_of_answers, faults_of_block, faults_of_saves
from tools.simulate.judge_guests import faults_of_guests, is_harmless
from tools.simulate.one_device import on_one_device
from tools.simulate.process import Process
from tools.simulate.server_role import SimulatedServer
from tools.simulate.trainer_role import GeoSgdTrainer, SimulatedTrainer
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
      of_job: its trainers.
      guests: processes of `case.guests`. One may be the only process of its trainer.
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
                yield f"{role.name} ended, and nothing had happened: {role.error}"
    device = on_one_device(case) if case.sync_mode else None
    expected = device.values if device is not None else []
    for t in trainers:
        if (
            t.error is None
            and t.ended is not None
            and (not t.pulled or t.pulled[-1][0] != case.sends[t.k])
        ):
            yield (
                f"{t.name} ended well, and not all of its {case.sends[t.k]} sends are in what "
                "it received"
            )
        for step, pulled in t.pulled if expected else ():
            for n, x in pulled.items():
                if x.tobytes() != expected[step][n].tobytes():
                    yield (
                        f"{t.name} has another {n} after step {step} than one device: {x}, not "
                        f"{expected[step][n]}"
                    )
        for step, (ids, rows) in enumerate(t.looked_up if expected else ()):
            had = expected[updates_in(case, t.k, step)]
            one = np.concatenate([had[n] for n in case.tables])[ids]
            if len(t.pulled) > step + 1 and rows.tobytes() != one.tobytes():
                yield (
                    f"{t.name} has looked up other rows for step {step} than one device: "
                    f"{rows}, not {one}"
                )
        for i, found in enumerate(t.reduced):
            step, number = divmod(i, case.rounds)
            total = functools.reduce(
                np.add, [_part(k, step, number) for k, n in enumerate(case.steps) if n > step]
            )
            if found.tobytes() != total.tobytes():
                yield f"{t.name} has another sum of round {number} of step {step}"
    for server in servers.values():
        steps = server.machine.kind.step
        if (
            case.sync_mode
            and server.ended is not None
            and server.error is None
            and steps != max(case.steps)
        ):
            yield f"{server.name} ended well after {steps} of {max(case.steps)} steps"
        elif case.sync_mode and server.ended is not None and server.error is None:
            for n, x in server.machine.kind.state.items():
                if x.tobytes() != expected[steps][n].tobytes():
                    yield (
                        f"{server.name} has another {n} in the end than one device: {x}, not "
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
            "trainers made different numbers of steps with on_trainer_exit='error', and "
            "nobody said so"
        )


def _breaks_at_the_end(case: Case, trainers: list[SimulatedTrainer]) -> bool:
    """Return True if connections break only after their trainers have left, and for a moment."""
    left_at = {name: at for t in trainers for name, at in t.left_at.items()}
    for event in case.events:
        if event.kind != "cut" or event.seconds > RETRY / 2 or case.moves:
            return False
        if event.time < left_at.get(event.who, math.inf):
            return False
    return True


def faults_of_role(role: Process) -> Iterator[str]:
    """Yield a role that has not ended, or not with an error of dtrans."""
    if role.killed:
        return
    if role.ended is None:
        yield f"{role.name} did not end"
    elif role.error is not None and not isinstance(role.error, DtransError):
        yield f"{role.name} ended with {type(role.error).__name__}: {role.error}"


def _faults_of_blocks(
    case: Case, server: SimulatedServer, trainers: list[SimulatedTrainer]
) -> Iterator[str]:
    """Yield gradients and answers that an asynchronous server mishandled."""
    update = server.update
    assert isinstance(update, SimulatedBlocks)
    done = [t for t in trainers if t.error is None and t.ended is not None]
    if len(done) == case.trainers and not server.killed and update.begun != sum(case.sends):
        yield f"{server.name} has begun {update.begun} of {sum(case.sends)} steps"
    for block in update.history:
        known = [0] * case.trainers  # how many steps of each trainer are in the block
        after = [tuple(known)]  # the same after each update
        for name, found in update.log:
            if name == block and not found:
                after.append(after[-1])  # rows were evicted
            elif name == block:
                source = next(
                    (t for t in trainers if _steps_in(case, t, block, known[t.k], found)), None
                )
                if source is None:
                    yield (
                        f"{server.name} applied a gradient to {block} that was not sent, or "
                        "that it had applied"
                    )
                    return
                known[source.k] += _steps_in(case, source, block, known[source.k], found)
                after.append(tuple(known))
        for t in done:
            count, due = known[t.k], case.sends[t.k]
            if count < due and not server.killed:
                yield (
                    f"{server.name} applied {count} gradients of {t.name} to {block}, which "
                    f"sent {due}"
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
                        f"{t.name} received, after {steps} of its steps, a {block} with "
                        f"{had and had[t.k]} of them"
                    )


def _faults_of_rows(
    case: Case,
    server: SimulatedServer,
    block: str,
    after: list[tuple[int, ...]],
    trainers: list[SimulatedTrainer],
) -> Iterator[str]:
    """Yield wrong rows that an asynchronous server sent from a block.

    Args:
      after: for each value of the block, the number of steps of each trainer in it.
    """
    assert isinstance(server.update, SimulatedBlocks)
    values = [np.frombuffer(x, np.float32) for x in server.update.history[block]]
    number = list(case.tables).index(block)
    for t in trainers:
        at = 0
        for step, (ids, rows) in enumerate(t.looked_up):
            if step >= len(t.pushed.get(block, [])):
                break  # it may not have come
            run = runs_of(tuple(case.tables.values()))[number]
            mine = run.among(ids)
            here, found = run.local(ids[mine]), rows[mine]
            had = [known[t.k] for known in after]
            ahead = case.mode == "communicator"  # steps do not wait for their gradients to be used
            due = [i for i, n in enumerate(had) if i >= at and (n == step or (ahead and n < step))]
            moments = [i for i in due if np.array_equal(values[i][here], found)]
            if not moments:
                yield (
                    f"{t.name} has looked up rows of {block} before step {step} that were not "
                    f"there then: {found}"
                )
                return
            at = moments[0]
            evicted = [
                i for n, i, x in server.update.evicted if n == block and np.isin(here, x).any()
            ]
            early = [i for i in evicted if had[i] <= step]
            if early and max(early) > max(moments):
                yield (
                    f"{server.name} evicted rows of {block} that {t.name} had looked up for step "
                    f"{step}, and whose gradient was to come"
                )


def _faults_of_stored_rows(
    case: Case,
    server: SimulatedServer,
    block: str,
    after: list[tuple[int, ...]],
    trainers: list[SimulatedTrainer],
) -> Iterator[str]:
    """Yield wrong rows that GEO-SGD trainers store from a block; arguments of `_faults_of_rows`."""
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
                    f"{t.name} knows of rows of {block}, after {pushes} pushes, what they "
                    f"never were: {found}"
                )
                return
            at = now


def _faults_of_geo(case: Case, servers: Mapping[str, SimulatedServer]) -> Iterator[str]:
    """Yield parameters that differ from those of the only trainer of GEO-SGD."""
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
                    f"{server.name} has {found} as {block} in the end, and its only trainer "
                    f"made {expected} of it"
                )


def _steps_in(case: Case, t: SimulatedTrainer, block: str, since: int, found: bytes) -> int:
    """Return the number of steps, from one on, whose gradients a trainer's gradient sums; 0 for
    another trainer's."""
    sent = t.pushed.get(block, [])[since:]
    most = case.communicator.max_merge_var_num if case.mode in COMMUNICATING else 1
    total = None
    for count, x in enumerate(sent[:most], 1):
        total = x if total is None else total + x
        if total.tobytes() == found:
            return count
    return 0
