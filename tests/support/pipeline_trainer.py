"""One process of the jobs in test_cluster.py, whose role `dtrans.Role` reads from the environment.

The arguments are the name of a function of this module, a folder, and options. The process writes
its results to `trainer-K.npz` in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cluster_trainer import flat, refused
from pipeline_models import MODELS, Job, Model
from split_models import planned, tower

import dtrans


STEPS, ROWS = 3, 8


def squares(params: Any, by: float) -> Any:
    """Return a sum that reads all parameters, as a function for `job.apply`."""
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)) * by


def main(folder: Path, given: dict[str, Any]) -> None:
    """Train, and write the results."""
    cluster = connected(given.pop("devices"), given.pop("deadline", 30))
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    one = MODELS[given.pop("model")].job(ROWS, clipped)
    step, init = one.traced()
    said = {}
    plan = flat_options.pipeline(step, init, **given)
    job = plan.on_cluster()
    state = job.init(jax.random.key(0))
    found: dict[str, Any] = {}
    for i in range(STEPS):
        state, loss = job.step(state, *part(one.batch))
        found |= flat(**{f"loss {i}": loss})
    said["rows"] = refused(job.step, state, *(x[: cluster.trainer_id + 1] for x in one.batch))
    said["few"] = refused(job.step, state, *(x[:1] for x in one.batch))
    found |= flat(last=(job.params(state), job.opt_state(state)))
    applied = job.apply(squares, state, 2.0)
    held = sorted({**state.params, **state.opt_state})
    said["odd"] = refused(dtrans.pipeline(step, init, num_stages=cluster.trainers + 1).on_cluster)
    save(folder, said=np.array(list(said.items())), held=np.array(held), applied=applied, **found)


def split(folder: Path, given: dict[str, Any]) -> None:
    """Train a tower whose stages have several devices each, and write the results."""
    connected(given.pop("devices"), 60)
    one = tower(given.pop("split"))
    job = planned(one, **given).on_cluster()
    state = job.init(jax.random.key(0))
    found: dict[str, Any] = {}
    for i in range(STEPS):
        state, loss = job.step(state, *part(one.batch))
        found |= flat(**{f"loss {i}": loss})
    found |= flat(last=(job.params(state), job.opt_state(state)))
    pieces = []
    for n, x in state.params.items():
        if n.endswith("/up"):
            pieces.append((n, str(x.addressable_shards[0].data.shape)))
    save(folder, pieces=np.array(pieces), **found)
    job.close()


def parts(folder: Path, given: dict[str, Any]) -> None:
    """Train a model that distinguishes rows, on arrays of every kind, in a reused buffer."""
    k = connected(1, 60).trainer_id
    one = noisy()
    job = planned_noisy(one).on_cluster(donate=False)
    state = job.init(jax.random.key(0))
    x, key, shift, y = one.batch
    buffer, found = np.empty((ROWS // 2, *x.shape[1:])), {}
    for i in range(STEPS):
        buffer[:] = part([x + i])[0]
        state, *results = job.step(state, buffer, key, shift, *part([y]))
        buffer[:] = np.nan
        found |= flat(**{f"results {i}": results})
    job.step(state, x, key, shift, y)  # compiles the second batch size
    rows = ROWS // 2 if k else ROWS
    said = refused(job.step, state, x[:rows], key, shift, y[:rows])
    found |= flat(
        last=job.params(state), again=job.step(state, *part([x]), key, shift, *part([y]))[1]
    )
    save(folder, said=np.array([["sizes", said]]), **found)
    job.close()


def given(folder: Path, given: dict[str, Any]) -> None:
    """Train a model whose loss and update read values that no single stage has."""
    k = connected(1, 60).trainer_id
    one = masked()
    job = planned_masked(one).on_cluster()
    state = job.init(jax.random.key(0))
    x, mask, rate = one.batch
    found = {}
    for i in range(STEPS):
        state, loss = job.step(state, *part([x + i, mask]), rate / (i + 1))
        found |= flat(**{f"loss {i}": loss})
    found |= flat(last=(job.params(state)["w"], job.opt_state(state)))
    said = refused(job.step, state, *part([x, mask]), rate + k)
    save(folder, said=np.array([["rate", said]]), **found)
    job.close()


def masked() -> Job:
    """Return a job with a masked mean after a dropout, and a learning rate in the batch.

    A count in the optimizer's state weights the mean. The update counts rows, and reads their
    number.
    """

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 5)
        counts = {n: jnp.zeros((), int) for n in ("steps", "seen")}
        return {"w": [jax.random.normal(k, (4, 4)) for k in keys[:4]], "key": keys[4]}, counts

    def step(params: Any, opt_state: Any, x: jax.Array, mask: jax.Array, rate: jax.Array) -> Any:
        key, use = jax.random.split(params["key"])
        seen = opt_state["seen"] + len(x)

        def loss_of(w: Any) -> jax.Array:
            h = jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])
            h = jnp.where(jax.random.bernoulli(use, 0.5, h.shape), h, 0.0)
            rows = jnp.sum(jnp.tanh(h @ w[2]) @ w[3], -1)
            return jnp.sum(rows**2 * mask) / jnp.sum(mask) / (1 + opt_state["steps"])

        loss, grads = dtrans.value_and_grad(loss_of)(params["w"])
        new = [w - rate * (1 + 1 / seen) * g for w, g in zip(params["w"], grads, strict=True)]
        return {"w": new, "key": key}, {"steps": opt_state["steps"] + 1, "seen": seen}, loss

    rng = np.random.default_rng(0)
    return Job(
        step,
        init,
        (rng.normal(size=(ROWS, 4)), (rng.random(ROWS) < 0.7).astype(float), np.asarray(0.1)),
    )


def planned_masked(one: Job) -> dtrans.PipelinePlan:
    return dtrans.pipeline(*one.traced(), num_stages=2, num_micro_batch=2)


def noisy() -> Job:
    """Return a job with per-row results, noise that depends on the row, and an unsplit input."""

    def params(key: jax.Array) -> Any:
        return [jax.random.normal(k, (4, 4)) for k in jax.random.split(key, 4)]

    def loss(params: Any, x: jax.Array, key: jax.Array, shift: jax.Array, y: jax.Array) -> Any:
        h = jnp.tanh(x @ params[0])
        h = jnp.tanh(jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0) @ params[1])
        h = jnp.tanh(h @ params[2] + shift)
        rows = jnp.sum((h @ params[3] - y) ** 2, -1)
        return jnp.mean(rows), {"rows": rows}

    def batch(rows: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(1), 3)
        x, y = (np.asarray(jax.random.normal(k, (rows, 4))) for k in keys[:2])
        return x, jax.random.key(5), jnp.arange(4.0), y

    return Model(loss, params, batch).job(ROWS, optax.sgd(0.1), has_aux=True)


def planned_noisy(one: Job) -> dtrans.PipelinePlan:
    """Return the plan of `noisy` in two stages; the second stage reads the unsplit input and the
    labels.
    """
    name = (
        dtrans.trace(one.step, *jax.eval_shape(one.init, jax.random.key(0)), *one.batch)
        .args[4]
        .names
    )
    batch, stages = (
        dtrans.Batch("local", unsplit_inputs=name),
        dtrans.Stages(policy="BALANCE_OP_NUM"),
    )
    return dtrans.pipeline(
        *one.traced(), num_stages=2, num_micro_batch=2, batch=batch, stages=stages
    )


def connected(devices: int, deadline: float) -> Any:
    """Return the job, on devices of this process."""
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_x64", True)
    return dtrans.connect(deadline=deadline)


def part(batch: Any) -> list[Any]:
    """Return this process's rows of each array."""
    k, n = jax.process_index(), jax.process_count()
    return [x[k * len(x) // n : (k + 1) * len(x) // n] for x in batch]


def save(folder: Path, **found: Any) -> None:
    np.savez(folder / f"trainer-{jax.process_index()}.npz", **found)


if __name__ == "__main__":
    {job.__name__: job for job in (main, split, parts, given)}[sys.argv[1]](
        Path(sys.argv[2]), json.loads(sys.argv[3])
    )
