"""Rows of tables that are requested before their step: the results of a job without such requests,
and the sent bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import role_threads as roles
from role_threads import RoleThreads, free_endpoints, serve
from table_jobs import (
    ASYNC,
    DENSE,
    LAZY,
    OPTIMIZERS,
    D,
    V,
    batches,
    close,
    init,
    loss,
    note_row_messages,
    one_device,
    planned,
)

import dtrans
from dtrans.errors import BatchError, ConfigError, StateError
from dtrans.protocol.tables import rows_ahead
from dtrans.protocol.trainer.trainer_steps import TrainerSteps
from dtrans.run.distributed.role import Role
from dtrans.run.role_jobs.server_job import ServerJob
from dtrans.run.role_jobs.trainer_job import TrainerJob


Train = Callable[[TrainerJob], Any]


def job_of(plan: Any, k: int) -> TrainerJob:
    return TrainerJob(
        plan,
        Role("trainer", plan.trainers, tuple(plan.servers), trainer_id=k),
        {"deadline": roles.HANG},
    )


def trained(threads: RoleThreads, plan: Any, train: Train, served: Any = None) -> Any:
    """Run a job.

    Return the parameters of trainer 0, which all trainers have, and the final state of the servers.
    """

    def run(k: int) -> Any:
        with job_of(plan, k) as job:
            return train(job)

    for ep in plan.servers:
        threads.start(ep, *((served, plan, ep) if served else (serve, plan, ep, jax.random.key(0))))
    for k in range(plan.trainers):
        threads.start(f"trainer {k}", run, k)
    ended = threads.all()
    threads.forget()
    held = [{n: np.asarray(x) for n, x in ended[ep].items()} for ep in plan.servers]
    return ended["trainer 0"], held


def looped(given: Sequence[Any], ahead: int | None) -> Train:
    """Return a function that takes steps with batches announced `ahead` steps before; None
    announces no batch."""

    def train(job: TrainerJob) -> Any:
        state, losses = job.init(jax.random.key(0)), []
        parts = [job.shard_batch(*x) for x in given]
        if ahead is None:
            for part in parts:
                state, value = job.step(state, *part)
                losses.append(float(value))
        else:
            for made in job.steps(state, parts, ahead):
                state = made[0]
                losses.append(float(made[1]))
        return job.params(state), losses

    return train


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], int]]:
    """Return a list that gets each message of rows: its kind, its fields, and the bytes of its
    arrays."""
    return note_row_messages(monkeypatch)


CASES = [
    (n, s, t)
    for n, s in (("sgd", DENSE), ("adagrad", DENSE), ("adam", DENSE), ("adam", LAZY))
    for t in (1, 2)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name, sparse, trainers", [*CASES, ("lamb", DENSE, 2)])
def test_bits_are_those_of_a_job_that_waits(
    role_threads: RoleThreads, name: str, sparse: Any, trainers: int, said: Any
) -> None:
    """Take ten steps in float32. Batches look up many rows of earlier batches."""
    given, ended = batches(10), []
    for ahead in (None, 3 if name == "adagrad" else 1):
        said.clear()
        ended.append(
            trained(
                role_threads, planned(OPTIMIZERS[name], sparse, trainers, 2), looped(given, ahead)
            )
        )
        asked = [f for op, f, _ in said if op == "prefetch" and f["train"]]
        assert sum("ahead" in f for f in asked) == (0 if ahead is None else 9 * trainers * 2)
        assert len(asked) == 10 * trainers * 2
    same(*ended)


def delayed(tx: Any, given: Sequence[Any], k: int) -> Any:
    """Return the results of one device whose gradients use rows without the last `k` updates."""

    @jax.jit
    def step(params: Any, opt_state: Any, rows: jax.Array, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)({**params, "emb": rows}, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, opt_state = init(tx, jax.random.key(0))
    tables, losses = [params["emb"]], []
    for t, batch in enumerate(given):
        params, opt_state, value = step(params, opt_state, tables[max(0, t - k)], *batch)
        tables.append(params["emb"])
        losses.append(float(value))
    return params, losses


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name, k, ahead, trainers",
    [("adam", 1, 1, 2), ("adagrad", 1, 2, 1), ("adam", 2, 2, 1), ("adagrad", 2, 3, 2)],
)
def test_stale_rows_are_those_of_exactly_so_many_updates_before(
    role_threads: RoleThreads, name: str, k: int, ahead: int, trainers: int
) -> None:
    """Rows may be announced any number of steps before.

    Rows requested during the step are current.
    """
    given, tx = batches(8), OPTIMIZERS[name]
    plan = planned(tx, {"params/emb": dtrans.Rows("dense", staleness=k)}, trainers, 2)
    found, _ = trained(role_threads, plan, looped(given, ahead))
    close(found, delayed(tx, given, k))
    with pytest.raises(AssertionError):
        close(found, delayed(tx, given, k - 1))


def test_only_rows_that_have_changed_are_sent_again(role_threads: RoleThreads, said: Any) -> None:
    """A server sends announced rows at the announcement.

    If a step has changed a row since, the server sends this row again, with its position.
    """
    ids = [np.arange(a, a + 12).reshape(6, 2) for a in (0, 8, 16, 16)]
    given = [(x, np.ones(6)) for x in ids]
    plan = planned(optax.sgd(0.1), DENSE, 2, 2)
    trained(role_threads, plan, looped(given, 1))
    row, number = D * 4, 4
    # each trainer has half of the batch, and an update by either changes announced rows of the
    # other
    again = [np.isin(after, before).sum() for before, after in itertools.pairwise(ids)]
    assert again == [4, 4, 12]
    announced = [n for op, f, n in said if op == "prefetch" and "ahead" in f]
    first = [n for op, f, n in said if op == "rows" and "ahead" in f and "counts" not in f]
    later = [(sum(f["counts"].values()), n) for op, f, n in said if "counts" in f and op == "rows"]
    assert sum(announced) == 3 * 12 * number and sum(first) == 3 * 12 * row
    assert sum(n for n, _ in later) == sum(again) and all(
        size == n * (row + number) for n, size in later
    )
    assert len(later) == 3 * 2 * 2


def test_rows_that_move_by_themselves_are_sent_once(role_threads: RoleThreads, said: Any) -> None:
    trained(
        role_threads,
        planned(optax.adam(0.1), DENSE, 1, 2),
        looped([(np.arange(12).reshape(6, 2), np.ones(6))] * 3, 1),
    )
    sent = [(f["last"], "counts" in f) for op, f, _ in said if op == "rows" and "ahead" in f]
    assert sent == [(True, False)] * 2 * 2
    assert sum(n for op, f, n in said if op == "rows" and "ahead" in f) == 2 * 12 * D * 4


def test_other_batches_than_were_announced(role_threads: RoleThreads, said: Any) -> None:
    """A step looks up its own rows, and drops other rows that were announced for the step.

    Rows for a skipped step are dropped, too.
    """
    given = batches(8)

    def train(job: TrainerJob, announces: bool = True) -> Any:
        state = job.init(jax.random.key(0))
        for t, batch in enumerate(given):
            if announces and t in (0, 1, 2, 4, 7):
                # announce batches 1 and 2 in order, another batch for step 3, the batch after it
                # for step 5, and a batch that no step uses
                other = {0: 1, 1: 2, 2: 6, 4: 6, 7: 0}[t]
                assert job.prefetch(*job.shard_batch(*given[other]))
            if t == 5:
                job.tables.lookup("params/emb", np.arange(V))
            state, _ = job.step(state, *job.shard_batch(*batch))
        return job.params(state)

    for sparse in (DENSE, LAZY):
        plans = [planned(optax.adam(0.1), sparse, 2, 2) for _ in range(2)]
        wanted = trained(role_threads, plans[0], lambda job: train(job, announces=False))
        said.clear()
        same(trained(role_threads, plans[1], train), wanted)
        assert (
            sum(op == "prefetch" and f["train"] and "ahead" not in f for op, f, _ in said)
            == 6 * 2 * 2
        )


@pytest.mark.parametrize("leaves", ["drop", "paddle"])
def test_a_trainer_leaves_with_rows_on_their_way(role_threads: RoleThreads, leaves: str) -> None:
    """The other trainers continue, with the results of a job without announcements."""
    given = batches(5)

    def train(job: TrainerJob, announces: bool) -> Any:
        state = job.init(jax.random.key(0))
        steps = 2 if job.role.trainer_id else 5
        for t in range(steps):
            if announces:
                job.prefetch(*job.shard_batch(*given[(t + 1) % 5]))
                job.prefetch(*job.shard_batch(*given[(t + 2) % 5])) if t == steps - 1 else None
            state, _ = job.step(state, *job.shard_batch(*given[t]))
        return None

    held = []
    for announces in (False, True):
        plan = planned(optax.adagrad(0.1), DENSE, 2, 2, on_trainer_exit=leaves)
        held.append(trained(role_threads, plan, lambda job, a=announces: train(job, a))[1])
    same([list(x.values()) for x in held[1]], [list(x.values()) for x in held[0]])


def test_a_row_that_is_not_there_is_named_before_anything_is_sent(
    role_threads: RoleThreads, said: Any
) -> None:
    def train(job: TrainerJob) -> Any:
        state = job.init(jax.random.key(0))
        (ids, y), after = batches(2)
        for wrong, row in ((V, "40"), (-V - 1, "-1")):
            bad = ids.copy()
            bad[3, 0] = wrong
            with pytest.raises(
                BatchError,
                match=rf"of params/emb asks for row {row} at \[3\]; the table has rows 0 to",
            ):
                job.prefetch(bad, y)
        assert not said
        assert job.prefetch(*after)
        for batch in ((ids, y), after):
            state, _ = job.step(state, *batch)
        return job.params(state)

    given = batches(2)
    (wanted, _), _ = trained(
        role_threads, planned(optax.sgd(0.1), DENSE, 1, 2), looped(given, None)
    )
    said.clear()
    same(trained(role_threads, planned(optax.sgd(0.1), DENSE, 1, 2), train)[0], wanted)


def test_batches_that_are_never_trained(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_ahead, "MOST", 3)

    def train(job: TrainerJob) -> Any:
        job.init(jax.random.key(0))
        for _ in range(3):
            job.prefetch(*batches(1)[0])
        with pytest.raises(
            StateError, match=r"job.prefetch has announced 3 batches that no step has used"
        ):
            job.prefetch(*batches(1)[0])
        job.close()
        with pytest.raises(StateError, match="is closed; create a new job"):
            job.prefetch(*batches(1)[0])

    trained(role_threads, planned(optax.sgd(0.1), DENSE, 1, 2), train)


def test_rows_that_state_decides_are_refused(role_threads: RoleThreads) -> None:
    tx = optax.sgd(0.1)

    def step(params: Any, opt_state: Any, ids: jax.Array, y: jax.Array) -> Any:
        order, rest = params["order"], {n: params[n] for n in ("emb", "w")}
        of = lambda p: jnp.mean((p["emb"][order[ids[:, 0]]] @ p["w"][:D] - y) ** 2)
        value, grads = jax.value_and_grad(of)(rest)
        updates, opt_state = tx.update(grads, opt_state, rest)
        return {**optax.apply_updates(rest, updates), "order": order}, opt_state, value

    def start(key: jax.Array) -> Any:
        params, opt_state = init(tx, key)
        return {**params, "order": jnp.arange(V)[::-1]}, opt_state

    key = jax.random.key(0)
    main = dtrans.trace(step, *start(key), *batches(1)[0])
    plan = dtrans.pserver(
        main, dtrans.trace(start, key), pservers=free_endpoints(1), trainers=1, sparse=DENSE
    )

    def train(job: TrainerJob) -> Any:
        state = job.init(key)
        with pytest.raises(
            ConfigError,
            match="job.prefetch cannot know the rows of params/emb .* ids from params/order",
        ):
            job.prefetch(*batches(1)[0])
        return float(job.step(state, *batches(1)[0])[1])

    first = float(step(*start(key), *batches(1)[0])[2])
    np.testing.assert_allclose(trained(role_threads, plan, train)[0], first, rtol=1e-5)


def test_servers_save_while_rows_are_on_their_way(
    role_threads: RoleThreads, tmp_path: Path
) -> None:
    given = batches(4)
    plans = [planned(optax.adam(0.1), LAZY, 1, 2) for _ in range(2)]

    def serve_and_save(plan: Any, ep: str) -> Any:
        role = Role("pserver", plan.trainers, tuple(plan.servers), current_endpoint=ep)
        with ServerJob(plan, role, {"deadline": roles.HANG}) as job:
            return job.serve(job.init(jax.random.key(0)), checkpoints=tmp_path)

    def train(job: TrainerJob) -> Any:
        state = job.init(jax.random.key(0))
        for t, batch in enumerate(given):
            job.prefetch(*given[(t + 1) % 4])
            if t == 2:
                job.save("two")
            state, _ = job.step(state, *batch)
        return job.params(state), None

    (wanted, _), _ = trained(role_threads, plans[0], looped(given, None))
    same(trained(role_threads, plans[1], train, serve_and_save)[0][0], wanted)
    (saved, _), _ = trained(
        role_threads, planned(optax.adam(0.1), LAZY, 1, 2), looped(given[:2], None)
    )
    same(dtrans.checkpoint.load(tmp_path / "two", plans[1].main, plans[1].startup)[0], saved)


def test_where_there_is_nothing_to_be_asked_ahead(role_threads: RoleThreads) -> None:
    plan = planned(optax.sgd(0.1), DENSE, 1, 1, mode=ASYNC)
    assert (
        trained(
            role_threads,
            plan,
            lambda job: (job.init(jax.random.key(0)), job.prefetch(*batches(1)[0]))[1],
        )[0]
        is False
    )
    job = planned(optax.sgd(0.1), DENSE, 2, 2).on_mesh()
    assert job.prefetch(*batches(1)[0]) is False
    losses = [float(value) for _, value in job.steps(job.init(jax.random.key(0)), batches())]
    with jax.enable_x64(False):
        np.testing.assert_allclose(losses, one_device(optax.sgd(0.1), batches())[1], rtol=1e-5)


def test_stale_rows_are_refused_where_there_are_none() -> None:
    stale = {"params/emb": dtrans.Rows(staleness=2)}
    with pytest.raises(
        ConfigError,
        match=r"\['params/emb'\].staleness is 2, but only synchronous .* and mode is .*Async",
    ):
        planned(optax.sgd(0.1), stale, 1, 1, mode=ASYNC)
    plan = planned(optax.sgd(0.1), stale, 1, 1)
    assert "prefetched rows may miss 2 updates" in str(plan)
    for run in (plan.on_mesh, plan.simulate):
        with pytest.raises(
            ConfigError,
            match=r"\['params/emb'\].staleness=2: a job in one process always reads the newest "
            r"rows",
        ):
            run()
    with pytest.raises(ConfigError, match="staleness"):
        dtrans.Rows(staleness=-1)


def test_rows_of_all_tables_are_asked_for_at_once(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits once, for any number of tables, and not for announced rows."""
    tx, key, asked = optax.sgd(0.1), jax.random.key(0), list[int]()
    real = TrainerSteps.prefetch

    def counted(self: Any, wanted: Any, *, train: bool) -> Any:
        asked.append(len(wanted))
        return real(self, wanted, train=train)

    monkeypatch.setattr(TrainerSteps, "prefetch", counted)

    def start(key: jax.Array) -> Any:
        params = {n: jax.random.normal(key, (V, D)) for n in ("one", "other")}
        return params, tx.init(params)

    of = lambda p, ids, y: jnp.mean(((p["one"][ids[:, 0]] * p["other"][ids[:, 1]]).sum(1) - y) ** 2)
    main = dtrans.trace(dtrans.make_train_step(of, tx), *start(key), *batches(1)[0])
    tables = {"params/one": dtrans.Rows(), "params/other": dtrans.Rows(staleness=1)}
    plan = dtrans.pserver(
        main, dtrans.trace(start, key), pservers=free_endpoints(1), trainers=1, sparse=tables
    )
    trained(
        role_threads, plan, lambda job: [float(x) for _, x in job.steps(job.init(key), batches(3))]
    )
    assert asked == [2]


def test_rows_that_are_given_up_are_not_those_that_were_announced(
    role_threads: RoleThreads, said: Any
) -> None:
    """An eviction drops the announcements on both sides. The step requests its rows again, with
    their new values."""
    given = batches(5)

    def train(job: TrainerJob, announces: bool) -> Any:
        state, given_up = job.init(jax.random.key(0)), 0
        for t, batch in enumerate(given):
            if announces:
                job.prefetch(*job.shard_batch(*given[(t + 1) % 5]))
            if t == 3:  # of this step and of the next
                given_up = job.tables.evict("params/emb", 1)
            state, _ = job.step(state, *job.shard_batch(*batch))
        return job.params(state), given_up

    rows = {"params/emb": dtrans.Rows("lazy")}
    plans = [planned(OPTIMIZERS["adagrad"], rows, 2, 2) for _ in range(2)]
    (wanted, count), _ = trained(role_threads, plans[0], lambda job: train(job, announces=False))
    assert count
    said.clear()
    same(trained(role_threads, plans[1], lambda job: train(job, announces=True))[0][0], wanted)
    asked = [f["step"] for op, f, _ in said if op == "prefetch" and f["train"] and "ahead" not in f]
    assert set(asked) == {0, 3, 4}
