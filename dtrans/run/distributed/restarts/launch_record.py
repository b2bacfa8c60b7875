"""Record of a launcher's command line; `dtrans launch --resume` reads it to continue a job.

The file is in the folder of the job's snapshots. It has options and arguments, but no
environment variables, since these may be secrets.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrans.errors import ConfigError
from dtrans.run.net.generation_folder import GenerationFolder
from dtrans.run.net.launcher_folder import LAUNCH
from dtrans.run.net.shared_files import write_file


@dataclasses.dataclass(frozen=True)
class LaunchRecord:
    """Command line of a launcher.

    Attributes:
      options: options and arguments of `dtrans launch`, by the name of the parameter. Those with
        their default values are left out.
      directory: the working directory of the launcher.

    Example:
      >>> import tempfile
      >>> from dtrans.protocol.generations import Generation
      >>> from dtrans.run.distributed.restarts.launch_record import LaunchRecord
      >>> from dtrans.run.net.launcher_folder import LauncherFolder
      >>> with tempfile.TemporaryDirectory() as path:
      ...     LauncherFolder(path).grant(Generation(), run="a run")
      ...     LaunchRecord({"script": "train.py", "trainers": 2}, path).write(path)
      ...     print(LaunchRecord.read(path).options)
      {'script': 'train.py', 'trainers': 2}
    """

    options: Mapping[str, Any]
    directory: str

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write the record to the folder of a job's snapshots."""
        text = json.dumps(dataclasses.asdict(self), default=os.fspath)
        write_file(Path(folder, LAUNCH), lambda file: file.write(text.encode()))

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> LaunchRecord:
        """Return the record in the folder of a job's snapshots.

        Raises:
          ConfigError: the folder has no job, the job has no record, or the working directory does
            not exist.
        """
        argument = f"--resume {os.fspath(folder)}"
        generations = GenerationFolder(folder)
        if not generations.is_used:
            raise ConfigError(
                f"{argument}: this folder has no job with snapshots; name the folder of `dtrans "
                "launch --snapshots`. A job that ends without an error removes its snapshots"
            )
        try:
            record = cls(**json.loads((generations.path / LAUNCH).read_text()))
        except FileNotFoundError as e:
            raise ConfigError(
                f"{argument}: `dtrans launch` did not start the job of this folder; run the "
                "program that did, with the same folder of snapshots"
            ) from e
        if not os.path.isdir(record.directory):
            raise ConfigError(
                f"{argument}: the job's working directory {record.directory} does not exist on "
                "this host; create it, or run the job's command with --snapshots"
            )
        return record
