"""Folder of a job's snapshots, locked so that only one launcher at a time uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtrans.errors import ConfigError
from dtrans.run.distributed.restarts.job_generations import JobGenerations
from dtrans.run.distributed.restarts.launch_record import LaunchRecord
from dtrans.run.distributed.role import Role
from dtrans.run.net.generation_folder import GenerationFolder
from dtrans.run.net.launcher_folder import LAUNCH
from dtrans.run.net.temp_dir import TempDir


# Files that the launcher of a folder locks. If the launcher is killed, its guard process has the
# second lock until all roles on this host have ended.
LOCK, ROLES_LOCK = ".launcher", ".guard"
# Seconds to wait for the roles of a killed launcher. Its guard kills them after a grace period of 5
# seconds.
ROLES_END = 30.0
LOCK_PAUSE = 0.05  # seconds between two tries to lock a file


def endpoints_of(snapshots: str | os.PathLike[str] | None) -> tuple[str, ...]:
    """Return the endpoints of the servers of the job that has used a folder of snapshots.

    A launcher that continues this job must place its servers at the same endpoints. The result is
    empty if the folder has no job, or `snapshots` is None.
    """
    folder = GenerationFolder("" if snapshots is None else snapshots)
    if snapshots is None or not folder.is_used:
        return ()
    return folder.endpoints


@contextlib.contextmanager
def open_generations(
    roles: Sequence[Role],
    snapshots: str | os.PathLike[str] | None,
    record: LaunchRecord | None = None,
    *,
    on_trainer_loss: str = "restart",
    quorum: int = 1,
) -> Iterator[JobGenerations]:
    """Lock the folder of a job's snapshots; yield the object that decides how failures are handled.

    The lock lasts until the `with` block ends. A temporary folder needs no lock.

    Args:
      roles: every role of the job.
      snapshots: the folder of the generations and snapshots; None for a temporary one.
      record: the command line of the launcher, for `dtrans launch --resume`, or None.
      on_trainer_loss, quorum: as for `JobGenerations`.

    Raises:
      ConfigError: the folder cannot be used.
    """
    with contextlib.ExitStack() as stack:
        if snapshots is None:
            temporary = TempDir()
            stack.callback(temporary.close)
            yield JobGenerations(
                temporary.path, roles, on_trainer_loss=on_trainer_loss, quorum=quorum
            )
            return
        path = GenerationFolder(snapshots).path
        stack.enter_context(_lock(path, LOCK))
        lock = stack.enter_context(_lock(path, ROLES_LOCK, patience=ROLES_END))
        generations = JobGenerations(
            path, roles, lock, on_trainer_loss=on_trainer_loss, quorum=quorum
        )
        (path / LAUNCH).unlink(missing_ok=True)
        if record is not None:
            record.write(path)
        yield generations


@contextlib.contextmanager
def _lock(path: Path, name: str, patience: float = 0.0) -> Iterator[int]:
    """Create a folder, and lock a file in it; yield the file's descriptor.

    The lock ends with the last process that has the descriptor.

    Args:
      path: the folder.
      name: name of the file.
      patience: seconds to wait for another process that has the lock.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = os.open(path / name, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as e:
        raise ConfigError(f"snapshots={str(path)!r} cannot be created: {e.strerror}") from e
    try:
        _lock_file(file, path, patience)
        yield file
    finally:
        os.close(file)


def _lock_file(file: int, path: Path, patience: float) -> None:
    limit = time.monotonic() + patience
    try:
        while not _try_to_lock(file, is_last=time.monotonic() >= limit):
            time.sleep(LOCK_PAUSE)
    except BlockingIOError as e:
        raise ConfigError(
            f"snapshots={str(path)!r} is the folder of a job that runs; wait for its end, or write "
            "another folder"
        ) from e
    except OSError as e:  # some network file systems have no locks
        raise ConfigError(
            f"snapshots={str(path)!r} cannot be locked: {e.strerror}; write a folder of a file "
            "system with locks, such as NFS 4"
        ) from e


def _try_to_lock(file: int, *, is_last: bool) -> bool:
    """Lock a file. If another process has the lock, return False, or raise if `is_last`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if is_last:
            raise
        return False
    return True
