"""Steps per second with a table on two parameter servers, compared with one device.

All roles are processes on this host. The job and its competitors run in turn, `STEPS` steps each;
while one runs, the others wait. The first `WARM` steps are not timed: they create most rows. The
competitors are:

- the step on one device, where Adagrad updates all rows;
- a step on one device that reads and updates only the looked-up rows;
- the same job with PyTorch's RPC (`torch_tables.py`), if PyTorch is installed, or if the variable
  DTRANS_TORCH is a Python interpreter with PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tables import Shape, Steps, announcing, dense_steps, plan_for, row_steps, stepping
from test_endpoints import free_endpoints

import dtrans


STEPS, WINDOWS, WARM = 10, 7, 300
TORCH = os.environ.get("DTRANS_TORCH", sys.executable)


@contextlib.contextmanager
def job(shape: Shape) -> Iterator[Steps]:
    """Start a job; yield a function that runs steps, and returns the trainers' mean seconds."""
    script = str(Path(__file__).with_name("tables.py"))
    endpoints = free_endpoints(2)
    every = ",".join(endpoints)
    start = lambda *arguments, **pipes: subprocess.Popen(
        [sys.executable, script, *arguments], **pipes
    )
    processes = [start("pserver", str(shape), ep, every) for ep in endpoints]
    other = None
    if shape.trainers == 2:
        other = start(
            "trainer", str(shape), every, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(other)
    try:
        with dtrans.Executor(deadline=200) as exe:
            ours = stepping(exe, shape, plan_for(shape, every), 0)

            def both(count: int) -> float:
                if other is None:
                    return ours(count)
                other.stdin.write(f"{count}\n")
                other.stdin.flush()
                mine = ours(count)
                its, both.held = map(float, other.stdout.readline().split())
                return (mine + its) / 2

            yield both
    finally:
        if other is not None:
            other.stdin.close()
            other.stdout.close()
        for process in processes:
            process.wait(timeout=200)


@contextlib.contextmanager
def torch_job(shape: Shape) -> Iterator[dict[str, Steps]]:
    """Start the same job with PyTorch; yield {name: steps}, empty without PyTorch."""
    if subprocess.run(
        [TORCH, "-c", "import torch"], stderr=subprocess.DEVNULL, check=False
    ).returncode:
        yield {}
        return
    script = str(Path(__file__).with_name("torch_tables.py"))
    port = free_endpoints(1)[0].rpartition(":")[2]
    start = lambda what, rank, **pipes: subprocess.Popen(
        [TORCH, script, what, str(rank), port, str(shape)], **pipes
    )
    servers = [start("pserver", rank) for rank in range(2)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    trainers = [start("trainer", rank, **pipes) for rank in range(shape.trainers)]

    def steps(count: int) -> float:
        for x in trainers:
            x.stdin.write(f"{count}\n")
            x.stdin.flush()
        return statistics.mean(float(x.stdout.readline()) for x in trainers)

    try:
        yield {"PyTorch RPC": steps}
    finally:
        for x in trainers:
            x.stdin.close()
            x.stdout.close()
        for x in (*trainers, *servers):
            x.wait(timeout=200)


def beside(steps: Steps, others: Sequence[Steps]) -> list[tuple[float, float, float]]:
    """Run `steps` and each of `others` in turn.

    Return a tuple for each function in `others`: the median ratio of steps per second, the steps
    per second of `steps`, and the steps per second of the other function.
    """
    for fn in (steps, *others):
        fn(WARM)
    times = [[fn(STEPS) for fn in (steps, *others)] for _ in range(WINDOWS)]
    rate = lambda i: STEPS / statistics.median(t[i] for t in times)
    return [
        (statistics.median(t[i] / t[0] for t in times), rate(0), rate(i))
        for i in range(1, 1 + len(others))
    ]


def load() -> str:
    return f"load {os.getloadavg()[0]:.0f}"


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "table"])
def test_steps(benchmark, report: Callable[..., None], sparse: bool) -> None:
    shape = Shape(100_000, 64, 512, sparse=sparse)
    with job(shape) as steps, torch_job(shape) if sparse else contextlib.nullcontext({}) as peers:
        peers |= {"dense step": dense_steps(shape), "rows alone": row_steps(shape)}
        for what, found in zip(peers, beside(steps, [*peers.values()]), strict=True):
            benchmark.extra_info[f"of the {what}"] = found[0]
            report(
                f"{'table' if sparse else 'dense'} 100k x 64, 2 x 512 ids: steps/s / {what}, "
                f"{load()}",
                *found,
            )
        benchmark.pedantic(lambda: steps(STEPS), rounds=1)


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_steps_of_other_modes(benchmark, report: Callable[..., None], mode: str) -> None:
    shape = Shape(100_000, 64, 512, mode=mode)
    with job(shape) as steps:
        peers = {"dense step": dense_steps(shape), "rows alone": row_steps(shape)}
        for what, found in zip(peers, beside(steps, [*peers.values()]), strict=True):
            benchmark.extra_info[f"of the {what}"] = found[0]
            report(f"table 100k x 64, 2 x 512 ids, {mode}: steps/s / {what}, {load()}", *found)
        benchmark.pedantic(lambda: steps(STEPS), rounds=1)


@pytest.mark.parametrize("drawn", ["uniform", "zipf"])
def test_rows_a_second(benchmark, report: Callable[..., None], drawn: str) -> None:
    """Compare rows per second; a row that a batch contains twice counts twice."""
    shape = Shape(1_000_000, 64, 4096, drawn, trainers=1)
    with job(shape) as steps, torch_job(shape) as peers:
        peers |= {"`take` and update here": row_steps(shape)}
        for what, (share, ours, theirs) in zip(
            peers, beside(steps, [*peers.values()]), strict=True
        ):
            benchmark.extra_info[f"of {what}"] = share
            name = f"1M x 64, {drawn}: rows/s over endpoints / {what}, {load()}"
            report(name, share, ours * shape.ids, theirs * shape.ids)
        benchmark.pedantic(lambda: steps(STEPS), rounds=1)


@contextlib.contextmanager
def linked_job(shape: Shape, delay: float, folder: Path) -> Iterator[tuple[Steps, Steps]]:
    """Start a job of one trainer whose connections to the servers have a delay.

    Yield the two functions of `announcing`.
    """
    files = {n: str(Path(__file__).with_name(f"{n}.py")) for n in ("tables", "delayed_link")}
    here, there = (",".join(free_endpoints(2)) for _ in range(2))
    # This path is too long for a Unix socket. So the roles use TCP, where the link adds its delay.
    folder = folder / ("long" * 25)
    folder.mkdir()
    env = {**os.environ, "TMPDIR": str(folder)}
    start = lambda name, *arguments: subprocess.Popen(
        [sys.executable, files[name], *arguments], env=env
    )
    servers = [start("tables", "pserver", str(shape), ep, there) for ep in there.split(",")]
    link = start("delayed_link", str(delay), here, there)
    try:
        with dtrans.Executor(deadline=200) as exe:
            yield announcing(exe, shape, plan_for(shape, here))
        for process in servers:
            process.wait(timeout=200)
    finally:
        for process in (*servers, link):
            process.kill()
            process.wait()


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.01], ids="{} s".format)
def test_rows_asked_for_ahead(
    benchmark, report: Callable[..., None], tmp_path: Path, delay: float
) -> None:
    """Compare steps that request rows early with steps that wait for rows.

    Steps that request rows early need one round trip to the servers, and other steps two.
    """
    with linked_job(Shape(100_000, 64, 512, trainers=1), delay, tmp_path) as (ahead, waiting):
        ((share, ours, theirs),) = beside(ahead, [waiting])
        benchmark.pedantic(lambda: ahead(STEPS), rounds=1)
    benchmark.extra_info["of steps that wait"] = share
    report(
        f"100k x 64, 512 ids, {2 * delay:g} s there and back: steps/s asking ahead / waiting, "
        f"{load()}",
        share,
        ours,
        theirs,
    )


@pytest.mark.parametrize("rows", [100_000, 1_000_000, 10_000_000])
def test_a_trainer_has_no_table(benchmark, rows: int) -> None:
    """Print a trainer's memory beyond the imports, and its steps per second.

    Neither should depend on the number of rows of the table.
    """
    with job(Shape(rows, 16, 512)) as steps:
        steps(STEPS)
        took = statistics.median(steps(STEPS) for _ in range(WINDOWS))
        benchmark.pedantic(lambda: steps(STEPS), rounds=1)
        benchmark.extra_info["MB after import"] = steps.held
    print(
        f"\n{rows:,} x 16: {STEPS / took:.1f} steps/s, a trainer has {steps.held:.0f} MB after "
        f"import; {load()}"
    )
