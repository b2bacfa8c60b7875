"""Folder in which a launcher and the roles of a job agree on generations and snapshots.

A *generation* is the time between two failures of the job. A *snapshot* is a copy of the servers'
states, from which the next generation continues.

    generation.json      the launcher: the job's run and its current generation
    generations.jsonl    the launcher: all generations of the job (`dtrans.run.net.generation_log`)
    launch.json          the launcher: its command line
                         (`dtrans.run.distributed.restarts.launch_record`)
    roles/ROLE           each role: the generation in which it takes part, and its written snapshots
    lost/ROLE            each role: the last role that it has lost
    without-snapshots    a server: it has begun to serve, and writes no snapshots
    STEP/                each synchronous server: its piece of the snapshot of a step, as a
                         checkpoint. Each trainer: the leaves that it computes itself, if there are
                         any
    pserver-0/STEP/      an asynchronous server: its snapshot
    trainer-0/           a trainer of GEO-SGD: its snapshot (`STEP.npz`)

The launcher is the only authority on generations: roles read `generation.json` and never write it.

    GenerationFolder    reads the folder, in the launcher and in roles
    LauncherFolder      also writes the files of the launcher (`dtrans.run.net.launcher_folder`)
    RoleFolder          also writes the files of one role (`dtrans.run.net.role_folder`)

`dtrans.run.net.shared_files` writes and reads the files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dtrans.errors import ConfigError
from dtrans.protocol.generations import Generation
from dtrans.run.net.role_marks import (
    LostReport,
    RoleMark,
    complete_snapshots,
    mark_of,
    newest_alone,
    old_snapshot,
    without_undone,
)
from dtrans.run.net.shared_files import read_all_json, read_json


# Environment variables that the launcher sets: the path of the folder, and the generation in which
# the process was started
VARIABLE, STARTED = "DTRANS_SNAPSHOTS", "DTRANS_SNAPSHOTS_STARTED"
WITHOUT_SNAPSHOTS = "without-snapshots"


class GenerationFolder:
    """Shared folder of a job that survives failures: reads its generations and its snapshots.

    A *snapshot* is a copy of the states of all servers. A *generation* is the time between two
    failures of the job; it also ends when a dropped trainer returns. At the start of a generation,
    roles load a snapshot.

    Args:
      path: the folder, which all roles and the launcher see.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Remove "..", as `dtrans.hosts.host_check` does, so that both look at the same folder.
        self.path = Path(os.path.abspath(path))

    @property
    def is_used(self) -> bool:
        """True if a job has started in this folder, and is still running or has failed."""
        return (self.path / "generation.json").exists()

    def current(self) -> Generation:
        """Return the current generation of the job (the time since its last failure).

        It names the snapshot with which the generation began, and the dropped trainers.

        Raises:
          ConfigError: the folder has no generation, since no launcher uses it.
        """
        return generation_of(self._granted())

    @property
    def run(self) -> str:
        """Identifier of the job. It is also in the files of each snapshot of the job."""
        return str(self._granted()["run"])

    @property
    def launch(self) -> int:
        """Number of the first generation of the current launcher, which identifies the launcher.

        A generation is the time between two failures. If a launcher is killed, another one
        continues the job with the next generation.
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
        """Return the steps at which servers have begun to write snapshots, increasing.

        Only synchronous servers count. A snapshot is incomplete until every server has written its
        part.
        """
        names = [] if not self.path.is_dir() else os.listdir(self.path)
        return sorted(int(name) for name in names if name.isdecimal())

    def marks(self) -> dict[str, RoleMark]:
        """Return the last report of each role to the launcher, by the role's name.

        A report has the role's generation (the time between two failures) and the snapshots it has
        written.
        """
        files = read_all_json(self.path / "roles")
        return {name: mark_of(fields) for name, fields in files.items()}

    def lost(self, generation: int) -> list[LostReport]:
        """Return the reports of roles that have lost another role, in the order of the reporters'
        names.

        Args:
          generation: number of a generation (the time between two failures). Reports of other
            generations are left out.
        """
        files = read_all_json(self.path / "lost")
        reports = [LostReport(reporter, **fields) for reporter, fields in files.items()]
        return [report for report in reports if report.generation == generation]

    @property
    def lacks_snapshots(self) -> bool:
        """True if this job can never go back after a failure: a server writes no snapshots."""
        return (self.path / WITHOUT_SNAPSHOTS).exists() and not self.marks()

    def newest_snapshot(
        self, servers: Collection[str], dropped: Collection[int] | None = None
    ) -> int | None:
        """Return the step of the newest complete snapshot of all servers; None without one.

        After a failure, the job goes back to this step. A snapshot is complete if every server has
        written its part. If trainers write parts of snapshots, every trainer that was not dropped
        has written its part, too. Snapshots of steps that the job has undone do not count. A role
        may still report such snapshots, until it takes part in the current generation (the time
        since the last failure).

        Args:
          servers: names of all servers.
          dropped: ids of the dropped trainers; None for the trainers that are dropped in the
            current generation.
        """
        return max(self._complete_snapshots(servers, dropped), default=None)

    def old_snapshot(self, servers: Collection[str]) -> int:
        """Return the step of the second newest complete snapshot; 0 if there is none."""
        return old_snapshot(self._complete_snapshots(servers))

    def snapshots_alone(self, servers: Collection[str]) -> tuple[int, ...]:
        """Return the step of the newest snapshot of each asynchronous server.

        Asynchronous servers write snapshots at different steps, and each continues from its own.
        The result is empty if a server has no snapshot, or if the servers are synchronous.

        Args:
          servers: names of all servers.
        """
        return newest_alone(self.marks(), servers)

    def _complete_snapshots(
        self, servers: Collection[str], dropped: Collection[int] | None = None
    ) -> set[int]:
        marks, roles = self.marks(), {*servers}
        if self.is_used:
            granted = self._granted()
            marks = without_undone(marks, granted["number"], granted["snapshot"])
        if any(name in marks and marks[name].with_trainers for name in servers):
            out = self.current().dropped if dropped is None else dropped
            roles |= {f"trainer {k}" for k in range(self.trainers) if k not in out}
        return complete_snapshots(marks, roles)

    def _granted(self) -> dict[str, Any]:
        try:
            return read_json(self.path / "generation.json")
        except FileNotFoundError as e:
            raise ConfigError(
                f"{VARIABLE}={self.path} has no generation.json; if `dtrans launch --snapshots` "
                "has set this variable, mount the folder on this host, otherwise unset the variable"
            ) from e


def generation_of(fields: Mapping[str, Any]) -> Generation:
    """Return a generation (part of a job between failures) from the contents of its file."""
    dropped, is_ending = tuple(fields.get("dropped", ())), fields.get("is_ending", False)
    lost, started = tuple(fields.get("lost", ())), fields.get("started", {})
    trainers = range(fields.get("trainers", 0))
    incarnations = tuple(started.get(f"trainer {k}", 0) for k in trainers)
    return Generation(
        fields["number"],
        fields["snapshot"],
        is_ending=is_ending,
        dropped=dropped,
        lost=lost,
        incarnations=incarnations,
        members_since=fields.get("members_since", 0),
        left=tuple(fields.get("left", ())),
    )
