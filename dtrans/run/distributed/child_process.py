"""A role as a child process of the launcher: start, output by lines, signals and end.

Each child leads its own session and process group. So a Ctrl-C on the terminal reaches only the
launcher, and a signal to the group also ends the processes that the role has started. One thread
per output stream reads lines. Another thread waits until the child ends, and then puts the child
into the launcher's queue of events.

This module does not import JAX, so that agents on other hosts load it fast.
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
from typing import IO, TYPE_CHECKING, Any, Protocol

from dtrans.errors import LaunchError
from dtrans.run.distributed import orphan_guard


if TYPE_CHECKING:
    from dtrans.run.distributed.role import Role


TAIL = 60  # lines of standard error in the error message of a failed role
# Seconds to wait for the last output of a role whose process group has ended. A process that left
# the group may still have the stream open, so the wait is bounded.
DRAIN = 5.0

Emit = Callable[[str, str], None]


class Events(Protocol):
    """Queue of ended processes: a `Child` adds itself when its process has ended."""

    def put(self, child: Any, /) -> None:
        """Add the `Child` of a process that has ended."""


class Child:
    """A role's process. It waits for `begin` before it runs its command.

    Args:
      role: the role.
      command: program and arguments.
      env: the environment of the process, with the variables of the role.
      events: the launcher's queue, to which a child adds itself when its process has ended.
      emit: called with the name of a stream, `stdout` or `stderr`, and a line.
      inherit_stdout: True to let the role write directly to this process's standard output.

    Attributes:
      tail: the last lines of the role's standard error.
      where: ` on gpu1` for a role on a host that the user named; else empty.

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
        events: Events,
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
        """Let the started process run the role's command.

        The process waits for this call, so that the launcher can first register it with the guard
        process (`Guard.add`). If the launcher is killed before this call, the process exits.
        """
        assert self.process.stdin is not None
        with self.process.stdin:
            self._send(b"\n")

    @property
    def pid(self) -> int:
        """The id of the process and of its group; 0 for a process on another host."""
        return self.process.pid

    @property
    def returncode(self) -> int:
        """The exit status of an ended role in the form of `subprocess`: -n for signal n."""
        return int(self.process.returncode)

    @property
    def code(self) -> int:
        """The exit status of an ended role in the form of a shell: 128 + n for signal n."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    def is_host_lost(self, *, was_reached: bool) -> bool:
        """Return True if the role's host was lost. For a role on this host, return False.

        Args:
          was_reached: True if the host ran the role in an earlier attempt.
        """
        return False

    def how(self) -> str:
        """Return the way in which a failed role ended, such as "exit code 1" or "signal SIGKILL".

        Messages contain the result after the words `failed with`.
        """
        if self.returncode < 0:
            return f"signal {signal.Signals(-self.returncode).name}"
        return f"exit code {self.returncode}"

    def tell_ended(self, role: str, how: str, generation: int) -> None:
        """Inform this role that another role has ended, so that it does not wait for that role.

        For a role on this host, do nothing. Such a role reads the ends of other roles from a folder
        (`dtrans.run.net.ended_roles`). Subclasses for other hosts send a message.

        Args:
          role: name of the role that has ended, such as "trainer 1".
          how: the way in which it ended, such as "exit code 1".
          generation: number of the job's current generation (the time between two failures of the
            job).
        """

    def signal(self, signum: int) -> None:
        """Send a signal to the role and to all processes of its group. Call it before `reap`."""
        # the system reuses the group's id only after the process is reaped
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def reap(self) -> None:
        """Collect the exit status of an ended role, and kill other processes of its group.

        Until this call, the operating system does not give the role's process id to another
        process.
        """
        self.signal(signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(DRAIN)

    def last_words(self) -> str:
        """Return the last lines of the role's standard error, for the job's error message.

        If the lines contain a traceback, the result starts there.
        """
        lines = list(self.tail)
        for i, line in enumerate(lines):
            if line.startswith("Traceback (most recent call last)"):
                return "\n".join(lines[i:])
        return "\n".join(lines)

    def _send(self, line: bytes) -> None:
        """Write a line to the standard input of the process."""
        assert self.process.stdin is not None
        # a broken pipe means that the process was killed, which `events` reports
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line)

    def _thread(self, run: Callable[..., None], *args: Any) -> threading.Thread:
        name = f"dtrans {self.role.name} {run.__name__.strip('_')}"
        thread = threading.Thread(target=run, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                self._on_line(name, raw.decode(errors="replace").rstrip("\r\n"))

    def _on_line(self, name: str, line: str) -> None:
        if name == "stderr":
            self.tail.append(line)
        self._emit(name, line)

    def _wait(self, events: Events) -> None:
        if hasattr(os, "waitid"):
            # WNOWAIT does not reap the process: its id cannot be reused before `reap`
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS before Python 3.13
            self.process.wait()
        events.put(self)


def _check_command(role: Role, program: str, env: Mapping[str, str]) -> None:
    """Raise LaunchError unless a program exists and is executable.

    This check is early: after `begin`, the process could not report the error to the launcher.
    """
    path = env.get("PATH", os.defpath)
    if shutil.which(program, path=path) is not None:
        return
    exists = os.path.exists(program) or shutil.which(program, os.F_OK, path) is not None
    reason = os.strerror(errno.EACCES if exists else errno.ENOENT)
    raise LaunchError(f"{role.name} cannot be started: {program}: {reason}")


class Guard:
    """A separate process that ends the job's roles if the launcher is killed.

    A launcher that gets SIGKILL cannot end its roles itself. Use the object as a context manager
    around the job. See `dtrans.run.distributed.orphan_guard`.

    Args:
      python: the interpreter that runs the guard.
      lock: descriptor of a locked file, which the guard has open until the roles have ended.
    """

    def __init__(self, python: str, lock: int | None = None) -> None:
        self._process = subprocess.Popen(
            [python, "-I", "-S", orphan_guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,
        )

    def add(self, child: Child) -> None:
        """Register a role that has started."""
        if child.pid:
            self._write(f"+{child.pid}\n")

    def remove(self, child: Child) -> None:
        """Unregister a role that has ended."""
        if child.pid:
            self._write(f"-{child.pid}\n")

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *failed: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        # if the guard was killed, the job continues: the guard acts only if the launcher dies
        with contextlib.suppress(BrokenPipeError):
            pipe.write(line.encode())
