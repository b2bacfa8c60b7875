"""Communication that overlaps a trainer's steps: a background thread, also for GEO-SGD.

A *communicator* is a thread that sends and receives while steps run. It executes these equations of
a trainer's program:

    send, send_rows  queue gradients for the thread, as soon as they are computed
    recv             returns the parameters that the thread received last
    prefetch         records a lookup of table rows. `receive_rows` requests and receives the rows
                     of all recorded lookups before the next equation that may read them
    fetch_barrier    ends a step that receives no parameters
    send_barrier     waits until the servers have applied all queued gradients

With GEO-SGD, trainers update local copies of parameters and of table rows, and *push* (send) the
changes:

    geo_init         registers a table; the trainer stores no rows of it yet
    geo_prefetch     returns rows that the trainer stores; records a lookup of missing rows
    geo_send         ends a step; pushes the changes of parameters and rows every few steps

The first of these equations starts the communicator. From then on, only the communicator uses the
trainer's connections. `drain` stops the communicator. Every other user of the connections calls
`drain` first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from dtrans._jax import JaxprEqn, Primitive
from dtrans.errors import StateError
from dtrans.ir.program import Program
from dtrans.ops import (
    fetch_barrier_p,
    geo_init_p,
    geo_prefetch_p,
    geo_send_p,
    prefetch_p,
    recv_p,
    send_barrier_p,
    send_p,
    send_rows_p,
)
from dtrans.protocol.generations import NewGeneration
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedRows
from dtrans.protocol.tables.table_rows import WantedRows
from dtrans.protocol.trainer.geo_steps import GeoReturn, GeoSnapshot
from dtrans.protocol.trainer.operation import Operation
from dtrans.protocol.trainer.traffic import Leaf
from dtrans.run.parameter_server.communicator import Communicator, Connect, Counts, NoteLost
from dtrans.run.parameter_server.communicator_setup import ONE_BY_ONE, CommunicatorSetup
from dtrans.run.parameter_server.equation_leaves import as_deltas, drop_padding, leaf_of
from dtrans.run.parameter_server.geo import GeoTrainer, pushed_leaves, split_push
from dtrans.run.parameter_server.tables.background_lookups import (
    BackgroundLookups,
    Receive,
    receive_local_rows,
)
from dtrans.run.parameter_server.tables.new_rows import RowMaker


T = TypeVar("T")


log = logging.getLogger("dtrans.trainer")

# Primitives of equations that a communicator executes if they have the parameter `communicator`
OF_COMMUNICATOR = frozenset({send_p, recv_p, prefetch_p, send_rows_p, fetch_barrier_p})
OF_GEO = frozenset({geo_send_p, geo_prefetch_p, geo_init_p})


class BackgroundComm:
    """Executor of a trainer's communication equations in a background thread, during its steps.

    Args:
      connect: function that connects to servers.
      lost: reports a lost server, and returns the exception to raise.
      rejoin: function that closes the old connections after the failure of a process. A failure
        begins a new generation of the job, with a larger number. The argument is the smallest
        number that the new generation can have.
      deadline: seconds that a server may take to answer.
    """

    def __init__(
        self, connect: Connect, lost: NoteLost, rejoin: Callable[[int], None], deadline: float
    ) -> None:
        self._leave_generation = rejoin
        self._setup = CommunicatorSetup(connect, lost, deadline)
        self._lookups = BackgroundLookups()
        self._pending: list[tuple[Leaf, Any]] = []  # gradients of this step that are not queued yet
        self._received: dict[str, jax.Array] | None = None  # parameters for this step's `recv`s
        self._communicator: Communicator | None = None
        self._geo: GeoTrainer | None = None
        # GEO-SGD: snapshot with which a process of the trainer begins, and `push_every`
        self.snapshot: tuple[GeoSnapshot, int] | None = None
        # the startup program's tables and their local rows, until GEO-SGD starts
        self._tables: dict[str, tuple[Leaf, CachedRows]] = {}
        self._rules: dict[Primitive, Callable[..., Sequence[Any]]] = {
            send_p: self._send,
            send_rows_p: self._send_rows,
            prefetch_p: self._prefetch,
            geo_send_p: self._geo_send,
            geo_prefetch_p: self._geo_prefetch,
            geo_init_p: self._geo_init,
        }

    @property
    def geo(self) -> GeoTrainer | None:
        """Object that runs GEO-SGD (local steps, pushed changes) for this trainer.

        The property is None before the startup program.
        """
        return self._geo

    def prepare(self, program: Program) -> None:
        """Record the parameters and tables that a program receives, before its first run.

        If there are new ones, this method stops the communicator (background thread). The next
        communicator receives them, too.
        """
        for eqn in program.eqns:
            if self._setup.lacks(eqn):
                self.drain()
                self._setup.add(eqn)

    def takes(self, eqn: JaxprEqn) -> bool:
        """Return True if this object executes an equation, so that the caller need not."""
        if eqn.primitive is send_barrier_p:
            return bool(self._pending)
        if eqn.primitive in OF_GEO:
            return True
        return eqn.primitive in OF_COMMUNICATOR and "communicator" in eqn.params

    def carry_out(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """Execute one communication equation; return its outputs.

        If an error has ended the background thread, this method raises the error.
        """
        rule = self._rules.get(eqn.primitive)
        if rule is not None:
            return rule(eqn, *values)

        communicator = self._start(f"trainer {eqn.params['trainer_id']}")
        if self._pending:
            self._queue_gradients(communicator)
        if eqn.primitive is fetch_barrier_p:
            return []
        if eqn.primitive is send_barrier_p:
            communicator.barrier()
            return [None]
        if self._received is None:
            # All `recv`s of a step read the same answer. The answer is copied, because the user
            # may donate the arrays, but the answer's memory belongs to the communicator.
            newest = communicator.newest()
            self._received = dict(zip(newest, jax.device_put(list(newest.values())), strict=True))
        return [self._received[eqn.params["names"][0]]]

    def _queue_gradients(self, communicator: Communicator) -> None:
        """Wait until this step's gradients are computed, then queue them for the background thread.

        JAX computes asynchronously. Without this wait, the trainer could dispatch steps much faster
        than its device computes them.
        """
        pending, self._pending = self._pending, []
        self._received = None
        for _, x in pending:
            jax.block_until_ready(x.rows if isinstance(x, RowGradient) else x)
        communicator.put(pending)

    # -- with a communicator ---------------------------------------------------------------------

    def _send(self, eqn: JaxprEqn, gradient: Any) -> Sequence[Any]:
        self._setup.config = eqn.params["communicator"]
        self._pending.append((leaf_of(eqn, eqn.invars[0].aval), gradient))
        return [None]

    def _send_rows(self, eqn: JaxprEqn, uniq: np.ndarray, gradient: Any) -> Sequence[Any]:
        self._setup.config = eqn.params["communicator"]
        leaf = leaf_of(eqn, eqn.invars[1].aval)
        self._pending.append((leaf, RowGradient(drop_padding(uniq, leaf), gradient)))
        return [None]

    def _prefetch(self, eqn: JaxprEqn, uniq: np.ndarray) -> Sequence[Any]:
        self._setup.config = eqn.params["communicator"]
        return [self._lookups.record(eqn, uniq)]

    def receive_rows(self) -> None:
        """Receive the table rows of all recorded lookups, with one request to each server."""
        self._lookups.receive(self._receive)

    def _receive(self, trainer: str, wanted: Sequence[WantedRows]) -> None:
        """Receive table rows for the current step. Gradients of these rows will follow.

        Args:
          trainer: name of the trainer, such as "trainer 0".
          wanted: ids of the rows, and memory for them.
        """
        self._start(trainer)
        self._in_generations(lambda running: running.look_up(wanted, train=True))

    def look_up(self, wanted: Sequence[WantedRows]) -> bool:
        """Receive table rows for evaluation, if a background thread runs.

        Args:
          wanted: ids of the rows, and memory for them.

        Returns:
          False if no thread runs. The caller must then use the connections itself.
        """
        if self._communicator is None:
            return False
        self._in_generations(lambda running: running.look_up(wanted, train=False))
        return True

    @property
    def keeps_running(self) -> bool:
        """True if the background thread must run between steps, because GEO-SGD has started."""
        return self._geo is not None and self._communicator is not None

    def between(self, begin: Callable[[], Operation[T]]) -> T:
        """Run an operation, such as a checkpoint, after servers have answered all messages.

        The background thread runs the operation. Call this method only if `keeps_running` is True.

        Args:
          begin: function that starts the operation.
        """
        return self._in_generations(lambda running: running.between(begin))

    def drain(self, *, discard: bool = False) -> None:
        """Send all queued gradients, and stop the background thread.

        Afterwards, other code can use the trainer's connections.

        Args:
          discard: True to drop the queued gradients.
        """
        self._received = None
        try:
            if self._geo is not None and not discard:
                self._finish_geo(self._geo)
        except BaseException:
            discard = True
            raise
        finally:
            communicator, self._communicator, self._geo = self._communicator, None, None
            if communicator is not None:
                communicator.stop(discard=discard)

    def _start(
        self,
        name: str,
        local_tables: Mapping[str, Leaf] = {},
        counts: Counts = lambda received: {},
    ) -> Communicator:
        """Return the communicator (background thread); start it if none runs.

        Args:
          name: name of the trainer for errors, such as "trainer 0".
          local_tables: GEO-SGD tables with rows that the trainer stores, by name.
          counts: as for `Communicator`.
        """
        if self._communicator is None:
            self._communicator = self._setup.start(name, local_tables, counts)
        return self._communicator

    # -- GEO-SGD ---------------------------------------------------------------------------------

    def _geo_send(self, eqn: JaxprEqn, *values: Any) -> Sequence[Any]:
        """End a step of GEO-SGD. In the startup program (push_every=0), start GEO-SGD."""
        if not eqn.params["push_every"]:
            return self._geo_start(eqn, values)
        geo, p = self._require_geo(), eqn.params
        params, rows_of_tables = split_push(eqn, values)
        for table, uniq, rows in rows_of_tables:
            geo.rows(table).put(drop_padding(uniq, geo.leaf(table)), rows)
        geo.end_step(params, p["push_every"], block_on_pull=p["block_on_pull"])
        self._in_generations(lambda running: geo.settle())
        return geo.local

    def _geo_start(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        self.drain()
        tables, self._tables = self._tables, {}
        leaves = pushed_leaves(eqn)
        self._setup.leaves = {str(i): leaf for i, leaf in enumerate(leaves)}
        self._setup.config = ONE_BY_ONE
        params = list(map(jax.device_put, values))
        local_tables, deltas_of_tables = {}, {}
        for n, (leaf, rows) in tables.items():
            local_tables[n] = leaf
            deltas_of_tables[n] = as_deltas(leaf), rows
        name, trainers = f"trainer {eqn.params['trainer_id']}", eqn.params["trainers"]
        counts: Counts = lambda received: {}
        if self.snapshot is not None:
            snapshot, every = self.snapshot
            counts = lambda received: GeoReturn(snapshot, received, trainers, every).counts
        communicator = self._start(name, local_tables, counts)
        deltas, before = list(map(as_deltas, leaves)), communicator.received_before
        self._geo = GeoTrainer(
            *(communicator, deltas, trainers, params, deltas_of_tables, before),
            look_up=self._look_up_local_rows,
        )
        if self.snapshot is not None:
            self._geo.resume(*self.snapshot)
            if tables:
                # The first step looks up rows, which must contain the changes of the snapshot.
                self._geo.settle()
        return self._geo.local

    def _geo_init(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        """Register a GEO-SGD table, without rows on the trainer yet; return empty arrays.

        Args:
          eqn: the equation, which can initialize the optimizer state of rows.
          args: its operands, the arguments of the user's `init`.
        """
        types = eqn.params["types"]
        self._tables[eqn.params["table"]] = leaf_of(eqn, types[0]), _local_rows(eqn, args)
        return [np.zeros(t.shape, t.dtype) for t in types]

    def _geo_prefetch(self, eqn: JaxprEqn, uniq: np.ndarray) -> Sequence[Any]:
        """Return arrays for the rows that a GEO-SGD step looks up, and for their optimizer state.

        Rows that the trainer does not store are requested, and written into the arrays later.
        """
        local = self._require_geo().rows(eqn.params["table"])
        return self._lookups.record_local(eqn, uniq, local)

    def _look_up_local_rows(self, ids: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the servers' values of rows that a GEO-SGD trainer stores, after a failure.

        The servers also record that the trainer stores these rows.

        Args:
          ids: ids of the rows, by name of the table.
        """
        running = self._communicator
        assert running is not None
        receive: Receive = lambda wanted: running.look_up(wanted, train=True)
        return receive_local_rows(ids, running.local_tables, receive)

    def _finish_geo(self, geo: GeoTrainer) -> None:
        """Push the last changes of GEO-SGD, and wait until the servers have received them."""

        def finish(running: Communicator) -> None:
            geo.finish()
            running.barrier()

        self._in_generations(finish)
        for line in geo.report:
            log.info("%s", line)

    def _in_generations(self, act: Callable[[Communicator], T]) -> T:
        """Call a function with the communicator (background thread).

        A trainer of GEO-SGD keeps its state after the failure of a process. So the trainer connects
        again, and repeats the call.

        Args:
          act: the function.

        Raises:
          NewGeneration: a process was lost, and the trainer does not use GEO-SGD.
        """
        while True:
            assert self._communicator is not None
            try:
                return act(self._communicator)
            except NewGeneration as e:
                if self._geo is None:
                    raise
                self._rejoin(self._geo, e.number)

    def _rejoin(self, geo: GeoTrainer, generation: int) -> None:
        """Connect a GEO-SGD trainer to the servers again, after the failure of a process.

        Args:
          geo: the object that runs GEO-SGD for this trainer.
          generation: smallest number that the new generation (period between two failures) can
            have.
        """
        assert self._communicator is not None
        name, tables = self._communicator.name, self._communicator.local_tables
        self._communicator.stop(discard=True)
        self._communicator = None
        while True:
            self._leave_generation(generation)
            try:
                communicator = self._start(name, tables, geo.counts)
                break
            except NewGeneration as e:
                generation = e.number
        log.warning("%s continues after the failure of a process", name)
        geo.rejoin(communicator, communicator.received_before)

    def _require_geo(self) -> GeoTrainer:
        if self._geo is None:
            raise StateError(
                "this executor has not started GEO-SGD, or a program that ran between its steps "
                "has stopped it; run the trainer's startup program first, and no other program "
                "that communicates before the last step"
            )
        return self._geo


def _local_rows(eqn: JaxprEqn, args: Sequence[Any]) -> CachedRows:
    """Return an empty store for the rows of a table that a GEO-SGD trainer will look up.

    The store can initialize the optimizer state of new rows.
    """
    types = eqn.params["types"]
    state = None
    if types[1:]:
        state = RowMaker(eqn.replace(params={**eqn.params, "types": types[1:]}), args)
    return CachedRows(types, state)
