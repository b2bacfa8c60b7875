"""Checks of hosts before a job starts: all answer at once with versions, cores and free ports.

A job with different versions of JAX or dtrans would fail later, and less clearly. One error names
all hosts that cannot take part, so that users can mend them together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from dtrans.endpoints import is_loopback
from dtrans.errors import LaunchError
from dtrans.hosts import remote_agent
from dtrans.hosts.connection import connection, rsh_name
from dtrans.hosts.host_list import HostEntry


LIMIT = 60.0  # seconds for a host to answer; it imports JAX meanwhile
NO_COMMAND = (126, 127)  # exit codes of a shell, and of ssh, for a command that cannot be run


@dataclasses.dataclass(frozen=True)
class FoundHost:
    """A host that has answered.

    Attributes:
      host: as the user has written it.
      python: its interpreter.
      agent: the path of `dtrans.hosts.remote_agent` there.
      address: where the other hosts reach it.
      ports: free ones at this address.
      cores: that a process may use.
    """

    host: HostEntry
    python: str
    agent: str
    address: str
    ports: tuple[int, ...]
    cores: int

    def endpoint(self, port: int) -> str:
        """Return an endpoint on this host."""
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"


def check_hosts(
    hosts: Sequence[HostEntry],
    rsh: str,
    python: str,
    *,
    script: str,
    ports: int,
    limit: float = LIMIT,
) -> list[FoundHost]:
    """Check all hosts at once, and return their answers.

    Args:
      hosts: the hosts.
      rsh: the command that runs another one on a host.
      python: the interpreter on hosts that name none.
      script: a path that every host must have, as it must have the working directory; empty for
        none.
      ports: the number of free ports that each host chooses.
      limit: the seconds until an answer.

    Raises:
      LaunchError: hosts that cannot be reached or cannot take part; the message has the reason for
        each.
    """
    asked = []
    try:
        for host in hosts:
            asked.append(_Question(host, rsh, host.python or python, script, ports))
        until = time.monotonic() + limit
        for question in asked:
            question.wait(until)
        answers = [question.answer(limit) for question in asked]
    finally:
        for question in asked:
            question.close()
    wrong = [a for a in answers if isinstance(a, str)]
    found = [a for a in answers if isinstance(a, FoundHost)]
    if len(hosts) > 1:
        wrong += [_unreachable(f) for f in found if not f.address or is_loopback(f.address)]
    if wrong:
        some = f"{len(wrong)} of {len(hosts)} hosts" if len(hosts) > 1 else "the host"
        raise LaunchError(
            f"{some} cannot take part, and nothing was started\n  " + "\n  ".join(wrong)
        )
    return found


def _unreachable(found: FoundHost) -> str:
    name, address = found.host.name, found.address
    how = f"resolves its own name to {address}" if address else "cannot resolve its own name"
    return (
        f"host {name} {how}, where other hosts cannot reach it: write `{name} address=A` in the "
        "file of hosts, with an "
        "address of this host that the others reach"
    )


class _Question:
    """Request to one host: a process that answers with a line of JSON."""

    def __init__(self, host: HostEntry, rsh: str, python: str, script: str, ports: int) -> None:
        self.host, self.rsh, self.python = host, rsh, python
        # ssh does not pass on the environment, and Python must find dtrans before it reads an order
        path = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        found = ["env", f"PYTHONPATH={os.pathsep.join(path)}"] if path else []
        command = connection(rsh, host, [*found, python, "-m", remote_agent.__name__])
        self.mark = secrets.token_hex(16)
        self.out = self.err = b""
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as e:
            raise LaunchError(
                f"host {host.name} cannot be reached: {command[0]}: {e.strerror}"
            ) from e
        order = {
            "mark": self.mark,
            "name": host.name.rpartition("@")[2],
            "address": host.address,
            "ports": ports,
            "directory": os.getcwd(),
            "script": script and os.path.abspath(script),
        }
        assert self.process.stdin is not None
        # a process that has ended does not read; its exit status has the reason
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin = None

    def wait(self, until: float) -> None:
        """Wait for the answer, until a time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.out, self.err = self.process.communicate(
                timeout=max(0.0, until - time.monotonic())
            )

    def answer(self, limit: float) -> FoundHost | str:
        """Return the facts about the host, or the reason why it cannot take part."""
        name = self.host.name
        lines = self.out.decode(errors="replace").splitlines()
        errors = self.err.decode(errors="replace").strip()
        answers = [line.removeprefix(self.mark) for line in lines if line.startswith(self.mark)]
        if not answers:
            if self.process.returncode is None:
                return f"host {name} did not answer within {limit:g} s"
            last = errors.splitlines()[-1] if errors else "it said nothing"
            if "No module named" in last:
                return (
                    f"host {name} cannot run dtrans with {self.python}: {last}; install it "
                    "there, or say --python"
                )
            code = self.process.returncode
            if code in NO_COMMAND:
                return (
                    f"host {name} cannot run {self.python}: {last}; say --python, or python= "
                    "in the file of hosts"
                )
            return (
                f"host {name} cannot be reached: `{rsh_name(self.rsh)}` ended with exit code "
                f"{code}: {last}; "
                f"`{self.rsh} {name} true` has to work here without a password"
            )
        return self._checked(json.loads(answers[-1]))

    def _checked(self, found: dict[str, Any]) -> FoundHost | str:
        name, local = self.host.name, remote_agent.versions()
        other = [
            f"{n} {found['versions'].get(n)} (here {local[n]})"
            for n in local
            if found["versions"].get(n) != local[n]
        ]
        if other:
            return (
                f"host {name} has {', '.join(other)} in {self.python}; install the same "
                "versions on all hosts"
            )
        if found["missing"]:
            return (
                f"host {name} has no {found['missing'][0]}: the working directory and the script "
                "have to be at the same path on every host; copy them there, or use a folder that "
                "the hosts share"
            )
        if "unbound" in found and found["address"]:
            return (
                f"host {name} cannot listen at {found['address']}: {found['unbound']}; write "
                f"`{name} address=A` in the file of hosts, with an address of this host"
            )
        ports = tuple(found["ports"])
        return FoundHost(
            self.host, self.python, found["agent"], found["address"], ports, found["cores"]
        )

    def close(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
