"""Operations that compute each row separately need no exchange between trainers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tree_close
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

import dtrans


pytestmark = pytest.mark.usefixtures("x64")

SIZE = 4
SGD = optax.sgd(0.1)
OFFLOADED = checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)


def definite(params: Any, x: Any) -> jax.Array:
    """Return a positive definite matrix for each row."""
    hidden = x @ params["w"]
    return hidden @ hidden.swapaxes(-1, -2) + 4 * jnp.eye(SIZE)


def moved(params: Any, x: Any) -> jax.Array:
    return jnp.tanh(jax.device_put(x @ params["w"], jax.memory.Space.Device)) ** 2


@functools.partial(jax.checkpoint, policy=OFFLOADED)
def offloaded(params: Any, x: Any) -> jax.Array:
    hidden = checkpoint_name(jnp.tanh(x @ params["w"]), "hidden")
    return jnp.tanh(hidden @ params["w"]) ** 2


OPERATIONS = {
    "solve": lambda p, x: jnp.linalg.solve(definite(p, x), x),
    "inv": lambda p, x: jnp.linalg.inv(definite(p, x)),
    "expm": lambda p, x: jax.scipy.linalg.expm(0.1 * x @ p["w"]),
    "fft": lambda p, x: jnp.abs(jnp.fft.fft(x @ p["w"])),
    "irfft of rfft": lambda p, x: jnp.fft.irfft(jnp.fft.rfft(x @ p["w"])) ** 2,
    "cholesky": lambda p, x: jnp.linalg.cholesky(definite(p, x)),
    "triangular solve": lambda p, x: jax.scipy.linalg.solve_triangular(
        jnp.tril(definite(p, x)), x, lower=True
    ),
    "map": lambda p, x: jax.lax.map(lambda row: jnp.tanh(row @ p["w"]), x),
    "device_put": moved,
    "offloaded values": offloaded,
}


def init(key: jax.Array) -> tuple[Any, Any]:
    params = {"w": jax.random.normal(key, (SIZE, SIZE))}
    return params, SGD.init(params)


@pytest.mark.parametrize("name", OPERATIONS)
def test_trainers_exchange_gradients_only(name: str) -> None:
    step = dtrans.make_train_step(lambda p, x: OPERATIONS[name](p, x).mean(), SGD)
    key, x = jax.random.key(0), np.random.default_rng(0).normal(size=(13, SIZE, SIZE))
    main = dtrans.trace(step, *jax.eval_shape(init, key), x[:4])
    plan = dtrans.nccl2(main, dtrans.trace(init, key), trainers=3)
    assert plan.notes[0] == "exact: mean over 12 rows"
    assert "computes the step" in str(plan.verify())

    job = plan.simulate()
    state, loss = job.step(job.init(key), x)  # 13 rows for three trainers
    params, _, wanted = jax.jit(step)(*init(key), x)
    tree_close(job.params(state), params, 1e-12)
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
