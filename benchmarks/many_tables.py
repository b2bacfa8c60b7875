"""Cost of a step with many tables, compared with one table that has all their rows.

    python many_tables.py TABLES                                        prints the ratios
    python many_tables.py serve TABLES STACKED ENDPOINT ALL,ENDPOINTS   a server

Both steps look up the same ids, with Adagrad and one trainer on two parameter servers. "JAX" is the
same pair of steps on one device, without messages: the host finds the unique ids of each table, and
a function compiled by `jax.jit` updates these rows. Its ratio is a lower limit.

All roles are processes on this host. The competitors run in turn, `STEPS` steps each; while one
runs, the others wait. A ratio is the median over `PAIRS` pairs of windows.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from test_endpoints import free_endpoints

import dtrans


ROWS, WIDTH, BATCH = 20_000, 16, 128
WARM, STEPS, PAIRS = 300, 40, 9
tx = optax.adagrad(0.1)


def names(count: int, stacked: bool = False) -> list[str]:
    """Return the names of the tables."""
    return ["emb"] if stacked else [f"emb{i:02d}" for i in range(count)]


def loss(stacked: bool, params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    """Return the squared error of a linear function of all looked-up rows of an example."""
    if stacked:
        x = params["emb"][ids].reshape(len(ids), -1)
    else:
        x = jnp.concatenate([params[n][ids[:, i]] for i, n in enumerate(names(ids.shape[1]))], 1)
    return jnp.mean((x @ params["w"] - y) ** 2)


def init(count: int, stacked: bool) -> Any:
    """Return the parameters and the optimizer state."""
    rows, params = ROWS * count if stacked else ROWS, {}
    for i, n in enumerate(names(count, stacked)):
        key = jax.random.fold_in(jax.random.key(0), i)
        params[n] = 0.01 * jax.random.normal(key, (rows, WIDTH))
    params["w"] = jnp.ones(count * WIDTH)
    return params, tx.init(params)


def plan_for(count: int, stacked: bool, endpoints: str) -> dtrans.PServerPlan:
    """Return the plan of a job."""
    begin = functools.partial(init, count, stacked)
    step = dtrans.make_train_step(functools.partial(loss, stacked), tx)
    state = jax.eval_shape(begin)
    batch = np.zeros((BATCH, count), np.int32), np.zeros(BATCH, np.float32)
    return dtrans.pserver(
        dtrans.trace(step, *state, *batch),
        dtrans.trace(begin),
        pservers=endpoints,
        trainers=1,
        sparse={f"params/{n}": dtrans.Rows(place="bucket") for n in names(count, stacked)},
    )


def cpu(pids: Sequence[int]) -> float:
    """Return the processor seconds of this process and of others."""
    total = sum(os.times()[:2])
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def batches(count: int, stacked: bool) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Return a function that returns random batches."""
    rng, y = np.random.default_rng(0), np.ones(BATCH, np.float32)
    starts = np.arange(count) * (ROWS if stacked else 0)
    return lambda: ((rng.zipf(1.2, (BATCH, count)) % ROWS + starts).astype(np.int32), y)


Window = Callable[[int], tuple[float, float]]  # steps -> their seconds, and processor seconds


class Job:
    """Job of one trainer, this process, and two servers."""

    def __init__(self, count: int, stacked: bool) -> None:
        endpoints = free_endpoints(2)
        every, script = ",".join(endpoints), str(Path(__file__))
        arguments = [sys.executable, script, "serve", str(count), str(int(stacked))]
        self.servers = [subprocess.Popen([*arguments, x, every]) for x in endpoints]
        plan = plan_for(count, stacked, every)
        self.exe = dtrans.Executor(deadline=200)
        self.state = self.exe.run(plan.trainer_startup_program(0))
        self.program, self.batch = plan.trainer_program(0), batches(count, stacked)

    def __call__(self, steps: int) -> tuple[float, float]:
        """Run steps; return their seconds, and the processor seconds of all roles."""
        data = [self.batch() for _ in range(steps)]
        pids = [x.pid for x in self.servers]
        used, start = cpu(pids), time.perf_counter()
        for batch in data:
            self.state, value = self.exe.run(self.program, self.state, *batch)
        jax.block_until_ready(value)
        return time.perf_counter() - start, cpu(pids) - used

    def close(self) -> None:
        """End the job."""
        self.exe.close()
        for x in self.servers:
            x.wait(timeout=100)


def one_device(count: int, stacked: bool) -> Window:
    """Return a function that runs steps with `jax.jit`, which update only the looked-up rows."""
    tables, batch = names(count, stacked), batches(count, stacked)
    params, _ = init(count, stacked)
    box: list[Any] = [params, jax.tree.map(lambda x: jnp.full_like(x, 0.1), params)]

    def update(params: Any, sums: Any, uniq: Any, at: jax.Array, y: jax.Array) -> Any:
        take = lambda tree: {n: tree[n].at[uniq[n]].get(mode="clip") for n in tables}
        put = lambda tree, new: {n: tree[n].at[uniq[n]].set(new[n], mode="drop") for n in tables}
        here = {**take(params), "w": params["w"]}
        value, g = jax.value_and_grad(functools.partial(loss, stacked))(here, at, y)
        new = jax.tree.map(lambda s, g: s + g * g, {**take(sums), "w": sums["w"]}, g)
        step = lambda x, g, s: x - 0.1 * g * jax.lax.rsqrt(s + 1e-7)
        moved = jax.tree.map(step, here, g, new)
        return {**put(params, moved), "w": moved["w"]}, {**put(sums, new), "w": new["w"]}, value

    jitted = jax.jit(update, donate_argnums=(0, 1))

    def steps(number: int) -> tuple[float, float]:
        data = [batch() for _ in range(number)]
        used, start = cpu(()), time.perf_counter()
        for ids, y in data:
            uniq, at = {}, np.empty(ids.shape, np.int32)
            for n, columns in zip(tables, np.split(np.arange(count), len(tables)), strict=True):
                found, inverse = np.unique(ids[:, columns], return_inverse=True)
                padding = np.full(BATCH * len(columns) - len(found), 1 << 30)
                uniq[n] = np.concatenate([found, padding]).astype(np.int32)
                at[:, columns] = inverse.reshape(BATCH, -1)
            *box[:], value = jitted(*box, uniq, at, y)
        jax.block_until_ready((value, box))
        return time.perf_counter() - start, cpu(()) - used

    return steps


def report(name: str, many: Window, one: Window) -> None:
    """Print the ratios of two competitors."""
    many(WARM), one(WARM)
    pairs = [(many(STEPS), one(STEPS)) for _ in range(PAIRS)]
    for i, what in enumerate(("seconds", "processor seconds")):
        ratios = sorted(a[i] / b[i] for a, b in pairs)
        ms = [1000 / STEPS * statistics.median(x[k][i] for x in pairs) for k in (0, 1)]
        print(
            f"{name}: {what} {statistics.median(ratios):.2f} ({ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}), {ms[0]:.2f} / {ms[1]:.2f} ms, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def main() -> None:
    """Print the ratios, or run a server."""
    if sys.argv[1] == "serve":
        count, stacked, endpoint, every = sys.argv[2:]
        programs = plan_for(int(count), stacked == "1", every).servers[endpoint]
        with dtrans.Executor(deadline=200) as exe:
            exe.run(programs.main, exe.run(programs.startup))
        return
    count = int(sys.argv[1])
    jobs = Job(count, False), Job(count, True)
    report(f"{count} tables / one table", *jobs)
    for job in jobs:
        job.close()
    report(f"{count} tables / one table, JAX", one_device(count, False), one_device(count, True))


if __name__ == "__main__":
    main()
