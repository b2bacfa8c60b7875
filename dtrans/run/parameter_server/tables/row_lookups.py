"""A trainer's requests for rows of embedding tables, which servers store.

prefetch   records a lookup, or returns rows that were requested in advance
receive    sends one request to each server for all recorded lookups, and waits for the rows
announce   requests the rows of a later step in advance, without waiting
look_up    reads rows between steps, for evaluation
send_rows  sends gradients of rows to the servers that store the rows
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.tables.table_rows import BlockPart, WantedRows, put_in_place
from dtrans.protocol.trainer.announced_lookups import LookedUp
from dtrans.run.parameter_server.equation_leaves import parts_in, rows_wanted
from dtrans.run.parameter_server.server_connections import ServerConnections


@dataclasses.dataclass(frozen=True, eq=False)
class _Lookup:
    """Lookup of one table's rows that a `prefetch` has recorded.

    Attributes:
      eqn: the `prefetch` equation.
      uniq: increasing row ids of the lookup.
      rows: memory that receives the rows.
    """

    eqn: JaxprEqn
    uniq: np.ndarray
    rows: np.ndarray


class RowLookups:
    """One trainer's requests for rows of embedding tables, which servers store.

    Args:
      connections: the trainer's connections to servers.
    """

    def __init__(self, connections: ServerConnections) -> None:
        self._connections = connections
        self._steps = connections.steps
        # lookups whose rows are not requested yet: equation, ids, and memory for the rows
        self._pending: list[_Lookup] = []
        self._pool = BufferPool()
        # Name of a table -> the row ids of the last lookup, and each block's part of them. A step
        # has a new array of ids, which nothing changes afterwards, so the array itself is the key.
        self._parts: dict[str, tuple[np.ndarray, Sequence[BlockPart]]] = {}

    def prefetch(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """Return an array for the rows of a table that the current step looks up.

        If the rows were requested in advance (`announce`), the array contains them. Otherwise,
        `receive` writes the rows into the array later.

        Args:
          eqn: the `prefetch` equation.
          values: its operand, the sorted ids of the rows.
        """
        self._connections.identify(eqn)
        (uniq,) = values
        now = self._connections.link(eqn.params["epmap"][0]).line.step
        table = eqn.params["table"]
        found = self._steps.announced.take(table, uniq, now)
        if found is not None:
            put_in_place(found.rows, found.wanted, found.parts)
            self._parts[table] = uniq, found.parts
            return [found.rows]
        lookup = self._allocate(eqn, uniq)
        self._pending.append(lookup)
        return [lookup.rows]

    def _allocate(self, eqn: JaxprEqn, uniq: np.ndarray) -> _Lookup:
        """Allocate an array for the rows that a `prefetch` equation looks up."""
        (t,) = eqn.params["types"]
        rows = self._pool.take(f"{eqn.params['table']} rows", t.shape, t.dtype)
        return _Lookup(eqn, uniq, rows)

    def _look_up(self, lookups: Sequence[_Lookup]) -> list[LookedUp]:
        """Divide lookups among the servers that store the rows, in one pass over all tables."""
        found = []
        eqns = [x.eqn for x in lookups]
        parts = parts_in(eqns, [x.uniq for x in lookups])
        for x, blocks in zip(lookups, parts, strict=True):
            table = x.eqn.params["table"]
            wanted = rows_wanted(x.eqn, x.rows, blocks)
            found.append(LookedUp(table, x.uniq, x.rows, wanted, blocks))
        return found

    def receive(self) -> None:
        """Request the rows of all recorded lookups from the servers, and wait for them."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        found = self._look_up(pending)
        wanted = list(itertools.chain.from_iterable(x.wanted for x in found))
        self._connections.run(self._steps.prefetch(wanted, train=True))
        for x in found:
            put_in_place(x.rows, x.wanted, x.parts)
            self._parts[x.table] = x.uniq, x.parts

    def announce(self, lookups: Sequence[tuple[JaxprEqn, np.ndarray]]) -> None:
        """Request the rows of a later step in advance, without waiting for them.

        Args:
          lookups: the `prefetch` equations of the later step, each with the ids of its rows.
        """
        for eqn, _ in lookups:
            self._connections.identify(eqn)
        self._steps.announced.add(self._look_up([self._allocate(*x) for x in lookups]))

    def look_up(
        self, eqn: JaxprEqn, ids: np.ndarray, ask: Callable[[Sequence[WantedRows]], bool]
    ) -> np.ndarray:
        """Return rows for evaluation between steps. The trainer sends no gradient of these rows.

        Args:
          eqn: a `prefetch` equation of the table.
          ids: increasing row ids.
          ask: function that requests the rows through the background thread. It returns False if no
            thread runs; then this method uses the connections itself.
        """
        t = eqn.params["types"][0]
        rows = np.empty((len(ids), *t.shape[1:]), t.dtype)
        (parts,) = parts_in([eqn], [ids])
        wanted = rows_wanted(eqn, rows, parts)
        if not ask(wanted):
            self._connections.run(self._steps.prefetch(wanted, train=False))
        put_in_place(rows, wanted, parts)
        return rows

    def send_rows(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """Send each server the gradients of the rows that the server stores.

        Args:
          eqn: the `send_rows` equation.
          values: the ids of the rows, and the gradients of these rows.
        """
        self._connections.identify(eqn)
        p, (uniq, grad) = eqn.params, values
        gradient = np.asarray(grad)
        ids, parts = self._parts[p["table"]]
        if ids is not uniq:
            (parts,) = parts_in([eqn], [uniq])
        for ep, name, (at, _) in zip(p["epmap"], p["names"], parts, strict=True):
            self._steps.send(ep, name, gradient[at])
        return [None]
