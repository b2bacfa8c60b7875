"""Launcher's files in the shared folder of a job that survives failures.

The launcher starts each generation (the time between two failures), and names the snapshot with
which it begins. `dtrans.run.net.generation_folder` lists the files of the folder.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dtrans.protocol.generations import Generation
from dtrans.run.net.generation_folder import STARTED, VARIABLE, WITHOUT_SNAPSHOTS, GenerationFolder
from dtrans.run.net.shared_files import write_json


LAUNCH = "launch.json"


class LauncherFolder(GenerationFolder):
    """Shared folder of a job that survives failures, as the launcher sees it.

    The launcher starts ("grants") each generation, which is the time between two failures. A
    generation begins at a snapshot of all servers.

    Example:
      >>> import tempfile
      >>> from dtrans.protocol.generations import Generation
      >>> from dtrans.run.net.launcher_folder import LauncherFolder
      >>> from dtrans.run.net.role_folder import RoleFolder
      >>> with tempfile.TemporaryDirectory() as path:
      ...     launcher, server = LauncherFolder(path), RoleFolder(path, "pserver 0")
      ...     launcher.grant(Generation(), run="a run")
      ...     server.enter(server.current())
      ...     server.note_snapshot(0, 20)
      ...     launcher.grant(Generation(1, launcher.newest_snapshot(["pserver 0"])), run="a run")
      ...     print(server.current().number, server.current().snapshot)
      1 20
    """

    def environment(self, started: int) -> dict[str, str]:
        """Return the environment variables by which a role finds this folder.

        Args:
          started: number of the generation (the time between two failures) in which the role's
            process is started. A role with an older number learns that another process has replaced
            it.
        """
        return {VARIABLE: str(self.path), STARTED: str(started)}

    def grant(
        self,
        generation: Generation,
        run: str,
        trainers: int = 0,
        endpoints: Sequence[str] = (),
        started: Mapping[str, int] = {},
        *,
        launch: int = 0,
        on_trainer_loss: str = "restart",
    ) -> None:
        """Start a new generation (the time until the next failure).

        The method writes the file from which all roles learn about the generation, and flushes it
        to disk. `run`, `trainers` and `endpoints` are the same in all generations of a job.

        Args:
          generation: the generation.
          run: identifier of the job.
          trainers: number of trainers.
          endpoints: endpoints of the servers. Pieces of snapshots and checkpoints
            contain them.
          started: for each role, the number of the generation in which its process was started. An
            earlier process of the role, on a host that the launcher has lost, ends when it reads
            this number.
          launch: number of the launcher's first generation.
          on_trainer_loss: the launcher's reaction to the failure of a trainer; see `launch`.
        """
        job: dict[str, Any] = {"run": run, "trainers": trainers, "endpoints": list(endpoints)}
        job |= {"started": dict(started), "launch": launch, "on_trainer_loss": on_trainer_loss}
        write_json(self.path / "generation.json", {**dataclasses.asdict(generation), **job})

    def announce_end(self, lost: Collection[str] = ()) -> None:
        """Ask servers to write their newest states as snapshots, after a failure.

        Args:
          lost: names of the lost servers. Other servers write their copies of the lost servers'
            states, if they have any.
        """
        ending = {"is_ending": True, "lost": list(lost)}
        write_json(self.path / "generation.json", {**self._granted(), **ending})

    def clear(self) -> None:
        """Remove all files of a job that has ended without an error."""
        (self.path / "generation.json").unlink()
        for name in (LAUNCH, WITHOUT_SNAPSHOTS):
            (self.path / name).unlink(missing_ok=True)
        for path in self.path.iterdir():  # the log of generations stays
            has_snapshots = path.name.isdecimal() or path.name.startswith(("pserver-", "trainer-"))
            if path.name in ("roles", "lost") or has_snapshots:
                shutil.rmtree(path)

    def remove_other_snapshots(self, snapshot: int | None) -> None:
        """Remove all snapshots of synchronous servers except one, if the disk is full.

        Args:
          snapshot: step of the newest complete snapshot, which stays; None to remove all.
        """
        for step in self.steps():
            if step != snapshot:
                shutil.rmtree(self.path / str(step), ignore_errors=True)

    def forget_marks(self) -> None:
        """Remove the reports of roles, and the snapshots of GEO-SGD trainers.

        The launcher calls this while no role runs, before the job begins again with its first
        state. Otherwise a role could use an old snapshot.
        """
        for path in (self.path / "roles", self.path / "lost", *self.path.glob("trainer-*")):
            shutil.rmtree(path, ignore_errors=True)
        (self.path / WITHOUT_SNAPSHOTS).unlink(missing_ok=True)
