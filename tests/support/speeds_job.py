"""Job of trainers with different speeds, for the processes of test_sync_server.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from helpers import init_of, mlp_batch, mlp_forward, mlp_params

import dtrans
from dtrans.parameter_server.plan import PServerPlan


SPEEDS = [1, 2]
ROWS = [12, 13, 2, 7, 12]  # rows of the batch of each step: the shares are 4+8, 4+9, 1+1, 2+5, 4+8
# the clip by global norm reads the gradients of all rows
TX = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))


def loss(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean over the rows that the targets select, and the error of each row."""
    errors = jnp.sum((mlp_forward(params, x) - y) ** 2, 1)
    chosen = y[:, 0] > -1
    return jnp.sum(errors * chosen) / jnp.maximum(jnp.sum(chosen), 1), errors


def params_of() -> Any:
    return mlp_params(dtype=jnp.float64)


def init_args() -> tuple[Any, ...]:
    return (params_of(),)


def batch_of(i: int) -> Any:
    return mlp_batch(ROWS[i], dtype=jnp.float64, seed=i)


def plan_for(pservers: Sequence[str]) -> PServerPlan:
    params, half = params_of(), mlp_batch(6, dtype=jnp.float64)
    step = dtrans.make_train_step(loss, TX, has_aux=True)
    return dtrans.pserver(
        dtrans.trace(step, params, jax.eval_shape(TX.init, params), *half),
        dtrans.trace(init_of(TX), params),
        pservers=pservers,
        trainers=len(SPEEDS),
        batch=dtrans.Batch(speeds=SPEEDS),
    )
