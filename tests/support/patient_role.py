"""One role of the jobs in test_interruptions.py, which `dtrans.Role` reads from the environment.

The arguments are the strategy and a folder. Trainers take one step after the other at a fixed pace,
and print each step. They write the final parameters to `trainer-K.npz` in the folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cluster_trainer import flat

import dtrans


STEPS, ROWS = 120, 8
PACE = 0.02  # seconds between two steps, so that interruptions come in the middle of the training
WAIT = {"deadline": 120.0, "patience": 30.0}  # seconds
TX = optax.adam(1e-2)


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def init(key: jax.Array) -> Any:
    k1, k2 = jax.random.split(key)
    params = {"w1": jax.random.normal(k1, (5, 6)), "w2": jax.random.normal(k2, (6, 2))}
    return params, TX.init(params)


def batch_of(i: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(i)
    return rng.normal(size=(ROWS, 5)), rng.normal(size=(ROWS, 2))


def step() -> Any:
    return dtrans.make_train_step(loss_fn, TX)


def alone() -> dict[str, np.ndarray]:
    """Return the final parameters of one device."""
    state, one = init(jax.random.key(0)), jax.jit(step())
    for i in range(STEPS):
        *state, _ = one(*state, *batch_of(i))
    return flat(params=state[0])


def planned(kind: str, role: dtrans.Role) -> Any:
    key = jax.random.key(0)
    traced = dtrans.trace(step(), *jax.eval_shape(init, key), *batch_of(0)), dtrans.trace(init, key)
    if kind == "pserver":
        return dtrans.pserver(*traced, pservers=role.pservers, trainers=role.trainers)
    if kind == "sharding":
        return dtrans.sharding(
            *traced, degree=role.trainers, stage=3, slices=dtrans.Slicing(min_slice_size=0)
        )
    if kind == "pipeline":
        return dtrans.pipeline(*traced, num_stages=role.trainers, num_micro_batch=2)
    return dtrans.nccl2(*traced, trainers=role.trainers)


def main(kind: str, folder: Path) -> None:
    role = dtrans.Role.from_env()
    if kind != "pserver":
        dtrans.connect(**WAIT)
    with planned(kind, role).on_cluster(**(WAIT if kind == "pserver" else {})) as job:
        state = job.init(jax.random.key(0))
        if role.is_pserver:
            job.serve(state)
            return
        for i in range(STEPS):
            state, loss = job.step(state, *job.shard_batch(*batch_of(i)))
            jax.block_until_ready(loss)
            print(f"step {i}", flush=True)
            time.sleep(PACE)
        np.savez(folder / f"trainer-{role.trainer_id}.npz", **flat(params=job.params(state)))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(sys.argv[1], Path(sys.argv[2]))
