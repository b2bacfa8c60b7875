"""Models for tests of meshes: the block of a transformer, and jobs with given parameters."""

from __future__ import annotations

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from pipeline_models import Job

import dtrans


WIDTH, HEADS, INNER = 8, 4, 12


def array(*shape, seed=0):
    """Return normal random numbers, scaled by the first dimension, as weights usually are."""
    x = np.random.default_rng([seed, *shape]).normal(size=shape)
    return x / np.sqrt(shape[0]) if len(shape) > 1 else x


def job_of(loss, params, batch, tx=None, *, has_aux=False):
    """Return a job with given parameters."""
    tx = tx or optax.adam(0.05)

    def init(key):
        given = jax.tree.map(jnp.asarray, params)
        return given, tx.init(given)

    step = dtrans.make_train_step(loss, tx, has_aux=has_aux)
    return Job(step, init, tuple(map(jnp.asarray, batch)))


def planners(default):
    """Return two functions that plan a job with nccl2 and with sharding; `default` is the mesh."""

    def planned(of, mesh=default, **options):
        return flat_options.nccl2(*of.traced(), **{"mesh": mesh, **options})

    def sharded(of, mesh=default, **options):
        return flat_options.sharding(*of.traced(), **{"mesh": mesh, "min_slice_size": 0, **options})

    return planned, sharded


def normed(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attention(p, x):
    """Return causal attention with several heads."""
    rows, tokens, _ = x.shape
    heads = lambda w: (x @ w).reshape(rows, tokens, HEADS, -1)
    q, k, v = map(heads, (p["q"], p["k"], p["v"]))
    scores = jnp.einsum("rthc,rshc->rhts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(np.tri(tokens, dtype=bool), scores, -1e9)
    read = jnp.einsum("rhts,rshc->rthc", jax.nn.softmax(scores), v)
    return read.reshape(rows, tokens, -1) @ p["o"]


def block(p, x):
    """Return a transformer block as in Megatron: attention and MLP are split, norms are not."""
    h = normed(x, p["norm1"])
    with dtrans.split(name="attention"):
        h = attention(p, h)
    x = x + h
    h = normed(x, p["norm2"])
    with dtrans.split(name="mlp"):
        h = jax.nn.gelu(h @ p["up"] + p["up_b"]) @ p["down"]
    return x + h + p["down_b"]


def block_params(seed=0):
    shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    params = {n: array(*shape, seed=seed + i) for i, (n, shape) in enumerate(shapes.items())}
    norms = {"norm1": np.ones(WIDTH), "norm2": np.ones(WIDTH)}
    return {**params, **norms, "up_b": array(INNER), "down_b": array(WIDTH)}


def experts(p, x, scope, capacity=3):
    """Return a mixture of experts: top-1 routing in each row, with a capacity of each expert.

    `scope` takes a name, and returns the context in which the experts compute.
    """
    count = p["gate"].shape[1]
    probabilities = jax.nn.softmax(x @ p["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), count, dtype=x.dtype)
    place = (jnp.cumsum(chosen, 1) - 1) * chosen
    slot = jax.nn.one_hot(place.astype(int), capacity, dtype=x.dtype)
    dispatch = (chosen * (place < capacity))[..., None] * slot
    with scope("experts"):
        h = jnp.einsum("rtec,rtd->ercd", dispatch, x)
        h = jax.nn.relu(jnp.einsum("ercd,edh->erch", h, p["expert_up"]))
        h = jnp.einsum("erch,ehd->ercd", h, p["expert_down"])
        return jnp.einsum("rtec,ercd->rtd", dispatch * probabilities[..., None], h)


def expert_params(count=4):
    return {
        "gate": array(WIDTH, count) * 3,
        "expert_up": array(count, WIDTH, INNER) * 2,
        "expert_down": array(count, INNER, WIDTH, seed=1) * 2,
    }
