"""Steps with unusual loops, branches and rules: literals, closures, reversed rows.

Each strategy computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flat_options import nccl2, pipeline, sharding
from jax import lax

import dtrans
from dtrans.errors import ConfigError


pytestmark = pytest.mark.usefixtures("x64")
Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]
STRATEGIES: dict[str, Callable[..., Any]] = {
    "stage 3": lambda main, startup: sharding(main, startup, degree=2, stage=3, min_slice_size=0),
    "stage 2 in micro-steps": lambda main, startup: sharding(
        main, startup, degree=2, stage=2, min_slice_size=0, num_micro_batch=2
    ),
    "pipeline": lambda main, startup: pipeline(main, startup, num_stages=1, num_micro_batch=2),
    "nccl2": lambda main, startup: nccl2(main, startup, trainers=2),
}


def predicted(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["w"]) @ p["v"]


def a_stack_of_layers_is_read_whole(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return a loss that reads a loop's stack of layers, unchanged and multiplied, and a
    literal."""

    @jax.checkpoint
    def turn(c: jax.Array, w: jax.Array) -> Any:
        return jnp.tanh(c * w), (c, w, 2 * w, 1.0)

    c, (stacked, layers, doubled, ones) = lax.scan(turn, x[:, :3], p["w"])
    penalty = jnp.sum(layers * ones[:, None]) + jnp.sum(jnp.sin(doubled[1]))
    return jnp.mean((c @ p["v"] - y) ** 2) + jnp.mean(stacked) * penalty


def branches_are_chosen_by_literals(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = lax.cond(True, lambda w: x @ w, lambda w: jnp.tanh(x @ w), p["w"])
    penalty = lax.switch(1, [jnp.sum, lambda w: jnp.sum(w**2)], p["w"])
    return jnp.mean((hidden @ p["v"] - y) ** 2) + penalty


def rows_in_reverse(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((predicted(p, x) - 2 * y[::-1]) ** 2)


def a_loop_ends_by_the_largest_of_all_rows(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    smaller, turns = lax.while_loop(
        lambda carried: jnp.max(jnp.abs(carried[0])) > 0.1,
        lambda carried: (carried[0] / 2, carried[1] + 1),
        (x, 0),
    )
    return jnp.mean((predicted(p, smaller) * turns - y) ** 2)


def a_rule_closes_over_an_array(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    with jax.ensure_compile_time_eval():
        shift = jnp.arange(3.0)  # a concrete array, not a traced value

    @jax.custom_vjp
    def layer(c: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(c * w + shift)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        c, w = kept
        return cotangent * w + shift, 0.5 * jnp.sum(cotangent * c, 0)

    layer.defvjp(lambda c, w: (layer(c, w), (c, w)), backward)
    c, _ = lax.scan(lambda c, w: (layer(c, w), None), x[:, :3], p["w"])
    return jnp.mean((c @ p["v"] - y) ** 2)


LOSSES = [
    a_stack_of_layers_is_read_whole,
    branches_are_chosen_by_literals,
    rows_in_reverse,
    a_loop_ends_by_the_largest_of_all_rows,
    a_rule_closes_over_an_array,
]


def verify(loss: Loss, strategy: str) -> None:
    """Verify a plan of a step with this loss."""
    rng, tx = np.random.default_rng(0), optax.adam(0.1)
    params = {"w": jnp.asarray(rng.normal(size=(4, 3))), "v": jnp.asarray(rng.normal(size=3))}
    batch = jnp.asarray(rng.normal(size=(8, 4))), jnp.asarray(rng.normal(size=8))
    step = dtrans.make_train_step(loss, tx)
    init = lambda: (params, tx.init(params))
    plan = STRATEGIES[strategy](dtrans.trace(step, *init(), *batch), dtrans.trace(init))
    report = plan.verify(*batch, points=(0, 1))
    assert report.equal and report.complete, report


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_each_strategy_computes_it(loss: Loss, strategy: str) -> None:
    verify(loss, strategy)


def a_number_is_added_to_a_sum_over_rows(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    total = jnp.sum(jnp.tanh(x @ p["w"]), 0).at[1].add(1.0)
    return jnp.sum(total) / len(x) + jnp.mean((predicted(p, x) - y) ** 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_entry_of_a_sum_is_changed_once(strategy: str) -> None:
    """The number is a literal, and belongs to no part's term.

    A strategy whose parts exchange nothing refuses the step, and names the line.
    """
    if strategy in ("nccl2", "stage 3"):
        verify(a_number_is_added_to_a_sum_over_rows, strategy)
    else:
        with pytest.raises(ConfigError, match="test_odd_steps.py:"):
            verify(a_number_is_added_to_a_sum_over_rows, strategy)
