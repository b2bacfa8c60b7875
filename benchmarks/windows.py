"""Processes of a measured job, and windows of steps that run on request.

A benchmark starts the roles of a job with `Roles`. Each trainer reads numbers from its standard
input, runs this number of steps, and answers with the seconds and the loss of each step
(`answer_windows`). Between two windows, a job waits. So windows of several jobs can alternate.

This module needs the standard library only, because roles also run in other environments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


TICK = os.sysconf("SC_CLK_TCK")
# variables with the number of threads of NumPy, PyTorch and TensorFlow
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)


@dataclasses.dataclass(frozen=True)
class Window:
    """Some steps of one job.

    Attributes:
      seconds: seconds of each step, of all trainers.
      losses: loss of each step, as the mean over trainers.
      processor: processor seconds of the job's processes, for each step.
      busy: share of time in which the machine's processors were busy.
      sent: bytes that all hosts have sent, for each step; 0 if nothing counts them.
    """

    seconds: list[float]
    losses: list[float]
    processor: float
    busy: float
    sent: float = 0.0

    @property
    def loss(self) -> float:
        """Loss of the last step."""
        return self.losses[-1]


def role_environment(encryption: str) -> dict[str, str]:
    """Return the environment of the roles of one job, which gives each process one thread.

    Args:
      encryption: the option `transport_encryption` of dtrans.
    """
    plain = {k: v for k, v in os.environ.items() if not k.startswith("DTRANS_")}
    return {
        **plain,
        **dict.fromkeys(THREADS, "1"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",  # a host has one processor
        "DTRANS_TOKEN": secrets.token_hex(32),
        "DTRANS_TRANSPORT_ENCRYPTION": encryption,
    }


@dataclasses.dataclass(frozen=True)
class Command:
    """Command line and environment of a role."""

    argv: Sequence[str]
    env: Mapping[str, str]


class Roles:
    """Processes of a job. Trainers answer with windows, and every role ends with its input.

    Args:
      kind: name of the job, for messages.
      commands: command of each role, by its name. Trainers have names such as `trainer 0`.
      folder: folder for the output of each role.
    """

    def __init__(self, kind: str, commands: Mapping[str, Command], folder: Path) -> None:
        self.folder, self.kind = folder, kind
        self.roles: dict[str, subprocess.Popen[str]] = {}
        for name, command in commands.items():
            with (folder / f"{kind} {name}").open("w") as log:
                self.roles[name] = subprocess.Popen(
                    command.argv,
                    env=command.env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # Ctrl-C ends this process, which then ends the roles
                )
        self.trainers = [role for name, role in self.roles.items() if name.startswith("trainer")]

    def run(self, steps: int) -> Window:
        """Run some steps."""
        processor, (busy, total) = self._processor(), _busy_ticks()
        for trainer in self.trainers:
            with contextlib.suppress(BrokenPipeError):
                trainer.stdin.write(f"{steps}\n")
                trainer.stdin.flush()
        seconds, losses = [], []
        for trainer in self.trainers:
            # Libraries print lines as well: Gloo prints one for each connection.
            answers = (json.loads(line) for line in trainer.stdout if line.startswith("{"))
            answer = next(answers, None)
            if answer is None:
                raise RuntimeError(f"a role of the job {self.kind} has failed\n{self._errors()}")
            seconds += answer["seconds"]
            losses.append(answer["losses"])
        now_busy, now = _busy_ticks()
        return Window(
            seconds,
            [statistics.mean(each) for each in zip(*losses, strict=True)],
            (self._processor() - processor) / steps,
            (now_busy - busy) / max(1, now - total),
        )

    def close(self) -> None:
        """End the trainers, and so the servers."""
        for role in self.roles.values():
            with contextlib.suppress(BrokenPipeError):
                role.stdin.close()
        for name, role in self.roles.items():
            if role.wait(60):
                raise RuntimeError(f"{name} of the job {self.kind} has failed\n{self._errors()}")

    def kill(self) -> None:
        """Kill processes that still run, also those that the roles have started."""
        for pid in ticks_of_tree({role.pid for role in self.roles.values()}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for role in self.roles.values():
            role.kill()
            role.wait()
            for pipe in (role.stdin, role.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _processor(self) -> float:
        """Return the processor seconds of all roles and their descendants."""
        return processor_seconds({role.pid for role in self.roles.values()})

    def _errors(self) -> str:
        """Return the last lines of each role's output."""
        texts = []
        for path in sorted(self.folder.glob(f"{self.kind} *")):
            lines = path.read_text().splitlines()[-5:]
            texts += [f"{path.name.removeprefix(self.kind)}: {line}" for line in lines]
        return "\n".join(texts)


def processor_seconds(roots: set[int]) -> float:
    """Return the processor seconds of processes and their descendants, in user mode and kernel."""
    return sum(ticks_of_tree(roots).values()) / TICK


def ticks_of_tree(roots: set[int]) -> dict[int, int]:
    """Return the ticks of processes and their descendants, by process id."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            ticks[pid] = sum(map(int, fields[11:15]))  # with those of children that have ended
    found = {}
    for pid, count in ticks.items():
        ancestor = pid
        while ancestor not in roots and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor in roots:
            found[pid] = count
    return found


def _busy_ticks() -> tuple[int, int]:
    """Return the ticks in which processors were busy, and all ticks."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # without idle, and waiting for disks


# -- in a role -------------------------------------------------------------------------------------


def answer_windows(step: Callable[[], Any], pause: float = 0.0) -> None:
    """Run the steps that standard input requests.

    Args:
      step: runs a step, and returns its loss.
      pause: seconds to sleep before each step.
    """
    for line in sys.stdin:
        times, losses = [time.perf_counter()], []
        for _ in range(int(line)):
            time.sleep(pause)
            losses.append(step())
            times.append(time.perf_counter())
        seconds = [end - begin for begin, end in itertools.pairwise(times)]
        # Losses become numbers after the last step, so that no step waits for its loss.
        print(json.dumps({"seconds": seconds, "losses": [*map(float, losses)]}), flush=True)
