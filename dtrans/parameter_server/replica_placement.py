"""Choice of the server that stores a copy of another server's state."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from dtrans.errors import ConfigError


def backups_of(endpoints: Sequence[str]) -> dict[str, str]:
    """Choose a backup for each server: another server that stores a copy of its state.

    If the servers run on several hosts, the backup is on another host. Among the possible backups,
    the function chooses one with the fewest copies. On ties, it chooses the next one in
    `endpoints`.

    The result maps the endpoint of each server to the endpoint of its backup.

    Args:
      endpoints: `host:port` of each server.

    Raises:
      ConfigError: there is only one server.

    Example:
      >>> from dtrans.parameter_server.replica_placement import backups_of
      >>> backups_of(["one:1", "one:2", "two:1"])
      {'one:1': 'two:1', 'one:2': 'two:1', 'two:1': 'one:1'}
    """
    if len(endpoints) < 2:
        raise ConfigError(
            "snapshots: replicas=1 stores a copy of each server's state on another server, but the "
            "plan has one server; write several pservers, or leave replicas out"
        )
    found: dict[str, str] = {}
    counts = collections.Counter[str]()
    for i, endpoint in enumerate(endpoints):
        others = [*endpoints[i + 1 :], *endpoints[:i]]
        remote = [x for x in others if _host(x) != _host(endpoint)]
        found[endpoint] = min(remote or others, key=lambda x: counts[x])
        counts[found[endpoint]] += 1
    return found


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]
