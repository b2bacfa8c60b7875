"""Hyperparameters in a job's state, found by short and by full names."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from dtrans.errors import ConfigError
from dtrans.step.hyperparameters import hyperparameter_leaf, replace_hyperparameters


RATE = "opt_state/hyperparams/learning_rate"


def test_names_are_short_or_full() -> None:
    assert hyperparameter_leaf(["params/w", RATE], "learning_rate") == RATE
    assert hyperparameter_leaf(["params/w", RATE], RATE) == RATE
    assert hyperparameter_leaf([f"{RATE}/value"], "learning_rate") == f"{RATE}/value"
    with pytest.raises(ConfigError, match="the optimizer keeps no 'lr' in its state; it keeps "):
        hyperparameter_leaf([RATE], "lr")
    with pytest.raises(ConfigError, match="several optimizers: .* write the full name"):
        hyperparameter_leaf([RATE, f"critic/{RATE}"], "learning_rate")


def test_only_the_named_leaf_is_replaced_with_its_type() -> None:
    state = {RATE: jnp.float32(0.5), "params/w": jnp.ones(2)}
    new = replace_hyperparameters(state, state, {"learning_rate": 0.25})
    assert new[RATE] == 0.25 and new[RATE].dtype == jnp.float32
    assert new["params/w"] is state["params/w"]


def test_a_leaf_in_the_state_of_another_process_is_refused() -> None:
    here = {"params/w": jnp.ones(2)}
    with pytest.raises(ConfigError, match=f"{RATE} is in the state of another process"):
        replace_hyperparameters([*here, RATE], here, {"learning_rate": 0.25})
