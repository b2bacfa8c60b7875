"""Tables of long jobs: reports of servers, changed rows, and evicted rows."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import role_threads as roles
from one_table import (
    EMB,
    KEY,
    NONE,
    SYNC,
    Alone,
    D,
    V,
    drawn,
    planned,
    run,
)
from paths import ROOT
from role_threads import RoleThreads, free_endpoints

import dtrans
from dtrans.errors import ConfigError, DeadlineError, PeerError, StateError, WireError
from dtrans.protocol import wire
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.protocol.server.trainer_state import Trainer
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.tables import job_tables, row_snapshot
from dtrans.run.parameter_server.tables.lazy_memory import LazyArray
from dtrans.run.parameter_server.tables.table_memory import memory_of
from dtrans.run.parameter_server.update import ServerUpdate
from dtrans.run.role_jobs.trainer_job import TrainerJob


def bytes_of(rows: int) -> int:
    """Return the bytes of rows and their state, of three numbers for each row, and of a small
    directory."""
    return rows * (2 * D * 4 + 3 * 8) + 64 * 2 * 8


OPTIMIZERS = {
    "adagrad": (optax.adagrad(0.1), None, 0.1),
    "adam, lazy": (optax.adam(0.1), "lazy", 0.0),
    "adam, dense": (optax.adam(0.1), "dense", 0.0),
    "momentum, dense": (optax.sgd(0.1, 0.9), "dense", 0.0),
    "rmsprop, dense": (optax.rmsprop(0.1), "dense", 0.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_row_that_was_given_up_begins_anew(name: str) -> None:
    """The row starts again from the init's bits and the optimizer's initial state, which stay until
    the next step."""
    tx, update, begins = OPTIMIZERS[name]
    alone = Alone(tx, update=update)
    for ids in ((3, 8, 20), (8,), (20, 31), (8,)):
        alone.step(*ids)
    kept = alone.rows(8, 20, 31)
    assert alone.server_tables.evict(EMB, 2, NONE) == 1  # row 3, of step 1
    np.testing.assert_array_equal(alone.rows(8, 20, 31), kept)
    for read in (alone.rows(3), alone.rows(3, train=True)):
        np.testing.assert_array_equal(read, alone.first[[3]])
    assert all((np.asarray(x)[3] == np.float32(begins)).all() for x in alone.state.values()), (
        alone.state
    )
    assert alone.state
    alone.step(8)
    np.testing.assert_array_equal(alone.rows(3), alone.first[[3]])
    alone.step(3)
    assert not np.array_equal(alone.rows(3), alone.first[[3]])


def test_rows_are_given_up_by_their_last_step_and_count_towards_no_limit() -> None:
    alone = Alone(optax.adagrad(0.1), limit=3)
    for ids in ((0, 1), (1, 2), (1,), (1,)):
        alone.step(*ids)
    with pytest.raises(WireError, match="a limit of 3"):
        alone.rows(9, train=True)
    assert [alone.server_tables.evict(EMB, steps, NONE) for steps in (4, 3, 3, 2)] == [0, 1, 0, 1]
    (report,) = alone.server_tables.report()
    assert str(report) == f"params/emb: 1 of 60 rows materialized, {bytes_of(1):,} bytes; 2 evicted"
    assert (report.rows, report.limit, report.step) == (V, 3, 4)
    alone.step(9, 10)
    alone.rows(0)  # a lookup does not create the row
    with pytest.raises(
        WireError, match="has 3 rows and a limit of 3 rows, but the step needs 1 more"
    ):
        alone.rows(0, train=True)
    assert alone.server_tables.evict(EMB, 1, NONE) == 1
    whole = np.asarray(alone.update.tables()[EMB])  # as in a checkpoint
    np.testing.assert_array_equal(np.delete(whole, [9, 10], 0), np.delete(alone.first, [9, 10], 0))


def test_rows_that_were_made_and_never_updated_are_given_up_too() -> None:
    alone = Alone(optax.adagrad(0.1))
    alone.rows(4, 5, train=True)  # a trainer that has left
    alone.step(6)
    assert alone.server_tables.evict(EMB, 1, np.array([5])) == 1
    assert alone.server_tables.report()[0].created == 2


def test_changes_are_of_the_steps_after_one() -> None:
    alone = Alone(optax.adam(0.1), update="lazy")
    for ids in ((3, 8), (8,), (20,)):
        alone.step(*ids)
    alone.rows(50, train=True)  # created, with its initial value
    assert [alone.changed(since) for since in range(4)] == [
        ([3, 8, 20], []), ([8, 20], []), ([20], []), ([], [])]  # fmt: skip
    assert alone.server_tables.changed(EMB, 1)[0] == 3
    assert alone.server_tables.evict(EMB, 2, NONE) == 2  # 3, and 50, which no step has updated
    alone.server_tables.evict(EMB, 1, NONE)
    alone.step(20)
    assert alone.changed(3) == ([20], [3, 8, 50])  # changes since step 3, before the evictions
    assert alone.changed(4) == ([], [])
    # the row exists again, but has no update yet; a caller with the old row must get the new one
    alone.rows(3, train=True)
    assert alone.changed(3) == ([3, 20], [8, 50])
    for since in (-1, 5):
        with pytest.raises(
            StateError,
            match=f"changed rows of params/emb were requested since step {since}, .* taken 4 steps",
        ):
            alone.changed(since)
    # after a return to a snapshot, a caller may know later steps, which are repeated
    alone.server_tables.went_back = True
    step, ids, gone = alone.server_tables.changed(EMB, 5)
    assert (step, len(ids), len(gone)) == (5, 0, 0)


@pytest.mark.parametrize("tx, wanted",
                         [(optax.adam(0.1), [3, 8]), (optax.adamw(0.1), list(range(V))),
                                        (optax.rmsprop(0.1), [3]),
                                        (optax.lamb(0.1), list(range(V)))],
                         ids=["adam", "adamw", "rmsprop", "lamb"])  # fmt: skip
def test_rows_that_move_by_themselves_have_changed(tx: Any, wanted: list[int]) -> None:
    """With Adam, rows that a step has looked up change.

    With RMSProp, their state changes, but no row does.
    """
    alone = Alone(tx, update="dense")
    alone.step(3, 8)
    alone.step(3)
    before = np.array([alone.rows(i)[0] for i in range(V)])
    assert alone.changed(2) == ([], [])
    alone.step(3)
    assert alone.changed(2) == (wanted, [])
    now = np.array([alone.rows(i)[0] for i in range(V)])
    assert set(np.flatnonzero((before != now).any(1))) <= set(wanted)


def test_rows_that_were_given_up_do_not_move() -> None:
    alone = Alone(optax.adam(0.1), update="dense")
    for ids in ((3, 8), (3,), (3,)):
        alone.step(*ids)
    assert alone.changed(2) == ([3, 8], []) and alone.server_tables.evict(EMB, 2, NONE) == 1
    alone.step(3)
    assert alone.changed(2) == ([3], [8])


def test_rows_of_a_checkpoint_rest_that_are_as_the_init_makes_them() -> None:
    """The optimizer's initial state is not zero in some of its entries."""
    tx = optax.chain(optax.scale_by_rss(0.1), optax.trace(0.9), optax.scale(-0.1))
    alone = Alone(tx, update="dense")
    alone.step(3, 8)
    saved = {n: np.asarray(x) for n, x in {**alone.update.state, **alone.update.tables()}.items()}
    again = Alone(tx, update="dense", before=saved)
    (report,) = again.server_tables.report()
    assert (report.created, report.step) == (2, 0)
    again.step(8)
    assert again.changed(0) == ([3, 8], [])
    assert again.server_tables.evict(EMB, 1, NONE) == 1 and again.changed(1) == ([], [3])
    np.testing.assert_array_equal(again.rows(3, 20), again.first[[3, 20]])


def test_rows_that_cannot_be_made_again_are_not_given_up() -> None:
    orthogonal = lambda key: jax.random.orthogonal(key, V)[:, :D]
    alone = Alone(optax.sgd(0.1), emb=orthogonal)
    with pytest.raises(
        StateError,
        match="cannot be evicted, because the server cannot initialize them again: it started from",
    ):
        alone.server_tables.evict(EMB, 1, NONE)
    for tx, why in (
        (optax.adamw(0.1), "also changes rows that no step has looked up"),
        (optax.lamb(0.1), "touches every row"),
    ):
        alone = Alone(tx, update="dense")
        alone.step(3)
        with pytest.raises(StateError, match=why):
            alone.server_tables.evict(EMB, 1, NONE)
        assert np.asarray(alone.update.tables().get(EMB, alone.first)).shape == (V, D)


# -- what the protocol makes of it -----------------------------------------------------------------


class Said:
    """Server with two trainers. The test passes it messages, and reads its answers."""

    def __init__(self, mode: Any = SYNC, **options: Any) -> None:
        (programs,) = planned(optax.adagrad(0.1), 1, 2, mode, **options).servers.values()
        update = ServerUpdate.from_program(programs.main)
        with dtrans.Executor() as exe:
            state = exe.run(programs.startup, KEY)
        self.trainers = TrainerRegistry(update.served, deadline=9.0, plan={}, secret="")
        self.trainers.known |= {k: Trainer(f"session {k}", bytes([k])) for k in range(2)}
        self.said: list[tuple[int, str, dict[str, Any]]] = []
        self.server: Any
        self.grads = [update.served.tables[EMB].gradients[k] for k in range(2)]
        if update.served.sync_mode:
            self.server = SyncServer(
                update.served, steps := SyncUpdate(update, state, 2), self.trainers, self.say
            )
            self.server.tables = steps.server_tables
        else:
            blocks = BlockUpdates(update, state)
            self.server = AsyncServer(update.served, blocks, blocks.state, self.trainers, self.say)
            self.server.tables = blocks.server_tables
        self.steps = [0, 0]

    def say(self, address: bytes, op: str, blocks: Any = (), **fields: Any) -> None:
        self.said.append((address[0], op, fields))

    def take(self, k: int, op: str, arrays: Any = (), **fields: Any) -> None:
        (frames,) = wire.framed(op, arrays, step=self.steps[k], **fields)
        getattr(self.server, op)(k, wire.parse(frames))

    def ask(self, k: int, *ids: int) -> None:
        numbers = [(EMB, np.array(ids, np.int32))]
        self.take(k, "prefetch", numbers, counts={EMB: len(ids)}, train=True)

    def give(self, k: int, *ids: int) -> None:
        self.take(k, "send", [(self.grads[k], np.ones((len(ids), D), np.float32))])

    def step(self, *ids: int) -> None:
        """Send the step of both trainers, which look up the same rows."""
        for k in range(2):
            self.ask(k, *ids)
            self.give(k, *ids)
            if isinstance(self.server, SyncServer):
                self.take(k, "send_barrier")
        self.steps = [n + 1 for n in self.steps]
        self.said.clear()

    def evict(self, k: int, unused_for: int = 1, table: str = EMB) -> None:
        self.take(k, "evict", table=table, unused_for=unused_for)


def test_rows_are_given_up_when_all_trainers_say_so() -> None:
    said = Said()
    said.step(3, 8)
    said.step(8)
    said.evict(1)
    assert not said.said and said.server.tables.report()[0].created == 2
    said.evict(0)
    assert [(k, op, fields["count"]) for k, op, fields in said.said] == [
        (0, "evicted", 1),
        (1, "evicted", 1),
    ]
    said.step(3)
    said.evict(0)
    said.evict(1)
    assert [fields["count"] for *_, fields in said.said] == [1, 1]  # row 8


@pytest.mark.parametrize(
    "goes_on", [lambda s: s.ask(1, 3), lambda s: s.give(1)], ids=["looks up", "sends"]
)
def test_a_trainer_that_goes_on_without_is_named(goes_on: Any) -> None:
    """The error names the trainer that continues without an eviction, whichever trainer is
    first."""
    why = (
        "trainer 0 evicts rows of params/emb after step 1, but trainer 1 continues without an "
        "eviction: "
        "all trainers must call"
    )
    for first, then in ((Said.evict, goes_on), (goes_on, Said.evict)):
        said = Said()
        said.step(3)
        call = lambda what, said=said: what(said, 0) if what is Said.evict else what(said)
        call(first)
        with pytest.raises(PeerError, match=why):
            call(then)


def test_trainers_give_up_the_same_rows() -> None:
    said = Said()
    said.evict(0, 4)
    with pytest.raises(
        PeerError,
        match="trainer 1 evicts .* unused_for=5, but trainer 0 .* unused_for=4; all trainers must",
    ):
        said.evict(1, 5)


def test_who_keeps_others_waiting_is_named() -> None:
    said = Said()
    said.step(3)
    said.evict(0)
    said.server.look(1.0)
    said.server.look(8.0)
    assert [(k, op) for k, op, _ in said.said] == [(0, "waiting")] * 2
    why = r"7.0 s for job.tables.evict before gradients of step 2 from trainer 1 \(computing\)"
    assert re.fullmatch(why, said.said[-1][2]["reason"])
    with pytest.raises(
        DeadlineError, match="and trainer 0 waited 10.0 s for job.tables.evict before gradients of"
    ):
        said.server.look(11.0)


def test_who_waits_for_a_checkpoint_is_not_late() -> None:
    """A trainer that sends `saving` may wait long for a checkpoint. Without these messages, it is
    late."""
    said = Said()
    said.step(3)
    said.ask(1, 3)
    said.give(1, 3)
    said.take(1, "send_barrier")
    said.server.look(1.0)
    for now in range(2, 40, 4):
        said.take(0, "saving")
        said.server.look(float(now))
        assert said.said[-1][1] == "waiting"
        assert (
            "from trainer 0 (waiting for a checkpoint to be written)" in said.said[-1][2]["reason"]
        )
    why = r"trainer 1 waited 1[0-9].0 s for gradients .* from trainer 0 \(computing\)"
    with pytest.raises(DeadlineError, match=why):
        for now in range(40, 60, 4):
            said.server.look(float(now))


def test_trainers_that_have_left_are_not_waited_for() -> None:
    said = Said()
    said.step(3)
    said.step(8)
    said.evict(0)
    said.take(1, "complete")
    assert [(k, op) for k, op, _ in said.said] == [(1, "goodbye"), (0, "evicted")]
    assert said.said[1][2]["count"] == 1


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"table": "params/w"}, "'params/w', which is not a table of"),
        ({"unused_for": 0}, "unused_for=0"),
        ({"unused_for": -(2**63)}, "unused_for=-9223372036854775808"),
    ],
)
@pytest.mark.parametrize("mode", [dtrans.Sync(), dtrans.Async()], ids=["sync", "async"])
def test_an_eviction_that_cannot_be_is_refused_and_changes_nothing(
    mode: Any, fields: Any, why: str
) -> None:
    said = Said(mode)
    said.step(3)
    said.step(8)
    with pytest.raises(WireError, match=why):
        said.evict(0, **fields)
    said.steps[0] = 7
    with pytest.raises(WireError, match="of step 7"):
        said.evict(0)
    said.steps[0] = 2
    if mode == dtrans.Sync():
        said.evict(0)
        with pytest.raises(WireError, match="a second `evict`"):
            said.evict(0)
    assert said.server.tables.report()[0].created == 2 and not said.said


def test_asynchronous_servers_keep_rows_that_are_under_way() -> None:
    said = Said(dtrans.Async())
    said.step(3, 8)
    said.step(20)
    said.ask(1, 8)
    said.said.clear()
    said.evict(0, 2)
    assert [(k, op, fields["count"]) for k, op, fields in said.said] == [(0, "evicted", 1)]
    said.give(1, 8)
    said.steps[1] += 1
    assert said.server.tables.changed(EMB, 4)[1].tolist() == [8]
    said.evict(1, 1)
    assert said.said[-1][2]["count"] == 1  # row 20


# -- jobs ------------------------------------------------------------------------------------------


def batch(at: int, k: int) -> np.ndarray:
    """Return three row ids. Later batches use other parts of the table."""
    return np.random.default_rng((at, k)).integers(5 * at, 5 * at + 15, 3)


@pytest.mark.parametrize("update", ["lazy", "dense"])
def test_a_copy_that_serves_is_the_table(
    role_threads: RoleThreads, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes need many messages.

    Bits depend neither on servers nor on the placement, also with evictions.
    """
    monkeypatch.setattr(job_tables, "CHUNK", 2)
    monkeypatch.setattr(wire, "MESSAGE_BYTES", 8)

    def train(job: Any, k: int) -> Any:
        state, gone, told, copy, since = (
            job.init(KEY),
            [],
            [],
            np.asarray(jax.jit(drawn)(KEY)).copy(),
            0,
        )
        for at in range(6):
            state, _ = job.step(state, batch(at, k))
            if at in (2, 4):
                gone.append(job.tables.evict(EMB, 2))
            if k or at % 2:
                continue
            changes = job.tables.changed(EMB, since)
            assert (
                all(np.all(x[1:] > x[:-1]) for x in (changes.ids, changes.gone))
                and changes.step == at + 1
            )
            copy[changes.ids] = changes.rows
            copy[changes.gone] = job.tables.lookup(EMB, changes.gone)
            np.testing.assert_array_equal(copy, job.tables.lookup(EMB, np.arange(V)))
            told.append([(changes.step, changes.ids.tolist(), changes.gone.tolist())])
            since = changes.step
        return gone, told, copy, [(x.created, x.evicted, x.step) for x in job.tables.report()]

    found = []
    for servers, rows in ((1, {}), (3, {"place": "bucket", "buckets": 7})):
        plan = planned(optax.adam(0.1), servers, 2, update=update, **rows)
        ended = run(role_threads, plan, train)
        assert ended[0][0] == ended[1][0]
        found.append(ended[0])
    (gone, told, copy, reports), (gone3, told3, copy3, reports3) = found
    assert (gone, told) == (gone3, told3) and min(gone) > 0
    np.testing.assert_array_equal(copy, copy3)
    assert (
        reports == [(sum(x[0] for x in reports3), sum(gone), 6)]
        and [x[1:] for x in reports3] != reports
    )
    assert any(len(x[0][2]) for x in told)


def test_what_servers_have_is_told(role_threads: RoleThreads) -> None:
    plan = planned(optax.adagrad(0.1), 2, limit=20)

    def train(job: Any, k: int) -> Any:
        with pytest.raises(
            ConfigError, match="tables: this trainer is not connected to servers yet"
        ):
            job.tables.report()
        state, _ = job.step(job.init(KEY), np.array([0, 1, 59]))
        report = job.tables.report()
        with pytest.raises(
            ConfigError, match="params/w is not a table of this plan; its tables are: params/emb"
        ):
            job.tables.evict("params/w", 3)
        with pytest.raises(ConfigError, match="unused_for must be a number of steps"):
            job.tables.evict(EMB, 0)
        with pytest.raises(
            PeerError,
            match="changed rows of params/emb.block0 were requested since step 9, .* taken 1 steps "
            ".*job.tables.export",
        ):
            job.tables.changed(EMB, 9)
        job.step(state, np.array([0, 1, 59]))  # all changes are there
        return report

    (report,) = run(role_threads, plan, train)
    assert [dict(vars(x), endpoint="") for x in report] == [
        {"name": f"params/emb.block{i}", "endpoint": "", "rows": 30, "created": made,
         "bytes": bytes_of(made), "limit": 10,
         "evicted": 0, "step": 1} for i, made in ((0, 2), (1, 1))]  # fmt: skip
    title, header, first, _ = str(report).splitlines()
    assert (title, header.split()) == ("tables", ["block", "endpoint", *job_tables.NUMBERS])
    assert first.split() == [
        "params/emb.block0",
        report.blocks[0].endpoint,
        "30",
        "2",
        f"{bytes_of(2):,}",
        "10",
        "0",
        "1",
    ]


def test_what_moves_all_rows_is_refused_before_it_is_asked() -> None:
    for plan, why in (
        (planned(optax.adamw(0.1), update="dense"), "its update also changes .*'lazy'"),
        (planned(optax.sgd(0.1), mode=dtrans.Geo()), "GEO-SGD trainers keep"),
    ):
        role = Role("trainer", 1, tuple(plan.servers), trainer_id=0)
        with (
            TrainerJob(plan, role, {}) as job,
            pytest.raises(ConfigError, match=f"rows of .* {why}"),
        ):
            job.tables.evict(EMB, 3)
    job = planned(optax.sgd(0.1)).on_mesh()
    for ask in (
        lambda: job.tables.report(),
        lambda: job.tables.changed(EMB, 0),
        lambda: job.tables.evict(EMB, 3),
    ):
        with pytest.raises(
            ConfigError,
            match=r"job.tables.* needs server processes, .*; run the plan by plan.on_cluster\(\)",
        ):
            ask()


@pytest.mark.parametrize("mode", [dtrans.Async(), dtrans.HalfAsync()], ids=["async", "half"])
def test_asynchronous_trainers_ask_whenever_they_like(role_threads: RoleThreads, mode: Any) -> None:
    plan = planned(optax.adagrad(0.1), 2, mode=mode)

    def train(job: Any, k: int) -> Any:
        state = job.init(KEY)
        for ids in ([0, 1, 40], [0, 1, 59], [0, 2, 59]):
            state, _ = job.step(state, np.array(ids))
        first = job.tables.changed(EMB, 0)
        gone = job.tables.evict(EMB, 2)
        state, _ = job.step(state, np.array([40, 40, 40]))
        return first, gone, job.tables.changed(EMB, first.step), job.tables.report()

    ((first, gone, then, report),) = run(role_threads, plan, train)
    assert (first.step, first.ids.tolist(), first.gone.tolist()) == (3, [0, 1, 2, 40, 59], [])
    assert gone == 1 and (then.step, then.ids.tolist(), then.gone.tolist()) == (4, [40], [])
    assert sum(x.created for x in report) == 5 and {x.step for x in report} == {4}


# -- checkpoints, and memory -----------------------------------------------------------------------


@pytest.mark.parametrize("update", ["lazy", "dense"])
def test_a_job_that_goes_on_from_a_checkpoint_gives_rows_up_too(
    role_threads: RoleThreads, tmp_path: Path, update: str
) -> None:
    """Continue on other servers with another placement, as without a restart: steps and evictions
    continue."""
    tx, old, new = optax.adam(0.1), (0, 3), (3, 6)

    def train(job: Any, k: int, steps: tuple[int, int]) -> Any:
        state = job.init(KEY)
        begun = job.tables.report()
        for at in range(*steps):
            state, _ = job.step(state, batch(at, k))
            if at == 2:
                job.tables.evict(EMB, 2)
                job.save("half")
        gone, changed = (
            job.tables.evict(EMB, 3),
            [job.tables.changed(EMB, since) for since in (0, 2, 5)],
        )
        return begun, gone, job.tables.lookup(EMB, np.arange(V)), job.tables.report(), changed

    made = lambda report: sum(x.created for x in report)
    plan = planned(tx, 2, update=update)
    ((_, gone, wanted, then, changes),) = run(
        role_threads, plan, lambda job, k: train(job, k, (0, 6)), checkpoints=tmp_path
    )
    again = planned(tx, 3, update=update, place="bucket", buckets=7)
    restored = lambda job: dtrans.checkpoint.restore(tmp_path / "half", job)
    ((begun, more, found, report, changed),) = run(
        role_threads, again, lambda job, k: train(job, k, new), state=restored
    )
    touched = {i for at in range(1, old[1]) for i in batch(at, 0).tolist()}
    assert (
        made(begun) == len(touched)
        and {x.step for x in begun} == {3}
        and sum(x.evicted for x in begun) > 0
    )
    assert gone == more > 0 and made(report) == made(then)
    np.testing.assert_array_equal(found, wanted)
    for x, y in zip(changes, changed, strict=True):
        assert x.step == y.step == 6 and len(x.gone)
        jax.tree.map(
            np.testing.assert_array_equal, (x.ids, x.rows, x.gone), (y.ids, y.rows, y.gone)
        )


def test_whole_arrays_do_not_say_how_rows_are_made(
    role_threads: RoleThreads, tmp_path: Path
) -> None:
    """Continue from rows that one device had, or from a checkpoint of such rows."""
    tx = optax.adagrad(0.1)
    params = {"emb": drawn(KEY)}

    def train(job: Any, k: int) -> Any:
        state = job.init(KEY)
        state, _ = job.step(state, batch(0, 0))
        with pytest.raises(
            PeerError, match=r"could not evict rows: .*call job.serve\(state, init=\(...,\)\)"
        ):
            job.tables.evict(EMB, 1)
        state, _ = job.step(state, batch(1, 0))
        if not (tmp_path / "one").exists():
            job.save("one")
        return job.tables.report()

    begins = lambda job: job.state_of(params, tx.init(params))
    run(role_threads, planned(tx, 1), train, checkpoints=tmp_path, state=begins)
    restored = lambda job: dtrans.checkpoint.restore(tmp_path / "one", job)
    (report,) = run(role_threads, planned(tx, 2), train, state=restored)
    assert {(x.created, x.step) for x in report} == {(V // 2, 4)}


# -- rows while they are read ----------------------------------------------------------------------


def live(alone: Alone, patience: float = roles.HANG) -> Any:
    """Return a snapshot of the rows, which is read while updates continue."""
    (memory,) = alone.update._tables.values()
    return memory.snapshot(patience)[EMB].table  # type: ignore[union-attr]


SNAPSHOTS = OPTIMIZERS | {"adamw, dense": (optax.adamw(0.1), "dense", 0.0)}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_snapshot_is_of_one_moment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New rows, updates, lookups and evictions during the reading do not change the snapshot."""
    monkeypatch.setattr(row_snapshot, "SEGMENT", 60)  # two or five rows at once
    monkeypatch.setattr(row_snapshot, "GROUPS", 7)
    monkeypatch.setattr(row_snapshot, "LEAST", 1)
    tx, update, _ = SNAPSHOTS[name]
    alone, same, rng = Alone(tx, update=update), Alone(tx, update=update), np.random.default_rng(1)
    for each in (alone, same):
        for ids in ((3, 8, 20, 59), (8,), (0, 20, 31), (8,)):
            each.step(*ids)
        if name != "adamw, dense":
            assert each.server_tables.evict(EMB, 3, NONE) == 2
    wanted, changed = (
        {n: np.asarray(x) for n, x in same.update.tables().items()},
        live(same).segments(),
    )
    table, found = live(alone), []
    for segment in table.segments():
        found.append(segment)
        alone.step(*np.sort(rng.choice(V, 9, replace=False)).tolist())
        alone.rows(*np.sort(rng.choice(V, 9, replace=False)).tolist())
        if name != "adamw, dense":
            alone.server_tables.evict(EMB, 2, NONE)
    assert len(found) > 1 and table.is_over and table.most > 0
    made = np.concatenate([x.present for x in found])
    assert made.tolist() == (list(range(V)) if name == "adamw, dense" else [0, 8, 20, 31])
    for i, n in enumerate(table.names):
        np.testing.assert_array_equal(np.concatenate([x.rows[i] for x in found]), wanted[n][made])
    others = list(changed)
    for part in (lambda x: x.ids, lambda x: x.changed):
        np.testing.assert_array_equal(
            *(np.concatenate([part(x) for x in of]) for of in (found, others))
        )


def test_rows_that_change_while_they_are_read_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Updates wait for a reader. Without a reader, the job continues without the snapshot."""
    row = 2 * D * 4
    monkeypatch.setattr(row_snapshot, "SEGMENT", 4 * row)
    monkeypatch.setattr(row_snapshot, "ROOM", 12 * row)
    alone = Alone(optax.adagrad(0.1))
    alone.step(*range(V))
    (memory,) = alone.update._tables.values()
    wanted = {n: x.copy() for n, x in memory.arrays.items()}
    table = live(alone)
    updates = threading.Thread(
        target=lambda: [alone.step(*range(at, at + 10)) for at in range(0, V, 10)]
    )
    updates.start()
    roles.until(lambda: table.most, "the first update")  # the second one waits
    found = list(table.segments())
    updates.join(roles.HANG)
    assert not updates.is_alive() and 0 < table.most <= 12 * row * 1.5  # with numbers and steps
    for i, n in enumerate(table.names):
        np.testing.assert_array_equal(np.concatenate([x.rows[i] for x in found]), wanted[n])
    unread = live(alone, patience=0.01)
    alone.step(*range(V))
    with pytest.raises(
        StateError,
        match="the checkpoint of params/emb is written too slowly: no rows were written for",
    ):
        next(unread.segments())
    alone.step(3)


def size_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_a_checkpoint_has_the_rows_that_are_made(tmp_path: Path) -> None:
    """A checkpoint contains existing rows only.

    To read all rows, pass the init, which generates the others.
    """
    init = lambda key: (
        p := {"emb": jax.random.normal(key, (1 << 20, 16))},
        optax.adagrad(0.1).init(p),
    )
    step = dtrans.make_train_step(lambda p, ids: jnp.mean(p["emb"][ids] ** 2), optax.adagrad(0.1))
    plan = dtrans.pserver(dtrans.trace(step, *jax.eval_shape(init, KEY), jnp.zeros(3, int)),
                          dtrans.trace(init, KEY),
                          sparse={EMB: dtrans.Rows()})  # fmt: skip
    ((endpoint, programs),) = plan.servers.items()
    with dtrans.Executor() as exe:
        update = SyncUpdate(
            ServerUpdate.from_program(programs.main), exe.run(programs.startup, KEY), 1
        )
    update.rows(EMB, np.arange(599) * 1000, train=True)
    # The first save of a process also imports modules: 8 MB that do not belong to the checkpoint.
    first = {**update.state, **update.snapshot(roles.HANG)}
    dtrans.checkpoint.save(tmp_path / "0", plan, endpoint, first)
    state = {**update.state, **update.snapshot(roles.HANG)}
    tracemalloc.start()
    dtrans.checkpoint.save(tmp_path / "1", plan, endpoint, state)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 << 20 and size_of(tmp_path / "1") < 300_000  # of 128 MiB
    held = dtrans.checkpoint.restore(tmp_path / "1", plan, endpoint)
    assert len(held[EMB].table.segment.present) == 599 and size_of(tmp_path / "1") > 599 * 2 * 64


def saved_table(path: Path, tx: Any, **options: Any) -> dict[str, np.ndarray]:
    """Save a server with some existing rows. Return all rows."""
    plan = planned(tx, **options)
    (endpoint,) = plan.servers
    alone = Alone(tx, **options)
    for ids in ((3, 8, 20), (8, 59), (20,)):
        alone.step(*ids)
    alone.server_tables.evict(EMB, 2, NONE)
    state = {**alone.update.state, **alone.update.tables()}
    dtrans.checkpoint.save(path, plan, endpoint, state)
    return {n: np.asarray(x) for n, x in state.items()}


def test_any_job_goes_on_from_the_rows_that_were_made(tmp_path: Path) -> None:
    """One device, ranks and servers without tables continue. The init generates missing rows."""
    tx = optax.adam(0.1)
    wanted = saved_table(tmp_path / "1", tx, update="lazy")
    plan = planned(tx, 2, update="lazy")
    with pytest.raises(
        StateError,
        match=r"lacks 5[0-9] of 60 rows of params/emb, .*load\(path, main, startup",
    ):
        dtrans.checkpoint.load(tmp_path / "1", plan.main)
    params, opt_state = dtrans.checkpoint.load(tmp_path / "1", plan.main, plan.startup)
    np.testing.assert_array_equal(params["emb"], wanted[EMB])
    np.testing.assert_array_equal(opt_state[0].nu["emb"], wanted["opt_state/0/nu/emb"])
    dense = dtrans.pserver(plan.main, plan.startup, pservers="127.0.0.1:1,127.0.0.1:2",
                           placement=dtrans.BlockPlacement(min_block_size=1))  # fmt: skip
    held = [dtrans.checkpoint.restore(tmp_path / "1", dense, ep) for ep in dense.servers]
    np.testing.assert_array_equal(
        np.concatenate([x[f"params/emb.block{i}"] for i, x in enumerate(held)]), wanted[EMB]
    )
    job = dtrans.sharding(
        plan.main, plan.startup, degree=2, slices=dtrans.Slicing(min_slice_size=0)
    ).simulate()
    np.testing.assert_array_equal(
        job.params(dtrans.checkpoint.restore(tmp_path / "1", job))["emb"], wanted[EMB]
    )
    job = plan.on_mesh()
    np.testing.assert_array_equal(
        job.params(dtrans.checkpoint.restore(tmp_path / "1", job))["emb"], wanted[EMB]
    )
    states = {ep: dtrans.checkpoint.restore(tmp_path / "1", plan, ep) for ep in plan.servers}
    np.testing.assert_array_equal(dtrans.checkpoint.gather(plan, states)[0]["emb"], wanted[EMB])
    for ep in plan.servers:  # saved again, without a job in between
        dtrans.checkpoint.save(tmp_path / "2", plan, ep, states[ep], tag="2")
    again, _ = dtrans.checkpoint.load(tmp_path / "2", plan.main, plan.startup)
    np.testing.assert_array_equal(again["emb"], wanted[EMB])


def test_an_init_that_makes_other_rows_is_refused(tmp_path: Path) -> None:
    tx = optax.adagrad(0.1)
    saved_table(tmp_path / "1", tx)
    other = planned(tx, emb=lambda key: 2 * drawn(key))
    why = (
        "the checkpoint lacks rows of params/emb that no step looked up. The init of this plan "
        "would generate other rows than the init of the job that wrote the checkpoint"
    )
    with pytest.raises(StateError, match=why):
        dtrans.checkpoint.load(tmp_path / "1", other.main, other.startup)
    ((endpoint, programs),) = other.servers.items()
    state = dtrans.checkpoint.restore(tmp_path / "1", other, endpoint)
    with pytest.raises(StateError, match=why):
        SyncUpdate(ServerUpdate.from_program(programs.main), state, 1)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_of_tables_has_small_pages() -> None:
    """If the system uses huge pages by default, each row would take 2 MiB."""
    maps = Path("/proc/self/smaps")
    if not maps.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system does not say")
    memory = LazyArray((1 << 20, 16), np.float32)
    at, flags = memory.array.ctypes.data, dict[range, list[str]]()
    for line in maps.read_text().splitlines():
        if edges := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            mapping = range(*(int(x, 16) for x in edges.groups()))
        elif line.startswith("VmFlags:"):
            flags[mapping] = line.split()[1:]
    assert "nh" in next(found for mapping, found in flags.items() if at in mapping)


def test_pages_after_the_last_row_are_given_back() -> None:
    """Giving back half of 64 MiB reduces the memory by 32 MiB, and does not change the other
    half."""
    rows, some = 1 << 20, 8 << 20
    memory = LazyArray((rows, 16), np.float32)
    before = resident()
    memory.array[:] = np.arange(rows, dtype=np.float32)[:, None]
    assert resident() - before > (64 << 20) - some
    memory.give_back(rows // 2 + 1)
    assert abs(resident() - before - (32 << 20)) < some
    assert memory.array[rows // 2, 0] == rows // 2


@pytest.mark.parametrize(
    ("tx", "update"),
    [(optax.adagrad(0.1), None), (optax.adam(0.1), "dense")],
    ids=["adagrad", "adam"],
)
def test_scattered_rows_of_a_large_table_take_little_memory(tx: Any, update: Any) -> None:
    """Rows use at most four times their bytes.

    After the other rows are evicted, they use a tenth.
    """
    count, rows = 50_000, 100_000_000
    init = lambda key: (p := {"emb": jax.random.normal(key, (rows, 16))}, tx.init(p))
    step = dtrans.make_train_step(lambda p, ids: jnp.mean(p["emb"][ids] ** 2), tx)
    main = dtrans.trace(step, *jax.eval_shape(init, KEY), jnp.zeros(3, int))
    plan = dtrans.pserver(
        main, dtrans.trace(init, KEY), pservers=free_endpoints(1), sparse={EMB: dtrans.Rows(update)}
    )
    (programs,) = plan.servers.values()
    with dtrans.Executor() as exe:
        state = exe.run(programs.startup, KEY)
    before = resident()
    memory = memory_of(ServerUpdate.from_program(programs.main), state)[EMB]
    some = np.sort(np.random.default_rng(0).choice(rows, count, replace=False)).astype(np.int32)
    assert memory.maker is not None
    memory.maker(some)  # compiles the init
    assert resident() - before < 100 << 20, "no memory for rows that do not exist"

    before, ideal = resident(), count * sum(x[:1].nbytes for x in memory.arrays.values())
    found = memory.rows(some, train=True)
    assert resident() - before < 4 * ideal and ideal < memory.nbytes < 4 * ideal
    assert found[:3].tolist() == memory.maker(some)[0][:3].tolist()

    memory.stored.changed_at[: count // 10] = 9  # as if the eighth step had changed these rows
    memory.step, before = 8, memory.nbytes
    assert memory.evict(2, NONE) == count - count // 10
    assert memory.nbytes < before / 2
    np.testing.assert_array_equal(memory.rows(some, train=False), found)
    assert memory.changed(0)[0].tolist() == some[: count // 10].tolist()
    assert memory.stored.count == count // 10


# -- processes -------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
import jax, jax.numpy as jnp, numpy as np, optax
import dtrans

tx, key = optax.adagrad(0.1), jax.random.key(7)
init = lambda key: (params := {"emb": jax.random.normal(key, (60, 3))}, tx.init(params))
step = dtrans.make_train_step(lambda p, ids: jnp.mean(p["emb"][ids] ** 2), tx)
role = dtrans.Role.from_env()
main = dtrans.trace(step, *jax.eval_shape(init, key), jnp.zeros(4, int))
plan = dtrans.pserver(main, dtrans.trace(init, key), pservers=role.pservers,
                      trainers=role.trainers, sparse={"params/emb": dtrans.Rows()},
                      batch="local", placement=dtrans.BlockPlacement(min_block_size=1))
with plan.on_cluster(deadline=60) as job:
    if not role.is_trainer:
        job.serve(job.init(key))
        sys.exit()
    state, said = job.init(key), []
    for at in range(4):
        state, _ = job.step(state, 10 * at + 4 * role.trainer_id + np.arange(4))
        if at % 2:
            said.append(job.tables.evict("params/emb", 2))
    changes = job.tables.changed("params/emb", 2)
    created = sum(x.created for x in job.tables.report())
    said += [changes.step, changes.ids.tolist(), changes.gone.tolist(), created]
    first = jax.jit(init)(key)[0]["emb"]
    assert np.array_equal(job.tables.lookup("params/emb", np.arange(10)), first[:10])
    assert np.array_equal(job.tables.lookup("params/emb", changes.ids), changes.rows)
    with open(os.path.join(sys.argv[1], str(role.trainer_id)), "w") as file:
        file.write(repr(said))
"""


def test_roles_as_processes(tmp_path: Path) -> None:
    """Both trainers get the same rows as one device."""
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "dtrans.cli", "launch", "--trainers", "2", "--pservers", "2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run([*launch, str(tmp_path / "script.py"), str(tmp_path)],
                           capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": path}, timeout=120)  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [*range(20, 28), *range(30, 38)]
    wanted = [0, 16, 4, rows, [*range(8), *range(10, 18)], 16]
    assert [(tmp_path / str(k)).read_text() for k in range(2)] == [repr(wanted)] * 2
