"""Lookups of consecutive rows, norms of gradients, and remedies for leaves that are no tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from role_threads import RoleThreads
from table_jobs import ASYNC, DENSE, LAZY, SYNC, D, V, batches, close, one_device, outcome, planned

import dtrans
from dtrans.errors import BatchError


pytestmark = pytest.mark.usefixtures("x64")


def mse(x: Any, params: Any, y: Any) -> Any:
    """Return a loss of D features for each row of the batch."""
    return jnp.mean((jnp.tanh(x) @ params["w"][:D] - y) ** 2)


def window(emb: Any, start: Any) -> Any:
    return jax.lax.dynamic_slice_in_dim(emb, start, 3)


# name -> (loss, number of rows of `emb` that a trainer of a batch of 6 rows looks up)
RUNS: dict[str, tuple[Callable[..., Any], int]] = {
    "slice": (lambda p, ids, y: mse(p["emb"][3:9], p, y[:1]), 6),
    "one row": (lambda p, ids, y: mse(p["emb"][V - 1 :], p, y), 1),
    "slice and lookup": (
        lambda p, ids, y: mse(p["emb"][ids[:, 0]] + p["emb"][2:5].sum(0), p, y),
        6 + 3,
    ),
    "overlapping slices": (
        lambda p, ids, y: mse(p["emb"][ids[:, 0]] * p["emb"][4:5] + p["emb"][4:8].sum(0), p, y),
        6 + 1 + 4,
    ),
    "windows": (
        lambda p, ids, y: mse(jax.vmap(lambda i: window(p["emb"], i).sum(0))(ids[:, 0]), p, y),
        6 * 3,
    ),
    "windows in a loop": (
        lambda p, ids, y: mse(jax.lax.map(lambda i: window(p["emb"], i).sum(0), ids[:, 0]), p, y),
        6 * 3,
    ),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("tx", [optax.adagrad(0.1), optax.adam(0.1)], ids=["adagrad", "adam"])
def test_consecutive_rows_are_those_of_one_device(name: str, tx: Any) -> None:
    loss, size = RUNS[name]
    plan = planned(tx, DENSE, 1, 2, loss)
    assert plan.tables.of["params/emb"].lookups.size == size
    # 2 * D numbers of `w`, and the rows with their ids
    assert plan.bytes_per_step["send"] == 8 * 2 * D + size * (8 * D + 4)
    job, given, losses = plan.simulate(), batches(), []
    state = job.init(jax.random.key(0))
    for batch in given:
        state, value = job.step(state, *batch)
        losses.append(float(value))
    close((job.params(state), losses), one_device(tx, given, loss))
    assert (report := plan.verify()), str(report)


@pytest.mark.parametrize("name", ["slice and lookup", "windows"])
def test_consecutive_rows_in_a_job_of_two_trainers(role_threads: RoleThreads, name: str) -> None:
    tx, given = optax.adagrad(0.1), batches()
    (params, losses), _ = outcome(role_threads, planned(tx, DENSE, 2, 2, RUNS[name][0]), given)
    expected, expected_losses = one_device(tx, given, RUNS[name][0])
    close((params, losses), (expected, expected_losses))


@pytest.mark.parametrize("mode", [SYNC, ASYNC, dtrans.Geo(2)], ids=["sync", "async", "geo"])
@pytest.mark.parametrize("name", ["slice and lookup", "overlapping slices", "windows"])
def test_a_lazy_update_changes_consecutive_rows(name: str, mode: Any) -> None:
    report = planned(optax.adam(0.1), LAZY, 1, 2, RUNS[name][0], mode).verify()
    assert report, str(report)


def test_a_window_that_ends_outside_the_table_is_an_error() -> None:
    """One device would move the window into the table."""
    loss, _ = RUNS["windows"]
    job = planned(optax.sgd(0.1), DENSE, 1, 1, loss).simulate()
    ids, y = batches(1)[0]
    ids[2, 0] = V - 2
    with pytest.raises(BatchError, match=f"asks for row {V} .* the table has rows 0 to {V - 1}"):
        job.step(job.init(jax.random.key(0)), ids, y)


SHAPES = {
    "one number a row": ((V,), jnp.float32),
    "bfloat16": ((V, D), jnp.bfloat16),
    "matrices": ((V, 2, D), jnp.float32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_slice_of_rows_of_any_shape(name: str) -> None:
    shape, dtype = SHAPES[name]
    tx = optax.sgd(0.5)
    init = lambda: (p := {"emb": jnp.ones(shape, dtype)}, tx.init(p))
    loss = lambda p, y: jnp.sum(p["emb"][5:8].astype(y.dtype) ** 2 * y)
    step = dtrans.make_train_step(loss, tx)
    y = jnp.float32(0.5)
    plan = dtrans.pserver(dtrans.trace(step, *init(), y), dtrans.trace(init), sparse="auto")
    assert plan.tables.of["params/emb"].lookups.size == 3
    job = plan.simulate()
    state, _ = job.step(job.init(), y)
    np.testing.assert_array_equal(job.params(state)["emb"], jax.jit(step)(*init(), y)[0]["emb"])


def test_auto_leaves_long_slices_alone() -> None:
    """A slice of more than a quarter of the rows stays a slice, and the leaf is no table."""
    loss = lambda p, ids, y: mse(p["emb"][: V // 2].sum(0)[None], p, y)
    plan = planned(optax.sgd(0.1), "auto", 1, 1, loss)
    assert not plan.tables.of
    assert not [e for e in plan.trainer.eqns if e.primitive.name == "dynamic_slice"]


# -- norms -----------------------------------------------------------------------------------------


def reporting(
    tx: Any, report: Callable[[Any, Any], Any], differentiate: Any = jax.value_and_grad
) -> Callable[..., Any]:
    """Return a step with the result `report(params, gradients)`."""

    def step(params: Any, state: Any, ids: Any, y: Any) -> Any:
        loss = lambda p: mse(p["emb"][ids[:, 0]] + p["emb"][ids[:, 1]], p, y)
        value, grads = differentiate(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, report(params, grads))

    return step


REPORTS: dict[str, Callable[[Any, Any], Any]] = {
    "global norm": lambda p, g: optax.tree.norm(g),
    "norm of a leaf": lambda p, g: jnp.sqrt(jnp.sum(g["emb"] ** 2)),
    "sum of sizes": lambda p, g: jnp.sum(jnp.abs(0.5 * g["emb"])),
    "norms of columns": lambda p, g: jnp.sum(g["emb"] * g["emb"], axis=0),
}
REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "mean of exponentials": lambda p, g: jnp.mean(jnp.exp(g["emb"])),
    "maximum": lambda p, g: jnp.max(g["emb"]),
    "norm of the table": lambda p, g: jnp.sum(p["emb"] ** 2),
    "product with the table": lambda p, g: jnp.sum(g["emb"] * p["emb"]),
    "shifted": lambda p, g: jnp.sum((g["emb"] + 1) ** 2),
}


def reporting_plan(
    tx: Any, report: Any, sparse: Any, differentiate: Any = jax.value_and_grad
) -> tuple[Any, Any, Any]:
    def init() -> Any:
        emb = jax.random.normal(jax.random.key(0), (V, D))
        params = {"emb": emb, "w": jnp.linspace(-1, 1, 2 * D)}
        return params, tx.init(params)

    step = reporting(tx, report, differentiate)
    ids, y = batches(1)[0]
    main = dtrans.trace(step, *init(), ids, y)
    servers = "127.0.0.1:1,127.0.0.1:2"
    return dtrans.pserver(main, dtrans.trace(init), pservers=servers, sparse=sparse), step, init


@pytest.mark.parametrize("differentiate", [jax.value_and_grad, dtrans.value_and_grad])
@pytest.mark.parametrize("name", REPORTS)
def test_a_norm_of_gradients_reads_the_rows_of_the_batch(name: str, differentiate: Any) -> None:
    plan, step, init = reporting_plan(optax.adam(0.1), REPORTS[name], DENSE, differentiate)
    job, given = plan.simulate(), batches()
    state, (params, opt_state) = job.init(), init()
    for batch in given:
        state, found = job.step(state, *batch)
        params, opt_state, expected = jax.jit(step)(params, opt_state, *batch)
        close(found, expected)
    close(job.params(state), params)
    assert not [
        v for e in plan.trainer.eqns for v in e.outvars if V in getattr(v.aval, "shape", ())
    ]
    assert (report := plan.verify()), str(report)


@pytest.mark.parametrize("name", REFUSED)
def test_other_results_read_all_rows(name: str) -> None:
    plan, _, _ = reporting_plan(optax.sgd(0.1), REFUSED[name], "auto")
    assert not plan.tables.of
    assert "reads all of its rows" in plan.tables.others["params/emb"]


# -- remedies --------------------------------------------------------------------------------------

F, ROWS = 3, 400
STACKED: dict[str, Callable[[Any, Any], Any]] = {
    "two indices": lambda emb, ids: emb[jnp.arange(F), ids],
    "an index of each table": lambda emb, ids: jnp.stack(
        [emb[f][ids[:, f]] for f in range(F)], axis=1
    ),
    "vmap": lambda emb, ids: jax.vmap(lambda e, i: e[i], in_axes=(0, 1), out_axes=1)(emb, ids),
    "scan": lambda emb, ids: jnp.swapaxes(jax.lax.map(lambda x: x[0][x[1]], (emb, ids.T)), 0, 1),
}


def trained(read: Callable[[Any, Any], Any], emb: Any, ids: Any) -> tuple[Any, np.ndarray]:
    """Return a plan with sparse="auto", and the leaf after two steps."""
    tx = optax.adagrad(0.1)
    init = lambda: (p := {"emb": emb, "w": jnp.arange(1.0, D + 1)}, tx.init(p))
    loss = lambda p, ids: jnp.mean((read(p["emb"], ids) @ p["w"]) ** 2)
    step = dtrans.make_train_step(loss, tx)
    plan = dtrans.pserver(dtrans.trace(step, *init(), ids), dtrans.trace(init), sparse="auto")
    job = plan.simulate()
    state = job.init()
    for _ in range(2):
        state, _ = job.step(state, ids)
    return plan, np.asarray(job.params(state)["emb"])


@pytest.mark.parametrize("name", STACKED)
def test_the_remedy_of_stacked_tables_is_a_table(name: str) -> None:
    rng = np.random.default_rng(0)
    emb, ids = jnp.asarray(rng.normal(size=(F, ROWS, D))), rng.integers(0, ROWS, (4, F))
    plan, wanted = trained(STACKED[name], emb, ids)
    remedy = (
        "(if emb[f] are separate tables, let init return one array of shape (1200, 3), and look up "
        "emb[f * 400 + ids])"
    )
    assert remedy in plan.tables.others["params/emb"] and not plan.tables.of
    read = lambda emb, ids: emb[jnp.arange(F) * 400 + ids]
    plan, found = trained(read, emb.reshape(1200, 3), ids)
    assert list(plan.tables.of) == ["params/emb"]
    close(found.reshape(wanted.shape), wanted)


def test_the_remedy_of_a_row_of_zeros_is_a_table() -> None:
    rng = np.random.default_rng(0)
    emb, ids = jnp.asarray(rng.normal(size=(ROWS, D))), rng.integers(0, ROWS + 1, (4, F))
    before = lambda emb, ids: jnp.concatenate([jnp.zeros((1, D)), emb])[ids]
    plan, wanted = trained(before, emb, ids)
    assert (
        "(for a row of zeros, give padding an id outside the table, and read jnp.take(table, "
        in (plan.tables.others["params/emb"])
    )
    after = lambda emb, ids: jnp.take(
        emb, jnp.where(ids == 0, ROWS, ids - 1), axis=0, mode="fill", fill_value=0
    )
    plan, found = trained(after, emb, ids)
    assert list(plan.tables.of) == ["params/emb"]
    close(found, wanted)
