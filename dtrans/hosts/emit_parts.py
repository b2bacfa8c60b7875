"""Values of a job that every scheduler's file contains: command, variables, counts and name.

A scheduler chooses the hosts when the job starts. So commands in the file compute the variables
that depend on hosts: the variables of `Role.environment`, and DTRANS_STATUS_ENDPOINT. All other
values come from the table of roles.
"""

from __future__ import annotations

import dataclasses
import re

from dtrans.errors import ConfigError
from dtrans.hosts.role_table import RoleTable, observer_endpoint
from dtrans.run.distributed.role import LOSS, PSERVER
from dtrans.run.distributed.status_door import VARIABLE as STATUS


@dataclasses.dataclass(frozen=True)
class EmitParts:
    """Values that a scheduler's file contains once for all roles, such as the command.

    Attributes:
      name: a DNS label from the script's name, such as `dtrans-train`.
      argv: the command of every role.
      environment: variables with the same value in every role.
      servers: number of servers.
      trainers: number of trainers.
      variable: name of the environment variable that lists all endpoints.
      answers_status: True if trainer 0 answers `dtrans status`, at one port above all endpoints.
        Jobs with servers do not need this, since servers answer.
      cores: processors for each role; None if the user named no number.
    """

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    servers: int
    trainers: int
    variable: str
    answers_status: bool
    cores: int | None


def parts_of(table: RoleTable) -> EmitParts:
    """Return the values for a scheduler's file that all roles of a job share.

    Args:
      table: the roles, with a command: the result of `role_table` or `plan.roles`.

    Raises:
      ConfigError: the table has no command, or its roles differ in more than their index.
    """
    found = set()
    for entry in table:
        found.add((entry.argv, tuple(sorted(entry.user_environment.items())), entry.cores))
    if len(found) > 1:
        raise ConfigError(
            f"the {table.title} differ in command, variables or cores, but a scheduler's file has "
            "one command, one set of variables and one number of cores for all of them; plan "
            "equal roles"
        )
    ((argv, environment, cores),) = found
    if not argv:
        raise ConfigError(f"the {table.title} have no command; pass role_table(command=...)")
    servers = len(table.of(PSERVER))
    first, variables = table.entries[0].role, dict(environment)
    answers = bool(observer_endpoint(first.trainer_endpoints)) and variables.get(LOSS) != "drop"
    return EmitParts(
        _name(argv),
        argv,
        variables,
        servers,
        len(table) - servers,
        "DTRANS_PSERVER_ENDPOINTS" if servers else "DTRANS_TRAINER_ENDPOINTS",
        answers and STATUS not in variables,
        cores,
    )


def _name(argv: tuple[str, ...]) -> str:
    """Return a DNS label for a job from its script's name."""
    arguments = [a for a in argv[1:] if a != "-m"]
    script = (arguments or [argv[0]])[0].rpartition("/")[2].removesuffix(".py")
    label = re.sub(r"[^a-z0-9]+", "-", script.lower())[:30].strip("-")
    return f"dtrans-{label}".strip("-")
