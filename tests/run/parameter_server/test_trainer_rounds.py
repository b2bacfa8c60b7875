"""Values that trainers exchange through servers within a step: as messages, in threads, and by
hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import role_threads as roles
import step_cases
import step_zoo
from role_threads import RoleThreads, free_endpoints, serve

import dtrans
from dtrans.errors import BatchError, DtransError, PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.server.trainer_rounds import LARGEST, TrainerRounds, values_of
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server.trainer_calls import TrainerCalls
from dtrans.run.role_jobs.trainer_job import TrainerJob


TRAINERS, ROWS = 3, 12


SPEEDS = dtrans.Batch(speeds=[3, 1, 2])


def flat_case() -> step_zoo.StepCase:
    """Return a step whose result joins the rows of the batch with another dimension."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        out = step_cases.mlp_logits(p, x)
        return jnp.mean(out**2), {"flat": out.reshape(-1), "turned": out.T}

    case = step_zoo.by_name("mean_loss")
    step = dtrans.make_train_step(loss, optax.sgd(0.1), has_aux=True)
    init = lambda key: (p := step_cases.mlp(key), optax.sgd(0.1).init(p))
    return dataclasses.replace(case, name="flat", init=init, step=step, batch=step_cases.labelled)


def case_of(name: str) -> step_zoo.StepCase:
    return flat_case() if name == "flat" else step_zoo.by_name(name)


def planned(name: str, **options: Any) -> Any:
    case, key = case_of(name), jax.random.key(0)
    main = dtrans.trace(case.step, *case.init(key), *case.batch(ROWS // TRAINERS))
    return dtrans.pserver(
        main,
        dtrans.trace(case.init, key),
        pservers=free_endpoints(2),
        trainers=TRAINERS,
        placement=dtrans.BlockPlacement(min_block_size=1),
        **options,
    )


def job_of(plan: Any, k: int) -> TrainerJob:
    role = Role("trainer", TRAINERS, tuple(plan.servers), trainer_id=k)
    return TrainerJob(plan, role, {"deadline": roles.HANG})


def trained(plan: Any, case: step_zoo.StepCase, k: int, rows: Sequence[int]) -> Any:
    with job_of(plan, k) as job:
        state, found = job.init(jax.random.key(0)), []
        for i, count in enumerate(rows):
            state, *results = job.step(state, *job.shard_batch(*case.batch(count, seed=i)))
            found.append(results)
        return job.params(state), found


def close(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b))
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def check_one_device(
    role_threads: RoleThreads, name: str, rows: Sequence[int], **options: Any
) -> None:
    """Check the parameters and results (also results of all rows) of three trainers after a step
    for each batch."""
    case, plan, key = case_of(name), planned(name, **options), jax.random.key(0)
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, key)
    for k in range(TRAINERS):
        role_threads.start(f"trainer {k}", trained, plan, case, k, rows)
    ended = role_threads.all()
    params, opt_state = case.init(key)
    wanted = []
    for i, count in enumerate(rows):
        params, opt_state, *results = jax.jit(case.step)(
            params, opt_state, *case.batch(count, seed=i)
        )
        wanted.append(results)
    for k in range(TRAINERS):
        close(ended[f"trainer {k}"], (params, wanted))


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["masked_mean", "flax_batch_norm", "dropout_key_argument",
                                  "metrics_per_row",
                                  "metrics_confusion", "sum_loss"])  # fmt: skip
def test_trainers_in_processes_have_the_numbers_of_one_device(
    role_threads: RoleThreads, name: str
) -> None:
    check_one_device(role_threads, name, [ROWS] * 3)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["mean_loss", "flax_batch_norm", "metrics_per_row", "flat"])
def test_parts_of_a_batch_that_trainers_do_not_divide(role_threads: RoleThreads, name: str) -> None:
    """With 11 rows, the last trainer has 3. With 4 rows, it has none."""
    check_one_device(role_threads, name, [12, 11, 4, 12])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["mean_loss", "flax_batch_norm", "metrics_per_row", "flat"])
def test_trainers_of_different_speeds(role_threads: RoleThreads, name: str) -> None:
    """With 3 rows, each trainer has one."""
    check_one_device(role_threads, name, [12, 13, 3], batch=SPEEDS)


@pytest.mark.usefixtures("x64")
def test_parts_that_are_not_the_share_of_a_trainer() -> None:
    plan, case = planned("mean_loss", batch=SPEEDS), step_zoo.by_name("mean_loss")
    with job_of(plan, 2) as job:
        parts = job.shard_batch(*case.batch(13))
        params = case.init(jax.random.key(0))[0]
        assert [(p.rows, len(p.x)) for p in parts] == [(13, 4)] * len(parts)
        np.testing.assert_array_equal(parts[0].x, case.batch(13)[0][9:])
        with pytest.raises(
            BatchError, match="no dtrans.UnevenParts, but dtrans.Batch.*shard_batch"
        ):
            job.step((params,), *(p.x for p in parts))
        with pytest.raises(
            BatchError, match="has 4 rows, expected 8 rows in part 2 of a batch of 24 rows; split"
        ):
            job.step((params,), *(dtrans.UnevenPart(p.x, 24) for p in parts))


def test_uneven_batches_of_other_sizes_have_other_programs() -> None:
    """Both batches have 3 rows. An array that trainers do not divide has 4 and then 2 entries."""
    tx, key = optax.sgd(0.1), jax.random.key(0)
    params = {"w": jnp.ones((3, 2))}
    loss = lambda p, x, scale: jnp.mean((x @ p["w"]) ** 2) * jnp.mean(scale)
    step = dtrans.make_train_step(loss, tx)
    x, scale = jnp.ones((2, 3)), jnp.ones(4)
    main = dtrans.trace(step, params, tx.init(params), x, scale)
    startup = dtrans.trace(lambda key: (params, tx.init(params)), key)
    batch = dtrans.Batch(unsplit_inputs=["scale"])
    plan = dtrans.pserver(main, startup, pservers="127.0.0.1:1", trainers=2, batch=batch)
    calls = TrainerCalls(plan, 0)
    for entries in (4, 2):
        call = calls((dtrans.UnevenPart(x, 3), scale[:entries]))
        assert call.program.inputs["scale"].shape == (entries,)


@pytest.mark.usefixtures("x64")
def test_parts_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    plan, case = planned("mean_loss"), step_zoo.by_name("mean_loss")
    with job_of(plan, 2) as job:
        parts = job.shard_batch(*case.batch(13))
        params = case.init(jax.random.key(0))[0]
        x, *others = parts
        assert isinstance(x, dtrans.UnevenPart) and (x.rows, len(x.x)) == (13, 3)
        with pytest.raises(
            BatchError,
            match=r"has 3 rows, expected 4 rows in part 2 of a batch of 14 rows; split .*job.shard_b",
        ):
            job.step((params,), *(dtrans.UnevenPart(p.x, 14) for p in parts))
        with pytest.raises(BatchError, match="parts of batches with 13 and 14 rows"):
            job.step((params,), x, *(dtrans.UnevenPart(p.x, 14) for p in others))
        with pytest.raises(
            BatchError, match="UnevenPart of 12 rows, but 3 trainers can divide these rows"
        ):
            job.step((params,), *(dtrans.UnevenPart(p.x, 12) for p in parts))
    local = planned("mean_loss", batch="local")
    with job_of(local, 2) as job:
        with pytest.raises(
            BatchError, match="has 13 rows, which cannot be split evenly over 3 processes"
        ):
            job.shard_batch(*case.batch(13))
        with pytest.raises(BatchError, match="13 rows, but this plan needs equal parts"):
            job.step((params,), *parts)


@pytest.mark.usefixtures("x64")
def test_parts_of_different_sizes_are_refused_by_all_trainers(role_threads: RoleThreads) -> None:
    """The mean over parts of different sizes would not be the mean over the batch."""
    case, plan, key = step_zoo.by_name("mean_loss"), planned("mean_loss"), jax.random.key(0)

    def uneven(k: int) -> None:
        with job_of(plan, k) as job:
            job.step(job.init(key), *(x[: 4 - (k == 2)] for x in case.batch(ROWS)))

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, key)
    for k in range(TRAINERS):
        role_threads.start(f"trainer {k}", uneven, k)
    role_threads.join()
    for k in range(TRAINERS):
        error = role_threads.end(f"trainer {k}")
        assert isinstance(
            error, BatchError
        ) and "parts of equal size; they passed 4, 4, 3 rows" in str(error), error


@pytest.mark.usefixtures("x64")
def test_a_trainer_that_leaves_a_step_of_all_ends_the_job_by_name(
    role_threads: RoleThreads,
) -> None:
    case, plan, key = step_zoo.by_name("masked_mean"), planned("masked_mean"), jax.random.key(0)
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, key)
    for k in range(TRAINERS):
        role_threads.start(f"trainer {k}", trained, plan, case, k, [ROWS] * (1 if k == 2 else 3))
    role_threads.join()
    for k in (0, 1):
        error = role_threads.end(f"trainer {k}")
        assert isinstance(error, PeerError) and "trainer 2 closed after step 1" in str(error), error


@pytest.mark.usefixtures("x64")
def test_trainers_of_another_step_are_refused_in_their_first_round(
    role_threads: RoleThreads,
) -> None:
    """Trainer 2 exchanges values of another loss with the same parameters."""
    plan, other = planned("masked_mean"), planned("batch_norm_by_hand")
    case, key = step_zoo.by_name("masked_mean"), jax.random.key(0)
    (endpoint,) = {e.params["endpoint"] for e in plan.traffic.exchanges}

    def of_another(k: int) -> None:
        with dtrans.Executor(deadline=roles.HANG) as exe:
            exe.run(plan.trainer_startup_program(k), key)
            exe.exchange(endpoint, 0, [("all_reduce", "sum")] * 3, [np.ones(8)] * 3)

    assert other.traffic.exchanges[0].params["round"] == 0
    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, key)
    role_threads.start("trainer 0", trained, plan, case, 0, [ROWS])
    role_threads.start("trainer 1", trained, plan, case, 1, [ROWS])
    role_threads.start("trainer 2", of_another, 2)
    role_threads.join()
    told = [str(role_threads.end(f"trainer {k}")) for k in range(TRAINERS)]
    assert all(
        isinstance(role_threads.end(f"trainer {k}"), DtransError) for k in range(TRAINERS)
    ), told
    assert any("every role must plan the same step with the same options" in t for t in told), told


@pytest.mark.usefixtures("x64")
def test_a_trainer_that_does_not_come_to_a_round_is_named(role_threads: RoleThreads) -> None:
    plan, case, key = planned("masked_mean"), step_zoo.by_name("masked_mean"), jax.random.key(0)

    def impatient(ep: str) -> Any:
        with dtrans.Executor(deadline=4.0) as exe:
            return exe.run(plan.servers[ep].main, exe.run(plan.servers[ep].startup, key))

    def idle(k: int) -> None:
        with dtrans.Executor(deadline=roles.HANG) as exe:
            exe.run(plan.trainer_startup_program(k), key)
            for name in ("trainer 0", "trainer 1"):
                role_threads.end(name)

    for ep in plan.servers:
        role_threads.start(ep, impatient, ep)
    role_threads.start("trainer 0", trained, plan, case, 0, [ROWS])
    role_threads.start("trainer 1", trained, plan, case, 1, [ROWS])
    role_threads.start("trainer 2", idle, 2)
    role_threads.join()
    for k in (0, 1):
        assert "for the exchange of round 0 of step 1 from trainer 2" in str(
            role_threads.end(f"trainer {k}")
        )


# -- one round, by hand ----------------------------------------------------------------------------


def message(number: int, parts: list[np.ndarray], ways: list[list[Any]]) -> wire.Message:
    table = [[x.dtype.name, list(x.shape), way] for x, way in zip(parts, ways, strict=True)]
    (frames,) = wire.framed(
        "exchange", [(str(i), x) for i, x in enumerate(parts)], step=0, round=number, values=table
    )
    return wire.parse(frames)


WAYS = [
    ["all_reduce", "sum"],
    ["all_reduce", "max"],
    ["all_gather", 1],
    ["reduce_scatter", 0],
    ["all_to_all", 0, 1],
]


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "float16"])
def test_each_way_is_what_a_collective_makes(dtype: str) -> None:
    """The reference is the collective of `jax.lax` over three members of an axis."""
    rng = np.random.default_rng(0)
    whole = rng.integers(-9, 9, (3, 6, 2)).astype(np.dtype(jnp.dtype(dtype)))

    def wanted(x: Any) -> Any:
        lax = jax.lax
        return (
            lax.psum(x, "k"),
            lax.pmax(x, "k"),
            lax.all_gather(x, "k", axis=1, tiled=True),
            lax.psum_scatter(x, "k", scatter_dimension=0, tiled=True),
            lax.all_to_all(x, "k", 0, 1, tiled=True),
        )

    rounds = TrainerRounds(3)
    for k in (2, 0, 1):  # in any order of arrival
        rounds.take(k, message(4, [whole[k]] * 5, WAYS))
    assert rounds.number == 4 and sorted(rounds.waiting()) == [0, 1, 2]
    found = rounds.answers([0, 1, 2])
    assert rounds.number is None and not rounds.waiting()
    for way, w in enumerate(jax.vmap(wanted, axis_name="k")(whole)):
        for k in range(3):
            np.testing.assert_array_equal(found[k][way], w[k])
            assert found[k][way].dtype == whole.dtype


def test_parts_are_added_up_in_the_order_of_trainers() -> None:
    rounds = TrainerRounds(3)
    parts = {2: np.float32(-1e8), 0: np.float32(1e8), 1: np.float32(1.0)}
    for k, x in parts.items():
        rounds.take(k, message(0, [x.reshape(())], [["all_reduce", "sum"]]))
    assert rounds.answers([0, 1, 2])[1][0] == (np.float32(1e8) + np.float32(1.0)) + np.float32(-1e8)


@pytest.mark.parametrize("table", [
    [], [7], [["float32", [2]]], [["float32", [2], []]],
    [["float32", [2], ["all_reduce", "median"]]],
    [["float32", [2], ["all_reduce", 1]]], [["float32", [2], ["all_gather", 1]]],
    [["float32", [2], ["all_gather", True]]],
    [["float32", [-1], ["all_reduce", "sum"]]], [["float32", [True], ["all_reduce", "sum"]]],
    [["object", [2], ["all_reduce", "sum"]]], [["no such", [2], ["all_reduce", "sum"]]],
    [[["float32"], [2], ["all_reduce", "sum"]]], [["float32", "2", ["all_reduce", "sum"]]],
    [["float32", [2], ["send", 0]]], [["float32", [2], [["all_reduce"], "sum"]]],
    [["float32", [2], ["all_to_all", 0]]], [["float32", [LARGEST], ["all_reduce", "sum"]]],
    [["float32", [4], ["reduce_scatter", 0]]], [["float32", [2, 3], ["all_to_all", 0, 1]]],
    [["float32", [LARGEST, LARGEST, LARGEST], ["all_reduce", "sum"]]],
])  # fmt: skip
def test_what_cannot_be_exchanged_is_refused(table: Any) -> None:
    with pytest.raises(WireError, match="an `exchange` message"):
        values_of(table, 3)


def test_a_part_that_is_not_due_changes_nothing() -> None:
    rounds, x, way = TrainerRounds(2), np.ones(3, np.float32), [["all_reduce", "sum"]]
    rounds.take(0, message(0, [x], way))
    for bad, why in (
        (
            message(1, [x], way),
            "an `exchange` message of trainer 1 with 1 values in round 1, but trainer 0 sent",
        ),
        (message(0, [x[:2]], way), "or values of other types"),
        (message(0, [x], [["all_reduce", "max"]]), "or values of other types"),
        (message(0, [x, x], way * 2), "of trainer 1 with 2 values"),
    ):
        with pytest.raises(WireError, match=why):
            rounds.take(1, bad)
    with pytest.raises(WireError, match="trainer 0 sent an `exchange` message in round 0, but all"):
        rounds.take(0, message(0, [x], way))
    short = message(0, [x], way)
    short.fields["pieces"][0][0] = ["1", 0, 12]
    with pytest.raises(WireError, match="with a block '1', expected 1 blocks"):
        rounds.take(1, short)
    assert rounds.waiting() == [0]
    rounds.take(1, message(0, [x], way))
    np.testing.assert_array_equal(rounds.answers([0, 1])[0][0], [2, 2, 2])


def test_results_of_a_mean_step_are_those_of_the_trainers_that_are_there(
    role_threads: RoleThreads,
) -> None:
    """One trainer leaves after its first step. Then the loss is the mean over the rows of the other
    trainers."""
    with jax.enable_x64(True):
        w, tx = jnp.ones(2), optax.sgd(0.0)
        step = dtrans.make_train_step(lambda w, x: jnp.mean(x * w), tx)
        init = lambda w: (w, tx.init(w))
        main = dtrans.trace(step, *init(w), jnp.ones((2, 2)))
        plan = dtrans.pserver(
            main, dtrans.trace(init, w), pservers=free_endpoints(1), trainers=TRAINERS
        )

        def train(k: int) -> list[float]:
            with job_of(plan, k) as job:
                state, found = job.init(w), []
                for _ in range(1 if k == 2 else 2):
                    state, loss = job.step(state, jnp.full((2, 2), float(k)))
                    found.append(float(loss))
                return found

        for ep in plan.servers:
            role_threads.start(ep, serve, plan, ep, w)
        for k in range(TRAINERS):
            role_threads.start(f"trainer {k}", train, k)
        ended = role_threads.all()
        assert [ended[f"trainer {k}"] for k in range(TRAINERS)] == [[1.0, 0.5], [1.0, 0.5], [1.0]]
