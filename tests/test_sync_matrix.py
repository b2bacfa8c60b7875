"""Synchronous training over real processes is that of one device on the whole batch: {1, 2, 3} servers, {1, 2, 3}
trainers, seven optimizers, on a network with batch norm and a frozen layer.

Batch norm takes the mean and variance of the rows it sees. A trainer sees its own part of the batch, so that this is
what one device does that normalises each part by itself (the statistics of the whole batch give other numbers). The
running statistics are leaves of the parameters that the step makes: each trainer has those of its part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from crew import free_endpoints
from helpers import assemble, distance
from roles import roles

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
    """The mean over the rows, and the new running statistics."""
    h = jnp.tanh(x @ frozen["w0"]) @ net["w1"]
    seen = {"mean": jnp.mean(h, 0), "var": jnp.var(h, 0)}
    h = (h - seen["mean"]) / jnp.sqrt(seen["var"] + 1e-3) * net["scale"] + net["shift"]
    out = jnp.tanh(h) @ net["w2"] + net["b2"]
    return jnp.mean((out - y) ** 2), jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, stats, seen)


def step_of(name: str, loss: Any = loss_fn, grad: Any = dtrans.value_and_grad) -> Any:
    """The step as anybody writes it: what is frozen is not updated."""

    def step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        net, frozen = params["net"], params["frozen"]
        (value, stats), grads = grad(loss, has_aux=True)(net, frozen, params["stats"], x, y)
        updates, opt_state = OPTIMIZERS[name].update(grads, opt_state, net)
        return {"net": optax.apply_updates(net, updates), "frozen": frozen, "stats": stats}, opt_state, value

    return step


def init_of(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The init of a job, and its arguments."""

    def init(params: Any) -> Any:
        return params, OPTIMIZERS[name].init(params["net"])

    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=shape), dtype()) / 2 for shape in itertools.pairwise(SIZES)]
    width = SIZES[2]
    net = {"w1": weights[1], "scale": jnp.ones(width, dtype()), "shift": jnp.zeros(width, dtype()) + 0.1}
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
        min_block_size=1,
    )


def one_device(name: str, trainers: int) -> tuple[Any, Any, list[Any]]:
    """Parameters, whose statistics have a row for each part; the optimizer's state; and the losses."""

    def loss(net: Any, frozen: Any, stats: Any, *batch: Any) -> Any:
        parts = [x.reshape(trainers, ROWS, -1) for x in batch]
        losses, new = jax.vmap(loss_fn, in_axes=(None, None, 0, 0, 0))(net, frozen, stats, *parts)
        return jnp.mean(losses), new

    init, args = init_of(name)
    params, opt_state = init(*args)
    params |= {"stats": jax.tree.map(lambda x: jnp.stack([x] * trainers), params["stats"])}
    step, losses = jax.jit(step_of(name, loss, jax.value_and_grad)), []
    for i in range(STEPS):
        params, opt_state, value = step(params, opt_state, *batch_of(i, trainers))
        losses.append(value)
    return params, opt_state, losses


def own_only(plan: PServerPlan) -> None:
    """What is frozen, and what each trainer makes of its own rows, is neither sent nor received."""
    assert sorted(plan.held) == ["params/frozen/w0", "params/stats/mean", "params/stats/var"]
    wire = [op for op in plan.trainer.ops if op.type in ("send", "recv")]
    names = {n.split("@GRAD")[0].split(".block")[0] for op in wire for n in op.attrs["names"]}
    assert names == {f"params/net/{n}" for n in ("w1", "scale", "shift", "w2", "b2")}
    assert not any(n.startswith(("params/frozen", "params/stats")) for n in plan.placement.blocks)


def under(found: Any, name: str) -> dict[str, Any]:
    return {n.removeprefix(f"{name}/"): jnp.asarray(x) for n, x in found.items() if n.startswith(f"{name}/")}


EVERY = [(servers, trainers, x64) for servers in (1, 2, 3) for trainers in (1, 2, 3) for x64 in (True, False)]
DEFAULT = [(1, 1, True), (2, 2, False), (3, 3, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "servers, trainers, x64",
    [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.soak, id=f"{case[0]}x{case[1]}-{bits}")
        for case, bits in ((case, "float64" if case[2] else "float32") for case in EVERY)
    ],
)
def test_processes_equal_one_device_with_every_optimizer(
    tmp_path: Path, servers: int, trainers: int, x64: bool
) -> None:
    """One after the other, in the same processes: each is a job of its own on the same servers."""
    pservers = free_endpoints(servers)
    job = {"pservers": pservers, "trainers": trainers, "x64": x64}
    with roles(tmp_path) as started, jax.enable_x64(x64):
        for i in range(servers):
            started.start(f"pserver{i}", "matrix_pserver", index=i, **job)
        for k in range(trainers):
            started.start(f"trainer{k}", "matrix_trainer", index=k, **job)
        want = {name: one_device(name, trainers) for name in OPTIMIZERS}  # while they work
        plans = {name: plan_for(name, pservers, trainers) for name in OPTIMIZERS}
        found = started.end()
        for name in OPTIMIZERS:
            compare(plans[name], found, name, want[name], 1e-10 if x64 else 1e-5)


def compare(plan: PServerPlan, found: Any, name: str, want: Any, rtol: float) -> None:
    own_only(plan)
    params, opt_state, losses = want
    states = {ep: under(found[f"pserver{i}"], name) for i, ep in enumerate(plan.servers)}
    held = [n for n in plan.startup.out_names if n not in plan.held]
    everything = plan.startup.out.flatten((params, opt_state), "the result")
    made = dict(zip(plan.startup.out_names, everything, strict=True))
    got = assemble(plan, states, held)
    assert list(got) == held
    assert not any(n.startswith(tuple(plan.held)) for state in states.values() for n in state)
    for n in held:
        assert distance(got[n], made[n]) <= rtol, (name, n)
    for k in range(plan.trainers):
        mine = under(found[f"trainer{k}"], name)
        values = mine.pop("losses")
        for path, x in mine.items():
            whole = made[f"params/{path}"]
            assert distance(x, whole[k] if path.startswith("stats/") else whole) <= rtol, (name, k, path)
        assert sorted(f"params/{n}" for n in mine) == sorted(n for n in made if n.startswith("params/"))
        assert np.array_equal(mine["frozen/w0"], made["params/frozen/w0"])
        losses = [value - x / plan.trainers for value, x in zip(losses, values, strict=True)]
    # the loss of one device is the mean of theirs
    assert max(abs(float(x)) for x in losses) <= rtol * max(abs(float(x)) for x in want[2]), name
