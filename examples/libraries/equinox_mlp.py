"""A perceptron of Equinox, on handwritten digits, in the style of Equinox's documentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax

from examples.libraries import data


optim = optax.adam(3e-3)


def init(key: jax.Array) -> tuple[Any, Any]:
    """Return the initial model and optimizer state."""
    model = eqx.nn.MLP(in_size=64, out_size=10, width_size=128, depth=2, key=key)
    return model, optim.init(eqx.filter(model, eqx.is_array))


def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def training(value_and_grad: Any = eqx.filter_value_and_grad) -> Callable[..., Any]:
    """Return the training step."""

    @eqx.filter_jit
    def make_step(
        model: Any, opt_state: Any, x: jax.Array, y: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        loss_value, grads = value_and_grad(loss)(model, x, y)
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss_value

    return make_step


def batch(step: int) -> tuple[Any, ...]:
    """Return the batch of a step."""
    image, label = data.images(step)
    return image.reshape(len(image), -1), label
