"""GEO-SGD in a trainer process: it updates local parameters, and pushes its changes to servers.

A *push* is a message with the changes of all parameters since the last push. In a job with
embedding tables, the push also contains the changes of the rows that the trainer stores
(`dtrans.protocol.tables.cached_rows`). The servers' answer contains all parameters, and the stored
rows that other trainers have changed. `dtrans.protocol.trainer.geo_steps` has the algorithm. This
module adds JAX arrays and the thread that communicates.

After the failure of a process, servers have no record of the rows that a trainer stores. So the
trainer looks up all these rows again, after the servers have received its pending push.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.errors import StateError
from dtrans.ops import DELTA
from dtrans.protocol.server_blocks import RowGradient
from dtrans.protocol.tables.cached_rows import CachedRows
from dtrans.protocol.trainer.geo_steps import GeoReturn, GeoSnapshot, GeoSteps, Values
from dtrans.protocol.trainer.traffic import Group, Leaf


class PushQueue(Protocol):
    """Interface to the queue for a GEO-SGD trainer's pushes (messages with changes of parameters).

    `Communicator` implements this interface with a thread.
    """

    name: str

    def put(self, group: Group, steps: int, /) -> None:
        """Queue a push (changes of parameters) to be sent in the background.

        Args:
          group: the changes of each parameter and table.
          steps: number of steps in which these changes were made.
        """

    def newest(self) -> Mapping[str, Any]:
        """Return the newest parameters from the servers.

        The result maps the index of each parameter, such as "0", to the parameter. It maps the name
        of each table to the rows that other trainers have changed.
        """

    def received(self) -> int:
        """Return the number of pushes (messages of changes) that the newest parameters include."""

    def barrier(self) -> None:
        """Wait until the newest parameters from the servers include all queued changes."""


class GeoTrainer:
    """GEO-SGD of one trainer: local steps, pushes of changes, and pulls of the servers' parameters.

    Args:
      communicator: sends pushes and receives parameters. Only this trainer uses it.
      leaves: for each parameter, its servers and the names under which changes are sent
        (`as_deltas`).
      trainers: the number of trainers.
      values: the parameters at the start.
      tables: for each table by name, its servers and names as in `leaves`, and the rows that the
        trainer stores.
      received_before: number of this trainer's steps that each server had received before this
        process, by endpoint; 0 in a new job.
      look_up: function that receives rows of tables. Its argument maps the name of each table to
        sorted ids, and its result maps the name to the rows. None if the job has no snapshots.

    Attributes:
      received_before: the argument `received_before`.
      note_push: function that is called before each push. Its first argument is the number of the
        trainer's steps up to this push. The second argument has the ids of the pushed rows, by name
        of the table.
    """

    def __init__(
        self,
        communicator: PushQueue,
        leaves: Sequence[Leaf],
        trainers: int,
        values: Sequence[Any],
        tables: Mapping[str, tuple[Leaf, CachedRows]] = {},
        received_before: Mapping[str, int] = {},
        look_up: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        self._look_up = look_up
        self._communicator, self.received_before = communicator, received_before
        self._leaves, self._tables, self._trainers = leaves, tables, trainers
        count = max(received_before.values(), default=0)
        self._steps = GeoSteps(self, DeviceArithmetic(), trainers, list(values), count)
        # deltas of rows in the last push, by name of the table
        self._rows_of_push: dict[str, RowGradient] = {}
        self._must_refresh = False  # True from `rejoin` until all local rows were looked up
        self._refreshed: dict[str, RowGradient] = {}
        self.note_push: Callable[[int, Mapping[str, np.ndarray]], object] = lambda count, ids: None

    def step(self, values: Sequence[Any], every: int, *, block_on_pull: bool) -> Sequence[Any]:
        """End a step of the user's program; return the parameters for the next step.

        After every `every` steps, the method also sends changes to the servers. When an answer has
        arrived, it applies the answer.

        Args:
          values: the parameters after the step.
          every: the number of steps between two pushes, such as 10.
          block_on_pull: True to wait for the answer to each push.
        """
        self.end_step(values, every, block_on_pull=block_on_pull)
        self.settle()
        return self.local

    def end_step(self, values: Sequence[Any], every: int, *, block_on_pull: bool) -> None:
        """Record the parameters after a step, without communication. `settle` communicates later.

        Args:
          values, every, block_on_pull: as for `step`.
        """
        self._steps.end_step(values, every, block_on_pull=block_on_pull)

    @property
    def local(self) -> Sequence[Any]:
        """This trainer's parameters for the next step."""
        return self._steps.local

    def rows(self, table: str) -> CachedRows:
        """Return the rows of a table that this trainer stores."""
        return self._tables[table][1]

    def leaf(self, table: str) -> Leaf:
        """Return the servers of a table, and the names under which changes of its rows are sent."""
        return self._tables[table][0]

    @property
    def report(self) -> list[str]:
        """Lines for the log at the end: number and bytes of each table's rows on this trainer."""
        lines = []
        for table, (_, rows) in self._tables.items():
            lines.append(
                f"{self._communicator.name}: {table}: {len(rows):,} local rows, "
                f"{rows.nbytes:,} bytes"
            )
        return lines

    def finish(self) -> None:
        """Push the changes since the last push, at the end of the job.

        Raises:
          StateError: the caller has donated the parameters that contain these changes.
        """
        if self._steps.owes and any(x.is_deleted() for x in self._steps.local):
            raise StateError(
                "the parameters of the last step were donated to another computation, so their "
                "changes since the last push are lost; close the job or executor before that "
                "computation"
            )
        if self._steps.owes:
            self._steps.finish()
            self.settle()

    def settle(self) -> None:
        """Communicate until the next step may begin: push changes, and apply answers of servers."""
        self._communicator.received()  # raises the error of a communicator that has ended
        self._steps.go_on()
        while self._steps.waits:
            self._communicator.barrier()
            if self._must_refresh:
                self._look_up_local_rows()
            self._steps.go_on()

    def _look_up_local_rows(self) -> None:
        """Receive all rows that this trainer stores again, after the failure of a process."""
        assert self._look_up is not None
        ids = {table: np.sort(local.ids) for table, (_, local) in self._tables.items()}
        for table, rows in self._look_up(ids).items():
            self._refreshed[table] = RowGradient(ids[table], rows)
        self._must_refresh = False

    # -- failures ----------------------------------------------------------------------------------

    def counts(self, received: Mapping[str, int]) -> Mapping[str, int]:
        """Return the number of this trainer's steps that each server must record after a failure.

        Args:
          received: number of steps that each server has received, by endpoint.
        """
        return self._steps.counts(received)

    def rejoin(self, communicator: PushQueue, received: Mapping[str, int]) -> None:
        """Continue after the failure of another process, with new connections.

        Args:
          communicator: sends pushes over the new connections.
          received: number of this trainer's steps that each server has received, by endpoint.
        """
        self._communicator, self._must_refresh = communicator, bool(self._tables)
        self._refreshed = {}
        self._steps.rejoin(received)

    def snapshot(
        self, step: int, params: Mapping[str, Any], local: Mapping[str, Any]
    ) -> GeoSnapshot:
        """Return a snapshot of this trainer, from which a new process can continue.

        Args:
          step: number of steps so far.
          params: parameters before the next step. A parameter has the name of its first block on a
            server, here and in the result.
          local: arrays that only this trainer has, such as optimizer state, by name.
        """
        steps, names = self._steps, self._names
        changes = dict(zip(names, steps.unpushed([params[n] for n in names]), strict=True))
        deltas, pending = steps.pending
        by_name = dict(zip(names, deltas, strict=True)) if pending else {}
        tables = {}
        for table, (_, rows) in self._tables.items():
            tables[table] = rows.snapshot(self._rows_of_push[table] if pending else None)
        return GeoSnapshot(step, steps.count, pending, changes, by_name, local, tables)

    def resume(self, snapshot: GeoSnapshot, push_every: int) -> None:
        """Begin with a snapshot in a process that replaces a lost trainer.

        The lost trainer may have pushed changes after the snapshot. So only the other changes in
        the snapshot are added to the servers' parameters.

        Args:
          snapshot: the snapshot.
          push_every: number of steps between two pushes.
        """
        begin = GeoReturn(snapshot, self.received_before, self._trainers, push_every)
        changes, deltas = [], []
        for name, leaf in zip(self._names, self._leaves, strict=True):
            change = np.array(snapshot.changes[name])
            delta = np.array(snapshot.deltas.get(name, np.zeros_like(change)))
            blocks = zip(leaf.blocks(change), leaf.blocks(delta), strict=True)
            for (endpoint, _, x), (_, _, d) in blocks:
                x[...], d[...] = begin.split(endpoint, x, d)
            changes.append(change)
            deltas.append(delta)
        for table, (leaf, rows) in self._tables.items():
            here, repeated = begin.split_rows(table, leaf.endpoints, leaf.spans)
            rows.resume(here)
            self._rows_of_push[table] = repeated
        self._must_refresh = bool(self._tables)
        self._steps.resume(changes, deltas, begin, self.received_before)

    @property
    def _names(self) -> list[str]:
        return [leaf.names[0].removesuffix(DELTA) for leaf in self._leaves]

    # -- the queue of `GeoSteps` -------------------------------------------------------------------

    def put(self, deltas: Values, steps: int) -> None:
        """Queue a push: the given changes of parameters, and the changes of stored table rows.

        Args:
          deltas: the change of each parameter.
          steps: number of steps in which the changes were made.
        """
        group: list[tuple[Leaf, Any]] = [*zip(self._leaves, deltas, strict=True)]
        for table, (leaf, local) in self._tables.items():
            self._rows_of_push[table] = local.pushed(self._trainers)
            group.append((leaf, self._rows_of_push[table]))
        if self._tables:
            self.note_push(self._steps.count, {n: x.ids for n, x in self._rows_of_push.items()})
        self._communicator.put(group, steps)

    def repeat(self, deltas: Values, steps: int, endpoints: Collection[str]) -> None:
        """Queue a push again for the servers that had not received it before a failure.

        Args:
          deltas: the change of each parameter.
          steps: number of steps in which the changes were made.
          endpoints: endpoints of these servers.
        """
        group: list[tuple[Leaf, Any]] = []
        for leaf, x in zip(self._leaves, deltas, strict=True):
            group += _blocks_at(endpoints, leaf, np.asarray(x))
        for table, (leaf, _) in self._tables.items():
            group.append((leaf.at(endpoints), self._rows_of_push[table]))
        self._communicator.put(group, steps)

    def received(self) -> int:
        """Return the number of pushes (messages with changes) that the newest parameters include.

        After a failure, return -1 until the trainer has looked up its rows of tables again.
        """
        return -1 if self._must_refresh else self._communicator.received()

    def newest(self) -> Values:
        """Return the newest parameters from the servers, and update the stored rows of tables."""
        newest = self._communicator.newest()
        for table, (_, rows) in self._tables.items():
            if table in newest:  # the first answer of a communicator contains no rows
                rows.pulled(newest[table])
            if table in self._refreshed:
                rows.pulled(self._refreshed.pop(table))
        return jax.device_put([newest[str(i)] for i in range(len(self._leaves))])


def _blocks_at(
    endpoints: Collection[str], leaf: Leaf, array: np.ndarray
) -> list[tuple[Leaf, np.ndarray]]:
    """Cut an array into blocks (rows), one for each server; return those of the given servers.

    The result has pairs (server and name of the block, the block).
    """
    found = []
    for endpoint, name, rows in leaf.blocks(array):
        if endpoint in endpoints:
            block = Leaf((endpoint,), (name,), rows.shape[:1], rows.shape, rows.dtype)
            found.append((block, rows))
    return found


def pushed_leaves(eqn: JaxprEqn) -> list[Leaf]:
    """Return the parameters (without tables) that a `geo_send` pushes, with servers and names."""
    p, leaves = eqn.params, []
    # The operands after the parameters belong to tables. `zip` leaves them out, because it stops at
    # the end of its shortest argument.
    operands = zip(p["epmap"], p["names"], p["sections"], eqn.invars, strict=False)
    for endpoints, names, rows, v in operands:
        leaves.append(Leaf(endpoints, names, rows, v.aval.shape, v.aval.dtype))
    return leaves


def split_push(
    eqn: JaxprEqn, values: Sequence[Any]
) -> tuple[Sequence[Any], list[tuple[str, Any, list[Any]]]]:
    """Split the operands of a `geo_send` equation into parameters and rows of tables.

    Args:
      eqn: the equation.
      values: its operands.

    Returns:
      The parameters, and one (name, ids, arrays) for each table. `ids` are the ids of the rows that
      the step has looked up. `arrays` are the new values of these rows and of their optimizer
      state.
    """
    count = len(eqn.params["names"])
    rest, tables = iter(values[count:]), []
    for table, arrays in eqn.params.get("tables", ()):
        tables.append((table, next(rest), list(itertools.islice(rest, arrays))))
    return values[:count], tables


class DeviceArithmetic:
    """Arithmetic of GEO-SGD on JAX arrays, as `GeoSteps` needs it (`GeoArithmetic`)."""

    def copied(self, values: Values) -> Values:
        return _copied(list(values))

    def pushed(self, local: Values, old: Values, trainers: int) -> tuple[Values, Values]:
        return _pushed(trainers)(list(local), old)

    def pulled(self, local: Values, server: Values, old: Values) -> Values:
        return _pulled(list(local), server, old)


@jax.jit
def _copied(values: list[Any]) -> list[jax.Array]:
    # The values are copied, because the memory of received arrays is reused, and users may donate
    # the results of a step.
    return [x.copy() for x in values]


@functools.cache
def _pushed(trainers: int) -> Any:
    def fn(local: list[Any], old: list[Any]) -> tuple[list[Any], list[Any]]:
        deltas = [((x - o) / trainers).astype(o.dtype) for x, o in zip(local, old, strict=True)]
        # Without the barrier, XLA may leave out the rounding of the deltas. Then `old` would differ
        # from the server's value.
        deltas = jax.lax.optimization_barrier(deltas)
        return deltas, [o + d for o, d in zip(old, deltas, strict=True)]

    return jax.jit(fn)


@jax.jit
def _pulled(local: list[Any], server: list[Any], old: list[Any]) -> list[Any]:
    return [x + (s - o) for x, s, o in zip(local, server, old, strict=True)]
