"""The roles of a job that have ended, as its launcher tells the others: in a folder, a file for
each.

A role that ends before it has greeted the others has no connection whose end they could see, and
the launcher knows of every end at once. It makes the folder and names it in the environment;
servers look into it every second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dtrans.run.net.own_folder import LOCK, OwnFolder


VARIABLE = "DTRANS_ENDED_ROLES"


class EndedRoles:
    """The launcher's side. A context manager.

    Example:
      >>> from dtrans.run.net.ended_roles import EndedRoles, ended_roles
      >>> with EndedRoles() as told:
      ...     told.note("trainer 1", "exit code 3")
      ...     ended_roles(told.environment)
      {'trainer 1': 'exit code 3'}
      >>> ended_roles(told.environment)
      {}
    """

    def __init__(self) -> None:
        self._folder = OwnFolder()

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which the roles find it."""
        return {VARIABLE: str(self._folder.path)}

    def note(self, role: str, how: str) -> None:
        """Tell the others that a role has ended, and how."""
        new = self._folder.path / f".{role}"
        new.write_text(how)
        new.rename(self._folder.path / role)  # whole, or not there

    def __enter__(self) -> EndedRoles:
        return self

    def __exit__(self, *failed: object) -> None:
        self._folder.close()


def ended_roles(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the roles of this job that have ended, and how; none where no launcher tells."""
    folder = environ.get(VARIABLE)
    if not folder or not os.path.isdir(folder):
        return {}
    found = sorted(x for x in os.listdir(folder) if not x.startswith((".", LOCK)))
    return {name: (Path(folder) / name).read_text() for name in found}
