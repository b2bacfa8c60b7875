"""Reports by which the launcher tells servers that processes of roles have ended.

When a connected role ends, a server notices the end of the connection. If a role ends before it
connects, only the launcher notices. The launcher creates a folder, passes the folder's path in an
environment variable, and writes a file for each role that has ended. Servers read the folder every
second. On other hosts, the agent of each role writes such a folder for the launcher.

If a job survives failures, a new process takes the place of the ended one. So each report has the
number of a *generation*, which is the time between two failures (`dtrans.protocol.generations`). A
report has no effect in later generations.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dtrans.run.net.temp_dir import LOCK, TempDir


VARIABLE = "DTRANS_ENDED_ROLES"


class EndedRoles:
    """Folder in which a launcher reports that processes of roles have ended; a context manager.

    Example:
      >>> from dtrans.run.net.ended_roles import EndedRoles, ended_roles
      >>> with EndedRoles() as ended:
      ...     ended.note("trainer 1", "exit code 3")
      ...     ended_roles(environ=ended.environment)
      {'trainer 1': 'exit code 3'}
      >>> ended_roles(environ=ended.environment)
      {}
    """

    def __init__(self) -> None:
        self._folder = TempDir()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variable for the job's roles, with the path of the folder."""
        return {VARIABLE: str(self._folder.path)}

    def note(self, role: str, how: str, generation: int = 0) -> None:
        """Report to the servers that a role has ended.

        Args:
          role: name of the role, such as "trainer 1".
          how: exit status of the role's process, such as "exit code 3".
          generation: number of the generation (part of the job between failures) in which the role
            ended.
        """
        new = self._folder.path / f".{role}"
        new.write_text(f"{generation} {how}")
        # A rename is atomic, so no server reads an incomplete file.
        new.rename(self._folder.path / role)

    def __enter__(self) -> EndedRoles:
        return self

    def __exit__(self, *failed: object) -> None:
        self._folder.close()


def ended_roles(generation: int = 0, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the roles of this job that have ended, each with its exit status.

    Servers call this every second, so that they do not wait for a role that ended before it
    connected. For example, the result is {"trainer 1": "exit code 3"}. It is empty if the job has
    no launcher.

    Args:
      generation: number of the generation (the time between two failures of the job) of this
        process. Roles that ended in an earlier generation have started again, so they are left out.
      environ: environment variables of this process.
    """
    folder = environ.get(VARIABLE)
    if not folder or not os.path.isdir(folder):
        return {}
    found = sorted(x for x in os.listdir(folder) if not x.startswith((".", LOCK)))
    texts = {}
    for name in found:
        number, _, how = (Path(folder) / name).read_text().partition(" ")
        if int(number) >= generation:
            texts[name] = how
    return texts
