"""The same job in dtrans and in other frameworks: steps per second, and processor time.

    make peers                                       1.9M parameters, every peer
    make peers PEERS="--model 25M --only dtrans --only sockets"

The job is an MLP with Adam on two trainers and two servers, all on this host (`mlp_job.py`). Every
process has one thread for arithmetic. All jobs stay ready, and run their windows in turn. While one
runs, the others wait. Each window gives steps per second, and the processor time of all processes
of the job. A ratio is the median over pairs of windows of the same round.

Peers without dtrans run in environments of their own, which this script creates in `.venv-peers`
with pinned versions. A variable selects another interpreter: DTRANS_TORCH or DTRANS_RAY. A peer
that cannot be installed is skipped, and the reason is printed.

Synchronous peers compute the same losses from the same parameters and batch. The script compares
the losses of the first steps, and ends with an error if they differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import typer
from mlp_job import MODELS
from windows import Command, Roles, Window, role_environment

import dtrans
from dtrans.endpoints import ReservedEndpoints
from dtrans.ir.display import plan_text


BENCHMARKS = Path(__file__).parents[1]
FOLDER = BENCHMARKS.parent / ".venv-peers"
# packages of each environment; the key also names the module to import
ENVIRONMENTS = {
    "torch": ("torch==2.13.0", "numpy==2.4.6"),
    "ray": ("ray==2.56.1", "numpy==2.4.6"),
}
OURS = "dtrans"  # the peer that ratios compare with
COMPARED = 5  # first steps, whose losses are compared
TOLERANCE = 1e-3  # relative difference of losses: float32 sums in other orders
WINDOW = 4.0  # seconds of a window
HEADER = ("job", "steps/s", "dtrans / job", "processor ms a step", "dtrans / job", "loss")


class Unavailable(Exception):
    """Reason why a peer cannot run here."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A framework, or one of its modes.

    Attributes:
      argv: arguments of Python for each role, without the model's name.
      environment: a key of `ENVIRONMENTS`, or "" for the interpreter of this process.
      roles: `pserver` for servers and trainers, `nccl2` for trainers only, or `driver` for one
        process that starts the others.
      tail: arguments after the model's name.
      is_synchronous: True if the losses of all steps are determined.
    """

    argv: tuple[str, ...]
    environment: str = ""
    roles: str = "pserver"
    tail: tuple[str, ...] = ()
    is_synchronous: bool = True


def _role_script(kind: str, **options: bool | str) -> Peer:
    script = str(BENCHMARKS / "hosts_roles.py")
    return Peer((script, kind), tail=("run", "0"), **options)  # type: ignore[arg-type]


PEERS = {
    "dtrans": _role_script("dtrans"),
    "dtrans async": _role_script("async", is_synchronous=False),
    "sockets": _role_script("sockets"),
    "jax gloo": _role_script("gloo", roles="nccl2"),
    "torch rpc": Peer(("-m", "peers.torch_roles", "rpc"), "torch"),
    "torch ddp": Peer(("-m", "peers.torch_roles", "ddp"), "torch", "nccl2"),
    "ray": Peer(("-m", "peers.ray_roles"), "ray", "driver"),
}
NAMES = ", ".join(PEERS)


# -- environments ----------------------------------------------------------------------------------


def interpreter(name: str) -> str:
    """Return the interpreter of an environment, which is created when it is needed.

    Raises:
      Unavailable: the packages cannot be installed, or cannot be imported.
    """
    if not name:
        return sys.executable
    found = os.environ.get(f"DTRANS_{name.upper()}") or _install(name)
    try:
        _call([found, "-c", f"import {name}"])
    except FileNotFoundError as error:
        raise Unavailable(f"DTRANS_{name.upper()}: {error.strerror}: {found}") from None
    return found


def _install(name: str) -> str:
    """Create an environment with the pinned packages, unless it exists."""
    packages, home = ENVIRONMENTS[name], FOLDER / name
    python, installed = home / "bin" / "python", home / "installed.txt"
    if installed.exists() and installed.read_text().split() == [*packages]:
        return str(python)
    print(f"installing {' '.join(packages)}", file=sys.stderr)
    _call([sys.executable, "-m", "venv", "--clear", str(home)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _call([*pip, "--only-binary", ":all:", *packages])
    installed.write_text("\n".join(packages))
    return str(python)


def _call(command: Sequence[str]) -> None:
    """Run a command; its last line of output is the reason if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Unavailable(lines[-1] if lines else f"{command[0]} ended with {done.returncode}")


def available(names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the interpreter of each peer that can run, and the reasons of the others."""
    found, skipped = {}, {}
    for name in names:
        try:
            found[name] = interpreter(PEERS[name].environment)
        except Unavailable as reason:
            skipped[name] = str(reason)
    return found, skipped


# -- a job -----------------------------------------------------------------------------------------


def commands_of(
    peer: Peer,
    python: str,
    model: str,
    trainers: int,
    pservers: int,
    choose: Callable[[int], Sequence[str]],
) -> dict[str, Command]:
    """Return the command of each role.

    Args:
      choose: returns a number of free endpoints.
    """
    argv = [python, *peer.argv, model, *peer.tail]
    shared = role_environment("auto")
    paths = [str(BENCHMARKS), shared.get("PYTHONPATH", "")]
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if peer.roles == "driver":
        endpoints = {
            "DTRANS_ROLE": "trainer",
            "DTRANS_TRAINERS": str(trainers),
            "DTRANS_PSERVER_ENDPOINTS": ",".join(choose(pservers)),
            "DTRANS_TRAINER_ENDPOINTS": ",".join(choose(trainers)),
        }
        return {"trainer 0": Command(argv, {**shared, **endpoints})}
    if peer.roles == "nccl2":
        table = dtrans.role_table("nccl2", trainers, endpoints=choose(trainers))
    else:
        table = dtrans.role_table("pserver", trainers, pservers, endpoints=choose(pservers))
    return {entry.name: Command(argv, {**shared, **entry.environment}) for entry in table}


# -- results ---------------------------------------------------------------------------------------


def steps_per_second(window: Window) -> float:
    """Return the steps per second of each trainer."""
    return 1 / statistics.mean(window.seconds)


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raise an error if the losses of two jobs differ.

    Raises:
      RuntimeError: with the losses of both jobs.
    """
    (first, expected), *others = losses.items()
    for name, found in others:
        if len(found) != len(expected) or not np.allclose(found, expected, rtol=TOLERANCE, atol=0):
            raise RuntimeError(
                f"{name} computes another job than {first}: the first losses are "
                f"{[*found]}, and those of {first} are {[*expected]}"
            )


def table_of(
    title: str, windows: Mapping[str, Sequence[Window]], skipped: Mapping[str, str], load: float
) -> str:
    """Return the table of a comparison.

    Args:
      windows: the windows of each job, in the order of the rounds.
      skipped: reasons of peers that did not run.
    """
    ours = windows.get(OURS)
    rows = []
    for name, found in windows.items():
        ratios = ["-", "-"]
        if ours:
            pairs = [*zip(ours, found, strict=True)]
            speeds = [steps_per_second(a) / steps_per_second(b) for a, b in pairs]
            costs = [a.processor / b.processor for a, b in pairs]
            ratios = [f"{statistics.median(x):.2f}" for x in (speeds, costs)]
        speed = statistics.median(map(steps_per_second, found))
        processor = statistics.median(window.processor for window in found)
        rows.append(
            (
                name,
                f"{speed:.2f}",
                ratios[0],
                f"{1e3 * processor:.1f}",
                ratios[1],
                f"{found[-1].loss:.4g}",
            )
        )
    count = max(map(len, windows.values()))
    notes = [f"medians of {count} windows; load {load:.1f}"]
    notes += [f"skipped: {name}: {reason}" for name, reason in skipped.items()]
    return plan_text(title, HEADER, rows, notes, right=range(1, len(HEADER)))


def main(
    model: str = typer.Option("1.9M", help=f"Parameters: {', '.join(MODELS)}."),
    trainers: int = typer.Option(2, min=1, help="Number of trainers."),
    pservers: int = typer.Option(2, min=1, help="Number of servers."),
    rounds: int = typer.Option(5, min=1, help="Number of windows of each job."),
    steps: int = typer.Option(0, min=0, help="Steps of a window; 0 for about four seconds."),
    only: list[str] = typer.Option([], help=f"A job; may be repeated: {NAMES}."),
) -> None:
    """Compare dtrans with other frameworks on the same job."""
    for name, value, choices in (("model", [model], MODELS), ("only", only, PEERS)):
        if not set(value) <= set(choices):
            raise typer.BadParameter(f"expected one of {', '.join(choices)}", param_hint=name)
    found, skipped = available(only or [*PEERS])
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ports, jobs, losses = ReservedEndpoints(), {}, {}
        for name, python in found.items():
            commands = commands_of(PEERS[name], python, model, trainers, pservers, ports.choose)
            jobs[name] = Roles(name, commands, Path(folder))
            stack.callback(jobs[name].kill)
            first = jobs[name].run(COMPARED)  # this window also starts and compiles the job
            if PEERS[name].is_synchronous:
                losses[name] = first.losses
        if losses:
            check_losses(losses)
        counts = {name: steps or _steps_of_window(job) for name, job in jobs.items()}
        windows: dict[str, list[Window]] = {name: [] for name in jobs}
        for _ in range(rounds):
            for name, job in jobs.items():
                windows[name].append(job.run(counts[name]))
        load = os.getloadavg()[0]
        for job in jobs.values():
            job.close()
    title = f"{trainers} trainers + {pservers} servers on this host, {model} parameters, Adam"
    print(table_of(title, windows, skipped, load))


def _steps_of_window(job: Roles) -> int:
    speed = steps_per_second(job.run(COMPARED))
    return min(400, max(3, round(WINDOW * speed)))


if __name__ == "__main__":
    typer.run(main)
