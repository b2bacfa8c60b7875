"""Launcher's files in the shared folder of a job that survives failures.

The launcher starts each epoch (the time between two failures), and names the cut (snapshot) with
which it begins. `dtrans.run.net.epoch_folder` lists the files of the folder.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dtrans.protocol.epochs import Epoch
from dtrans.run.net.epoch_folder import STARTED, VARIABLE, WITHOUT_CUTS, EpochFolder
from dtrans.run.net.shared_files import write_json


LAUNCH = "launch.json"


class LauncherFolder(EpochFolder):
    """Shared folder of a job that survives failures, as the launcher sees it.

    The launcher starts ("grants") each epoch, which is the time between two failures. An epoch
    begins at a cut (snapshot) of all servers.

    Example:
      >>> import tempfile
      >>> from dtrans.protocol.epochs import Epoch
      >>> from dtrans.run.net.launcher_folder import LauncherFolder
      >>> from dtrans.run.net.role_folder import RoleFolder
      >>> with tempfile.TemporaryDirectory() as path:
      ...     launcher, server = LauncherFolder(path), RoleFolder(path, "pserver 0")
      ...     launcher.grant(Epoch(), run="a run")
      ...     server.enter(server.current())
      ...     server.note_cut(0, 20)
      ...     launcher.grant(Epoch(1, launcher.newest_cut(["pserver 0"])), run="a run")
      ...     print(server.current().number, server.current().cut)
      1 20
    """

    def environment(self, started: int) -> dict[str, str]:
        """Return the environment variables by which a role finds this folder.

        Args:
          started: number of the epoch (the time between two failures) in which the role's process
            is started. A role with an older number learns that another process has replaced it.
        """
        return {VARIABLE: str(self.path), STARTED: str(started)}

    def grant(
        self,
        epoch: Epoch,
        run: str,
        trainers: int = 0,
        endpoints: Sequence[str] = (),
        started: Mapping[str, int] = {},
        *,
        launch: int = 0,
        on_trainer_loss: str = "restart",
    ) -> None:
        """Start a new epoch (the time until the next failure), by a file that all roles read.

        The file is flushed to the disk before the method returns. `run`, `trainers` and `endpoints`
        are the same in all epochs of a job.

        Args:
          epoch: the epoch.
          run: identifier of the job.
          trainers: number of trainers.
          endpoints: endpoints of the servers. Pieces of cuts (snapshots) and checkpoints contain
            them.
          started: for each role, the number of the epoch in which its process was started. An
            earlier process of the role, on a host that the launcher has lost, ends when it reads
            this number.
          launch: number of the launcher's first epoch.
          on_trainer_loss: as for `launch`.
        """
        job: dict[str, Any] = {"run": run, "trainers": trainers, "endpoints": list(endpoints)}
        job |= {"started": dict(started), "launch": launch, "on_trainer_loss": on_trainer_loss}
        write_json(self.path / "epoch.json", {**dataclasses.asdict(epoch), **job})

    def announce_end(self, lost: Collection[str] = ()) -> None:
        """Ask servers to write their newest states as cuts (snapshots), after a failure.

        Args:
          lost: names of the lost servers. Other servers write replicas of their states.
        """
        ending = {"is_ending": True, "lost": list(lost)}
        write_json(self.path / "epoch.json", {**self._granted(), **ending})

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
        """Remove all cuts (snapshots) of synchronous servers except one, if the disk is full.

        Args:
          cut: step of the newest complete cut, which stays; None to remove all.
        """
        for step in self.steps():
            if step != cut:
                shutil.rmtree(self.path / str(step), ignore_errors=True)

    def forget_marks(self) -> None:
        """Remove the reports of roles, and the cuts (snapshots) of GEO-SGD trainers.

        The launcher calls this while no role runs, before the job begins again with its first
        state. Otherwise a role could use an old cut.
        """
        for path in (self.path / "roles", self.path / "lost", *self.path.glob("trainer-*")):
            shutil.rmtree(path, ignore_errors=True)
        (self.path / WITHOUT_CUTS).unlink(missing_ok=True)
