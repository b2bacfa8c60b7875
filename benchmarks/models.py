"""The models that benchmarks train: MLPs of a given shape, and of a given number of leaves, and a
transformer.

`pin` is put around activations: a step with annotations says there how they are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import dtrans


tx = optax.adam(1e-3)
Pin = Callable[[jax.Array], jax.Array]


class Model(NamedTuple):
    """What is trained: a loss of (params, *batch), parameters of a key, and one batch."""

    loss_fn: Callable[..., jax.Array]
    params: Callable[[jax.Array], Any]
    batch: tuple[jax.Array, ...]


def as_is(x: jax.Array) -> jax.Array:
    """No pin."""
    return x


def mlp_model(sizes: Sequence[int], rows: int, pin: Pin = as_is) -> Model:
    """An MLP with squared error."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            x = pin(jax.nn.relu(x @ layer["w"] + layer["b"]))
        return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)

    def params(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(sizes) - 1)
        return [
            {"w": jax.random.normal(k, (a, b)) / a**0.5, "b": jnp.zeros(b)}
            for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]

    x, y = jax.random.normal(jax.random.key(1), (rows, sizes[0])), jnp.ones((rows, sizes[-1]))
    return Model(loss_fn, params, (x, y))


def scanned_model(layers: int, width: int, rows: int, pin: Pin = as_is) -> Model:
    """An MLP of equal layers, which are one stack that a loop goes through."""

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda h, w: (pin(jnp.tanh(h @ w)), None), x, params["w"])
        return jnp.mean((x - y) ** 2)

    def params(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (layers, width, width)) / width**0.5}

    x, y = jax.random.normal(jax.random.key(1), (rows, width)), jnp.ones((rows, width))
    return Model(loss_fn, params, (x, y))


def transformer_model(
    vocabulary: int,
    width: int,
    blocks: int,
    heads: int,
    length: int,
    rows: int,
    dtype: Any = jnp.float32,
    pin: Pin = as_is,
    scanned: bool = False,
) -> Model:
    """A decoder-only language model: pre-norm blocks, learned positions, one embedding for tokens
    in and out.

    Parameters and activations are of `dtype`; norms and the cross-entropy are computed in float32.
    With `scanned` the blocks are one stack that a loop goes through.
    """

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(
            x.dtype
        ) * scale

    def block(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(
            (norm(x, p["norm1"]) @ p["qkv"]).reshape(*x.shape[:2], 3, heads, -1), 2, 0
        )
        x = pin(
            x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        )
        return pin(x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"])

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        x = pin(params["embedding"][tokens[:, :-1]] + params["positions"])
        if scanned:
            x, _ = jax.lax.scan(lambda h, p: (block(p, h), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = block(p, x)
        logits = pin(norm(x, params["norm"]) @ params["embedding"].T)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        ).mean()

    def matrices(key: jax.Array, **shapes: tuple[int, int]) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(k, (a, b), dtype) / a**0.5
            for k, (name, (a, b)) in zip(keys, shapes.items(), strict=True)
        }

    def params(key: jax.Array) -> Any:
        scale = lambda: jnp.ones(width, dtype)  # made anew each time: a buffer can be donated once
        first, *rest = jax.random.split(key, blocks + 1)
        blocks_of = lambda each: jax.tree.map(lambda *xs: jnp.stack(xs), *each) if scanned else each
        each = dict(
            qkv=(width, 3 * width),
            out=(width, width),
            up=(width, 4 * width),
            down=(4 * width, width),
        )
        return {
            "embedding": 0.02 * jax.random.normal(first, (vocabulary, width), dtype),
            "positions": jnp.zeros((length, width), dtype),
            "blocks": blocks_of(
                [{"norm1": scale(), "norm2": scale(), **matrices(k, **each)} for k in rest]
            ),
            "norm": scale(),
        }

    return Model(
        loss_fn, params, (jax.random.randint(jax.random.key(1), (rows, length + 1), 0, vocabulary),)
    )


def training(
    model: Model, tx: Any = tx
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """(step, init, one batch) of a model, with Adam if nothing else is said."""

    def init(key: jax.Array) -> Any:
        params = model.params(key)
        return params, tx.init(params)

    return dtrans.make_train_step(model.loss_fn, tx), init, model.batch


def mlp(
    sizes: Sequence[int], rows: int, tx: Any = tx
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """(step, init, one batch) of an MLP."""
    return training(mlp_model(sizes, rows), tx)


def programs(step: Any, init: Any, batch: Any) -> tuple[dtrans.Program, dtrans.Program]:
    """(main, startup), traced without computing anything."""
    key = jax.random.key(0)
    return dtrans.trace(step, *jax.eval_shape(init, key), *batch), dtrans.trace(init, key)
