"""Role's files in the shared folder of a job that survives failures.

A role reports its epoch (the time between two failures) and the cuts (snapshots) that it has
written. `dtrans.run.net.epoch_folder` lists the files of the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from dtrans.errors import DamagedCutError, DamagedError, StateError
from dtrans.protocol.epochs import Epoch, ReplacedError
from dtrans.run.net.epoch_folder import STARTED, VARIABLE, WITHOUT_CUTS, EpochFolder, epoch_of
from dtrans.run.net.role_marks import RoleMark, mark_of
from dtrans.run.net.shared_files import read_all_json, write_json


log = logging.getLogger(__name__)
POLL = 0.05  # seconds between two looks at the epoch, in a trainer that waits to join


class RoleFolder(EpochFolder):
    """Shared folder of a job that survives failures, as one role's process sees it.

    The role reads the current epoch (the time between two failures). It reports to the launcher
    that it has entered the epoch, and which cuts (snapshots) it has written.

    Args:
      path: the folder, which all roles and the launcher see.
      role: name of this process's role.
      started: number of the epoch in which this process was started.

    Attributes:
      incarnation: the argument `started`.

    Example: see `dtrans.run.net.launcher_folder.LauncherFolder`.
    """

    def __init__(self, path: str | os.PathLike[str], role: str, started: int = 0) -> None:
        super().__init__(path)
        self._role, self.incarnation = role, started
        self._mark = RoleMark()
        self._lock = threading.Lock()  # a server writes cuts in another thread

    @classmethod
    def from_environment(
        cls, role: str, environ: Mapping[str, str] = os.environ
    ) -> RoleFolder | None:
        """Return the folder that the launcher has set, or None."""
        path = environ.get(VARIABLE)
        return cls(path, role, int(environ.get(STARTED, 0))) if path else None

    def current(self) -> Epoch:
        """Return the current epoch of the job (the time since its last failure).

        It names the cut (snapshot) with which the epoch began, and the dropped trainers.

        Raises:
          ConfigError: the folder has no epoch, since no launcher uses it.
          ReplacedError: the launcher has started another process of this role, or has dropped it.
        """
        fields = self._granted()
        epoch = epoch_of(fields)
        if fields.get("started", {}).get(self._role, 0) > self.incarnation:
            what = "has started another one"
            if not epoch.has_role(self._role):
                what = "the job continues without it"
            raise ReplacedError(
                f"the launcher has lost this process of {self._role}, and {what}; this process ends"
            )
        return epoch

    def join(self) -> Epoch:
        """Wait until this role takes part in the job, and return the current epoch.

        Usually the method returns at once. If the launcher has dropped this trainer and has started
        this process as its replacement, the method reports that the process is ready. Then the
        launcher starts an epoch (the time between two failures) with this trainer.
        """
        epoch = self.current()
        if not epoch.has_role(self._role):
            self.enter(epoch)
        while not epoch.has_role(self._role):
            time.sleep(POLL)
            epoch = self.current()
        return epoch

    def enter(
        self,
        epoch: Epoch,
        *,
        with_trainers: bool = False,
        writes_newest: bool = False,
        writes_replicas: bool = False,
    ) -> None:
        """Tell the launcher that this role takes part in an epoch (the time between two failures).

        The job has undone the steps after the cut (snapshot) with which the epoch begins. So the
        role forgets its cuts of these steps, and removes the files. Otherwise, a later cut of the
        same step could contain a part that an earlier launch with another script has written.

        Args:
          epoch: the epoch.
          with_trainers: in a server, True if trainers write parts of its cuts, too.
          writes_newest: in a server, True if it writes its newest states when the epoch is ending.
          writes_replicas: in a server, True if it also writes a lost server's newest states then.
        """
        with self._lock:
            cuts = self.mark().cuts_until(epoch.cut)
            mark = RoleMark(
                epoch.number,
                cuts,
                with_trainers=with_trainers,
                writes_newest=writes_newest,
                writes_replicas=writes_replicas,
            )
            self._write_mark(mark)
            for step in self.steps():
                if step not in cuts and step != epoch.cut:
                    self._remove_part(step)

    def enter_alone(self, epoch: Epoch) -> None:
        """Tell the launcher that this asynchronous server takes part in a new epoch.

        An epoch is the time between two failures of the job. In contrast to `enter`, the server's
        cuts (snapshots) stay, because asynchronous servers undo no steps.
        """
        with self._lock:
            before = self.mark()
            mark = RoleMark(epoch.number, before.cuts, is_alone=True, counts=before.counts)
            self._write_mark(mark)

    def mark(self) -> RoleMark:
        """Return the last report of this role, possibly by an earlier process of the role."""
        return mark_of(read_all_json(self.path / "roles").get(self._role, {}))

    @property
    def entered(self) -> int:
        """Number of the epoch (part of the job) that this process has entered last."""
        return self._mark.epoch

    @property
    def newest_written(self) -> int | None:
        """Step of the newest cut (snapshot) that this process knows to be written, or None."""
        return max(self._mark.cuts, default=None)

    def note_cut(self, epoch: int, step: int, *, is_early: bool = False) -> None:
        """Tell the launcher that this role has written its part of a cut (snapshot).

        Args:
          epoch: number of the epoch in which the cut was taken. Cuts of older epochs are ignored.
          step: the step of the cut.
          is_early: True if the part may lack evictions of table rows after the step.
        """
        with self._lock:
            if epoch != self._mark.epoch:
                return
            cuts, early = {*self._mark.cuts}, {*self._mark.early}
            (early if is_early else cuts).add(step)
            steps = tuple(sorted(cuts)), tuple(sorted(early))
            self._write_mark(dataclasses.replace(self._mark, cuts=steps[0], early=steps[1]))

    @contextlib.contextmanager
    def reading_cut(self, step: int) -> Iterator[None]:
        """Read a cut (snapshot) in a `with` block; if it is damaged, tell the launcher.

        The launcher then chooses an older cut.

        Args:
          step: the step of the cut.

        Raises:
          DamagedCutError: the cut is damaged.
        """
        try:
            yield
        except DamagedError as e:
            with self._lock:
                self._write_mark(self.mark().without_cut(step))
            raise DamagedCutError(
                f"{self._role} cannot read the cut of step {step}: {e}; the job continues from the "
                "newest older cut if `dtrans launch` may start roles again, otherwise start the "
                "job again with --resume"
            ) from e

    def of_lost(self, role: str, epoch: int) -> RoleFolder:
        """Return the folder of a lost server, for a server that writes its state from a replica.

        The methods of the result raise ReplacedError when a new process of the lost server has
        started.

        Args:
          role: name of the lost server.
          epoch: number of the epoch (the time between two failures) that ends now.
        """
        folder = RoleFolder(self.path, role, epoch)
        folder._mark = folder.mark()
        return folder

    def has_written(self, step: int) -> bool:
        """Return True if this role has written its part of the cut (snapshot) of a step."""
        return step in self._mark.cuts or step in self._mark.early

    def remove_part(self, step: int) -> None:
        """Remove this role's part of a cut (snapshot) that it could not write completely.

        Args:
          step: the step of the cut. The role has not reported this cut.

        Raises:
          ReplacedError: the launcher has started another process of this role.
        """
        self.current()
        self._remove_part(step)

    def note_end(self, epoch: int, lost: Collection[str] = ()) -> None:
        """Tell the launcher that this server has written its newest state, after a failure.

        Args:
          epoch: number of the epoch (the time between two failures) that ended with this failure.
          lost: names of the lost servers. Copies of their states on this server are written, too.
        """
        with self._lock:
            if epoch == self._mark.epoch:
                mark = dataclasses.replace(self._mark, ended=epoch, ended_for=tuple(lost))
                self._write_mark(mark)

    def note_cut_alone(self, step: int, counts: Sequence[int]) -> list[int]:
        """Tell the launcher that this asynchronous server has written a cut (snapshot of itself).

        Args:
          step: the step of the cut. Steps increase.
          counts: number of steps of each trainer in the cut.

        Returns:
          The steps of older cuts, which the server may remove.
        """
        with self._lock:
            old = list(self._mark.cuts)
            new = dataclasses.replace(self._mark, cuts=(step,), counts=tuple(counts))
            self._write_mark(new)
        return old

    def drop_cuts(self, epoch: int, before: int) -> list[int]:
        """Tell the launcher that this role removes its cuts (snapshots) before a step.

        Some of these cuts are incomplete, because only some roles have written their parts. The cut
        with which the current epoch (the time since the last failure) began stays, since this role
        may have to load it. The caller removes the files.

        Args:
          epoch: number of the role's epoch. If the launcher has started a newer epoch, no cut is
            removed.
          before: the step.

        Returns:
          The steps of the cuts to remove.
        """
        with self._lock:
            granted = self.current()
            if granted.number != epoch or self._mark.epoch != epoch:
                return []
            written = {*self._mark.cuts, *self.steps()}
            old = sorted(x for x in written if x < before and x != granted.cut)
            cuts = tuple(x for x in self._mark.cuts if x not in old)
            if cuts != self._mark.cuts:
                self._write_mark(dataclasses.replace(self._mark, cuts=cuts))
        return old

    def remove_old_cuts(self, epoch: int, servers: Collection[str]) -> None:
        """Remove the cuts (snapshots) that no failure can need any more, to save space.

        The two newest complete cuts stay.

        Args:
          epoch, servers: as for `drop_cuts` and `newest_cut`.
        """
        for step in self.drop_cuts(epoch, self.old_cut(servers)):
            shutil.rmtree(self.path / str(step), ignore_errors=True)

    def note_no_cuts(self) -> None:
        """Tell the launcher that this server writes no cuts (snapshots)."""
        (self.path / WITHOUT_CUTS).touch()

    def leave(self) -> None:
        """Tell the launcher that this role has left the job after its last step."""
        with self._lock:
            self._write_mark(dataclasses.replace(self._mark, left=True))

    def report_lost(self, epoch: int, role: str, reason: str) -> None:
        """Tell the launcher that this role has lost its connection to another role.

        The launcher then kills the other role if it still runs, and may start it again.

        Args:
          epoch: number of the current epoch (the time since the last failure of the job).
          role: "trainer 1", or "pserver " and its endpoint.
          reason: text of the error.
        """
        fields = {"epoch": epoch, "role": role, "reason": reason}
        try:
            write_json(self.path / "lost" / self._role, fields)
        # only logged: without this report no epoch follows, and the caller then raises the error of
        # the lost connection
        except OSError as e:
            log.warning("%s cannot report to the launcher that %s is lost: %s", self._role, role, e)

    def _remove_part(self, step: int) -> None:
        """Remove this role's part of the cut (snapshot) of a step, also if it is incomplete."""
        for path in (self.path / str(step)).glob("*"):
            # writers use temporary names such as pserver-0.tmp and .trainer-0.npz
            if path.name.lstrip(".").partition(".")[0] != self._slug:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _write_mark(self, mark: RoleMark) -> None:
        """Write the report of this role.

        Raises:
          ReplacedError: the launcher has started another process of this role.
          StateError: the folder cannot be written. The earlier report stays.
        """
        if self.is_used:
            self.current()
        fields = dataclasses.asdict(mark)
        try:
            write_json(self.path / "roles" / self._role, fields)
        except OSError as e:
            raise StateError(
                f"{self._role} cannot write its report of {len(json.dumps(fields))} bytes to the "
                f"folder of cuts {self.path}: {e.strerror or e}; free space there, or allow this "
                "process to write there. The complete cuts are unchanged: after the end of the "
                "job, start the launcher again with the same folder"
            ) from e
        self._mark = mark

    @property
    def _slug(self) -> str:
        """Name of this role in file names, such as "pserver-0" for the role "pserver 0"."""
        return self._role.replace(" ", "-")
