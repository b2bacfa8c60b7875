"""Attempts at a job: the first start of its roles, and restarts after lost roles.

`dtrans.run.distributed.restarts` describes when a role counts as lost, and the kinds of restarts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from dtrans.errors import LaunchError
from dtrans.protocol.server.trainer_registry import named
from dtrans.run.distributed.child_process import Child
from dtrans.run.distributed.restarts.attempt import Attempt, is_lost
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.distributed.restarts.joins import Joins
from dtrans.run.distributed.restarts.loss_rules import LossRules
from dtrans.run.distributed.restarts.lost_reports import FirstReport
from dtrans.run.distributed.restarts.restart_options import RestartOptions
from dtrans.run.distributed.restarts.role_starter import RoleStarter
from dtrans.run.distributed.restarts.spares import SpareChild, Spares
from dtrans.run.distributed.role import Role
from dtrans.run.distributed.role_output import say
from dtrans.run.net.ended_roles import EndedRoles
from dtrans.run.net.role_marks import LostReport


BACK_OFF = 1.0  # seconds before the second restart of all roles; each further wait is twice as long
LONGEST_BACK_OFF = 30.0  # seconds
STEADY = 60.0  # seconds that roles run until the next restart of all roles is immediate again
# Seconds before a restart after the connection to a host was lost. The agent on that host ends its
# role within 5 seconds, and the role's port is in use until then.
HOST_PAUSE = 8.0
RESTARTS = "DTRANS_RESTARTS"  # the number of restarts before this one, in each role's environment


class RoleLoss(NamedTuple):
    """Failure of a role, after which the job continues.

    Attributes:
      child: the process of the lost role.
      is_dropped: True if the job continues without the role, which is a trainer.
    """

    child: Child
    is_dropped: bool = False


class Restarts:
    """Driver of a job: starts all roles, handles each failure, and restarts roles if allowed.

    One *attempt* lasts from one start of all roles to the next.

    Args:
      roles: every role of the job.
      starter: starts a role.
      new_attempt: creates an `Attempt` without roles, from its arguments `ended_roles` and `look`.
      spares: spares of the job.
      limit: end of the job's deadline, in seconds of the monotonic clock, or None.
      options: the restarts that the launcher may make.
      on_trainer_loss: as for `launch`.
      generations: record of the job's failures and restarts; None if the job has no snapshots.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        starter: RoleStarter,
        new_attempt: Callable[[EndedRoles, Callable[[Attempt], None] | None], Attempt],
        *,
        spares: Spares,
        limit: float | None = None,
        options: RestartOptions,
        on_trainer_loss: str,
        generations: JobGenerations | None = None,
    ) -> None:
        self._roles, self._starter, self._new_attempt = roles, starter, new_attempt
        self._limit, self._rules = limit, LossRules(options, on_trainer_loss, generations)
        self._generations, self._spares = generations, spares
        self._joins = Joins(self._rules, spares, self._start, self._is_late)
        self._of_all = 0  # restarts of all roles in quick succession, which determine the pauses
        self._reports = FirstReport()

    def run(self) -> Attempt:
        """Start the roles, restart them after failures, and return the last attempt."""
        while True:
            attempt, lost = self._run_once()
            if self._generations is not None and (lost is not None or attempt.has_ended_well):
                self._spares.warn_without_snapshots(self._generations)
            if attempt.signum is not None:
                return attempt
            name, reason = "", attempt.superseded
            if attempt.superseded:
                # The restart of the lost role turns into a restart of all roles. It is already
                # counted. After a trainer was dropped, no restart is counted.
                number = f" ({self._rules.number})" if self._rules.count else ""
                say(f"{attempt.superseded}; all roles start again{number}")
                if self._pauses(attempt, _pause_before(self._of_all)):
                    return attempt
            elif lost is None or not self._restarts_all(attempt, lost):
                return attempt
            else:
                name, reason = lost.role.name, lost.how()
            if self._generations is not None:
                self._generations.start_again(name, reason)

    def _run_once(self) -> tuple[Attempt, Child | None]:
        """Start all roles, restart lost roles while others run, and wait until all have ended.

        Returns:
          The attempt, and the lost role if all roles may start again.
        """
        begun = time.monotonic()
        with EndedRoles() as ended_roles:
            look = None if self._generations is None else self._look
            attempt = self._new_attempt(ended_roles, look)
            shared = self._starter.shared(ended_roles)
            if self._generations is not None:
                attempt.begin_generation(self._generations.generation.number)
            try:
                for role in self._roles:
                    if self._generations is None or self._generations.generation.has_role(
                        role.name
                    ):
                        self._start(attempt, role, shared)
                attempt.wait(self._limit)
                loss = self._find_loss(attempt)
                while loss is not None and self._goes_back(attempt, loss, shared):
                    attempt.wait(self._limit)
                    loss = self._find_loss(attempt)
            finally:
                attempt.end()
        if time.monotonic() - begun >= STEADY:
            self._of_all = 0
        return attempt, None if loss is None else loss.child

    def _start(
        self,
        attempt: Attempt,
        role: Role,
        shared: Mapping[str, str],
        spare: SpareChild | None = None,
        *,
        joins: bool = False,
    ) -> None:
        """Start a role's process, or give the role to a spare process.

        Args:
          attempt: the attempt.
          role: the role.
          shared: variables that all roles of the attempt share.
          spare: the spare, or None.
          joins: True for a dropped trainer, which joins the job when it is ready.
        """
        if self._rules.most:
            shared = {**shared, RESTARTS: str(self._rules.count)}
        if self._generations is not None:
            shared = {**shared, **self._generations.environment(role.name)}
        if spare is None:
            child = self._starter.start(role, shared, attempt.events)
            attempt.begin(child, joins=joins)
            return
        attempt.add(spare, joins=joins)
        variables = self._starter.variables(role, shared)
        spare.take_role(role, variables, self._starter.logs[role.name])

    # -- failures ----------------------------------------------------------------------------------

    def _find_loss(self, attempt: Attempt) -> RoleLoss | None:
        """Return the lost role after which the job continues; None if the job ends.

        This is called when an attempt (one run of all roles) has stopped. Servers may write their
        newest states here.
        """
        has_snapshots = self._generations is not None and self._generations.has_marks
        lost = attempt.lost(was_reached=self._rules.count > 0, has_snapshots=has_snapshots)
        if lost is None or attempt.signum is not None:
            return None
        if not has_snapshots and not self._rules.may_restart(lost.role):
            return None
        if self._generations is not None:
            # the failed role does not run any more, but it has not left the job either
            running = {*_names(attempt), lost.role.name}
            if not is_lost(lost, was_reached=True) and self._supersede(attempt, running):
                return None
            self._end_generation(self._generations, attempt, lost)
            if attempt.take_signal():
                return None
        if has_snapshots and self._can_drop(attempt, lost):
            return RoleLoss(lost, is_dropped=True)
        if not self._rules.may_restart(lost.role):
            if self._rules.drops(lost.role):
                attempt.failed, attempt.note = lost, self._rules.why_not_dropped(lost)
            return None
        if self._generations is None or lost.is_host_lost(was_reached=True):
            # do not count this loss: if the host stays lost, a second loss is not the role's fault
            return RoleLoss(lost)
        if self._generations.note_loss(lost.role.name):
            attempt.failed, attempt.note = lost, "it was lost again before a new snapshot"
            return None
        return RoleLoss(lost)

    def _can_drop(self, attempt: Attempt, lost: Child) -> bool:
        """Return True if a job with snapshots can continue without a lost trainer."""
        if self._is_late() or not self._rules.leaves_quorum(lost.role):
            return False
        assert self._generations is not None
        if attempt.failed is not lost or not is_lost(lost, was_reached=True):
            return False
        return self._generations.can_go_back(lost.role.name, _names(attempt), without_lost=True)

    def _goes_back(self, attempt: Attempt, loss: RoleLoss, shared: Mapping[str, str]) -> bool:
        """Continue after the loss of a role while all others run; return False if it cannot.

        The lost role is dropped or restarted. If neither is possible, the caller restarts all
        roles.
        """
        if loss.is_dropped:
            self._drop(attempt, loss.child, shared)
        elif self._can_go_back(attempt, loss.child):
            self._restart_in_place(attempt, loss.child, shared)
        else:
            return False
        return True

    def _drop(self, attempt: Attempt, lost: Child, shared: Mapping[str, str]) -> None:
        """Continue without a lost trainer, while the other roles go back to a snapshot."""
        assert self._generations is not None
        self._generations.drop(lost.role.name, lost.how())
        attempt.begin_generation(self._generations.generation.number)
        say(
            f"{lost.role.name}{lost.where} failed with {lost.how()}; the job continues with "
            f"{named(self._generations.members)}, and {self._generations.other_roles}"
        )
        self._joins.replace(attempt, lost, shared)

    def _end_generation(self, generations: JobGenerations, attempt: Attempt, lost: Child) -> None:
        """Make servers write their newest states as snapshots, to which the job then goes back.

        The servers do not write if a signal or the deadline ends the job.
        """
        unreachable = set[str]()
        if lost.is_host_lost(was_reached=True):
            unreachable = {x.role.name for x in attempt.running if x.where == lost.where}
        generations.end_generation(
            lost.role.name,
            lambda: attempt.find_alive() - unreachable,
            lambda: attempt.has_signal or self._is_late(),
        )

    def _can_go_back(self, attempt: Attempt, lost: Child) -> bool:
        """Return True if a lost role can start again while the other roles keep their processes."""
        if self._generations is None or self._is_late():
            return False
        # If a process raised LostPeerError, its connection to a peer has failed, not the process
        # itself. The peer may have failed as well, so all roles start again.
        is_process_lost = attempt.failed is lost and is_lost(lost, was_reached=True)
        # the agents of a lost host end its other roles, too
        if not is_process_lost or lost.is_host_lost(was_reached=True):
            return False
        return self._generations.can_go_back(lost.role.name, _names(attempt))

    def _restart_in_place(self, attempt: Attempt, lost: Child, shared: Mapping[str, str]) -> None:
        """Start a lost role again, or give it to a spare; others go back to a snapshot."""
        assert self._generations is not None
        self._generations.go_back(lost.role.name, lost.how())
        attempt.begin_generation(self._generations.generation.number)
        self._rules.count += 1
        spare = self._spares.take()
        how = "it starts again" if spare is None else "a spare takes its place"
        say(
            f"{lost.role.name}{lost.where} failed with {lost.how()}; {how}, and "
            f"{self._generations.other_roles} ({self._rules.number})"
        )
        self._start(attempt, lost.role, shared, spare)

    def _restarts_all(self, attempt: Attempt, lost: Child) -> bool:
        """Pause before a restart of all roles; return False if the job ends instead."""
        pause = _pause_before(self._of_all, lost)
        if self._is_late(pause):
            return False
        self._rules.count += 1
        say(
            f"{lost.role.name}{lost.where} failed with {lost.how()}; all roles start again "
            f"({self._rules.number})"
        )
        return not self._pauses(attempt, pause)

    def _pauses(self, attempt: Attempt, pause: float) -> bool:
        """Count a restart of all roles, and wait before it; return True if a signal came."""
        self._of_all += 1
        if self._limit is not None:
            # the next attempt reports the deadline, with the names of the roles
            pause = min(pause, self._limit - time.monotonic())
        return attempt.pause(pause)

    def _is_late(self, pause: float = 0.0) -> bool:
        """Return True if no restart may begin after a pause, because of the deadline."""
        return self._limit is not None and time.monotonic() + pause >= self._limit

    # -- reports of roles ------------------------------------------------------------------------

    def _look(self, attempt: Attempt) -> None:
        """Handle reports of lost roles while the job runs; called every 0.2 seconds.

        The method also starts missing spares, and takes back dropped trainers that are ready. If a
        role cannot go back to a snapshot, all roles start again.
        """
        assert self._generations is not None
        self._spares.renew(self._generations)
        if self._generations.excuse_left():
            attempt.begin_generation(self._generations.generation.number)
        if self._supersede(attempt, _names(attempt)):
            return
        report = self._reports.choose(self._generations.reports(_names(attempt)))
        if report is not None:
            self._act_on(attempt, report)
        else:
            self._joins.look(self._generations, attempt)

    def _supersede(self, attempt: Attempt, running: Collection[str]) -> bool:
        """Return True if all roles must start again, because one has ended before it could go back.

        The launcher had chosen a snapshot to which all roles go back. One of them has left the job
        instead.

        Args:
          attempt: the attempt.
          running: names of the roles that have not ended.
        """
        assert self._generations is not None
        unable = self._generations.find_unable(running)
        if unable is None:
            return False
        attempt.superseded = f"{unable} has left the job, so it cannot go back to a snapshot"
        return True

    def _act_on(self, attempt: Attempt, report: LostReport) -> None:
        """Kill a role that another role has reported as lost, so that it can start again.

        End the job if the role cannot start again.
        """
        assert self._generations is not None
        name = self._generations.reported_role(report)
        reason = " ".join(report.reason.split())
        child = attempt.find_running(name)
        if child is not None and self._rules.continues_after(child.role):
            if child is not self._reports.killed:
                self._reports.killed = child
                then = "which is ended"
                if not self._rules.leaves_quorum(child.role):
                    then += " and starts again"
                say(f"{report.reporter} has lost {name}{child.where} ({reason}), {then}")
                attempt.kill(child)
        elif name in attempt.dropped:
            attempt.failed = attempt.dropped[name]
        else:
            # The reporter waits for a new generation, but no generation will begin, so the job
            # ends.
            attempt.error = LaunchError(
                f"{report.reporter} has lost {name}, and all roles were ended; the reason was:\n"
                f"{report.reason}",
                role=name,
            )


def _names(attempt: Attempt) -> set[str]:
    """Return the names of the running roles."""
    return {child.role.name for child in attempt.running}


def _pause_before(restarts: int, lost: Child | None = None) -> float:
    """Return the seconds to wait before a restart of all roles.

    Args:
      restarts: the number of restarts of all roles in quick succession before this one.
      lost: the lost role; None if another role could not go back to a snapshot.
    """
    pause = 0.0
    if restarts:
        doublings = min(restarts - 1, 10)  # a float overflows after 1,000 doublings
        pause = min(BACK_OFF * 2**doublings, LONGEST_BACK_OFF)
    if lost is not None and lost.is_host_lost(was_reached=True):
        pause = max(pause, HOST_PAUSE)
    return pause
