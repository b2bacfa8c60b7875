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
from dtrans.protocol.tables.table_rows import Positions, WantedRows, put_in_place
from dtrans.protocol.trainer.announced_lookups import LookedUp
from dtrans.run.parameter_server.equation_leaves import positions_in, rows_wanted
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
        # name of a table -> the last row ids, and the positions of each block's rows in them
        self._positions: dict[str, tuple[np.ndarray, Positions]] = {}

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
            put_in_place(found.rows, found.wanted, self._positions_in(eqn, uniq))
        return [found.rows]

    def _positions_in(self, eqn: JaxprEqn, uniq: np.ndarray) -> Positions:
        """Return the positions of each block's rows in a step's row ids of a table.

        A step needs them to request rows, to receive them, and to send their gradients. They are
        computed once, because many small tables would pay for each computation. Each step has a
        new array of ids, which nothing changes afterwards, so the array itself is the key.
        """
        table = eqn.params["table"]
        known = self._positions.get(table)
        if known is None or known[0] is not uniq:
            known = self._positions[table] = uniq, positions_in(eqn, uniq)
        return known[1]

    def _allocate(self, eqn: JaxprEqn, uniq: np.ndarray) -> LookedUp:
        """Allocate an array for the rows that a `prefetch` looks up."""
        table, (t,) = eqn.params["table"], eqn.params["types"]
        rows = self._pool.take(f"{table} rows", t.shape, t.dtype)
        wanted = rows_wanted(eqn, uniq, rows, self._positions_in(eqn, uniq))
        return LookedUp(table, uniq, rows, wanted)

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
            put_in_place(x.rows, x.wanted, self._positions_in(eqn, x.uniq))

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
        positions = positions_in(eqn, ids)
        wanted = rows_wanted(eqn, ids, rows, positions)
        if not ask(wanted):
            self._connections.run(self._steps.prefetch(wanted, train=False))
        put_in_place(rows, wanted, positions)
        return rows

    def send_rows(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """Send each server the gradients of the rows that the server stores.

        Args:
          eqn: the `send_rows` equation.
          values: the ids of the rows, and the gradients of these rows.
        """
        self._connections.identify(eqn)
        p, (uniq, grad) = eqn.params, values
        gradient, positions = np.asarray(grad), self._positions_in(eqn, uniq)
        for ep, name, at in zip(p["epmap"], p["names"], positions, strict=True):
            self._steps.send(ep, name, gradient[at])
        return [None]
