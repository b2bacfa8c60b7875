"""Models of the benchmarks: MLPs and a transformer.

Models call `pin` with their activations. It can add a sharding constraint; by default it returns
its argument.
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
    """Functions (params, *batch) -> loss and key -> params, and a batch."""

    loss_fn: Callable[..., jax.Array]
    params: Callable[[jax.Array], Any]
    batch: tuple[jax.Array, ...]


def as_is(x: jax.Array) -> jax.Array:
    """Return the argument."""
    return x


def mlp_model(sizes: Sequence[int], rows: int, pin: Pin = as_is) -> Model:
    """Return an MLP with the squared error as loss."""

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
    """Return an MLP of equal layers; their matrices are one stacked array, and a scan reads it."""

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
    """Return a decoder-only language model: pre-norm blocks, learned positions, tied embedding.

    Parameters and activations have the type `dtype`; norms and the cross-entropy are computed in
    float32. With `scanned=True`, the blocks' parameters are stacked, and a scan reads them.
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
        # create a new array each time, because JAX donates an array only once
        scale = lambda: jnp.ones(width, dtype)
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
    """Return (step, init, batch) of a model; the default optimizer is Adam."""

    def init(key: jax.Array) -> Any:
        params = model.params(key)
        return params, tx.init(params)

    return dtrans.make_train_step(model.loss_fn, tx), init, model.batch


def mlp(
    sizes: Sequence[int], rows: int, tx: Any = tx
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """Return (step, init, batch) of an MLP."""
    return training(mlp_model(sizes, rows), tx)


def programs(step: Any, init: Any, batch: Any) -> tuple[dtrans.Program, dtrans.Program]:
    """Return the programs (main, startup) of a step and an init."""
    key = jax.random.key(0)
    return dtrans.trace(step, *jax.eval_shape(init, key), *batch), dtrans.trace(init, key)
