"""Jobs that launchers of this user run on this host: their endpoints and tokens.

A launcher that generates a job's token keeps it in a folder that only this user can read, while the
job runs. `dtrans status` reads the token from there, for the job at the user's endpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtrans.run.net.temp_dir import TempDir, live_folders


FILE = "job.json"


@contextlib.contextmanager
def announce_job(endpoints: Sequence[str], token: str) -> Iterator[None]:
    """Publish a job's token to `token_of_job` while the block runs.

    Args:
      endpoints: the endpoints at which the job answers observers.
      token: the job's token.

    Example:
      >>> from dtrans.run.net.started_jobs import announce_job, token_of_job
      >>> with announce_job(["127.0.0.1:6174", "127.0.0.1:6175"], "a-secret"):
      ...     token_of_job(["127.0.0.1:6175"])
      'a-secret'
      >>> token_of_job(["127.0.0.1:6175"])
      ''
    """
    folder = TempDir()
    try:
        new = folder.path / f"{FILE}.new"
        new.write_text(json.dumps({"endpoints": list(endpoints), "token": token}))
        new.rename(folder.path / FILE)  # atomic: readers never see half a file
        yield
    finally:
        folder.close()


def token_of_job(endpoints: Sequence[str]) -> str:
    """Return the token of this user's job that answers at endpoints; empty if there is none."""
    for folder in live_folders():
        # the job may end, and remove its folder, before this reads the file
        with contextlib.suppress(FileNotFoundError):
            if not _is_private(folder):
                continue
            job = json.loads((folder / FILE).read_text())
            if set(endpoints) <= set(job["endpoints"]):
                return str(job["token"])
    return ""


def _is_private(folder: Path) -> bool:
    """Return True for a folder, not a link, that only this user can read and write.

    The folders are in a directory that all users can write: another user could plant one.
    """
    found = folder.lstat()
    is_closed = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    return is_closed and found.st_uid == os.getuid()
