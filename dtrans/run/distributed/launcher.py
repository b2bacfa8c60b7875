"""Launcher of the roles of a job, on this host like torchrun, or on the hosts of a `Site`.

    launch -> Child (one process per role) -> events -> launch

One loop reads one queue of events: a role has ended, a signal has arrived, or the time limit has
passed. Signal handlers only put a number into the queue. So no exception can strike between the
start of a process and its registration.

In nccl2 mode there are only trainers, and each sees one GPU of its host. JAX's preemption service
is disabled: it handles SIGTERM as a request to save, and the launcher could not end such a trainer.

Only `Site` knows where roles run; `dtrans.hosts` has subclasses for other hosts.

When a role fails, the launcher sends SIGTERM to the others, and SIGKILL after a grace period. It
reports the role that failed *first*. Roles notice each other's failures, so a role may end with a
`PeerError` before the role that caused it has printed its traceback. The launcher waits a moment
for a role that fails with another error, and reports that one.

The launcher announces each end to the other roles (`dtrans.run.net.ended_roles`). Otherwise servers
would wait up to their deadline for a role that ended before it connected.

With `restarts`, a lost role does not end the job. A role is lost if a signal or the loss of its
host ended it. The launcher ends the other roles and starts all of them again, with the same
endpoints and a new run: pieces of checkpoints from different attempts never mix. The script
continues from its newest checkpoint. A role that ends by an exception ends the job, since it would
raise it again.

If the launcher itself is killed, `dtrans.run.distributed.orphan_guard` ends the roles.

Source of the behaviour: torch/distributed/elastic/multiprocessing/api.py,
python/paddle/distributed/launch_ps.py.
"""

from __future__ import annotations

import contextlib
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
# seconds before a restart after the loss of a host: its agent ends the role there within 5 seconds,
# and the role holds its port until then
HOST_PAUSE = 8.0
BLAME = 3.0  # seconds to wait, after a role's PeerError, for the role that caused it
RESTARTS = "DTRANS_RESTARTS"  # the number of restarts before this one, in each role's environment
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# signals that end a role for a cause outside of it, or by a crash
FATAL = {signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}

Event = Child | int  # a role that has ended, or a signal


class Site:
    """Hosts on which a job's roles run: this host, or those of a subclass."""

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
        """Return an endpoint at which trainer 0 of collectives can answer `dtrans status`.

        Args:
          roles: every role of the job, from `roles`.

        Returns:
          The endpoint; empty if no free port is known.
        """
        return self._choose_endpoints(1)[0]

    def variables(self, role: Role) -> dict[str, str]:
        """Return default variables of a role, which the user and the launcher may override."""
        return jax_variables(role.trainer_id) if role.mode == "nccl2" else {}

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
        """Start a role. Arguments are those of `Child`."""
        return Child(role, command, env, events, emit, inherit_stdout=inherit_stdout)

    def ended(self, child: Child, *, stopped: bool) -> None:
        """Note that a role has ended.

        Args:
          stopped: True if the launcher has ended it.
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

    Each role reads its role from the environment (`Role.from_env`). The launcher prints its output
    by lines, with its name in front: standard output on `sys.stdout`, standard error on
    `sys.stderr`. No process of the job is left when `launch` returns or raises.

    Args:
      command: program and arguments, the same for every role.
      trainers: number of trainers.
      pservers: number of pservers; by default one, and none in nccl2 mode.
      mode: "pserver" or "nccl2".
      on_trainer_loss: "abort" ends all roles when one fails. With "drop", the job continues after
        the failure of a trainer while another one lives. In nccl2 mode the survivors drop it
        (`dtrans.connect`), and trainer 0 must live. Asynchronous parameter servers continue, too.
      deadline: seconds that the whole job may take.
      grace: seconds between SIGTERM and SIGKILL.
      env: variables of the roles, in addition to this process's environment.
      inherit_stdout: True to let trainer 0 inherit this process's standard output, for programs
        that draw on a terminal.
      log_dir: a folder for the output of the roles, with a file for each (`trainer-0.log`).
      site: the hosts of the roles; by default this host.
      restarts: the number of times that all roles start again after a role is lost to a signal or
        with its host. With restarts, the variable DTRANS_RESTARTS of each role counts them. No
        restart begins after the deadline: the loss is the job's error.

    Raises:
      ConfigError: an argument has an invalid value.
      LaunchError: a role failed, or cannot be started. The message has the last lines of its
        standard error, and `code` is its exit status.
      DeadlineError: the job took longer than the deadline.
      KeyboardInterrupt, SystemExit: this process got a signal. They are raised when every role has
        ended; a second signal kills the roles at once.

    Example:
      >>> import sys
      >>> from dtrans.run.distributed.launcher import launch
      >>> launch([sys.executable, "-c", "print('hello')"], mode="nccl2")
      [trainer 0] hello
    """
    _check_arguments(command, mode, trainers, pservers, on_trainer_loss)
    if restarts < 0:
        raise ConfigError(f"restarts must be 0 or more, it is {restarts}")
    site = site or Site()
    roles = site.roles(mode, trainers, 1 if pservers is None else pservers)
    events: SimpleQueue[Event] = SimpleQueue()
    limit = None if deadline is None else time.monotonic() + deadline
    drops = on_trainer_loss == "drop"

    base = {k: v for k, v in os.environ.items() if k not in (*VARIABLES, LOSS)}
    base |= {
        "PYTHONUNBUFFERED": "1",  # lines arrive when they are printed
        token.VARIABLE: token.job_token() or token.new_token(),
        **(env or {}),
    }
    if drops and mode == "nccl2":
        base[LOSS] = on_trainer_loss
    # servers answer observers at their endpoints; trainer 0 of collectives needs another one
    if mode == "nccl2" and trainers > 1 and not drops and not base.get(STATUS):
        base[STATUS] = site.status_endpoint(roles)
    observed = roles[0].pserver_endpoints or base.get(STATUS, "").split()

    with (
        contextlib.closing(site),
        _signals_to(events),
        _logs(log_dir) as open_log,
        Guard(sys.executable) as guard,
        _announce(observed, base[token.VARIABLE]),
    ):
        logs = {role.name: open_log(role.name) for role in roles}
        optional = range(mode == "nccl2", trainers) if drops else ()
        for attempt in range(restarts + 1):
            with EndedRoles() as ended_roles:
                job = _Job(events, grace, optional, ended_roles, site)
                shared = base | ended_roles.environment
                shared[RUN] = (env or {}).get(RUN) or new_run()
                if restarts:
                    shared[RESTARTS] = str(attempt)
                try:
                    for role in roles:
                        child = site.start(
                            role,
                            command,
                            site.variables(role) | shared | role.environment(),
                            events,
                            logs[role.name],
                            inherit_stdout=inherit_stdout and role.name == "trainer 0",
                        )
                        job.begin(child, guard)
                    signum = job.wait(limit)
                finally:
                    job.end()
            signum = signum or job.signum
            lost = job.lost(was_reached=attempt > 0)
            if attempt == restarts or signum is not None or lost is None:
                break
            pause = _pause_before(attempt, lost)
            if limit is not None and time.monotonic() + pause >= limit:
                break
            say(
                f"{lost.role.name}{lost.where} failed with {lost.how()}; all roles start again "
                f"(restart {attempt + 1} of {restarts})"
            )
            signum = job.pause(pause)
            if signum is not None:
                break
    if signum is not None:
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
    if job.timed_out:
        raise DeadlineError(
            f"the launcher waited {deadline:g} s for the job: {job.timed_out} had not ended, and "
            "was stopped"
        )
    if job.failed is not None:
        raise _failure(job.failed)


def _check_arguments(
    command: Sequence[str], mode: str, trainers: int, pservers: int | None, on_trainer_loss: str
) -> None:
    """Check arguments of `launch`. Raises ConfigError."""
    if not command:
        raise ConfigError("launch was given no command")
    if mode not in ("pserver", "nccl2"):
        raise ConfigError(
            f"mode must be 'pserver', or 'nccl2' (also for sharding and pipelines), it is {mode!r}"
        )
    if mode == "nccl2" and pservers is not None:
        raise ConfigError(f"there are no pservers in mode='nccl2', pservers={pservers}")
    if on_trainer_loss not in ("abort", "drop"):
        raise ConfigError(f"on_trainer_loss must be 'abort' or 'drop', it is {on_trainer_loss!r}")
    for name, count in (("trainers", trainers), ("pservers", pservers)):
        if count is not None and count < 1:
            raise ConfigError(f"a job needs at least one of {name}, {name}={count}")


@contextlib.contextmanager
def _announce(endpoints: Sequence[str], secret: str) -> Iterator[None]:
    """Print the command that observes the job, and publish a generated token to this user."""
    with contextlib.ExitStack() as stack:
        if endpoints:
            # a token of the user's environment is in that of `dtrans status`, too
            if not token.job_token():
                stack.enter_context(announce_job(endpoints, secret))
            say(f"this job answers: dtrans status {' '.join(endpoints)}")
        yield


def roles_at(mode: str, trainers: int, endpoints: Sequence[str]) -> tuple[Role, ...]:
    """Return every role of a job.

    Args:
      endpoints: endpoints of the pservers; in nccl2 mode, of the trainers.
    """
    return trainer_roles(endpoints) if mode == "nccl2" else roles_of(trainers, endpoints)


def jax_variables(device: int) -> dict[str, str]:
    """Return JAX's variables for a trainer of nccl2 mode with one device of its host."""
    return {"JAX_ENABLE_PREEMPTION_SERVICE": "0", "JAX_LOCAL_DEVICE_IDS": str(device)}


class _Job:
    """Running roles of a job, and the outcome.

    Args:
      events: the queue of ended roles and signals.
      grace: seconds between SIGTERM and SIGKILL.
      optional: ids of the trainers whose failure does not end the job.
      ended_roles: the folder in which roles learn of ends.
      site: the hosts of the roles.

    Attributes:
      failed: the role that made the job fail; None while there is none.
      timed_out: the roles that ran at the time limit; empty before it.
      signum: a signal that arrived while the roles were ended; None without one.
    """

    def __init__(
        self,
        events: SimpleQueue[Event],
        grace: float,
        optional: Collection[int],
        ended_roles: EndedRoles,
        site: Site,
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
        """Register a started role with the guard, and let it run its command."""
        self.running[child] = guard
        guard.add(child)
        child.begin()

    def wait(self, limit: float | None) -> int | None:
        """Wait until all roles have ended, one has failed, or the limit has passed.

        Returns:
          The number of a signal that arrived first; else None.
        """
        while self.running:
            event = self._next(limit)
            if event is None:
                self.timed_out = ", ".join(c.role.name for c in self.running)
                return None
            if isinstance(event, int):
                return event
            self._on_end(event)
            if self.failed is not None:
                return self._find_cause(limit)
        return None

    def end(self) -> None:
        """End the running roles: by SIGTERM, then by SIGKILL."""
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
            # the grace period has passed, or a signal has arrived
            for child in self.running:
                child.signal(signal.SIGKILL)
            limit = None

    def lost(self, *, was_reached: bool) -> Child | None:
        """Return the lost role that made the job fail; None if no restart can help.

        Args:
          was_reached: True if every host ran its roles in an earlier attempt.
        """
        if self.failed is None or _is_lost(self.failed, was_reached):
            return self.failed
        if _by_peer(self.failed):  # perhaps of a trainer that the job dropped
            return next((c for c in self._dropped.values() if _is_lost(c, was_reached)), None)
        return None

    def pause(self, seconds: float) -> int | None:
        """Wait before a restart; return a signal that comes."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            event = self._next(until)
            if isinstance(event, int):
                return event
        return None

    def _find_cause(self, limit: float | None) -> int | None:
        """Wait a moment for the role that caused the failure, if that is a PeerError."""
        moment = time.monotonic() + BLAME
        limit = moment if limit is None else min(limit, moment)
        while self.running and self.failed is not None and _by_peer(self.failed):
            event = self._next(limit)
            if event is None or isinstance(event, int):
                return event
            self._on_end(event)
        return None

    def _next(self, limit: float | None) -> Event | None:
        """Wait for the next event; return None at the limit."""
        timeout = None if limit is None else max(0.0, limit - time.monotonic())
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
                say(f"{role.name}{child.where} failed with {how}; the others go on")
            else:  # the last trainer
                self.failed = self.failed or child
        elif self.failed is None or (_by_peer(self.failed) and not _by_peer(child)):
            self.failed = child


def _by_peer(child: Child) -> bool:
    """Return True if a role failed because of another: by `PeerError`, or JAX lost its peers."""
    return any(
        line.startswith("dtrans.errors.PeerError")
        or (("Error: " in line or "distributed service" in line) and is_by_peer(line))
        for line in child.tail
    )


def _pause_before(attempt: int, lost: Child) -> float:
    """Return the seconds to wait before the restart that follows an attempt."""
    pause = BACK_OFF * 2 ** (attempt - 1) if attempt else 0.0
    return max(pause, HOST_PAUSE) if lost.is_host_lost(was_reached=True) else pause


def _is_lost(child: Child, was_reached: bool) -> bool:
    """Return True if a signal or the loss of its host ended a role, not its own exception.

    Shells and handlers of signals exit with 128 + the number of the signal. So a script that ends
    by `sys.exit(143)` counts as lost.
    """
    by_signal = child.returncode < 0 or child.code - 128 in FATAL
    return by_signal or child.is_host_lost(was_reached=was_reached)


def _failure(child: Child) -> LaunchError:
    """Return the error of a role that failed, with the last lines of its standard error."""
    words = child.last_words()
    said = f"it said:\n{words}" if words else "it wrote nothing to standard error"
    message = (
        f"{child.role.name}{child.where} failed with {child.how()}, and the other roles were "
        f"ended; {said}"
    )
    return LaunchError(message, role=child.role.name, code=child.code)


_output = threading.Lock()


@contextlib.contextmanager
def _logs(folder: str | Path | None) -> Iterator[Callable[[str], Emit]]:
    """Yield a function from the name of a role to the function that prints and logs its lines."""
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
                raise ConfigError(f"log_dir={str(folder)!r} cannot be made: {e.strerror}") from e
        yield open_log


def _line_writer(name: str, log: TextIO | None) -> Emit:
    """Return a function that prints the lines of a role, and writes them to its log.

    A lock keeps the lines of different roles apart.
    """

    def emit(stream: str, line: str) -> None:
        out = sys.stdout if stream == "stdout" else sys.stderr
        with _output:
            out.write(f"[{name}] {line}\n")
            out.flush()
            # a process that a role left in another session may write after the log is closed
            if log is not None and not log.closed:
                log.write(f"{line}\n")

    return emit


def say(line: str) -> None:
    """Print a line of the launcher on standard error."""
    _line_writer("launcher", None)("stderr", line)


@contextlib.contextmanager
def _signals_to(events: SimpleQueue[Event]) -> Iterator[None]:
    """Put signals into the queue while the block runs.

    Only the main thread can set handlers; in other threads, a notebook's say, signals keep their
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
