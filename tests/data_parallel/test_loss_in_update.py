"""Optimizers that read or evaluate the loss: collectives compute the results of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close

import dtrans


TOLD = {
    "reduce_on_plateau": optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    ),
    "momo": optax.contrib.momo(),
    "polyak_sgd": optax.polyak_sgd(),
    "lbfgs, backtracking": optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5)),
    "lbfgs, zoom": optax.lbfgs(),
}


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)


def case(name: str, value_and_grad: Any = jax.value_and_grad) -> Any:
    """Return a step, its init and a batch of 14 rows, in float64."""
    tx = optax.with_extra_args_support(TOLD[name])
    rng = np.random.default_rng(3)
    start, x, y = (rng.normal(size=shape) for shape in ((6, 4), (14, 6), (14, 4)))

    def init(key: Any) -> Any:
        params = {"w": jnp.asarray(start)}
        return params, tx.init(params)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, grads = value_and_grad(loss_of)(params, x, y)
        told = {"value": value, "grad": grads, "value_fn": lambda p: loss_of(p, x, y)}
        updates, opt_state = tx.update(grads, opt_state, params, **told)
        return optax.apply_updates(params, updates), opt_state, value

    return step, init, jnp.asarray(x), jnp.asarray(y)


def planned(of: Any, make: Any, **options: Any) -> Any:
    step, init, x, y = of
    return make(
        dtrans.trace(step, *init(None), x, y), dtrans.trace(init, jax.random.key(0)), **options
    )


def planned_for(name: str, strategy: str) -> tuple[Any, Any]:
    """Return a plan, and the result of `case`, for two and three ranks, with marked or unmarked
    gradients."""
    ranks = {"nccl2": 2, "nccl2, 3": 3, "stage 1": 2, "stage 2": 2, "stage 3": 3}[strategy]
    of = case(
        name, dtrans.value_and_grad if strategy in ("nccl2", "stage 2") else jax.value_and_grad
    )
    if strategy.startswith("nccl2"):
        return planned(of, dtrans.nccl2, trainers=ranks), of
    slices = dtrans.Slicing(min_slice_size=0)
    return planned(of, dtrans.sharding, degree=ranks, stage=int(strategy[-1]), slices=slices), of


STRATEGIES = ["nccl2", "nccl2, 3", "stage 1", "stage 2", "stage 3"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TOLD)
def test_plans_compute_the_step(x64: None, name: str, strategy: str) -> None:
    plan, _ = planned_for(name, strategy)
    assert (report := plan.verify()), str(report)


@pytest.mark.parametrize(
    ("name", "strategy", "way"),
    [
        ("reduce_on_plateau", "nccl2", "on_mesh"),
        ("lbfgs, zoom", "nccl2, 3", "simulate"),
        ("lbfgs, backtracking", "stage 3", "simulate"),
    ],
)
def test_a_job_gives_the_numbers_of_one_device(
    x64: None, name: str, strategy: str, way: str
) -> None:
    plan, (step, init, x, y) = planned_for(name, strategy)
    job = getattr(plan, way)()
    state, want, one = job.init(jax.random.key(0)), init(None), jax.jit(step)
    for _ in range(3):
        state, value = job.step(state, x, y)
        *want, expected = one(*want, x, y)
        tree_close((job.params(state), job.opt_state(state), value), (*want, expected), 1e-10)


@pytest.mark.parametrize("name", TOLD)
def test_others_refuse_it_in_their_own_words(x64: None, name: str) -> None:
    refusals = {
        "only the trainers have": (dtrans.pserver, {"trainers": 2}),
        "a stage has only for one micro-batch at a time": (
            dtrans.pipeline,
            {"num_stages": 1, "num_micro_batch": 2},
        ),
        "which differs by trainer": (dtrans.nccl2, {"trainers": 2, "batch": "local"}),
        "which differs by rank": (dtrans.sharding, {"degree": 2, "stage": 1, "batch": "local"}),
    }
    for words, (make, options) in refusals.items():
        with pytest.raises(
            dtrans.errors.OptimizerError, match=f"^optax.* uses loss, .*{words}.*; use an optimizer"
        ):
            planned(case(name), make, **options)
