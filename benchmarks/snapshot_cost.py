"""Processor time of one snapshot of a server's state, in one process without a job.

    python benchmarks/snapshot_cost.py --width 2048 --snapshots 40

The server has half of the state of `benchmarks/snapshots.py`. Processor time depends less than the
time of a step on the load of the host.
"""

from __future__ import annotations

import cProfile
import mmap
import os
import pstats
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import dtrans
from dtrans.checkpoint import api as checkpoint
from dtrans.checkpoint.runs import SaveId
from dtrans.protocol.buffers import BufferPool


def loss(params, x):
    return jnp.mean((x @ params["w1"]) ** 2)


def main(
    width: int = typer.Option(2048, help="Rows and columns of the matrix."),
    snapshots: int = typer.Option(40, help="Number of measured snapshots."),
    profile: bool = typer.Option(False, "--profile", help="Print a profile of the snapshots."),
) -> None:
    """Print the median of the processor milliseconds of a snapshot, and of its removal."""
    optimizer = optax.adam(1e-3)

    def init(key):
        params = {"w1": jax.random.normal(key, (width, width))}
        return params, optimizer.init(params)

    key = jax.random.key(0)
    step = dtrans.make_train_step(loss, optimizer)
    main_program = dtrans.trace(step, *jax.eval_shape(init, key), np.ones((8, width), np.float32))
    servers = ["127.0.0.1:1", "127.0.0.1:2"]
    plan = dtrans.pserver(main_program, dtrans.trace(init, key), pservers=servers, trainers=2)
    endpoint = next(iter(plan.servers))
    # like the copies of arrays in a server, the arrays are page-aligned
    pool = BufferPool(mmap.PAGESIZE)
    state = {}
    for row in plan.overview.by_endpoint(endpoint):
        copy = pool.take(row.slice_name, row.slice_shape, row.dtype)
        copy.fill(1)
        state[row.slice_name] = copy

    writes, removals = [], []
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for i in range(snapshots + 3):
            path = Path(folder) / str(i)
            begun = time.process_time()
            if profile and i >= 3:
                profiler.enable()
            checkpoint.save_serving(
                path, plan, endpoint, state, SaveId(("run",), i), servers_only=True
            )
            profiler.disable()
            written = time.process_time()
            shutil.rmtree(path)
            if i >= 3:  # the first snapshots import modules
                writes.append(written - begun)
                removals.append(time.process_time() - written)
    size = sum(x.nbytes for x in state.values())
    print(
        f"{size / 1e6:.1f} MB: {1e3 * statistics.median(writes):.2f} ms to write, "
        f"{1e3 * statistics.median(removals):.2f} ms to remove (load {os.getloadavg()[0]:.1f})"
    )
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(25)


if __name__ == "__main__":
    typer.run(main)
