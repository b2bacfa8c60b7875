"""Servers of a job in one process: each updates its state on its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Sharding

from dtrans._jax import is_traced
from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.exchange import Exchange
from dtrans.protocol.served import RowGradient, Vectors
from dtrans.run.parameter_server.mesh_placement import MeshPlacement, put
from dtrans.run.parameter_server.tables.missed_steps import MissedSteps
from dtrans.run.parameter_server.tables.row_updates import RowUpdates, put_there, taken_there
from dtrans.run.parameter_server.tables.traced_tables import TracedMemory, gradients_with_room
from dtrans.run.parameter_server.update import CompiledUpdate, ServerUpdate


class MeshServers:
    """All servers of a job.

    Args:
      plan: the job's plan.
      placement: the servers' devices.
      donate: as in `MeshJob`.
      late: as in `LateRowsJob`.
    """

    def __init__(
        self, plan: PServerPlan, placement: MeshPlacement, *, donate: bool, late: bool
    ) -> None:
        self._plan, self._at, self._trainers = plan, placement.servers, placement.trainers
        self._options = {"donate": donate, "late": late}

    @cached_property
    def _servers(self) -> dict[str, _MeshServer]:
        found = {}
        for ep, programs in self._plan.servers.items():
            update = ServerUpdate.of(programs.main)
            found[ep] = _MeshServer(update, self._at[ep], self._trainers, **self._options)
        return found

    def update(
        self, state: dict[str, dict[str, Any]], grads: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Make one update of every server, one level of exchanges after the other.

        Args:
          state: endpoint to the server's state; it gets the new one.
          grads: endpoint to the gradients that the server receives.
        """
        runs = {ep: self._servers[ep].run(grads[ep], held) for ep, held in state.items()}
        arrived: dict[str, Any] = dict.fromkeys(runs)
        at: dict[str, tuple[Exchange, Vectors]] = {}  # the exchange of each, and what it sends
        while arrived:
            for ep, vectors in arrived.items():
                try:
                    at[ep] = runs[ep].send(vectors)
                except StopIteration as done:
                    at.pop(ep, None)
                    state[ep] = done.value
            level = min((exchange.level for exchange, _ in at.values()), default=None)
            arrived = {}
            for ep, (exchange, _) in at.items():
                if exchange.level == level:
                    vectors = {source: at[source][1][ep] for source in exchange.sources}
                    arrived[ep] = jax.device_put(vectors, self._at[ep])


class _MeshServer:
    """The updates of one server on its device.

    Args:
      update: what it computes.
      at: the device.
      trainers: the number of trainers.
      donate: as in `MeshJob`.
      late: as in `LateRowsJob`.
    """

    def __init__(
        self, update: ServerUpdate, at: Sharding, trainers: int, *, donate: bool, late: bool
    ) -> None:
        self._update, self._at, self._trainers, self._donate = update, at, trainers, donate
        # a state is a value: nothing beside it says which rows are behind
        is_whole = lambda t: t.whole or (t.moves and not late)
        self._tables = {
            n: dataclasses.replace(t, whole=is_whole(t)) for n, t in update.tables.items()
        }
        moving = [t for t in self._tables.values() if t.moves and not t.whole]
        self._missed = {t.name: MissedSteps(update, t, None) for t in moving}
        if self._missed:
            reads = frozenset(n for missed in self._missed.values() for n in missed.reads)
            self._update = dataclasses.replace(update, watched=reads)
        self._by_rows = RowUpdates(self._tables, taken_there, partial(put_there, donate=donate))
        self._compiled: dict[tuple[int, ...], CompiledUpdate] = {}  # by the rows of each table

    def run(
        self, grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Make a step, as `CompiledUpdate.run` does, from gradients on any devices."""
        there = {n: x if isinstance(x, RowGradient) else put(x, self._at) for n, x in grads.items()}
        if any(isinstance(x, RowGradient) and is_traced(x.rows) for x in there.values()):
            return self._traced(there, state)
        assert not self._missed, "rows that catch up late are traced"
        held = {n: put(x, self._at) for n, x in state.items()} if self._update.tables else state
        return self._by_rows.run(self._sized, there, range(self._trainers), held)

    def _traced(
        self, grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Generator[tuple[Exchange, Vectors], Vectors, dict[str, Any]]:
        """Trace a step as `RowUpdates.run` makes it, with room for all rows: their ids are not
        known."""
        given = {n: x for n, x in grads.items() if not isinstance(x, RowGradient)}
        read, numbers = dict(state), dict[str, Any]()
        memory = {
            n: TracedMemory(t, self._missed.get(n), state)
            for n, t in self._tables.items()
            if not t.whole
        }
        for n, t in self._tables.items():
            at, each = gradients_with_room(t, {g: grads[g] for g in t.gradients.values()})
            given |= each
            if not t.whole:
                numbers[n] = at
                read |= memory[n].take(at, len(at))
        watched: dict[str, Any] = {}
        update = self._sized({n: len(at) for n, at in numbers.items()})
        made = yield from update.run(given, read, watched)
        for n, at in numbers.items():
            made |= memory[n].put(at, made, watched)
        return made

    def _sized(self, sizes: Mapping[str, int]) -> CompiledUpdate:
        """Return the update for a number of rows of each table."""
        key = tuple(sizes.values())
        if key not in self._compiled:
            update = self._update.sized(sizes) if sizes else self._update
            prepare = partial(_unstacked, update.sent)
            self._compiled[key] = CompiledUpdate(update, donate=self._donate, prepare=prepare)
        return self._compiled[key]


def _unstacked(sent: Sequence[Mapping[int, str]], grads: Mapping[str, Any]) -> dict[str, Any]:
    """Return each trainer's gradients by name.

    Args:
      sent: of each gradient, trainer to the name under which it sends it.
      grads: under trainer 0's name the stacked shards of all trainers, or one array that is the
        same for all. Gradients of tables are here for each trainer already.
    """
    each: dict[str, Any] = {}
    for names in sent:
        if all(n in grads for n in names.values()):
            each |= {n: grads[n] for n in names.values()}
            continue
        x = grads[names[0]]
        parts = [row for shard in x for row in shard] if isinstance(x, list) else [x] * len(names)
        each |= {name: parts[k] for k, name in names.items()}
    return each
