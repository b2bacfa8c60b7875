"""A trainer's lookups of table rows on servers.

prefetch   records a lookup, or uses announced rows
receive    sends one request to each server for all recorded lookups, and waits for the rows
announce   requests the rows of a later step, without waiting
look_up    reads rows between steps, for evaluation
send_rows  sends gradients of rows to the servers of the rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.tables.table_rows import WantedRows, put_in_place
from dtrans.protocol.trainer.announced_lookups import LookedUp
from dtrans.run.parameter_server.equation_leaves import rows_wanted
from dtrans.run.parameter_server.server_connections import ServerConnections


class RowLookups:
    """One trainer's lookups of table rows on servers.

    Args:
      connections: the trainer's connections to servers.
    """

    def __init__(self, connections: ServerConnections) -> None:
        self._connections = connections
        self._steps = connections.steps
        self._pending: list[tuple[JaxprEqn, LookedUp]] = []
        self._pool = BufferPool()

    def prefetch(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """Return an array for the rows of a `prefetch`.

        If the rows were announced, the array contains them. Otherwise, `receive` writes the rows
        into the array later.
        """
        self._connections.identify(eqn)
        (uniq,) = values
        now = self._connections.link(eqn.params["epmap"][0]).line.step
        found = self._steps.announced.take(eqn.params["table"], uniq, now)
        if found is None:
            found = self._allocate(eqn, uniq)
            self._pending.append((eqn, found))
        else:
            put_in_place(uniq, found.rows, found.wanted, eqn.params["spans"])
        return [found.rows]

    def _allocate(self, eqn: JaxprEqn, uniq: np.ndarray) -> LookedUp:
        """Allocate an array for the rows that a `prefetch` looks up."""
        table, (t,) = eqn.params["table"], eqn.params["types"]
        rows = self._pool.take(f"{table} rows", t.shape, t.dtype)
        return LookedUp(table, uniq, rows, rows_wanted(eqn, uniq, rows))

    def receive(self) -> None:
        """Request and receive the rows of all recorded lookups."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        wanted: list[WantedRows] = []
        for _, lookup in pending:
            wanted += lookup.wanted
        self._connections.run(self._steps.prefetch(wanted, train=True))
        for eqn, x in pending:
            put_in_place(x.uniq, x.rows, x.wanted, eqn.params["spans"])

    def announce(self, lookups: Sequence[tuple[JaxprEqn, np.ndarray]]) -> None:
        """Request the rows of a later step without waiting for them.

        Args:
          lookups: `prefetch` equations, each with the ids of its rows.
        """
        for eqn, _ in lookups:
            self._connections.identify(eqn)
        self._steps.announced.add([self._allocate(eqn, uniq) for eqn, uniq in lookups])

    def look_up(
        self, eqn: JaxprEqn, ids: np.ndarray, ask: Callable[[Sequence[WantedRows]], bool]
    ) -> np.ndarray:
        """Return rows for evaluation. No gradient of these rows follows.

        Args:
          eqn: a `prefetch` equation of the table.
          ids: increasing row ids.
          ask: function that receives the rows through the communicator, or returns False if no
            communicator runs.
        """
        t = eqn.params["types"][0]
        rows = np.empty((len(ids), *t.shape[1:]), t.dtype)
        wanted = rows_wanted(eqn, ids, rows)
        if not ask(wanted):
            self._connections.run(self._steps.prefetch(wanted, train=False))
        put_in_place(ids, rows, wanted, eqn.params["spans"])
        return rows

    def send_rows(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """Send each server the gradients of the rows that the server stores.

        Args:
          eqn: the `send_rows` equation.
          values: the ids of the rows, and the gradients of these rows.
        """
        self._connections.identify(eqn)
        p, (uniq, grad) = eqn.params, values
        for ep, name, span in zip(p["epmap"], p["names"], p["spans"], strict=True):
            self._steps.send(ep, name, np.asarray(grad)[span.among(uniq)])
        return [None]
