"""GEO-SGD in a trainer's process: `dtrans.protocol.geo_steps` on JAX's arrays and a communicator.

Rows of tables, which the trainer keeps beside (`dtrans.protocol.tables.kept_rows`), are pushed and
pulled with the other parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from dtrans.errors import StateError
from dtrans.protocol.geo_steps import GeoSteps, Values
from dtrans.protocol.tables.kept_rows import KeptRows
from dtrans.protocol.traffic import Group, Leaf


class PushQueue(Protocol):
    """Destination of the pushes of a GEO-SGD trainer (`Communicator`)."""

    name: str

    def put(self, group: Group, /) -> None:
        """Let a push be sent."""

    def newest(self) -> Mapping[str, Any]:
        """Return what was received last: parameters by their position, and rows of tables that
        others have changed."""

    def received(self) -> int:
        """Return how many pushes are in what was received last."""

    def barrier(self) -> None:
        """Wait until all pushes are in what was received last."""


class GeoTrainer:
    """The local side of one trainer.

    Args:
      communicator: of its own, which receives the parameters by their position.
      leaves: the parameters, as deltas to be sent.
      trainers: how many there are.
      values: the parameters that it starts from.
      tables: the rows that it keeps of each table, with the table as deltas to be sent, by its
        name.
    """

    def __init__(
        self,
        communicator: PushQueue,
        leaves: Sequence[Leaf],
        trainers: int,
        values: Sequence[Any],
        tables: Mapping[str, tuple[Leaf, KeptRows]] = {},
    ) -> None:
        self._communicator = communicator
        self._leaves, self._tables, self._trainers = leaves, tables, trainers
        self._steps = GeoSteps(self, DeviceArithmetic(), trainers, list(values))

    def step(self, values: Sequence[Any], every: int, *, block_on_pull: bool) -> Sequence[Any]:
        """Take the parameters that a step has made, pushed every so many steps; return those that
        the next step begins with."""
        self._steps.step(values, every, block_on_pull=block_on_pull)
        self._settle()
        return self._steps.local

    def rows(self, table: str) -> KeptRows:
        """The rows of a table."""
        return self._tables[table][1]

    def leaf(self, table: str) -> Leaf:
        """A table, as deltas to be sent."""
        return self._tables[table][0]

    @property
    def report(self) -> list[str]:
        """How many rows of each table are kept, and what they weigh."""
        who = self._communicator.name
        return [
            f"{who}: {n}: {len(x):,} rows are kept, {x.nbytes:,} bytes"
            for n, (_, x) in self._tables.items()
        ]

    def finish(self) -> None:
        """Push what was not. Raises StateError where that is not there any more."""
        if self._steps.owes and any(x.is_deleted() for x in self._steps.local):
            raise StateError(
                "the parameters of the last step were donated to another computation, and what has "
                "changed in them "
                "since the last push is lost: close the executor before"
            )
        self._steps.finish()
        self._settle()

    def _settle(self) -> None:
        while self._steps.waits:
            self._communicator.barrier()
            self._steps.go_on()

    # -- what `GeoSteps` asks of its queue ---------------------------------------------------------

    def put(self, deltas: Values) -> None:
        """Let a push be sent."""
        rows = [(leaf, kept.pushed(self._trainers)) for leaf, kept in self._tables.values()]
        self._communicator.put([*zip(self._leaves, deltas, strict=True), *rows])

    def received(self) -> int:
        """How many pushes are in what was received last."""
        return self._communicator.received()

    def newest(self) -> Values:
        """The parameters that were received last. With them rows of tables are taken in."""
        newest = self._communicator.newest()
        for table, (_, kept) in self._tables.items():
            kept.pulled(newest[table])
        return jax.device_put([newest[str(i)] for i in range(len(self._leaves))])


class DeviceArithmetic:
    """`GeoArithmetic` of JAX's arrays."""

    def copied(self, values: Values) -> Values:
        return _copied(list(values))

    def pushed(self, local: Values, old: Values, trainers: int) -> tuple[Values, Values]:
        return _pushed(trainers)(list(local), old)

    def pulled(self, local: Values, server: Values, old: Values) -> Values:
        return _pulled(list(local), server, old)


@jax.jit
def _copied(values: list[Any]) -> list[jax.Array]:
    # the memory of what was received is written again when nobody refers to it, and a user may
    # donate what they have
    return [x.copy() for x in values]


@functools.cache
def _pushed(trainers: int) -> Any:
    def fn(local: list[Any], old: list[Any]) -> tuple[list[Any], list[Any]]:
        deltas = [((x - o) / trainers).astype(o.dtype) for x, o in zip(local, old, strict=True)]
        # rounded as they are sent, so that old is what the server has
        deltas = jax.lax.optimization_barrier(deltas)
        return deltas, [o + d for o, d in zip(old, deltas, strict=True)]

    return jax.jit(fn)


@jax.jit
def _pulled(local: list[Any], server: list[Any], old: list[Any]) -> list[Any]:
    return [x + (s - o) for x, s, o in zip(local, server, old, strict=True)]
