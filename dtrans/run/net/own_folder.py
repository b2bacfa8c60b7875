"""A folder for the Unix socket of one process, which the next process sweeps where this one was
killed.

A process that gets SIGKILL removes nothing. Each folder has a file on which its process holds a
lock, which the kernel lets go of with the process, however it ends: whoever makes a folder removes
those whose lock nobody holds.
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


class OwnFolder:
    """A folder that only this user can read.

    Attributes:
      path: where it is.

    Example:
      >>> from dtrans.run.net.own_folder import OwnFolder
      >>> folder = OwnFolder()
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
        self._held = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._held, fcntl.LOCK_EX)
        new.rename(self.path / LOCK)  # where it is, it is held

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


def living_folders() -> list[Path]:
    """Return the folders of this host whose processes live; remove those of others."""
    among = Path(tempfile.gettempdir())
    _sweep(among)
    return [lock.parent for lock in sorted(among.glob(f"{PREFIX}*/{LOCK}"))]


def _sweep(among: Path) -> None:
    """Remove the folders of processes that are gone."""
    for lock in among.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(
            OSError
        ):  # of another user, or of another process that sweeps or ends
            held = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(held)
