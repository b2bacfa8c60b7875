"""Parameter servers on hosts with links of a known rate: the share of the best possible time.

    python benchmarks/hosts.py                     25M parameters, 2 + 2 hosts, 1 Gbit/s
    python benchmarks/hosts.py --model 1.9M --rate 1gbit --rate 200mbit
    python benchmarks/hosts.py --hosts 8 --compute sleep --ring

Each trainer and each server runs on a separate host: a network namespace with a link to one switch.
Both directions of each link have the given rate (`tools/namespaces.py`). The script needs Linux and
root. It removes its namespaces, processes and queues at the end, also after an error or Ctrl-C.

Two jobs run in turn, some steps each: one of dtrans, and the same job on plain sockets
(`socket_servers.py`). With `--ring`, a third job has no servers: its trainers average their
gradients over Gloo (`hosts_roles.py`). While one job runs, the others wait. In the same run, plain
sockets measure the bandwidth of a link, while both directions are busy. From this bandwidth, the
plan computes the bound: a step takes at least the time in which the busiest link carries its bytes
(`dtrans.costs`).

All hosts share the processors of this machine. If the processors are busy for more than 70 % of the
time, they limit the steps, and not the links. Then the script measures again at 200 Mbit/s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer
from hosts_roles import COMPUTE, plan_for
from mlp_job import MODELS
from windows import Command, Roles, Window, role_environment

import dtrans
from dtrans.costs import Costs, link_rate
from dtrans.ir.display import plan_text
from tools.namespaces import Namespaces, namespaces, why_not


# the jobs, and the first port of their servers, or of the ring's trainers
JOBS = {"dtrans": 6174, "sockets": 7174, "gloo": 8174}
RING = "gloo"
FOLDER = Path(__file__).parent
BUSY = 0.7  # share of the processors' time; above, processors limit the steps
SLOW = "200mbit"  # rate of the links if the processors are too busy
WARM = 3  # steps before the first window
WINDOW = 6.0  # seconds of a window, if all steps take the time of the bound
RATE_SECONDS = 2.0  # of each measurement of a link's rate
# columns of a result; "sent" are bytes at the interfaces of all hosts, "over" the share above the
# gradients and parameters, "processor" the seconds that the job's processes use
HEADER = (
    "job",
    "s a step",
    "of the bound",
    "/ max(compute, bound)",
    "MB sent",
    "over",
    "processors busy",
    "processor s",
    "loss",
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Job that is measured.

    Attributes:
      model: a key of `hosts_roles.MODELS`.
      compute: a member of `hosts_roles.COMPUTE`.
      encryption: the option `transport_encryption` of dtrans's job.
      gradients: seconds in which a trainer computes its gradients on an idle machine.
      ring: True if trainers without servers are measured as well.
    """

    model: str
    trainers: int
    pservers: int
    compute: str
    encryption: str
    gradients: float = 0.0
    ring: bool = False

    @property
    def hosts(self) -> int:
        return self.trainers + self.pservers

    @property
    def jobs(self) -> list[str]:
        """Jobs that are measured, keys of `JOBS`."""
        return [kind for kind in JOBS if self.ring or kind != RING]

    @property
    def pause(self) -> float:
        """Seconds that a trainer sleeps in each step."""
        return self.gradients if self.compute == "sleep" else 0.0

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step without any communication."""
        return 0.0 if self.compute == "none" else self.gradients


# -- a job -----------------------------------------------------------------------------------------


class HostJob(Roles):
    """Job whose roles are processes on separate hosts: servers first, then trainers.

    Args:
      kind: a key of `JOBS`.
      folder: folder for the output of each role.
    """

    def __init__(self, kind: str, setup: Setup, hosts: Namespaces, folder: Path) -> None:
        self.hosts = hosts
        addresses = [hosts.address(i) for i in range(setup.hosts)]
        names = hosts.names
        if kind == RING:
            # a ring has no servers: it runs on the trainers' hosts alone
            table = dtrans.role_table("nccl2", setup.trainers)
            addresses, names = addresses[setup.pservers :], names[setup.pservers :]
        else:
            table = dtrans.role_table("pserver", setup.trainers, setup.pservers)
        script = [sys.executable, str(FOLDER / "hosts_roles.py"), kind]
        argv = [*script, setup.model, setup.compute, str(setup.pause)]
        shared = role_environment(setup.encryption)
        commands = {}
        for name, entry in zip(names, table.at(addresses, JOBS[kind]), strict=True):
            on_host = [hosts.rsh, name, *argv]  # no Unix sockets between hosts
            commands[entry.name] = Command(on_host, {**shared, **entry.environment})
        super().__init__(kind, commands, folder)

    def run(self, steps: int) -> Window:
        """Run some steps, and count the bytes that the hosts send."""
        before = self.hosts.sent_bytes()
        window = super().run(steps)
        sent = (self.hosts.sent_bytes() - before) / steps
        return dataclasses.replace(window, sent=sent)


# -- measurements ----------------------------------------------------------------------------------


def measure_link(hosts: Namespaces) -> tuple[float, float]:
    """Return bytes per second between two hosts: in one direction alone, and in both at once.

    The second number is the rate of the slower direction.
    """
    command = [sys.executable, str(FOLDER / "socket_servers.py")]
    ask = [*command, hosts.address(0), str(RATE_SECONDS)]
    answer = [*hosts.enter(0), *command, "listen", str(RATE_SECONDS)]
    with subprocess.Popen(answer, stdout=subprocess.PIPE, text=True) as listener:
        try:
            if listener.stdout.readline() != "ready\n":
                raise RuntimeError("no connection for the measurement of the link")
            asked = subprocess.run(
                [*hosts.enter(1), *ask], check=True, stdout=subprocess.PIPE, text=True
            )
            one_way, *there = json.loads(listener.stdout.readline())
        finally:
            listener.kill()
    return one_way, min(*there, *json.loads(asked.stdout))


def seconds_of_gradients(setup: Setup) -> float:
    """Return the seconds in which a trainer computes its gradients, while nothing else runs."""
    command = [sys.executable, str(FOLDER / "hosts_roles.py"), "gradients", setup.model]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


@dataclasses.dataclass(frozen=True)
class Result:
    """Measurement at one rate.

    Attributes:
      rate: rate of the links, as for tc.
      link: bytes per second of a link, in one direction alone, and in both at once.
      costs: costs of a step in dtrans, at the measured bandwidth.
      payload: bytes of gradients and parameters in a step, from and to all trainers.
      windows: the windows of each job, in turn.
      load: load of the machine at the end.
    """

    setup: Setup
    rate: str
    link: tuple[float, float]
    costs: Costs
    payload: int
    windows: dict[str, list[Window]]
    load: float

    @property
    def bound(self) -> float:
        """Seconds of a step if the busiest link is never idle."""
        return self.costs.link_seconds

    @property
    def busy(self) -> float:
        """Largest share of time in which the processors were busy, of all jobs."""
        return max(self._median(kind, "busy") for kind in self.windows)

    def seconds(self, kind: str) -> float:
        """Return the median seconds of a job's step."""
        return statistics.median(x for window in self.windows[kind] for x in window.seconds)

    def ratio(self, other: str = "sockets") -> float:
        """Return the seconds of a step of dtrans / those of another job: median over pairs."""
        pairs = zip(self.windows["dtrans"], self.windows[other], strict=True)
        return statistics.median(
            statistics.median(a.seconds) / statistics.median(b.seconds) for a, b in pairs
        )

    def _median(self, kind: str, name: str) -> float:
        return statistics.median(getattr(window, name) for window in self.windows[kind])

    def __str__(self) -> str:
        setup, (one_way, both) = self.setup, self.link
        title = (
            f"{setup.trainers} trainers + {setup.pservers} servers, {setup.model} parameters, "
            f"compute: {setup.compute}, encryption: {setup.encryption}, links of {self.rate}"
        )
        least = max(self.bound, setup.compute_seconds)
        rows = []
        for kind in self.windows:
            seconds, sent = self.seconds(kind), self._median(kind, "sent")
            row = (
                kind,
                f"{seconds:.3f}",
                f"{self.bound / seconds:.0%}",
                f"{seconds / least:.2f}",
                f"{sent / 1e6:,.2f}",
                f"{sent / self.payload - 1:+.1%}",
                f"{self._median(kind, 'busy'):.0%}",
                f"{self._median(kind, 'processor'):.3f}",
                f"{self.windows[kind][-1].loss:.4g}",
            )
            rows.append(row)
        ratios = [
            f"dtrans / {other}: {self.ratio(other):.2f}"
            for other in self.windows
            if other != "dtrans"
        ]
        notes = [
            f"{', '.join(ratios)}; medians of {len(self.windows['dtrans'])} pairs",
            f"bound: {self.costs.link_bytes:,.0f} bytes on the busiest link in one direction, "
            f"{self.bound:.3f} s at the measured {both / 1e6:.1f} MB/s "
            f"({one_way / 1e6:.1f} MB/s if the other direction is idle)",
            f"gradients alone: {setup.compute_seconds:.3f} s; gradients + parameters: "
            f"{self.payload / 1e6:,.2f} MB a step; load {self.load:.1f}",
        ]
        return plan_text(title, HEADER, rows, notes, right=range(1, len(HEADER)))


def measure(
    setup: Setup, hosts: Namespaces, rates: list[str], delay: float, rounds: int, steps: int
) -> Iterator[Result]:
    """Run both jobs in turn at each rate, and yield a result for each rate.

    Args:
      rates: rates of the links. The caller may append rates in the loop.
      delay: seconds from each host to the switch.
      rounds: number of windows of each job.
      steps: steps of a window; 0 to choose the number.
    """
    endpoints = tuple(f"{hosts.address(i)}:{JOBS['dtrans']}" for i in range(setup.pservers))
    plan = plan_for(setup.model, setup.compute, endpoints, setup.trainers)
    payload = setup.trainers * sum(plan.bytes_per_step.values())
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        jobs = {}
        for kind in setup.jobs:
            jobs[kind] = HostJob(kind, setup, hosts, Path(folder))
            stack.callback(jobs[kind].kill)
        for job in jobs.values():
            job.run(WARM)  # on links without a limit
        for rate in rates:
            for i in range(setup.hosts):
                hosts.shape(i, rate, delay)
            before = measure_link(hosts)
            count = steps or _steps_of_window(plan.costs(before[1]))
            windows: dict[str, list[Window]] = {kind: [] for kind in jobs}
            for _ in range(rounds):
                for kind, job in jobs.items():
                    windows[kind].append(job.run(count))
            link = tuple(map(max, before, measure_link(hosts)))  # the bound is not too long
            load = os.getloadavg()[0]
            yield Result(setup, rate, link, plan.costs(link[1]), payload, windows, load)
        for job in jobs.values():
            job.close()


def _steps_of_window(costs: Costs) -> int:
    return min(100, max(3, round(WINDOW / costs.link_seconds)))


# -- the command -----------------------------------------------------------------------------------


def _end(number: int, frame: Any) -> NoReturn:
    """End this process like Ctrl-C, so that everything is removed."""
    raise SystemExit(128 + number)


def compute_of(text: str) -> tuple[str, float]:
    """Return the member of `COMPUTE`, and the seconds of the gradients; 0 if unknown."""
    if text in COMPUTE:
        return text, 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        expected = f"expected one of {', '.join(COMPUTE)}, or a number of seconds above 0"
        raise typer.BadParameter(expected, param_hint="compute")
    return "sleep", seconds


def main(
    model: str = typer.Option("25M", help=f"Parameters: {', '.join(MODELS)}."),
    trainers: int = typer.Option(2, min=1, help="Number of trainers."),
    pservers: int = typer.Option(2, min=1, help="Number of servers."),
    hosts: int = typer.Option(
        0, min=0, help="Number of hosts, half of them trainers; replaces both numbers."
    ),
    rate: list[str] = typer.Option(["1gbit"], help="Rate of each link; may be repeated."),
    delay: float = typer.Option(0.0, min=0, help="Milliseconds from each host to the switch."),
    compute: str = typer.Option(
        "none",
        help="run: trainers compute gradients. sleep: they sleep as long as the gradients take on "
        "the idle machine. A number: they sleep this number of seconds. none: neither.",
    ),
    ring: bool = typer.Option(False, "--ring", help="Also measure a ring of trainers over Gloo."),
    rounds: int = typer.Option(5, min=1, help="Number of windows of each job."),
    steps: int = typer.Option(0, min=0, help="Steps of a window; 0 for about six seconds."),
    encryption: str = typer.Option("disabled", help="transport_encryption of dtrans's job."),
) -> None:
    """Measure parameter servers on hosts whose links have a known rate."""
    compute, seconds = compute_of(compute)
    if hosts % 2:
        raise typer.BadParameter("expected an even number", param_hint="hosts")
    if hosts:
        trainers = pservers = hosts // 2
    if model not in MODELS:
        raise typer.BadParameter(f"expected one of {', '.join(MODELS)}", param_hint="model")
    reason = why_not("tbf", *(["netem"] if delay else []))
    if reason:
        print(f"links cannot be measured here: {reason}", file=sys.stderr)
        raise typer.Exit(1)
    setup = Setup(model, trainers, pservers, compute, encryption, seconds, ring)
    if compute != "none" and not seconds:
        setup = dataclasses.replace(setup, gradients=seconds_of_gradients(setup))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    rates = list(rate)
    with namespaces(setup.hosts) as created, contextlib.ExitStack() as stack:
        # a second Ctrl-C must not stop the removal of the namespaces
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        for result in measure(setup, created, rates, delay / 1e3, rounds, steps):
            print(result, flush=True)
            if result.busy > BUSY:
                print(
                    f"processors were busy for {result.busy:.0%} of the time: they may limit steps"
                )
                if link_rate(SLOW) < min(map(link_rate, rates)):
                    rates.append(SLOW)


if __name__ == "__main__":
    typer.run(main)
