"""One process of a job in test_mesh_cluster.py, with four devices of a mesh.

The argument is a folder, to which the process writes its results as `trainer-K.npz`. All processes
write checkpoints to the folder, too.
"""

from __future__ import annotations

import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import flat_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cluster_trainer import flat, refused
from jax.experimental import multihost_utils
from mesh_models import WIDTH, array, attention, block_params, expert_params, experts, normed

import dtrans


SLICES = {"stage": 3, "min_slice_size": 0}
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "slices": ("sharding", {"mesh": {"data": 4, "model": 2}, **SLICES}),
    "deep": ("nccl2", {"mesh": {"data": 2, "model": 4}}),
    "sequence": ("nccl2", {"mesh": {"data": 4, "sequence": 2}}),
    "three": ("sharding", {"mesh": {"data": 2, "sequence": 2, "model": 2}, **SLICES}),
    "colocated": ("nccl2", {"mesh": {"data": 8, "model": "data"}}),
    "stages": ("pipeline", {"num_stages": 2, "num_micro_batch": 2, "replicas": 2}),
}
STEPS, ROWS, TOKENS = 3, 8, 4
SAVED = ("slices", "three", "colocated")  # jobs that write checkpoints


def loss_fn(params: Any, x: jax.Array, y: jax.Array, count: int | None = None) -> Any:
    """Return the loss of a transformer block with experts, and the output of each row.

    `count` is the number of devices of each split scope.
    """
    scope = lambda name: dtrans.split(device_count=count, name=name)
    h = normed(x, params["norm1"])
    with scope("attention"):
        h = attention(params, h)
    x = x + h
    h = normed(x, params["norm2"])
    with scope("mlp"):
        h = jnp.tanh(h @ params["up"] + params["up_b"]) @ params["down"]
    x = x + h + params["down_b"]
    out = x + experts(params, x, scope)
    return jnp.mean((out - y) ** 2), out


def init(key: jax.Array) -> Any:
    """Return parameters with seven columns in the MLP, so that the pieces of devices have padding.

    There are eight experts, one for each device of a job.
    """
    given = {**block_params(), **expert_params(8)}
    given |= {"up": array(WIDTH, 7), "up_b": array(7), "down": array(7, WIDTH)}
    params = jax.tree.map(jnp.asarray, given)
    return params, optimizer().init(params)


def optimizer() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (ROWS, TOKENS, WIDTH)
    return [(rng.normal(size=shape), rng.normal(size=shape)) for _ in range(STEPS)]


def planned(name: str) -> Any:
    """Return the plan of one of the jobs."""
    strategy, options = MESHES[name]
    loss = partial(loss_fn, count=2) if strategy == "pipeline" else loss_fn
    step = dtrans.make_train_step(loss, optimizer(), has_aux=True)
    key = jax.random.key(0)
    main = dtrans.trace(step, *jax.eval_shape(init, key), *batches()[0])
    return getattr(flat_options, strategy)(main, dtrans.trace(init, key), **options)


def main(folder: str) -> None:
    """Train each of the jobs, and restore checkpoints of two jobs on another mesh."""
    cluster = dtrans.connect(deadline=60)
    found: dict[str, Any] = {"host": socket.gethostname()}
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
