"""Folder in which a launcher and the roles of a job agree on epochs and cuts (snapshots).

    epoch.json      the launcher: the job's run and its current epoch
    epochs.jsonl    the launcher: all epochs of the job (`dtrans.run.net.epoch_log`)
    launch.json     the launcher: its command line (`dtrans.run.distributed.restarts.launch_record`)
    roles/ROLE      each role: the epoch in which it takes part, and its written cuts
    lost/ROLE       each role: the last role that it has lost
    without-cuts    a server: it has begun to serve, and writes no cuts
    STEP/           each synchronous server: its piece of the cut of a step, as a checkpoint. Each
                    trainer: the leaves that it computes itself, if there are any
    pserver-0/STEP/ an asynchronous server: its cut
    trainer-0/      a trainer of GEO-SGD: its cut (`STEP.npz`)

The launcher is the only authority on epochs: roles read `epoch.json` and never write it.

    EpochFolder     reads the folder, in the launcher and in roles
    LauncherFolder  also writes the files of the launcher (`dtrans.run.net.launcher_folder`)
    RoleFolder      also writes the files of one role (`dtrans.run.net.role_folder`)

`dtrans.run.net.shared_files` writes and reads the files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dtrans.errors import ConfigError
from dtrans.protocol.epochs import Epoch
from dtrans.run.net.role_marks import (
    LostReport,
    RoleMark,
    complete_cuts,
    mark_of,
    newest_alone,
    old_cut,
    without_undone,
)
from dtrans.run.net.shared_files import read_all_json, read_json


# Environment variables that the launcher sets: the path of the folder, and the epoch in which the
# process was started
VARIABLE, STARTED = "DTRANS_CUTS", "DTRANS_CUTS_STARTED"
WITHOUT_CUTS = "without-cuts"


class EpochFolder:
    """Shared folder of a job that survives failures: reads its epochs and its cuts.

    A *cut* is a snapshot of the states of all servers. An *epoch* is the time between two failures
    of the job; it also ends when a dropped trainer returns. At the start of an epoch, roles go back
    to a cut.

    Args:
      path: the folder, which all roles and the launcher see.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Remove "..", as `dtrans.hosts.host_check` does, so that both look at the same folder.
        self.path = Path(os.path.abspath(path))

    @property
    def is_used(self) -> bool:
        """True if a job has started in this folder, and has not ended without an error."""
        return (self.path / "epoch.json").exists()

    def current(self) -> Epoch:
        """Return the current epoch of the job (the time since its last failure).

        It names the cut (snapshot) with which the epoch began, and the dropped trainers.

        Raises:
          ConfigError: the folder has no epoch, since no launcher uses it.
        """
        return epoch_of(self._granted())

    @property
    def run(self) -> str:
        """Identifier of the job. It is also in the files of each cut (snapshot) of the job."""
        return str(self._granted()["run"])

    @property
    def launch(self) -> int:
        """Number of the first epoch of the current launcher; it distinguishes successive launchers.

        An epoch is the time between two failures. If a launcher is killed, another one continues
        the job with the next epoch.
        """
        return int(self._granted().get("launch", 0))

    @property
    def trainers(self) -> int:
        """Number of trainers of the job."""
        return int(self._granted()["trainers"])

    @property
    def on_trainer_loss(self) -> str:
        """Reaction of the launcher to the failure of a trainer: the argument of `launch`."""
        return str(self._granted().get("on_trainer_loss", "restart"))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of the job's servers."""
        return tuple(self._granted()["endpoints"])

    def steps(self) -> list[int]:
        """Return the steps at which servers have begun to write cuts (snapshots), increasing.

        Only synchronous servers count. A cut is incomplete until every server has written its part.
        """
        names = [] if not self.path.is_dir() else os.listdir(self.path)
        return sorted(int(name) for name in names if name.isdecimal())

    def marks(self) -> dict[str, RoleMark]:
        """Return the last report of each role to the launcher, by the role's name.

        A report has the role's epoch (the time between two failures) and the cuts (snapshots) it
        has written.
        """
        files = read_all_json(self.path / "roles")
        return {name: mark_of(fields) for name, fields in files.items()}

    def lost(self, epoch: int) -> list[LostReport]:
        """Return the reports of roles that have lost another role, in the order of the reporters'
        names.

        Args:
          epoch: number of an epoch (the time between two failures). Reports of other epochs are
            left out.
        """
        files = read_all_json(self.path / "lost")
        reports = [LostReport(reporter, **fields) for reporter, fields in files.items()]
        return [report for report in reports if report.epoch == epoch]

    @property
    def lacks_cuts(self) -> bool:
        """True if this job can never go back after a failure, because a server writes no cuts
        (snapshots).
        """
        return (self.path / WITHOUT_CUTS).exists() and not self.marks()

    def newest_cut(
        self, servers: Collection[str], dropped: Collection[int] | None = None
    ) -> int | None:
        """Return the step of the newest complete cut (snapshot of all servers); None without one.

        After a failure, the job goes back to this step. A cut is complete if every server has
        written its part. If trainers write parts of cuts, every trainer that was not dropped has
        written its part, too. A role that has not entered the current epoch (the time since the
        last failure) may report cuts after the epoch's first step. The job has undone the steps of
        these cuts, so they do not count.

        Args:
          servers: names of all servers.
          dropped: ids of the dropped trainers; None for the trainers that are dropped in the
            current epoch.
        """
        return max(self._complete_cuts(servers, dropped), default=None)

    def old_cut(self, servers: Collection[str]) -> int:
        """Return the step of the second newest complete cut (snapshot); 0 if there is none."""
        return old_cut(self._complete_cuts(servers))

    def cuts_alone(self, servers: Collection[str]) -> tuple[int, ...]:
        """Return the step of the newest cut (snapshot) of each asynchronous server.

        Asynchronous servers write cuts at different steps, and each goes back to its own. The
        result is empty if a server has no cut, or the servers are synchronous.

        Args:
          servers: names of all servers.
        """
        return newest_alone(self.marks(), servers)

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

    def _granted(self) -> dict[str, Any]:
        try:
            return read_json(self.path / "epoch.json")
        except FileNotFoundError as e:
            raise ConfigError(
                f"{VARIABLE}={self.path} has no epoch.json; if `dtrans launch --cuts` has set this "
                "variable, mount the folder on this host, otherwise unset the variable"
            ) from e


def epoch_of(fields: Mapping[str, Any]) -> Epoch:
    """Return an epoch (part of a job between failures) from the contents of its file."""
    dropped, is_ending = tuple(fields.get("dropped", ())), fields.get("is_ending", False)
    lost, started = tuple(fields.get("lost", ())), fields.get("started", {})
    trainers = range(fields.get("trainers", 0))
    incarnations = tuple(started.get(f"trainer {k}", 0) for k in trainers)
    return Epoch(
        fields["number"],
        fields["cut"],
        is_ending=is_ending,
        dropped=dropped,
        lost=lost,
        incarnations=incarnations,
        members_since=fields.get("members_since", 0),
        left=tuple(fields.get("left", ())),
    )
