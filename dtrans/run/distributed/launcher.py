"""Launcher of the roles of a job, on this host like torchrun, or on the hosts of a `Site`.

    launch -> Child (one process per role) -> events -> launch

One loop reads one queue with two kinds of events: a role has ended, or a signal has arrived. Signal
handlers only put the signal's number into the queue. So no exception can interrupt the launcher
between the start of a process and its registration.

In nccl2 mode there are only trainers, and each sees one GPU of its host. The launcher disables
JAX's preemption service, which handles SIGTERM as a request to save: such a trainer would not end.

Only `Site` knows where roles run; `dtrans.hosts` has subclasses for other hosts.

When a role fails, the launcher sends SIGTERM to the others, and SIGKILL after a grace period. It
reports the role that failed *first*. Roles notice each other's failures, so a role may end with a
`PeerError` before the role that caused it has printed its traceback. After a `PeerError`, the
launcher waits a few seconds for a role that fails with another error, and reports that role.

When a role ends, the launcher informs the other roles (`dtrans.run.net.ended_roles`). Otherwise
servers would wait up to their deadline for a role that ended before it connected.

With `restarts`, a lost role does not end the job. A role is lost if a signal ended it, or if its
host was lost. The launcher ends the other roles and starts all of them again, with the same
endpoints. Each attempt has its own run name, so pieces of checkpoints from different attempts never
mix. The script continues from its newest checkpoint. A role that raised an exception ends the job,
since it would raise the exception again.

If the launcher itself is killed, `dtrans.run.distributed.orphan_guard` kills the roles.

Source of the behaviour: torch/distributed/elastic/multiprocessing/api.py,
python/paddle/distributed/launch_ps.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

from dtrans.checkpoint.runs import VARIABLE as RUN, new_run
from dtrans.endpoints import ReservedEndpoints
from dtrans.errors import ConfigError, DeadlineError, LaunchError
from dtrans.protocol import token
from dtrans.run.distributed.child_process import Child, Emit, Guard
from dtrans.run.distributed.role import LOSS, VARIABLES, Role, roles_of, trainer_roles
from dtrans.run.distributed.status_door import VARIABLE as STATUS
from dtrans.run.distributed.watch import is_by_peer
from dtrans.run.net.ended_roles import EndedRoles
from dtrans.run.net.started_jobs import announce_job


GRACE = 5.0  # seconds between SIGTERM and SIGKILL
BACK_OFF = 1.0  # seconds before the second restart; each further pause is twice as long
# Seconds before a restart after the connection to a host was lost. The agent on that host ends its
# role within 5 seconds, and the role's port is in use until then.
HOST_PAUSE = 8.0
BLAME = 3.0  # seconds to wait, after a role's PeerError, for the role that caused it
RESTARTS = "DTRANS_RESTARTS"  # the number of restarts before this one, in each role's environment
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A role is lost if it exits with 128 + one of these signals: it was killed, or it crashed.
FATAL = {signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}

Event = Child | int  # a role that has ended, or the number of a signal


class Site:
    """The hosts on which a job's roles run. This class is for this host; subclasses have others."""

    _reserved: ReservedEndpoints | None = None

    def _choose_endpoints(self, count: int) -> tuple[str, ...]:
        """Return loopback endpoints whose ports are reserved until `close`."""
        self._reserved = self._reserved or ReservedEndpoints()
        return self._reserved.choose(count)

    def close(self) -> None:
        """Release the ports of a job that has ended."""
        if self._reserved is not None:
            self._reserved.close()

    def roles(self, mode: str, trainers: int, pservers: int) -> tuple[Role, ...]:
        """Return every role of the job, with endpoints on the hosts of this site."""
        count = trainers if mode == "nccl2" else pservers
        return roles_at(mode, trainers, self._choose_endpoints(count))

    def status_endpoint(self, roles: Sequence[Role]) -> str:
        """Return an endpoint at which trainer 0 of an nccl2 job can answer `dtrans status`.

        Args:
          roles: every role of the job, from `roles`.

        Returns:
          The endpoint; empty if no free port is known.
        """
        return self._choose_endpoints(1)[0]

    def variables(self, role: Role) -> dict[str, str]:
        """Return default variables of a role, which the user and the launcher may override."""
        if role.mode != "nccl2":
            return {}
        return jax_variables(role.trainer_id)

    def start(
        self,
        role: Role,
        command: Sequence[str],
        env: Mapping[str, str],
        events: SimpleQueue[Event],
        emit: Emit,
        *,
        inherit_stdout: bool,
    ) -> Child:
        """Start a role. The arguments are the same as those of `Child`."""
        return Child(role, command, env, events, emit, inherit_stdout=inherit_stdout)

    def ended(self, child: Child, *, stopped: bool) -> None:
        """Update what the site shows about a role that has ended.

        Args:
          stopped: True if the launcher ended the role.
        """


def launch(
    command: Sequence[str],
    *,
    trainers: int = 1,
    pservers: int | None = None,
    mode: str = "pserver",
    on_trainer_loss: str = "abort",
    deadline: float | None = None,
    grace: float = GRACE,
    env: Mapping[str, str] | None = None,
    inherit_stdout: bool = False,
    log_dir: str | Path | None = None,
    site: Site | None = None,
    restarts: int = 0,
) -> None:
    """Run one command as every role of a job, and wait until all roles have ended.

    Each process reads its role from the environment (`Role.from_env`). The launcher prints the
    output of all roles by lines, with the role's name in front: standard output on `sys.stdout`,
    standard error on `sys.stderr`. When `launch` returns or raises, all processes of the job have
    ended.

    Args:
      command: program and arguments, the same for every role.
      trainers: number of trainers.
      pservers: number of pservers; by default one, and none in nccl2 mode.
      mode: "pserver" or "nccl2".
      on_trainer_loss: "abort" ends all roles when one fails. With "drop", the job continues after
        the failure of a trainer while another trainer runs. This works in nccl2 mode, if trainer 0
        does not fail (see `dtrans.connect`), and with asynchronous parameter servers.
      deadline: seconds that the whole job may take.
      grace: seconds between SIGTERM and SIGKILL.
      env: variables of the roles, in addition to this process's environment.
      inherit_stdout: True to let trainer 0 inherit this process's standard output, for programs
        that draw on a terminal.
      log_dir: a folder for the output of the roles, one file per role (`trainer-0.log`).
      site: the hosts of the roles; by default this host.
      restarts: the largest number of times that the launcher starts all roles again, after a
        signal or the loss of a host has ended a role. If it is not 0, the variable DTRANS_RESTARTS
        of each role has the number of restarts so far. After the deadline no restart begins, and
        the loss is the job's error.

    Raises:
      ConfigError: an argument has an invalid value.
      LaunchError: a role failed, or cannot be started. The message has the last lines of the role's
        standard error, and `code` is its exit status.
      DeadlineError: the job took longer than the deadline.
      KeyboardInterrupt, SystemExit: this process received a signal. It is raised when every role
        has ended; a second signal kills the roles at once.

    Example:
      >>> import sys
      >>> from dtrans.run.distributed.launcher import launch
      >>> launch([sys.executable, "-c", "print('hello')"], mode="nccl2")
      [trainer 0] hello
    """
    _check_arguments(command, mode, trainers, pservers, on_trainer_loss, restarts)
    site = site or Site()
    roles = site.roles(mode, trainers, 1 if pservers is None else pservers)
    events: SimpleQueue[Event] = SimpleQueue()
    limit = None if deadline is None else time.monotonic() + deadline
    drops = on_trainer_loss == "drop"
    base = _base_environment(env or {})
    if drops and mode == "nccl2":
        base[LOSS] = on_trainer_loss
    # Servers answer `dtrans status` at their endpoints. Without servers, trainer 0 answers at an
    # additional endpoint.
    if mode == "nccl2" and trainers > 1 and not drops and not base.get(STATUS):
        base[STATUS] = site.status_endpoint(roles)
    observed = roles[0].pserver_endpoints or base.get(STATUS, "").split()
    # without trainer 0, JAX's coordinator, no trainer of nccl2 mode can continue
    optional = range(mode == "nccl2", trainers) if drops else ()

    with (
        contextlib.closing(site),
        _signals_to(events),
        _logs(log_dir) as open_log,
        Guard(sys.executable) as guard,
        _announce(observed, base[token.VARIABLE]),
    ):
        attempts = _Attempts(
            command=command,
            roles=roles,
            site=site,
            base=base,
            run_name=(env or {}).get(RUN),
            logs={role.name: open_log(role.name) for role in roles},
            inherit_stdout=inherit_stdout,
            guard=guard,
            new_job=functools.partial(_Job, events, grace, optional, site),
            limit=limit,
            restarts=restarts,
        )
        job = attempts.run()
    _raise_failure(job, deadline)


def _base_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all roles of all attempts share.

    Args:
      env: the user's variables, which override this process's environment.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in (*VARIABLES, LOSS)}
    return inherited | {
        "PYTHONUNBUFFERED": "1",  # a role's lines arrive as soon as it prints them
        token.VARIABLE: token.job_token() or token.new_token(),
        **env,
    }


@dataclasses.dataclass(frozen=True)
class _Attempts:
    """Attempts at a job: the first start of its roles, and the restarts after lost roles.

    Attributes:
      command: program and arguments of every role.
      roles: every role of the job.
      site: the hosts of the roles.
      base: variables that all roles of all attempts share.
      run_name: the user's name for the run; None to generate one for each attempt.
      logs: for each role, by name, the function that prints and logs its lines.
      inherit_stdout: True to let trainer 0 inherit this process's standard output.
      guard: kills the roles if this process is killed.
      new_job: returns a `_Job` without roles; its argument tells roles which roles have ended.
      limit: end of the job's deadline, in seconds of the monotonic clock; None without a deadline.
      restarts: the largest number of restarts.
    """

    command: Sequence[str]
    roles: Sequence[Role]
    site: Site
    base: Mapping[str, str]
    run_name: str | None
    logs: Mapping[str, Emit]
    inherit_stdout: bool
    guard: Guard
    new_job: Callable[[EndedRoles], _Job]
    limit: float | None
    restarts: int

    def run(self) -> _Job:
        """Start the roles, and again after losses; return the last attempt with its outcome."""
        for attempt in range(self.restarts + 1):
            job = self._run_once(attempt)
            lost = job.lost(was_reached=attempt > 0)
            if attempt == self.restarts or job.signum is not None or lost is None:
                break
            pause = _pause_before(attempt, lost)
            if self.limit is not None and time.monotonic() + pause >= self.limit:
                break
            say(
                f"{lost.role.name}{lost.where} failed with {lost.how()}; all roles start again "
                f"(restart {attempt + 1} of {self.restarts})"
            )
            if job.pause(pause):
                break
        return job

    def _run_once(self, attempt: int) -> _Job:
        """Start all roles, and wait until all have ended or were ended."""
        with EndedRoles() as ended_roles:
            job = self.new_job(ended_roles)
            shared = {**self.base, **ended_roles.environment, RUN: self.run_name or new_run()}
            if self.restarts:
                shared[RESTARTS] = str(attempt)
            try:
                for role in self.roles:
                    job.begin(self._start(job, role, shared), self.guard)
                job.wait(self.limit)
            finally:
                job.end()
        return job

    def _start(self, job: _Job, role: Role, shared: Mapping[str, str]) -> Child:
        return self.site.start(
            role,
            self.command,
            {**self.site.variables(role), **shared, **role.environment()},
            job.events,
            self.logs[role.name],
            inherit_stdout=self.inherit_stdout and role.name == "trainer 0",
        )


def _raise_failure(job: _Job, deadline: float | None) -> None:
    """Raise the error of a failed job, or the exception for the signal that ended the job."""
    if job.signum is not None:
        raise KeyboardInterrupt if job.signum == signal.SIGINT else SystemExit(128 + job.signum)
    if job.timed_out:
        raise DeadlineError(
            f"the job ran longer than its deadline of {deadline:g} s; the launcher stopped "
            f"{job.timed_out}"
        )
    if job.failed is not None:
        raise _failure(job.failed)


def _check_arguments(
    command: Sequence[str],
    mode: str,
    trainers: int,
    pservers: int | None,
    on_trainer_loss: str,
    restarts: int,
) -> None:
    """Raise ConfigError if an argument of `launch` has an invalid value."""
    if not command:
        raise ConfigError("launch needs a command, such as ['python', 'train.py']")
    if mode not in ("pserver", "nccl2"):
        raise ConfigError(
            f"mode must be 'pserver', or 'nccl2' (also for sharding and pipelines), it is {mode!r}"
        )
    if mode == "nccl2" and pservers is not None:
        raise ConfigError(
            f"pservers={pservers}: mode='nccl2' has no parameter servers; leave pservers out"
        )
    if on_trainer_loss not in ("abort", "drop"):
        raise ConfigError(f"on_trainer_loss must be 'abort' or 'drop', it is {on_trainer_loss!r}")
    for name, count in (("trainers", trainers), ("pservers", pservers)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be 1 or more, it is {count}")
    if restarts < 0:
        raise ConfigError(f"restarts must be 0 or more, it is {restarts}")


@contextlib.contextmanager
def _announce(endpoints: Sequence[str], secret: str) -> Iterator[None]:
    """Print the `dtrans status` command of the job; let this user's `dtrans status` find its token.

    Args:
      endpoints: the endpoints that answer; empty if the job does not answer.
      secret: the job's token.
    """
    with contextlib.ExitStack() as stack:
        if endpoints:
            # `dtrans status` itself finds a token that is in the user's environment
            if not token.job_token():
                stack.enter_context(announce_job(endpoints, secret))
            say(f"this job answers: dtrans status {' '.join(endpoints)}")
        yield


def roles_at(mode: str, trainers: int, endpoints: Sequence[str]) -> tuple[Role, ...]:
    """Return every role of a job.

    Args:
      endpoints: endpoints of the pservers; in nccl2 mode, of the trainers.
    """
    if mode == "nccl2":
        return trainer_roles(endpoints)
    return roles_of(trainers, endpoints)


def jax_variables(device: int) -> dict[str, str]:
    """Return JAX's variables for a trainer of nccl2 mode that uses one device of its host."""
    return {"JAX_ENABLE_PREEMPTION_SERVICE": "0", "JAX_LOCAL_DEVICE_IDS": str(device)}


class _Job:
    """One attempt at a job: its running roles, and its outcome.

    Args:
      events: the queue of ended roles and signals.
      grace: seconds between SIGTERM and SIGKILL.
      optional: ids of the trainers whose failure does not end the job.
      site: the hosts of the roles.
      ended_roles: the folder in which each role reads which other roles have ended.

    Attributes:
      failed: the role that made the job fail; None while there is none.
      timed_out: names of the roles that still ran at the time limit; empty before it.
      signum: the first signal that this process received; None without one.
    """

    def __init__(
        self,
        events: SimpleQueue[Event],
        grace: float,
        optional: Collection[int],
        site: Site,
        ended_roles: EndedRoles,
    ) -> None:
        self._ended_roles = ended_roles
        self._site = site
        self._optional = {f"trainer {k}" for k in optional}
        self._dropped: dict[str, Child] = {}
        self.signum: int | None = None
        self.events = events
        self.grace = grace
        self.running: dict[Child, Guard] = {}
        self.failed: Child | None = None
        self.timed_out = ""
        self._ending = False

    def begin(self, child: Child, guard: Guard) -> None:
        """Register a started role with the guard, then start the role's command."""
        self.running[child] = guard
        guard.add(child)
        child.begin()

    def wait(self, limit: float | None) -> None:
        """Wait until all roles have ended, one has failed, a signal came, or the limit passed."""
        while self.running:
            event = self._next(limit)
            if event is None:
                self.timed_out = ", ".join(child.role.name for child in self.running)
                return
            if isinstance(event, int):
                self.signum = event
                return
            self._on_end(event)
            if self.failed is not None:
                self._find_cause(limit)
                return

    def end(self) -> None:
        """End the running roles: send SIGTERM, and SIGKILL after the grace period or a signal."""
        self._ending = True
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

    def lost(self, *, was_reached: bool) -> Child | None:
        """Return the lost role that made the job fail; None if the job did not fail by a loss.

        Args:
          was_reached: True if every host ran its roles in an earlier attempt.
        """
        if self.failed is None or _is_lost(self.failed, was_reached):
            return self.failed
        if _by_peer(self.failed):
            # the peer may be a trainer that the job has dropped before
            for child in self._dropped.values():
                if _is_lost(child, was_reached):
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

    def _find_cause(self, limit: float | None) -> None:
        """Wait up to BLAME seconds for the role that caused a PeerError; ignore other failures."""
        blame_limit = time.monotonic() + BLAME
        if limit is not None:
            blame_limit = min(limit, blame_limit)
        while self.running and self.failed is not None and _by_peer(self.failed):
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
        guard = self.running.pop(child)
        child.reap()
        guard.remove(child)
        role, how = child.role, child.how()
        self._ended_roles.note(role.name, how)
        for other in self.running:
            other.tell_ended(role.name, how)
        self._site.ended(child, stopped=self._ending)
        if not child.code or self._ending:
            return
        if role.name in self._optional:
            self._dropped[role.name] = child
            if role.trainers > len(self._dropped):
                say(f"{role.name}{child.where} failed with {how}; the others continue")
            else:  # this was the last trainer
                self.failed = self.failed or child
        elif self.failed is None or (_by_peer(self.failed) and not _by_peer(child)):
            self.failed = child


def _by_peer(child: Child) -> bool:
    """Return True if a role's last lines blame another role: by a PeerError, or an error of JAX."""
    for line in child.tail:
        if line.startswith("dtrans.errors.PeerError"):
            return True
        if ("Error: " in line or "distributed service" in line) and is_by_peer(line):
            return True
    return False


def _pause_before(attempt: int, lost: Child) -> float:
    """Return the seconds to wait before the restart that follows an attempt."""
    pause = 0.0
    if attempt:
        pause = BACK_OFF * 2 ** (attempt - 1)
    if lost.is_host_lost(was_reached=True):
        pause = max(pause, HOST_PAUSE)
    return pause


def _is_lost(child: Child, was_reached: bool) -> bool:
    """Return True if a signal or the loss of its host ended a role.

    Shells and signal handlers exit with 128 + the signal's number. So a script that calls
    `sys.exit(143)` counts as lost.
    """
    by_signal = child.returncode < 0 or child.code - 128 in FATAL
    return by_signal or child.is_host_lost(was_reached=was_reached)


def _failure(child: Child) -> LaunchError:
    """Return the error of a role that failed, with the last lines of its standard error."""
    words = child.last_words()
    output = f"its last output was:\n{words}" if words else "it wrote nothing to standard error"
    message = (
        f"{child.role.name}{child.where} failed with {child.how()}, and the other roles were "
        f"ended; {output}"
    )
    return LaunchError(message, role=child.role.name, code=child.code)


_output = threading.Lock()


@contextlib.contextmanager
def _logs(folder: str | Path | None) -> Iterator[Callable[[str], Emit]]:
    """Yield a function from a role's name to the function that prints and logs its lines.

    Args:
      folder: the folder of the log files; None to print lines without log files.
    """
    with contextlib.ExitStack() as files:

        def open_log(name: str) -> Emit:
            if folder is None:
                return _line_writer(name, None)
            path = Path(folder) / f"{name.replace(' ', '-')}.log"
            return _line_writer(name, files.enter_context(path.open("w", buffering=1)))

        if folder is not None:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise ConfigError(f"log_dir={str(folder)!r} cannot be created: {e.strerror}") from e
        yield open_log


def _line_writer(name: str, log: TextIO | None) -> Emit:
    """Return a function that prints the lines of a role, and writes them to its log.

    A lock keeps lines of different roles from being mixed.
    """

    def emit(stream: str, line: str) -> None:
        out = sys.stderr
        if stream == "stdout":
            out = sys.stdout
        with _output:
            out.write(f"[{name}] {line}\n")
            out.flush()
            # a background process that a role has started may write after the log is closed
            if log is not None and not log.closed:
                log.write(f"{line}\n")

    return emit


def say(line: str) -> None:
    """Print a line with the prefix `[launcher]` on standard error."""
    _line_writer("launcher", None)("stderr", line)


@contextlib.contextmanager
def _signals_to(events: SimpleQueue[Event]) -> Iterator[None]:
    """Put the numbers of signals into the queue while the block runs.

    Only the main thread can set handlers; in another thread (of a notebook, say) signals keep their
    handlers. Ignored signals stay ignored: a shell ignores SIGINT for background jobs, and nohup
    SIGHUP.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in SIGNALS}
    handled = [s for s in SIGNALS if before[s] is not signal.SIG_IGN]
    for s in handled:
        # SimpleQueue.put is reentrant: a handler may interrupt a `put` or `get` of the queue
        signal.signal(s, lambda signum, frame: events.put(signum))
    try:
        yield
    finally:
        for s in handled:
            signal.signal(s, before[s])
