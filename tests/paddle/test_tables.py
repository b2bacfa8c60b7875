"""Tables through Paddle's interface: the options of `Embedding`, and the results of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import role_threads as roles
from paddle_golden import embedding
from role_threads import RoleThreads, free_endpoints

import dtrans
from dtrans.errors import ConfigError
from dtrans.paddle import CountFilterEntry, Embedding, ProbabilityEntry


V, D, ROWS, WORDS = 100, 4, 8, 3
SGD = optax.sgd(0.5)


def init(tx: Any, key: jax.Array) -> Any:
    one, two = jax.random.split(key)
    table, w = jax.random.uniform(one, (V, D)), jax.random.normal(two, (2 * D, 2))
    params = {"fc_b": jnp.zeros(2), "fc_w": w, "shared_w": table}
    return params, tx.init(params)


def batches(steps: int) -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(0)
    ids = lambda: rng.integers(0, V, (ROWS, WORDS)).astype(np.int32)
    return [(rng.integers(0, 2, ROWS).astype(np.int32), ids(), ids()) for _ in range(steps)]


def transpiled(
    table: Any, servers: Any = 2, trainers: int = 2, tx: Any = SGD, **config: Any
) -> Any:
    """Return the transpiler that every process of a job would create. In this test, all roles share
    one transpiler."""
    key, part = jax.random.key(0), [x[: ROWS // trainers] for x in batches(1)[0]]
    start = lambda key: init(tx, key)
    sparse = {"params/shared_w": table} if isinstance(table, Embedding) else table
    t = dtrans.DistributeTranspiler(dtrans.DistributeTranspilerConfig(**config, sparse=sparse))
    t.transpile(
        0,
        dtrans.trace(dtrans.make_train_step(embedding, tx), *jax.eval_shape(start, key), *part),
        ",".join(free_endpoints(servers)),
        trainers,
        sync_mode=config.get("sync_mode", True),
        startup_program=dtrans.trace(start, key),
    )
    return t


def losses(role_threads: RoleThreads, plan: Any, steps: int) -> np.ndarray:
    """Return the mean of the trainers' losses in each step."""
    for ep in plan.servers:
        role_threads.start(ep, roles.serve, plan, ep, jax.random.key(0))
    for k in range(plan.trainers):
        role_threads.start(f"trainer {k}", roles.train, plan, k, batches(steps), jax.random.key(0))
    ended = role_threads.all()
    return np.mean([ended[f"trainer {k}"][1] for k in range(plan.trainers)], 0)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "table, servers, tx",
    [
        (Embedding(), 2, SGD),
        (Embedding(is_distributed=True), 3, SGD),  # servers do not divide the rows
        (Embedding(), 2, dtrans.paddle.optimizers.adam(0.1)),
        # Paddle trains such a table by SGD
        (
            Embedding(is_distributed=True),
            3,
            dtrans.paddle.optimizers.adam(0.1),
        ),
    ],
)
def test_losses_are_those_of_one_device(
    role_threads: RoleThreads, table: Embedding, servers: int, tx: Any
) -> None:
    plan = transpiled(table, servers, tx=tx).plan
    assert list(plan.tables.of) == ["params/shared_w"]
    step, (params, opt_state), wanted = (
        jax.jit(dtrans.make_train_step(embedding, tx)),
        init(tx, jax.random.key(0)),
        [],
    )
    for batch in batches(5):
        params, opt_state, value = step(params, opt_state, *batch)
        wanted.append(float(value))
    np.testing.assert_allclose(losses(role_threads, plan, 5), wanted, rtol=1e-12)


def test_what_an_embedding_asks_for() -> None:
    rows = lambda *args: Embedding(*args).rows(3)
    assert rows(True) == dtrans.Rows("dense", "range")
    assert rows(True, True) == dtrans.Rows("dense", "bucket", 3)
    assert rows(True, False, True) == dtrans.Rows("lazy")
    count, probability = CountFilterEntry(4), ProbabilityEntry(0.1)
    assert rows(True, True, True, count) == dtrans.Rows("lazy", "bucket", 3, admit_count=4)
    assert rows(True, False, False, probability) == dtrans.Rows("dense", admit_probability=0.1)
    assert rows(True, False, False, CountFilterEntry(0)).row_filter is None
    plan = transpiled(Embedding(entry=count)).plan
    assert str(plan.tables.of["params/shared_w"].row_filter) == "admit_count=4"
    assert not transpiled(Embedding(is_sparse=False)).plan.tables.of
    assert not transpiled(None).plan.tables.of
    assert list(transpiled("auto").plan.tables.of) == ["params/shared_w"]


@pytest.mark.parametrize("name", ["asynchronous", "synchronous"])
def test_both_modes_have_tables(name: str) -> None:
    plan = transpiled(Embedding(), sync_mode=name == "synchronous").plan
    assert list(plan.tables.of) == ["params/shared_w"]


@pytest.mark.parametrize(
    "sparse, said",
    [
        (
            "all",
            "sparse is 'all'; expected None, 'auto', or {'params/emb': dtrans.paddle.Embedding",
        ),
        (
            {"params/shared_w": dtrans.Rows()},
            r"sparse\['params/shared_w'\] must be a dtrans.paddle.Embedding",
        ),
        (
            {"params/fc_w": Embedding()},
            "sparse contains params/fc_w, which cannot be a table: ",
        ),
        (
            {"params/table": Embedding()},
            "sparse contains 'params/table'; expected parameters that servers update: ",
        ),
    ],
)
def test_what_is_no_table_is_refused(sparse: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        transpiled(sparse)


def test_only_servers_have_tables() -> None:
    config = dtrans.DistributeTranspilerConfig(mode="nccl2", sparse={"params/emb": Embedding()})
    with pytest.raises(
        ConfigError, match="^sparse={'params/emb': .* needs mode='pserver', but mode is 'nccl2'"
    ):
        config.check()
    with pytest.raises(ConfigError, match="is_sparse must be True or False"):
        Embedding(is_sparse="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entry, why",
    [
        (lambda: CountFilterEntry(-1), "count_filter must be a number of updates from 0 to"),
        (lambda: CountFilterEntry("none"), "count_filter must be a number of updates from 0 to"),
        (lambda: ProbabilityEntry(1.0), "probability must be a number between 0 and 1"),
        (lambda: Embedding(entry=10), "entry must be a dtrans.paddle.CountFilterEntry, a dtrans"),
    ],
)
def test_a_wrong_entry_is_refused(entry: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        entry()


def test_geo_sgd_has_no_entry() -> None:
    """The error names the option of `dtrans.Rows`."""
    geo = {"sync_mode": False, "geo_sgd_mode": True}
    with pytest.raises(ConfigError, match="admit_count=4, but with dtrans.Geo trainers update"):
        transpiled(Embedding(entry=CountFilterEntry(4)), **geo)
