"""Role's files in the shared folder of a job that survives failures.

A role reports its generation (the time between two failures) and the snapshots that it
has written. `dtrans.run.net.generation_folder` lists the files of the folder.
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

from dtrans.errors import DamagedError, DamagedSnapshotError, StateError
from dtrans.protocol.generations import Generation, ReplacedError
from dtrans.run.net.generation_folder import (
    STARTED,
    VARIABLE,
    WITHOUT_SNAPSHOTS,
    GenerationFolder,
    generation_of,
)
from dtrans.run.net.role_marks import RoleMark, mark_of
from dtrans.run.net.shared_files import read_all_json, write_json


log = logging.getLogger(__name__)
POLL = 0.05  # seconds between two looks at the generation, in a trainer that waits to join


class RoleFolder(GenerationFolder):
    """Shared folder of a job that survives failures, as one role's process sees it.

    The role reads the current generation (the time between two failures). It reports to the
    launcher that it has entered the generation, and which snapshots it has written.

    Args:
      path: the folder, which all roles and the launcher see.
      role: name of this process's role.
      started: number of the generation in which this process was started.

    Attributes:
      incarnation: the argument `started`.

    Example: see `dtrans.run.net.launcher_folder.LauncherFolder`.
    """

    def __init__(self, path: str | os.PathLike[str], role: str, started: int = 0) -> None:
        super().__init__(path)
        self._role, self.incarnation = role, started
        self._mark = RoleMark()
        self._lock = threading.Lock()  # a server writes snapshots in another thread

    @classmethod
    def from_environment(
        cls, role: str, environ: Mapping[str, str] = os.environ
    ) -> RoleFolder | None:
        """Return the folder that the launcher has named in an environment variable, or None."""
        path = environ.get(VARIABLE)
        return cls(path, role, int(environ.get(STARTED, 0))) if path else None

    def current(self) -> Generation:
        """Return the current generation of the job (the time since its last failure).

        It names the snapshot with which the generation began, and the dropped trainers.

        Raises:
          ConfigError: the folder has no generation, since no launcher uses it.
          ReplacedError: the launcher has started another process of this role, or has dropped it.
        """
        fields = self._granted()
        generation = generation_of(fields)
        if fields.get("started", {}).get(self._role, 0) > self.incarnation:
            what = "has started another one"
            if not generation.has_role(self._role):
                what = "the job continues without it"
            raise ReplacedError(
                f"the launcher has lost this process of {self._role}, and {what}; this process ends"
            )
        return generation

    def join(self) -> Generation:
        """Wait until this role takes part in the job, and return the current generation.

        Usually the method returns at once. If the launcher has dropped this trainer and has started
        this process as its replacement, the method reports that the process is ready. Then the
        launcher starts a generation (the time between two failures) with this trainer.
        """
        generation = self.current()
        if not generation.has_role(self._role):
            self.enter(generation)
        while not generation.has_role(self._role):
            time.sleep(POLL)
            generation = self.current()
        return generation

    def enter(
        self,
        generation: Generation,
        *,
        with_trainers: bool = False,
        writes_newest: bool = False,
        writes_replicas: bool = False,
    ) -> None:
        """Tell the launcher that this role takes part in a generation (time between failures).

        The generation begins with a snapshot, and the job has undone all later steps. So this
        method also removes the role's snapshots of these steps. Otherwise, a new snapshot of the
        same step could contain an old part, which an earlier launch with another script has
        written.

        Args:
          generation: the generation.
          with_trainers: in a server, True if trainers write parts of its snapshots, too.
          writes_newest: in a server, True if it can write its newest states when a process fails.
          writes_replicas: in a server, True if it can also write the newest states of a lost server
            then.
        """
        with self._lock:
            snapshots = self.mark().snapshots_until(generation.snapshot)
            mark = RoleMark(
                generation.number,
                snapshots,
                with_trainers=with_trainers,
                writes_newest=writes_newest,
                writes_replicas=writes_replicas,
            )
            self._write_mark(mark)
            for step in self.steps():
                if step not in snapshots and step != generation.snapshot:
                    self._remove_part(step)

    def enter_alone(self, generation: Generation) -> None:
        """Tell the launcher that this asynchronous server takes part in a new generation.

        A generation is the time between two failures of the job. In contrast to `enter`, the
        server's snapshots stay, because asynchronous servers undo no steps.
        """
        with self._lock:
            before = self.mark()
            mark = RoleMark(
                generation.number, before.snapshots, is_alone=True, counts=before.counts
            )
            self._write_mark(mark)

    def mark(self) -> RoleMark:
        """Return the last report of this role, possibly by an earlier process of the role."""
        return mark_of(read_all_json(self.path / "roles").get(self._role, {}))

    @property
    def entered(self) -> int:
        """Number of the newest generation (time between failures) that this process has joined."""
        return self._mark.generation

    @property
    def newest_written(self) -> int | None:
        """Step of the newest snapshot to which this role has added its part, or None."""
        return max(self._mark.snapshots, default=None)

    def note_snapshot(self, generation: int, step: int, *, is_early: bool = False) -> None:
        """Tell the launcher that this role has written its part of a snapshot.

        Args:
          generation: number of the generation in which the snapshot was taken. Snapshots of older
            generations are ignored.
          step: the step of the snapshot.
          is_early: True if the server has written the part right after the step's update. Table
            rows that are evicted (removed) after the step may then still be in the part.
        """
        with self._lock:
            if generation != self._mark.generation:
                return
            snapshots, early = {*self._mark.snapshots}, {*self._mark.early}
            (early if is_early else snapshots).add(step)
            steps = tuple(sorted(snapshots)), tuple(sorted(early))
            self._write_mark(dataclasses.replace(self._mark, snapshots=steps[0], early=steps[1]))

    @contextlib.contextmanager
    def reading_snapshot(self, step: int) -> Iterator[None]:
        """Read a snapshot in a `with` block; if it is damaged, tell the launcher.

        The launcher then chooses an older snapshot.

        Args:
          step: the step of the snapshot.

        Raises:
          DamagedSnapshotError: the snapshot is damaged.
        """
        try:
            yield
        except DamagedError as e:
            with self._lock:
                self._write_mark(self.mark().without_snapshot(step))
            raise DamagedSnapshotError(
                f"{self._role} cannot read the snapshot of step {step}: {e}; the job continues "
                "from the newest older snapshot if `dtrans launch` may start roles again, "
                "otherwise start the job again with --resume"
            ) from e

    def of_lost(self, role: str, generation: int) -> RoleFolder:
        """Return the folder of a lost server, for a server that writes its state from a replica.

        The methods of the result raise ReplacedError when a new process of the lost server has
        started.

        Args:
          role: name of the lost server.
          generation: number of the generation (the time between two failures) that ends now.
        """
        folder = RoleFolder(self.path, role, generation)
        folder._mark = folder.mark()
        return folder

    def has_written(self, step: int) -> bool:
        """Return True if this role has written its part of the snapshot of a step."""
        return step in self._mark.snapshots or step in self._mark.early

    def remove_part(self, step: int) -> None:
        """Remove this role's part of a snapshot that it could not write completely.

        Args:
          step: the step of the snapshot. The role has not reported this snapshot.

        Raises:
          ReplacedError: the launcher has started another process of this role.
        """
        self.current()
        self._remove_part(step)

    def note_end(self, generation: int, lost: Collection[str] = ()) -> None:
        """Tell the launcher that this server has written its newest state, after a failure.

        Args:
          generation: number of the generation (the time between two failures) that ended with this
            failure.
          lost: names of the lost servers. Copies of their states on this server are written, too.
        """
        with self._lock:
            if generation == self._mark.generation:
                mark = dataclasses.replace(self._mark, ended=generation, ended_for=tuple(lost))
                self._write_mark(mark)

    def note_snapshot_alone(self, step: int, counts: Sequence[int]) -> list[int]:
        """Tell the launcher that this asynchronous server has written a snapshot of itself.

        Args:
          step: the step of the snapshot. Steps increase.
          counts: number of steps of each trainer in the snapshot.

        Returns:
          The steps of older snapshots, which the server may remove.
        """
        with self._lock:
            old = list(self._mark.snapshots)
            new = dataclasses.replace(self._mark, snapshots=(step,), counts=tuple(counts))
            self._write_mark(new)
        return old

    def drop_snapshots(self, generation: int, before: int) -> list[int]:
        """Tell the launcher that this role removes its snapshots before a step.

        Snapshots to which other roles have not added their parts are removed, too. The snapshot
        with which the current generation (the time since the last failure) began stays, since this
        role may have to load it. This method only changes the report; the caller removes the files.

        Args:
          generation: number of the role's generation. If the launcher has started a newer
            generation, no snapshot is removed.
          before: the step.

        Returns:
          The steps of the snapshots to remove.
        """
        with self._lock:
            granted = self.current()
            if granted.number != generation or self._mark.generation != generation:
                return []
            written = {*self._mark.snapshots, *self.steps()}
            old = sorted(x for x in written if x < before and x != granted.snapshot)
            snapshots = tuple(x for x in self._mark.snapshots if x not in old)
            if snapshots != self._mark.snapshots:
                self._write_mark(dataclasses.replace(self._mark, snapshots=snapshots))
        return old

    def remove_old_snapshots(self, generation: int, servers: Collection[str]) -> None:
        """Remove the snapshots that no failure can need any more, to save space.

        The two newest complete snapshots stay.

        Args:
          generation, servers: as for `drop_snapshots` and `newest_snapshot`.
        """
        for step in self.drop_snapshots(generation, self.old_snapshot(servers)):
            shutil.rmtree(self.path / str(step), ignore_errors=True)

    def note_no_snapshots(self) -> None:
        """Tell the launcher that this server writes no snapshots."""
        (self.path / WITHOUT_SNAPSHOTS).touch()

    def leave(self) -> None:
        """Tell the launcher that this role has left the job after its last step."""
        with self._lock:
            self._write_mark(dataclasses.replace(self._mark, left=True))

    def report_lost(self, generation: int, role: str, reason: str) -> None:
        """Tell the launcher that this role has lost its connection to another role.

        The launcher then kills the other role if it still runs, and may start it again.

        Args:
          generation: number of the current generation (the time since the last failure of the job).
          role: "trainer 1", or "pserver " and its endpoint.
          reason: text of the error.
        """
        fields = {"generation": generation, "role": role, "reason": reason}
        try:
            write_json(self.path / "lost" / self._role, fields)
        # only logged: without this report no generation follows, and the caller then raises the
        # error of the lost connection
        except OSError as e:
            log.warning("%s cannot report to the launcher that %s is lost: %s", self._role, role, e)

    def _remove_part(self, step: int) -> None:
        """Remove this role's part of the snapshot of a step, also if it is incomplete."""
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
                f"folder of snapshots {self.path}: {e.strerror or e}; free space there, or allow "
                "this process to write there. The complete snapshots are unchanged: after the end "
                "of the job, start the launcher again with the same folder"
            ) from e
        self._mark = mark

    @property
    def _slug(self) -> str:
        """Name of this role in file names, such as "pserver-0" for the role "pserver 0"."""
        return self._role.replace(" ", "-")
