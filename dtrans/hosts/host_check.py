"""Checks of hosts before a job starts: their versions, cores and free ports.

A job with different versions of JAX or dtrans would fail later, with a less clear error. All hosts
are asked at the same time, and one error lists every host that cannot run roles, with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dtrans.endpoints import is_loopback
from dtrans.errors import ConfigError, LaunchError
from dtrans.hosts import remote_agent
from dtrans.hosts.connection import absolute_path, connection, rsh_name
from dtrans.hosts.host_list import HostEntry


LIMIT = 60.0  # seconds until a host, which first imports JAX, must answer
NO_COMMAND = (126, 127)  # exit codes of a shell, and of ssh, for a command that cannot be run


@dataclasses.dataclass(frozen=True)
class FoundHost:
    """A host that has answered, and can run roles.

    Attributes:
      host: the user's entry for the host.
      python: the interpreter on the host.
      agent: the path of `dtrans.hosts.remote_agent` on the host.
      address: the address to which the other hosts connect.
      ports: free ports at this address.
      cores: the number of cores that a process may use.
    """

    host: HostEntry
    python: str
    agent: str
    address: str
    ports: tuple[int, ...]
    cores: int

    def endpoint(self, port: int) -> str:
        """Return an endpoint on this host."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{port}"


def check_hosts(
    hosts: Sequence[HostEntry],
    rsh: str,
    python: str,
    *,
    script: str,
    ports: int,
    snapshots: str | os.PathLike[str] | None = None,
    limit: float = LIMIT,
) -> list[FoundHost]:
    """Check that all hosts can run roles of a job, and return their addresses and free ports.

    All hosts are asked at the same time. A host must have the same versions of JAX and dtrans as
    this process, the script, and the folder of snapshots.

    Args:
      hosts: the hosts.
      rsh: the command that runs a command on a host: `ssh`, or another.
      python: the interpreter on hosts whose entry names none.
      script: the path of the script, which every host must have; empty if there is none.
      ports: the number of free ports that each host chooses.
      snapshots: the folder of snapshots of servers, which all hosts must share; None
        without snapshots.
      limit: seconds until a host must answer.

    Raises:
      LaunchError: a host cannot be reached, or cannot run roles; the message has the reason for
        each such host.
      ConfigError: this process cannot write to the folder of the snapshots.
    """
    asked: list[_Question] = []
    with _probe_in(snapshots) as probe:
        try:
            for host in hosts:
                asked.append(_Question(host, rsh, host.python or python, script, ports, probe))
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
        some = "the host"
        if len(hosts) > 1:
            some = f"{len(wrong)} of {len(hosts)} hosts"
        raise LaunchError(f"{some} cannot run roles; no role was started\n  " + "\n  ".join(wrong))
    return found


@contextlib.contextmanager
def _probe_in(snapshots: str | os.PathLike[str] | None) -> Iterator[str]:
    """Create a temporary file in a folder, so that hosts can check that they see the same folder.

    The file exists inside the `with` block, which asks the hosts to find it. If `snapshots` is
    None, the yielded path is empty.

    Args:
      snapshots: the folder of the job's snapshots, or None.
    """
    if snapshots is None:
        yield ""
        return
    folder = os.path.abspath(snapshots)
    try:
        os.makedirs(folder, exist_ok=True)
        file, path = tempfile.mkstemp(prefix=".probe-", dir=folder)
    except OSError as e:
        raise ConfigError(
            f"snapshots={folder!r} cannot be written: {e.strerror}; change its permissions, or "
            "name another folder"
        ) from e
    os.close(file)
    try:
        yield path
    finally:
        os.unlink(path)


def _unreachable(found: FoundHost) -> str:
    """Return the error text for a host without an address that other hosts can reach."""
    name, address = found.host.name, found.address
    fault = "cannot resolve its own name"
    if address:
        fault = f"resolves its own name to {address}, which other hosts cannot reach"
    return (
        f"host {name} {fault}; write `{name} address=A` in the file of hosts, where A is an "
        "address that other hosts can reach"
    )


class _Question:
    """Check of one host: starts `remote_agent` there, for example by ssh, and reads its answer.

    Args:
      host: the host.
      rsh, script, ports: as for `check_hosts`.
      python: the interpreter on the host.
      probe: path of a file that the host must find, in a folder that the host can write to. An
        empty path skips this check.

    Raises:
      LaunchError: the `rsh` command cannot be started.
    """

    def __init__(
        self, host: HostEntry, rsh: str, python: str, script: str, ports: int, probe: str
    ) -> None:
        self.host, self.rsh, self.python = host, rsh, python
        self._shared = os.path.dirname(probe)
        command = [python, "-m", remote_agent.__name__]
        path = absolute_path(os.environ.get("PYTHONPATH", ""))
        if path:
            # ssh does not forward the environment, and Python needs the path to import the agent
            command = ["env", f"PYTHONPATH={path}", *command]
        command = connection(rsh, host, command)
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
                f"host {host.name} cannot be reached: {command[0]} does not start on this host "
                f"({e.strerror}); install it here, or choose another remote shell with rsh="
            ) from e
        order = {
            "mark": self.mark,
            "name": host.name.rpartition("@")[2],
            "address": host.address,
            "ports": ports,
            "directory": os.getcwd(),
            "script": script and os.path.abspath(script),
            "probe": probe,
        }
        assert self.process.stdin is not None
        # the pipe is broken if the process has ended; its exit status then has the reason
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin = None

    def wait(self, until: float) -> None:
        """Wait for the answer; give up at `until`, in seconds of the monotonic clock."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.out, self.err = self.process.communicate(
                timeout=max(0.0, until - time.monotonic())
            )

    def answer(self, limit: float) -> FoundHost | str:
        """Return the host's answer, or the reason why the host cannot run roles."""
        answer = ""
        for line in self.out.decode(errors="replace").splitlines():
            # lines without the mark are other output, of a shell's start-up files for example
            if line.startswith(self.mark):
                answer = line.removeprefix(self.mark)
        if answer:
            return self._check_answer(json.loads(answer))
        return self._failure(limit)

    def _failure(self, limit: float) -> str:
        """Return the reason why the host has not answered."""
        name, code = self.host.name, self.process.returncode
        if code is None:
            return f"host {name} did not answer within {limit:g} s"
        errors = self.err.decode(errors="replace").strip()
        last = (errors or "no output").splitlines()[-1]
        if "No module named" in last:
            return (
                f"host {name} cannot run dtrans with {self.python}: {last}; install dtrans there, "
                "or name another interpreter by --python"
            )
        if code in NO_COMMAND:
            return (
                f"host {name} cannot run {self.python}: {last}; name the interpreter by --python, "
                "or by python= in the file of hosts"
            )
        return (
            f"host {name} cannot be reached: `{rsh_name(self.rsh)}` ended with exit code "
            f"{code}: {last}; the command `{self.rsh} {name} true` must work without a password"
        )

    def _check_answer(self, found: dict[str, Any]) -> FoundHost | str:
        """Return the host with the address, ports and cores in its answer, or an error text."""
        name = self.host.name
        other = []
        for library, version in remote_agent.versions().items():
            there = found["versions"].get(library)
            if there != version:
                other.append(f"{library} {there} (here {version})")
        if other:
            return (
                f"host {name} has {', '.join(other)} in {self.python}; install the same "
                "versions on all hosts"
            )
        if found["missing"]:
            return (
                f"host {name} has no {found['missing'][0]}: the working directory and the script "
                "must be at the same path on every host; copy them there, or use a folder that "
                "the hosts share"
            )
        if found["probe"]:
            return (
                f"host {name} {found['probe']} the folder snapshots={self._shared!r} of this host; "
                "mount one shared folder (NFS, say) at this path on all hosts, or leave snapshots "
                "out"
            )
        if "unbound" in found and found["address"]:
            return (
                f"host {name} cannot listen at {found['address']}: {found['unbound']}; write "
                f"`{name} address=A` in the file of hosts, where A is an address of this host"
            )
        ports = tuple(found["ports"])
        return FoundHost(
            self.host, self.python, found["agent"], found["address"], ports, found["cores"]
        )

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
