"""One rank of the jobs in test_scatters.py.

The first argument is the name of a function of this module, the second a folder. The rank writes
its results to `trainer-K.npz` in this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import dtrans
from dtrans.ops import reduce_scatter_p
from dtrans.run.base.lowering import OVER_AXIS
from dtrans.run.distributed.multihost import trainer_devices


SIDES = (1024, 2048, 4096)  # sides of square float32 arrays: 4, 16 and 64 MB
TIMES, TOGETHER = (3, 24, 6), 4
STEPS = 25  # training steps


def scatters(folder: Path) -> None:
    """Count wrong reduce-scatters of each size, and check if XLA runs any reduce-scatter."""
    cluster = dtrans.connect(deadline=60)
    k = cluster.trainer_id
    mesh = Mesh(np.array(trainer_devices()), ("ranks",))
    found: dict[str, Any] = {}

    def several(x: jax.Array) -> Any:
        """Run as many reduce-scatters as a step of a few layers."""
        sent = [x[0] * (i + 1) for i in range(TOGETHER)]
        made = OVER_AXIS[reduce_scatter_p](*sent, over=("ranks",), axis=0)
        return [x[None] for x in made]

    scatter = jax.jit(
        jax.shard_map(
            several, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"), check_vma=False
        )
    )
    for side, times in zip(SIDES, TIMES, strict=True):
        of_all = np.random.default_rng(side).standard_normal((2, side, side), dtype=np.float32)
        here = jax.make_array_from_process_local_data(
            NamedSharding(mesh, P("ranks")), of_all[k : k + 1]
        )
        mine = slice(k * side // 2, (k + 1) * side // 2)
        wanted = [sum(x[mine] * np.float32(i + 1) for x in of_all) for i in range(TOGETHER)]
        wrong = 0
        for _ in range(times):
            made = scatter(here)
            wrong += sum(
                np.asarray(x.addressable_data(0))[0].tobytes() != want.tobytes()
                for x, want in zip(made, wanted, strict=True)
            )
        found[str(side)] = wrong
    found["asked"] = "reduce_scatter" in scatter.lower(here).as_text()
    np.savez(folder / f"trainer-{k}.npz", **found)


def training(folder: Path) -> None:
    """Train a perceptron of 25 million parameters in stage 2, twice; write the losses."""
    cluster = dtrans.connect(deadline=60)
    k, sizes, rows = cluster.trainer_id, (1024, 4096, 4096, 1024), 64
    tx = optax.adam(1e-3)

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x @ params[-1] - y) ** 2)

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(sizes) - 1)
        params = [
            jax.random.normal(k, (m, n)) / m**0.5
            for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]
        return params, tx.init(params)

    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((rows, n), dtype=np.float32) for n in (sizes[0], sizes[-1]))
    key = jax.random.key(0)
    main = dtrans.trace(dtrans.make_train_step(loss_fn, tx), *jax.eval_shape(init, key), x, y)
    startup = dtrans.trace(init, key)
    mine = slice(k * rows // 2, (k + 1) * rows // 2)
    found = {}
    for run in range(2):
        job = dtrans.sharding(main, startup, stage=2, degree=2).on_cluster()
        state, losses = job.init(key), []
        for _ in range(STEPS):
            state, loss = job.step(state, x[mine], y[mine])
            losses.append(np.asarray(loss))
        found[f"sharding {run}"] = np.array(losses)
        found[f"params {run}"] = np.asarray(jax.tree.leaves(job.params(state))[1])
    job = dtrans.nccl2(main, startup, trainers=2).on_cluster()
    state, losses = job.init(key), []
    for _ in range(STEPS):
        state, loss = job.step(state, x[mine], y[mine])
        losses.append(np.asarray(loss))
    found["nccl2"] = np.array(losses)
    np.savez(folder / f"trainer-{k}.npz", **found)


if __name__ == "__main__":
    {job.__name__: job for job in (scatters, training)}[sys.argv[1]](Path(sys.argv[2]))
