"""Seconds of a step in a job with snapshots of the servers' state, and in a job without.

    python benchmarks/snapshots.py --width 2048 --steps 300
    python benchmarks/snapshots.py --replicas --every 100000     # with replicas and without them

Two trainers and two parameter servers run on this host. The model has one matrix of `width` x
`width` entries, and the optimizer is Adam.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import dtrans


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def work(width: int, steps: int, every: int, *, replicas: bool) -> None:
    """Run one role; trainer 0 prints the mean seconds of a step, without the first fifth."""

    def init(key):
        scale = width**-0.5
        params = {
            "w1": scale * jax.random.normal(key, (width, width)),
            "w2": scale * jax.random.normal(key, (width, 1)),
        }
        return params, optax.adam(1e-3).init(params)

    key = jax.random.key(0)
    x, y = np.ones((8, width), np.float32), np.ones((8, 1), np.float32)
    step = dtrans.make_train_step(loss, optax.adam(1e-3))
    main_program = dtrans.trace(step, *jax.eval_shape(init, key), x, y)
    startup = dtrans.trace(init, key)
    role = dtrans.Role.from_env()
    plan = dtrans.pserver(main_program, startup, pservers=role.pservers, trainers=role.trainers)
    with plan.on_cluster() as job:
        state = job.init(key)
        if role.is_pserver:
            job.serve(
                state, snapshots=dtrans.Snapshots(every, replicas=int(replicas)) if every else None
            )
            return
        first, begun = steps // 5, 0.0
        for _, value in job.steps(state, lambda _: job.shard_batch(x, y), stop=steps):
            jax.block_until_ready(value)
            if job.step_count == first:
                begun = time.perf_counter()
        if role.trainer_id == 0:
            print("seconds of a step:", (time.perf_counter() - begun) / (steps - first))


def seconds_of_step(width: int, steps: int, every: int, *, replicas: bool = False) -> float:
    """Run a job; return the seconds of a step."""
    script = [__file__, "--work", "--width", width, "--steps", steps, "--every", every]
    script += ["--replicas"] * replicas
    launch = ["-m", "dtrans", "launch", "--restarts", "1", "--trainers", "2", "--pservers", "2"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *launch, *map(str, script)],
            cwd=folder,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    (line,) = (x for x in done.stdout.splitlines() if "seconds of a step" in x)
    return float(line.split()[-1])


def main(
    width: int = typer.Option(2048, help="Rows and columns of the matrix."),
    steps: int = typer.Option(300, help="Number of steps of each job."),
    every: int = typer.Option(10, help="Number of steps between two snapshots."),
    pairs: int = typer.Option(3, help="Number of pairs of jobs."),
    replicas: bool = typer.Option(False, "--replicas", help="Measure replicas, not snapshots."),
    work_: bool = typer.Option(False, "--work", hidden=True),
) -> None:
    """Print the seconds of a step with snapshots or replicas, divided by the seconds without."""
    if work_:
        work(width, steps, every, replicas=replicas)
        return
    ratios, what = [], "replicas" if replicas else "snapshots"
    for _ in range(pairs):
        without = seconds_of_step(width, steps, every if replicas else 0)
        with_it = seconds_of_step(width, steps, every, replicas=replicas)
        ratios.append(with_it / without)
        print(f"{without * 1e3:.2f} ms, with {what} {with_it * 1e3:.2f} ms", flush=True)
    print(
        f"median ratio {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f} "
        f"(load {os.getloadavg()[0]:.1f})"
    )


if __name__ == "__main__":
    typer.run(main)
