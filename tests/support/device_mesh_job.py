"""Models of trainers that are meshes of devices, and a job of processes with such trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mesh_models import INNER, WIDTH, array, block, block_params, job_of
from pipeline_models import Job

import dtrans
from dtrans.parameter_server.plan import PServerPlan


MESH = {"data": 2, "model": 2}
TOKENS, WORDS = 4, 5
ROWS = [8, 7, 8]  # rows of the batch of each step of the processes


def mlp(rows: int = 8) -> Job:
    """Return an MLP in a split scope, with the error of each row as a result."""
    params = {"up": array(WIDTH, INNER), "up_b": array(INNER), "down": array(INNER, WIDTH)}

    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        with dtrans.split(name="mlp"):
            h = jnp.tanh(x @ params["up"] + params["up_b"]) @ params["down"]
        errors = jnp.mean((x + h - y) ** 2, 1)
        return jnp.mean(errors), errors

    return job_of(loss, params, (array(rows, WIDTH), array(rows, WIDTH, seed=1)), has_aux=True)


def transformer(rows: int = 8) -> Job:
    """Return a transformer block with an output layer. A clip reads the gradients of all leaves."""
    params = {"block": block_params(), "head": array(WIDTH, WORDS)}

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = block(params["block"], x) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    labels = np.arange(rows * TOKENS).reshape(rows, TOKENS) % WORDS
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))
    return job_of(loss, params, (array(rows, TOKENS, WIDTH) * 3, labels), tx)


def classifier(rows: int = 8) -> Job:
    """Return a step in which trainers exchange values: a batch norm, dropout, and a masked mean.

    The devices cannot divide the 7 classes evenly. The loss of each row is a result.
    """
    params = {"w": array(6, WIDTH), "head": array(WIDTH, 7), "head_b": array(7)}

    def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        h = x @ params["w"]
        h = jnp.tanh((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5))
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
        with dtrans.split(name="head"):
            logits = h @ params["head"] + params["head_b"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.sum(losses * (y > 1)) / jnp.sum(y > 1), losses

    of = job_of(loss, params, (array(rows, 6) * 4, np.arange(rows) % 7), has_aux=True)
    return Job(of.step, of.init, (*of.batch, jax.random.key(3)))


MODELS = {"mlp": mlp, "transformer": transformer, "classifier": classifier}


def plan_of(of: Job, trainers: int = 2, mesh: Any = MESH, **options: Any) -> PServerPlan:
    """Plan a job with two servers, whose blocks have at least one element."""
    pservers = options.pop("pservers", ("127.0.0.1:6174", "127.0.0.1:6175"))
    placement = dtrans.BlockPlacement(min_block_size=1)
    of_job = {"pservers": pservers, "trainers": trainers, "placement": placement, "mesh": mesh}
    return dtrans.pserver(*of.traced(), **of_job, **options)


# -- the job of processes --------------------------------------------------------------------------


def init_args() -> tuple[Any, ...]:
    return (jax.random.key(0),)


def batch_of(i: int) -> Any:
    return classifier(ROWS[i]).batch


def plan_for(pservers: Sequence[str]) -> PServerPlan:
    return plan_of(classifier(), pservers=pservers)
