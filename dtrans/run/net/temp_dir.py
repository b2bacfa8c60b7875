"""Temporary folder of one process. If the process was killed, a later process removes the folder.

A process that gets SIGKILL cannot remove its folder. So each process locks a file in its folder,
and the kernel releases the lock when the process ends. Before a process creates its folder, it
removes all folders of this user with an unlocked file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


PREFIX = "dtrans-"
LOCK = "lock"


class TempDir:
    """Temporary folder that only this user can access.

    Attributes:
      path: path of the folder.

    Example:
      >>> from dtrans.run.net.temp_dir import TempDir
      >>> folder = TempDir()
      >>> folder.path.is_dir()
      True
      >>> folder.close()
      >>> folder.path.exists()
      False
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        new = self.path / f"{LOCK}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The file gets its final name only after it is locked. So no process finds it unlocked.
        new.rename(self.path / LOCK)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def live_folders() -> list[Path]:
    """Remove the folders of ended processes, and return the folders of live processes."""
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    return [lock.parent for lock in sorted(parent.glob(f"{PREFIX}*/{LOCK}"))]


def _sweep(parent: Path) -> None:
    """Remove the temporary folders of processes that were killed, and so left them behind."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        # An OSError means that a live process holds the lock, that the file belongs to another
        # user, or that another process is removing the folder.
        with contextlib.suppress(OSError):
            file = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(file)
