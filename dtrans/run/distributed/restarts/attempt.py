"""One attempt at a job: its running roles, their ends, and the cause of a failure.

The launcher reads one queue with two kinds of events: a role has ended, or a signal has arrived.
`dtrans.run.distributed.restarts.run_attempts` makes the attempts.
"""

from __future__ import annotations

import queue
import re
import signal
import time
from collections.abc import Callable, Collection
from queue import SimpleQueue

from dtrans.errors import LaunchError
from dtrans.run.distributed.child_process import Child, Guard
from dtrans.run.distributed.role_output import say
from dtrans.run.distributed.site import Site
from dtrans.run.distributed.watch import is_by_peer
from dtrans.run.net.ended_roles import EndedRoles


# seconds to wait, after a role has ended with PeerError, for the end of the role that caused it
BLAME = 3.0
LOOK = 0.2  # seconds between two looks at the reports of roles, in a job with snapshots
# A role is lost if it exits with 128 + one of these signals: it was killed, or it crashed.
FATAL = {signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}
LOST_PEER = "dtrans.errors.LostPeerError"
DAMAGED_SNAPSHOT = "dtrans.errors.DamagedSnapshotError"
BY_PEER = ("dtrans.errors.PeerError", LOST_PEER)

Event = Child | int  # a role that has ended, or the number of a signal


class Attempt:
    """One run of a job's roles, from their start until they have ended or all start again.

    If the launcher restarts all roles, it makes a new attempt. A restart of one role does not end
    the attempt.

    Args:
      events: the queue of ended roles and signals.
      grace: seconds between SIGTERM and SIGKILL.
      is_optional: returns True for the name of a role whose failure does not end the job.
      site: the hosts of the roles.
      guard: kills the roles if this process is killed.
      ended_roles: the folder from which roles learn that other roles have ended.
      look: function that handles reports of roles. It is called every LOOK seconds while roles run,
        and after each end of a role. None calls no function.
      quorum: the smallest number of trainers with which the job continues.

    Attributes:
      running: the processes of the running roles.
      joining: processes of dropped trainers, which are not yet ready to join the job.
      failed: the role that made the job fail, or None.
      note: a remark about the failure of the role, for the error message.
      error: the job's error, if it ends without a failed role.
      superseded: the reason why all roles start again although none has failed, or "".
      generation: number of the job's generation; 0 in a job without snapshots.
      timed_out: names of the roles that still ran at the time limit; empty before the limit.
      signum: the first signal that this process received, or None.
    """

    def __init__(
        self,
        events: SimpleQueue[Event],
        grace: float,
        is_optional: Callable[[str], bool],
        site: Site,
        guard: Guard,
        ended_roles: EndedRoles,
        look: Callable[[Attempt], None] | None = None,
        *,
        quorum: int = 1,
    ) -> None:
        self._ended_roles, self._look = ended_roles, look
        self.generation = 0
        self._site, self._guard = site, guard
        self._is_optional, self._quorum = is_optional, quorum
        self.dropped: dict[str, Child] = {}
        self.signum: int | None = None
        self.events = events
        self.grace = grace
        self.running: list[Child] = []
        self.joining: list[Child] = []
        self.failed: Child | None = None
        self.note = ""
        self.error: LaunchError | None = None
        self.superseded = ""
        self.timed_out = ""
        self._ending = False

    @property
    def has_ended_well(self) -> bool:
        """True if all roles have ended without a failure."""
        is_undisturbed = self.signum is None and not self.timed_out and not self.superseded
        return is_undisturbed and self.failed is None and self.error is None

    def begin(self, child: Child, *, joins: bool = False) -> None:
        """Register a started role with the guard, then start the role's command.

        Args:
          child: the process of the role.
          joins: True for a dropped trainer, which joins the job when it is ready.
        """
        self.add(child, joins=joins)
        self._guard.add(child)
        child.begin()

    def add(self, child: Child, *, joins: bool = False) -> None:
        """Add a process to `running` or `joining`. The arguments are those of `begin`."""
        (self.joining if joins else self.running).append(child)

    def join(self, names: Collection[str], generation: int) -> None:
        """Add dropped trainers that have started again to the roles of the job.

        The job had continued without them. A new generation (the time until the next failure)
        begins with them.

        Args:
          names: names of the trainers.
          generation: number of the generation.
        """
        self.generation = generation
        self.running += [x for x in self.joining if x.role.name in names]
        self.joining = [x for x in self.joining if x.role.name not in names]

    def find_running(self, name: str) -> Child | None:
        """Return the running role with this name, or None."""
        return next((child for child in self.running if child.role.name == name), None)

    def find_alive(self) -> set[str]:
        """Return the names of the running roles that have not ended.

        A role may have ended although the launcher has not handled this event yet. Such a role is
        not in the result.
        """
        events = self._queued()
        return {child.role.name for child in self.running if child not in events}

    @property
    def has_signal(self) -> bool:
        """True if this process has received a signal, which may still be in the queue."""
        return self.signum is not None or any(isinstance(x, int) for x in self._queued())

    def take_signal(self) -> bool:
        """Read a signal from the queue of events, without handling the ends of roles in the queue.

        Returns:
          True if this process has received a signal, now or earlier.
        """
        events = self._queued()
        while not self.events.empty():
            self.events.get()
        for event in events:
            if isinstance(event, int) and self.signum is None:
                self.signum = event
            else:
                self.events.put(event)
        return self.signum is not None

    def _queued(self) -> list[Event]:
        """Return the events in the queue without removing them."""
        events = []
        while not self.events.empty():
            events.append(self.events.get())
        for event in events:
            self.events.put(event)
        return events

    def begin_generation(self, number: int) -> None:
        """Note that the job continues after a failure, without a restart of all roles.

        The caller starts a new process for the failed role, or has dropped the role.

        Args:
          number: number of the new generation (the time between two failures of the job).
        """
        self.generation, self.failed = number, None

    def kill(self, child: Child) -> None:
        """Kill a role. The job reacts to its end as to any failure."""
        child.signal(signal.SIGKILL)

    def wait(self, limit: float | None) -> None:
        """Wait until the attempt is over: all roles have ended, one has failed, or a signal came.

        The wait also ends at the time limit, or if the function `look` has decided that the job
        cannot continue.

        Args:
          limit: the time limit, in seconds of the monotonic clock, or None.
        """
        while self.running:
            event = self._next(limit if self._look is None else _earlier(limit, LOOK))
            if isinstance(event, int):
                self.signum = event
                return
            if event is not None:
                self._on_end(event)
            elif limit is not None and time.monotonic() >= limit:
                self.timed_out = ", ".join(child.role.name for child in self.running)
                return
            if self.failed is not None:
                self._find_cause(limit)
                return
            if self._look is not None:
                self._look(self)
            if self._is_decided():
                return

    def end(self) -> None:
        """End the running roles: send SIGTERM, and SIGKILL after the grace period or a signal."""
        self._ending = True
        self.running += self.joining
        self.joining = []
        for child in self.running:
            child.signal(signal.SIGTERM)
        limit: float | None = time.monotonic() + self.grace
        while self.running:
            event = self._next(limit)
            if isinstance(event, Child):
                self._on_end(event)
                continue
            if event is not None:
                self.signum = self.signum or event
            for child in self.running:
                child.signal(signal.SIGKILL)
            limit = None

    def lost(self, *, was_reached: bool, has_snapshots: bool) -> Child | None:
        """Return the lost role that made the job fail, or None if the failure had another cause.

        A role is lost if a signal or the failure of its host ended it. A role that raised an
        exception of its own is not lost: a restart would only raise the exception again.

        Args:
          was_reached: True if every host ran its roles in an earlier attempt.
          has_snapshots: True if roles of the job take part in generations. Then a role also counts
            as lost if it ended because it lost another role, or because its snapshot is
            damaged.
        """
        if self.failed is None or is_lost(self.failed, was_reached):
            return self.failed
        if has_snapshots and _last_error(self.failed).startswith((LOST_PEER, DAMAGED_SNAPSHOT)):
            return self.failed
        if by_peer(self.failed):
            # the role that a PeerError names may be a trainer that the job dropped earlier
            for child in self.dropped.values():
                if is_lost(child, was_reached):
                    return child
        return None

    def pause(self, seconds: float) -> bool:
        """Wait before a restart. Return True if a signal ended the wait."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            event = self._next(until)
            if isinstance(event, int):
                self.signum = event
                return True
        return False

    def _is_decided(self) -> bool:
        """Return True if `look` has ended the attempt."""
        return self.failed is not None or self.error is not None or bool(self.superseded)

    def _find_cause(self, limit: float | None) -> None:
        """Wait up to BLAME seconds for the role that caused a PeerError; ignore other failures."""
        blame_limit = _earlier(limit, BLAME)
        while self.running and self.failed is not None and by_peer(self.failed):
            event = self._next(blame_limit)
            if event is None:
                return
            if isinstance(event, int):
                self.signum = event
                return
            self._on_end(event)

    def _next(self, limit: float | None) -> Event | None:
        """Wait for the next event; return None at the limit."""
        timeout = None
        if limit is not None:
            timeout = max(0.0, limit - time.monotonic())
        try:
            return self.events.get(timeout=timeout)
        except queue.Empty:
            return None

    def _on_end(self, child: Child) -> None:
        child.reap()
        self._guard.remove(child)
        role, how = child.role, child.how()
        if child in self.joining:
            self.joining.remove(child)
            self._site.ended(child, stopped=False)
            say(f"{role.name}{child.where} ended with {how} before it joined the job again")
            return
        self.running.remove(child)
        self._ended_roles.note(role.name, how, self.generation)
        for other in self.running:
            other.tell_ended(role.name, how, self.generation)
        self._site.ended(child, stopped=self._ending)
        if not child.code or self._ending:
            return
        if self._is_optional(role.name):
            self.dropped[role.name] = child
            left = role.trainers - len(self.dropped)
            if left >= self._quorum:
                say(f"{role.name}{child.where} failed with {how}; the others continue")
            elif self.failed is None:
                self.failed = child
                if left:
                    self.note = f"without it, {lacks_quorum(left, self._quorum)}"
        elif self.failed is None or (by_peer(self.failed) and not by_peer(child)):
            self.failed = child


def lacks_quorum(trainers: int, quorum: int) -> str:
    """Return the text of an error about a failure that leaves fewer trainers than the quorum."""
    left = "1 trainer" if trainers == 1 else f"{trainers} trainers"
    return f"{left} would be left, but quorum={quorum}"


def _earlier(limit: float | None, seconds: float) -> float:
    """Return the earlier of two times: a limit, and `seconds` from now."""
    then = time.monotonic() + seconds
    return then if limit is None else min(limit, then)


def by_peer(child: Child) -> bool:
    """Return True if a role ended because another role did, according to its last lines of output.

    Such lines have a PeerError, or an error of JAX about a lost connection.
    """
    for line in child.tail:
        if line.startswith(BY_PEER):
            return True
        if ("Error: " in line or "distributed service" in line) and is_by_peer(line):
            return True
    return False


def _last_error(child: Child) -> str:
    """Return the last line of a role's output that begins with an exception, or ""."""
    found = [line for line in child.tail if re.match(r"[\w.]+(Error|Exception|Rewound)\b", line)]
    return found[-1] if found else ""


def is_lost(child: Child, was_reached: bool) -> bool:
    """Return True if a signal or the failure of its host ended a role.

    Shells and signal handlers exit with 128 + the signal's number. So a script that calls
    `sys.exit(143)` counts as lost.
    """
    by_signal = child.returncode < 0 or child.code - 128 in FATAL
    return by_signal or child.is_host_lost(was_reached=was_reached)
