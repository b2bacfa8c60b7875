"""A table of embeddings on parameter servers, dense and as a table: steps a second, bytes, and a trainer's memory.

    dtrans launch --trainers 2 --pservers 2 benchmarks/tables.py 100000 table      a table of 100,000 x 64
    dtrans launch --trainers 2 --pservers 2 benchmarks/tables.py 100000 dense      the same, all rows each step
    dtrans launch --trainers 2 --pservers 2 benchmarks/tables.py 10000000 table 16 of rows of 16
    python benchmarks/tables.py 100000 local                                       one device, no servers

A step looks up 512 rows on each trainer, and updates with Adagrad, which leaves other rows as they are. Printed are
the median of the steps' times, what a step moves, and the most memory that trainer 0 had, less what importing took.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans


WIDTH = int(sys.argv[3]) if len(sys.argv) > 3 else 64
ROWS, STEPS, WARM = 512, 30, 5


def peak() -> float:
    """The most memory that this process has had, in MB."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


TX = optax.adagrad(0.1)


def loss(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((params["emb"][ids] @ params["w"] - y) ** 2)


def start(rows: int) -> Any:
    params = {"emb": 0.01 * jax.random.normal(jax.random.key(0), (rows, WIDTH)), "w": jnp.ones(WIDTH)}
    return params, TX.init(params)


def timed(step: Any, rows: int) -> list[float]:
    rng, took = np.random.default_rng(os.getpid()), []
    for _ in range(WARM + STEPS):
        batch = rng.integers(0, rows, ROWS), np.ones(ROWS, np.float32)
        began = time.perf_counter()
        jax.block_until_ready(step(*batch))
        took.append(time.perf_counter() - began)
    return took[WARM:]


def main(rows: int, how: str) -> None:
    step = dtrans.make_train_step(loss, TX)
    batch = np.zeros(ROWS, int), np.ones(ROWS, np.float32)
    if how == "local":
        state: Any = start(rows)
        jitted = jax.jit(step, donate_argnums=(0, 1))

        def local(*batch: Any) -> Any:
            nonlocal state
            *state, value = jitted(*state, *batch)
            return value

        took = statistics.median(timed(local, rows))
        print(f"{rows:,} x {WIDTH} on one device: {1 / took:.1f} steps/s")
        return
    role, before = dtrans.Role.from_env(), peak()
    init = lambda: start(rows)
    plan = dtrans.pserver(
        dtrans.trace(step, *jax.eval_shape(init), *batch),
        dtrans.trace(init),
        pservers=role.pservers,
        trainers=role.trainers,
        sparse={"params/emb": dtrans.Rows()} if how == "table" else None,
    )
    with plan.on_cluster(deadline=200.0) as job:
        state = job.init()
        if role.is_pserver:
            job.serve(state)
            return

        def remote(*batch: Any) -> Any:
            nonlocal state
            state, value = job.step(state, *batch)
            return value

        took = statistics.median(timed(remote, rows))
        if not role.trainer_id:
            moved = plan.bytes_per_step
            print(
                f"{rows:,} x {WIDTH} {how}: {1 / took:.1f} steps/s, {moved['send']:,} bytes sent and "
                f"{moved['recv']:,} received in a step at most, {peak() - before:.0f} MB more than after import, "
                f"{peak():.0f} MB in all, load {os.getloadavg()[0]:.1f}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
