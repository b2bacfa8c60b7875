"""Parts of a role table that every emitter writes: the command, shared variables, and a name.

A scheduler knows its hosts only when the job starts. Emitted files therefore compute the variables
of `Role.environment` on the spot; the table gives counts, the command, and all other variables.
"""

from __future__ import annotations

import dataclasses
import re

from dtrans.errors import ConfigError
from dtrans.hosts.role_table import RoleTable
from dtrans.run.distributed.role import PSERVER, VARIABLES
from dtrans.run.net.net_options import ALLOW_REMOTE


@dataclasses.dataclass(frozen=True)
class EmitParts:
    """The values that all roles of a job share.

    Attributes:
      name: a DNS label from the script's name, such as `dtrans-train`.
      argv: the command of every role.
      environment: variables that are the same in every role and do not say which one it is.
      servers, trainers: how many there are.
      variable: the variable that lists all endpoints.
      cores: processors for each role; None where nobody said.
    """

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    servers: int
    trainers: int
    variable: str
    cores: int | None


def parts_of(table: RoleTable) -> EmitParts:
    """Return the shared values of a table.

    Raises:
      ConfigError: the table has no command, or its roles differ in more than their index.
    """
    found = set()
    for entry in table:
        shared = {k: v for k, v in entry.environment.items() if k not in (*VARIABLES, ALLOW_REMOTE)}
        found.add((entry.argv, tuple(sorted(shared.items())), entry.cores))
    if len(found) > 1:
        raise ConfigError(
            f"the {table.title} differ in command, variables or cores; "
            "give all of them the same before the job is written"
        )
    ((argv, environment, cores),) = found
    if not argv:
        raise ConfigError(f"the {table.title} have no command; give role_table(command=...)")
    servers = len(table.of(PSERVER))
    return EmitParts(
        _name(argv),
        argv,
        dict(environment),
        servers,
        len(table) - servers,
        "DTRANS_PSERVER_ENDPOINTS" if servers else "DTRANS_TRAINER_ENDPOINTS",
        cores,
    )


def _name(argv: tuple[str, ...]) -> str:
    arguments = [a for a in argv[1:] if a != "-m"]
    script = (arguments or [argv[0]])[0].rpartition("/")[2].removesuffix(".py")
    label = re.sub(r"[^a-z0-9]+", "-", script.lower())[:30].strip("-")
    return f"dtrans-{label}" if label else "dtrans"
