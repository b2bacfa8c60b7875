"""Names of leaves: each strategy trains leaves with any name, or refuses them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dtrans
from dtrans.errors import ConfigError, TraceError


ROWS = 8
NAMES = [
    "w@GRAD", "w.block0", "w.block1", "w@GRAD.block0", "w.trainer_1", "w@GRAD.trainer_1", "w.rows0",
    "w.stage1",
    "w@GRAD.stage1", "w/b", "w/kept/0", "a/b", "a.b.c", "float32", "@value/0", "trainer_0",
    ".block0", "@GRAD", "",
]  # fmt: skip

Params = dict[str, Any]
Strategy = Callable[..., Any]


def servers(**options: Any) -> Strategy:
    return lambda main, startup: flat_options.pserver(
        main, startup, pservers="127.0.0.1:1,127.0.0.1:2", trainers=2, min_block_size=1, **options
    )


def ranks(**options: Any) -> Strategy:
    return lambda main, startup: flat_options.sharding(
        main, startup, degree=2, min_slice_size=1, **options
    )


def stages(**options: Any) -> Strategy:
    return lambda main, startup: flat_options.pipeline(
        main, startup, num_stages=2, num_micro_batch=2, **options
    )


STRATEGIES: dict[str, Strategy] = {
    "pserver": servers(),
    "pserver, whole leaves": servers(slice_var_up=False),
    "nccl2": lambda main, startup: dtrans.nccl2(main, startup, trainers=2),
    "nccl2, micro-batches": lambda main, startup: dtrans.nccl2(
        main, startup, trainers=2, num_micro_batch=2
    ),
    "sharding 1": ranks(stage=1),
    "sharding 2, micro-batches": ranks(stage=2, num_micro_batch=2),
    "sharding 3": ranks(stage=3),
    "sharding by leaf": ranks(stage=1, partition="greedy_even"),
    "pipeline": stages(),
    "pipeline, sharded": stages(replicas=2, sharding_stage=2, min_slice_size=1),
}


def job_of(plan: Any) -> Any:
    return plan.on_mesh() if isinstance(plan, dtrans.PServerPlan) else plan.simulate()


def steps(
    loss: Callable[..., Any], params: Params, strategy: Strategy, tx: Any
) -> tuple[Any, Any, Any, Any]:
    """Return losses and parameters of two steps, of a strategy and of one device."""
    x = jax.random.normal(jax.random.key(1), (ROWS, 4))
    step = dtrans.make_train_step(loss, tx)
    init = lambda: (params, tx.init(params))
    main = dtrans.trace(step, *init(), x)
    job = job_of(strategy(main, dtrans.trace(init)))
    state, (wanted, opt_state) = job.init(), init()
    for _ in range(2):
        state, told = job.step(state, x)
        wanted, opt_state, expected = jax.jit(step)(wanted, opt_state, x)
    return told, expected, job.params(state), wanted


def small(*names: str) -> Params:
    keys = jax.random.split(jax.random.key(0), len(names))
    return {n: 0.5 * jax.random.normal(k, (4, 4)) for n, k in zip(names, keys, strict=True)}


def in_turn(params: Params, x: Any) -> Any:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def same(found: tuple[Any, Any, Any, Any]) -> None:
    told, expected, params, wanted = found
    np.testing.assert_allclose(told, expected, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), params, wanted
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_names_train(strategy: str) -> None:
    # names of blocks of other leaves
    names = [n for n in NAMES if n not in ("w@GRAD.block0", ".block0")]
    same(steps(in_turn, small(*names), STRATEGIES[strategy], optax.adam(1e-2)))


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_any_name_trains_or_is_refused(name: str, strategy: str) -> None:
    """Train a leaf with this name beside the leaf `w`, whose blocks and gradients have similar
    names."""
    try:
        found = steps(in_turn, small("w", name), STRATEGIES[strategy], optax.adam(1e-2))
    except ConfigError as e:
        assert f"params/{name}" in str(e) and "rename" in str(e), e
        assert strategy.startswith(("pserver", "sharding by leaf"))
        return
    same(found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_leaf_called_as_a_gradient_trains(strategy: str) -> None:
    same(steps(in_turn, small("w@GRAD", "v@GRAD.block0"), STRATEGIES[strategy], optax.adam(1e-2)))


def looped(params: Params, x: Any) -> Any:
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["ws"])
    for n, w in params.items():
        x = x if n == "ws" else jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["ws@GRAD", "ws.block0", "ws.block1", "ws@GRAD.block0", "ws.stage1"]
)
def test_beside_a_stack_any_name_trains(name: str) -> None:
    params = {"ws": 0.5 * jax.random.normal(jax.random.key(2), (4, 4, 4)), **small(name)}
    same(steps(looped, params, stages(), optax.adam(1e-2)))


def test_two_leaves_of_one_path_are_refused() -> None:
    params = {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}
    with pytest.raises(TraceError, match="two inputs named params/a/b; rename"):
        dtrans.trace(lambda params: params["a"]["b"] + params["a/b"], params)
