"""Copies of other servers' states in the process of one server.

A copy is a `SyncUpdate` of the other server, with merged gradients. After the failure of a server,
the server with the copy writes the lost server's cut. `dtrans.protocol.server.replication`
describes the messages.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dtrans.checkpoint.assemble import as_jax
from dtrans.ir.array_fns import words_type
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.replica_placement import backups_of
from dtrans.protocol.server.replication import Primary, Replication
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.update import ServerUpdate


class ServerReplicas:
    """Copies of other servers' states on one server.

    Args:
      plan: the job's plan.
      endpoint: the server's endpoint.

    Attributes:
      replication: the backup of this server, and the servers whose states this server copies.

    Raises:
      ConfigError: the plan has only one server.
    """

    def __init__(self, plan: PServerPlan, endpoint: str) -> None:
        backups = backups_of(list(plan.servers))
        self._updates: dict[str, ServerUpdate] = {}
        # the copies of the last epoch, whose compiled functions are used again
        self._copies: dict[str, SyncUpdate] = {}
        primaries = {}
        for primary, backup in backups.items():
            if backup == endpoint:
                update = ServerUpdate.from_program(plan.servers[primary].main)
                self._updates[primary] = update
                primaries[primary] = _primary_of(update)
        self.replication = Replication(backups[endpoint], primaries)

    def new_replica(self, endpoint: str, state: Mapping[str, np.ndarray], step: int) -> SyncUpdate:
        """Return the copy of another server. See `dtrans.protocol.server.replication.Replica`."""
        update, like = self._updates[endpoint], self._copies.get(endpoint)
        arrays = {n: as_jax(x, update.types[n].dtype) for n, x in state.items()}
        copy = SyncUpdate(update, arrays, 1, like, keeps_old=True, merges=True)
        self._copies[endpoint] = copy
        return copy

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each array that other servers send, by name."""
        found = {}
        for primary in self.replication.primaries.values():
            arrays = [(n, t.shape, t.dtype) for n, t in primary.state.items()]
            for name, shape, dtype in (*arrays, *primary.inputs()):
                found[name] = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return found


def _primary_of(update: ServerUpdate) -> Primary:
    """Return the arrays that a server sends to its backup."""
    state = {n: words_type(t) for n, t in update.types.items()}
    return Primary(update.merged().grad_types, state, update.exchanges)
