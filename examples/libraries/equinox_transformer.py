"""A transformer of Equinox with dropout, on characters of Python's standard library.

The model follows Equinox's example of BERT. The random key for dropout is part of the batch. It is
0-d, so every trainer gets the same key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from examples.characters import LENGTH, VOCABULARY
from examples.libraries import data


LAYERS, WIDTH, HEADS = 2, 32, 4

optim = optax.adamw(3e-3)


class TransformerBlock(eqx.Module):
    """Attention and a perceptron, each after a norm."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key: jax.Array) -> None:
        one, two = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=one)
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=two)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, h: jax.Array, key: jax.Array) -> jax.Array:
        one, two = jax.random.split(key)
        seen = jnp.tril(jnp.ones((len(h), len(h)), bool))
        x = jax.vmap(self.norm1)(h)
        h = h + self.dropout(self.attention(x, x, x, mask=seen), key=one)
        return h + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norm2)(h)), key=two)


class Transformer(eqx.Module):
    """Transformer that returns logits of the next token after each token: (length, VOCABULARY)."""

    embedding: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[TransformerBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, LAYERS + 3)
        self.embedding = eqx.nn.Embedding(
            weight=jax.random.normal(keys[0], (VOCABULARY, WIDTH)) * 0.1
        )
        self.positions = jax.random.normal(keys[1], (LENGTH, WIDTH)) * 0.1
        self.blocks = [TransformerBlock(k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[2])

    def __call__(self, tokens: jax.Array, key: jax.Array) -> jax.Array:
        h = jax.vmap(self.embedding)(tokens) + self.positions
        for block, k in zip(self.blocks, jax.random.split(key, LAYERS), strict=True):
            h = block(h, k)
        return jax.vmap(self.head)(jax.vmap(self.norm)(h))


def init(key: jax.Array) -> tuple[Any, Any]:
    """Return the initial model and optimizer state."""
    model = Transformer(key)
    return model, optim.init(eqx.filter(model, eqx.is_array))


def compute_loss(model: Transformer, tokens: jax.Array, key: jax.Array) -> jax.Array:
    """Return the mean cross entropy; each row has its own dropout key."""
    keys = jax.random.split(key, len(tokens))
    logits = jax.vmap(model)(tokens[:, :-1], keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def training(value_and_grad: Any = eqx.filter_value_and_grad) -> Callable[..., Any]:
    """Return the training step."""

    @eqx.filter_jit
    def make_step(
        model: Any, opt_state: Any, tokens: jax.Array, key: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        loss, grads = value_and_grad(compute_loss)(model, tokens, key)
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    return make_step


def batch(step: int) -> tuple[Any, ...]:
    """Return the batch of a step: tokens, and a dropout key."""
    return data.text(step), jax.random.key(step)
