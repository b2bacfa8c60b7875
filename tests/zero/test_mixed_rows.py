"""Optimizers that mix the rows of a leaf: ranks store slices of leaves and state, and the results
equal one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import init_of, tree_close
from sharding_models import MODELS, ROWS, alone, plan_of_step, trained

import dtrans


DEGREE = 2
pytestmark = pytest.mark.usefixtures("x64")


def shampoo(rate: float = 0.1) -> Any:
    """Precondition rows and columns of matrices, as Shampoo does, with powers of the statistics."""

    def power(statistics: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(statistics)
        return (vectors * (jnp.abs(values) + 1e-3) ** -0.25) @ vectors.T

    def init(params: Any) -> Any:
        rows = lambda p: jnp.zeros((p.shape[0], p.shape[0]), p.dtype) if p.ndim == 2 else None
        columns = lambda p: jnp.zeros((p.shape[1], p.shape[1]), p.dtype) if p.ndim == 2 else None
        return jax.tree.map(rows, params), jax.tree.map(columns, params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        add_rows = lambda g, s: None if s is None else s + g @ g.T
        add_columns = lambda g, s: None if s is None else s + g.T @ g
        rows = jax.tree.map(add_rows, grads, state[0])
        columns = jax.tree.map(add_columns, grads, state[1])

        def step(g: jax.Array, left: Any, right: Any) -> jax.Array:
            return -rate * (g if left is None else power(left) @ g @ power(right))

        return jax.tree.map(step, grads, rows, columns), (rows, columns)

    return optax.GradientTransformation(init, update)


OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "muon": lambda: optax.contrib.muon(0.05),
    "shampoo": shampoo,
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=3),
    "lamb": lambda: optax.lamb(0.01),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
}
CASES = [
    (tx, model, stage)
    for tx in OPTIMIZERS
    for model in ("uneven", "transformer", "scan")
    for stage in (1, 2, 3)
]


def planned(optimizer: str, model: str, stage: int, **options: Any) -> tuple[Any, Any, Any, Any]:
    case = MODELS[model]
    params, tx = case.params(jnp.float64), case.around(OPTIMIZERS[optimizer]())
    step, init = dtrans.make_train_step(case.loss, tx), init_of(tx)
    batches = [case.batch(seed, jnp.float64) for seed in range(3)]
    return (
        plan_of_step(step, init, params, *batches[0], stage=stage, degree=DEGREE, **options),
        step,
        init,
        batches,
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer, model, stage", CASES)
def test_a_plan_computes_the_step(optimizer: str, model: str, stage: int) -> None:
    plan, _, _, batches = planned(optimizer, model, stage)
    report = plan.verify(*batches[0])
    assert report, str(report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer, model, stage", CASES)
def test_ranks_train_as_one_device(optimizer: str, model: str, stage: int) -> None:
    plan, step, init, batches = planned(optimizer, model, stage)
    params = MODELS[model].params(jnp.float64)
    got = trained(plan, "simulate", params, batches)
    tree_close(got[:2], alone(step, init, params, batches)[:2], 1e-12)


@pytest.mark.parametrize("optimizer", [n for n in OPTIMIZERS if n != "adafactor"])
def test_state_is_shared_by_all_ranks(optimizer: str) -> None:
    plan, *_ = planned(optimizer, "transformer", 1)
    names = plan.main.args[1].names
    nbytes = lambda types: sum(types[n].size * types[n].dtype.itemsize for n in names)
    held, alone = nbytes(plan.program.inputs), nbytes(plan.main.inputs)
    print(f"{optimizer}: {held:,} of {alone:,} bytes on each of {DEGREE} ranks, {held / alone:.3f}")
    assert held <= (1 / DEGREE + 0.05) * alone


def test_one_of_two_factors_is_cut() -> None:
    """Otherwise ranks would gather the other factor of Adafactor's statistics in each step."""
    plan, *_ = planned("adafactor", "transformer", 1)
    matrices = [
        n.rpartition("/")[2] for n in plan.main.args[0].names if plan.main.inputs[n].ndim == 2
    ]
    cut = [n.rpartition("/")[2] for n in plan.slices.state if "/v_row/" in n or "/v_col/" in n]
    assert sorted(cut) == sorted(matrices)


def test_micro_steps_add_up_before_an_update_mixes_rows() -> None:
    plan, step, init, batches = planned("muon", "uneven", 2, num_micro_batch=ROWS // 4)
    params = MODELS["uneven"].params(jnp.float64)
    got = trained(plan, "simulate", params, batches)
    tree_close(got[:2], alone(step, init, params, batches)[:2], 1e-12)


def test_an_iteration_is_written_once_on_whole_matrices() -> None:
    """An iteration of Newton's method reads full matrices. On slices, each iteration would reduce
    its product."""
    plan, *_ = planned("muon", "uneven", 1)
    (loop, *_) = [e for e in plan.program.jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    assert "all_reduce" not in str(loop.params["jaxpr"])


def test_small_statistics_stay_whole() -> None:
    """Gathers would cost more than the memory that slices save.

    Arrays without elements have no rows.
    """

    def init(params: Any) -> Any:
        return shampoo().init(params), jax.tree.map(lambda p: jnp.zeros((0, 3), p.dtype), params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, own = shampoo().update(grads, state[0], params)
        empty = jax.tree.map(lambda e, g: e + g.reshape(-1)[:1].sum(), state[1], grads)
        return updates, (own, empty)

    tx, params = optax.GradientTransformation(init, update), {"w": jnp.ones((8, 20))}
    step = dtrans.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx)
    plan = plan_of_step(
        step, init_of(tx), params, jnp.ones((4, 8)), degree=DEGREE, min_slice_size=100
    )
    # statistics of columns: 20 x 20
    assert {n.rpartition("/")[0] for n in plan.slices.state} == {"opt_state/0/1"}
    assert plan.memory()["padding"] == 0
