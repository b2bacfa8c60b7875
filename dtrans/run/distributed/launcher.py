"""Launcher of a job's roles (server and trainer processes), on this host or on several.

    launch -> Restarts -> Attempt -> Child (one process per role) -> events -> Attempt

The launcher works like torchrun. One loop reads one queue with two kinds of events: a role has
ended, or a signal has arrived. Signal handlers only put the signal's number into the queue. So no
exception can interrupt the launcher between the start of a process and its registration.

In nccl2 mode there are only trainers, and each sees one GPU of its host. The launcher disables
JAX's preemption service. With this service, a trainer would take SIGTERM as a request to save, and
would not end.

A `Site` starts each role on its host. `dtrans.run.distributed.site` has the one for this host, and
`dtrans.hosts` those for other hosts.

When a role fails, the launcher sends SIGTERM to all other roles, and SIGKILL after a grace period.
It reports the role that failed *first*. Roles notice each other's failures, so a role may end with
a `PeerError` before the role that caused it has printed its traceback. After a `PeerError`, the
launcher waits a few seconds for a role that fails with another error, and reports that role.

When a role ends, the launcher informs the other roles (`dtrans.run.net.ended_roles`). Otherwise, if
a role ended before it connected, servers would wait for it up to their deadline.

With `restarts`, a lost role does not end the job: see `dtrans.run.distributed.restarts`.

If the launcher itself is killed, `dtrans.run.distributed.orphan_guard` ends the roles. If the job
has a folder of snapshots, `dtrans launch --resume` continues the job.

Source of the behaviour: torch/distributed/elastic/multiprocessing/api.py,
python/paddle/distributed/launch_ps.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

from dtrans.checkpoint.runs import VARIABLE as RUN
from dtrans.checks import check_one_of
from dtrans.errors import ConfigError, DeadlineError, LaunchError
from dtrans.protocol import token
from dtrans.protocol.generations import DROPS, REPLACE
from dtrans.run.distributed.child_process import Child, Guard
from dtrans.run.distributed.compile_cache import open_cache
from dtrans.run.distributed.identity import VARIABLE as SPARE
from dtrans.run.distributed.restarts.attempt import Attempt, Event
from dtrans.run.distributed.restarts.job_folder import endpoints_of, open_generations
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.distributed.restarts.restart_options import RestartOptions
from dtrans.run.distributed.restarts.role_starter import RoleStarter
from dtrans.run.distributed.restarts.run_attempts import Restarts
from dtrans.run.distributed.restarts.spares import Spares
from dtrans.run.distributed.role import LOSS, VARIABLES, Role
from dtrans.run.distributed.role_output import open_logs, say
from dtrans.run.distributed.site import Site
from dtrans.run.distributed.status_door import VARIABLE as STATUS
from dtrans.run.net.generation_folder import STARTED, VARIABLE as SNAPSHOTS
from dtrans.run.net.started_jobs import announce_job


GRACE = 5.0  # seconds between SIGTERM and SIGKILL
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    command: Sequence[str],
    *,
    trainers: int = 1,
    pservers: int | None = None,
    mode: str = "pserver",
    on_trainer_loss: str = "restart",
    deadline: float | None = None,
    grace: float = GRACE,
    env: Mapping[str, str] | None = None,
    inherit_stdout: bool = False,
    log_dir: str | Path | None = None,
    site: Site | None = None,
    restarts: int | RestartOptions = 0,
) -> None:
    """Start one process per role of a job, all with one command, and wait until all have ended.

    Each process reads its role from the environment (`Role.from_env`). The launcher prints the
    output of all roles by lines, with the role's name in front: standard output on `sys.stdout`,
    standard error on `sys.stderr`. When `launch` returns or raises, all processes of the job have
    ended.

    Args:
      command: program and arguments, the same for every role.
      trainers: number of trainers.
      pservers: number of parameter servers; by default one, and none in nccl2 mode.
      mode: "pserver" for a job with parameter servers; "nccl2" for trainers that all-reduce their
        gradients.
      on_trainer_loss: the reaction to the failure of a trainer. "restart": the trainer starts
        again; when all `restarts` are used, the job ends. "abort": the job ends. "drop": the job
        continues without the trainer while another trainer runs. Parameter servers with snapshots
        (`job.serve(state, snapshots=10)`) go back to the newest snapshot. Jobs without snapshots
        can use "drop" with asynchronous parameter servers, and in nccl2 mode if trainer 0 does not
        fail (see `dtrans.connect`). "replace", for jobs with snapshots: the job continues as with
        "drop", and the trainer also starts again, which uses one of `restarts`. The other roles do
        not wait for the trainer. It joins the job when it is ready.
      deadline: seconds that the job may take.
      grace: seconds between SIGTERM and SIGKILL.
      env: variables of the roles, in addition to this process's environment.
      inherit_stdout: True to let trainer 0 inherit this process's standard output, for programs
        that draw on a terminal.
      log_dir: a folder for the output of the roles, one file per role (`trainer-0.log`).
      site: the hosts of the roles; by default this host.
      restarts: the largest number of restarts, or a `RestartOptions` with further options. The
        launcher restarts roles if a signal, or the failure of a host, has ended a role. In a job
        with snapshots, only the role that a signal ended starts again, and the job continues from
        the newest snapshot. In other jobs, and after the failure of a host, all roles start again.
        No restart begins after the deadline. The variable DTRANS_RESTARTS of each role has the
        number of restarts so far. On several hosts, snapshots need a folder that all hosts share
        (`RestartOptions`). On this host, a job with restarts has a temporary compilation cache of
        JAX, unless the environment sets or disables the cache.

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
    options = restarts if isinstance(restarts, RestartOptions) else RestartOptions(restarts)
    _check_arguments(command, mode, trainers, pservers, on_trainer_loss, options.most)
    _check_quorum(options.quorum, trainers, mode, on_trainer_loss)
    site = site or Site()
    if options.snapshots is not None:
        _check_snapshots(options.snapshots, mode, on_trainer_loss, options.most)
    _check_spares(options, mode, site, on_trainer_loss, inherit_stdout)
    servers = 1 if pservers is None else pservers
    endpoints = endpoints_of(options.snapshots)
    if len(endpoints) != servers:
        endpoints = ()  # for a folder of another job, `_generations_of` raises an error
    roles = site.roles(mode, trainers, servers, endpoints=endpoints, snapshots=options.snapshots)
    events: SimpleQueue[Event] = SimpleQueue()
    limit = None if deadline is None else time.monotonic() + deadline
    drops = on_trainer_loss in DROPS
    base = _base_environment(env or {})
    if drops and mode == "nccl2":
        base[LOSS] = on_trainer_loss
    # Servers answer `dtrans status` at their endpoints. Without servers, trainer 0 answers at an
    # additional endpoint.
    if mode == "nccl2" and trainers > 1 and not drops and not base.get(STATUS):
        base[STATUS] = site.status_endpoint(roles)
    observed = roles[0].pserver_endpoints or base.get(STATUS, "").split()
    # in nccl2 mode, trainer 0 is JAX's coordinator, so its failure ends the job
    optional = {f"trainer {k}" for k in range(mode == "nccl2", trainers) if drops}

    with (
        contextlib.closing(site),
        _signals_to(events),
        open_logs(log_dir) as open_log,
        _generations_of(roles, site, options, on_trainer_loss) as generations,
        _cache_of(site, options, base) as cache,
        Guard(sys.executable, lock=None if generations is None else generations.lock) as guard,
        _announce(observed, base[token.VARIABLE]),
        Spares(options.spares, command, base | cache, open_log, guard, events) as spares,
    ):
        starter = RoleStarter(
            command=command,
            site=site,
            base=base | cache,
            run_name=(env or {}).get(RUN),
            logs={role.name: open_log(role.name) for role in roles},
            inherit_stdout=inherit_stdout,
        )
        # with snapshots, a failed trainer ends this attempt, so that `Restarts` can begin a new
        # generation
        is_optional = lambda name: (
            name in optional and (generations is None or not generations.has_marks)
        )
        attempts = Restarts(
            roles,
            starter,
            functools.partial(
                Attempt, events, grace, is_optional, site, guard, quorum=options.quorum
            ),
            spares=spares,
            limit=limit,
            options=options,
            on_trainer_loss=on_trainer_loss,
            generations=generations,
        )
        attempt = attempts.run()
        if generations is not None and attempt.has_ended_well:
            generations.end()
    _raise_failure(attempt, deadline)


def _generations_of(
    roles: Sequence[Role], site: Site, options: RestartOptions, on_trainer_loss: str
) -> contextlib.AbstractContextManager[JobGenerations | None]:
    """Return a context manager that yields the job's record of failures and restarts, or None.

    The result is None if this job uses no snapshots. That is the case without servers, and on
    several hosts without a shared folder. It is also the case without restarts, unless a job may
    drop or replace lost trainers.

    Args:
      roles: every role of the job.
      site: the hosts of the roles.
      options: the restarts that the launcher may make.
      on_trainer_loss: as for `launch`.
    """
    has_servers = any(role.is_pserver for role in roles)
    can_share = site.is_this_host or options.snapshots is not None
    has_generations = options.most or on_trainer_loss in DROPS
    if not has_servers or not can_share or not has_generations:
        return contextlib.nullcontext()
    return open_generations(
        *(roles, options.snapshots, options.record),
        on_trainer_loss=on_trainer_loss,
        quorum=options.quorum,
    )


def _cache_of(
    site: Site, options: RestartOptions, base: Mapping[str, str]
) -> contextlib.AbstractContextManager[dict[str, str]]:
    """Return a context manager that yields the variables of the job's compilation cache.

    Args:
      site: the hosts of the roles. Roles on other hosts have no cache.
      options: the restarts that the launcher may make.
      base: variables that all roles share.
    """
    if not options.most or not site.is_this_host:
        return contextlib.nullcontext({})
    return open_cache(base)


def _base_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all roles of all attempts share.

    Args:
      env: the user's variables, which override this process's environment.
    """
    ours = (*VARIABLES, LOSS, SNAPSHOTS, STARTED, SPARE)
    inherited = {k: v for k, v in os.environ.items() if k not in ours}
    return inherited | {
        "PYTHONUNBUFFERED": "1",  # a role's lines arrive as soon as it prints them
        token.VARIABLE: token.job_token() or token.new_token(),
        **env,
    }


def _raise_failure(attempt: Attempt, deadline: float | None) -> None:
    """Raise the error of a failed job, or the exception for the signal that ended the job."""
    if attempt.signum is not None:
        if attempt.signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + attempt.signum)
    if attempt.timed_out:
        raise DeadlineError(
            f"the job ran longer than its deadline of {deadline:g} s; the launcher stopped "
            f"{attempt.timed_out}"
        )
    if attempt.error is not None:
        raise attempt.error
    if attempt.failed is not None:
        raise _failure(attempt.failed, attempt.note)


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
    check_one_of("on_trainer_loss", on_trainer_loss, ("restart", *DROPS, "abort"))
    if on_trainer_loss == REPLACE and mode == "nccl2":
        raise ConfigError(
            "on_trainer_loss='replace' is for parameter servers, and mode='nccl2' has none; write "
            "on_trainer_loss='drop' or 'restart'"
        )
    if on_trainer_loss == REPLACE and not restarts:
        raise ConfigError(
            "on_trainer_loss='replace' needs restarts, since each new start of a trainer uses one; "
            "write restarts=3, or on_trainer_loss='drop'"
        )
    for name, count in (("trainers", trainers), ("pservers", pservers)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be 1 or more, it is {count}")
    if restarts < 0:
        raise ConfigError(f"restarts must be 0 or more, it is {restarts}")


def _check_snapshots(
    snapshots: str | os.PathLike[str], mode: str, on_trainer_loss: str, restarts: int
) -> None:
    """Raise ConfigError if a job cannot use a folder of snapshots."""
    argument = f"snapshots={os.fspath(snapshots)!r}"
    if mode == "nccl2":
        raise ConfigError(
            f"{argument}: mode='nccl2' has no parameter servers, which write snapshots; leave "
            "snapshots out, and save checkpoints"
        )
    if not restarts and on_trainer_loss not in DROPS:
        raise ConfigError(
            f"{argument} needs restarts, since snapshots are for restarts of lost roles; write "
            "restarts=3, or leave snapshots out"
        )


def _check_quorum(quorum: int, trainers: int, mode: str, on_trainer_loss: str) -> None:
    """Raise ConfigError if a job cannot use a quorum, the fewest trainers that may continue."""
    if not 1 <= quorum <= trainers:
        raise ConfigError(
            f"quorum must be a number from 1 to {trainers}, the number of trainers; it is {quorum}"
        )
    if quorum > 1 and (mode == "nccl2" or on_trainer_loss not in DROPS):
        raise ConfigError(
            f"quorum={quorum} is for parameter servers with on_trainer_loss='drop' or 'replace'; "
            "write both, or leave quorum out"
        )


def _check_spares(
    options: RestartOptions, mode: str, site: Site, on_trainer_loss: str, inherit_stdout: bool
) -> None:
    """Raise ConfigError if a job cannot use spares (processes that wait for a role)."""
    argument = f"spares={options.spares}"
    if options.spares < 0:
        raise ConfigError(f"spares must be 0 or more, it is {options.spares}")
    if not options.spares:
        return
    if mode == "nccl2":
        raise ConfigError(
            f"{argument}: in mode='nccl2' all roles start again after a failure, and a spare "
            "cannot replace a single role; leave spares out"
        )
    if not site.is_this_host:
        raise ConfigError(f"{argument}: spares are for roles on this host; leave spares out")
    if not options.most:
        raise ConfigError(
            f"{argument} needs restarts, since a spare takes the place of a lost role; write "
            "restarts=3, or leave spares out"
        )
    if on_trainer_loss == "drop":
        raise ConfigError(
            f"{argument}: on_trainer_loss='drop' continues without a lost trainer; leave spares "
            "out, or write on_trainer_loss='replace'"
        )
    if inherit_stdout:
        raise ConfigError(
            f"{argument}: a spare cannot inherit standard output; leave spares or inherit_stdout "
            "out"
        )


@contextlib.contextmanager
def _announce(endpoints: Sequence[str], secret: str) -> Iterator[None]:
    """Print the `dtrans status` command for this job, and let that command find the job's token.

    The token is stored in a file of this user until the `with` block ends.

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


def _failure(child: Child, note: str) -> LaunchError:
    """Return the error of a role that failed, with the last lines of its standard error.

    Args:
      child: the role.
      note: a remark about the role's failure, or an empty string.
    """
    words = child.last_words()
    output = f"its last output was:\n{words}" if words else "it wrote nothing to standard error"
    message = (
        f"{child.role.name}{child.where} failed with {child.how()}, and the other roles were "
        f"ended; {note and note + '; '}{output}"
    )
    return LaunchError(message, role=child.role.name, code=child.code)


@contextlib.contextmanager
def _signals_to(events: SimpleQueue[Event]) -> Iterator[None]:
    """Put the numbers of signals into the queue while the block runs.

    Only the main thread can set handlers; in another thread (of a notebook, say) signals keep their
    handlers. Ignored signals stay ignored: for background jobs, a shell ignores SIGINT. The command
    nohup ignores SIGHUP.
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
