"""Start the roles of a job, on this host as torchrun does, or wherever a `Site` says.

    launch -> Child (one process per role) -> events -> launch

All that can happen (a role has ended, a signal has come, time is up) arrives at one queue, and one
loop reads it. Signal handlers only put the number there, so no exception ever strikes between
starting a process and noting that it was started.

In nccl2 mode there are trainers only. Each is shown one GPU of its host. JAX's preemption service
is off: it takes SIGTERM for a request to save, and such a trainer could not be ended.

`Site` is the one place that knows where roles run; `dtrans.hosts` has those for other hosts.

When a role fails, the others are told to end (SIGTERM), and are killed when they have not done so
after a grace period. The error is that of the role that failed *first*. Roles tell each other of
their failures, so a role may well end with a `PeerError` before the one that caused it has finished
printing its traceback: such an end is held for a moment, and gives way to a role that fails for a
reason of its own.

Of every role that ends the others are told (`dtrans.run.net.ended_roles`): one that ends before it
has greeted the servers would be waited for up to their deadline.

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
BLAME = 3.0  # seconds that a role which another made fail waits for that other to end
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESTARTS = "DTRANS_RESTARTS"  # the number of restarts before this one, in each role's environment

Event = Child | int  # a role that has ended, or a signal


class Site:
    """Place of a job's roles: this host, unless a subclass says otherwise."""

    _reserved: ReservedEndpoints | None = None

    def _choose_endpoints(self, count: int) -> tuple[str, ...]:
        """Return loopback endpoints that no other process gets until `close`."""
        self._reserved = self._reserved or ReservedEndpoints()
        return self._reserved.choose(count)

    def close(self) -> None:
        """Give back the ports of a job that has ended."""
        if self._reserved is not None:
            self._reserved.close()

    def roles(self, mode: str, trainers: int, pservers: int) -> tuple[Role, ...]:
        """Return every role of the job, with endpoints where they run."""
        return roles_at(
            mode, trainers, self._choose_endpoints(trainers if mode == "nccl2" else pservers)
        )

    def status_endpoint(self, roles: Sequence[Role]) -> str:
        """Return where trainer 0 of collectives can answer `dtrans status`; empty where nobody
        knows a port.

        Args:
          roles: every role of the job, from `roles`.
        """
        return self._choose_endpoints(1)[0]

    def variables(self, role: Role) -> dict[str, str]:
        """Return the variables of a role that hold where neither the user nor the launcher has set
        them."""
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
        """Start a role, as `Child` does."""
        return Child(role, command, env, events, emit, inherit_stdout=inherit_stdout)

    def ended(self, child: Child, *, stopped: bool) -> None:
        """Note that a role has ended: by itself, or because the launcher told it to."""


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
    """Run one command as every role of a job, and wait until all have ended.

    Each role finds out from its environment what it is (`Role.from_env`). Its output comes out line
    by line behind its name, standard output on `sys.stdout` and standard error on `sys.stderr`.
    Nothing that was started is left when this returns or raises.

    Args:
      command: program and arguments, the same for every role.
      trainers, pservers: how many of each; one pserver by default, and none in nccl2 mode.
      mode: "pserver" or "nccl2".
      on_trainer_loss: "abort" ends all roles when one fails. With "drop" a trainer that fails does
        not end the job, as long as another is left: in nccl2 mode, where trainer 0 has to stay,
        `dtrans.connect()` tells the others to go on without it; with parameter servers these
        decide, and those of asynchronous modes go on.
      deadline: seconds that the whole job may take.
      grace: seconds that a role gets to end by itself when it is told to.
      env: variables to add to this process's environment for the roles.
      inherit_stdout: trainer 0 keeps this process's standard output as it is, so that what it draws
        on a terminal looks as it should.
      log_dir: a folder for what the roles print, a file for each, `trainer-0.log` for instance. It
        has both streams.
      site: where the roles run; this host by default.
      restarts: the number of times that all roles start again after a role is lost to a signal or
        with its host. The variable DTRANS_RESTARTS of each role counts them, if there may be one.

    Raises:
      LaunchError: a role failed, or cannot be started; the message has its last words, and `code`
        its exit status.
      DeadlineError: time was up.
      KeyboardInterrupt, SystemExit: this process was interrupted, or told to end. They are raised
        when every role has ended; a second signal kills the roles at once.
    """
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
    servers = 1 if pservers is None else pservers
    for name, count in (("trainers", trainers), ("pservers", servers)):
        if count < 1:
            raise ConfigError(f"a job needs at least one of {name}, {name}={count}")
    if restarts < 0:
        raise ConfigError(f"restarts must be 0 or more, it is {restarts}")
    base = {k: v for k, v in os.environ.items() if k not in (*VARIABLES, LOSS)}
    # whole lines as they are printed, not when a buffer is full
    base |= {
        "PYTHONUNBUFFERED": "1",
        token.VARIABLE: token.job_token() or token.new_token(),
        **(env or {}),
    }
    where = site or Site()
    roles = where.roles(mode, trainers, servers)
    events: SimpleQueue[Event] = SimpleQueue()
    limit = None if deadline is None else time.monotonic() + deadline
    drops = on_trainer_loss == "drop"
    if drops and mode == "nccl2":
        base[LOSS] = on_trainer_loss

    # collectives have no endpoint that observers could know
    if mode == "nccl2" and trainers > 1 and not drops and not base.get(STATUS):
        base[STATUS] = where.status_endpoint(roles)
    answers_at = roles[0].pserver_endpoints or base.get(STATUS, "").split()
    with (
        contextlib.closing(where),
        _signals_to(events),
        _logs(log_dir) as logged,
        Guard(sys.executable) as guard,
        _announced(answers_at, base[token.VARIABLE]),
    ):
        logs = {role.name: logged(role.name) for role in roles}
        may_go = range(mode == "nccl2", trainers) if drops else ()
        for attempt in range(restarts + 1):
            with EndedRoles() as told:
                job = _Job(events, grace, may_go, told, where)
                shared = base | told.environment | {RUN: new_run()}
                if restarts:
                    shared[RESTARTS] = str(attempt)
                try:
                    for role in roles:
                        keeps = inherit_stdout and role.name == "trainer 0"
                        its = where.variables(role) | shared | role.environment()
                        child = where.start(
                            role, command, its, events, logs[role.name], inherit_stdout=keeps
                        )
                        job.started(child, guard)
                    signum = job.wait(limit)
                finally:
                    job.end()
            lost = job.failed
            if attempt == restarts or signum is not None or lost is None or not _is_lost(lost):
                break
            say(
                f"{lost.role.name}{lost.where} failed with {lost.how()}; all roles start again "
                f"(restart {attempt + 1} of {restarts})"
            )
            signum = _back_off(events, attempt)
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


@contextlib.contextmanager
def _announced(endpoints: Sequence[str], secret: str) -> Iterator[None]:
    """Say where the job answers observers, if it does; let this user's find a token that the
    launcher made."""
    with contextlib.ExitStack() as stack:
        if endpoints:
            if not token.job_token():  # it is not the user's, who could set it
                stack.enter_context(announce_job(endpoints, secret))
            say(f"this job answers: dtrans status {' '.join(endpoints)}")
        yield


def roles_at(mode: str, trainers: int, endpoints: Sequence[str]) -> tuple[Role, ...]:
    """Return every role of a job whose pservers, or trainers in nccl2 mode, are at these
    endpoints."""
    return trainer_roles(endpoints) if mode == "nccl2" else roles_of(trainers, endpoints)


def jax_variables(device: int) -> dict[str, str]:
    """Return what JAX reads in a trainer of nccl2 mode that has one device of its host."""
    return {"JAX_ENABLE_PREEMPTION_SERVICE": "0", "JAX_LOCAL_DEVICE_IDS": str(device)}


class _Job:
    """The roles that run, and what became of them."""

    def __init__(
        self,
        events: SimpleQueue[Event],
        grace: float,
        may_go: Collection[int],
        told: EndedRoles,
        site: Site,
    ) -> None:
        self._told = told
        self._site = site
        self.may_go = {f"trainer {k}" for k in may_go}  # those without whom the job goes on
        self.gone: set[str] = set()
        self.events = events
        self.grace = grace
        self.running: dict[Child, Guard] = {}
        self.failed: Child | None = None
        self.timed_out = ""
        self._ending = False

    def started(self, child: Child, guard: Guard) -> None:
        """Note a role that is there, and let it begin."""
        self.running[child] = guard
        guard.add(child)
        child.begin()

    def wait(self, limit: float | None) -> int | None:
        """Wait until all have ended, one has failed, or time is up. Returns the signal, if that
        came first."""
        while self.running:
            event = self._next(limit)
            if event is None:
                self.timed_out = ", ".join(c.role.name for c in self.running)
                return None
            if isinstance(event, int):
                return event
            self._ended(event)
            if self.failed is not None:
                return self._blame(limit)
        return None

    def end(self) -> None:
        """End the roles that still run, politely first."""
        self._ending = True
        for child in self.running:
            child.signal(signal.SIGTERM)
        limit: float | None = time.monotonic() + self.grace
        while self.running:
            event = self._next(limit)
            if isinstance(event, Child):
                self._ended(event)
                continue
            # time is up, or a second signal: kill, and wait for however long the system takes
            for child in self.running:
                child.signal(signal.SIGKILL)
            limit = None

    def _blame(self, limit: float | None) -> int | None:
        """While the failure is another role's fault, wait a moment for that other."""
        moment = time.monotonic() + BLAME
        limit = moment if limit is None else min(limit, moment)
        while self.running and self.failed is not None and _by_peer(self.failed):
            event = self._next(limit)
            if event is None or isinstance(event, int):
                return event
            self._ended(event)
        return None

    def _next(self, limit: float | None) -> Event | None:
        """What happens next; None when time is up."""
        try:
            return self.events.get(
                timeout=None if limit is None else max(0.0, limit - time.monotonic())
            )
        except queue.Empty:
            return None

    def _ended(self, child: Child) -> None:
        guard = self.running.pop(child)
        child.reap()
        guard.remove(child)
        how = child.how()
        self._told.note(child.role.name, how)
        for other in self.running:
            other.tell_ended(child.role.name, how)
        self._site.ended(child, stopped=self._ending)
        if child.code and not self._ending and child.role.name in self.may_go:
            self.gone.add(child.role.name)
            if child.role.trainers == len(self.gone):  # nobody is left
                self.failed = self.failed or child
                return
            say(f"{child.role.name}{child.where} failed with {child.how()}; the others go on")
        elif (
            child.code
            and not self._ending
            and (self.failed is None or (_by_peer(self.failed) and not _by_peer(child)))
        ):
            self.failed = child


def _is_lost(child: Child) -> bool:
    """Return True if a signal or the loss of its host ended a role, not its own exception.

    A role that a signal asks to end may exit with 128 + the signal's number, as shells do.
    """
    return child.returncode < 0 or child.code == 128 + signal.SIGTERM or child.is_host_lost


def _back_off(events: SimpleQueue[Event], attempt: int) -> int | None:
    """Wait before a restart, unless it is the first one; return a signal that comes meanwhile."""
    if attempt == 0:
        return None
    limit = time.monotonic() + BACK_OFF * 2 ** (attempt - 1)
    while (left := limit - time.monotonic()) > 0:
        try:
            event = events.get(timeout=left)
        except queue.Empty:
            return None
        if isinstance(event, int):
            return event
    return None


def _by_peer(child: Child) -> bool:
    """Whether a role failed because another did: its last words are a `PeerError`, or what JAX says
    of lost peers."""
    return any(
        line.startswith("dtrans.errors.PeerError")
        or (("Error: " in line or "distributed service" in line) and is_by_peer(line))
        for line in child.tail
    )


def _failure(child: Child) -> LaunchError:
    words = child.last_words()
    said = f"it said:\n{words}" if words else "it wrote nothing to standard error"
    message = (
        f"{child.role.name}{child.where} failed with {child.how()}, and the other roles "
        "were "
        f"ended; {said}"
    )
    return LaunchError(message, role=child.role.name, code=child.code)


_output = threading.Lock()


@contextlib.contextmanager
def _logs(folder: str | Path | None) -> Iterator[Callable[[str], Emit]]:
    """Give what takes the lines of a role: it writes them behind the role's name, and into the
    role's log."""
    with contextlib.ExitStack() as files:

        def logged(name: str) -> Emit:
            if folder is None:
                return _prefixed(name, None)
            path = Path(folder) / f"{name.replace(' ', '-')}.log"
            return _prefixed(name, files.enter_context(path.open("w", buffering=1)))

        if folder is not None:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise ConfigError(f"log_dir={str(folder)!r} cannot be made: {e.strerror}") from e
        yield logged


def _prefixed(name: str, log: TextIO | None) -> Emit:
    """Return what writes the lines of one role, whole."""

    def emit(stream: str, line: str) -> None:
        out = sys.stdout if stream == "stdout" else sys.stderr
        with _output:
            out.write(f"[{name}] {line}\n")
            out.flush()
            # what a role left behind in another session may write when all is over
            if log is not None and not log.closed:
                log.write(f"{line}\n")

    return emit


def say(line: str) -> None:
    """Write a line of the launcher's own to standard error."""
    _prefixed("launcher", None)("stderr", line)


@contextlib.contextmanager
def _signals_to(events: SimpleQueue[Event]) -> Iterator[None]:
    """Put signals into the queue instead of acting on them.

    Only the main thread may set handlers; elsewhere (a notebook's worker thread, say) signals stay
    what they were. A signal that this process was told to ignore, as a shell does for jobs in the
    background and nohup for SIGHUP, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in SIGNALS}
    taken = [s for s in SIGNALS if before[s] is not signal.SIG_IGN]
    for s in taken:
        # SimpleQueue.put is reentrant: safe in a handler that interrupts this very queue
        signal.signal(s, lambda signum, frame: events.put(signum))
    try:
        yield
    finally:
        for s in taken:
            signal.signal(s, before[s])
