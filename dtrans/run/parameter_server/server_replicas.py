"""Backups: one server stores copies of other servers' states.

After the failure of a server, the server with its copy writes the lost server's snapshot. So the
job continues from its newest step. A copy is a `SyncUpdate` of the other server. It computes the
same updates from gradients that the other server has summed over trainers.
`dtrans.protocol.server.replication` describes the messages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrans.checkpoint.assemble import as_jax
from dtrans.ir.array_fns import words_type
from dtrans.ir.program import Program
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.replica_placement import backups_of
from dtrans.protocol.server.replication import Primary, Replication
from dtrans.run.parameter_server.sync_update import SyncUpdate
from dtrans.run.parameter_server.tables.sent_tables import received_tables, sent_types
from dtrans.run.parameter_server.update import ServerUpdate


class ServerReplicas:
    """Copies of other servers' states that one server stores.

    Args:
      plan: the job's plan.
      endpoint: the endpoint of the server with the copies.

    Attributes:
      replication: the backup of this server, and the servers that this server copies.

    Raises:
      ConfigError: the plan has only one server.
    """

    def __init__(self, plan: PServerPlan, endpoint: str) -> None:
        backups = backups_of(list(plan.servers))
        self._updates: dict[str, ServerUpdate] = {}
        self._startups: dict[str, Program] = {}
        # the copies of the last generation, whose compiled functions are used again
        self._copies: dict[str, SyncUpdate] = {}
        primaries = {}
        for primary, backup in backups.items():
            if backup == endpoint:
                programs = plan.servers[primary]
                update = ServerUpdate.from_program(programs.main)
                self._updates[primary], self._startups[primary] = update, programs.startup
                primaries[primary] = _primary_of(update, programs.startup)
        self.replication = Replication(backups[endpoint], primaries)

    def new_replica(self, endpoint: str, state: Mapping[str, np.ndarray], step: int) -> SyncUpdate:
        """Create a copy of another server's state, from the arrays that the other server has sent.

        Args:
          endpoint: endpoint of the other server.
          state: its arrays, by name.
          step: number of steps in the state.
        """
        update, like = self._updates[endpoint], self._copies.get(endpoint)
        arrays: dict[str, Any] = dict(received_tables(update, self._startups[endpoint], state))
        for n, t in update.types.items():
            if n not in arrays:
                arrays[n] = as_jax(state[n], t.dtype)
        copy = SyncUpdate(update, arrays, 1, like, keeps_old=True, merges=True)
        self._copies[endpoint] = copy
        return copy

    def sizes(self) -> dict[str, int]:
        """Return the largest number of bytes of each array that other servers send, by name.

        The server refuses larger messages.
        """
        found = {}
        for primary in self.replication.primaries.values():
            arrays = itertools.chain(
                primary.largest(is_state=True), primary.largest(is_state=False)
            )
            for name, shape, dtype in arrays:
                found[name] = math.prod(shape) * np.dtype(dtype).itemsize
        return found


def _primary_of(update: ServerUpdate, startup: Program) -> Primary:
    """Describe the arrays that a server sends to its backup: names, shapes and dtypes.

    Args:
      update: the server's update.
      startup: the server's startup program.
    """
    tables, optional = sent_types(update, startup)
    dense = {n: words_type(t) for n, t in update.types.items() if n not in tables}
    gradients, of_tables = update.merged().grad_types, set[str]()
    for table in update.tables.values():
        of_tables.update(table.gradients.values())
    return Primary(
        gradients,
        {**dense, **tables},
        update.exchanges,
        row_gradients=frozenset(gradients) & of_tables,
        varying=frozenset(n for n in tables if not n.startswith("counts ")),
        optional=optional,
    )
