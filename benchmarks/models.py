"""The models that benchmarks train: MLPs of a given shape, and of a given number of leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dtrans


tx = optax.adam(1e-3)


def mlp(
    sizes: Sequence[int], batch: int, tx: Any = tx
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, Any]]:
    """(step, init, one batch) of an MLP trained on squared error, with Adam if nothing else is said."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(sizes) - 1)
        params = [
            {"w": jax.random.normal(k, (a, b)) / a**0.5, "b": jnp.zeros(b)}
            for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]
        return params, tx.init(params)

    x, y = jax.random.normal(jax.random.key(1), (batch, sizes[0])), jnp.ones((batch, sizes[-1]))
    return dtrans.make_train_step(loss_fn, tx), init, (x, y)


def programs(step: Any, init: Any, batch: Any) -> tuple[dtrans.Program, dtrans.Program]:
    """(main, startup), traced without computing anything."""
    key = jax.random.key(0)
    return dtrans.trace(step, *jax.eval_shape(init, key), *batch), dtrans.trace(init, key)
