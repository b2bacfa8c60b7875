"""Parts of a role table that every emitter writes: the command, shared variables, and a name.

A scheduler knows its hosts only when the job starts. Emitted files therefore compute the variables
of `Role.environment` on the spot, and of trainer 0 where it answers observers. The table gives
counts, the command, and all other variables.
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
    """The values that all roles of a job share.

    Attributes:
      name: a DNS label from the script's name, such as `dtrans-train`.
      argv: the command of every role.
      environment: variables that are the same in every role and do not say which one it is.
      servers, trainers: numbers of servers and of trainers.
      variable: the variable that lists all endpoints.
      observed: trainer 0 of collectives answers `dtrans status`, one port above all endpoints.
      cores: processors for each role; None if unknown.
    """

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    servers: int
    trainers: int
    variable: str
    observed: bool
    cores: int | None


def parts_of(table: RoleTable) -> EmitParts:
    """Return the shared values of a table.

    Raises:
      ConfigError: the table has no command, or its roles differ in more than their index.
    """
    found = set()
    for entry in table:
        found.add((entry.argv, tuple(sorted(entry.user_environment.items())), entry.cores))
    if len(found) > 1:
        raise ConfigError(
            f"the {table.title} differ in command, variables or cores; "
            "give all of them the same before the job is written"
        )
    ((argv, environment, cores),) = found
    if not argv:
        raise ConfigError(f"the {table.title} have no command; give role_table(command=...)")
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
    arguments = [a for a in argv[1:] if a != "-m"]
    script = (arguments or [argv[0]])[0].rpartition("/")[2].removesuffix(".py")
    label = re.sub(r"[^a-z0-9]+", "-", script.lower())[:30].strip("-")
    return f"dtrans-{label}" if label else "dtrans"
