"""Roles of a job that have ended: the launcher writes a file for each, and servers read them.

Servers notice the end of a role by its connection. A role may end before it connects, and then only
the launcher knows. The launcher creates a folder and passes its path in the environment. Servers
read the folder every second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dtrans.run.net.temp_dir import LOCK, TempDir


VARIABLE = "DTRANS_ENDED_ROLES"


class EndedRoles:
    """Folder in which a launcher notes the roles that have ended. A context manager.

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
        """The environment variable with the path of the folder, for the roles."""
        return {VARIABLE: str(self._folder.path)}

    def note(self, role: str, how: str) -> None:
        """Note that a role has ended, for the servers to read.

        Args:
          how: the way in which it ended: "exit code 3".
        """
        new = self._folder.path / f".{role}"
        new.write_text(how)
        new.rename(self._folder.path / role)  # atomic: servers never read half a file

    def __enter__(self) -> EndedRoles:
        return self

    def __exit__(self, *failed: object) -> None:
        self._folder.close()


def ended_roles(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the roles of this job that have ended, and how; none without a launcher."""
    folder = environ.get(VARIABLE)
    if not folder or not os.path.isdir(folder):
        return {}
    found = sorted(x for x in os.listdir(folder) if not x.startswith((".", LOCK)))
    return {name: (Path(folder) / name).read_text() for name in found}
