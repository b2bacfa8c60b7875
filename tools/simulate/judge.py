"""Checks of a job that has ended.

- Every role ends in time: well, or with an error of dtrans.
- Where nothing happens that a job may notice, all end well, and whoever leaves early does as
  `on_trainer_exit` says. A connection that breaks for a moment when its trainer has said that it
  has done is such a thing.
- Whoever ends well has done all of its work: a trainer its steps, a server the steps of all
  trainers.
- Parameters that a trainer received are those of one device, bit for bit, whatever happened later.
  They are computed here anew, so that a gradient that counts twice, or not at all, or in another
  order, shows.
- Rows that a trainer looked up are those of one device before this step, bit for bit, also where it
  announced them, or as many updates before as they may lack; and so are tables in the end.
- With GEO-SGD and one trainer, servers have in the end what it has made of the parameters, but for
  rounding. Of rows of a table that a trainer keeps it knows after each pull what they were on the
  server at one moment: all of them, with what it had pushed before, bit for bit.
- A checkpoint that is reported as saved was written: the state between two steps, after as many as
  the trainer said. Reports, exports and changes of tables are those of one device; of an
  asynchronous server, those of a moment between two steps of the trainer that asked. A synchronous
  server evicts rows when all trainers have asked for it. An asynchronous one keeps rows of which a
  gradient is to come.
- A second process with the id of a trainer, one with another plan and one with another token are
  refused by name. They and malformed messages change nothing: a job that may end well does.
- An asynchronous server has applied no gradient twice and none out of its trainer's order, what it
  gives is a value that the block has had, and whoever ended well was heard in full. Rows of a table
  are of no older value than rows before, and have the gradients of all steps of their trainer,
  where it waits for them, and of no later ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dtrans.errors import DtransError
from dtrans.protocol.presence import RETRY
from dtrans.protocol.tables.table_rows import runs_of
from tools.simulate.case import COMMUNICATING, Case, Event
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
        yield from _of_role(role)
    yield from faults_of_guests(case, of_job, guests)
    uneven = len(set(case.steps)) > 1 and case.sync_mode and case.on_trainer_exit == "error"
    harmless = (
        case.orderly
        and all(is_harmless(guest, of_job) for guest in case.guests)
        and (case.harmless or all(_breaks_at_the_end(case, e, of_job) for e in case.events))
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
        made = server.machine.kind.step
        if (
            case.sync_mode
            and server.ended is not None
            and server.error is None
            and made != max(case.steps)
        ):
            yield f"{server.name} ended well after {made} of {max(case.steps)} steps"
        elif case.sync_mode and server.ended is not None and server.error is None:
            for n, x in server.machine.kind.state.items():
                if x.tobytes() != expected[made][n].tobytes():
                    yield (
                        f"{server.name} has another {n} in the end than one device: {x}, not "
                        f"{expected[made][n]}"
                    )
    yield from faults_of_saves(case, servers, trainers)
    if device is not None:
        yield from faults_of_answers(case, device, servers, trainers)
    else:
        for server in servers.values():
            yield from _of_blocks(case, server, trainers)
    if (
        case.mode == "geo"
        and case.trainers == 1
        and of_job[0].error is None
        and of_job[0].ended is not None
    ):
        yield from _of_geo(case, servers)
    if uneven and harmless and all(t.error is None for t in of_job):
        yield (
            "trainers made different numbers of steps with on_trainer_exit='error', and "
            "nobody said so"
        )


def _breaks_at_the_end(case: Case, event: Event, trainers: list[SimulatedTrainer]) -> bool:
    """Return True for a connection that breaks when its trainer has left, and is made again in
    time."""
    left_at = {name: at for t in trainers for name, at in t.left_at.items()}
    if event.kind != "cut" or event.seconds > RETRY / 2 or case.moves:
        return False
    return event.who in left_at and event.time >= left_at[event.who]


def _of_role(role: Process) -> Iterator[str]:
    if role.killed:
        return
    if role.ended is None:
        yield f"{role.name} did not end"
    elif role.error is not None and not isinstance(role.error, DtransError):
        yield f"{role.name} ended with {type(role.error).__name__}: {role.error}"


def _of_blocks(
    case: Case, server: SimulatedServer, trainers: list[SimulatedTrainer]
) -> Iterator[str]:
    """Of an asynchronous server."""
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
            made, due = known[t.k], case.sends[t.k]
            if made < due and not server.killed:
                yield (
                    f"{server.name} applied {made} gradients of {t.name} to {block}, which "
                    f"sent {due}"
                )
        yield from faults_of_block(case, server, block, after, trainers)
        values = dict(zip(update.history[block], after, strict=True))
        if block in case.tables:
            yield from (_of_kept if case.mode == "geo" else _of_rows)(
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


def _of_rows(
    case: Case,
    server: SimulatedServer,
    block: str,
    after: list[tuple[int, ...]],
    trainers: list[SimulatedTrainer],
) -> Iterator[str]:
    """Of rows of a block that an asynchronous server gave.

    Args:
      after: how many steps of each trainer are in each value of the block.
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
            if all(any(i > now and had[i] <= step for i in evicted) for now in moments):
                yield (
                    f"{server.name} evicted rows of {block} that {t.name} had looked up for step "
                    f"{step}, and whose gradient was to come"
                )


def _of_kept(
    case: Case,
    server: SimulatedServer,
    block: str,
    after: list[tuple[int, ...]],
    trainers: list[SimulatedTrainer],
) -> Iterator[str]:
    """Of rows of a block that trainers of GEO-SGD keep; as `_of_rows`."""
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


def _of_geo(case: Case, servers: Mapping[str, SimulatedServer]) -> Iterator[str]:
    """Of GEO-SGD with one trainer, who gives the servers all that it changes."""
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
