"""Parameter servers of one host: shared memory, compared with messages and with plain sockets.

    python benchmarks/one_host.py                            25M parameters, 2 trainers, 2 servers
    python benchmarks/one_host.py --model 1.9M --rounds 9

Three jobs run in turn, some steps each, and wait while another job runs: dtrans with shared memory,
dtrans with messages only (DTRANS_SHARED_MEMORY=disabled), and the same job on plain sockets
(`socket_servers.py`). The script prints medians of the rounds: seconds of a step, and the processor
seconds that all processes of the job use for a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from hosts_roles import MODELS

import dtrans
from dtrans.run.net.net_options import SHARED_MEMORY


FOLDER = Path(__file__).parent
WARM = 5  # steps before the first window
WINDOW = 3.0  # approximate seconds of a window
# job -> kind of its roles (`hosts_roles.py`), shared memory, port of the first server
JOBS = {
    "shared memory": ("dtrans", "auto", 6174),
    "messages": ("dtrans", "disabled", 6274),
    "sockets": ("sockets", "disabled", 6374),
}
TICK = os.sysconf("SC_CLK_TCK")


class Job:
    """Two trainers and two servers on this host, as processes.

    Args:
      name: a key of `JOBS`.
      model: a key of `hosts_roles.MODELS`.
    """

    def __init__(self, name: str, model: str) -> None:
        kind, memory, port = JOBS[name]
        table = dtrans.role_table("pserver", 2, 2)
        command = [sys.executable, str(FOLDER / "hosts_roles.py"), kind, model, "run", "0"]
        shared = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            SHARED_MEMORY: memory,
        }
        self.roles: dict[str, subprocess.Popen[str]] = {}
        for entry in table.at(["127.0.0.1"] * 4, port):
            self.roles[entry.name] = subprocess.Popen(
                command,
                env={**os.environ, **shared, **entry.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self.trainers = [self.roles[entry.name] for entry in table.of("trainer")]

    def run(self, steps: int) -> tuple[float, float]:
        """Run some steps; return the seconds, and the processor seconds, of a step."""
        before = self._processor()
        for trainer in self.trainers:
            trainer.stdin.write(f"{steps}\n")
            trainer.stdin.flush()
        seconds = [sum(json.loads(x.stdout.readline())["seconds"]) for x in self.trainers]
        return statistics.mean(seconds) / steps, (self._processor() - before) / steps

    def _processor(self) -> float:
        total = 0
        for role in self.roles.values():
            fields = Path(f"/proc/{role.pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])  # in user mode, and in the kernel
        return total / TICK

    def close(self) -> None:
        """End the trainers, and so the servers."""
        for role in self.roles.values():
            role.stdin.close()
        for role in self.roles.values():
            role.wait(60)
            role.stdout.close()


@contextlib.contextmanager
def running_jobs(model: str) -> Iterator[dict[str, Job]]:
    """Start all jobs."""
    with contextlib.ExitStack() as stack:
        jobs = {}
        for name in JOBS:
            jobs[name] = Job(name, model)
            stack.callback(jobs[name].close)
        yield jobs


def main(model: str = "25M", rounds: int = 7) -> None:
    """Measure one model, and print a row for each job."""
    assert model in MODELS, f"--model {model}: expected one of {', '.join(MODELS)}"
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in JOBS}
    with running_jobs(model) as jobs:
        steps = 1
        for job in jobs.values():
            job.run(WARM)  # compiles
            seconds, _ = job.run(WARM)
            steps = max(steps, round(WINDOW / seconds))
        for _ in range(rounds):
            for name, job in jobs.items():
                found[name].append(job.run(steps))
    print(f"{model}, {steps} steps in a window, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, windows in found.items():
        seconds, processor = map(statistics.median, zip(*windows, strict=True))
        ratios = [a[0] / b[0] for a, b in zip(found["messages"], windows, strict=True)]
        print(
            f"{name:14} {seconds * 1e3:8.2f} ms a step  {processor * 1e3:8.2f} ms of a processor  "
            f"{statistics.median(ratios):.2f} x the rate with messages"
        )


if __name__ == "__main__":
    typer.run(main)
