"""Row filters of tables: rows that servers store after several updates, or with a probability."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_table import EMB, KEY, NONE, Alone, D, V, drawn, gradient_rows, planned, run, serve
from role_threads import HANG, RoleThreads
from table_jobs import (
    DENSE,
    OPTIMIZERS,
    batches,
    close,
    init,
    loss,
    outcome,
    planned as planned_job,
)

import dtrans
from dtrans.errors import ConfigError, StateError
from dtrans.ops import BACKUP
from dtrans.protocol.server_blocks import RowGradient
from dtrans.run.distributed.role import Role
from dtrans.run.net.generation_log import GenerationLog, GenerationRecord
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.tables.row_draws import RowDraws
from dtrans.run.parameter_server.tables.sent_tables import received_tables, sent_arrays
from dtrans.run.parameter_server.update import ServerUpdate
from dtrans.run.role_jobs.trainer_job import TrainerJob


STEPS = [(3, 8), (3,), (8, 20), (3, 8), (3, 8, 20), (20, 31)]
# with admit_count=3: the ids of the rows that each of these steps changes
CHANGED = [(), (), (), (3, 8), (3, 8), (20,)]


def reference(tx: Any, changed: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the table after updates whose gradients are zero except in the rows `changed`."""
    params = {"emb": jax.jit(drawn)(KEY)}
    state = tx.init(params)
    for step, (ids, kept) in enumerate(zip(STEPS, changed, strict=False)):
        rows = gradient_rows(step, len(ids))
        gradient = np.zeros((V, D), np.float32)
        for i, row in zip(ids, rows, strict=True):
            if i in kept:
                gradient[i] = row
        updates, state = tx.update({"emb": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["emb"])


UPDATES = {
    "sgd": (optax.sgd(0.1), None),
    "adagrad": (optax.adagrad(0.1), None),
    "momentum, dense": (optax.sgd(0.1, 0.9), "dense"),
    "adam, dense": (optax.adam(0.1), "dense"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_the_third_update_of_a_row_admits_it(name: str) -> None:
    tx, update = UPDATES[name]
    alone = Alone(tx, update=update, admit_count=3)
    for at, ids in enumerate(STEPS):
        alone.step(*ids)
        wanted = reference(tx, CHANGED[: at + 1])
        np.testing.assert_allclose(alone.rows(*range(V)), wanted, rtol=2e-6, atol=1e-6)
        (report,) = alone.server_tables.report()
        assert report.created == len({i for changed in CHANGED[: at + 1] for i in changed})
    waiting = np.delete(np.arange(V), [3, 8, 20])
    np.testing.assert_array_equal(alone.rows(*waiting), alone.first[waiting])
    assert alone.changed(0) == ([3, 8, 20], [])
    np.testing.assert_array_equal(np.asarray(alone.update.tables()[EMB])[waiting],
                                  alone.first[waiting])  # fmt: skip


def test_a_lazy_update_begins_with_the_initial_state_of_a_row() -> None:
    """The moments of a row start at its admission, with the step count of the optimizer."""
    alone, other = (Alone(optax.adam(0.1), update="lazy", admit_count=n) for n in (3, 1))
    for ids in STEPS[:3]:
        alone.step(*ids)
        other.step()
    alone.step(*STEPS[3])
    other.step(*STEPS[3])
    np.testing.assert_array_equal(alone.rows(3, 8), other.rows(3, 8))


def test_a_count_of_one_is_no_filter() -> None:
    assert dtrans.Rows(admit_count=1).row_filter is None
    assert "row filter" not in str(planned(optax.sgd(0.1), admit_count=1))


def test_an_evicted_row_is_counted_from_zero() -> None:
    alone = Alone(optax.adagrad(0.1), admit_count=3)
    for ids in STEPS:
        alone.step(*ids)
    assert alone.server_tables.evict(EMB, 1, NONE) == 2  # 3 and 8; rows that wait stay counted
    alone.step(3, 31)
    assert alone.changed(6) == ([], [3, 8])
    alone.step(3, 31)
    # row 31 had waited since the sixth step; row 3 waits again
    assert alone.changed(6) == ([31], [3, 8])
    np.testing.assert_array_equal(alone.rows(3), alone.first[[3]])
    alone.step(3)
    assert alone.changed(6) == ([3, 31], [8])
    assert not np.array_equal(alone.rows(3), alone.first[[3]])


def test_a_limit_counts_admitted_rows() -> None:
    alone = Alone(optax.sgd(0.1), admit_count=2, limit=2)
    alone.step(3, 8, 20)
    alone.step(3, 8)
    assert alone.server_tables.report()[0].created == 2
    says = "params/emb has 2 rows and a limit of 2 rows, but the step needs 1 more"
    with pytest.raises(StateError, match=says):
        alone.step(20)


# -- copies of the state ---------------------------------------------------------------------------


def from_snapshot(alone: Alone) -> Callable[[], Alone]:
    """Return a function that starts a server from a snapshot of now. It is read when called."""
    state = {**alone.update.state, **alone.update.snapshot(9.0)}
    return lambda: Alone(optax.adagrad(0.1), before=state, admit_count=3)


def from_old_state(alone: Alone) -> Callable[[], Alone]:
    """Return a function that starts a server from the state that a snapshot at a failure contains."""
    (memory,) = alone.update._tables.values()
    state = {**alone.update.state, **memory.snapshot(None)}
    return lambda: Alone(optax.adagrad(0.1), before=state, admit_count=3)


def from_backup(alone: Alone) -> Callable[[], Alone]:
    """Return a function that starts a server from the arrays that a primary sends to a backup."""
    (programs,) = planned(optax.adagrad(0.1), admit_count=3).servers.values()
    update = ServerUpdate.from_program(programs.main)
    sent = {n: x.copy() for n, x in sent_arrays(alone.update._tables)[0]}
    state = {**alone.update.state, **received_tables(update, programs.startup, sent)}
    return lambda: Alone(optax.adagrad(0.1), before=state, admit_count=3)


@pytest.mark.parametrize("copy", [from_snapshot, from_old_state, from_backup])
@pytest.mark.parametrize("at", range(1, len(STEPS)))
def test_a_copy_of_a_server_has_its_counts(copy: Any, at: int) -> None:
    """Updates after the copy do not change the counts of the copy."""
    alone = Alone(optax.adagrad(0.1), admit_count=3)
    for ids in STEPS[:at]:
        alone.step(*ids)
    start = copy(alone)
    for ids in STEPS[at:]:
        alone.step(*ids)
    again = start()
    assert again.steps == at
    for ids in STEPS[at:]:
        again.step(*ids)
    np.testing.assert_array_equal(again.rows(*range(V)), alone.rows(*range(V)))
    assert again.changed(0) == alone.changed(0)
    assert [x.created for x in again.server_tables.report()] == [3]


@pytest.mark.parametrize("options", [{"admit_count": 3}, {"admit_probability": 0.5}])
def test_a_checkpoint_has_the_counts(
    role_threads: RoleThreads, tmp_path: Path, options: Any
) -> None:
    """A job continues on other servers with the bits of an undisturbed job."""
    tx = optax.adagrad(0.1)

    def train(job: Any, steps: range) -> Any:
        state = job.init(KEY)
        for at in steps:
            state, _ = job.step(state, np.resize(STEPS[at], 3))
            if at == 2:
                job.save("half")
        made = sum(x.created for x in job.tables.report())
        return job.tables.lookup(EMB, np.arange(V)), made, job.tables.changed(EMB, 0).ids

    plan = planned(tx, 2, **options)
    first = lambda job, k: train(job, range(6))
    (wanted,) = run(role_threads, plan, first, checkpoints=tmp_path)
    again = planned(tx, 3, place="bucket", buckets=7, **options)
    restored = lambda job: dtrans.checkpoint.restore(tmp_path / "half", job)
    (found,) = run(role_threads, again, lambda job, k: train(job, range(3, 6)), state=restored)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert found[1] == (3 if "admit_count" in options else 4)


# -- jobs ------------------------------------------------------------------------------------------


def filtered_device(tx: Any, given: Any, admits: Callable[[np.ndarray, int], np.ndarray]) -> Any:
    """Train on one device, with a gradient of zero for the rows that are not admitted.

    Args:
      admits: function that returns a mask of rows from the number of their updates, with the
        current one, and the number of earlier steps.
    """
    params, state = init(tx, jax.random.key(0))
    counts = np.zeros(len(params["emb"]), int)
    admitted = np.zeros(len(counts), bool)
    losses = []
    for step, (ids, y) in enumerate(given):
        value, grads = jax.value_and_grad(loss)(params, ids, y)
        touched = np.isin(np.arange(len(counts)), ids)
        counts += touched
        admitted |= touched & admits(counts, step)
        grads["emb"] = jnp.where(admitted[:, None], grads["emb"], 0)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return params, losses


def drawn_masks(probability: float) -> Callable[[np.ndarray, int], np.ndarray]:
    draws = RowDraws("params/emb", [jax.random.key(0)])
    return lambda counts, step: draws(np.arange(len(counts)), step) < probability


FILTERS: dict[str, tuple[dict[str, Any], Any]] = {
    "count": ({"admit_count": 2}, lambda counts, step: counts >= 2),
    "probability": ({"admit_probability": 0.4}, drawn_masks(0.4)),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["adagrad", "adam", "clip"])
@pytest.mark.parametrize("kind", FILTERS)
def test_a_job_is_one_device_without_the_dropped_gradients(
    role_threads: RoleThreads, kind: str, name: str
) -> None:
    """A row of two trainers is counted once in each step."""
    options, admits = FILTERS[kind]
    tx, given = OPTIMIZERS[name], batches(5)
    wanted = filtered_device(tx, given, admits)
    plain = filtered_device(tx, given, lambda counts, step: np.ones(len(counts), bool))
    assert not np.allclose(wanted[0]["emb"], plain[0]["emb"])
    for trainers, servers, place in ((1, 1, "range"), (2, 3, "bucket")):
        sparse = {"params/emb": dtrans.Rows("dense", place=place, buckets=7, **options)}
        plan = planned_job(tx, sparse, trainers, servers)
        (params, _), _ = outcome(role_threads, plan, given)
        role_threads.forget()
        close(params, wanted[0])


@pytest.mark.parametrize("mode", [dtrans.Sync(), dtrans.Async()], ids=["sync", "async"])
def test_an_update_beyond_the_limit_ends_the_server(role_threads: RoleThreads, mode: Any) -> None:
    """A server that refuses only the last gradient would count the update again without it."""
    plan = planned(optax.sgd(0.1), 1, 2, mode, admit_count=2, limit=2)
    (ep,) = plan.servers
    connected = threading.Barrier(2, timeout=HANG)

    def train(k: int) -> None:
        role = Role("trainer", 2, (ep,), trainer_id=k)
        with TrainerJob(plan, role, {"deadline": HANG}) as job:
            state = job.init(KEY)
            connected.wait()
            for _ in range(2):
                state, _ = job.step(state, np.array([3, 8, 20]))

    role_threads.start(ep, serve, plan, ep)
    for k in range(2):
        role_threads.start(f"trainer {k}", train, k)
    says = "params/emb has 0 rows and a limit of 2 rows, but the step needs 3 more"
    ended = role_threads.end(ep)
    assert isinstance(ended, StateError) and says in str(ended)
    for k in range(2):
        assert f"it ended: {says}" in str(role_threads.end(f"trainer {k}"))


def test_rows_that_are_requested_ahead_are_the_newest(role_threads: RoleThreads) -> None:
    """Before its admission, a row that was requested ahead has its initial value."""
    plan = planned(optax.adagrad(0.1), 2, admit_count=2)
    given = [(np.resize(ids, 3),) for ids in STEPS]

    def train(job: Any, k: int) -> Any:
        losses = [float(loss) for _, loss in job.steps(job.init(KEY), given)]
        return losses, job.tables.lookup(EMB, np.arange(V))

    def train_without(job: Any, k: int) -> Any:
        state, losses = job.init(KEY), []
        for batch in given:
            state, loss = job.step(state, *batch)
            losses.append(float(loss))
        return losses, job.tables.lookup(EMB, np.arange(V))

    (found,), (wanted,) = (run(role_threads, plan, way) for way in (train, train_without))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.usefixtures("x64")
def test_a_replay_has_the_bits_of_the_job(role_threads: RoleThreads, tmp_path: Path) -> None:
    given = batches(5)
    for options, _ in FILTERS.values():
        sparse = {"params/emb": dtrans.Rows(**options)}
        plan = planned_job(optax.adagrad(0.1), sparse, 2, 2)
        (params, _), _ = outcome(role_threads, plan, given)
        role_threads.forget()
        folder = tmp_path / next(iter(options))
        folder.mkdir()
        log = GenerationLog(folder)
        log.add(GenerationRecord(0, None, (0, 1)))
        again, _ = dtrans.replay(
            plan, log.path, lambda step: given[step], init=(jax.random.key(0),), stop=len(given)
        )
        jax.tree.map(np.testing.assert_array_equal, params, again)


def test_tables_of_one_update_are_filtered_separately() -> None:
    """The two tables form a group, whose rows one program updates."""
    tx, key = optax.adagrad(0.1), jax.random.key(0)

    def start(key: Any) -> Any:
        keys = jax.random.split(key)
        params = {n: jax.random.normal(k, (9, D)) for n, k in zip("ab", keys, strict=True)}
        return params, tx.init(params)

    step = dtrans.make_train_step(lambda p, i: jnp.sum(p["a"][i] ** 2 + p["b"][i] ** 3), tx)
    sparse = {"params/a": dtrans.Rows(admit_count=2), "params/b": dtrans.Rows()}
    plan = dtrans.pserver(
        dtrans.trace(step, *start(key), jnp.zeros(2, int)), dtrans.trace(start, key), sparse=sparse
    )
    (programs,) = plan.servers.values()
    with dtrans.Executor() as exe:
        state = exe.run(programs.startup, key)
    update = SyncUpdate(ServerUpdate.from_program(programs.main), state, 1)
    assert [len(group.tables) for group in update._groups] == [2]
    ids = np.array([4, 6], np.int32)
    initial = jax.jit(start)(key)[0]
    first = np.asarray(initial["a"])
    update.create_rows({"params/a": ids, "params/b": ids})
    for at in range(2):
        grads = {f"params/{n}@GRAD": RowGradient(ids, gradient_rows(at, 2)) for n in "ab"}
        update.begin(grads, frozenset([0]), at)
        made = [x.created for x in update.server_tables.report()]
        assert made == [2 * at, 2]
    a, b = (update.rows(f"params/{n}", ids, train=False) for n in "ab")
    one = Alone(tx)  # `params/a` had one update, with the second gradient
    one.step()
    one.step(4, 6)
    np.testing.assert_allclose(a - first[ids], one.rows(4, 6) - one.first[[4, 6]], rtol=1e-4)
    assert not np.isclose(b, initial["b"][ids]).any()


def test_asynchronous_servers_count_each_message() -> None:
    """Delay compensation uses the received value of admitted rows only."""
    mode = dtrans.Async(delay=dtrans.DelayCompensation(0.5))
    for delayed, how in ((False, dtrans.Async()), (True, mode)):
        (programs,) = planned(optax.sgd(0.1), 1, 2, how, admit_count=2).servers.values()
        with dtrans.Executor() as exe:
            state = exe.run(programs.startup, KEY)
        update = ServerUpdate.from_program(programs.main)
        blocks, first = BlockUpdates(update, state), np.asarray(jax.jit(drawn)(KEY))
        gradient = update.served.tables[EMB].gradients[0]
        state = dict(blocks.state)
        for at, ids in enumerate(((3, 8), (8, 20), (3,))):
            numbers = np.array(ids, np.int32)
            sent = {gradient: RowGradient(numbers, gradient_rows(at, len(ids)))}
            received = blocks.rows(EMB, numbers, state, train=True)
            if delayed:
                sent[EMB + BACKUP] = RowGradient(numbers, received)
            new, values = blocks.begin(state)
            state |= new | blocks.apply(EMB, sent, {**state, **new}, values)
        rows = blocks.rows(EMB, np.arange(V, dtype=np.int32), state, train=False)
        wanted = first.copy()
        wanted[8] -= 0.1 * gradient_rows(1, 2)[0]
        wanted[3] -= 0.1 * gradient_rows(2, 1)[0]
        np.testing.assert_allclose(rows, wanted, rtol=1e-5, atol=1e-6)
        assert blocks.server_tables.report()[0].created == 2


# -- draws -----------------------------------------------------------------------------------------


def test_draws_depend_on_the_seed_the_row_and_the_step() -> None:
    args, ids = [np.array([0, 7], np.uint32)], np.arange(100_000)
    draws = RowDraws("params/emb", args)
    numbers = draws(ids, 3)
    np.testing.assert_array_equal(draws(ids[::7], 3), numbers[::7])
    np.testing.assert_array_equal(RowDraws("params/emb", args)(ids, 3), numbers)
    others = (
        draws(ids, 4),
        RowDraws("params/tags", args)(ids, 3),
        RowDraws("params/emb", [np.array([0, 8], np.uint32)])(ids, 3),
        draws(ids + 1, 3),
    )
    for other in others:
        # independent uniform numbers: the correlation is below five standard deviations
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 5 / np.sqrt(len(ids))
    assert abs((numbers < 0.1).mean() - 0.1) < 5 * np.sqrt(0.09 / len(ids))
    assert numbers.min() >= 0 and numbers.max() < 1


def test_each_update_of_a_row_is_one_draw() -> None:
    alone = Alone(optax.sgd(0.1), admit_probability=0.3)
    draws, admitted = RowDraws(EMB, [KEY]), np.zeros(V, bool)
    for step in range(6):
        alone.step(*range(V))
        admitted |= draws(np.arange(V), step) < 0.3
        changed = (alone.rows(*range(V)) != alone.first).any(1)
        np.testing.assert_array_equal(changed, admitted)
    assert 0 < admitted.sum() < V


# -- plans -----------------------------------------------------------------------------------------


def test_a_plan_says_that_results_differ() -> None:
    plan = planned(optax.sgd(0.1), admit_count=3)
    line = "row filter of params/emb: admit_count=3; servers drop the gradients of a row before its"
    assert any(note.startswith(line) and "differ from one device" in note for note in plan.notes)
    plan = planned(optax.sgd(0.1), admit_probability=0.25)
    assert any("params/emb: admit_probability=0.25;" in note for note in plan.notes)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", [dtrans.Sync(), dtrans.Async()], ids=["sync", "async"])
def test_a_verified_plan_with_a_filter_is_not_complete(mode: Any) -> None:
    sparse = {"params/emb": dtrans.Rows("dense", admit_count=3)}
    report = planned_job(optax.adam(0.1), sparse, 2, 2, mode=mode).verify()
    assert report.equal and not report.complete
    assert "the row filter of params/emb (admit_count=3): verify() compares" in str(report)
    assert planned_job(optax.adam(0.1), DENSE, 2, 2, mode=mode).verify().complete


@pytest.mark.parametrize("option", ["admit_count=3", "admit_probability=0.5"])
@pytest.mark.parametrize(
    "tx, mode, rows, why",
    [
        (optax.adamw(0.1), dtrans.Sync(), {"update": "dense"}, "also changes rows that no trainer"),
        (optax.lamb(0.1), dtrans.Sync(), {"update": "dense"}, "also changes rows that no trainer"),
        (optax.sgd(0.1), dtrans.Geo(), {}, "with dtrans.Geo trainers update the rows"),
        (
            optax.sgd(0.1),
            dtrans.Async(delay=dtrans.DelayCompensation(decay=0.5)),
            {"update": "lazy"},
            r"with dtrans.DelayCompensation\(decay=0.5\) servers store a mean square",
        ),
        (
            optax.sgd(0.1),
            dtrans.Sync(),
            {"emb": lambda key: jax.random.orthogonal(key, V)[:, :D]},
            "a server cannot compute single rows of the initial params/emb",
        ),
    ],
    ids=["adamw", "lamb", "geo", "adaptive", "orthogonal"],
)
def test_a_filter_that_cannot_work_is_refused(
    tx: Any, mode: Any, rows: Any, why: str, option: str
) -> None:
    name, value = option.split("=")
    with pytest.raises(ConfigError, match=f"{option}.*{why}.*leave {name} out"):
        planned(tx, 1, 1, mode, **{name: type(3 if name == "admit_count" else 0.5)(value)}, **rows)


def test_a_job_in_one_process_has_no_filter() -> None:
    plan = planned(optax.sgd(0.1), admit_count=3)
    for way in ("on_mesh", "simulate"):
        with pytest.raises(ConfigError, match=f"{way}: .*admit_count=3.*leave admit_count out, or"):
            getattr(plan, way)()


@pytest.mark.parametrize(
    "options, why",
    [
        ({"admit_count": 0}, "admit_count must be a number of updates from 1"),
        ({"admit_count": 1 << 21}, "admit_count must be a number of updates from 1"),
        ({"admit_count": 2.0}, "admit_count must be a number of updates from 1"),
        ({"admit_probability": 1.0}, "admit_probability must be a number between 0 and 1"),
        ({"admit_probability": 0}, "admit_probability must be a number between 0 and 1"),
        ({"admit_probability": "0.5"}, "admit_probability must be a number between 0 and 1"),
        (
            {"admit_count": 3, "admit_probability": 0.5},
            "admit_count is 3 and admit_probability is 0.5; leave out one",
        ),
    ],
)
def test_a_wrong_filter_is_refused(options: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        dtrans.Rows(**options)
