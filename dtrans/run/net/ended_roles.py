"""The launcher's report to the servers: the roles whose processes have ended.

When a connected role ends, a server notices the end of the connection. If a role ends before it
connects, only the launcher notices. The launcher creates a folder, passes its path in an
environment variable, and writes a file for each role that has ended. Servers read the folder every
second.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from dtrans.run.net.temp_dir import LOCK, TempDir


VARIABLE = "DTRANS_ENDED_ROLES"


class EndedRoles:
    """Folder in which a launcher reports the roles that have ended; a context manager.

    Example:
      >>> from dtrans.run.net.ended_roles import EndedRoles, ended_roles
      >>> with EndedRoles() as ended:
      ...     ended.note("trainer 1", "exit code 3")
      ...     ended_roles(ended.environment)
      {'trainer 1': 'exit code 3'}
      >>> ended_roles(ended.environment)
      {}
    """

    def __init__(self) -> None:
        self._folder = TempDir()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variable for the job's roles, with the path of the folder."""
        return {VARIABLE: str(self._folder.path)}

    def note(self, role: str, how: str) -> None:
        """Report to the servers that a role has ended.

        Args:
          role: name of the role, such as "trainer 1".
          how: exit status of the role's process, such as "exit code 3".
        """
        new = self._folder.path / f".{role}"
        new.write_text(how)
        # A rename is atomic, so no server reads an incomplete file.
        new.rename(self._folder.path / role)

    def forget(self, role: str) -> None:
        """Remove the report of a role that starts again.

        Args:
          role: name of the role.
        """
        (self._folder.path / role).unlink(missing_ok=True)

    def __enter__(self) -> EndedRoles:
        return self

    def __exit__(self, *failed: object) -> None:
        self._folder.close()


def ended_roles(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a map from each role of this job that has ended to its exit status.

    The map is empty if the job has no launcher.
    """
    folder = environ.get(VARIABLE)
    if not folder or not os.path.isdir(folder):
        return {}
    found = sorted(x for x in os.listdir(folder) if not x.startswith((".", LOCK)))
    texts = {}
    for name in found:
        with contextlib.suppress(FileNotFoundError):  # the role starts again
            texts[name] = (Path(folder) / name).read_text()
    return texts
