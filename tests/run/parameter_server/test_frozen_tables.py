"""Tables that a step does not train: servers store their rows, and trainers request them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from role_threads import RoleThreads
from table_jobs import ASYNC, ROWS, D, V, batches, close, init, loss, one_device, outcome, planned

import dtrans
from dtrans.errors import ConfigError


pytestmark = pytest.mark.usefixtures("x64")
NAMED = {"params/emb": dtrans.Rows()}


def stopped(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    return loss({**params, "emb": jax.lax.stop_gradient(params["emb"])}, ids, y)


LABELS = {"emb": "frozen", "w": "trained"}
FROZEN = {
    "stop_gradient, no state": (optax.sgd(0.3), stopped),
    "stop_gradient, adagrad": (optax.adagrad(0.1), stopped),
    "stop_gradient, adam": (optax.adam(0.1), stopped),
    "set_to_zero": (
        optax.multi_transform({"trained": optax.adam(0.1), "frozen": optax.set_to_zero()}, LABELS),
        loss,
    ),
}


def arrays_with_rows(program: dtrans.Program) -> list[str]:
    return [n for n, t in program.inputs.items() if V in t.shape]


@pytest.mark.parametrize("sparse", [NAMED, "auto"], ids=["named", "auto"])
@pytest.mark.parametrize("how", FROZEN)
def test_trainers_store_no_frozen_table(how: str, sparse: Any) -> None:
    tx, fn = FROZEN[how]
    plan = planned(tx, sparse, 2, 2, fn)
    assert set(plan.tables.of) == {"params/emb"}
    assert not arrays_with_rows(plan.trainer_program(0))
    assert "rows that no trainer looks up would not change" in str(plan)


@pytest.mark.parametrize("how", FROZEN)
def test_a_job_has_the_results_of_one_device(role_threads: RoleThreads, how: str) -> None:
    tx, fn = FROZEN[how]
    plan = planned(tx, NAMED, 2, 3, fn)
    found, _ = outcome(role_threads, plan, batches())
    close(found, one_device(tx, batches(), fn))
    # each bit of the frozen rows is that of the init
    np.testing.assert_array_equal(found[0]["emb"], init(tx, jax.random.key(0))[0]["emb"])


def test_asynchronous_trainers_look_up_frozen_rows(role_threads: RoleThreads) -> None:
    plan = planned(optax.sgd(0.3), NAMED, 1, 2, stopped, ASYNC)
    found, _ = outcome(role_threads, plan, batches())
    close(found, one_device(optax.sgd(0.3), batches(), stopped))


def test_gradients_by_jax_are_also_found() -> None:
    """The frozen table gets a mark, so the other gradients get marks, too."""
    tx = optax.adam(0.1)

    def step(params: Any, opt_state: Any, ids: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(stopped)(params, ids, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    start = lambda key: init(tx, key)
    key, batch = jax.random.key(0), batches(1, ROWS)[0]
    plan = dtrans.pserver(
        dtrans.trace(step, *start(key), *batch),
        dtrans.trace(start, key),
        pservers="127.0.0.1:1,127.0.0.1:2",
        trainers=2,
        sparse=NAMED,
    )
    assert set(plan.tables.of) == {"params/emb"}
    assert not arrays_with_rows(plan.trainer_program(0))


def test_a_frozen_leaf_that_is_read_in_full_is_no_table() -> None:
    def product(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
        return stopped(params, ids, y) + jnp.sum(jax.lax.stop_gradient(params["emb"]) ** 2)

    assert not planned(optax.sgd(0.3), "auto", 2, 2, product).tables.of
    with pytest.raises(ConfigError, match="params/emb, which cannot be a table: reduce_sum"):
        planned(optax.sgd(0.3), NAMED, 2, 2, product)


def test_a_small_frozen_leaf_stays_on_trainers() -> None:
    """With "auto", a table has at least four times as many rows as a step looks up."""
    tx = optax.sgd(0.1)
    params = {"emb": jnp.ones((8, D)), "w": jnp.ones(2 * D)}
    ids, y = np.zeros((ROWS, 2), int), np.zeros(ROWS)
    plan = dtrans.pserver(
        dtrans.trace(dtrans.make_train_step(stopped, tx), params, tx.init(params), ids, y),
        dtrans.trace(lambda: (params, tx.init(params))),
        pservers="127.0.0.1:1",
        sparse="auto",
    )
    assert not plan.tables.of
    assert plan.update.frozen == ("params/emb",)


@pytest.mark.parametrize("dtype", ["bool", "int32", "key"])
def test_frozen_leaves_without_floats_are_no_tables(dtype: str) -> None:
    tx = optax.sgd(0.3)

    def begin(key: jax.Array) -> Any:
        keys = jax.random.split(key, V)
        other = keys if dtype == "key" else jnp.zeros((V, D), dtype)
        return {"other": other, **init(tx, key)[0]}, ()

    def step(params: Any, state: Any, ids: jax.Array, y: jax.Array) -> Any:
        def of(trained: Any) -> jax.Array:
            rows = params["other"][ids]
            if dtype == "key":
                rows = jax.random.key_data(rows).astype(float) * 1e-10
            return loss(trained, ids, y) + rows.sum() * 1e-3

        trained = {n: x for n, x in params.items() if n != "other"}
        value, grads = dtrans.value_and_grad(of)(trained)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, trained, grads)
        return {**new, "other": params["other"]}, state, value

    key, (ids, y) = jax.random.key(0), batches()[0]
    main = dtrans.trace(step, *jax.eval_shape(begin, key), ids, y)
    startup = dtrans.trace(begin, key)
    servers = "127.0.0.1:1,127.0.0.1:2"
    plan = dtrans.pserver(main, startup, pservers=servers, trainers=1, sparse="auto")
    assert "params/other" not in plan.tables.of
    assert plan.verify().equal


def test_a_frozen_table_leaves_the_state_of_other_leaves() -> None:
    """The path of the trained leaf ends with the path of the frozen leaf."""

    def begin(key: jax.Array) -> Any:
        rows = jax.random.normal(key, (V, D))
        scales = {"a": {"emb": jnp.full((V, D), 0.1)}, "w": jnp.ones(D)}
        return {"emb": rows, "a": {"emb": rows}, "w": jnp.ones(D)}, {"scale": scales}

    def step(params: Any, state: Any, ids: jax.Array, y: jax.Array) -> Any:
        def of(trained: Any) -> jax.Array:
            rows = params["emb"][ids] + trained["a"]["emb"][ids]
            return jnp.mean((rows @ trained["w"] - 1.0) ** 2)

        trained = {"a": params["a"], "w": params["w"]}
        value, grads = dtrans.value_and_grad(of)(trained)
        new = jax.tree.map(lambda p, g, s: p - s * g, trained, grads, state["scale"])
        return {**params, **new}, state, value

    key, ids, y = jax.random.key(0), jnp.zeros(2, int), jnp.zeros(2)
    main = dtrans.trace(step, *jax.eval_shape(begin, key), ids, y)
    startup = dtrans.trace(begin, key)
    servers = "127.0.0.1:1,127.0.0.1:2"
    plan = dtrans.pserver(main, startup, pservers=servers, trainers=1, sparse="auto")
    assert set(plan.tables.of) == {"params/emb", "params/a/emb"}
    assert plan.verify().equal
