"""Jobs that launchers of this user have started on this host: where they answer, and their tokens.

A launcher that makes the token of a job keeps it in a folder that only this user can read, while
the job runs. `dtrans status` looks there for a job that answers at the endpoints that it was given.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtrans.run.net.own_folder import OwnFolder, living_folders


FILE = "job.json"


@contextlib.contextmanager
def announce_job(endpoints: Sequence[str], token: str) -> Iterator[None]:
    """Let `token_of_job` find a job's token while the block runs.

    Args:
      endpoints: where the job answers observers.
      token: the job's.

    Example:
      >>> from dtrans.run.net.started_jobs import announce_job, token_of_job
      >>> with announce_job(["127.0.0.1:6174", "127.0.0.1:6175"], "a-secret"):
      ...     token_of_job(["127.0.0.1:6175"])
      'a-secret'
      >>> token_of_job(["127.0.0.1:6175"])
      ''
    """
    folder = OwnFolder()
    try:
        new = folder.path / f"{FILE}.new"
        new.write_text(json.dumps({"endpoints": list(endpoints), "token": token}))
        new.rename(folder.path / FILE)  # whole, or not there
        yield
    finally:
        folder.close()


def token_of_job(endpoints: Sequence[str]) -> str:
    """Return the token of the job of this user and host that answers at endpoints; empty for
    none."""
    for folder in living_folders():
        # a job may end meanwhile, and its folder with it
        with contextlib.suppress(FileNotFoundError):
            if not _is_own(folder):
                continue
            job = json.loads((folder / FILE).read_text())
            if set(endpoints) <= set(job["endpoints"]):
                return str(job["token"])
    return ""


def _is_own(folder: Path) -> bool:
    """Return True for a folder, no link, that this user alone can write."""
    found = folder.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    return is_private and found.st_uid == os.getuid()
