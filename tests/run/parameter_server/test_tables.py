"""Tables in jobs whose roles are threads: the results of one device, and the sent bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
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
    ROWS,
    STEPS,
    SYNC,
    D,
    V,
    batches,
    close,
    init,
    loss,
    note_row_messages,
    one_device,
    only,
    outcome,
    planned,
    start_at_zero,
    trained,
)

import dtrans
from dtrans._jax import equations
from dtrans.errors import BatchError, ConfigError, NonfiniteError, StateError, WireError
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server.async_server import AsyncServer
from dtrans.protocol.server.sync_server import SyncServer
from dtrans.protocol.server.trainer_registry import TrainerRegistry
from dtrans.protocol.server.trainer_state import Trainer
from dtrans.protocol.server_blocks import RowGradient, TableSpec
from dtrans.protocol.tables.row_requests import RowRequests
from dtrans.rows.writer import RowRange
from dtrans.run.distributed.role import Role
from dtrans.run.parameter_server.block_update import BlockUpdates
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.tables import job_tables
from dtrans.run.parameter_server.tables.row_updates import RowUpdates
from dtrans.run.parameter_server.update import ServerUpdate
from dtrans.run.role_jobs import trainer_job
from dtrans.run.role_jobs.trainer_job import TrainerJob


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name, trainers, servers", [*((n, 2, 3) for n in OPTIMIZERS), ("lamb", 1, 1)]
)
def test_dense_is_one_device(
    role_threads: RoleThreads, name: str, trainers: int, servers: int
) -> None:
    plan = planned(OPTIMIZERS[name], {"params/emb": dtrans.Rows("dense")}, trainers, servers)
    found, _ = outcome(role_threads, plan, batches())
    close(found, one_device(OPTIMIZERS[name], batches()))


# -- in loops --------------------------------------------------------------------------------------


def recurrent(params: Any, ids: jax.Array, y: jax.Array, again: Any = lambda f: f) -> jax.Array:
    """Return a loss in which each iteration looks up one row for each example."""
    turn = lambda h, i: (jnp.tanh(h * params["w"][:D] + params["emb"][i] * params["w"][D:]), None)
    return jnp.mean(
        jax.vmap(lambda i, y: (jax.lax.scan(again(turn), jnp.ones(D), i)[0].sum() - y) ** 2)(ids, y)
    )


def noisy(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    """Return a loss in which each iteration draws the rows that it looks up, from a key that the
    loop carries."""

    def turn(key: jax.Array, x: jax.Array) -> Any:
        key, mine = jax.random.split(key)
        noise = jax.random.randint(mine, x.shape, 0, V)
        return key, jnp.tanh(params["emb"][noise]) * params["emb"][x]

    return jnp.mean((jax.lax.scan(turn, jax.random.key(3), ids.T)[1].sum((0, 2)) - y) ** 2)


def branched(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    one, other = (lambda i, s=s: jnp.sin(params["emb"][(i + s) % V]).sum((1, 2)) for s in (0, 1))
    return jnp.mean((jax.lax.cond(params["w"][0] > 0, one, other, ids) - y) ** 2)


LOOPS = {
    "each turn": recurrent,
    "each turn, computed again": lambda *a: recurrent(*a, again=jax.checkpoint),
    "rows that turns draw": noisy,
    "branches": branched,
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", LOOPS)
def test_rows_that_loops_look_up(role_threads: RoleThreads, name: str) -> None:
    plan = planned(optax.adam(0.1), {"params/emb": dtrans.Rows("dense")}, 2, 2, LOOPS[name])
    found, _ = outcome(role_threads, plan, batches())
    close(found, one_device(optax.adam(0.1), batches(), LOOPS[name]))


# -- lazy ------------------------------------------------------------------------------------------


def steps_of(role_threads: RoleThreads, tx: Any, sparse: Any, ids: Sequence[Any], trainers: int = 1,
             servers: int = 1,
             rows: int = 2, fn: Callable[..., Any] = only) -> Any:  # fmt: skip
    """Return the table after steps on these ids, and the final state of the servers."""
    start = start_at_zero(tx, rows)
    part = np.asarray(ids[0])[: max(1, len(ids[0]) // trainers)]
    plan = dtrans.pserver(
        dtrans.trace(dtrans.make_train_step(fn, tx), *start(), part),
        dtrans.trace(start),
        pservers=free_endpoints(servers),
        trainers=trainers,
        placement=dtrans.BlockPlacement(min_block_size=1),
        sparse=sparse,
    )

    def train(k: int) -> Any:
        role = Role("trainer", trainers, tuple(plan.servers), trainer_id=k)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state = job.init()
            for x in ids:
                state, _ = job.step(state, *job.shard_batch(np.asarray(x)))
            return np.asarray(job.params(state)["emb"])[:, 0]

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep)
    for k in range(trainers):
        role_threads.start(f"trainer {k}", train, k)
    ended = role_threads.all()
    return ended["trainer 0"], {n: x for ep in plan.servers for n, x in ended[ep].items()}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("trainers, ids", [(1, [2, 2, 1]), (2, [2, 2, 1, 2, 2, 1])])
def test_gradients_of_a_row_that_is_looked_up_twice_are_added_up(
    role_threads: RoleThreads, trainers: int, ids: Sequence[int]
) -> None:
    mean = lambda params, ids: jnp.sum(params["emb"][ids]) / (len(ids) / 3)
    table, _ = steps_of(role_threads, optax.sgd(1.0), LAZY, [ids], trainers, 1, 4, mean)
    assert table.tolist() == [0, -1, -2, 0]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "sparse, wanted", [(DENSE, (-0.2488061, -0.1319357)), (LAZY, (-0.1858463, -0.0744137))]
)
def test_adam_of_rows_that_are_looked_up_now_and_then(
    role_threads: RoleThreads, sparse: Any, wanted: tuple[float, float]
) -> None:
    """The expected numbers are computed by hand.

    The step count is optax's, and rows have no counts.
    """
    table, _ = steps_of(
        role_threads, optax.adam(0.1, 0.9, 0.999, eps=1e-30), sparse, [[0], [1], [0]]
    )
    np.testing.assert_allclose(table, wanted, atol=1e-7)


@pytest.mark.usefixtures("x64")
def test_a_row_that_is_looked_up_without_a_gradient_is_not_left_alone(
    role_threads: RoleThreads,
) -> None:
    """The moments of a looked-up row decay, and the moments of other rows do not."""
    weighted = lambda params, ids: jnp.sum(params["emb"][ids[:, 0], 0] * ids[:, 1])
    ids = [[[0, 1], [1, 1]], [[0, 0], [0, 0]]]
    table, held = steps_of(role_threads, optax.sgd(0.1, 0.9), LAZY, ids, fn=weighted)
    np.testing.assert_allclose(held["opt_state/0/trace/emb"][:, 0], [0.9, 1.0])
    np.testing.assert_allclose(table, [-0.19, -0.1])


@pytest.mark.usefixtures("x64")
def test_adamw_leaves_rows_alone_or_decays_them(role_threads: RoleThreads) -> None:
    tx = optax.adamw(0.1, weight_decay=0.5)
    first = init(tx, jax.random.key(0))[0]["emb"]
    for sparse, factor in ((DENSE, (1 - 0.1 * 0.5) ** STEPS), (LAZY, 1.0)):
        ((params, _), _) = outcome(role_threads, planned(tx, sparse, 2, 2), batches())
        np.testing.assert_allclose(params["emb"][V // 2 :], first[V // 2 :] * factor, rtol=1e-12)
        role_threads.forget()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sparse", [DENSE, LAZY], ids=["dense", "lazy"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam"])
def test_bits_do_not_depend_on_servers(role_threads: RoleThreads, name: str, sparse: Any) -> None:
    """Bits in float32 are equal on one to four servers."""
    found = []
    for servers in (1, 2, 3, 4):
        plan = planned(OPTIMIZERS[name], sparse, 2, servers)
        found.append(outcome(role_threads, plan, batches(10))[0])
        role_threads.forget()
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])


@pytest.mark.usefixtures("x64")
def test_a_row_of_the_first_micro_step_is_updated_with_the_second(
    role_threads: RoleThreads,
) -> None:
    tx = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    table, _ = steps_of(role_threads, tx, DENSE, [[0], [1]])
    assert table.tolist() == [-0.5, -0.5]


def test_few_programs_are_made_of_many_tables() -> None:
    """The numbers of looked-up rows vary around a power of two, for each table."""
    tables = {
        f"t{i}": TableBlock("t", f"t{i}", RowRange(0, 4096), (f"t{i}",), {0: f"g{i}"}, False)
        for i in range(20)
    }
    asked, rng = [], np.random.default_rng(0)

    class Made:
        update = SimpleNamespace(grad_types=())

        def run(self, grads: Any, state: Any, watched: Any, unused: Any) -> Any:
            yield from ()
            return {}

    updates = RowUpdates(tables, lambda *a: {}, lambda *a: {})
    for _ in range(50):
        counts = rng.integers(226, 286, 20)
        grads = {f"g{i}": RowGradient(np.arange(n), np.ones((n, 1))) for i, n in enumerate(counts)}
        with pytest.raises(StopIteration):
            next(
                updates.run(
                    lambda sizes: (asked.append(tuple(sizes.values())), Made())[1], grads, [0], {}
                )
            )
        assert all(n <= room for n, room in zip(counts, asked[-1], strict=True))
    assert len(set(asked)) <= 2 and max(map(max, asked)) == 512


# -- what moves, and what is there -----------------------------------------------------------------


def sizes_in(program: Any) -> set[int]:
    return {
        n for e in equations(program.jaxpr) for v in (*e.invars, *e.outvars) for n in v.aval.shape
    }


def test_no_value_of_a_trainer_has_the_rows_of_the_table() -> None:
    with jax.enable_x64(False):
        for sparse in (DENSE, LAZY):
            plan = planned(optax.adam(0.1), sparse, 2, 2)
            for program in (plan.trainer_program(0), plan.trainer_startup_program(0)):
                assert V not in sizes_in(program) and V // 2 not in sizes_in(program), program
            assert V in sizes_in(planned(optax.adam(0.1), None, 2, 2).trainer_program(0))


@pytest.mark.parametrize("servers", [1, 3])
def test_bytes_are_those_of_the_rows(
    role_threads: RoleThreads, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All trainers look up one row. Count its id, the row, and the gradient of the row."""
    sent = note_row_messages(monkeypatch)
    ids = np.full((4096, 2), 7)
    plan = planned(optax.sgd(0.1), DENSE, 1, servers)
    outcome(role_threads, plan, [(ids, np.ones(4096))])
    step = sent[: 2 * servers]
    assert sum(n for op, _, n in step if op == "prefetch") == 4
    assert sum(n for op, _, n in step if op == "rows") == D * 4


def test_a_lookup_reads_and_trains_nothing(role_threads: RoleThreads) -> None:
    plan = planned(optax.adam(0.1), LAZY, 1, 2)
    first = init(optax.adam(0.1), jax.random.key(0))[0]["emb"]

    def read() -> Any:
        with TrainerJob(
            plan, Role("trainer", 1, tuple(plan.servers), trainer_id=0), {"deadline": roles.HANG}
        ) as job:
            state = job.init(jax.random.key(0))
            found = job.tables.lookup("params/emb", [[39, 0], [0, 21]])
            for batch in batches(2):
                state, _ = job.step(state, *batch)
                job.tables.lookup("params/emb", np.arange(V))
            with pytest.raises(
                BatchError, match="asks for row 40 at .*; the table has rows 0 to 39"
            ):
                job.tables.lookup("params/emb", [3, 40])
            with pytest.raises(
                ConfigError,
                match="params/w is not a table of this plan; its tables are: params/emb",
            ):
                job.tables.lookup("params/w", [0])
            return (
                found,
                job.tables.lookup("params/emb", np.arange(V)),
                job.tables.lookup("params/emb", np.zeros((0, 2), int)),
            )

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer 0", read)
    found, table, nothing = role_threads.all()["trainer 0"]
    np.testing.assert_array_equal(found, first[np.array([[39, 0], [0, 21]])])
    np.testing.assert_array_equal(table[V // 2 :], first[V // 2 :])  # no batch has these ids
    assert nothing.shape == (0, 2, D)


def test_a_function_of_other_parameters_asks_for_no_rows(
    role_threads: RoleThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(optax.adam(0.1), LAZY, 1, 2)
    params = init(optax.adam(0.1), jax.random.key(0))[0]
    monkeypatch.setattr(trainer_job, "_memory_bytes", lambda: 8)  # the table does not fit

    def evaluate() -> Any:
        role = Role("trainer", 1, tuple(plan.servers), trainer_id=0)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state = job.init(jax.random.key(0))
            with pytest.raises(StateError, match="the tables params/emb have .* bytes"):
                job.apply(lambda p: p["emb"].sum() * p["w"], state)
            return job.apply(lambda p: p["w"], state)

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer 0", evaluate)
    np.testing.assert_array_equal(role_threads.all()["trainer 0"], params["w"])


def test_a_table_is_written_to_a_file(
    role_threads: RoleThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export of a table sends rows in parts. If all rows do not fit in memory, the error of
    `job.params` names the export."""
    plan = planned(optax.adam(0.1), DENSE, 1, 2)
    monkeypatch.setattr(job_tables, "CHUNK", 7)

    def write() -> Any:
        with TrainerJob(
            plan, Role("trainer", 1, tuple(plan.servers), trainer_id=0), {"deadline": roles.HANG}
        ) as job:
            state = job.init(jax.random.key(0))
            for batch in batches(2):
                state, _ = job.step(state, *batch)
            job.tables.export("params/emb", tmp_path / "emb.npy")
            found = job.params(state)["emb"]
            with pytest.raises(
                ConfigError, match="params/emb cannot be written to .*nowhere/emb.npy: No such file"
            ):
                job.tables.export("params/emb", tmp_path / "nowhere" / "emb.npy")
            monkeypatch.setattr(trainer_job, "_memory_bytes", lambda: 100)
            with pytest.raises(
                StateError,
                match=r"the tables params/emb have 480 bytes, .* the 100 bytes .* "
                r"job.tables.export\(name, path\)",
            ):
                job.params(state)
            tables = job.tables
        with pytest.raises(StateError, match="this executor is closed"):
            tables.lookup("params/emb", [0])
        return found

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer 0", write)
    found = role_threads.all()["trainer 0"]
    np.testing.assert_array_equal(np.load(tmp_path / "emb.npy", mmap_mode="r"), found)


def test_an_id_that_the_table_does_not_have_is_named(role_threads: RoleThreads) -> None:
    plan = planned(optax.sgd(0.1), DENSE, 1, 1)
    lookup = "of params/emb asks for row"
    for wrong, said in (
        (V, rf"{lookup} 40 at \[3\]"),
        (-V - 1, rf"{lookup} -1 at \[3\]"),
        (2**32, r"ids\[3, 0\] is 4294967296, which does not fit in int32"),
    ):
        ids, y = batches(1)[0]
        ids[3, 0] = wrong

        def train(ids: Any = ids, y: Any = y, said: str = said) -> None:
            with TrainerJob(
                plan, Role("trainer", 1, tuple(plan.servers), trainer_id=0), {"deadline": 9.0}
            ) as job:
                state = job.init(jax.random.key(0))
                with pytest.raises(BatchError, match=said):
                    job.step(state, ids, y)
                job.step(state, *batches(1)[0])  # all changes are there

        for ep in plan.servers:
            role_threads.start(ep, serve, plan, ep, jax.random.key(0))
        role_threads.start("trainer 0", train)
        role_threads.all()
        role_threads.forget()


def by_number(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    """Return a loss that reads rows by one id each, and by an id with the number of an entry."""
    one = jax.vmap(lambda i: params["emb"][i])(ids[:, 0])
    return jnp.mean(
        (one @ params["w"][:D] + params["emb"][ids[:, 1], 0] + params["emb"][ids[0, 0], 1] - y) ** 2
    )


WRONG = {
    (True, np.int64): (2**31, 2**32, 2**32 + 5, -(2**32) - 1),
    (True, np.uint64): (2**63 + 5,),
    (True, np.uint32): (2**31 + 5, 2**32 - 1),
    (False, np.uint32): (2**31 + 5, 2**32 - 1),
    (False, np.int8): (V, -V - 1),
}


@pytest.mark.parametrize("fn", [loss, by_number], ids=["in arrays", "one by one"])
@pytest.mark.parametrize("x64, dtype", WRONG)
def test_ids_are_looked_at_before_they_are_cut(fn: Any, x64: bool, dtype: Any) -> None:
    """JAX uses the lower half of a 64-bit index, which may be a valid row."""
    ids, y = batches(1)[0]
    with jax.enable_x64(x64):
        tx, key = optax.sgd(0.3), jax.random.key(0)
        step, start = dtrans.make_train_step(fn, tx), lambda key: init(tx, key)
        main = dtrans.trace(step, *start(key), ids.astype(dtype), y)
        job = dtrans.pserver(main, dtrans.trace(start, key), sparse=DENSE).simulate()
        state = job.init(key)
        for wrong, column in itertools.product(WRONG[x64, dtype], (0, 1)):
            there = ids.astype(dtype)
            there[3, column] = wrong
            counted = wrong + V if wrong < 0 else wrong
            with pytest.raises(
                BatchError, match=rf"^lookup \d of params/emb asks for row {counted} at \[3\]; the"
            ):
                job.step(state, there, y)
        job.step(state, ids.astype(dtype), y)


def test_numbers_of_rows_are_integers() -> None:
    job = planned(optax.sgd(0.1), DENSE, 1, 1).simulate()
    state, (ids, y) = job.init(jax.random.key(0)), batches(1)[0]
    with pytest.raises(
        BatchError,
        match=r"lookup 0 of params/emb has the row id 1.5 at \[0, 0\] of dtype float64, expected",
    ):
        job.tables.lookup("params/emb", [[1.5, 2.0]])
    with pytest.raises(BatchError, match=r"ids is float64, but the step was traced with int"):
        job.step(state, ids.astype(float), y)
    with pytest.raises(BatchError, match=r"asks for row 4294967296 at \[1\]; the table has"):
        job.tables.lookup("params/emb", [3, 2**32])


def outside_of(read: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a loss that reads rows by a function of the table and the ids."""

    def fn(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
        x = read(params["emb"], ids).reshape(len(y), -1)
        return jnp.mean((jnp.tanh(x) @ params["w"] - y) ** 2)

    return fn


def filled(emb: jax.Array, ids: jax.Array) -> jax.Array:
    return emb.at[ids].get(mode="fill", fill_value=0.5)


OUTSIDE = {
    "clip": outside_of(lambda emb, ids: jnp.take(emb, ids, axis=0, mode="clip")),
    "fill": outside_of(filled),
    "fill in a loop": outside_of(lambda emb, ids: jax.lax.map(lambda i: filled(emb, i), ids)),
    "both": outside_of(lambda emb, ids: filled(emb, ids) + jnp.take(emb, ids, axis=0, mode="clip")),
    "set, drop": outside_of(lambda emb, ids: filled(emb.at[ids[:, 0]].set(2, mode="drop"), ids)),
    "set, clip": outside_of(lambda emb, ids: filled(emb.at[ids[:, 0]].set(2, mode="clip"), ids)),
    "add, drop": outside_of(lambda emb, ids: filled(emb.at[ids[:, 0]].add(2, mode="drop"), ids)),
    "add, clip": outside_of(lambda emb, ids: filled(emb.at[ids[:, 0]].add(2, mode="clip"), ids)),
}


def padded_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches with ids outside the table. The second batch has only such ids."""
    found = []
    for step, (ids, y) in enumerate(batches()):
        padding = np.where(ids % 2, V + ids, -V - 1 - ids)
        found.append((np.where((ids % 3 == 0) | (step == 1), padding, ids), y))
    found[2][0][0, 0] = 2**31 - 1
    return found


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", OUTSIDE)
def test_ids_outside_the_table_are_those_of_one_device(
    role_threads: RoleThreads, name: str
) -> None:
    plan = planned(optax.adam(0.1), DENSE, 2, 3, OUTSIDE[name])
    assert (report := plan.verify()), str(report)
    found, _ = outcome(role_threads, plan, padded_batches())
    close(found, one_device(optax.adam(0.1), padded_batches(), OUTSIDE[name]))
    if name != "fill in a loop":  # JAX truncates ids before the loop
        job = plan.simulate()
        wide = np.full((ROWS, 2), 2**32 + 3)
        with pytest.raises(BatchError, match=r"row 4294967299 at \[0.*ids of at most 32 bits"):
            job.step(job.init(jax.random.key(0)), wide, np.ones(ROWS))


@jax.custom_vjp
def first_rows(emb: jax.Array, ids: jax.Array) -> jax.Array:
    return emb[ids[:1]]


def first_rows_fwd(emb: jax.Array, ids: jax.Array) -> Any:
    return first_rows(emb, ids), (jnp.zeros_like(emb), ids)


def first_rows_bwd(residuals: Any, g: jax.Array) -> Any:
    zeros, ids = residuals
    return zeros.at[ids].add(jnp.broadcast_to(g, (len(ids), *g.shape[1:]))), None


first_rows.defvjp(first_rows_fwd, first_rows_bwd)


def test_a_gradient_of_more_rows_than_a_step_reads_is_an_error() -> None:
    plan = planned(
        optax.sgd(0.1), DENSE, 1, 1, lambda p, ids, y: first_rows(p["emb"], ids[:, 0]).sum()
    )
    job, ids = plan.simulate(), np.arange(2 * ROWS).reshape(ROWS, 2)
    state = job.init(jax.random.key(0))
    job.step(state, 0 * ids, np.ones(ROWS))
    with pytest.raises(
        BatchError, match="gradients of 6 rows of params/emb, but reads at most 1 row"
    ):
        job.step(job.init(jax.random.key(0)), ids, np.ones(ROWS))


@pytest.mark.parametrize("name", ["clip", "fill", "both", "set, drop", "set, clip"])
def test_the_replay_of_a_lazy_update_changes_the_same_rows(name: str) -> None:
    """A lazy update and its replay change the same rows, also if ids are negative or outside the
    table."""
    plan = planned(optax.adam(0.1), LAZY, 1, 2, OUTSIDE[name], ASYNC)
    for batch in padded_batches():
        assert (report := plan.verify(*batch)), str(report)


def test_padding_among_ids_of_few_bits() -> None:
    """The number of lookups exceeds 8 bits.

    One device takes the same ids with 32 bits, because XLA without fusion emitters adds to wrong
    rows for 8-bit ids.
    """
    how = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))

    def gathered(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
        read = {"slice_sizes": (1, D), "mode": "fill", "fill_value": 0.25}
        x = jax.lax.gather(params["emb"], ids[:, None], how, **read)
        return jnp.mean((x @ params["w"][:D] - y) ** 2)

    tx, key, rng = optax.sgd(0.5), jax.random.key(0), np.random.default_rng(0)
    step = dtrans.make_train_step(gathered, tx)

    def start(key: jax.Array) -> Any:
        params = {"emb": jax.random.normal(key, (1000, D)), "w": jnp.ones(2 * D)}
        return params, tx.init(params)

    ids, y = rng.integers(0, 100, 256).astype(np.int8), rng.normal(size=256).astype(np.float32)
    ids[::3] = -5
    main = dtrans.trace(step, *start(key), ids, y)
    plan = dtrans.pserver(main, dtrans.trace(start, key), trainers=1, sparse=DENSE)
    job = plan.simulate()
    state, value = job.step(job.init(key), ids, y)
    params, _, expected = jax.jit(step)(*start(key), ids.astype(np.int32), y)
    close((job.params(state), value), (params, expected), 1e-6)


@pytest.mark.parametrize("mode", [SYNC, dtrans.Geo(1)], ids=["sync", "geo"])
def test_padding_touches_no_row(role_threads: RoleThreads, mode: Any) -> None:
    """Nothing is looked up, and an update of the batch's rows changes no row."""
    plan = planned(optax.adam(0.1), LAZY, 1, 2, OUTSIDE["fill"], mode)
    ids, y = np.full((ROWS, 2), V), np.ones(ROWS)
    (found, _), _ = outcome(role_threads, plan, [(ids, y), (ids, y)])
    first, _ = init(optax.adam(0.1), jax.random.key(0))
    np.testing.assert_array_equal(found["emb"], first["emb"])
    assert not np.array_equal(found["w"], first["w"])


@pytest.mark.parametrize("sparse", [DENSE, LAZY], ids=["dense", "lazy"])
def test_a_row_of_padding_stays(role_threads: RoleThreads, sparse: Any) -> None:
    """The row keeps its bits, however often it is looked up."""

    def bags(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
        of = jnp.repeat(jnp.arange(len(y)), 2)
        made = dtrans.nn.embedding_bag(params["emb"], ids.ravel(), of, len(y), padding_idx=-3)
        return jnp.mean((made - y[:, None]) ** 2)

    given = [(np.where(ids % 3, ids, V - 3), y) for ids, y in batches()]
    plan = planned(optax.adam(0.1), sparse, 2, 2, bags)
    (found, _), _ = outcome(role_threads, plan, given)
    first = init(optax.adam(0.1), jax.random.key(0))[0]["emb"]
    moved = np.flatnonzero((np.asarray(found["emb"]) != first).any(1))
    assert V - 3 not in moved and set(moved) == {
        i for ids, _ in given for i in ids.ravel() if i != V - 3
    }


@pytest.mark.usefixtures("x64")
def test_negative_ids_are_counted_from_the_end(role_threads: RoleThreads) -> None:
    given = batches(least=-V)
    close(
        outcome(role_threads, planned(optax.sgd(0.3), DENSE, 2, 2), given)[0],
        one_device(optax.sgd(0.3), given),
    )


def normed(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    x = params["emb"][ids[:, 0]].astype(jnp.float64) * jnp.sqrt(3.0)
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)
    return jnp.sum((x @ params["w"][:D] - y) ** 2) / len(y) + jnp.sum(params["w"] ** 2)


@pytest.mark.usefixtures("x64")
def test_uneven_parts_and_batch_norm(role_threads: RoleThreads) -> None:
    """Values of the full batch go through the servers in addition to rows of a table.

    Trainers need not divide the batch.
    """

    given = [*batches(2), *batches(2, rows=5)]
    plan = planned(optax.adagrad(0.1), {"params/emb": dtrans.Rows()}, 2, 2, normed)
    close(
        outcome(role_threads, plan, given)[0], one_device(optax.adagrad(0.1), given, normed), 1e-11
    )


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [DENSE, LAZY], ids=["dense", "lazy"])
def test_a_table_goes_on_on_other_servers(
    role_threads: RoleThreads, sparse: Any, tmp_path: Any
) -> None:
    """Use two servers, then three, then two again, with a save in between.

    The bits equal a job that was never saved.
    """
    given, tx = batches(6), optax.adam(0.1)
    (wanted, _), _ = outcome(role_threads, planned(tx, sparse, 2, 2), given)
    role_threads.forget()
    before: Any = None
    for i, servers in enumerate((2, 3, 2)):
        plan = planned(tx, sparse, 2, servers)
        for ep in plan.servers:
            role_threads.start(ep, served_from, plan, ep, before)
        for k in range(2):
            role_threads.start(f"trainer {k}", trained, plan, k, given[2 * i : 2 * i + 2])
        ended = role_threads.all()
        before = tmp_path / str(i)
        for ep in plan.servers:
            dtrans.checkpoint.save(before, plan, ep, ended[ep], tag="one")
        found = ended["trainer 0"][0]
        role_threads.forget()
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    params, opt_state = dtrans.checkpoint.load(before, plan.main, plan.startup)
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    assert int(opt_state[0].count) == 6


def served_from(plan: Any, endpoint: str, before: Any) -> Any:
    with dtrans.Executor(deadline=roles.HANG) as exe:
        programs = plan.servers[endpoint]
        if before is None:
            return exe.run(programs.main, exe.run(programs.startup, jax.random.key(0)))
        return exe.run(programs.main, dtrans.checkpoint.restore(before, plan, endpoint))


# -- on a mesh -------------------------------------------------------------------------------------


def on_mesh(plan: Any, given: Sequence[Any], **options: Any) -> Any:
    """Return the job, its last state, and the losses."""
    job, losses = plan.on_mesh(**options), []
    state = job.init(jax.random.key(0))
    for batch in given:
        state, value = job.step(state, *batch)
        losses.append(float(value))
    return job, state, losses


ON_MESH = ["sgd", "adagrad", "adam", "clip", "lamb", "rowwise_adam"]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name, trainers, servers", [(n, 2, 3) for n in ON_MESH] + [("adagrad", 1, 1), ("clip", 2, 1)]
)
def test_a_mesh_is_one_device(name: str, trainers: int, servers: int) -> None:
    tx = OPTIMIZERS[name]
    job, state, losses = on_mesh(planned(tx, DENSE, trainers, servers), batches())
    params, opt_state, wanted = *init(tx, jax.random.key(0)), []
    step = jax.jit(dtrans.make_train_step(loss, tx))
    for batch in batches():
        params, opt_state, value = step(params, opt_state, *batch)
        wanted.append(float(value))
    close((job.params(state), job.opt_state(state), losses), (params, opt_state, wanted))
    np.testing.assert_array_equal(
        job.tables.lookup("params/emb", [[3, 39]], state),
        job.params(state)["emb"][np.array([[3, 39]])],
    )
    rows = lambda params: params["emb"].sum(1, keepdims=True) * params["w"]
    close(job.apply(rows, state), rows(params))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["adagrad", "adam", "clip"])
def test_a_lazy_mesh_is_a_job_of_processes(role_threads: RoleThreads, name: str) -> None:
    wanted, servers = outcome(role_threads, planned(OPTIMIZERS[name], LAZY, 2, 3), batches())
    job, state, losses = on_mesh(plan := planned(OPTIMIZERS[name], LAZY, 2, 3), batches())
    close((job.params(state), losses), wanted)
    for (_, held), ep in zip(servers.items(), plan.servers, strict=True):
        close(dict(state.servers[ep]), {n: jnp.asarray(x) for n, x in held.items()})


@pytest.mark.usefixtures("x64")
def test_a_mesh_of_one_device_keeps_states() -> None:
    plan = planned(OPTIMIZERS["adam"], DENSE, 2, 2)
    job = plan.simulate()
    state, _ = job.step(first := job.init(jax.random.key(0)), *batches()[0])
    again, _ = job.step(first, *batches()[0])
    jax.tree.map(np.testing.assert_array_equal, again, state)
    for batch in batches()[1:]:
        state, _ = job.step(state, *batch)
    close(job.params(state), one_device(OPTIMIZERS["adam"], batches())[0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["rows that turns draw", "branches"])
def test_rows_that_loops_look_up_on_a_mesh(name: str) -> None:
    """All trainers draw the same rows in an iteration, but send different gradients."""
    plan = planned(optax.adam(0.1), DENSE, 2, 2, LOOPS[name])
    job, state, losses = on_mesh(plan, batches())
    close((job.params(state), losses), one_device(optax.adam(0.1), batches(), LOOPS[name]))


def alike(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    """Return a loss in which all examples look up the same rows."""
    return jnp.mean((params["emb"][jnp.array([3, V - 1, 3])].sum(0) @ params["w"][:D] - y) ** 2)


@pytest.mark.usefixtures("x64")
def test_rows_that_are_the_same_for_all_trainers() -> None:
    job, state, losses = on_mesh(planned(optax.sgd(0.1), DENSE, 2, 3, alike), batches())
    close((job.params(state), losses), one_device(optax.sgd(0.1), batches(), alike))


def test_a_table_is_on_its_server_and_nowhere_else() -> None:
    job, state, _ = on_mesh(planned(optax.adagrad(0.1), DENSE, 2, 2), batches(1))
    assert state.params["params/emb"].shape == (0, D)
    for ep, held in state.servers.items():
        assert held["params/emb.block" + str(list(state.servers).index(ep))].shape == (V // 2, D)
        assert all(x.sharding == job.placement.servers[ep] for x in held.values())
    shapes = {(V, D), (V // 2, D)}
    text = job.lower(state, *batches(1)[0]).parts
    for name, part in text.items():
        types = [f"{a}x{b}x" for a, b in shapes]
        assert not name.startswith("trainers") or not any(t in part.as_text() for t in types), name


def test_a_state_whose_table_was_donated_is_refused() -> None:
    job = planned(optax.sgd(0.1), DENSE, 2, 2).on_mesh()
    first = job.init(jax.random.key(0))
    job.step(first, *batches(1)[0])
    with pytest.raises(StateError, match=r"its params/emb.block0 was donated"):
        job.step(first, *batches(1)[0])
    with pytest.raises(StateError, match="was donated"):
        job.tables.lookup("params/emb", [0], first)


def test_rows_that_a_table_on_a_mesh_does_not_have(tmp_path: Path) -> None:
    job = planned(optax.sgd(0.1), DENSE, 2, 2).on_mesh()
    state, (ids, y) = job.init(jax.random.key(0)), batches(1)[0]
    wrong = ids.copy()
    wrong[4, 0] = V
    with pytest.raises(
        BatchError, match=r"lookup 0 of params/emb asks for row 40 at \[1\] of trainer 1's part"
    ):
        job.step(state, wrong, y)
    with pytest.raises(BatchError, match="asks for row 40 at .*; the table has rows 0 to 39"):
        job.tables.lookup("params/emb", [3, 40])
    with pytest.raises(
        ConfigError, match="params/w is not a table of this plan; its tables are: params/emb"
    ):
        job.tables.lookup("params/w", [0])
    assert job.tables.lookup("params/emb", np.zeros((0, 2), int)).shape == (0, 2, D)
    state, _ = job.step(state, ids, y)  # all changes are there
    emb = job.params(state)["emb"]
    np.testing.assert_array_equal(job.tables.lookup("params/emb", np.arange(V)), emb)
    job.tables.export("params/emb", tmp_path / "emb.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "emb.npy"), emb)
    del state
    with pytest.raises(StateError, match="the last state of this job was deleted"):
        job.tables.lookup("params/emb", [0])
    with pytest.raises(StateError, match="the last state of this job was deleted"):
        job.tables.export("params/emb", tmp_path / "emb.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "emb.npy"), emb)


def test_gradients_of_rows_on_a_mesh_are_looked_at() -> None:
    job = planned(optax.sgd(0.1), DENSE, 2, 2).on_mesh(on_nonfinite="error")
    ids, y = batches(1)[0]
    y[4] = np.nan
    with pytest.raises(NonfiniteError, match="trainer 1.*params/emb"):
        job.step(job.init(jax.random.key(0)), ids, y)


@pytest.mark.parametrize("sparse", [DENSE, LAZY], ids=["dense", "lazy"])
def test_a_table_on_a_mesh_goes_on_on_other_servers(sparse: Any, tmp_path: Any) -> None:
    given, tx = batches(4), optax.adam(0.1)
    job, state, _ = on_mesh(planned(tx, sparse, 2, 2), given)
    wanted = job.params(state), job.opt_state(state)
    job, state, _ = on_mesh(plan := planned(tx, sparse, 2, 2), given[:2])
    dtrans.checkpoint.save(tmp_path / "one", job, state)
    gathered = dtrans.checkpoint.gather(plan, state.servers, job.params(state))
    job = planned(tx, sparse, 2, 3).on_mesh()
    state = dtrans.checkpoint.restore(tmp_path / "one", job)
    jax.tree.map(np.testing.assert_array_equal, (job.params(state), job.opt_state(state)), gathered)
    assert state.params["params/emb"].shape == (0, D)
    for batch in given[2:]:
        state, _ = job.step(state, *batch)
    jax.tree.map(np.testing.assert_array_equal, (job.params(state), job.opt_state(state)), wanted)


@pytest.mark.usefixtures("x64")
def test_uneven_parts_and_batch_norm_on_a_mesh() -> None:
    given = [*batches(2), *batches(2, rows=5)]
    plan = planned(optax.adagrad(0.1), {"params/emb": dtrans.Rows()}, 2, 2, normed)
    job, state, losses = on_mesh(plan, given)
    close((job.params(state), losses), one_device(optax.adagrad(0.1), given, normed), 1e-11)


# -- asynchronous trainers -------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sparse", [DENSE, LAZY], ids=["dense", "lazy"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "rowwise_adam"])
def test_one_asynchronous_trainer_is_one_in_step(
    role_threads: RoleThreads, name: str, sparse: Any
) -> None:
    made = {
        mode: outcome(role_threads, planned(OPTIMIZERS[name], sparse, 1, 2, mode=mode), batches())[
            0
        ]
        for mode in (SYNC, ASYNC)
    }
    close(made[ASYNC], made[SYNC], 1e-14)
    if sparse is DENSE:
        close(made[ASYNC], one_device(OPTIMIZERS[name], batches()))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("servers", [1, 3])
def test_no_row_of_an_asynchronous_trainer_is_lost(role_threads: RoleThreads, servers: int) -> None:
    """Gradients are integers, so their order does not matter. The step has only the table."""
    start = start_at_zero(optax.sgd(1.0), V)
    given = [np.random.default_rng(k).integers(0, V, (20, 6)) for k in range(2)]
    step = dtrans.trace(dtrans.make_train_step(only, optax.sgd(1.0)), *start(), given[0][0])
    plan = dtrans.pserver(step, dtrans.trace(start), pservers=free_endpoints(servers), trainers=2,
                          mode=ASYNC,
                          sparse={"params/emb": dtrans.Rows()},
                          placement=dtrans.BlockPlacement(min_block_size=1))  # fmt: skip

    def train(k: int) -> None:
        role = Role("trainer", 2, tuple(plan.servers), trainer_id=k)
        with TrainerJob(plan, role, {"deadline": roles.HANG}) as job:
            state = job.init()
            for ids in given[k]:
                state, _ = job.step(state, ids)

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep)
    for k in range(2):
        role_threads.start(f"trainer {k}", train, k)
    ended = role_threads.all()
    table = np.concatenate(
        [ended[ep][n] for ep in plan.servers for n in ended[ep] if n.startswith("params/emb")]
    )
    assert np.array_equal(table[:, 0], -np.bincount(np.ravel(given), minlength=V))


# -- messages that do not follow the protocol ------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "fields, said",
    [
        ({"table": "params/w", "ids": [1]}, "which is not a table"),
        ({"count": V + 1, "ids": [1]}, "requests 41 rows of params/emb, which has 40"),
        ({"count": -1, "ids": []}, "requests -1 rows"),
        ({"count": "1", "ids": [1]}, "requests '1' rows"),
        ({"ids": [3, 2]}, "are not increasing numbers from 0 to 39"),
        ({"ids": [2, 2]}, "not increasing numbers"),
        ({"ids": [-1]}, "not increasing numbers"),
        ({"ids": [V]}, "not increasing numbers"),
        ({"step": 3, "ids": [1]}, "of step 3.* pserver"),
        ({"name": "rows", "ids": [1]}, "a `prefetch` message with the block 'rows'"),
    ],
)
@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_request_that_cannot_be_is_refused_and_changes_nothing(
    fields: Any, said: str, mode: Any
) -> None:
    server, trainer = served_alone(mode)
    is_async = isinstance(server, AsyncServer)
    progress = server._steps.of_trainer(0) if is_async else server._turns.by_trainer[0]
    grads = progress.grads
    rows = lambda: grads.memory["params/emb@GRAD"].shape
    ids, table = np.array(fields["ids"], np.int32), fields.get("table", "params/emb")
    step = {"step": fields.get("step", 0), "train": True}
    step["counts"] = {table: fields.get("count", len(ids))}
    (frames,) = wire.framed("prefetch", [(fields.get("name", table), ids)], **step)
    with pytest.raises(WireError, match=said):
        server.prefetch(0, wire.parse(frames))
    assert not trainer.said and rows() == (0, D)
    (frames,) = wire.framed("prefetch", [("params/emb", np.array([3, 7], np.int32))],
                            step=0, counts={"params/emb": 2}, train=True)  # fmt: skip
    server.prefetch(0, wire.parse(frames))
    assert [op for op, _ in trainer.said] == ["rows"] and rows() == (2, D)


def test_an_announcement_of_a_distant_step_leaves_no_memory() -> None:
    server, _ = served_alone(SYNC)
    assert isinstance(server, SyncServer)
    fields = {"step": 0, "counts": {"params/emb": 3}, "train": True, "ahead": 65}
    (frames,) = wire.framed("prefetch", [("params/emb", np.array([3], np.int32))], **fields)
    with pytest.raises(WireError, match="65 steps ahead, expected 1 to 64 steps"):
        server.prefetch(0, wire.parse(frames))
    assert not server._rows.requests._begun


class _Said:
    """Server, and the messages that it sends."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []

    def __call__(self, address: Any, op: str, blocks: Any = (), **fields: Any) -> None:
        self.said.append((op, fields))


def served_alone(mode: Any) -> tuple[SyncServer | AsyncServer, _Said]:
    plan = planned(optax.sgd(0.1), DENSE, 1, 1, mode=mode)
    (programs,) = plan.servers.values()
    update = ServerUpdate.from_program(programs.main)
    state = dict(
        zip(programs.startup.out_names, programs.startup.compiled(jax.random.key(0)), strict=True)
    )
    trainers, said = TrainerRegistry(update.served, deadline=9.0, plan={}, secret=""), _Said()
    trainers.known[0] = Trainer("session", b"0")
    if mode == ASYNC:
        return AsyncServer(update.served, BlockUpdates(update, state), state, trainers, said), said
    return SyncServer(update.served, SyncUpdate(update, state, 1), trainers, said), said


def test_a_gradient_of_rows_is_zero_until_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may leave before it sends a gradient.

    With on_trainer_exit="paddle", the zero then counts.
    """
    requests = RowRequests(
        "here", {"emb": TableSpec(10, (2,), np.dtype(np.float32), {0: "emb@GRAD"})}
    )
    grads = Inbox(requests.memory_of(0), str)
    empty = np.empty
    monkeypatch.setattr(
        np, "empty", lambda shape, dtype: (found := empty(shape, dtype), found.fill(7))[0]
    )
    blocks = [("emb", np.array([1, 4], np.int32))]
    (frames,) = wire.framed("prefetch", blocks, step=0, counts={"emb": 2}, train=True)
    requests.take(0, wire.parse([frames[0], *map(bytes, frames[1:])]), grads)
    found = requests.gradients(0, grads)["emb@GRAD"]
    assert found.ids.tolist() == [1, 4] and found.rows.tolist() == [[0, 0], [0, 0]]
