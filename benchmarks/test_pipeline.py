"""Time of a step of a pipeline, compared with the steps in `halves.py`; time of a tick.

By default, the pipeline has two stages, eight micro-batches, and the schedule 1F1B. `pipeline.py`
measures the memory.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from halves import CASES, MICRO, NOTHING, PEERS, TINY, agreeing, ours, planned
from pipeline import SCHEDULES, instructions
from test_endpoints import free_endpoints

import dtrans
from dtrans.run.distributed.role import trainer_roles


TICK = 300e-6  # seconds that a tick without computation may take
MODELS = {**CASES, **TINY}
STEPS, WINDOWS = 10, 9  # steps in a window, and number of windows, for jobs of processes
ROUNDS = 300  # number of timed steps for the time of a tick


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("model", MODELS)
def test_step_over_others(benchmark, ratio, model, peer):
    case = MODELS[model]()
    runs = agreeing(ours(case), PEERS[peer](case))
    measure = lambda: ratio(
        f"pipeline / {peer}, {model}", *runs, pairs=100 if model in TINY else 20
    )
    benchmark.extra_info["ratio"] = benchmark.pedantic(measure, rounds=1)


def test_tick_over_what_it_may_cost(benchmark, report):
    """Divide the seconds of a step by its number of ticks, for a model with little computation."""
    case = TINY[NOTHING]()
    plan = planned(case)
    job = plan.on_mesh()
    run, ticks = ours(case, job), len(plan.schedule.ticks()[0])
    for _ in range(20):
        jax.block_until_ready(run())
    benchmark.pedantic(lambda: jax.block_until_ready(run()), rounds=ROUNDS)
    parts = instructions(job, case, ROUNDS)
    if benchmark.disabled:
        return
    tick = benchmark.stats.stats.median / ticks
    benchmark.extra_info["microseconds of a tick"] = 1e6 * tick
    report(
        f"ticks/s of {NOTHING} ({ticks} of a step) / the target",
        TICK / tick,
        1 / tick,
        1 / TICK,
    )
    whole = sum(count * each for count, each in parts.values())
    for what, (count, each) in parts.items():
        report(
            f"    {what}, {count:g} of a step: share of it",
            count * each / whole,
            1e6 / each,
            1e6 / whole,
        )


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "PreferBackward"])
@pytest.mark.parametrize("model", CASES)
def test_schedules(benchmark, ratio, model, schedule):
    case = CASES[model]()
    runs = agreeing(ours(case, schedule=schedule), ours(case))
    measure = lambda: ratio(f"{schedule} / PreferBackward, {model}", *runs)
    benchmark.extra_info["ratio"] = benchmark.pedantic(measure, rounds=1)


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2, "num_micro_batch": MICRO // 2},
        {"memory": dtrans.StageMemory(gradient_checkpoint="auto")},
        {"memory": dtrans.StageMemory(offload=True)},
    ],
    ids=["two replicas, four micro-batches each", "gradient_checkpoint", "offload"],
)
@pytest.mark.parametrize("model", CASES)
def test_options(benchmark, ratio, model, options):
    """Compare a pipeline with an option to the default pipeline; both have the same batch."""
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    case = CASES[model]()
    runs = agreeing(ours(case, **options), ours(case))
    measure = lambda: ratio(
        f"{', '.join(f'{k}={v!r}' for k, v in options.items())} / without, {model}", *runs
    )
    benchmark.extra_info["ratio"] = benchmark.pedantic(measure, rounds=1)


@pytest.mark.parametrize("model", MODELS)
def test_two_processes_over_one(benchmark, report, model):
    """Compare a pipeline of two processes with a pipeline in this process; they train in turn."""
    case = MODELS[model]()
    command = [sys.executable, str(Path(__file__).with_name("pipeline.py")), "--process", model]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DTRANS_", "JAX_"))} | {
        "JAX_PLATFORMS": "cpu"
    }
    processes = [
        subprocess.Popen(
            command,
            env=env | role.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for role in trainer_roles(free_endpoints(2))
    ]
    try:
        for p in processes:
            assert "ready\n" in p.stdout  # Gloo prints other lines before
        run = ours(case)

        def both() -> float:
            for p in processes:
                p.stdin.write(f"{STEPS}\n")
                p.stdin.flush()
            return max(float(p.stdout.readline()) for p in processes)

        def one() -> float:
            start = time.perf_counter()
            for _ in range(STEPS):
                made = run()
            jax.block_until_ready(made)
            return time.perf_counter() - start

        both(), one()
        pairs = [(both(), one()) for _ in range(WINDOWS)]
        benchmark.pedantic(both, rounds=1)
    finally:
        for p in processes:
            p.stdin.close()
        for p in processes:
            p.wait(timeout=120)
            p.stdout.close()
    share = statistics.median(b / a for a, b in pairs)
    a, b = (STEPS / statistics.median(t) for t in zip(*pairs, strict=True))
    benchmark.extra_info["of one process"] = share
    report(f"steps/s of two processes / of one, {model}", share, a, b)
