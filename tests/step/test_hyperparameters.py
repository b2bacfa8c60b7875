"""Hyperparameters in the state of a job, found by short and by full names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans.errors import ConfigError
from dtrans.step.hyperparameters import hyperparameter_leaf, replace_hyperparameters


RATE = "opt_state/hyperparams/learning_rate"


def test_names_are_short_or_full() -> None:
    assert hyperparameter_leaf(["params/w", RATE], "learning_rate") == RATE
    assert hyperparameter_leaf(["params/w", RATE], RATE) == RATE
    assert hyperparameter_leaf([f"{RATE}/value"], "learning_rate") == f"{RATE}/value"
    with pytest.raises(ConfigError, match="'lr' is not a hyperparameter in the optimizer state"):
        hyperparameter_leaf([RATE], "lr")
    with pytest.raises(ConfigError, match="several optimizers: .* use the full name"):
        hyperparameter_leaf([RATE, f"critic/{RATE}"], "learning_rate")


def test_only_the_named_leaf_is_replaced_with_its_type() -> None:
    state = {RATE: jnp.float32(0.5), "params/w": jnp.ones(2)}
    new = replace_hyperparameters(state, state, {"learning_rate": 0.25})
    assert new[RATE] == 0.25 and new[RATE].dtype == jnp.float32
    assert new["params/w"] is state["params/w"]


def test_a_leaf_in_the_state_of_another_process_is_refused() -> None:
    here = {"params/w": jnp.ones(2)}
    with pytest.raises(ConfigError, match=f"{RATE} is not in the state of this process"):
        replace_hyperparameters([*here, RATE], here, {"learning_rate": 0.25})


@pytest.mark.parametrize("kind", ["pserver", "pipeline"])
def test_a_rate_that_is_an_argument_of_the_step_changes_between_steps(kind: str) -> None:
    """Run the step of docs/between_steps.md."""
    tx = optax.scale_by_adam()

    def init(key: Any) -> Any:
        params = {"w": jax.random.normal(key, (5, 2))}
        return params, tx.init(params)

    def step(params: Any, opt_state: Any, lr: Any, x: Any, y: Any) -> Any:
        loss = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)
        value, grads = dtrans.value_and_grad(loss)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return jax.tree.map(lambda p, u: p - lr * u, params, updates), opt_state, value

    key = jax.random.key(0)
    x, y = jax.random.normal(key, (8, 5)), jnp.ones((8, 2))
    main = dtrans.trace(step, *jax.eval_shape(init, key), 0.1, x, y)
    traced = main, dtrans.trace(init, key)
    if kind == "pserver":
        placement = dtrans.BlockPlacement(min_block_size=1)
        pservers = "127.0.0.1:6174,127.0.0.1:6175"
        job = dtrans.pserver(*traced, pservers=pservers, trainers=2, placement=placement).simulate()
    else:
        job = dtrans.pipeline(*traced, num_stages=2, num_micro_batch=2).simulate()
    state, alone = job.init(key), init(key)
    for rate in (0.1, 0.01):
        state, _ = job.step(state, rate, x, y)
        *alone, _ = step(*alone, rate, x, y)
    np.testing.assert_allclose(job.params(state)["w"], alone[0]["w"], rtol=1e-6)
