"""One process of a job in test_mesh_cluster.py, with four devices of a mesh.

The argument is a folder, to which the process writes its results as `trainer-K.npz`. All processes
write checkpoints to the folder, too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cluster_trainer import flat, refused
from jax.experimental import multihost_utils

import dtrans


MESHES = {
    "slices": ("sharding", {"mesh": {"data": 4, "model": 2}, "stage": 3, "min_slice_size": 0}),
    "wide": ("nccl2", {"mesh": {"data": 4, "model": 2}}),
    "deep": ("nccl2", {"mesh": {"data": 2, "model": 4}}),
    "sequence": ("nccl2", {"mesh": {"data": 4, "sequence": 2}}),
    "three": (
        "sharding",
        {"mesh": {"data": 2, "sequence": 2, "model": 2}, "stage": 3, "min_slice_size": 0},
    ),
    "colocated": ("nccl2", {"mesh": {"data": 8, "model": "data"}}),
}
STEPS, ROWS = 3, 8
SAVED = ("slices", "three", "colocated")  # jobs that write checkpoints


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a loss, and the output of each row."""
    h = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * params["scale"]
    with dtrans.split(name="mlp"):
        h = jnp.tanh(h @ params["up"] + params["up_b"]) @ params["down"]
    out = x + h + params["down_b"]
    return jnp.mean((out - y) ** 2), out


def init(key: jax.Array) -> Any:
    """Return an MLP with seven inner columns, so that the pieces of devices have padding."""
    k1, k2 = jax.random.split(key)
    params = {
        "scale": jnp.ones(6),
        "up": jax.random.normal(k1, (6, 7)),
        "up_b": jnp.zeros(7),
        "down": jax.random.normal(k2, (7, 6)),
        "down_b": jnp.zeros(6),
    }
    return params, optimizer().init(params)


def optimizer() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(ROWS, 6)), rng.normal(size=(ROWS, 6))) for _ in range(STEPS)]


def planned(name: str) -> Any:
    """Return the plan of one of the jobs."""
    strategy, options = MESHES[name]
    step = dtrans.make_train_step(loss_fn, optimizer(), has_aux=True)
    key = jax.random.key(0)
    main = dtrans.trace(step, *jax.eval_shape(init, key), *batches()[0])
    return getattr(flat_options, strategy)(main, dtrans.trace(init, key), **options)


def main(folder: str) -> None:
    """Train each of the jobs, and restore checkpoints of two jobs on another mesh."""
    cluster = dtrans.connect(deadline=20)
    found: dict[str, Any] = {}
    for name in MESHES:
        job = planned(name).on_cluster()
        state = job.init(jax.random.key(0))
        for batch in batches():
            state, loss, out = job.step(state, *job.shard_batch(*batch))
        found |= flat(**{name: (job.params(state), job.opt_state(state), loss, out)})
        if name in SAVED:
            dtrans.checkpoint.save(Path(folder) / name, job, state)
    multihost_utils.sync_global_devices("all pieces are written")
    deep = planned("deep").on_cluster()
    for name in SAVED:
        state = dtrans.checkpoint.restore(Path(folder) / name, deep)
        found |= flat(**{f"restored {name}": (deep.params(state), deep.opt_state(state))})
    small = dtrans.nccl2(deep.plan.main, deep.plan.startup, mesh={"data": 2, "model": 2})
    large = dtrans.nccl2(deep.plan.main, deep.plan.startup, mesh={"model": 8})
    found["refused"] = (refused(small.on_cluster), refused(large.on_cluster))
    np.savez(Path(folder) / f"trainer-{cluster.trainer_id}.npz", **found)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 4)
    main(*sys.argv[1:])
