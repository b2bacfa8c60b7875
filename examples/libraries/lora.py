"""Low-rank adapters of an Equinox model with frozen weights, on handwritten digits.

`eqx.partition` separates the adapters from the frozen weights. Frozen weights have no gradient and
no optimizer state, so only trainers store them, not servers. In this example the frozen weights are
random. `job.scatter` would create a state with the weights of a trained model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from examples.libraries import data


RANK = 4

optim = optax.adam(1e-2)


class LoRALinear(eqx.Module):
    """Linear layer plus the product of two low-rank matrices."""

    base: eqx.nn.Linear
    a: jax.Array
    b: jax.Array

    def __init__(self, base: eqx.nn.Linear, key: jax.Array) -> None:
        outputs, inputs = base.weight.shape
        self.base = base
        self.a = jax.random.normal(key, (RANK, inputs)) / inputs**0.5
        self.b = jnp.zeros((outputs, RANK))

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        return self.base(x) + self.b @ (self.a @ x)


def adapted(model: Any, key: jax.Array) -> Any:
    """Return the model with an adapter for each layer."""
    keys = jax.random.split(key, len(model.layers))
    layers = tuple(LoRALinear(layer, k) for layer, k in zip(model.layers, keys, strict=True))
    return eqx.tree_at(lambda m: m.layers, model, layers)


def trainable(model: Any) -> Any:
    """Return a pytree of booleans: True for leaves of adapters."""
    nothing = jax.tree.map(lambda _: False, model)
    adapters = lambda m: [x for layer in m.layers for x in (layer.a, layer.b)]
    return eqx.tree_at(adapters, nothing, replace_fn=lambda _: True)


def init(key: jax.Array) -> tuple[Any, Any]:
    """Return the initial model and optimizer state."""
    one, two = jax.random.split(key)
    model = adapted(eqx.nn.MLP(in_size=64, out_size=10, width_size=128, depth=1, key=one), two)
    return model, optim.init(eqx.filter(model, trainable(model)))


def training(value_and_grad: Any = eqx.filter_value_and_grad) -> Callable[..., Any]:
    """Return the training step."""

    @eqx.filter_jit
    def make_step(
        model: Any, opt_state: Any, x: jax.Array, y: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        def loss(diff_model: Any, static_model: Any) -> jax.Array:
            logits = jax.vmap(eqx.combine(diff_model, static_model))(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        diff_model, static_model = eqx.partition(model, trainable(model))
        loss_value, grads = value_and_grad(loss)(diff_model, static_model)
        updates, opt_state = optim.update(grads, opt_state, diff_model)
        return eqx.apply_updates(model, updates), opt_state, loss_value

    return make_step


def batch(step: int) -> tuple[Any, ...]:
    """Return the batch of a step."""
    image, label = data.images(step)
    return image.reshape(len(image), -1), label
