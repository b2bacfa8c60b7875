"""Steps per second of two trainers and two parameter servers, compared with one device.

All roles are processes on this host. The job and the jitted step of one device run in turn, `STEPS`
steps each; while one runs, the other waits.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from test_endpoints import free_endpoints
from two_by_two import MODES, batch, init, plan_for, step, stepping

import dtrans


STEPS, WINDOWS = 100, 9


@contextlib.contextmanager
def running_job(mode):
    """Start a job; yield its endpoints, and a function that runs a number of steps.

    The function returns the mean of both trainers' seconds.
    """
    script = str(Path(__file__).with_name("two_by_two.py"))
    endpoints = free_endpoints(2)
    every = ",".join(endpoints)
    servers = [
        subprocess.Popen([sys.executable, script, "pserver", mode, ep, every]) for ep in endpoints
    ]
    other = subprocess.Popen(
        [sys.executable, script, "trainer", mode, every],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with dtrans.Executor(deadline=120) as exe:
            ours = stepping(exe, plan_for(mode, every), 0)

            def both(steps: int) -> float:
                other.stdin.write(f"{steps}\n")
                other.stdin.flush()
                mine = ours(steps)
                return (mine + float(other.stdout.readline())) / 2

            yield endpoints, both
    finally:
        other.stdin.close()
        other.stdout.close()
        for process in (other, *servers):
            process.wait(timeout=120)


@pytest.mark.parametrize("mode", MODES)
def test_two_trainers_and_two_pservers(benchmark, report, mode):
    jitted = jax.jit(step, donate_argnums=(0, 1))
    box, data = [*init(jax.random.key(0))], batch(0)

    def plain() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            *box[:], loss = jitted(*box, *data)
        jax.block_until_ready(loss)
        return time.perf_counter() - start

    with running_job(mode) as (_, both):
        both(STEPS), plain()
        pairs = [(both(STEPS), plain()) for _ in range(WINDOWS)]
        benchmark.pedantic(lambda: both(STEPS), rounds=1)
    share = statistics.median(b / a for a, b in pairs)
    a, b = (STEPS / statistics.median(t) for t in zip(*pairs, strict=True))
    benchmark.extra_info["of plain"] = share
    report(f"{mode}: steps/s of each trainer / of the plain step", share, a, b)
