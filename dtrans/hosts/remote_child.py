"""Roles on other hosts, as the launcher sees them.

For each role, the launcher has a child process: the connection to an agent on the other host
(`dtrans.hosts.remote_agent`).

    launcher  <-  child: `ssh HOST python hosts/remote_agent.py`  ->  agent  ->  role

The launcher sends signals for the role to the agent, as lines of JSON. The agent reports the
start and the end of the role on standard error. If the connection ends before the agent has
reported the end, the host or the network has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from dtrans.run.distributed.child_process import Child, Emit


if TYPE_CHECKING:
    from dtrans.run.distributed.role import Role


START = 60.0  # seconds until an agent must report the start of its role
BEAT = 5.0  # seconds between two heartbeats of the launcher
SILENCE = 60.0  # seconds without a heartbeat after which an agent ends its role
LAST_WORDS = 2.0  # seconds that an agent has to kill its role before the connection is closed
LOST = 255  # the exit code of a role whose connection was lost; ssh uses the same


class RemoteChild(Child):
    """Role on another host, as the launcher sees it: its output, signals and end.

    The local process is the connection to that host, for example ssh.

    Args:
      role: the role.
      host: the name of its host.
      connection: the command that runs the agent on the host.
      order: the agent's order: the role's command, environment and working directory.
      events, emit, inherit_stdout: as for `Child`.
      running: called with this object when the role has started.

    Attributes:
      remote_pid: the process id of the role on its host; None until it has started.
      settled: set when the role has started, or has failed to start.
    """

    gate = ()  # the command needs no prefix that delays it, since the agent waits for its order

    def __init__(
        self,
        role: Role,
        host: str,
        connection: Sequence[str],
        order: Mapping[str, Any],
        events: SimpleQueue[Any],
        emit: Emit,
        running: Callable[[RemoteChild], None],
        *,
        inherit_stdout: bool = False,
    ) -> None:
        self.host = host
        self.where = f" on {host}"
        self.remote_pid: int | None = None
        self.settled = threading.Event()
        self._over = threading.Event()
        self._ended: int | None = None
        self._refused = ""
        self._late = False
        self._mark = secrets.token_hex(16)
        self._order = {**order, "mark": self._mark, "role": role.name, "silence": SILENCE}
        self._program = os.path.basename(connection[0])
        self._running = running
        self._speaking = threading.Lock()
        super().__init__(role, connection, os.environ, events, emit, inherit_stdout=inherit_stdout)
        self._thread(self._watch_start)

    def begin(self) -> None:
        """Send the role's command and environment to the agent on the other host.

        The agent then starts the role.
        """
        self._send_message(self._order)

    @property
    def returncode(self) -> int:
        """Exit status of the role, from its agent."""
        return LOST if self._ended is None else self._ended

    def is_host_lost(self, *, was_reached: bool) -> bool:
        """Return True if the connection to the host ended before the role did.

        A host that was never reached counts as an error of the user, not as a lost host.
        """
        is_reached = was_reached or self.remote_pid is not None
        return self._ended is None and not self._refused and is_reached

    def how(self) -> str:
        """Return the way in which a failed role ended, such as "exit code 1" or a lost connection.

        Messages contain the result after the words `failed with`.
        """
        if self._ended is not None:
            return super().how()
        if self._refused:
            return f"an error of its agent: {self._refused}"
        if self._late:
            return f"no answer from host {self.host} within {START:g} s"
        ended = f"`{self._program}` ended with exit code {self.process.returncode}"
        if self.remote_pid is None:
            return f"no connection to host {self.host} ({ended})"
        return f"a lost connection to host {self.host} ({ended})"

    def signal(self, signum: int) -> None:
        """Send a signal to the role and its child processes on the other host.

        If the role has not started yet, the local connection gets the signal, which also ends the
        role.
        """
        if self._over.is_set() or not self.settled.is_set():
            super().signal(signum)  # this ends the connection, which ends the agent
        elif signum == signal.SIGKILL:
            self._thread(self._kill)
        else:
            self._send_message({"signal": int(signum)})

    def tell_ended(self, role: str, how: str, generation: int) -> None:
        """Inform this role that another role has ended, so that it does not wait for that role.

        Args:
          role: name of the other role, such as "trainer 1".
          how: the way in which it ended, such as "exit code 1".
          generation: number of the job's current generation (the time between two failures of the
            job).
        """
        self._send_message({"ended": [role, how, generation]})

    def reap(self) -> None:
        """Reap the process that was the connection to an ended role."""
        self._over.set()
        self.settled.set()
        super().reap()
        assert self.process.stdin is not None
        with self._speaking, contextlib.suppress(OSError):
            self.process.stdin.close()

    def _send_message(self, message: Mapping[str, Any]) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        # if the connection has ended, `events` reports it
        with self._speaking, contextlib.suppress(OSError, ValueError):
            stdin.write(json.dumps(message).encode() + b"\n")

    def _on_line(self, name: str, line: str) -> None:
        if name != "stderr" or not line.startswith(self._mark):
            super()._on_line(name, line)
            return
        note = json.loads(line.removeprefix(self._mark))
        if "pid" in note:
            self.remote_pid = note["pid"]
            self._running(self)
            self.settled.set()
        self._refused = note.get("refused", "")
        self._ended = note.get("ended")

    def _watch_start(self) -> None:
        """End the connection if the role does not start in time; then send the agent heartbeats."""
        if not self.settled.wait(START):
            self._late = True
            self._close_connection()
        while not self._over.wait(BEAT):
            self._send_message({})

    def _kill(self) -> None:
        """Ask the agent to kill the role; close the connection if the agent does not react.

        The role also ends when the connection is closed.
        """
        self._send_message({"signal": int(signal.SIGKILL)})
        if not self._over.wait(LAST_WORDS):
            self._close_connection()

    def _close_connection(self) -> None:
        # before the process is reaped, no other process group can have its id
        if self.process.returncode is None:
            super().signal(signal.SIGKILL)
