"""Jobs of test_sync_server.py, with a batch norm and a frozen layer, for the processes of the test."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans
from dtrans.paddle.optimizers import ftrl
from dtrans.parameter_server.plan import PServerPlan


ROWS, STEPS = 5, 4  # rows of each trainer, in each step
SIZES = (4, 6, 7, 3)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adagrad": optax.adagrad(0.05),
    "rmsprop": optax.rmsprop(1e-2),
    "ftrl": ftrl(0.05, l1=1e-3, l2=1e-3),
    "clip, L2 and schedule": optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.add_decayed_weights(1e-2),
        optax.sgd(optax.cosine_decay_schedule(0.2, STEPS + 1)),
    ),
}


def dtype() -> Any:
    return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32


def loss_fn(net: Any, frozen: Any, stats: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    """Return the mean over the rows, and the new running statistics."""
    h = jnp.tanh(x @ frozen["w0"]) @ net["w1"]
    seen = {"mean": jnp.mean(h, 0), "var": jnp.var(h, 0)}
    h = (h - seen["mean"]) / jnp.sqrt(seen["var"] + 1e-3) * net["scale"] + net["shift"]
    out = jnp.tanh(h) @ net["w2"] + net["b2"]
    return jnp.mean((out - y) ** 2), jax.tree.map(
        lambda old, new: 0.9 * old + 0.1 * new, stats, seen
    )


def step_of(name: str, loss: Any = loss_fn, grad: Any = dtrans.value_and_grad) -> Any:
    """Return the step, which does not update frozen leaves."""

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        net, frozen = params["net"], params["frozen"]
        (value, stats), grads = grad(loss, has_aux=True)(net, frozen, params["stats"], x, y)
        updates, opt_state = OPTIMIZERS[name].update(grads, opt_state, net)
        return (
            {"net": optax.apply_updates(net, updates), "frozen": frozen, "stats": stats},
            opt_state,
            value,
        )

    return step


def init_of(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Return the init of a job, and its arguments."""

    def init(params: Any) -> Any:
        return params, OPTIMIZERS[name].init(params["net"])

    rng = np.random.default_rng(0)
    weights = [
        jnp.asarray(rng.normal(size=shape), dtype()) / 2 for shape in itertools.pairwise(SIZES)
    ]
    width = SIZES[2]
    net = {
        "w1": weights[1],
        "scale": jnp.ones(width, dtype()),
        "shift": jnp.zeros(width, dtype()) + 0.1,
    }
    net |= {"w2": weights[2], "b2": jnp.full(SIZES[-1], 0.2, dtype())}
    stats = {"mean": jnp.zeros(width, dtype()), "var": jnp.ones(width, dtype())}
    return init, ({"net": net, "frozen": {"w0": weights[0]}, "stats": stats},)


def batch_of(i: int, trainers: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(100 + i)
    make = lambda size: jnp.asarray(rng.normal(size=(ROWS * trainers, size)), dtype())
    return make(SIZES[0]), make(SIZES[-1])


def part_of(batch: Any, k: int, trainers: int) -> list[jax.Array]:
    return [x[k * ROWS : (k + 1) * ROWS] for x in batch]


def plan_for(name: str, pservers: Sequence[str], trainers: int) -> PServerPlan:
    init, args = init_of(name)
    params, opt_state = jax.eval_shape(init, *args)
    return dtrans.pserver(
        dtrans.trace(step_of(name), params, opt_state, *batch_of(0, trainers)),
        dtrans.trace(init, *args),
        pservers=pservers,
        trainers=trainers,
        batch="local",  # each trainer has the statistics of its own rows
        placement=dtrans.BlockPlacement(min_block_size=1),
    )
