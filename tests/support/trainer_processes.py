"""Trainers as processes, and their results."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from paths import ROOT
from role_threads import free_endpoints

from dtrans.run.distributed.role import Role, trainer_roles


COMPILING = (
    "JAX_DISABLE_MOST_OPTIMIZATIONS",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
)


def environment(role: Role) -> dict[str, str]:
    """Return the environment of a trainer, with only the variables of its role."""
    return plain_environment() | role.environment()


def plain_environment() -> dict[str, str]:
    """Return the environment of a process without a role; it only sets how tests compile."""
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("DTRANS_", "JAX_")) or k in COMPILING
    }
    return env | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def slurm_environment(k: int, tasks: int, port: int) -> dict[str, str]:
    """Return the environment of a Slurm task, as JAX reads it; the coordinator is on loopback."""
    return plain_environment() | {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": str(tasks),
        "SLURM_NTASKS": str(tasks),
        "SLURM_PROCID": str(k),
        "SLURM_LOCALID": "0",
        "JAX_COORDINATOR_PORT": str(port),
    }


@contextlib.contextmanager
def started(roles: int | Sequence[Role], *command: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield the processes of a job; end all of them with the block.

    Args:
      roles: the roles, or the number of trainers.
      *command: the command of each process.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        for role in trainer_roles(free_endpoints(roles)) if isinstance(roles, int) else roles:
            process = subprocess.Popen(
                command,
                env=environment(role),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield processes


def outcome(
    trainers: int, folder: Path, patience: float, command: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the results that each trainer of a job wrote into the folder."""
    with started(trainers, *command) as processes:
        said = [p.communicate(timeout=patience)[0] for p in processes]
    assert [p.returncode for p in processes] == [0] * trainers, "\n".join(said)
    found = []
    for k in range(trainers):
        with np.load(folder / f"trainer-{k}.npz") as file:
            found.append({n: file[n] for n in file.files})
    return found
