"""GEO-SGD in a trainer: `dtrans.protocol.trainer.geo_steps` with JAX arrays and a communicator.

A push contains the changes of all parameters, and of the trainer's local rows of tables
(`dtrans.protocol.tables.cached_rows`). The servers' answer contains all parameters, and the local
rows that other trainers have changed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from dtrans._jax import JaxprEqn
from dtrans.errors import StateError
from dtrans.protocol.tables.cached_rows import CachedRows
from dtrans.protocol.trainer.geo_steps import GeoSteps, Values
from dtrans.protocol.trainer.traffic import Group, Leaf


class PushQueue(Protocol):
    """Interface to the queue for a GEO-SGD trainer's pushes, such as a `Communicator`."""

    name: str

    def put(self, group: Group, /) -> None:
        """Queue a push."""

    def newest(self) -> Mapping[str, Any]:
        """Return the newest answer.

        It maps the index of each parameter, as text, to the parameter, and the name of each table
        to the changed rows.
        """

    def received(self) -> int:
        """Return the number of pushes that the newest answer includes."""

    def barrier(self) -> None:
        """Wait until the newest answer includes all pushes."""


class GeoTrainer:
    """Local steps of one trainer, with pushes and pulls.

    Args:
      communicator: sends pushes and receives parameters. Only this trainer uses it.
      leaves: one leaf for each parameter, whose blocks have the names of deltas (`as_deltas`).
      trainers: the number of trainers.
      values: the parameters at the start.
      tables: maps the name of each table to a leaf like those in `leaves`, and to its local rows.
    """

    def __init__(
        self,
        communicator: PushQueue,
        leaves: Sequence[Leaf],
        trainers: int,
        values: Sequence[Any],
        tables: Mapping[str, tuple[Leaf, CachedRows]] = {},
    ) -> None:
        self._communicator = communicator
        self._leaves, self._tables, self._trainers = leaves, tables, trainers
        self._steps = GeoSteps(self, DeviceArithmetic(), trainers, list(values))

    def step(self, values: Sequence[Any], every: int, *, block_on_pull: bool) -> Sequence[Any]:
        """End a step; return the parameters for the next step.

        Args:
          values: the parameters after the step.
          every: the number of steps between two pushes.
          block_on_pull: True to wait for the answer to each push.
        """
        self._steps.step(values, every, block_on_pull=block_on_pull)
        self._settle()
        return self._steps.local

    def rows(self, table: str) -> CachedRows:
        """Return the local rows of a table."""
        return self._tables[table][1]

    def leaf(self, table: str) -> Leaf:
        """Return the leaf of a table whose blocks have the names of deltas."""
        return self._tables[table][0]

    @property
    def report(self) -> list[str]:
        """Log lines: for each table, the number of local rows, and their size in bytes."""
        lines = []
        for table, (_, rows) in self._tables.items():
            lines.append(
                f"{self._communicator.name}: {table}: {len(rows):,} local rows, "
                f"{rows.nbytes:,} bytes"
            )
        return lines

    def finish(self) -> None:
        """Push the remaining changes.

        Raises:
          StateError: the caller has donated the parameters that contain these changes.
        """
        if self._steps.owes and any(x.is_deleted() for x in self._steps.local):
            raise StateError(
                "the parameters of the last step were donated to another computation, so their "
                "changes since the last push are lost; close the job or executor before that "
                "computation"
            )
        self._steps.finish()
        self._settle()

    def _settle(self) -> None:
        """Wait for answers to pushes until the next step may begin."""
        while self._steps.waits:
            self._communicator.barrier()
            self._steps.go_on()

    # -- the queue of `GeoSteps` -------------------------------------------------------------------

    def put(self, deltas: Values) -> None:
        """Queue a push: deltas of parameters, and deltas of local rows."""
        rows = [(leaf, local.pushed(self._trainers)) for leaf, local in self._tables.values()]
        self._communicator.put([*zip(self._leaves, deltas, strict=True), *rows])

    def received(self) -> int:
        """Return the number of pushes that the newest answer includes."""
        return self._communicator.received()

    def newest(self) -> Values:
        """Return the newest parameters; add the changed rows of the same answer to local rows."""
        newest = self._communicator.newest()
        for table, (_, rows) in self._tables.items():
            rows.pulled(newest[table])
        return jax.device_put([newest[str(i)] for i in range(len(self._leaves))])


def pushed_leaves(eqn: JaxprEqn) -> list[Leaf]:
    """Return the parameters that a `geo_send` pushes, without tables."""
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
    """Split the operands of a `geo_send`.

    Returns:
      The parameters, and one (name, ids, arrays) for each table. `ids` are the ids of the rows that
      the step has looked up. `arrays` are the new values of these rows and of their state.
    """
    count = len(eqn.params["names"])
    rest, tables = iter(values[count:]), []
    for table, arrays in eqn.params.get("tables", ()):
        tables.append((table, next(rest), list(itertools.islice(rest, arrays))))
    return values[:count], tables


class DeviceArithmetic:
    """`GeoArithmetic` for JAX arrays."""

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
