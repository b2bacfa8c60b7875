"""Decisions of the launcher after a failure: the roles that go back, and the snapshot to use.

    snapshot      a copy of the states of all servers at the same step
    generation    the time between two failures of the job. The launcher alone starts a generation:
                  it writes a file ("grants the generation"), which all roles read
    mark          the report of a role in the folder: its generation and the snapshots that it has
                  written
    in place      a restart of the lost role alone. The other processes continue to run; synchronous
                  servers and their trainers go back to a snapshot
    dropped       a lost trainer without which the job continues. With `on_trainer_loss="replace"`,
                  the trainer starts again meanwhile, and joins the job when it is ready
    pending       a generation that the launcher has granted, but that some roles have not entered
                  yet

`dtrans.protocol.generations` describes the roles' side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from dtrans.checkpoint.runs import new_run
from dtrans.errors import ConfigError
from dtrans.protocol.generations import REPLACE, Generation
from dtrans.protocol.server.trainer_registry import named
from dtrans.run.distributed.restarts.generation_grants import GenerationGrants
from dtrans.run.distributed.restarts.lost_reports import LostReports
from dtrans.run.distributed.restarts.snapshots_at_loss import SnapshotsAtLoss
from dtrans.run.distributed.role import Role
from dtrans.run.distributed.role_output import say
from dtrans.run.net.launcher_folder import LauncherFolder
from dtrans.run.net.role_marks import (
    LostReport,
    RoleMark,
    can_go_back,
    find_left,
    have_entered,
)


class JobGenerations:
    """Launcher's decisions after each failure of a job, and the files that tell them to roles.

    The time between two failures is a *generation*. At its start, roles go back to a *snapshot*, a
    copy of the states of all servers. The constructor starts the first generation. If the folder
    has generations already, an earlier launcher was killed. Then this launcher continues that job:
    the next generation begins at the newest complete snapshot, or at the newest snapshot of each
    asynchronous server.

    Args:
      path: the folder.
      roles: every role of the job.
      lock: file descriptor of a lock for the guard of the roles; None for a temporary folder.
      on_trainer_loss: as for `launch`.
      quorum: the smallest number of trainers with which the job continues.

    Raises:
      ConfigError: the folder belongs to a job with other roles or fewer trainers than the quorum,
        or has checkpoints.
    """

    def __init__(
        self,
        path: Path,
        roles: Sequence[Role],
        lock: int | None = None,
        *,
        on_trainer_loss: str = "restart",
        quorum: int = 1,
    ) -> None:
        self.lock = lock
        self._folder = LauncherFolder(path)
        self._names = [role.name for role in roles]
        self._servers = [role.name for role in roles if role.is_pserver]
        self._trainers, self._replaces = roles[0].trainers, on_trainer_loss == REPLACE
        run, launch = new_run(), 0
        if self._folder.is_used:
            run, launch = self._folder.run, self._folder.current().number + 1
        self._grants = GenerationGrants(
            self._folder, run, roles[0], launch=launch, on_trainer_loss=on_trainer_loss
        )
        self._snapshots_at_loss = SnapshotsAtLoss(self._folder, self._servers)
        self._reports = LostReports(self._folder, roles)
        self.generation = Generation()
        # for each role, the generation in which its current process was started
        self._started: dict[str, int] = {}
        self._is_pending = False
        # for each role, the newest snapshots at its last failure
        self._losses: dict[str, int | tuple[int, ...] | None] = {}
        if self._folder.is_used:
            self._continue(path, quorum)
        else:
            if steps := self._folder.steps():
                raise ConfigError(
                    f"snapshots={str(path)!r} already has a folder {steps[0]}, which may be a "
                    "checkpoint, and this job would remove its files; write another folder"
                )
            self._folder.forget_marks()
            self._started = dict.fromkeys(self._names, 0)
            self._grants.write(self.generation, self._started, "", "the job starts")

    def _continue(self, path: Path, quorum: int) -> None:
        """Continue a job after another launcher, which used the same folder, has ended."""
        trainers, servers = self._folder.trainers, len(self._folder.endpoints)
        if (trainers, servers) != (self._trainers, len(self._servers)):
            raise ConfigError(
                f"snapshots={str(path)!r} has the snapshots of a job with {trainers} trainers and "
                f"{servers} pservers, but this job has {self._trainers} and {len(self._servers)}; "
                "write as many as before, or another folder"
            )
        self.generation = self._folder.current()
        if len(self.members) < quorum and not self._replaces:
            raise ConfigError(
                f"snapshots={str(path)!r} has the snapshots of a job that continues with "
                f"{named(self.members)}, since it has dropped {named(self.generation.dropped)}, "
                f"but quorum={quorum}; write quorum={len(self.members)}, or another folder"
            )
        self.start_again("", "the launcher starts again")
        where = "with the initial state, since not all servers have a snapshot"
        if self.generation.snapshot is not None:
            where = f"at step {self.generation.snapshot}"
        elif self._folder.snapshots_alone(self._servers):
            where = "with the newest snapshot of each server"
        without = ""
        if self.generation.dropped:
            without = f", without {named(self.generation.dropped)}"
        say(f"the job of {path} continues {where}{without}")

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment variables of a role that is started now."""
        return self._folder.environment(self._started[name])

    @property
    def has_marks(self) -> bool:
        """True if roles have written reports, which means that this job can go back to a snapshot.

        It is False if the servers write no snapshots, or no role has begun to train yet.
        """
        return bool(self._folder.marks())

    @property
    def lacks_snapshots(self) -> bool:
        """True if roles do not take part in generations, because a server writes no snapshots."""
        return self._folder.lacks_snapshots

    def end(self) -> None:
        """Remove the snapshots of a job that has ended without an error."""
        self._folder.clear()

    # -- members ---------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the trainers that take part now, without dropped trainers, increasing."""
        return self.generation.members(self._trainers)

    @property
    def _active(self) -> list[str]:
        """Names of the roles that were not dropped."""
        return [name for name in self._names if self.generation.has_role(name)]

    @property
    def _expected(self) -> list[str]:
        """Names of the roles that must take part when the job goes back, if no server is lost.

        Dropped trainers are left out. So are trainers that finished their steps and need not go
        back.
        """
        left = [f"trainer {k}" for k in self._find_left()]
        return [name for name in self._active if name not in left]

    def _find_left(self) -> tuple[int, ...]:
        """Return the ids of trainers that have finished, and need not repeat any step."""
        return find_left(self._current_marks(), self._servers, self._started)

    # -- failures ----------------------------------------------------------------------------------

    @property
    def have_all_entered(self) -> bool:
        """True if all roles have read the current generation's file and continue the job.

        A trainer that has finished its steps has left the job. If it might have to repeat steps,
        the result is False.
        """
        return have_entered(self._current_marks(), self._expected, self.generation.number)

    def end_generation(
        self,
        lost: str,
        running: Callable[[], Collection[str]],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the servers write their newest states, after a failure and before the job goes back.

        The arguments are those of `SnapshotsAtLoss.request`.
        """
        marks = self._current_marks()
        self._snapshots_at_loss.request(self.generation.number, marks, lost, running, is_stopped)

    def note_loss(self, name: str) -> bool:
        """Record a role's failure; return True if it failed twice from the same snapshot.

        A role that fails again from the same snapshot would fail each time, so the launcher then
        ends the job.
        """
        if not self.has_marks:
            return False
        newest = self._newest()
        is_crash_loop = name in self._losses and self._losses[name] == newest
        self._losses[name] = newest
        return is_crash_loop

    def _newest(self, dropped: Collection[int] | None = None) -> int | tuple[int, ...] | None:
        """Return the step of the newest snapshot to which the job could go back, or None.

        Asynchronous servers write separate snapshots. For them, the result is a tuple with one step
        per server.

        Args:
          dropped: ids of the trainers that take no part; None for those of the current generation.
        """
        alone = self._folder.snapshots_alone(self._servers)
        return alone or self._folder.newest_snapshot(self._servers, dropped)

    def can_go_back(
        self, lost: str, running: Collection[str], *, without_lost: bool = False
    ) -> bool:
        """Return True if the job can continue after a failure while the other roles keep running.

        This needs a snapshot to which each other role can go back. Otherwise the launcher restarts
        all roles.

        Args:
          lost: name of the lost role.
          running: names of the running roles.
          without_lost: True if the lost trainer would be dropped.
        """
        # a lost server may lack the last steps of a trainer that has left
        expected = self._active if lost in self._servers else self._expected
        others = [name for name in expected if name != lost]
        marks, is_pending = self._current_marks(), self._is_pending
        if not can_go_back(marks, others, running, is_pending=is_pending):
            return False
        dropped = self.generation.dropped_with(lost) if without_lost else None
        return self._newest(dropped) is not None

    def go_back(self, lost: str, reason: str = "") -> None:
        """Start a generation (time until the next failure); only the lost role gets a new process.

        The caller starts the role's new process afterwards. All other roles keep running, and go
        back to the newest snapshot.

        Args:
          lost: name of the lost role.
          reason: cause of the failure, for the log.
        """
        self._started[lost] = self.generation.number + 1
        self._grant_next(lost, reason, self.generation.dropped)
        self._is_pending = True

    def drop(self, lost: str, reason: str = "") -> None:
        """Start a generation (the time until the next failure) without a lost trainer.

        The arguments are those of `go_back`.
        """
        # on a lost host, the trainer's old process may still run; it ends when it reads this
        # generation
        self._started[lost] = self.generation.number + 1
        self._grant_next(lost, reason, self.generation.dropped_with(lost))
        self._is_pending = True

    def find_ready(self, waiting: Collection[str], running: Collection[str]) -> list[str]:
        """Return the trainers that were dropped, have started again, and can join the job now.

        A trainer is ready when it has planned its step and waits for the launcher. The list is
        empty while some other role cannot go back to a snapshot, since all roles must do
        so at a join.

        Args:
          waiting: names of the dropped trainers whose new process runs.
          running: names of the running roles.
        """
        can_go_back = self.have_all_entered and {*self._expected} <= {*running}
        if not can_go_back or self._newest() is None:
            return []
        marks = self._current_marks()
        return [name for name in waiting if name in marks]

    def join(self, names: Collection[str]) -> None:
        """Start a generation (the time until the next failure) in which dropped trainers return.

        Args:
          names: names of the trainers, such as "trainer 1".
        """
        dropped = tuple(k for k in self.generation.dropped if f"trainer {k}" not in names)
        self._grant_next("", f"{', '.join(names)} joined", dropped)
        self._is_pending = True

    @property
    def other_roles(self) -> str:
        """Words for the log after a failure: the other roles continue, or go back to a step."""
        if self.generation.snapshot is None:
            return "the other roles continue"
        return f"all roles go back to step {self.generation.snapshot}"

    def start_again(self, lost: str = "", reason: str = "") -> None:
        """Start a generation (time until the next failure) in which all roles get new processes.

        The caller starts the roles afterwards. Dropped trainers also start again, but only with
        `on_trainer_loss="replace"`.

        Args:
          lost: name of the lost role; empty if no role was lost.
          reason: cause of the restart, for the log.
        """
        self._started = dict.fromkeys(self._names, self.generation.number + 1)
        self._is_pending = False
        if self._newest() is None:
            # without a snapshot of every server, no server may begin with its snapshot
            self._folder.forget_marks()
        dropped = () if self._replaces else self.generation.dropped
        self._grant_next(lost, reason, dropped)

    def excuse_left(self) -> bool:
        """Start another generation if servers wait for trainers that have finished their steps.

        A trainer may finish and end just before a new generation (time between two failures). It
        never enters the new generation, but servers wait for it. This method starts a further
        generation that names the trainer as finished, so that servers stop waiting.

        Returns:
          True if there was such a trainer.
        """
        marks, late = self._current_marks(), []
        for k in self._find_left():
            if (
                k not in self.generation.left
                and marks[f"trainer {k}"].generation < self.generation.number
            ):
                late.append(k)
        if late:
            self._grant_next("", f"{named(late)} left", self.generation.dropped)
            self._is_pending = True
        return bool(late)

    def find_unable(self, running: Collection[str]) -> str | None:
        """Return a role that has ended and so cannot enter the current generation, or None.

        A generation is the time between two failures. After the launcher has started one, it calls
        this method until all roles have entered it. If a role cannot, the launcher restarts all
        roles.

        Args:
          running: names of the running roles.
        """
        if not self._is_pending:
            return None
        marks, missing = self._current_marks(), False
        for name in self._expected:
            mark = marks.get(name)
            if mark is not None and mark.generation == self.generation.number:
                continue
            if name not in running or (mark is not None and mark.left):
                return name
            missing = True
        self._is_pending = missing
        return None

    # -- reports ---------------------------------------------------------------------------------

    def reports(self, running: Collection[str]) -> list[LostReport]:
        """Return the roles' reports that they have lost the connection to another role.

        Args:
          running: names of the running roles. Reports of other roles are left out.
        """
        return self._reports.current(self.generation.number, self._current_marks(), running)

    def reported_role(self, report: LostReport) -> str:
        """Return the role's name in a report of a lost role, which may contain an endpoint."""
        return self._reports.name_of(report)

    # -- parts -----------------------------------------------------------------------------------

    def _grant_next(self, lost: str, reason: str, dropped: tuple[int, ...]) -> None:
        snapshot = None  # asynchronous servers have no common snapshot
        if not self._folder.snapshots_alone(self._servers):
            snapshot = self._folder.newest_snapshot(self._servers, dropped)
        self.generation = self.generation.next(snapshot, dropped, self._find_left())
        self._grants.write(self.generation, self._started, lost, reason)

    def _current_marks(self) -> dict[str, RoleMark]:
        """Return the report of each role's current process, by role name."""
        marks = self._folder.marks()
        return {n: x for n, x in marks.items() if x.generation >= self._started.get(n, 0)}
