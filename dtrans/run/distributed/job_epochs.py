"""Launcher's side of the epochs of a job with cuts: decides when roles can go back to a cut.

    epoch folder    roles report their epochs and cuts there, the launcher grants epochs
    in place        a restart of the lost role alone; the other roles live. Synchronous servers and
                    their trainers go back to a cut
    dropped         a lost trainer does not start again, and the job continues without it
    pending         True from the grant of an epoch until all roles have entered it

The launcher alone grants epochs. `dtrans.protocol.epochs` describes what the roles do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from dtrans.checkpoint.runs import new_run
from dtrans.errors import ConfigError, LaunchError
from dtrans.protocol.epochs import Epoch
from dtrans.protocol.server.trainer_registry import named
from dtrans.run.distributed.launch_record import LaunchRecord
from dtrans.run.distributed.role import Role
from dtrans.run.distributed.role_output import say
from dtrans.run.net.epoch_folder import EpochFolder
from dtrans.run.net.epoch_log import EpochLog, EpochRecord
from dtrans.run.net.launcher_folder import LAUNCH, LauncherFolder
from dtrans.run.net.role_marks import LostReport, RoleMark
from dtrans.run.net.temp_dir import TempDir


# Files that the launcher of a folder locks. If the launcher is killed, its guard process has the
# second lock until all roles on this host have ended.
LOCK, ROLES_LOCK = ".launcher", ".guard"
# Seconds to wait for the roles of a killed launcher. Its guard kills them after a grace period of 5
# seconds.
ROLES_END = 30.0
LOCK_PAUSE = 0.05  # seconds between two tries to lock a file
# Seconds that the launcher waits, after a loss, until servers have written their newest states.
# Then it chooses the newest complete cut.
WRITE_PATIENCE = 10.0
POLL = 0.02  # seconds between two looks at the servers' reports


class JobEpochs:
    """Epochs of one job. A new object grants the first epoch of this launcher.

    A folder with an epoch belongs to a job whose launcher has ended. The job is continued: its next
    epoch begins at the newest complete cut, or at the newest cut of each asynchronous server.

    Args:
      path: the folder.
      roles: every role of the job.
      lock: file descriptor of a lock for the guard of the roles; None for a temporary folder.
      drops_trainers: True if the job may continue without a lost trainer.
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
        drops_trainers: bool = False,
        quorum: int = 1,
    ) -> None:
        self.lock = lock
        self._folder, self._log = LauncherFolder(path), EpochLog(path)
        self._drops_trainers = drops_trainers
        self._names = [role.name for role in roles]
        self._servers = [role.name for role in roles if role.is_pserver]
        self._trainers, self._endpoints = roles[0].trainers, roles[0].pserver_endpoints
        self._by_endpoint = {}
        for role in roles:
            if role.is_pserver:
                self._by_endpoint[f"pserver {role.current_endpoint}"] = role.name
        self.epoch = Epoch()
        # for each role, the epoch in which its current process was started
        self._started: dict[str, int] = {}
        self._is_pending = False
        self._ignored: set[LostReport] = set()
        # for each role, the newest cuts at its last loss
        self._losses: dict[str, int | tuple[int, ...] | None] = {}
        if self._folder.is_used:
            self._continue(path, quorum)
        else:
            if steps := self._folder.steps():
                raise ConfigError(
                    f"cuts={str(path)!r} already has a folder {steps[0]}, which may be a "
                    "checkpoint; write another folder, whose files this job may remove"
                )
            self._run = new_run()
            self._folder.forget_marks()
            self._started = dict.fromkeys(self._names, 0)
            self._grant("", "the job starts")

    def _continue(self, path: Path, quorum: int) -> None:
        """Continue the job of a folder, after its launcher has ended."""
        trainers, servers = self._folder.trainers, len(self._folder.endpoints)
        if (trainers, servers) != (self._trainers, len(self._servers)):
            raise ConfigError(
                f"cuts={str(path)!r} has the cuts of a job with {trainers} trainers and {servers} "
                f"pservers, but this job has {self._trainers} and {len(self._servers)}; write as "
                "many as before, or another folder"
            )
        self._run, self.epoch = self._folder.run, self._folder.current()
        if len(self.members) < quorum:
            raise ConfigError(
                f"cuts={str(path)!r} has the cuts of a job that continues with "
                f"{named(self.members)}, since it has dropped {named(self.epoch.dropped)}, but "
                f"quorum={quorum}; write quorum={len(self.members)}, or another folder"
            )
        self.start_again("", "the launcher starts again")
        where = "with the initial state, since not all servers have a cut"
        if self.epoch.cut is not None:
            where = f"at step {self.epoch.cut}"
        elif self._folder.cuts_alone(self._servers):
            where = "with the newest cut of each server"
        without = ""
        if self.epoch.dropped:
            without = f", without {named(self.epoch.dropped)}"
        say(f"the job of {path} continues {where}{without}")

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment variables of a role that is started now."""
        return self._folder.environment(self._started[name])

    @property
    def has_marks(self) -> bool:
        """True if roles of the job take part in epochs."""
        return bool(self._folder.marks())

    @property
    def lacks_cuts(self) -> bool:
        """True if a server writes no cuts, and no role takes part in epochs."""
        return self._folder.lacks_cuts

    def end(self) -> None:
        """Remove the cuts of a job that has ended without an error."""
        self._folder.clear()

    # -- members ---------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the trainers of the current epoch, increasing."""
        return tuple(k for k in range(self._trainers) if k not in self.epoch.dropped)

    def takes_part(self, name: str) -> bool:
        """Return True for a role that was not dropped."""
        return name in self._active

    @property
    def _active(self) -> list[str]:
        """Names of the roles that were not dropped."""
        dropped = {f"trainer {k}" for k in self.epoch.dropped}
        return [name for name in self._names if name not in dropped]

    # -- losses ----------------------------------------------------------------------------------

    @property
    def have_all_entered(self) -> bool:
        """True if all roles take part in the current epoch, and none has left the job."""
        marks = self._current_marks()
        found = [marks.get(name, RoleMark(epoch=-1)) for name in self._active]
        return all(mark.epoch == self.epoch.number and not mark.left for mark in found)

    def end_epoch(
        self,
        lost: str,
        running: Callable[[], Collection[str]],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Let the servers write their newest states as cuts, after the loss of a role.

        It waits for all live servers, up to WRITE_PATIENCE seconds. If another server is lost
        meanwhile, its backup writes its states. The method returns at once if the servers cannot
        write a complete cut: a server has left, takes part in another epoch, or is lost without a
        replica.

        Args:
          lost: name of the lost role.
          running: returns the names of the running roles.
          is_stopped: returns True if the job ends, so that it needs no cut.
        """
        number, marks = self.epoch.number, self._current_marks()
        live = {*running()} - {lost}
        writers = live.intersection(self._servers)
        for name in writers:
            mark = marks.get(name, RoleMark(epoch=-1))
            if not mark.writes_newest or mark.epoch != number or mark.left:
                return
        if not self._announce_end(writers):
            return
        limit = time.monotonic() + WRITE_PATIENCE
        late = writers
        while time.monotonic() < limit and not is_stopped():
            marks, dead = self._folder.marks(), set(self._servers) - writers
            late = {name for name in writers if not marks[name].has_ended(number, dead)}
            if not late:
                return
            gone = late - {*running()}
            writers -= gone
            if gone and not self._announce_end(writers):
                return
            time.sleep(POLL)
        if not is_stopped():
            say(f"{', '.join(sorted(late))} did not write a cut within {WRITE_PATIENCE:.0f} s")

    def _announce_end(self, writers: Collection[str]) -> bool:
        """Announce the end of the epoch, and the lost servers. Return False if no cut is possible.

        Args:
          writers: names of the live servers.
        """
        marks = self._folder.marks()
        dead = [name for name in self._servers if name not in writers]
        has_replicas = all(marks[name].writes_replicas for name in writers)
        if not writers or (dead and not has_replicas):
            return False
        try:
            self._folder.announce_end(dead)
        except OSError as e:
            say(
                f"the servers write no cut at this loss, because {self._folder.path} cannot be "
                f"written: {e.strerror}"
            )
            return False
        return True

    def note_loss(self, name: str) -> bool:
        """Record the loss of a role; return True if no cut is newer than the role's last loss."""
        if not self.has_marks:
            return False
        newest = self._newest()
        is_crash_loop = name in self._losses and self._losses[name] == newest
        self._losses[name] = newest
        return is_crash_loop

    def _newest(self, dropped: Collection[int] | None = None) -> int | tuple[int, ...] | None:
        """Return the newest common cut, or asynchronous servers' newest cuts, or None.

        Args:
          dropped: as for `EpochFolder.newest_cut`.
        """
        alone = self._folder.cuts_alone(self._servers)
        return alone or self._folder.newest_cut(self._servers, dropped)

    def can_go_back(
        self, lost: str, running: Collection[str], *, without_lost: bool = False
    ) -> bool:
        """Return True if all roles except a lost role can go back to a cut.

        All other roles must run, and must not have left the job. Each of them must also have
        entered an epoch since its start. While an epoch is pending, this last condition does not
        apply: a role that has not entered an epoch then is one that has just started again, and
        it will enter the pending epoch.

        Args:
          lost: name of the lost role.
          running: names of the running roles.
          without_lost: True if the lost trainer would be dropped.
        """
        marks = self._current_marks()
        for name in self._active:
            if name == lost:
                continue
            mark = marks.get(name)
            if name not in running or (mark is None and not self._is_pending):
                return False
            if mark is not None and mark.left:
                return False
        return self._newest(self._dropped_with(lost) if without_lost else None) is not None

    def go_back(self, lost: str, reason: str = "") -> None:
        """Grant the next epoch, before a lost role starts again in place.

        Args:
          lost: name of the lost role.
          reason: cause of the loss, for the log.
        """
        self._started[lost] = self.epoch.number + 1
        self._grant_next(lost, reason, self.epoch.dropped)
        self._is_pending = True

    def drop(self, lost: str, reason: str = "") -> None:
        """Grant the next epoch, without a lost trainer. For the arguments, see `go_back`."""
        # a process of the trainer that still lives, on a lost host, ends when it reads the epoch
        self._started[lost] = self.epoch.number + 1
        self._grant_next(lost, reason, self._dropped_with(lost))
        self._is_pending = True

    def _dropped_with(self, lost: str) -> tuple[int, ...]:
        """Return the ids of the dropped trainers, and of a lost trainer."""
        return tuple(sorted({*self.epoch.dropped, int(lost.removeprefix("trainer "))}))

    @property
    def other_roles(self) -> str:
        """Log text about the roles that live, after `go_back`."""
        if self.epoch.cut is None:
            return "the other roles continue"
        return f"all roles go back to step {self.epoch.cut}"

    def start_again(self, lost: str = "", reason: str = "") -> None:
        """Grant the next epoch, before all roles start again. Dropped trainers do not.

        Args:
          lost: name of the lost role; empty without one.
          reason: cause of the restart, for the log.
        """
        self._started = dict.fromkeys(self._names, self.epoch.number + 1)
        self._is_pending = False
        if self._newest() is None:
            self._folder.forget_marks()  # no server begins with a cut if another one has none
        self._grant_next(lost, reason, self.epoch.dropped)

    def find_unable(self, running: Collection[str]) -> str | None:
        """Return a role that left or ended before it entered a pending epoch, or None.

        Args:
          running: names of the running roles.
        """
        if not self._is_pending:
            return None
        marks, missing = self._current_marks(), False
        for name in self._active:
            mark = marks.get(name)
            if mark is not None and mark.epoch == self.epoch.number:
                continue
            if name not in running or (mark is not None and mark.left):
                return name
            missing = True
        self._is_pending = missing
        return None

    # -- reports ---------------------------------------------------------------------------------

    def reports(self, running: Collection[str]) -> list[LostReport]:
        """Return the reports of lost roles that running roles wrote in the current epoch.

        Reports about a process that is still starting are left out. They are about the role's
        previous process: a server has read its first message after its loss.

        Args:
          running: names of the running roles.
        """
        marks = self._current_marks()
        # a role that has left the job does not wait for another role
        waiting = set(running) - {name for name, mark in marks.items() if mark.left}
        found = []
        for report in self._folder.lost(self.epoch.number):
            name = self.reported_role(report)
            if name not in marks and self._started.get(name) == self.epoch.number > 0:
                self._ignored.add(report)
            if report.reporter in waiting and report not in self._ignored:
                found.append(report)
        return found

    def reported_role(self, report: LostReport) -> str:
        """Return the name of the lost role in a report, which names servers by their endpoints."""
        return self._by_endpoint.get(report.role, report.role)

    # -- parts -----------------------------------------------------------------------------------

    def _grant_next(self, lost: str, reason: str, dropped: tuple[int, ...]) -> None:
        cut = None  # asynchronous servers have no common cut
        if not self._folder.cuts_alone(self._servers):
            cut = self._folder.newest_cut(self._servers, dropped)
        self.epoch = Epoch(self.epoch.number + 1, cut, dropped=dropped)
        self._grant(lost, reason)

    def _grant(self, lost: str, reason: str) -> None:
        """Grant the current epoch. On a full disk, first remove cuts that it does not need.

        Raises:
          LaunchError: the folder cannot be written.
        """
        epoch = self.epoch
        record = EpochRecord(epoch.number, epoch.cut, self.members, lost, reason)
        try:
            self._write_grant(record)
            return
        except OSError:  # the disk may be full
            self._folder.remove_other_cuts(epoch.cut)
        try:
            self._write_grant(record)
        except OSError as e:
            raise LaunchError(
                f"the job ends, since its folder of cuts {self._folder.path} cannot be written: "
                f"{e.strerror}; free space there, or allow this process to write there. Then start "
                "the launcher again with the same folder: it continues from the newest cut"
            ) from e

    def _write_grant(self, record: EpochRecord) -> None:
        job = self._run, self._trainers, self._endpoints
        self._log.add(record)
        self._folder.grant(self.epoch, *job, self._started, drops_trainers=self._drops_trainers)

    def _current_marks(self) -> dict[str, RoleMark]:
        """Return the marks of the current processes, without those of earlier processes."""
        marks = self._folder.marks()
        return {n: x for n, x in marks.items() if x.epoch >= self._started.get(n, 0)}


def endpoints_of(cuts: str | os.PathLike[str] | None) -> tuple[str, ...]:
    """Return the server endpoints of the job that wrote the cuts in a folder.

    The result is empty if the folder has no cuts, or `cuts` is None.
    """
    folder = EpochFolder("" if cuts is None else cuts)
    if cuts is None or not folder.is_used:
        return ()
    return folder.endpoints


@contextlib.contextmanager
def open_epochs(
    roles: Sequence[Role],
    cuts: str | os.PathLike[str] | None,
    record: LaunchRecord | None = None,
    *,
    drops_trainers: bool = False,
    quorum: int = 1,
) -> Iterator[JobEpochs]:
    """Yield the epochs of a job.

    Args:
      roles: every role of the job.
      cuts: the folder of the epochs and cuts; None for a temporary one.
      record: the command line of the launcher, for `dtrans launch --resume`; None without one.
      drops_trainers, quorum: as for `JobEpochs`.

    Raises:
      ConfigError: the folder cannot be used.
    """
    with contextlib.ExitStack() as stack:
        if cuts is None:
            temporary = TempDir()
            stack.callback(temporary.close)
            yield JobEpochs(temporary.path, roles, drops_trainers=drops_trainers, quorum=quorum)
            return
        path = EpochFolder(cuts).path
        stack.enter_context(_lock(path, LOCK))
        lock = stack.enter_context(_lock(path, ROLES_LOCK, patience=ROLES_END))
        epochs = JobEpochs(path, roles, lock, drops_trainers=drops_trainers, quorum=quorum)
        (path / LAUNCH).unlink(missing_ok=True)
        if record is not None:
            record.write(path)
        yield epochs


@contextlib.contextmanager
def _lock(path: Path, name: str, patience: float = 0.0) -> Iterator[int]:
    """Create a folder, and lock a file in it; yield the file's descriptor.

    The lock ends with the last process that has the descriptor.

    Args:
      path: the folder.
      name: name of the file.
      patience: seconds to wait for another process that has the lock.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = os.open(path / name, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as e:
        raise ConfigError(f"cuts={str(path)!r} cannot be created: {e.strerror}") from e
    try:
        _lock_file(file, path, patience)
        yield file
    finally:
        os.close(file)


def _lock_file(file: int, path: Path, patience: float) -> None:
    limit = time.monotonic() + patience
    try:
        while not _try_to_lock(file, is_last=time.monotonic() >= limit):
            time.sleep(LOCK_PAUSE)
    except BlockingIOError as e:
        raise ConfigError(
            f"cuts={str(path)!r} is the folder of a job that runs; wait for its end, or write "
            "another folder"
        ) from e
    except OSError as e:  # some network file systems have no locks
        raise ConfigError(
            f"cuts={str(path)!r} cannot be locked: {e.strerror}; write a folder of a file system "
            "with locks, such as NFS 4"
        ) from e


def _try_to_lock(file: int, *, is_last: bool) -> bool:
    """Lock a file. If another process has the lock, return False, or raise if `is_last`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if is_last:
            raise
        return False
    return True
