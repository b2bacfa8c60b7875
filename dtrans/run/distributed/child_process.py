"""One role as a child process: its own session, its output line by line, its end as an event.

Every child leads a session, and so a process group, of its own: a Ctrl-C on the terminal reaches
the launcher alone, which then decides, and what a role starts itself is ended with it. Each output
stream has a thread that reads lines; a further thread waits for the end. Nothing polls.

This module loads without JAX, for agents on other hosts.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from dtrans.errors import LaunchError
from dtrans.run.distributed import orphan_guard


if TYPE_CHECKING:
    from dtrans.run.distributed.role import Role


TAIL = 60  # lines of standard error that are kept to say why a role failed
# seconds for the last lines of a role whose group is gone; only another session can hold them up
DRAIN = 5.0

Emit = Callable[[str, str], None]


class Child:
    """A role as a process, which waits for `begin`.

    Args:
      role: what it is; the environment says so.
      command: program and arguments.
      env: its whole environment.
      events: gets this object when the process has ended, before it is reaped.
      emit: called with a stream, `stdout` or `stderr`, and a line.
      inherit_stdout: leave standard output as it is, e.g. a terminal.

    Attributes:
      tail: the last lines of its standard error.
      where: ` on gpu1` where the role runs on a host that the user has named; else empty.

    Raises:
      LaunchError: the command cannot be started.
    """

    gate: tuple[str, ...] = (sys.executable, "-I", "-S", orphan_guard.__file__)
    where = ""

    def __init__(
        self,
        role: Role,
        command: Sequence[str],
        env: Mapping[str, str],
        events: SimpleQueue[Any],
        emit: Emit,
        *,
        inherit_stdout: bool = False,
    ) -> None:
        self.role = role
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        self._emit = emit
        _check_command(role, command[0], env)
        self.process = subprocess.Popen(
            [*self.gate, *command],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=None if inherit_stdout else subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        streams = (("stdout", self.process.stdout), ("stderr", self.process.stderr))
        self._readers = [self._thread(self._read, n, s) for n, s in streams if s is not None]
        self._thread(self._wait, events)

    def begin(self) -> None:
        """Let the role begin, once somebody is there to end it if the launcher is killed."""
        assert self.process.stdin is not None
        with (
            self.process.stdin as gate,
            contextlib.suppress(BrokenPipeError),
        ):  # it was killed: its end is an event
            gate.write(b"\n")

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group; 0 where it is no process of this
        host."""
        return self.process.pid

    @property
    def returncode(self) -> int:
        """The exit status of an ended role as `subprocess` gives it: -n for signal n."""
        return int(self.process.returncode)

    @property
    def code(self) -> int:
        """The exit status of an ended role as a shell gives it: 128 + n for signal n."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    @property
    def is_host_lost(self) -> bool:
        """True if an ended role was lost with its host: never on this host."""
        return False

    def how(self) -> str:
        """Return how an ended role has failed: what stands after `failed with`."""
        if self.returncode < 0:
            return f"signal {signal.Signals(-self.returncode).name}"
        return f"exit code {self.returncode}"

    def tell_ended(self, role: str, how: str) -> None:
        """Tell this role that another has ended. On this host a folder says so
        (`dtrans.run.net.ended_roles`)."""

    def signal(self, signum: int) -> None:
        """Send a signal to the role and to all that it started. Only before `reap`."""
        # not reaped yet, so the group is this role's and nobody else's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def reap(self) -> None:
        """Collect an ended role, and end what it left behind in its group."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(DRAIN)

    def last_words(self) -> str:
        """What it wrote to standard error: from the first traceback on if there is one, else the
        last lines."""
        lines = list(self.tail)
        starts = [
            i
            for i, line in enumerate(lines)
            if line.startswith("Traceback (most recent call last)")
        ]
        return "\n".join(lines[starts[0] :] if starts else lines)

    def _thread(self, run: Callable[..., None], *args: Any) -> threading.Thread:
        name = f"dtrans {self.role.name} {run.__name__.strip('_')}"
        thread = threading.Thread(target=run, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                self._said(name, raw.decode(errors="replace").rstrip("\r\n"))

    def _said(self, name: str, line: str) -> None:
        if name == "stderr":
            self.tail.append(line)
        self._emit(name, line)

    def _wait(self, events: SimpleQueue[Any]) -> None:
        if hasattr(os, "waitid"):
            # leaves the process to be reaped, so that its id cannot be given to another before we
            # are done
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS before Python 3.13
            self.process.wait()
        events.put(self)


def _check_command(role: Role, program: str, env: Mapping[str, str]) -> None:
    """Raise LaunchError for a program that is not there, or that may not be run."""
    path = env.get("PATH", os.defpath)
    if shutil.which(program, path=path) is not None:
        return
    there = os.path.exists(program) or shutil.which(program, os.F_OK, path) is not None
    why = os.strerror(errno.EACCES if there else errno.ENOENT)
    raise LaunchError(f"{role.name} cannot be started: {program}: {why}")


class Guard:
    """Ends registered processes when this one is gone; see `dtrans.run.distributed.orphan_guard`. A
    context manager."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-I", "-S", orphan_guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def add(self, child: Child) -> None:
        """A role that has started."""
        if child.pid:
            self._say(f"+{child.pid}\n")

    def remove(self, child: Child) -> None:
        """A role that has ended."""
        if child.pid:
            self._say(f"-{child.pid}\n")

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *failed: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        # somebody may have killed the guard; the job does not need it as long as the launcher lives
        with contextlib.suppress(BrokenPipeError):
            pipe.write(line.encode())
