"""Files by which the launcher tells all roles after a failure how the job continues."""

from __future__ import annotations

from collections.abc import Mapping

from dtrans.errors import LaunchError
from dtrans.protocol.generations import Generation
from dtrans.run.distributed.role import Role
from dtrans.run.net.generation_log import GenerationLog, GenerationRecord
from dtrans.run.net.launcher_folder import LauncherFolder


class GenerationGrants:
    """Writer of the files that start each generation (the time between two failures of a job).

    After a failure, the launcher writes the next generation. It contains the snapshot to
    which all roles go back, and the trainers that take part. Roles read it and continue from there.

    Args:
      folder: folder of the job's generations and snapshots.
      run: identifier of the job.
      role: any role of the job.
      launch: number of the first generation that this launcher starts. It is greater than 0 if the
        launcher continues a job after another launcher was killed.
      on_trainer_loss: as for `launch`.
    """

    def __init__(
        self, folder: LauncherFolder, run: str, role: Role, *, launch: int, on_trainer_loss: str
    ) -> None:
        self._folder, self._log, self._run = folder, GenerationLog(folder.path), run
        self._trainers, self._endpoints = role.trainers, role.pserver_endpoints
        self._launch, self._on_trainer_loss = launch, on_trainer_loss

    def write(
        self, generation: Generation, started: Mapping[str, int], lost: str, reason: str
    ) -> None:
        """Start a generation (the time until the next failure): write its log line and its file.

        All roles read the file. If a write fails, the disk may be full. Then the method removes all
        snapshots except the one at the start of the generation, and tries again.

        Args:
          generation: the generation.
          started: for each role, the number of the generation in which its process was started.
          lost: name of the lost role; empty if no role was lost.
          reason: cause of the generation, for the log.

        Raises:
          LaunchError: the folder cannot be written.
        """
        try:
            self._write(generation, started, lost, reason)
            return
        except OSError:  # the disk may be full
            self._folder.remove_other_snapshots(generation.snapshot)
        try:
            self._write(generation, started, lost, reason)
        except OSError as e:
            raise LaunchError(
                f"the job ends, since its folder of snapshots {self._folder.path} cannot be "
                f"written: {e.strerror}; free space there, or allow this process to write there. "
                "Then start the launcher again with the same folder: it continues from the newest "
                "snapshot"
            ) from e

    def _write(
        self, generation: Generation, started: Mapping[str, int], lost: str, reason: str
    ) -> None:
        members = generation.members(self._trainers)
        self._log.add(
            GenerationRecord(generation.number, generation.snapshot, members, lost, reason)
        )
        self._folder.grant(
            generation,
            self._run,
            self._trainers,
            self._endpoints,
            started,
            launch=self._launch,
            on_trainer_loss=self._on_trainer_loss,
        )
