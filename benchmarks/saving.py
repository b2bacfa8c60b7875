"""Cost of a checkpoint that a server writes while training continues.

    python saving.py [PARAMETERS]     one matrix, with Adam
    python saving.py rows [ROWS...]   a table of 4,000,000 rows of 16 floats, with Adam; ROWS of them exist

The job has two processes, a trainer and a server. The script prints the stall, the memory and the
disk space of a save. The stall is the time of `job.save(wait=False)` and of all steps until the
checkpoint is complete, minus the usual time of the same number of steps. The script compares it
with the time to copy the server's state in memory. The memory is the server's largest memory
during the save (VmHWM), compared with its memory before.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dtrans


STEPS, SAVES = 8, 6  # number of steps between two saves, number of saves
# number of rows of the table, floats of a row, rows that a step looks up
VIRTUAL, WIDTH, IDS = (
    4_000_000,
    16,
    8192,
)
FOLDER = "SAVING_FOLDER"  # variable with the folder of the checkpoints
LONGEST = 200.0  # seconds that a save may take


def seconds(fn: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


class ServerMemory:
    """Memory of the server's process, in MB."""

    def __init__(self, folder: Path) -> None:
        self._place = Path("/proc", (folder / "pid").read_text())

    def now(self) -> float:
        """Return the memory now, and begin to measure the peak."""
        (self._place / "clear_refs").write_text("5")
        return self._field("VmRSS")

    def peak(self) -> float:
        """Return the largest memory since the last call of `now`."""
        return self._field("VmHWM")

    def _field(self, name: str) -> float:
        (line,) = (
            x for x in (self._place / "status").read_text().splitlines() if x.startswith(name)
        )
        return int(line.split()[1]) / 1024


def save_and_step(job: Any, name: str, folder: Path, one: Callable[[], Any]) -> list[float]:
    """Save a checkpoint, and train until it is complete; return the seconds of each step.

    The first includes the seconds of `job.save`.
    """
    start = time.perf_counter()
    job.save(name, wait=False)
    times, saving = list[float](), time.perf_counter() - start
    while not times or not (folder / name / "pserver-0").exists():
        times.append(seconds(one))
        assert sum(times) < LONGEST, f"{folder / name} is not written"
    return [saving + times[0], *times[1:]]


def serve_or_train(
    plan: Any, role: Any, key: Any, train: Callable[[Any, Path], Iterator[str]]
) -> None:
    """Run this process's role; a trainer prints the lines that `train` yields."""
    folder = Path(os.environ[FOLDER])
    with plan.on_cluster(deadline=120) as job:
        if role.is_pserver:
            (folder / "pid").write_text(str(os.getpid()))
            job.serve(job.init(key), checkpoints=folder)
        else:
            for line in train(job, folder):
                print(line)


def run_dense(parameters: int) -> None:
    """Run one role of the job with one matrix."""
    size, key, tx = round(parameters**0.5), jax.random.key(0), optax.adam(1e-3)
    init = lambda key: (params := {"w": jax.random.normal(key, (size, size))}, tx.init(params))
    step = dtrans.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx)
    x, role = jnp.ones((4, size)), dtrans.Role.from_env()
    main = dtrans.trace(step, *jax.eval_shape(init, key), x)
    plan = dtrans.pserver(
        main, dtrans.trace(init, key), pservers=role.pservers, trainers=role.trainers
    )

    def train(job: Any, folder: Path) -> Iterator[str]:
        state = job.init(key)

        def one() -> None:
            nonlocal state
            state, _ = job.step(state, x)
            jax.block_until_ready(state)

        for _ in range(3):
            one()
        memory, plain, stalls, firsts, counts, most = (
            ServerMemory(folder),
            list[float](),
            [],
            [],
            [],
            [],
        )
        for at in range(SAVES):
            window = [seconds(one) for _ in range(STEPS)]
            before = memory.now()
            times, median = save_and_step(job, str(at), folder, one), statistics.median(window)
            most.append((memory.peak(), before))
            plain += window
            stalls.append(sum(times) - len(times) * median)
            firsts.append(times[0] - median)
            counts.append(len(times))
        held = [np.ones((size, size), np.float32) for _ in range(3)]
        copy = statistics.median(seconds(lambda: [a.copy() for a in held]) for _ in range(5))
        in_copies = lambda x: f"{x * 1e3:.0f} ms, {x / copy:.2f} of a copy"
        yield (
            f"{sum(a.nbytes for a in held) / 1e6:.0f} MB of state ({size * size:,} parameters, "
            f"Adam), load {_load()}"
        )
        yield (
            f"a copy of the state {copy * 1e3:.0f} ms; median step "
            f"{statistics.median(plain) * 1e3:.0f} ms, "
            + (f"{min(plain) * 1e3:.0f} to {max(plain) * 1e3:.0f}")
        )
        yield (
            f"stall of a save: {in_copies(statistics.median(stalls))} (median of {SAVES}; the "
            "first save " + (f"{in_copies(stalls[0])}), over {statistics.median(counts):g} steps")
        )
        yield f"its first step, behind job.save: {in_copies(statistics.median(firsts))}"
        peak, before = max(most)
        yield (
            f"memory of the server: {before:.0f} MB before a save, {peak:.0f} MB at most during it"
        )

    serve_or_train(plan, role, key, train)


def run_rows(made: int) -> None:
    """Run one role of the job with a table."""
    key, tx, role = jax.random.key(0), optax.adam(1e-3), dtrans.Role.from_env()

    def init(key: Any) -> Any:
        params = {"emb": 0.01 * jax.random.normal(key, (VIRTUAL, WIDTH)), "w": jnp.ones(WIDTH)}
        return params, tx.init(params)

    step = dtrans.make_train_step(lambda p, ids: jnp.mean((p["emb"][ids] @ p["w"] - 1) ** 2), tx)
    ids = np.arange(IDS, dtype=np.int32)
    plan = dtrans.pserver(
        dtrans.trace(step, *jax.eval_shape(init, key), ids),
        dtrans.trace(init, key),
        pservers=role.pservers,
        trainers=role.trainers,
        sparse={"params/emb": dtrans.Rows("lazy")},
    )

    def train(job: Any, folder: Path) -> Iterator[str]:
        state, rng = job.init(key), np.random.default_rng(0)
        rows = rng.choice(VIRTUAL, made, replace=False).astype(np.int32)

        def one(ids: np.ndarray | None = None) -> None:
            nonlocal state
            state, _ = job.step(state, rng.choice(rows, IDS) if ids is None else ids)
            jax.block_until_ready(state)

        for at in range(0, made, IDS):
            one(np.resize(rows[at : at + IDS], IDS))
        memory, times, ratios, rates, longest = (
            ServerMemory(folder),
            list[float](),
            [],
            [],
            list[float](),
        )
        for at in range(SAVES):
            median = statistics.median(seconds(one) for _ in range(STEPS))
            before = memory.now()
            steps = save_and_step(job, str(at), folder, one)
            ratios.append(memory.peak() / before)
            times.append(sum(steps))
            rates.append(len(steps) * median / sum(steps))
            longest.append(max(steps) / median)
        disk = sum(f.stat().st_size for f in (folder / "0").rglob("*") if f.is_file())
        took = statistics.median(times)
        yield (
            f"{made:>9,} rows made: {took * 1e3:.0f} ms ({took / made * 1e6:.2f} us a row), "
            f"{disk / 1e6:.1f} MB of "
            f"disk ({disk / made:.0f} bytes a row), memory {max(ratios):.2f} of the server's "
            "before; steps meanwhile "
            f"{statistics.median(rates):.2f} of the usual rate, the longest "
            f"{statistics.median(longest):.1f} of the "
            f"median one; load {_load()}"
        )

    serve_or_train(plan, role, key, train)


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def launch(*arguments: str) -> int:
    """Run a job, and return its exit status."""
    roles = [
        sys.executable,
        "-m",
        "dtrans.cli",
        "launch",
        "--trainers",
        "1",
        "--pservers",
        "1",
        __file__,
        *arguments,
    ]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.call(roles, env={**os.environ, FOLDER: folder})


if __name__ == "__main__":
    if "DTRANS_ROLE" in os.environ:
        run_rows(int(sys.argv[2])) if sys.argv[1] == "rows" else run_dense(int(sys.argv[1]))
    elif sys.argv[1:2] == ["rows"]:
        sys.exit(
            max(launch("rows", rows) for rows in sys.argv[2:] or ("10000", "100000", "1000000"))
        )
    else:
        sys.exit(launch(*(sys.argv[1:] or ["25000000"])))
