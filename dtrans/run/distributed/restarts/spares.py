"""Spares of a job: processes that have imported the modules of a script, and wait for a role.

    spare       a process that waits in `Role.from_env`; its output has the prefix [spare]
    identity    the variables of a role, with which a spare becomes the role

When a role is lost and the other roles can keep their processes, a spare becomes that role. The
next spare starts when all roles have entered the new generation, so that its imports do not delay
them.

The launcher's main thread calls all methods except `Spares.put`.
"""

from __future__ import annotations

import functools
import signal
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from dtrans.run.distributed.child_process import Child, Emit, Guard
from dtrans.run.distributed.identity import VARIABLE, identity_line
from dtrans.run.distributed.restarts.attempt import is_lost
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.distributed.role import Role
from dtrans.run.distributed.role_output import say


NAME = "spare"


class SpareChild(Child):
    """Process of a spare: it has started the job's script and waits for a role that is lost.

    Args:
      command, env, emit: as for `Child`; `env` has the variables that all roles share.
      spares: the spares of the job; a thread tells this object when the process has ended.

    Attributes:
      is_taken: True if the process has become a role.
      has_ended: True if the process has ended without becoming a role.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], spares: Spares, emit: Emit
    ) -> None:
        self.is_taken = self.has_ended = False
        self._shared = env
        no_role: Any = types.SimpleNamespace(name=NAME)
        super().__init__(no_role, command, {**env, VARIABLE: "1"}, spares, emit)

    def begin(self) -> None:
        """Start the command. Standard input stays open, since the spare receives its role there."""
        self._send(b"\n")

    def take_role(self, role: Role, variables: Mapping[str, str], emit: Emit) -> None:
        """Give a role to this waiting process, which then continues the script as that role.

        Args:
          role: the role.
          variables: the environment of the role.
          emit: prints and logs the output from now on.
        """
        self.role, self._emit = role, emit
        identity = {k: v for k, v in variables.items() if self._shared.get(k) != v}
        self._send(identity_line(identity))
        self._close()

    def reap(self) -> None:
        """Reap an ended spare, and kill the remaining processes of its group."""
        super().reap()
        self._close()

    def _close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


class Spares:
    """Processes that wait to replace a lost role; they end when this context manager exits.

    A spare has already imported the script's modules, so it continues faster than a new process.
    The object is also the queue (`Events`) to which a spare is added when it ends. If the spare has
    become a role, `put` adds it to the launcher's queue instead.

    Args:
      count: number of spares.
      command: program and arguments of every role.
      env: the variables that all roles share.
      open_log: returns the function that prints and logs the lines of a process, by its name.
      guard: kills the spares if this process is killed.
      events: the launcher's queue.
    """

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        env: Mapping[str, str],
        open_log: Callable[[str], Emit],
        guard: Guard,
        events: SimpleQueue[Any],
    ) -> None:
        self._count, self._command, self._env = count, command, env
        self._open_log, self._guard, self._events = open_log, guard, events
        self._waiting: list[SpareChild] = []
        self._ended: SimpleQueue[SpareChild] = SimpleQueue()
        # `take` and `put` run in different threads. With the lock, a process is either taken as a
        # role, or noted as ended, but not both.
        self._lock = threading.Lock()
        self._lost_in = -1  # number of the last generation in which a signal ended a spare

    def put(self, child: SpareChild) -> None:
        """Note that a spare's process has ended. A thread of its `Child` calls this method."""
        with self._lock:
            child.has_ended = not child.is_taken
        queue = self._ended if child.has_ended else self._events
        queue.put(child)

    def take(self) -> SpareChild | None:
        """Return the spare that has waited longest and mark it as taken, or return None."""
        with self._lock:
            for child in self._waiting:
                if not child.has_ended:
                    child.is_taken = True
                    self._waiting.remove(child)
                    return child
        return None

    def warn_without_snapshots(self, generations: JobGenerations) -> None:
        """Print a warning if no spare has started, because servers write no snapshots.

        Args:
          generations: record of the job's failures and restarts.
        """
        if self._count and generations.lacks_snapshots:
            say(
                "no spare has started, because the servers write no snapshots; pass snapshots=10 "
                "to job.serve, or leave --spares out"
            )

    def renew(self, generations: JobGenerations) -> None:
        """Remove spares that have ended; start missing ones unless roles are still starting.

        Args:
          generations: record of the job's failures and restarts.
        """
        while not self._ended.empty():
            self._on_end(self._remove_next(), generations.generation.number)
        is_missing = (
            len(self._waiting) < self._count and generations.generation.number != self._lost_in
        )
        if is_missing and generations.have_all_entered:
            self._start()

    @functools.cached_property
    def _emit(self) -> Emit:
        return self._open_log(NAME)

    def _start(self) -> None:
        child = SpareChild(self._command, self._env, self, self._emit)
        self._waiting.append(child)
        self._guard.add(child)
        child.begin()

    def _on_end(self, child: SpareChild, generation: int) -> None:
        """Warn the user that a spare has ended, and decide whether another spare starts."""
        if is_lost(child, was_reached=True):
            self._lost_in = generation
            say(f"a spare failed with {child.how()}; the next one starts after the next restart")
            return
        # Start no other spare, because it would end in the same way.
        self._count = 0
        say(
            f"a spare ended with {child.how()} before it had a role, and the job has no more "
            "spares; let the script read variables of its role only after dtrans.Role.from_env(), "
            "or leave spares out"
        )

    def _remove_next(self) -> SpareChild:
        """Wait for the end of a spare; remove the spare and return it."""
        child = self._ended.get()
        self._waiting.remove(child)
        child.reap()
        self._guard.remove(child)
        return child

    def __enter__(self) -> Spares:
        return self

    def __exit__(self, *failed: object) -> None:
        # a spare has no state to save, so kill it without a grace period
        for child in self._waiting:
            child.signal(signal.SIGKILL)
        while self._waiting:
            self._remove_next()
