"""A generative adversarial network (GAN) of flax.linen, which draws handwritten digits.

The generator and the discriminator each have a `TrainState` and a loss. The step computes both
gradients at the same parameters. Parameter servers would not support a step that computes the
second gradient after the first update.
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
    """Generator: maps noise to images."""

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        x = nn.leaky_relu(nn.Dense(128)(z))
        return nn.sigmoid(nn.Dense(64)(x))


class Discriminator(nn.Module):
    """Discriminator: returns a score for each image, positive for a real image."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.leaky_relu(nn.Dense(128)(x))
        return nn.Dense(1)(x)[:, 0]


def init(key: jax.Array) -> dict[str, Any]:
    """Return the initial states of both networks, and the random key of the noise."""

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
    """Return the training step."""
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
