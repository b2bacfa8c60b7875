"""Roles as processes. Each process runs `lifecycle_role.py`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from role_threads import HANG
from strict_python import STRICT_PYTHON


SCRIPT = Path(__file__).with_name("lifecycle_role.py")
PATIENCE = 4 * HANG  # seconds: processes start slowly on a busy machine


def memory_of(pid: int) -> float:
    """Return the memory of a process, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


class Process:
    """Started role; `lifecycle_role.py` describes its arguments.

    Args:
      wrap: prefix of the role's command.
    """

    def __init__(self, do: str, out: Path, wrap: Sequence[str] = (), **job: Any) -> None:
        self.out = out
        told = json.dumps({"do": do, "out": str(out), "x64": True} | job)
        path = [str(SCRIPT.parent), *sys.path]
        self._popen = subprocess.Popen(
            [*wrap, *STRICT_PYTHON, str(SCRIPT), told],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join(p for p in path if p),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, said: str) -> None:
        """Wait until the role prints a text."""
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line == f"{said}\n":
                return
        raise AssertionError(f"the role never printed {said!r}: {self._popen.communicate()[1]}")

    @property
    def memory(self) -> float:
        """Return the memory of the role, in MiB."""
        return memory_of(self._popen.pid)

    def go(self) -> None:
        """Let the role pass the gate."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("go\n")
        self._popen.stdin.flush()

    def end(self) -> dict[str, np.ndarray]:
        """Return the role's results after its end without an error."""
        _, errors = self._popen.communicate(timeout=PATIENCE)
        assert self._popen.returncode == 0, errors
        with np.load(self.out) as found:
            return dict(found)

    def fail(self) -> str:
        """Return the role's error after its end with an error."""
        _, errors = self._popen.communicate(timeout=PATIENCE)
        assert self._popen.returncode, "it ended well"
        return errors

    def kill(self) -> None:
        self._popen.kill()
        self._popen.communicate()


class Roles:
    """Roles of a test, by name; each is a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_name: dict[str, Process] = {}

    def start(self, name: str, do: str, **job: Any) -> Process:
        self._by_name[name] = Process(do, self._folder / f"{name}.npz", **job)
        return self._by_name[name]

    def __getitem__(self, name: str) -> Process:
        return self._by_name[name]

    def end(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the results of each role."""
        return {name: process.end() for name, process in self._by_name.items()}

    def kill(self) -> None:
        for process in self._by_name.values():
            process.kill()


@contextlib.contextmanager
def roles(folder: Path) -> Iterator[Roles]:
    """Yield the roles of a test; end all of them with the block."""
    made = Roles(folder)
    try:
        yield made
    finally:
        made.kill()
