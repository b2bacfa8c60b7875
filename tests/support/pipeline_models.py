"""Models for tests of pipelines: an MLP, a residual convnet, and a transformer with a tied
embedding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """Compile programs in this context fast, because the models are small and many."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@dataclasses.dataclass(frozen=True)
class Model:
    """Training job on one device."""

    loss: Callable[..., Any]
    params: Callable[[jax.Array], Any]
    batch: Callable[[int], tuple[Any, ...]]

    def job(
        self, rows: int, tx: Any = None, *, has_aux: bool = False, gradients: bool = False
    ) -> Job:
        """Return the step, the init and a batch.

        Args:
          rows: number of rows of the batch.
          tx: the optimizer.
          has_aux: True if the loss returns auxiliary values.
          gradients: True if the step also returns the gradients and their norm.
        """
        tx = tx or optax.adam(1e-2)

        def with_gradients(params: Any, opt_state: Any, *batch: Any) -> Any:
            value, grads = dtrans.value_and_grad(self.loss)(params, *batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (
                optax.apply_updates(params, updates),
                opt_state,
                value,
                grads,
                optax.tree.norm(grads),
            )

        def init(key: jax.Array) -> Any:
            params = self.params(key)
            return params, tx.init(params)

        step = (
            with_gradients if gradients else dtrans.make_train_step(self.loss, tx, has_aux=has_aux)
        )
        return Job(step, init, self.batch(rows))


@dataclasses.dataclass(frozen=True)
class Job:
    """Step, init and batch to plan, and the results of one device."""

    step: Callable[..., Any]
    init: Callable[..., Any]
    batch: tuple[Any, ...]

    def traced(self) -> tuple[Any, Any]:
        key = jax.random.key(0)
        return dtrans.trace(self.step, *jax.eval_shape(self.init, key), *self.batch), dtrans.trace(
            self.init, key
        )

    def on_one_device(self, steps: int = 3) -> Any:
        """Return parameters, optimizer state and results after some steps on the same batch."""
        state = self.init(jax.random.key(0))
        rest: tuple[Any, ...] = ()
        step = jax.jit(self.step)
        for _ in range(steps):
            params, opt_state, *rest = step(*state, *self.batch)
            state = (params, opt_state)
        return (*state, *rest)

    def of(self, job: Any, steps: int = 3) -> Any:
        """Return the values that `on_one_device` returns, computed by a job that runs a plan."""
        state = job.init(jax.random.key(0))
        rest: tuple[Any, ...] = ()
        for _ in range(steps):
            state, *rest = job.step(state, *self.batch)
        return (job.params(state), job.opt_state(state), *rest)


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return pseudo-random numbers that need less compilation than `jax.random.normal`."""
    number = jax.random.key_data(key).astype(float).sum() % 1000.0
    x = np.arange(np.prod(shape)).reshape(shape) * 12.9898
    return jnp.sin((jnp.sin(x + number) * 4375.8) % 100.0) * 2**0.5


def _dense(key: jax.Array, n: int, m: int) -> jax.Array:
    return _normal(key, (n, m)) / n**0.5


def _mlp(widths: tuple[int, ...]) -> Model:
    def params(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(widths))
        pairs = zip(keys, widths[:-1], widths[1:], strict=False)
        return [{"w": _dense(k, n, m), "b": jnp.zeros(m)} for k, n, m in pairs]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for i, p in enumerate(params):
            x = x @ p["w"] + p["b"]
            x = jax.nn.gelu(x) if i + 1 < len(params) else x
        return jnp.mean((x - y) ** 2)

    def batch(rows: int) -> tuple[Any, ...]:
        kx, ky = jax.random.split(jax.random.key(1))
        return jax.random.normal(kx, (rows, widths[0])), jax.random.normal(ky, (rows, widths[-1]))

    return Model(loss, params, batch)


def _convnet() -> Model:
    def params(key: jax.Array) -> Any:
        k = jax.random.split(key, 6)
        conv = lambda k, n, m: _normal(k, (3, 3, n, m)) / (9 * n) ** 0.5
        blocks = [
            {"a": conv(k[2 * i + 1], 6, 6), "b": conv(k[2 * i + 2], 6, 6), "scale": jnp.ones(6)}
            for i in range(2)
        ]
        return {"stem": conv(k[0], 3, 6), "blocks": blocks, "head": _dense(k[5], 6, 4)}

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jax.nn.relu(conv(x, params["stem"]))
        for p in params["blocks"]:
            h = h + p["scale"] * conv(jax.nn.relu(conv(h, p["a"])), p["b"])
        logits = jnp.mean(h, (1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def batch(rows: int) -> tuple[Any, ...]:
        return jax.random.normal(jax.random.key(1), (rows, 6, 6, 3)), jnp.arange(rows) % 4

    return Model(loss, params, batch)


def transformer(
    layers: int = 4,
    width: int = 16,
    vocabulary: int = 11,
    length: int = 6,
    *,
    stacked: bool = False,
) -> Model:
    """Return a causal transformer with a tied embedding.

    With `stacked`, the layers' parameters are stacked, and a scan reads them.
    """

    def block(key: jax.Array) -> Any:
        k = jax.random.split(key, 4)
        norm = lambda: {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
        return {
            "qkv": _dense(k[0], width, 3 * width),
            "out": _dense(k[1], width, width),
            "up": _dense(k[2], width, 4 * width),
            "down": _dense(k[3], 4 * width, width),
            "norm1": norm(),
            "norm2": norm(),
        }

    def params(key: jax.Array) -> Any:
        k = jax.random.split(key, layers + 2)
        blocks: Any = [block(k[i]) for i in range(layers)]
        if stacked:
            blocks = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
        return {
            "embedding": _normal(k[-1], (vocabulary, width)) * 0.1,
            "positions": _normal(k[-2], (length, width)) * 0.1,
            "blocks": blocks,
        }

    def normed(x: jax.Array, p: Any) -> jax.Array:
        mean = jnp.mean(x, -1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * p["scale"] + p[
            "bias"
        ]

    def apply(p: Any, h: jax.Array) -> jax.Array:
        q, k, v = jnp.split(normed(h, p["norm1"]) @ p["qkv"], 3, -1)
        split = lambda a: a.reshape(*a.shape[:2], 2, width // 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", split(q), split(k)) / (width // 2) ** 0.5
        mask = jnp.tril(jnp.ones((h.shape[1], h.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        h = h + jnp.einsum("bhqk,bkhd->bqhd", weights, split(v)).reshape(h.shape) @ p["out"]
        return h + jax.nn.gelu(normed(h, p["norm2"]) @ p["up"]) @ p["down"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        h = params["embedding"][inputs] + params["positions"][: inputs.shape[1]]
        if stacked:
            h, _ = jax.lax.scan(lambda h, p: (apply(p, h), None), h, params["blocks"])
        else:
            for p in params["blocks"]:
                h = apply(p, h)
        logits = h @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def batch(rows: int) -> tuple[Any, ...]:
        return (jax.random.randint(jax.random.key(1), (rows, length + 1), 0, vocabulary),)

    return Model(loss, params, batch)


MODELS = {
    "mlp": _mlp((5, 32, 32, 32, 32, 3)),
    "convnet": _convnet(),
    "transformer": transformer(),
}
