"""Endpoints and tokens of the jobs that this user has launched on this host.

While a job runs, a launcher that has generated the job's token stores the token in a folder that
only this user can read. `dtrans status` reads the token of the job at given endpoints from there.
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
    """Publish a job's token for `token_of_job` while the `with` block runs.

    Args:
      endpoints: endpoints at which the job answers observers.
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
        # A rename is atomic, so no reader sees an incomplete file.
        new.rename(folder.path / FILE)
        yield
    finally:
        folder.close()


def token_of_job(endpoints: Sequence[str]) -> str:
    """Return the token of the job at these endpoints, if this user has launched it on this host.

    The result is empty without such a job. `dtrans status` calls this function.
    """
    for folder in live_folders():
        # The job may end and remove its folder before the file is read.
        with contextlib.suppress(FileNotFoundError):
            if not _is_private(folder):
                continue
            job = json.loads((folder / FILE).read_text())
            if set(endpoints) <= set(job["endpoints"]):
                return str(job["token"])
    return ""


def _is_private(folder: Path) -> bool:
    """Return True if a path is a folder that only this user can access. A link gives False.

    The check is needed because other users can create folders in the temporary directory, too.
    """
    found = folder.lstat()
    is_closed = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    return is_closed and found.st_uid == os.getuid()
