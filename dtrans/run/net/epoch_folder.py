"""Folder in which a launcher and the roles of a job agree on epochs and cuts.

    epoch.json      the launcher: the job's run and its current epoch
    epochs.jsonl    the launcher: all epochs of the job (`dtrans.run.net.epoch_log`)
    launch.json     the launcher: its command line (`dtrans.run.distributed.launch_record`)
    roles/ROLE      each role: the epoch in which it takes part, and its written cuts
    lost/ROLE       each role: the last role that it has lost
    without-cuts    a server: it has begun to serve, and writes no cuts
    STEP/           each synchronous server: its piece of the cut of a step, as a checkpoint. Each
                    trainer: the leaves that it computes itself, if there are any
    pserver-0/STEP/ an asynchronous server: its own cut
    trainer-0/      a trainer of GEO-SGD: its own cut (`STEP.npz`)

A file is written under another name and renamed, so readers see complete files only. The launcher
is the only authority on epochs: roles read `epoch.json` and never write it.

The launcher and the roles may be on several hosts that share the folder by NFS. Each read opens
the file again, so that it returns what another host has written and closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dtrans.errors import ConfigError
from dtrans.protocol.epochs import Epoch, ReplacedError
from dtrans.run.net.role_marks import (
    LostReport,
    RoleMark,
    complete_cuts,
    mark_of,
    newest_alone,
    without_undone,
)


# Environment variables that the launcher sets: the path of the folder, and the epoch in which the
# process was started
VARIABLE, STARTED = "DTRANS_CUTS", "DTRANS_CUTS_STARTED"
LAUNCH = "launch.json"
WITHOUT_CUTS = "without-cuts"
TRIES = 100  # reads of a file that another host may replace meanwhile
log = logging.getLogger(__name__)


class EpochFolder:
    """Epochs and cuts of a job, in a folder.

    Args:
      path: the folder, which all roles and the launcher see.
      role: name of this process's role; empty in the launcher.
      started: number of the epoch in which this process was started.

    Example:
      >>> import tempfile
      >>> from dtrans.protocol.epochs import Epoch
      >>> from dtrans.run.net.epoch_folder import EpochFolder
      >>> with tempfile.TemporaryDirectory() as path:
      ...     launcher, server = EpochFolder(path), EpochFolder(path, "pserver 0")
      ...     launcher.grant(Epoch(), run="a run")
      ...     server.enter(server.current())
      ...     server.note_cut(0, 20)
      ...     launcher.grant(Epoch(1, launcher.newest_cut(["pserver 0"])), run="a run")
      ...     print(server.current().number, server.current().cut)
      1 20
    """

    def __init__(self, path: str | os.PathLike[str], role: str = "", started: int = 0) -> None:
        # without "..", as the check of hosts looks for the folder
        self.path = Path(os.path.abspath(path))
        self._role, self._started = role, started
        self._mark = RoleMark()
        self._lock = threading.Lock()  # a server writes cuts in another thread

    @classmethod
    def from_environment(
        cls, role: str, environ: Mapping[str, str] = os.environ
    ) -> EpochFolder | None:
        """Return the folder that the launcher has set; None without one."""
        path = environ.get(VARIABLE)
        return cls(path, role, int(environ.get(STARTED, 0))) if path else None

    @property
    def _slug(self) -> str:
        """Name of this role in the names of files and folders."""
        return self._role.replace(" ", "-")

    def environment(self, started: int) -> dict[str, str]:
        """Return the environment variables that the launcher sets for a role.

        Args:
          started: number of the epoch in which the role's process is started.
        """
        return {VARIABLE: str(self.path), STARTED: str(started)}

    @property
    def is_used(self) -> bool:
        """True if a launcher has granted an epoch in this folder."""
        return (self.path / "epoch.json").exists()

    def steps(self) -> list[int]:
        """Return the steps of all cuts of synchronous servers, also of incomplete ones."""
        names = [] if not self.path.is_dir() else os.listdir(self.path)
        return sorted(int(name) for name in names if name.isdecimal())

    # -- the launcher ----------------------------------------------------------------------------

    def grant(
        self,
        epoch: Epoch,
        run: str,
        trainers: int = 0,
        endpoints: Sequence[str] = (),
        started: Mapping[str, int] = {},
        *,
        drops_trainers: bool = False,
    ) -> None:
        """Begin an epoch. The file is flushed to the disk before the method returns.

        `run`, `trainers` and `endpoints` are the same in all epochs of a job.

        Args:
          epoch: the epoch.
          run: identifier of the job.
          trainers: number of trainers.
          endpoints: endpoints of the servers. Pieces of cuts and checkpoints contain them.
          started: for each role, the number of the epoch in which its process was started. Earlier
            processes of the role, on a host that the launcher has lost, end when they read it.
          drops_trainers: True if the launcher may drop lost trainers.
        """
        job: dict[str, Any] = {"run": run, "trainers": trainers, "endpoints": list(endpoints)}
        job |= {"started": dict(started), "drops_trainers": drops_trainers}
        _write(self.path / "epoch.json", {**dataclasses.asdict(epoch), **job})

    def announce_end(self, lost: Collection[str] = ()) -> None:
        """Tell servers that the current epoch is ending, so that they write their newest states.

        Args:
          lost: names of the lost servers, whose replicas other servers write.
        """
        ending = {"is_ending": True, "lost": list(lost)}
        _write(self.path / "epoch.json", {**self._granted(), **ending})

    @property
    def trainers(self) -> int:
        """Number of trainers of the job."""
        return int(self._granted()["trainers"])

    @property
    def drops_trainers(self) -> bool:
        """True if the launcher may drop lost trainers."""
        return bool(self._granted().get("drops_trainers"))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of the job's servers."""
        return tuple(self._granted()["endpoints"])

    def clear(self) -> None:
        """Remove all files of a job that has ended without an error."""
        (self.path / "epoch.json").unlink()
        for name in (LAUNCH, WITHOUT_CUTS):
            (self.path / name).unlink(missing_ok=True)
        for path in self.path.iterdir():  # the log of epochs stays
            has_cuts = path.name.isdecimal() or path.name.startswith(("pserver-", "trainer-"))
            if path.name in ("roles", "lost") or has_cuts:
                shutil.rmtree(path)

    def remove_other_cuts(self, cut: int | None) -> None:
        """Remove all cuts of synchronous servers, except the newest complete one.

        Args:
          cut: step of the newest complete cut; None without one.
        """
        for step in self.steps():
            if step != cut:
                shutil.rmtree(self.path / str(step), ignore_errors=True)

    def forget_marks(self) -> None:
        """Remove the reports of all roles, and the cuts of trainers alone, while no role runs."""
        for path in (self.path / "roles", self.path / "lost", *self.path.glob("trainer-*")):
            shutil.rmtree(path, ignore_errors=True)
        (self.path / WITHOUT_CUTS).unlink(missing_ok=True)

    @property
    def lacks_cuts(self) -> bool:
        """True if a server writes no cuts, and no role has written a report."""
        return (self.path / WITHOUT_CUTS).exists() and not self.marks()

    def marks(self) -> dict[str, RoleMark]:
        """Return the last report of each role, by name."""
        files = _read_all(self.path / "roles")
        return {name: mark_of(fields) for name, fields in files.items()}

    def newest_cut(
        self, servers: Collection[str], dropped: Collection[int] | None = None
    ) -> int | None:
        """Return the step of the newest complete cut; None if there is none.

        A cut is complete if every server has written its piece. If trainers write parts of cuts,
        every trainer that was not dropped has written its part, too. A role that has not entered
        the current epoch may report cuts after the epoch's cut. The job has undone their steps, so
        these cuts do not count.

        Args:
          servers: names of all servers.
          dropped: ids of the dropped trainers; None for those of the current epoch.
        """
        return max(self._complete_cuts(servers, dropped), default=None)

    def cuts_alone(self, servers: Collection[str]) -> tuple[int, ...]:
        """Return the newest cut of each server, if all are asynchronous and have one; else ().

        Args:
          servers: names of all servers.
        """
        return newest_alone(self.marks(), servers)

    def lost(self, epoch: int) -> list[LostReport]:
        """Return the reports of lost roles in an epoch, in the order of the reporters' names."""
        files = _read_all(self.path / "lost")
        reports = [LostReport(reporter, **fields) for reporter, fields in files.items()]
        return [report for report in reports if report.epoch == epoch]

    # -- a role ----------------------------------------------------------------------------------

    def current(self) -> Epoch:
        """Return the epoch that the launcher has granted last.

        Raises:
          ConfigError: the folder has no epoch, since no launcher uses it.
          ReplacedError: the launcher has started another process of this role, or has dropped it.
        """
        fields = self._granted()
        dropped, is_ending = tuple(fields.get("dropped", ())), fields.get("is_ending", False)
        lost = tuple(fields.get("lost", ()))
        epoch = Epoch(fields["number"], fields["cut"], is_ending, dropped, lost)
        if fields.get("started", {}).get(self._role, 0) > self._started:
            what = "has started another one"
            if self._role in [f"trainer {k}" for k in epoch.dropped]:
                what = "the job continues without it"
            raise ReplacedError(
                f"the launcher has lost this process of {self._role}, and {what}; this process ends"
            )
        return epoch

    @property
    def run(self) -> str:
        """Identifier of the job, which marks the pieces of its cuts."""
        return str(self._granted()["run"])

    def enter(
        self,
        epoch: Epoch,
        *,
        with_trainers: bool = False,
        writes_newest: bool = False,
        writes_replicas: bool = False,
    ) -> None:
        """Tell the launcher that this role takes part in an epoch.

        The role forgets its cuts after the epoch's cut, so that the job never skips steps. It also
        removes their files. Otherwise a later cut of the same step could contain a part that an
        earlier launch with another script has written.

        Args:
          epoch: the epoch.
          with_trainers: in a server, True if trainers write parts of its cuts, too.
          writes_newest: in a server, True if it writes its newest states when the epoch is ending.
          writes_replicas: in a server, True if it then also writes those of a lost server.
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
        """Tell the launcher that this asynchronous server takes part in an epoch, with its cuts."""
        with self._lock:
            before = self.mark()
            mark = RoleMark(epoch.number, before.cuts, is_alone=True, counts=before.counts)
            self._write_mark(mark)

    def mark(self) -> RoleMark:
        """Return the last report of this role, which an earlier process may have written."""
        return mark_of(_read_all(self.path / "roles").get(self._role, {}))

    @property
    def entered(self) -> int:
        """Number of the epoch that this process has entered last."""
        return self._mark.epoch

    @property
    def newest_written(self) -> int | None:
        """Step of the newest cut that this process knows to be written; None without one."""
        return max(self._mark.cuts, default=None)

    def note_cut(self, epoch: int, step: int) -> None:
        """Tell the launcher that this role has written its part of a cut.

        Args:
          epoch: number of the epoch in which the cut was taken. Cuts of older epochs are ignored.
          step: the step of the cut.
        """
        with self._lock:
            if epoch == self._mark.epoch:
                cuts = sorted({*self._mark.cuts, step})
                self._write_mark(dataclasses.replace(self._mark, cuts=tuple(cuts)))

    def of_lost(self, role: str, epoch: int) -> EpochFolder:
        """Return the folder as a lost role sees it, to write its part of a cut in its place.

        Its methods raise ReplacedError when the launcher has started another process of the role.

        Args:
          role: name of the lost role.
          epoch: number of the ending epoch.
        """
        folder = EpochFolder(self.path, role, epoch)
        folder._mark = folder.mark()
        return folder

    def has_written(self, step: int) -> bool:
        """Return True if this role has written its part of the cut of a step."""
        return step in self._mark.cuts

    def remove_part(self, step: int) -> None:
        """Remove this role's part of the cut of a step, which the role has not reported.

        Raises:
          ReplacedError: the launcher has started another process of this role.
        """
        self.current()
        self._remove_part(step)

    def note_end(self, epoch: int, lost: Collection[str] = ()) -> None:
        """Tell the launcher that this server has written its newest states.

        Args:
          epoch: number of the epoch that is ending.
          lost: names of the lost servers. Their replicas on this server are written, too.
        """
        with self._lock:
            if epoch == self._mark.epoch:
                mark = dataclasses.replace(self._mark, ended=epoch, ended_for=tuple(lost))
                self._write_mark(mark)

    def note_cut_alone(self, step: int, counts: Sequence[int]) -> list[int]:
        """Tell the launcher that this asynchronous server has written a cut.

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
        """Tell the launcher that this role removes all cuts before a step; return their steps.

        Some of these cuts are incomplete, because only some roles have written their parts.
        The cut of the current epoch stays, since this role may have to load it.

        Args:
          epoch: number of the role's epoch. If the launcher has granted a newer one, all stay.
          before: the step.
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
        """Remove all cuts before the second newest complete one.

        Args:
          epoch, servers: as for `drop_cuts` and `newest_cut`.
        """
        for step in self.drop_cuts(epoch, self.old_cut(servers)):
            shutil.rmtree(self.path / str(step), ignore_errors=True)

    def note_no_cuts(self) -> None:
        """Tell the launcher that this server writes no cuts."""
        (self.path / WITHOUT_CUTS).touch()

    def leave(self) -> None:
        """Tell the launcher that this role has left the job after its last step."""
        with self._lock:
            self._write_mark(dataclasses.replace(self._mark, left=True))

    def report_lost(self, epoch: int, role: str, reason: str) -> None:
        """Tell the launcher that this role has lost another role in an epoch.

        Args:
          epoch: number of the epoch.
          role: "trainer 1", or "pserver " and its endpoint.
          reason: text of the error.
        """
        fields = {"epoch": epoch, "role": role, "reason": reason}
        try:
            _write(self.path / "lost" / self._role, fields)
        except OSError as e:  # the caller raises its error when no epoch follows
            log.warning("%s cannot report to the launcher that %s is lost: %s", self._role, role, e)

    def _complete_cuts(
        self, servers: Collection[str], dropped: Collection[int] | None = None
    ) -> set[int]:
        marks, roles = self.marks(), {*servers}
        if self.is_used:
            granted = self._granted()
            marks = without_undone(marks, granted["number"], granted["cut"])
        if any(name in marks and marks[name].with_trainers for name in servers):
            out = self.current().dropped if dropped is None else dropped
            roles |= {f"trainer {k}" for k in range(self.trainers) if k not in out}
        return complete_cuts(marks, roles)

    def old_cut(self, servers: Collection[str]) -> int:
        """Return the second newest complete cut; 0 if there is none.

        Roles may remove older cuts: the launcher chooses the newest one, and the second newest one
        covers a choice that is made while roles write.
        """
        common = sorted(self._complete_cuts(servers))
        return common[-2] if len(common) > 1 else 0

    def _remove_part(self, step: int) -> None:
        """Remove this role's part of the cut of a step, also if it is incomplete."""
        for path in (self.path / str(step)).glob("*"):
            # writers use temporary names such as pserver-0.tmp and .trainer-0.npz
            if path.name.lstrip(".").partition(".")[0] != self._slug:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _write_mark(self, mark: RoleMark) -> None:
        """Write the report of this role; raise ReplacedError in a process that was replaced."""
        if self.is_used:
            self.current()
        self._mark = mark
        _write(self.path / "roles" / self._role, dataclasses.asdict(mark))

    def _granted(self) -> dict[str, Any]:
        try:
            return _read(self.path / "epoch.json")
        except FileNotFoundError as e:
            raise ConfigError(
                f"{VARIABLE}={self.path} has no epoch.json; if `dtrans launch --cuts` has set this "
                "variable, mount the folder on this host, otherwise unset the variable"
            ) from e


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    write_file(path, lambda file: file.write(json.dumps(fields).encode()))


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file and flush it to the disk, so that a crash leaves the old or the new file.

    Args:
      path: the file. Its folder is created if it does not exist.
      write: writes the contents to an open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}")
    with new.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def _read(path: Path) -> dict[str, Any]:
    for number in range(TRIES):
        try:
            return dict(json.loads(path.read_text()))
        except OSError as e:
            # On NFS, another host may replace a file while this one reads it.
            if e.errno != errno.ESTALE or number == TRIES - 1:
                raise
    raise AssertionError("unreachable: the last try either returns or raises an error")


def _read_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of all files in a folder, by name in sorted order."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if not path.name.startswith("."):
                found[path.name] = _read(path)
    return found
