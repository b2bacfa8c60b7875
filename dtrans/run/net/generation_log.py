"""Log of a job's failures: the trainers of each step, so that `dtrans.replay` can repeat the job.

The launcher adds one line to `generations.jsonl` for each generation (the time between two
failures), before it starts the generation. When the job has ended, the log stays in the folder of
the snapshots. A new job in the folder begins a new log.

A launcher may be killed after it has added a line, and before it has started the generation. The
next launcher then starts another generation with the same number, and adds a second line. So among
lines with the same number, the last one counts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrans.errors import ConfigError
from dtrans.run.net.shared_files import write_file


NAME = "generations.jsonl"


@dataclasses.dataclass(frozen=True)
class GenerationRecord:
    """Line of the log: one generation, which is a part of a job between failures.

    Attributes:
      generation: number of the generation.
      snapshot: step of the snapshot with which the generation begins; None if it begins
        with the initial state, or with the snapshots of asynchronous servers.
      members: ids of the trainers that take part in the generation, increasing.
      lost: name of the role that failed, which ended the previous generation; empty without a
        failure.
      reason: cause of the failure. Without a failure, the reason to start a generation.
      time: time of the line, in seconds since 1970.
    """

    generation: int
    snapshot: int | None
    members: tuple[int, ...]
    lost: str = ""
    reason: str = ""
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class GenerationLog:
    """Log of a job's generations (parts between failures), in the folder of the snapshots.

    Attributes:
      folder: the folder.

    Example:
      >>> import tempfile
      >>> from dtrans.run.net.generation_log import GenerationLog, GenerationRecord, read_log
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = GenerationLog(folder)
      ...     log.add(GenerationRecord(0, None, (0, 1, 2)))
      ...     log.add(GenerationRecord(1, 20, (0, 1), "trainer 2", "signal SIGKILL"))
      ...     [record.members for record in read_log(log.path)]
      [(0, 1, 2), (0, 1)]
    """

    folder: str | os.PathLike[str]

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.folder) / NAME

    def add(self, record: GenerationRecord) -> None:
        """Add a generation (the time between two failures) to the log, and flush the file to disk.

        Generation 0 begins a new job, so its line replaces an older log in the folder.

        Args:
          record: the generation.
        """
        before = b""
        if record.generation and self.path.exists():
            before = self.path.read_bytes()
        fields = {**dataclasses.asdict(record), "time": round(time.time(), 3)}
        line = json.dumps(fields).encode() + b"\n"
        # the file is replaced, so a crash leaves no incomplete line
        write_file(self.path, lambda file: file.write(before + line))


def read_log(path: str | os.PathLike[str]) -> list[GenerationRecord]:
    """Return the generations of a log (parts of a job between failures), in their order.

    Raises:
      ConfigError: the file does not exist, or is not a log of generations.
    """
    records: dict[int, GenerationRecord] = {}
    try:
        lines = Path(path).read_text().splitlines()
        for line in lines:
            fields: dict[str, Any] = json.loads(line)
            record = GenerationRecord(**{**fields, "members": tuple(fields["members"])})
            records[record.generation] = record
    except FileNotFoundError as e:
        raise ConfigError(
            f"the log {os.fspath(path)} does not exist; pass the file {NAME} of the folder that "
            "`dtrans launch --snapshots` has used"
        ) from e
    except (ValueError, TypeError, KeyError) as e:
        raise ConfigError(
            f"{os.fspath(path)} is not a log of generations ({e}); pass the file {NAME} of a "
            "folder of snapshots"
        ) from e
    return list(records.values())


def members_of_steps(
    records: Sequence[GenerationRecord], first: int, stop: int
) -> list[tuple[int, ...]]:
    """Return the trainers that took part in each step of a synchronous job.

    After a failure, a job repeats the steps since its last snapshot, possibly with other
    trainers. For such a step, the result has the trainers of the last repetition.

    Args:
      records: the lines of the log, one for each time between two failures.
      first: number of steps before the job.
      stop: number of steps at the end of the job.

    Returns:
      The ids of the trainers of step `first`, `first` + 1, and so on.
    """
    found: list[tuple[int, ...]] = []
    for record in records:
        begin = first if record.snapshot is None else record.snapshot
        # a later generation has repeated the steps after its snapshot
        found[begin - first :] = [record.members] * (stop - begin)
    return found
