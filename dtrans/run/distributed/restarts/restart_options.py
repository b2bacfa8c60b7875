"""Options of the restarts that a launcher may make."""

from __future__ import annotations

import dataclasses
import os

from dtrans.run.distributed.restarts.launch_record import LaunchRecord


@dataclasses.dataclass(frozen=True)
class RestartOptions:
    """Restarts that a launcher may make if a signal, or the failure of a host, ends a role.

    Attributes:
      most: the largest number of restarts.
      snapshots: a folder for the snapshots (copies of the servers' states), which all hosts of the
        job share. With None, a job on this host has a temporary folder, and a job on several hosts
        has no snapshots. If the launcher itself is killed, a launch with the same folder continues
        the job from the newest snapshot.
      spares: number of processes that run the script up to `Role.from_env`, and wait there to take
        the place of a lost role.
      record: the launcher's command line, which is written to the folder of the snapshots.
      quorum: with `on_trainer_loss="drop"`, the smallest number of trainers with which the job
        continues. If a failure would leave fewer trainers, the lost trainer starts again.
    """

    most: int = 0
    snapshots: str | os.PathLike[str] | None = None
    spares: int = 0
    record: LaunchRecord | None = None
    quorum: int = 1
