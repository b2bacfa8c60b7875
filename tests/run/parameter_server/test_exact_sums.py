"""A step that clips by the global norm has the same bits for any placement of the rows of tables
and other leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assemble, endpoints
from table_servers import TableServers

import dtrans
from dtrans.run.parameter_server.update import ServerUpdate


SHAPES: Mapping[str, tuple[int, ...]] = {
    "emb": (29, 5),
    "kernel": (17, 3),
    "bias": (11,),
    "few": (3,),
}
STEPS, TRAINERS = 4, 2
OPTIMIZERS = {"adagrad": optax.adagrad(0.1), "adam": optax.adam(0.1)}


def init(tx: Any, key: jax.Array) -> Any:
    params = {
        n: jax.random.normal(jax.random.fold_in(key, i), s)
        for i, (n, s) in enumerate(SHAPES.items())
    }
    return params, tx.init(params)


def loss(params: Any, ids: jax.Array) -> jax.Array:
    """Return a loss. Tests replace its gradients."""
    return sum(jnp.mean((p[ids] if n == "emb" else p) ** 2) for n, p in params.items())


def planned(tx: Any, servers: int, sparse: Any) -> Any:
    key = jax.random.key(0)
    step = dtrans.make_train_step(loss, tx)
    return dtrans.pserver(
        dtrans.trace(step, *jax.eval_shape(lambda key: init(tx, key), key), jnp.zeros(3, int)),
        dtrans.trace(lambda key: init(tx, key), key),
        pservers=endpoints(servers),
        trainers=TRAINERS,
        placement=dtrans.BlockPlacement(min_block_size=1),
        sparse=sparse,
    )


def clipped(name: str) -> Any:
    return optax.chain(optax.clip_by_global_norm(0.5), OPTIMIZERS[name])


def outcome(plan: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    lookups = [
        [np.unique(rng.integers(0, 29, 6)).tolist() for _ in range(TRAINERS)] for _ in range(STEPS)
    ]
    servers = TableServers(plan, lookups)
    for at in range(STEPS):
        grads = [
            {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
            for _ in range(TRAINERS)
        ]
        servers.step(at, grads)
    found = assemble(plan, servers.held(), plan.main.in_names[:-1])
    return {n: np.asarray(x) for n, x in found.items()}


SOME = [("range", 1), ("bucket", 4)]
ALL = [(place, servers) for place in ("range", "bucket") for servers in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    "name, where",
    [("adam", SOME), *(pytest.param(n, ALL, marks=pytest.mark.soak) for n in OPTIMIZERS)],
    ids=["adam-some", *OPTIMIZERS],
)
def test_bits_of_a_clip_do_not_depend_on_servers_or_placement(name: str, where: Any) -> None:
    tx, wanted = clipped(name), dict[str, np.ndarray]()
    for place, servers in where:
        plan = planned(tx, servers, {"params/emb": dtrans.Rows("dense", place, buckets=7)})
        assert {r.op for values in plan.traffic.rounds for r in values} == (
            {"exact_sum"} if servers > 1 else set()
        )
        found = outcome(plan)
        wanted = wanted or found
        for n, x in found.items():
            np.testing.assert_array_equal(
                x, wanted[n], err_msg=f"{n} on {servers} servers, by {place}"
            )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_server_compiles_what_several_compile(name: str) -> None:
    """XLA rounds differently if it compiles more equations at once.

    So one server has as many phases as several servers.
    """
    plans = [planned(clipped(name), n, {"params/emb": dtrans.Rows("dense")}) for n in (1, 3)]
    phases = [
        len(ServerUpdate.from_program(p.main).phases)
        for plan in plans
        for p in plan.servers.values()
    ]
    assert phases == [2] * 4


def test_plans_without_tables_add_up_as_they_did() -> None:
    plan = planned(clipped("adam"), 2, None)
    assert {r.op for values in plan.traffic.rounds for r in values} == {"sum"}
