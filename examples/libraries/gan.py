"""A generator and a discriminator of flax.linen, which learn against each other to draw handwritten
digits.

Each has its `TrainState` and its loss. Both gradients are taken at the same parameters; a step that
updates one, and then the other by it, is refused with parameter servers alone.
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


LATENT = 16


class Generator(nn.Module):
    """Images of noise."""

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        x = nn.leaky_relu(nn.Dense(128)(z))
        return nn.sigmoid(nn.Dense(64)(x))


class Discriminator(nn.Module):
    """A score of each image: above zero for a real one."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.leaky_relu(nn.Dense(128)(x))
        return nn.Dense(1)(x)[:, 0]


def init(key: jax.Array) -> dict[str, Any]:
    """Return both states, and the key of the noise."""

    def create(model: nn.Module, key: jax.Array, inputs: int) -> TrainState:
        params = model.init(key, jnp.ones((1, inputs)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3, b1=0.5))

    one, two, noise = jax.random.split(key, 3)
    return {
        "generator": create(Generator(), one, LATENT),
        "discriminator": create(Discriminator(), two, 64),
        "key": noise,
    }


def training(value_and_grad: Any = jax.value_and_grad) -> Callable[..., Any]:
    """Return the step."""
    cross_entropy = optax.sigmoid_binary_cross_entropy

    @jax.jit
    def train_step(
        state: dict[str, Any], images: jax.Array
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        generator, discriminator = state["generator"], state["discriminator"]
        key, next_key = jax.random.split(state["key"])
        z = jax.random.normal(key, (len(images), LATENT))

        def generator_loss(params: Any) -> jax.Array:
            fake = generator.apply_fn({"params": params}, z)
            scores = discriminator.apply_fn({"params": discriminator.params}, fake)
            return cross_entropy(scores, jnp.ones_like(scores)).mean()

        def discriminator_loss(params: Any) -> jax.Array:
            fake = generator.apply_fn({"params": generator.params}, z)
            real, fake = (discriminator.apply_fn({"params": params}, x) for x in (images, fake))
            return (
                cross_entropy(real, jnp.ones_like(real)) + cross_entropy(fake, jnp.zeros_like(fake))
            ).mean()

        loss_g, grads_g = value_and_grad(generator_loss)(generator.params)
        loss_d, grads_d = value_and_grad(discriminator_loss)(discriminator.params)
        state = {
            "generator": generator.apply_gradients(grads=grads_g),
            "discriminator": discriminator.apply_gradients(grads=grads_d),
            "key": next_key,
        }
        return state, {"generator": loss_g, "discriminator": loss_d}

    return train_step


def batch(step: int) -> tuple[Any, ...]:
    """Return the batch of a step."""
    image, _ = data.images(step)
    return (image.reshape(len(image), -1),)
