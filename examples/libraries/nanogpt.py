"""A small GPT in flax.linen, trained like nanoGPT, on characters of Python's standard library.

The gradients are clipped by their global norm. The learning rate has a warm-up and a cosine decay.
Weight decay applies only to matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from examples.characters import LENGTH, VOCABULARY
from examples.libraries import data


LAYERS, WIDTH, HEADS = 2, 48, 4


class GPTBlock(nn.Module):
    """Attention and a perceptron, each after a norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        causal = nn.make_causal_mask(x[..., 0])
        # There are no biases, as in nanoGPT. The gradient of a key's bias is zero up to rounding,
        # which Adam would amplify.
        attend = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)
        x = x + attend(nn.LayerNorm()(x), mask=causal)
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


class GPT(nn.Module):
    """GPT with a tied embedding; it returns logits of the next token after each token."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH)
        x = embed(tokens) + nn.Embed(LENGTH, WIDTH)(jnp.arange(tokens.shape[1]))
        for _ in range(LAYERS):
            x = GPTBlock()(x)
        return embed.attend(nn.LayerNorm()(x))


def configure_optimizer() -> optax.GradientTransformation:
    """Return AdamW with clipping and a schedule, and with weight decay of matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 6e-3, warmup_steps=10, decay_steps=200, end_value=6e-4
    )
    matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def init(key: jax.Array) -> TrainState:
    """Return the initial state."""
    model = GPT()
    params = model.init(key, jnp.zeros((1, LENGTH), int))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=configure_optimizer())


def training(value_and_grad: Any = jax.value_and_grad) -> Callable[..., Any]:
    """Return the training step."""

    @jax.jit
    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def batch(step: int) -> tuple[Any, ...]:
    """Return the batch of a step."""
    return (data.text(step),)
