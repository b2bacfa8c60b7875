"""Tables with GEO-SGD: each trainer stores the rows that it has looked up, and pushes and pulls
rows.

The tests compare with one device, with GEO-SGD without tables, and with Paddle's formulas, written
in Python.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import role_threads as roles
from hypothesis import given as drawn, strategies as st
from role_threads import RoleThreads, StepOrder, free_endpoints, serve
from table_jobs import (
    DENSE,
    LAZY,
    OPTIMIZERS,
    ROWS,
    D,
    V,
    batches,
    close,
    init,
    loss,
    one_device,
    planned,
)

import dtrans
from dtrans._jax import equations
from dtrans.errors import BatchError, ConfigError, PeerError, WireError
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol import wire
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.protocol.server.trainer_state import Trainer
from dtrans.protocol.server_blocks import RowGradient, TableSpec
from dtrans.protocol.tables.cached_rows import CachedRows
from dtrans.protocol.tables.changed_rows import CachedBlock, ChangedInbox, UnseenChanges
from dtrans.protocol.tables.id_slots import IdSlots
from dtrans.protocol.tables.table_rows import RowRun
from dtrans.protocol.trainer.trainer_line import TrainerLine
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.update import ServerUpdate
from dtrans.run.role_jobs.server_job import ServerJob
from dtrans.run.role_jobs.trainer_job import TrainerJob


pytestmark = pytest.mark.usefixtures("x64")

BUCKETS = {"params/emb": dtrans.Rows("dense", place="bucket", buckets=7)}


def geo(every: int = 1, *, waits: bool = True) -> dtrans.Geo:
    return dtrans.Geo(every, block_on_pull=waits)


def job_of(plan: PServerPlan, k: int) -> TrainerJob:
    return TrainerJob(
        plan,
        Role("trainer", plan.trainers, tuple(plan.servers), trainer_id=k),
        {"deadline": roles.HANG},
    )


def kept_by(job: TrainerJob, table: str = "params/emb") -> CachedRows:
    running = job._executor._fabric._background._geo
    assert running is not None
    return running.rows(table)


@dataclasses.dataclass
class Ended:
    """Final values of a trainer: the ids and values of its stored rows, and the servers' values
    that it knows."""

    state: Any
    losses: list[float]
    ids: np.ndarray
    rows: np.ndarray
    old: np.ndarray


def train(
    plan: PServerPlan, k: int, given: Sequence[Any], turns: StepOrder | None = None, *key: Any
) -> Ended:
    with job_of(plan, k) as job:
        state, losses = job.init(*(key or (jax.random.key(0),))), []
        for batch in given:
            step = lambda s=state, b=batch: job.step(s, *b)
            state, value = turns.take(k, step) if turns else step()
            losses.append(float(value))
        if turns:
            turns.end()
        if not plan.tables.of:
            none = np.empty(0)
            return Ended(state, losses, none, none, none)
        kept = kept_by(job)
        order = np.argsort(kept.ids)
        ids = kept.ids[order]
        return Ended(state, losses, ids, kept.take(ids, len(ids))[0], kept.old[order])


def run(role_threads: RoleThreads, plan: PServerPlan, given: Sequence[Sequence[Any]],
        turns: StepOrder | None = None,
        *key: Any) -> tuple[dict[str, np.ndarray], list[Ended]]:  # fmt: skip
    """Return the final parameters of the servers, and the result of each trainer."""
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, *(key or (jax.random.key(0),)))
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", train, plan, k, given[k], turns, *key)
    ended = role_threads.all()
    role_threads.forget()
    found = {}
    for leaf, blocks in plan.placement.blocks.items():
        whole = np.empty(plan.main.inputs[leaf].shape, plan.main.inputs[leaf].dtype)
        for b in blocks:
            assert b.span is not None
            whole[b.span.numbers()] = np.asarray(ended[b.endpoint][b.name])
        found[leaf.removeprefix("params/")] = whole
    return found, [ended[f"trainer {k}"] for k in range(plan.trainers)]


# -- one trainer -----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("every, servers", [(1, 1), (3, 2)])
@pytest.mark.parametrize("name, sparse", [("sgd", DENSE), ("adagrad", BUCKETS), ("clip", DENSE)])
def test_one_trainer_is_one_device(
    role_threads: RoleThreads, name: str, sparse: Any, every: int, servers: int
) -> None:
    """Results also equal GEO-SGD without tables.

    At the end, servers have all changes, pushed or not.
    """
    tx, given = OPTIMIZERS[name], batches(5)
    given[1] = (np.full_like(given[1][0], 7), given[1][1])  # one row in each step
    want, losses = one_device(tx, given)
    on_servers, (ended,) = run(
        role_threads, planned(tx, sparse, 1, servers, mode=geo(every)), [given]
    )
    np.testing.assert_allclose(ended.losses, losses, rtol=1e-12)
    close(on_servers, {n: np.asarray(x) for n, x in want.items()})
    np.testing.assert_allclose(ended.rows, want["emb"][ended.ids], rtol=1e-12, atol=1e-12)
    assert np.array_equal(ended.ids, np.unique(np.concatenate([np.ravel(ids) for ids, _ in given])))
    assert ended.state[0]["emb"].shape == (0, D)
    without, (alone,) = run(role_threads, planned(tx, None, 1, servers, mode=geo(every)), [given])
    np.testing.assert_allclose(ended.losses, alone.losses, rtol=1e-12)
    close(on_servers, without)


def test_another_batch_shape_goes_on_with_the_same_rows(role_threads: RoleThreads) -> None:
    tx, given = OPTIMIZERS["adagrad"], [b for n in (6, 3) for b in batches(2, n)]
    want, losses = one_device(tx, given)
    on_servers, (ended,) = run(
        role_threads, planned(tx, DENSE, 1, 2, mode=geo(2, waits=False)), [given]
    )
    np.testing.assert_allclose(ended.losses, losses, rtol=1e-12)
    close(on_servers, {n: np.asarray(x) for n, x in want.items()})


def test_two_tables_beside_what_is_a_trainers_own(role_threads: RoleThreads) -> None:
    """Test frozen leaves, statistics, counters, and leaves that only decay.

    A loop looks up rows in one of two tables.
    """
    tx = optax.chain(
        optax.clip_by_global_norm(0.3), optax.adagrad(optax.cosine_decay_schedule(0.3, 9))
    )
    names = ("emb", "w", "words")

    def start(key: Any) -> Any:
        params, _ = init(tx, key)
        params["words"] = jax.random.uniform(key, (50, D))
        own = {
            "frozen": jnp.full(D, 2.0),
            "seen": jnp.zeros(()),
            "count": jnp.zeros((), int),
            "decays": jnp.ones(4),
        }
        return {**params, **own}, tx.init(params)

    def step(params: Any, state: Any, ids: Any, y: Any) -> Any:
        def of(p: Any) -> Any:
            turn = lambda h, i: (jnp.tanh(h * params["frozen"] + p["words"][i]), None)
            h, _ = jax.lax.scan(turn, jnp.ones((ids.shape[0], D)), ids.T)
            return loss(p, ids, y + h.sum(1))

        trained = {n: params[n] for n in names}
        value, grads = dtrans.value_and_grad(of)(trained)
        updates, state = tx.update(grads, state, trained)
        own = {
            "seen": params["seen"] + jnp.sum(y),
            "count": params["count"] + 1,
            "decays": 0.5 * params["decays"],
        }
        return {**params, **optax.apply_updates(trained, updates), **own}, state, value

    key, given = jax.random.key(0), batches(4)
    main = dtrans.trace(step, *jax.eval_shape(start, key), *given[0])
    plan = dtrans.pserver(main, dtrans.trace(start, key), pservers=free_endpoints(2), mode=geo(3),
                          sparse={
        "params/emb": dtrans.Rows(), "params/words": dtrans.Rows(place="bucket")})  # fmt: skip
    assert plan.tables.names == ("params/emb", "params/words")
    assert plan.frozen == ("params/count", "params/decays", "params/frozen", "params/seen")
    assert sizes_in(plan.trainer).isdisjoint({V, 50})
    on_servers, (ended,) = run(role_threads, plan, [given])
    (want, want_state), losses = start(key), []
    for batch in given:
        want, want_state, value = jax.jit(step)(want, want_state, *batch)
        losses.append(float(value))
    np.testing.assert_allclose(ended.losses, losses, rtol=1e-12)
    close(on_servers, {n: np.asarray(want[n]) for n in names})
    params, state = ended.state
    close({n: params[n] for n in params if n not in ("emb", "words")},
          {n: want[n] for n in want if n not in ("emb", "words")})  # fmt: skip
    assert int(state[1][1].count) == int(want_state[1][1].count) == 4
    assert [x.shape for x in jax.tree.leaves(state) if x.ndim == 2] == [(0, D), (0, D)]


def test_ids_that_a_table_does_not_have_are_named_and_negative_ones_counted_from_the_end(
    role_threads: RoleThreads,
) -> None:
    tx, (given, wrong) = OPTIMIZERS["sgd"], batches(2)
    given[0][:2, 0], wrong[0][3, 0] = -1, V
    plan = planned(tx, DENSE, 1, 2, mode=geo())

    def trainer() -> Any:
        with job_of(plan, 0) as job:
            state = job.init(jax.random.key(0))
            with pytest.raises(
                BatchError, match=r"lookup 0 of params/emb asks for row 40 at \[3\]"
            ):
                job.step(state, *wrong)
            job.step(state, *given)
            return job.tables.lookup("params/emb", [V - 1])

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer", trainer)
    np.testing.assert_allclose(
        role_threads.all()["trainer"][0], one_device(tx, [given])[0]["emb"][-1], rtol=1e-12
    )


# -- several trainers ------------------------------------------------------------------------------


class Formulas:
    """GEO-SGD of tables by Paddle's formulas, with arrays of all rows.

    Some rows do not exist yet.
    """

    def __init__(self, tx: Any, trainers: int, *, lazy: bool) -> None:
        self.step, self.lazy, self.n = jax.jit(dtrans.make_train_step(loss, tx)), lazy, trainers
        params, state = init(tx, jax.random.key(0))
        self.server = {n: np.array(x) for n, x in params.items()}
        self.local = [{n: np.array(x) for n, x in params.items()} for _ in range(trainers)]
        self.old = [{n: np.array(x) for n, x in params.items()} for _ in range(trainers)]
        self.state = [state] * trainers
        self.has = [np.zeros(V, bool) for _ in range(trainers)]
        self.news = [np.zeros(V, bool) for _ in range(trainers)]
        self.touched = [np.zeros(V, bool) for _ in range(trainers)]
        self.losses: list[list[float]] = [[] for _ in range(trainers)]

    def make(self, k: int, batch: Any) -> None:
        here = np.zeros(V, bool)
        here[np.unique(batch[0])] = True
        new = here & ~self.has[k]
        self.local[k]["emb"][new] = self.old[k]["emb"][new] = self.server["emb"][new]
        self.has[k] |= here
        self.touched[k] |= here
        made, state, value = self.step(self.local[k], self.state[k], *batch)
        stays = lambda x, old: (
            np.where(here[:, None], x, old) if self.lazy and np.shape(x) == (V, D) else x
        )
        self.state[k] = jax.tree.map(stays, state, self.state[k])
        self.local[k] = {n: np.array(stays(x, self.local[k][n])) for n, x in made.items()}
        self.losses[k].append(float(value))

    def push(self, k: int) -> None:
        for n, at in (("emb", self.touched[k]), ("w", slice(None))):
            delta = (self.local[k][n][at] - self.old[k][n][at]) / self.n
            self.old[k][n][at] += delta
            self.server[n][at] += delta
        for other in range(self.n):
            if other != k:
                self.news[other] |= self.touched[k] & self.has[other]
        self.touched[k] = np.zeros(V, bool)

    def pull(self, k: int) -> None:
        for n, at in (("emb", self.news[k]), ("w", slice(None))):
            self.local[k][n][at] += self.server[n][at] - self.old[k][n][at]
            self.old[k][n][at] = self.server[n][at]
        self.news[k] = np.zeros(V, bool)


def half_shared(k: int, steps: int) -> list[Any]:
    """Return batches of one of two trainers.

    Some rows are only in its batches, and some are shared.
    """
    rng = np.random.default_rng(k)
    own = rng.integers(0, 8, (steps, ROWS, 2)) + 8 * k
    shared = rng.integers(16, 24, (steps, ROWS, 2))
    ids = np.where(rng.random(own.shape) < 0.5, own, shared)
    return [(x, rng.normal(size=ROWS)) for x in ids]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "order", [[0, 1] * 5, [0, 0, 0, 1, 1, 0, 1, 1, 1, 0]], ids=["in turns", "unevenly"]
)
@pytest.mark.parametrize(
    "name, sparse", [("sgd", DENSE), ("adagrad", BUCKETS), ("adam", LAZY), ("clip", DENSE)]
)
def test_two_trainers_do_what_the_formulas_say(
    role_threads: RoleThreads, name: str, sparse: Any, order: list[int], every: int
) -> None:
    tx, given = OPTIMIZERS[name], [half_shared(k, order.count(k)) for k in range(2)]
    plan = planned_for(tx, sparse, 2, given[0][0], geo(every))
    on_servers, ended = run(role_threads, plan, given, StepOrder(order))
    want = Formulas(tx, 2, lazy=sparse is LAZY)
    done = [0, 0]
    for k in order:
        want.make(k, given[k][done[k]])
        done[k] += 1
        if done[k] % every == 0:
            want.push(k)
            want.pull(k)
    for k in range(2):
        np.testing.assert_allclose(ended[k].losses, want.losses[k], rtol=1e-12)
        assert np.array_equal(ended[k].ids, np.flatnonzero(want.has[k]))
        np.testing.assert_allclose(
            ended[k].rows, want.local[k]["emb"][ended[k].ids], rtol=1e-12, atol=1e-12
        )
        np.testing.assert_allclose(
            ended[k].old, want.old[k]["emb"][ended[k].ids], rtol=1e-12, atol=1e-12
        )
    for k in range(2):  # the changes that were not pushed before the trainers closed
        if done[k] % every:
            want.push(k)
    close(on_servers, want.server)


def planned_for(tx: Any, sparse: Any, trainers: int, batch: Any, mode: Any,
                fn: Callable[..., Any] = loss,
                start: Any = None, servers: int = 2) -> Any:  # fmt: skip
    start, key = start or (lambda key: init(tx, key)), jax.random.key(0)
    main = dtrans.trace(dtrans.make_train_step(fn, tx), *jax.eval_shape(start, key), *batch)
    return dtrans.pserver(main, dtrans.trace(start, key), pservers=free_endpoints(servers),
                          trainers=trainers,
                          mode=mode, placement=dtrans.BlockPlacement(min_block_size=1),
                          sparse=sparse)  # fmt: skip


def scaled(params: Any, ids: jax.Array, by: jax.Array) -> jax.Array:
    """Return a loss whose gradient is `by` in each entry of the looked-up rows."""
    return by * jnp.sum(params["emb"][ids])


def only_a_table(trainers: int, mode: Any, size: int, servers: int = 2, rows: int = V) -> Any:
    """Return the plan of a step with only a table, which begins with zeros."""
    tx = optax.sgd(1.0)
    start = lambda key: (p := {"emb": jnp.zeros((rows, 2))}, tx.init(p))
    batch = np.zeros(size, int), np.float64(1)
    return planned_for(
        tx, {"params/emb": dtrans.Rows()}, trainers, batch, mode, scaled, start, servers
    )


def test_rows_that_another_has_changed_come_with_a_pull_or_when_they_are_looked_up(
    role_threads: RoleThreads,
) -> None:
    """Trainer 1 gives servers half of its changes.

    When it looks up the rows again, it divides the rest again.
    """
    steps: list[list[tuple[list[int], int]]] = [
        [([1, 2], 0), ([2, 2], 0), ([3, 1], 0)],
        [([2, 3], 4), ([5, 5], 1)],
    ]
    given = [[(np.array(ids), np.float64(by)) for ids, by in of] for of in steps]
    plan, seen = only_a_table(2, geo(), 2), {}

    def trainer(k: int, turns: StepOrder) -> None:
        with job_of(plan, k) as job:
            state = job.init(jax.random.key(0))
            for i, batch in enumerate(given[k]):

                def step(state: Any = state, batch: Any = batch, i: int = i) -> Any:
                    state, _ = job.step(state, *batch)
                    kept = kept_by(job)
                    ids = np.sort(kept.ids)
                    seen[k, i] = dict(
                        zip(ids.tolist(), kept.take(ids, len(ids))[0][:, 0].tolist(), strict=True)
                    )
                    return state

                state = turns.take(k, step)
            turns.end()

    turns = StepOrder([0, 1, 0, 1, 0])
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    for k in range(2):
        role_threads.start(f"trainer {k}", trainer, k, turns)
    role_threads.all()
    assert seen[0, 0] == {1: 0, 2: 0}
    assert seen[1, 0] == {2: -4, 3: -4}
    assert seen[0, 1] == {1: 0, 2: -2}, "half of it came with the pull"
    assert seen[1, 1] == {2: -4, 3: -4, 5: -2}, "what is its own stays as it is"
    assert seen[0, 2] == {1: 0, 2: -2, 3: -2}, "row 3 came when it was looked up"


@pytest.mark.parametrize("servers", [1, 3])
def test_no_change_is_lost_where_nobody_waits(role_threads: RoleThreads, servers: int) -> None:
    """Two trainers push and pull in the background.

    At the end, each trainer knows the servers' values of all its rows. The servers have all changes
    of the trainers, except the changes that are not pushed yet. The numbers are exact.
    """
    plan, steps, unit = only_a_table(2, geo(waits=False), 6, servers), 12, 2.0**20
    given = [np.random.default_rng(k).integers(0, V // 2, (steps, 6)) for k in range(2)]
    rest = threading.Barrier(2)

    def trainer(k: int) -> Any:
        with job_of(plan, k) as job:
            state = job.init(jax.random.key(0))
            for ids in given[k]:
                state, _ = job.step(state, ids, np.float64(unit))
            for _ in range(
                4
            ):  # each trainer waits for the answer to the previous push, which is empty
                rest.wait(roles.HANG)
                state, _ = job.step(state, np.full(6, V - 1), np.float64(0))
            kept = kept_by(job)
            ids, old = kept.ids.copy(), kept.old.copy()
            return ids, old, kept.take(ids, len(ids))[0] - old

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    for k in range(2):
        role_threads.start(f"trainer {k}", trainer, k)
    ended = role_threads.all()
    table = np.concatenate(
        [np.asarray(ended[ep][n]) for ep in plan.servers for n in ended[ep] if "emb" in n]
    )
    want = np.zeros_like(table)
    for k in range(2):
        ids, old, left = ended[f"trainer {k}"]
        np.testing.assert_array_equal(old, table[ids])
        assert np.abs(left).max() > 0
        want[ids] -= left
        want -= unit * np.bincount(np.ravel(given[k]), minlength=V)[:, None]
    np.testing.assert_array_equal(table, want)


# -- what it costs ---------------------------------------------------------------------------------


def sizes_in(program: Any) -> set[int]:
    return {
        n for e in equations(program.jaxpr) for v in (*e.invars, *e.outvars) for n in v.aval.shape
    }


@pytest.mark.parametrize("name, sparse", [("adagrad", DENSE), ("adam", LAZY), ("clip", BUCKETS)])
def test_no_value_of_a_trainer_has_the_rows_of_the_table(name: str, sparse: Any) -> None:
    with jax.enable_x64(False):
        plan = planned(OPTIMIZERS[name], sparse, 2, 2, mode=geo())
        for program in (plan.trainer_program(0), plan.trainer_startup_program(0)):
            assert sizes_in(program).isdisjoint({V, V // 2}), program
            assert sizes_in(program.specialize_flat([*program.inputs.values()])).isdisjoint(
                {V, V // 2}
            )
        assert V in sizes_in(planned(OPTIMIZERS[name], None, 2, 2, mode=geo()).trainer_program(0))
        assert [op.type for op in plan.trainer_startup.ops if op.type == "fake_init"] == [
            "fake_init"
        ]
        ops = [op.type for op in plan.trainer.ops if op.role in ("rpc", "dist")]
        assert ops == ["split_ids", "prefetch", "send"]


def test_what_is_kept_is_what_was_looked_up(
    role_threads: RoleThreads, caplog: pytest.LogCaptureFixture
) -> None:
    """No array of the trainer grows with the table."""
    rows, rng = 50_000_000, np.random.default_rng(0)
    plan = only_a_table(1, geo(3), 50, rows=rows)
    given = [(rng.integers(0, rows, 50), np.float64(1)) for _ in range(8)]

    def trainer() -> Any:
        with job_of(plan, 0) as job:
            state = job.init(jax.random.key(0))
            for batch in given:
                state, _ = job.step(state, *batch)
            kept = kept_by(job)
            arrays = [
                kept._old,
                kept._is_touched,
                *kept._stored,
                kept._slots._ids,
            ]
            there = sum(x.nbytes for x in arrays) + kept._slots._directory.nbytes
            return len(kept), kept.nbytes, there

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    caplog.set_level("INFO", "dtrans.trainer")
    role_threads.start("trainer", trainer)
    count, nbytes, there = role_threads.all()["trainer"]
    assert count == len(np.unique([ids for ids, _ in given]))
    assert nbytes == count * 2 * 2 * 8  # local and old rows of two numbers
    assert there < 8 * nbytes
    assert f"trainer 0: params/emb: {count:,} local rows, {nbytes:,} bytes" in caplog.text


def test_the_transpiler_plans_them() -> None:
    tx = OPTIMIZERS["adagrad"]
    sparse = {"params/emb": dtrans.paddle.Embedding(is_distributed=True)}
    t = dtrans.GeoSgdTranspiler(
        dtrans.DistributeTranspilerConfig(sparse=sparse, geo_sgd_need_push_nums=3)
    )
    main = dtrans.trace(
        dtrans.make_train_step(loss, tx), *init(tx, jax.random.key(0)), *batches(1)[0]
    )
    startup = dtrans.trace(lambda key: init(tx, key), jax.random.key(0))
    t.transpile(1, main, trainers=2, startup_program=startup, pservers=",".join(free_endpoints(2)))
    ops = [op.type for op in t.get_trainer_program().ops if op.role in ("rpc", "dist")]
    assert ops == ["split_ids", "prefetch", "send"]
    assert [row[:2] for row in t.plan.rows[:2]] == [
        ("params/emb.block0", "buckets 0:1 of 2"), ("params/emb.block1", "buckets 1:2 of "
"2")]  # fmt: skip


@pytest.mark.parametrize("servers", [1, 3])
def test_bytes_are_those_of_the_rows(
    role_threads: RoleThreads, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test new rows, rows that were looked up since the last push, and rows that another trainer
    changed."""
    sent: dict[str, int] = {}
    framed, say, send_blocks = wire.framed, TrainerLine._say, TrainerLine.send_blocks
    row = 2 * 8

    def counted(op: str, blocks: Any = (), *stamp: Any, **fields: Any) -> Any:
        blocks = list(blocks)
        sent[op] = sent.get(op, 0) + sum(np.asarray(x).nbytes for _, x in blocks)
        return framed(op, blocks, *stamp, **fields)

    def counted_frames(self: Any, op: str, frames: Any = (), **fields: Any) -> None:
        frames = list(frames)
        sent[op] = sent.get(op, 0) + sum(np.asarray(x).nbytes for x in frames)
        say(self, op, frames, **fields)

    def only_deltas(self: Any, blocks: Any, *args: Any, **fields: Any) -> None:
        blocks = list(blocks)
        assert all(n.endswith(".delta") for n, _ in blocks)
        send_blocks(self, blocks, *args, **fields)

    monkeypatch.setattr(wire, "framed", counted)
    monkeypatch.setattr(TrainerLine, "_say", counted_frames)
    monkeypatch.setattr(TrainerLine, "send_blocks", only_deltas)
    plan = only_a_table(2, geo(2), 4, servers)
    of = lambda *ids: (np.array(ids), np.float64(1))
    # each trainer pushes and pulls after its second step, in the order of the turns below
    given = [[of(1, 1, 2, 30), of(2, 2, 2, 2)], [of(2, 3, 3, 30), of(4, 5, 30, 3)]]
    run(role_threads, plan, given, StepOrder([0, 1, 0, 1]))
    # trainer 0 has changed rows 2 and 30, which trainer 1 also stores
    asked, touched, changed = (
        3 + 3 + 2,
        3 + 5,
        0 + 2,
    )
    assert sent["prefetch"] == asked * 4
    assert sent["rows"] == asked * row
    assert sent["row_ids"] == touched * 4
    assert sent["send"] == touched * row
    assert sent["changed"] == changed * (row + 4)


def test_a_plan_says_the_most_that_is_sent() -> None:
    plan = only_a_table(3, geo(4), 5)
    touched, row = 20, 2 * 8
    assert plan.bytes_per_step == {
        "send": touched * (row + 8),
        "recv": touched * row + V * (row + 4),
    }
    note = (
        "table params/emb: 40 rows, at most 5 looked up by a trainer in a step, and kept by the "
        "trainer, at most 1,600 bytes"
    )
    assert any(n.startswith(f"{note} in 4 steps; dense") for n in plan.notes), plan.notes
    plan.costs()


# -- the optimizer's state of a row ----------------------------------------------------------------


def test_the_state_of_a_row_begins_as_the_init_makes_it(role_threads: RoleThreads) -> None:
    """The initial state may be a row of the parameters.

    The optimizer draws rows back to these initial values.
    """

    def back(g: Any, first: Any, params: Any) -> Any:
        return jax.tree.map(lambda g, f, p: -0.1 * g - 0.1 * (p - f), g, first, params), first

    tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.copy, params), back)
    plan = planned(tx, LAZY, 1, 2, mode=geo())
    _, state = init(tx, jax.random.key(0))
    ids, y = batches(1)[0]

    def trainer() -> Any:
        with job_of(plan, 0) as job:
            job.step(job.init(jax.random.key(0)), ids, y)
            kept = kept_by(job)
            return kept.ids.copy(), [*kept.take(kept.ids, len(kept)), kept.old.copy()]

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer", trainer)
    found, (rows, first, server) = role_threads.all()["trainer"]
    np.testing.assert_array_equal(first, state["emb"][found])
    want = one_device(tx, [(ids, y)])[0]["emb"]
    np.testing.assert_allclose(rows, want[found], rtol=1e-12)
    np.testing.assert_allclose(server, rows, rtol=1e-12)
    assert np.abs(rows - first).max() > 1e-3


def test_the_optimizers_state_of_rows_is_no_array(role_threads: RoleThreads) -> None:
    plan, sgd = (planned(OPTIMIZERS[n], LAZY, 1, 1, mode=geo()) for n in ("adam", "sgd"))
    for p in (plan, sgd):
        (ep,) = p.servers
        role_threads.start(ep, serve, p, ep, jax.random.key(0))
    with job_of(plan, 0) as job:
        state = job.init(jax.random.key(0))
        with pytest.raises(
            ConfigError,
            match=r"opt_state/0/mu/emb cannot be returned: it contains all rows of a table, "
            r"but this",
        ):
            job.opt_state(state)
    with job_of(sgd, 0) as job:
        job.opt_state(job.init(jax.random.key(0)))
    role_threads.all()


# -- what servers are asked for beside -------------------------------------------------------------


def test_lookups_export_and_parameters_are_those_of_the_servers(
    role_threads: RoleThreads, tmp_path: Any
) -> None:
    """Changes that are not pushed are not visible.

    A lookup does not add a row to the rows that the trainer stores.
    """
    tx, given = OPTIMIZERS["sgd"], batches(3)
    plan = planned(tx, DENSE, 1, 2, mode=geo(2))
    half, whole = (jax.tree.map(np.asarray, one_device(tx, given[:n])[0]) for n in (2, 3))
    some = np.array([[39, 0], [3, 3]])

    def trainer() -> Any:
        with job_of(plan, 0) as job:
            state = job.init(jax.random.key(0))
            for batch in given:
                state, _ = job.step(state, *batch)
            before = len(kept_by(job))
            np.testing.assert_allclose(
                job.tables.lookup("params/emb", some), half["emb"][some], rtol=1e-12
            )
            params = job.params(state)
            np.testing.assert_allclose(params["emb"], half["emb"], rtol=1e-12)
            np.testing.assert_allclose(params["w"], whole["w"], rtol=1e-12)
            job.tables.export("params/emb", tmp_path / "emb.npy")
            np.testing.assert_allclose(np.load(tmp_path / "emb.npy"), half["emb"], rtol=1e-12)
            assert len(kept_by(job)) == before
            job.step(state, *given[0])  # the trainer continues

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer", trainer)
    role_threads.all()


def test_servers_save_what_was_pushed_and_the_job_goes_on(
    role_threads: RoleThreads, tmp_path: Any
) -> None:
    tx, given = OPTIMIZERS["sgd"], batches(4)
    plan = planned(tx, DENSE, 1, 2, mode=geo(2, waits=False))
    half, whole = (one_device(tx, given[:n])[0] for n in (2, 4))

    def serving(ep: str) -> Any:
        with ServerJob(
            plan, Role("pserver", 1, tuple(plan.servers), current_endpoint=ep), {"deadline": 9.0}
        ) as job:
            return job.serve(job.init(jax.random.key(0)), checkpoints=tmp_path)

    def trainer() -> Any:
        with job_of(plan, 0) as job:
            state = job.init(jax.random.key(0))
            for batch in given[:3]:
                state, _ = job.step(state, *batch)
            with pytest.raises(PeerError, match="'.hidden' is not a valid name of a checkpoint"):
                job.save(".hidden")
            job.save("three")
            job.step(state, *given[3])

    for ep in plan.servers:
        role_threads.start(ep, serving, ep)
    role_threads.start("trainer", trainer)
    ended = role_threads.all()
    saved, _ = dtrans.checkpoint.load(tmp_path / "three", plan.main, plan.startup)
    close(jax.tree.map(np.asarray, saved), jax.tree.map(np.asarray, half))
    table = np.concatenate(
        [np.asarray(ended[ep][n]) for ep in plan.servers for n in ended[ep] if "emb" in n]
    )
    np.testing.assert_allclose(table, whole["emb"], rtol=1e-12)


def test_who_starts_again_keeps_no_rows(role_threads: RoleThreads) -> None:
    """Changes that were not pushed are lost.

    The trainer looks rows up again, and servers do not report rows that it stored before.
    """
    plan = only_a_table(1, geo(5), 2, 1)
    one = np.array([1, 2]), np.float64(1)

    def trainer() -> Any:
        with job_of(plan, 0) as job:
            job.step(job.init(jax.random.key(0)), *one)
            state = job.init(jax.random.key(0))
            assert len(kept_by(job)) == 0
            job.step(state, *one)
            return kept_by(job).take(np.array([1, 2]), 2)[0].tolist()

    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer", trainer)
    ended = role_threads.all()
    assert ended["trainer"] == [[-2, -2], [-2, -2]]
    assert np.asarray(ended[ep]["params/emb"])[:3].tolist() == [[0, 0], [-2, -2], [-2, -2]]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("name, sparse, said", [
    ("adam", DENSE, "other rows change too .*pass sparse={'params/emb': "
"dtrans.Rows\\(update='lazy'\\)}"),
    ("momentum", DENSE, "other rows change too"),
    ("lamb", DENSE, "the update changes all rows .*another optimizer"),
    ("sgd", {"params/other": dtrans.Rows()}, "sparse contains 'params/other'"),
])  # fmt: skip
def test_tables_that_cannot_be_are_named(name: str, sparse: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(OPTIMIZERS[name], sparse, 1, 1, mode=geo())


def test_auto_takes_what_a_trainer_can_keep() -> None:
    auto = lambda name: planned_for(OPTIMIZERS[name], "auto", 2, batches(1, 3)[0], geo())
    assert auto("adagrad").tables.names == ("params/emb",)
    plan = auto("adam")
    assert plan.tables.names == ()
    assert "other rows change too" in plan.tables.others["params/emb"]
    assert V in sizes_in(plan.trainer)


def test_state_that_is_not_made_row_by_row_is_named() -> None:
    tx = optax.contrib.schedule_free_sgd(0.1)

    def start(key: Any) -> Any:
        params = {"emb": jax.nn.initializers.orthogonal()(key, (V, D)), "w": jnp.ones(2 * D)}
        return params, tx.init(params)

    with pytest.raises(ConfigError, match="the init computes opt_state/z/emb as one array"):
        planned_for(tx, LAZY, 1, batches(1)[0], geo(), start=start)


def test_a_limit_of_rows_is_the_servers(role_threads: RoleThreads) -> None:
    plan = planned(OPTIMIZERS["sgd"], {"params/emb": dtrans.Rows(limit=3)}, 1, 1, mode=geo())
    (ep,) = plan.servers
    role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer", train, plan, 0, batches(1))
    assert "a limit of 3 rows" in str(role_threads.end("trainer"))
    role_threads.end(ep)


# -- messages --------------------------------------------------------------------------------------


def server_of(plan: PServerPlan, said: list[Any]) -> AsyncServer:
    (programs,) = plan.servers.values()
    update = ServerUpdate.from_program(programs.main)
    state = dict(
        zip(programs.startup.out_names, programs.startup.compiled(jax.random.key(0)), strict=True)
    )
    trainers = TrainerRegistry(update.served, deadline=9.0, plan={}, secret="")
    trainers.known |= {k: Trainer(f"session {k}", bytes([k])) for k in range(plan.trainers)}
    blocks = BlockUpdates(update, state)
    say = lambda to, op, arrays=(), **fields: said.append((to[0], op, dict(arrays), fields))
    return AsyncServer(update.served, blocks, blocks.state, trainers, say)


def test_a_server_tells_each_trainer_of_its_own_rows_once() -> None:
    said: list[Any] = []
    server = server_of(only_a_table(2, geo(), 4, 1), said)
    ask = lambda k, ids, train=True: [
        server.prefetch(k, wire.parse(frames))
        for frames in wire.framed("prefetch", [("params/emb", np.array(ids, np.int32))],
                                  step=server._steps.of_trainer(k).number,
                                  counts={"params/emb": len(ids)}, train=train)
    ]  # fmt: skip

    def push(k: int, ids: list[int]) -> None:
        step = {"step": server._steps.begun[k].number}
        name = "params/emb.delta"
        (frames,) = wire.framed(
            "row_ids", [(name, np.array(ids, np.int32))], counts={name: len(ids)}, **step
        )
        server.row_ids(k, wire.parse(frames))
        (frames,) = wire.framed("send", [(name, np.ones((len(ids), 2)))], **step)
        server.send(k, wire.parse(frames))

    def pull(k: int, changed: bool = True) -> list[int] | None:
        said.clear()
        fields = {"step": server._steps.begun[k].number, "changed": changed, "blocks": []}
        server.recv(k, wire.Message("recv", fields))
        assert [op for _, op, *_ in said] == (["changed", "blocks"] if changed else ["blocks"])
        if not changed:
            return None
        to, _, arrays, fields = said[0]
        assert to == k
        assert np.array_equal(arrays["rows"], np.asarray(server.state["params/emb"])[arrays["ids"]])
        assert fields["count"] == len(arrays["ids"])
        return arrays["ids"].tolist()

    ask(0, [1, 2, 3])
    ask(1, [2, 3, 4])
    ask(1, [9], train=False)  # a lookup for evaluation
    push(0, [1, 3, 9])
    push(0, [2])
    assert pull(0) == []
    assert pull(1) == [2, 3]
    assert pull(1) == []
    push(1, [2, 4])
    push(0, [4])
    assert pull(0) == [2]
    pull(1, changed=False)  # the trainer starts again without rows
    push(0, [2, 3])
    assert pull(1) == []
    assert pull(0) == []


def test_who_keeps_rows_where_nobody_may_is_refused() -> None:
    server = server_of(planned(OPTIMIZERS["sgd"], DENSE, 2, 1, mode=dtrans.Async()), [])
    with pytest.raises(
        WireError,
        match="trainer 0 sent `changed`, which is for tables of GEO-SGD; pserver .* has no such "
        "table",
    ):
        server.recv(0, wire.Message("recv", {"step": 0, "changed": True, "blocks": []}))


@pytest.mark.parametrize("table, count, ids, said", [
    ("other", 2, [0, 1], "sent 2 changed rows of 'other', which were not requested"),
    ("emb", 5, [0, 1, 2, 3, 4], "sent 5 changed rows of 'emb', which were not requested"),
    ("emb", -1, [], "sent -1 changed rows of 'emb'"),
    ("emb", 2, [1, 1], "are not increasing numbers from 0 to 3"),
    ("emb", 2, [3, 4], "are not increasing numbers from 0 to 3"),
    ("emb", 2, [-1, 0], "are not increasing numbers from 0 to 3"),
    ("emb", 2, [1], "did not send all changed rows of emb"),
])  # fmt: skip
def test_rows_that_a_trainer_did_not_ask_to_be_told_of_are_refused(
    table: str, count: int, ids: list[int], said: str
) -> None:
    inbox = ChangedInbox({("ep", "emb"): CachedBlock("emb", RowRun(8, 4), (2,), np.float64)})
    arrays = [("ids", np.array(ids, np.int32)), ("rows", np.zeros((len(ids), 2)))]
    (frames,) = wire.framed("changed", arrays, step=0, table=table, count=count)
    with pytest.raises(PeerError, match=said):
        inbox.take("ep", wire.parse(frames))
        inbox.check_complete("ep")


def test_rows_that_have_changed_come_from_several_servers_in_several_messages() -> None:
    spans, rng = (RowRun(0, 400_000), RowRun(400_000, 400_000)), np.random.default_rng(0)
    inbox = ChangedInbox(
        {
            (f"ep{i}", f"emb.block{i}"): CachedBlock("emb", x, (2,), np.float64)
            for i, x in enumerate(spans)
        }
    )
    rows = rng.normal(size=(300_000, 2))
    for i in range(2):
        ids = np.sort(rng.permutation(400_000)[: len(rows)]).astype(np.int32)
        messages = list(wire.framed("changed", [("ids", ids), ("rows", rows)], step=0,
                                    table=f"emb.block{i}",
                                    count=len(ids)))  # fmt: skip
        assert len(messages) > 1
        for frames in messages:
            inbox.take(f"ep{i}", wire.parse(frames))
        inbox.check_complete(f"ep{i}")
    found = inbox.rows()["emb"]
    assert np.array_equal(found.ids[len(rows) :], ids + 400_000)
    assert np.array_equal(found.rows[len(rows) :], rows)


# -- data structures -------------------------------------------------------------------------------


@drawn(st.lists(st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=60), max_size=12))
def test_slots_are_found_again(groups: list[list[int]]) -> None:
    slots, want = IdSlots(), dict[int, int]()
    for group in groups:
        ids = np.array(group, np.int32)
        assert slots.find(ids).tolist() == [want.get(i, -1) for i in group]
        new = ids[slots.find(ids) < 0]
        slots.add(new)
        want |= {i: len(want) + at for at, i in enumerate(new.tolist())}
        assert len(slots) == len(want)
        assert slots.find(np.array([*want], np.int32)).tolist() == [*want.values()]


def test_slots_of_numbers_that_lie_side_by_side_or_apart() -> None:
    for ids in (np.arange(100_000), np.arange(0, 2**31, 2**16), np.arange(0, 2**31, 2**31 // 997)):
        slots = IdSlots()
        slots.add(ids)
        assert np.array_equal(slots.find(ids), np.arange(len(ids)))
        assert np.all(slots.find(ids[1:] - 1)[ids[1:] - 1 != ids[:-1]] == -1)


@pytest.mark.parametrize("seed", range(3))
def test_changes_are_told_of_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = UnseenChanges({"emb": TableSpec(10, (), np.float32, {}, on_trainers=True)}, 3)
    has: list[set[int]] = [set(), set(), set()]
    news: list[set[int]] = [set(), set(), set()]
    for op in rng.choice(["ask", "change", "take", "forget"], 500, p=[0.3, 0.45, 0.2, 0.05]):
        k, ids = int(rng.integers(3)), np.unique(rng.integers(0, 10, 4)).astype(np.int32)
        if op == "ask":
            rows.asked(k, "emb", ids)
            has[k] |= {*ids.tolist()}
        elif op == "change":
            rows.changed(k, "emb", ids)
            for other in {0, 1, 2} - {k}:
                news[other] |= {*ids.tolist()} & has[other]
        elif op == "take":
            assert rows.take(k, "emb").tolist() == sorted(news[k])
            news[k] = set()
        else:
            rows.forget(k)
            has[k], news[k] = set(), set()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_what_is_pushed_is_rounded_as_it_is_sent(dtype: Any) -> None:
    """So the old rows of the trainer equal the rows of the server, bit for bit."""
    kept, rng = CachedRows([np.empty((0, 3), dtype)]), np.random.default_rng(0)
    server = rng.normal(size=(20, 3)).astype(dtype)
    kept.add(np.arange(20), server)
    for _ in range(5):
        ids = np.unique(rng.integers(0, 20, 8))
        kept.put(ids, [kept.take(ids, len(ids))[0] + rng.normal(size=(len(ids), 3)).astype(dtype)])
        delta = kept.pushed(3)
        assert np.array_equal(delta.ids, ids) and delta.rows.dtype == server.dtype
        server = np.asarray(jax.jit(lambda w, i, d: w.at[i].add(d))(server, delta.ids, delta.rows))
        assert np.array_equal(kept.old, server)
    # a row that is not stored here is left out
    kept.pulled(RowGradient(np.array([3, 700]), np.ones((2, 3), dtype)))
    assert np.array_equal(kept.old[3], np.ones(3, dtype))
    assert len(kept) == 20
