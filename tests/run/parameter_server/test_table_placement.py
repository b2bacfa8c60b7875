"""Placement of table rows: bits do not depend on it, and a job with any placement can continue from
any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import role_threads as roles
from role_threads import RoleThreads, free_endpoints, serve

import dtrans
from dtrans.errors import ConfigError
from dtrans.run.distributed.role import Role
from dtrans.run.role_jobs.trainer_job import TrainerJob


V, D, ROWS = 41, 3, 8  # no number of servers or buckets divides V
SIZES = (1, 2, 3, 4)


def init(tx: Any, key: jax.Array) -> Any:
    k1, k2 = jax.random.split(key)
    params = {"emb": jax.random.normal(k1, (V, D)), "w": jax.random.normal(k2, (2 * D,))}
    return params, tx.init(params)


def loss(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    x = jnp.concatenate([params["emb"][ids[:, 0]], jnp.take(params["emb"], ids[:, 1], axis=0)], 1)
    return jnp.mean((jnp.tanh(x) @ params["w"] - y) ** 2)


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, V - 5, (ROWS, 2)), rng.normal(size=ROWS)) for _ in range(steps)]


def planned(tx: Any, rows: dtrans.Rows | None, servers: int, trainers: int = 2) -> Any:
    step, key = dtrans.make_train_step(loss, tx), jax.random.key(0)
    start = lambda key: init(tx, key)
    ids, y = batches(1)[0]
    return dtrans.pserver(
        dtrans.trace(step, *start(key), ids[: ROWS // trainers], y[: ROWS // trainers]),
        dtrans.trace(start, key),
        pservers=free_endpoints(servers),
        trainers=trainers,
        placement=dtrans.BlockPlacement(min_block_size=1),
        sparse=None if rows is None else {"params/emb": rows},
    )


def trained(plan: Any, k: int, given: Sequence[Any]) -> Any:
    with TrainerJob(
        plan,
        Role("trainer", plan.trainers, tuple(plan.servers), trainer_id=k),
        {"deadline": roles.HANG},
    ) as job:
        state, losses = job.init(jax.random.key(0)), []
        for batch in given:
            state, value = job.step(state, *job.shard_batch(*batch))
            losses.append(float(value))
        return job.params(state), losses


def outcome(
    role_threads: RoleThreads,
    plan: Any,
    given: Sequence[Any],
    before: Mapping[str, Any] | None = None,
) -> Any:
    """Return the parameters and losses of trainer 0, and the final state of the servers."""
    for ep in plan.servers:
        if before is None:
            role_threads.start(ep, serve, plan, ep, jax.random.key(0))
        else:
            role_threads.start(ep, served_from, plan, ep, before)
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", trained, plan, k, given)
    ended = role_threads.all()
    role_threads.forget()
    return ended["trainer 0"], {ep: ended[ep] for ep in plan.servers}


def served_from(plan: Any, endpoint: str, before: Any) -> Any:
    with dtrans.Executor(deadline=roles.HANG) as exe:
        return exe.run(
            plan.servers[endpoint].main, dtrans.checkpoint.restore(before, plan, endpoint)
        )


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


RANGE, BUCKET = dtrans.Rows("dense"), dtrans.Rows("dense", "bucket", buckets=7)

OPTIMIZERS = {
    "sgd": optax.sgd(0.3),
    "momentum": optax.sgd(0.1, 0.9),
    "nesterov": optax.sgd(0.1, 0.9, nesterov=True),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "lion": optax.lion(0.1),
    "adadelta": optax.adadelta(0.1),
    "nadam": optax.nadam(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "adamax": optax.adamax(0.1),
    "yogi": optax.yogi(0.1),
    "rowwise_adagrad": dtrans.optimizers.rowwise_adagrad(0.1),
    "rowwise_adam": dtrans.optimizers.rowwise_adam(0.1),
}


def check_bits(
    role_threads: RoleThreads, name: str, update: str, trainers: int, steps: int, servers: Any
) -> None:
    """Check that bits in float32 are equal for any placement."""
    rows = {
        place: dtrans.Rows(update, place, **more)
        for place, more in (("range", {}), ("bucket", {"buckets": 7}))
    }
    given = batches(steps)
    found = [
        outcome(role_threads, planned(OPTIMIZERS[name], rows[place], n, trainers), given)[0]
        for place, n in servers
    ]
    for other in found[1:]:
        same(other, found[0])


@pytest.mark.parametrize(
    "name, update",
    [("adam", "dense"), ("adagrad", "dense"), ("adam", "lazy"), ("rowwise_adam", "dense")],
)
def test_bits_do_not_depend_on_placement(role_threads: RoleThreads, name: str, update: str) -> None:
    """The last of four servers has only rows of the table."""
    check_bits(role_threads, name, update, 2, 6, [("range", 2), ("bucket", 1), ("bucket", 4)])


@pytest.mark.soak
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("update", ["dense", "lazy"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_do_not_depend_on_placement_in_fifty_steps(
    role_threads: RoleThreads, name: str, update: str, trainers: int
) -> None:
    check_bits(
        role_threads,
        name,
        update,
        trainers,
        50,
        [(p, n) for p in ("range", "bucket") for n in SIZES],
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["adagrad", "adam", "clip", "noisy"])
def test_buckets_are_one_device(role_threads: RoleThreads, name: str) -> None:
    """Noise is drawn for the row's position in the leaf, not for its position on the server."""
    clip = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.3))
    tx = {**OPTIMIZERS, "clip": clip, "noisy": optax.noisy_sgd(0.1, key=jax.random.key(1))}[name]
    given = batches(4)
    found, _ = outcome(role_threads, planned(tx, BUCKET, 3), given)
    step, (params, opt_state), losses = (
        jax.jit(dtrans.make_train_step(loss, tx)),
        init(tx, jax.random.key(0)),
        [],
    )
    for batch in given:
        params, opt_state, value = step(params, opt_state, *batch)
        losses.append(float(value))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12),
        found,
        (params, losses),
    )


@pytest.mark.usefixtures("x64")
def test_buckets_on_a_mesh_are_one_device() -> None:
    tx, given = optax.adam(0.1), batches(3)
    job = planned(tx, BUCKET, 3).on_mesh()
    state = job.init(jax.random.key(0))
    step, (params, opt_state) = (
        jax.jit(dtrans.make_train_step(loss, tx)),
        init(tx, jax.random.key(0)),
    )
    for batch in given:
        state, _ = job.step(state, *batch)
        params, opt_state, _ = step(params, opt_state, *batch)
    found = job.params(state), job.opt_state(state)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12),
        found,
        (params, opt_state),
    )
    same(job.tables.lookup("params/emb", [40, 0, 8], state), found[0]["emb"][np.array([40, 0, 8])])


def test_servers_start_with_rows_of_what_one_device_would_make(role_threads: RoleThreads) -> None:
    plan, first = (
        planned(optax.adam(0.1), BUCKET, 3),
        init(optax.adam(0.1), jax.random.key(0))[0]["emb"],
    )
    held = outcome(role_threads, plan, [])[1]
    for b in plan.placement.blocks["params/emb"]:
        numbers = np.flatnonzero([b.span.start <= n % 7 < b.span.stop for n in range(V)])
        np.testing.assert_array_equal(held[b.endpoint][b.name], np.asarray(first)[numbers])
    for programs in plan.servers.values():
        assert V not in {
            n for e in programs.startup.jaxpr.jaxpr.eqns for v in e.outvars for n in v.aval.shape
        }


def test_a_lookup_finds_rows_in_buckets(role_threads: RoleThreads) -> None:
    plan, first = (
        planned(optax.adam(0.1), BUCKET, 2, 1),
        init(optax.adam(0.1), jax.random.key(0))[0]["emb"],
    )

    def read() -> Any:
        with TrainerJob(
            plan, Role("trainer", 1, tuple(plan.servers), trainer_id=0), {"deadline": roles.HANG}
        ) as job:
            state = job.init(jax.random.key(0))
            return job.tables.lookup("params/emb", [[40, 0], [8, 21]]), job.params(state)["emb"]

    for ep in plan.servers:
        role_threads.start(ep, serve, plan, ep, jax.random.key(0))
    role_threads.start("trainer 0", read)
    some, every = role_threads.all()["trainer 0"]
    same((some, every), (first[np.array([[40, 0], [8, 21]])], first))


@pytest.mark.parametrize("update", ["dense", "lazy"])
def test_a_table_goes_on_in_another_placement(
    role_threads: RoleThreads, update: Any, tmp_path: Any
) -> None:
    """Save and restore in between.

    The bits equal a job that was never saved, with step counts and all state.
    """
    given, tx = batches(8), optax.adam(0.1)
    first, few = dtrans.Rows(update), dtrans.Rows(update, "bucket", buckets=7)
    (wanted, _), last = outcome(role_threads, planned(tx, first, 2), given)
    before: Any = None
    for i, (rows, servers) in enumerate(
        [(first, 2), (few, 3), (dtrans.Rows(update, "bucket"), 2), (first, 2)]
    ):
        plan = planned(tx, rows, servers)
        (found, _), held = outcome(role_threads, plan, given[2 * i : 2 * i + 2], before)
        before = tmp_path / str(i)
        for ep in plan.servers:
            dtrans.checkpoint.save(before, plan, ep, held[ep], tag="one")
        params, opt_state = dtrans.checkpoint.gather(plan, held)
        same(params, found)
        for ep in plan.servers:
            same(dtrans.checkpoint.scatter(plan, ep, params, opt_state), held[ep])
    same(found, wanted)
    same([*held.values()], [*last.values()])
    same(dtrans.checkpoint.load(before, plan.main, plan.startup)[0], wanted)


# -- what a plan says ------------------------------------------------------------------------------


def test_a_plan_says_which_buckets_are_where() -> None:
    plan = planned(optax.adam(0.1), BUCKET, 3)
    rows = [(b, where) for b, where, _, _ in plan.rows if b.startswith("params/emb")]
    assert rows == [
        (f"params/emb.block{i}", f"buckets {x} of 7") for i, x in enumerate(("0:2", "2:4", "4:7"))
    ]
    assert "buckets 0:2 of 7" in str(plan)
    assert any(
        n.startswith("table params/emb: 41 rows in 7 buckets, at most 8 looked up")
        for n in plan.notes
    )
    blocks = plan.placement.blocks["params/emb"]
    assert [b.endpoint for b in blocks] == list(plan.servers)
    assert [b.shape[0] for b in blocks] == [12, 12, 17]
    assert sum(sizes["params"] for sizes in plan.server_bytes.values()) == (V * D + 2 * D) * 4
    whole = np.arange(V * D).reshape(V, D)
    for row in plan.overview.by_origin("opt_state/0/mu/emb"):
        assert whole[row.index].shape == row.slice_shape
        assert f"buckets {row.buckets.start}:" in str(row)
    assert plan.compare(dtrans.RoundRobin)["RoundRobin"] == pytest.approx(plan.balance)
    only = dtrans.Rows("dense", "bucket")
    assert [
        b.shape[0] for b in planned(optax.sgd(0.1), only, 2).placement.blocks["params/emb"]
    ] == [20, 21]


def test_other_leaves_are_where_they_are_without_the_table() -> None:
    plan = planned(optax.sgd(0.1), BUCKET, 2)
    assert [b.endpoint for b in plan.placement.blocks["params/w"]] == list(plan.servers)


def test_roles_that_place_rows_differently_do_not_meet() -> None:
    one, other = (
        planned(optax.sgd(0.1), dtrans.Rows("dense", "bucket", n), 2).identity for n in (7, 8)
    )
    assert one["placement"] != other["placement"]


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"place": "hash"}, "place must be 'range' or 'bucket', it is 'hash'"),
        ({"buckets": 0}, "buckets must be a number of buckets, it is 0"),
    ],
)
def test_options_that_are_none_are_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dtrans.Rows(**wrong)
