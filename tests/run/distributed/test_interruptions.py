"""Jobs of processes with interruptions shorter than their patience.

All end with the results of one device.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import patient_role as script
import pytest
from paths import SUPPORT
from role_threads import free_endpoints
from trainer_processes import environment

from dtrans.run.distributed.role import Role, roles_of, trainer_roles
from tools.namespaces import namespaces, why_not


PATIENCE = 200.0  # seconds for what takes ten and an interruption on an idle machine
EARLY = "step 10\n"  # the interruption is in the middle of the job
KINDS = ("pserver", "nccl2", "sharding", "pipeline")


class Processes:
    """Processes of a job by the names of their roles, and their output."""

    def __init__(self, folder: Path) -> None:
        self.started: dict[str, subprocess.Popen[str]] = {}
        self._folder = folder

    def start(self, role: Role, kind: str, prefix: Sequence[str] = (), **env: str) -> None:
        """Start a role; `prefix` is a command that runs it elsewhere."""
        with (self._folder / f"{role.name}.log").open("w") as log:
            self.started[role.name] = subprocess.Popen(
                [*prefix, sys.executable, script.__file__, kind, str(self._folder)],
                env=environment(role) | env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=SUPPORT,
            )

    def wait_until(self, line: str) -> None:
        """Wait until trainer 0 prints a line."""
        out = self.started["trainer 0"].stdout
        assert out is not None
        assert any(said == line for said in out), self.said()

    def said(self) -> str:
        """Return the logs of all processes."""
        return "\n".join(
            f"-- {path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("*.log"))
        )

    def check_numbers(self, alone: dict[str, np.ndarray]) -> None:
        """Wait for the end of the job, and compare its parameters with one device."""
        limit = time.monotonic() + PATIENCE
        for process in self.started.values():
            try:
                process.communicate(timeout=limit - time.monotonic())
            except subprocess.TimeoutExpired:
                pytest.fail(f"a process hangs\n{self.said()}")
        ends = {name: process.returncode for name, process in self.started.items()}
        assert {*ends.values()} == {0}, f"{ends}\n{self.said()}"
        for k in range(2):
            with np.load(self._folder / f"trainer-{k}.npz") as found:
                assert {*found.files} == {*alone}
                for name, x in alone.items():
                    np.testing.assert_allclose(found[name], x, rtol=1e-10, atol=1e-10, err_msg=name)

    def close(self) -> None:
        for process in self.started.values():
            process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Processes]:
    with contextlib.closing(Processes(tmp_path)) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        return script.alone()


def roles(kind: str, endpoints: Sequence[str]) -> tuple[Role, ...]:
    """Return the roles of a job: two trainers, and a server if the strategy has one."""
    return roles_of(2, endpoints[:1]) if kind == "pserver" else trainer_roles(endpoints[:2])


# -- processes that are stopped --------------------------------------------------------------------

STOPPED = 10.0  # seconds


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "who"),
    [("pserver", "pserver 0"), *[(kind, f"trainer {k}") for kind in KINDS for k in (0, 1)]],
)
def test_a_process_that_is_stopped_goes_on(
    job: Processes, alone: dict[str, np.ndarray], kind: str, who: str
) -> None:
    for role in roles(kind, free_endpoints(2)):
        job.start(role, kind)
    job.wait_until(EARLY)
    job.started[who].send_signal(signal.SIGSTOP)
    time.sleep(STOPPED)
    job.started[who].send_signal(signal.SIGCONT)
    job.check_numbers(alone)


# -- links that are down ---------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
@pytest.mark.parametrize("seconds", [2.0, 8.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_is_down_for_a_while_is_waited_for(
    job: Processes, alone: dict[str, np.ndarray], kind: str, seconds: float
) -> None:
    """No process can reach the host of trainer 0, or of the server."""
    with namespaces(3) as hosts:
        made = roles(kind, [f"{hosts.address(i)}:6174" for i in range(3)])
        env = {"DTRANS_ALLOW_REMOTE": "1", "DTRANS_TOKEN": os.urandom(32).hex()}
        for role, host in zip(made, hosts.names, strict=False):
            job.start(role, kind, [hosts.rsh, host], **env)
        job.wait_until(EARLY)
        hosts.cut(0)
        time.sleep(seconds)
        hosts.mend(0)
        job.check_numbers(alone)
