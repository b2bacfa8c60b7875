"""Gradients with an infinity or a NaN: the error names them and their trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import init_of, tree_equal
from role_threads import RoleThreads, free_endpoints, serve, train

import dtrans
from dtrans.errors import ConfigError, NonfiniteError, NonfiniteWarning, PeerError
from dtrans.run.base.nonfinite import all_finite


PARAMS = {
    "b": jnp.ones(2),
    "layers": jnp.ones((4, 6, 6)) / 6,
    "v": jnp.ones((6, 4)),
    "w": jnp.ones((6, 6)),
}
GOOD = np.ones((4, 6), np.float32)
BAD = np.where(np.arange(4)[:, None] == 2, 200, GOOD).astype(np.float32)  # a row of trainer 1
NAMED = "gradients of trainer 1 are not finite: params/b"


def loss(params: Any, x: jax.Array) -> jax.Array:
    """Return a loss.

    In rows above 100, the gradient of b is infinite, and so are gradients of visible layers.
    """
    h, _ = jax.lax.scan(
        lambda h, w: (jnp.tanh(h @ w), None), jnp.minimum(x, 1) @ params["w"], params["layers"]
    )
    odd = jnp.where(x[:, 0] > 100, jnp.inf, 0.0)
    return jnp.mean((h @ params["v"]) ** 2) + jnp.mean(odd * params["b"][0])


def of_layers(params: Any, x: jax.Array) -> jax.Array:
    """Return a loss in which the gradient of the layers is infinite."""
    odd = jnp.where(x > 100, jnp.inf, 1.0)
    h, _ = jax.lax.scan(
        lambda h, w: (jnp.tanh(h @ w) * odd, None), jnp.minimum(x, 1), params["layers"]
    )
    return jnp.mean(h) + sum(jnp.sum(params[n]) for n in ("b", "v", "w"))


def traced(loss: Callable[..., Any] = loss) -> tuple[Any, Any]:
    tx = optax.adam(0.1)
    step = dtrans.make_train_step(loss, tx)
    return dtrans.trace(step, PARAMS, jax.eval_shape(tx.init, PARAMS), GOOD[:2]), dtrans.trace(
        init_of(tx), PARAMS
    )


def sharded(stage: int, **options: Any) -> Any:
    return dtrans.sharding(
        *traced(), degree=2, stage=stage, slices=dtrans.Slicing(min_slice_size=1), **options
    )


def with_servers(pservers: Any = "127.0.0.1:6174,127.0.0.1:6175", **options: Any) -> Any:
    return dtrans.pserver(*traced(), pservers=pservers, trainers=2, **options)


PLANS: dict[str, Callable[[], Any]] = {
    "nccl2": lambda: dtrans.nccl2(*traced(), trainers=2),
    "nccl2, compressed": lambda: dtrans.nccl2(
        *traced(), trainers=2, reduce=dtrans.Reduce(compress="bf16")
    ),
    "sharding 1": lambda: sharded(1),
    "sharding 3": lambda: sharded(3),
    "pserver": with_servers,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLANS)
def test_on_a_mesh_the_trainer_and_the_leaf_are_named(name: str) -> None:
    plan = PLANS[name]()
    job = plan.on_mesh(on_nonfinite="error")
    state = job.init(PARAMS)
    state, _ = job.step(state, GOOD)
    want = plan.on_mesh()
    tree_equal(job.params(state), want.params(want.step(want.init(PARAMS), GOOD)[0]))
    with pytest.raises(NonfiniteError, match=f"^{NAMED}$"):
        state, _ = job.step(state, BAD)
        job.params(state)

    job = plan.on_mesh(on_nonfinite="warn")
    state = job.init(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = job.step(state, GOOD)
        job.params(state)
    with pytest.warns(NonfiniteWarning, match=f"^{NAMED}$"):
        job.params(job.step(state, BAD)[0])


def test_an_error_of_a_step_comes_with_the_next_and_once() -> None:
    job = PLANS["nccl2"]().on_mesh(on_nonfinite="error")
    state, _ = job.step(job.init(PARAMS), BAD)
    jax.effects_barrier()
    with pytest.raises(NonfiniteError, match=NAMED):
        job.step(state, GOOD)
    job.params(state)


def test_gradients_of_layers_are_looked_at_in_their_loop() -> None:
    plan = dtrans.sharding(
        *traced(of_layers), degree=2, stage=3, slices=dtrans.Slicing(min_slice_size=1)
    )
    job = plan.on_mesh(on_nonfinite="error")
    with pytest.raises(NonfiniteError, match="of trainer 1 are not finite: layers of a loop"):
        job.params(job.step(job.init(PARAMS), BAD)[0])


def test_no_server_hears_of_them(role_threads: RoleThreads) -> None:
    eps = free_endpoints(2)
    plan = with_servers(eps)
    for ep in eps:
        role_threads.start(ep, serve, plan, ep, PARAMS)
    for k in range(2):
        role_threads.start(
            f"trainer {k}", train, plan, k, [(GOOD,), (BAD,)], PARAMS, on_nonfinite="error"
        )
    found = role_threads.end("trainer 1")
    assert isinstance(found, NonfiniteError)
    assert str(found) == "gradients are not finite: params/b@GRAD.trainer_1"
    for other in ("trainer 0", *eps):
        assert isinstance(error := role_threads.end(other), PeerError)
        assert "NonfiniteError: gradients are not finite: params/b@GRAD.trainer_1" in str(error)


@pytest.mark.parametrize(
    "plan, how, message",
    [
        ("nccl2", "raise", "on_nonfinite must be 'ignore', 'warn' or 'error', it is 'raise'"),
        (
            "alone",
            "warn",
            "on_nonfinite='warn': one trainer has no gradients of other trainers to check; "
            "jax.config.update",
        ),
        (
            "local",
            "error",
            "on_nonfinite='error': with local_sgd, trainers average parameters instead of "
            "gradients",
        ),
        (
            "scaled",
            "warn",
            "on_nonfinite='warn': with a dynamic loss scale, the job itself skips steps",
        ),
    ],
)
def test_refused(plan: str, how: str, message: str) -> None:
    plans = {
        "alone": lambda: dtrans.nccl2(*traced(), trainers=1),
        "local": lambda: dtrans.nccl2(*traced(), trainers=2, local_sgd=2),
        "scaled": lambda: sharded(2, precision=dtrans.Precision("fp16")),
    }
    with pytest.raises(ConfigError, match=message):
        (PLANS | plans)[plan]().on_mesh(on_nonfinite=how)


def test_a_sum_that_overflows_is_no_infinity() -> None:
    assert all_finite(np.full(4, 3e38, np.float32)) and all_finite(np.full(4, 60000, np.float16))
    assert all_finite(np.arange(3)) and all_finite(np.zeros((0, 2), np.float32))
    assert not all_finite(np.array([np.inf, -np.inf], np.float32)) and not all_finite(
        np.array([1, np.nan])
    )
    assert not all_finite(np.array([1, np.nan]).astype(jnp.bfloat16))


def test_trainers_that_keep_their_gradients_do_not_look(role_threads: RoleThreads) -> None:
    (ep,) = free_endpoints(1)
    plan = with_servers(ep, mode=dtrans.Geo(2))
    role_threads.start(ep, serve, plan, ep, PARAMS, deadline=5.0)
    with (
        pytest.raises(
            ConfigError, match="on_nonfinite='warn': with dtrans.Geo, trainers send changes of"
        ),
        dtrans.Executor(on_nonfinite="warn") as exe,
    ):
        exe.run(plan.trainer_startup_program(0), PARAMS)
