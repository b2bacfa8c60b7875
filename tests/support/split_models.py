"""Models with split scopes, and checks of their pipelines; no number of shards divides some widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import tree_close
from pipeline_models import Job

import dtrans


def array(*shape: int, seed: int = 0) -> Any:
    """Return normal numbers, scaled by the first dimension as weights are.

    The array is of NumPy, because modules are loaded in 32 bits.
    """
    x = np.random.default_rng([seed, *shape]).normal(size=shape)
    return x / np.sqrt(shape[0]) if len(shape) > 1 else x


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05, weight_decay=0.1))


def job_of(loss: Any, params: Any, batch: Any, tx: Any = None, *, has_aux: bool = False) -> Job:
    """Return a job whose first parameters are `params`."""
    tx = tx or optax.adam(0.05)

    def init(key: Any) -> Any:
        first = jax.tree.map(jnp.asarray, params)
        return first, tx.init(first)

    step = dtrans.make_train_step(loss, tx, has_aux=has_aux)
    return Job(step, init, tuple(map(jnp.asarray, batch)))


def planned(of: Job, num_stages: int = 2, num_micro_batch: int = 2, **options: Any) -> Any:
    """Return the plan of a job; replicas slice arrays of any size."""
    options = {"min_slice_size": 0, **options}
    return flat_options.pipeline(
        *of.traced(), num_stages=num_stages, num_micro_batch=num_micro_batch, **options
    )


def compared(of: Job, way: str = "simulate", rtol: float = 1e-12, **options: Any) -> Any:
    """Compare a pipelined job with one device after three steps; return the plan."""
    plan = planned(of, **options)
    tree_close(of.of(getattr(plan, way)()), of.on_one_device(), rtol)
    return plan


BODY, WIDTH, ROWS = 6, 8, 16


def classifier(shards: Any, classes: int, body: bool = True, tx: Any = None) -> Job:
    """Return a layer and a split head with a bias, cross entropy and accuracy.

    Args:
      shards: the number of devices of the head.
      classes: the number of classes.
      body: True if the layer is a separate stage.
      tx: the optimizer.
    """
    params = {
        "body": {"w": array(BODY, WIDTH), "b": array(WIDTH)},
        "head": {"w": array(WIDTH, classes), "b": array(classes, seed=1)},
    }

    def loss(params: Any, x: Any, y: Any) -> Any:
        if body:
            with dtrans.replicate(name="body"):
                h = jnp.tanh(x @ params["body"]["w"] + params["body"]["b"])
        else:
            h = jnp.tanh(x @ params["body"]["w"] + params["body"]["b"])
        with dtrans.split(device_count=shards, name="head"):
            logits = h @ params["head"]["w"] + params["head"]["b"]
            value = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return value, jnp.mean(jnp.argmax(logits, -1) == y)

    return job_of(
        loss, params, (array(ROWS, BODY) * 4, np.arange(ROWS) % classes), tx, has_aux=True
    )


def words(shards: int, rows: int = 11, tied: bool = False, tx: Any = CLIPPED) -> Job:
    """Return a split embedding table, a layer, and a head, which may be the same table."""
    params = {
        "table": array(rows, WIDTH) * 3,
        "w": array(WIDTH, WIDTH),
        "head": array(WIDTH, rows, seed=2),
    }

    def loss(params: Any, tokens: Any) -> Any:
        with dtrans.split(device_count=shards, name="table"):
            h = params["table"][tokens[:, :-1]]
        with dtrans.replicate(name="layer"):
            h = jnp.tanh(h @ params["w"])
            logits = h @ (params["table"].T if tied else params["head"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = np.random.default_rng(0).integers(0, rows, (ROWS, 4))
    return job_of(loss, params, (tokens,), tx)


def two_layers(shards: int, inner: int = 12, tx: Any = CLIPPED) -> Job:
    """Return a split MLP between two complete layers: columns of the first kernel, then rows."""
    params = {
        "first": array(BODY, WIDTH),
        "up": array(WIDTH, inner),
        "bias": array(inner),
        "down": array(inner, WIDTH),
        "last": array(WIDTH, 3),
    }

    def loss(params: Any, x: Any, y: Any) -> Any:
        with dtrans.replicate(name="first"):
            h = jnp.tanh(x @ params["first"])
        with dtrans.split(device_count=shards, name="both"):
            h = h + jax.nn.gelu(h @ params["up"] + params["bias"]) @ params["down"]
        with dtrans.replicate(name="last"):
            return jnp.mean((h @ params["last"] - y) ** 2)

    return job_of(loss, params, (array(ROWS, BODY) * 4, array(ROWS, 3)), tx)


def experts(shards: int, count: int = 4) -> Job:
    """Return a mixture of experts, whose outputs a product over experts combines."""
    params = {"gate": array(BODY, count), "up": array(count, BODY, 5), "down": array(count, 5, 3)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        with dtrans.replicate(name="gate"):
            chosen = jax.nn.softmax(x @ params["gate"])
        with dtrans.split(device_count=shards, name="experts"):
            h = jax.nn.relu(jnp.einsum("bi,eij->ebj", x, params["up"]))
            out = jnp.einsum("ebj,ejk->ebk", h, params["down"])
            return jnp.mean((jnp.einsum("be,ebk->bk", chosen, out) - y) ** 2)

    return job_of(loss, params, (array(ROWS, BODY) * 4, array(ROWS, 3)))


def tower(split: Sequence[int], inner: int = 13, tx: Any = CLIPPED) -> Job:
    """Return residual MLPs, one for each stage.

    Args:
      split: the number of devices of each MLP; 1 for an MLP in a `dtrans.replicate` scope.
      inner: the width of the inner layer of each MLP.
      tx: the optimizer.
    """
    layers = []
    for k in range(len(split)):
        up, down = array(BODY, inner, seed=k), array(inner, BODY, seed=k)
        layers.append({"up": up, "bias": array(inner, seed=k), "down": down})

    def loss(params: Any, x: Any, y: Any) -> Any:
        for k, (count, p) in enumerate(zip(split, params, strict=True)):
            scope = dtrans.split(device_count=count, name=f"mlp{k}")
            if count == 1:
                scope = dtrans.replicate(name=f"mlp{k}")
            with scope:
                x = x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]
                if k == len(split) - 1:
                    value = jnp.mean((x - y) ** 2)
        return value

    return job_of(loss, layers, (array(ROWS, BODY) * 4, array(ROWS, BODY, seed=1)), tx)
