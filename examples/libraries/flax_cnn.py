"""A convolutional net of flax.linen with a `TrainState`, on handwritten digits.

The code follows the quick start of flax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from examples.libraries import data


class CNN(nn.Module):
    """A simple convolutional net."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(features=16, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(features=32, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=64)(x))
        return nn.Dense(features=10)(x)


def init(key: jax.Array) -> TrainState:
    """Return the initial state."""
    cnn = CNN()
    params = cnn.init(key, jnp.ones((1, 8, 8, 1)))["params"]
    return TrainState.create(apply_fn=cnn.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))


def training(value_and_grad: Any = jax.value_and_grad) -> Callable[..., Any]:
    """Return the training step."""

    @jax.jit
    def train_step(
        state: TrainState, batch: dict[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, batch["image"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, logits

        (loss, logits), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    return train_step


def batch(step: int) -> tuple[Any, ...]:
    """Return the batch of a step."""
    image, label = data.images(step)
    return ({"image": image, "label": label},)
