"""Start of a role's process, in the first attempt at a job and in each restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from dtrans.checkpoint.runs import VARIABLE as RUN, new_run
from dtrans.run.distributed.child_process import Child, Emit
from dtrans.run.distributed.restarts.attempt import Event
from dtrans.run.distributed.role import Role
from dtrans.run.distributed.site import Site
from dtrans.run.net.ended_roles import EndedRoles


@dataclasses.dataclass(frozen=True)
class RoleStarter:
    """Starter of the process of each role, with the job's command, environment and output.

    Attributes:
      command: program and arguments of every role.
      site: the hosts of the roles.
      base: variables that all roles of all attempts share.
      run_name: the user's name for the run; None to generate one for each attempt.
      logs: maps the name of each role to the function that prints and logs its lines.
      inherit_stdout: True to let trainer 0 inherit this process's standard output.
    """

    command: Sequence[str]
    site: Site
    base: Mapping[str, str]
    run_name: str | None
    logs: Mapping[str, Emit]
    inherit_stdout: bool

    def shared(self, ended_roles: EndedRoles) -> dict[str, str]:
        """Return the environment variables that all roles share, for one attempt at the job.

        Each attempt, that is each start of all roles, has a new run name.

        Args:
          ended_roles: the folder in which the launcher reports the roles that have ended.
        """
        return {**self.base, **ended_roles.environment, RUN: self.run_name or new_run()}

    def variables(self, role: Role, shared: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a role."""
        return {**self.site.variables(role), **shared, **role.environment()}

    def start(self, role: Role, shared: Mapping[str, str], events: SimpleQueue[Event]) -> Child:
        """Start a role's process. It runs the command only after `Child.begin`.

        Args:
          role: the role.
          shared: the result of the method `shared`, environment variables of all roles.
          events: the launcher's queue, to which the child is added when its process has ended.
        """
        return self.site.start(
            role,
            self.command,
            self.variables(role, shared),
            events,
            self.logs[role.name],
            inherit_stdout=self.inherit_stdout and role.name == "trainer 0",
        )
