"""The state of a synchronous server, and the update of one step at a time.

An update that reduces over rows is made in phases, with an exchange between servers after each but
the last: it stops there, and goes on when it is given what the other servers have sent.

Tables are updated by the rows that trainers have asked for (`dtrans.run.parameter_server.tables`).
Where each update needs all rows of a table, the gradients of rows are put among zeros, and it is
updated as any other block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np

from dtrans.ir.array_fns import words
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.exchange import Exchange
from dtrans.protocol.presence import log, named
from dtrans.protocol.served import Vectors
from dtrans.run.parameter_server.tables.row_updates import RowUpdates
from dtrans.run.parameter_server.tables.server_tables import ServerTables
from dtrans.run.parameter_server.tables.table_memory import memory_of
from dtrans.run.parameter_server.update import CompiledUpdate, ServerUpdate


class SyncUpdate:
    """The updates of one server.

    Args:
      update: by the gradients of all trainers.
      state: name to array; the initial values.
      trainers: how many there are.

    Attributes:
      state: name to array; tables are in memory of their own.
      values: the parameters as memory to send from.
      exchange: the one that the update waits for.
      held: what there is of tables.
      spent: the state whose memory an update gives to the new one, by name.
      before: called before each update.
    """

    def __init__(self, update: ServerUpdate, state: dict[str, Any], trainers: int) -> None:
        self.exchange: Exchange | None = None
        self.spent = frozenset(n for phase in update.phases for n in phase.spent)
        self.before: Callable[[], object] = lambda: None
        self._tables = memory_of(update, state)
        self._steps = 0
        self.held = ServerTables(
            update.endpoint,
            update.tables,
            self._tables,
            lambda: self.state,
            lambda name: self._steps,
        )
        watched = frozenset(n for t in self._tables.values() for n in t.reads)
        self._watched: dict[str, Any] = {}
        self._whole = dataclasses.replace(update, watched=watched)
        self._all = frozenset(range(trainers))
        # by whose gradients they are made of, and of how many rows of tables
        self._updates: dict[tuple[frozenset[int], tuple[int, ...]], CompiledUpdate] = {}
        self._run: Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]] | None = None
        self._by_rows = RowUpdates(update.tables, self._taken, self._put_back)
        self.state = {**state, **{n: x for t in self._tables.values() for n, x in t.held.items()}}
        self._publish()

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """Make a step of the gradients of some of the trainers, as far as the first exchange; see
        `go_on`."""
        self.before()
        compiled = lambda sizes: self._update_of(present, step, sizes)
        self._watched = {}
        self._run = self._by_rows.run(compiled, grads, present, self.state, self._watched)
        return self.go_on(None)

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """Make the step as far as the next exchange, and return the vectors for other servers; None
        when it is made.

        Args:
          arrived: what other servers have sent for the exchange before.
        """
        assert self._run is not None
        try:
            self.exchange, outgoing = (
                next(self._run) if arrived is None else self._run.send(arrived)
            )
        except StopIteration as made:
            self._run = self.exchange = None
            self._steps += 1
            # the memory of its gradients and of what other servers sent is written again, so
            # nothing may still read it
            self.state = jax.block_until_ready(made.value) if self._whole.exchanges else made.value
            self._publish()
            return None
        return outgoing

    def _update_of(
        self, present: frozenset[int], step: int, sizes: Mapping[str, int]
    ) -> CompiledUpdate:
        """What makes the new state: one is compiled for every set of trainers, and for some numbers
        of rows."""
        key = present, tuple(sizes.values())
        if key not in self._updates:
            gone = self._all - present
            if gone and not any(of == present for of, _ in self._updates):
                told = "pserver %s goes on without %s, which left: step %d and later ones are of %s"
                log.warning(
                    told,
                    self._whole.endpoint,
                    named(sorted(gone)),
                    step + 1,
                    named(sorted(present)),
                )
            update = self._whole.sized(sizes) if sizes else self._whole
            self._updates[key] = CompiledUpdate(update.sent_by(present) if gone else update)
        return self._updates[key]

    def _publish(self) -> None:
        """The parameters as memory to send from; waits until they are made."""
        names = (*self._whole.params, *self._whole.tables)
        self.values = {n: np.asarray(words(self.state[n])) for n in names if n not in self._tables}

    # -- tables ----------------------------------------------------------------------------------

    def _taken(
        self, table: TableBlock, ids: np.ndarray, size: int, state: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return self._tables[table.name].take(ids, size)

    def _put_back(
        self, table: TableBlock, ids: np.ndarray, made: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return self._tables[table.name].put(ids, made, self._watched)

    def rows(self, name: str, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Rows of a block of a table, as they are."""
        return (
            self._tables[name].rows(ids, train=train)
            if name in self._tables
            else self.values[name][ids]
        )

    def tables(self) -> dict[str, Any]:
        """Blocks of tables, and their state, as after the last step."""
        return {n: x for t in self._tables.values() for n, x in t.final().items()}

    def snapshot(self, patience: float) -> dict[str, Any]:
        """The same, for a thread that reads them while updates go on (`TableMemory.snapshot`)."""
        return {n: x for t in self._tables.values() for n, x in t.snapshot(patience).items()}
