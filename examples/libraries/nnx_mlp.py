"""A model, an optimizer and metrics of nnx, on handwritten digits, in the style of nnx's tutorial.

nnx's step changes these objects in place, but dtrans needs a step that returns the new state. So
`functional` calls `nnx.merge` before the step and `nnx.state` after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from examples.libraries import data


class MLP(nnx.Module):
    """Perceptron with batch norm and dropout."""

    def __init__(self, inputs: int, hidden: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        # Before a batch norm, the gradient of a bias is zero up to rounding, which Adam would
        # amplify.
        self.linear = nnx.Linear(inputs, hidden, use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(hidden, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear_out = nnx.Linear(hidden, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.dropout(self.bn(self.linear(x))))
        return self.linear_out(x)


def build(key: jax.Array) -> tuple[MLP, nnx.Optimizer, nnx.MultiMetric]:
    """Create the objects that the step changes."""
    model = MLP(64, 128, 10, rngs=nnx.Rngs(key))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, optimizer, metrics


def init(key: jax.Array) -> Any:
    """Return the initial state."""
    return nnx.state(build(key))


def training(value_and_grad: Any = nnx.value_and_grad) -> Callable[..., Any]:
    """Return the training step as a function of the state."""

    def loss_fn(model: MLP, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    def train_step(
        model: MLP, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, x: jax.Array, y: jax.Array
    ) -> Any:
        (loss, logits), grads = value_and_grad(loss_fn, has_aux=True)(model, x, y)
        metrics.update(loss=loss, logits=logits, labels=y)
        optimizer.update(model, grads)
        return metrics.compute()

    graph = nnx.graphdef(nnx.eval_shape(build, jax.random.key(0)))

    @jax.jit
    def functional(state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer, metrics = objects = nnx.merge(graph, state)
        results = train_step(model, optimizer, metrics, x, y)
        return nnx.state(objects), results

    return functional


def batch(step: int) -> tuple[Any, ...]:
    """Return the batch of a step."""
    image, label = data.images(step)
    return image.reshape(len(image), -1), label
