"""Specification of one server for the protocol: its blocks, and the messages about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.protocol.server.exchange import Exchange


Vectors = Mapping[str, Sequence[Any]]  # endpoint of another server: vectors sent to or from it


@dataclasses.dataclass(frozen=True, eq=False)
class TableSpec:
    """Block of a table: trainers request some of its rows, and send gradients of these rows.

    Attributes:
      rows: number of rows.
      row: shape of a row.
      dtype: dtype of the rows.
      gradients: name of the gradient that each trainer sends, by trainer id.
      backed: True if the update also reads the values that the trainer has received (delay
        compensation).
      on_trainers: True if trainers store the rows that they have requested, and receive their
        changes (GEO-SGD).
      moves: True if an update also changes rows without a gradient.
      staleness: number of updates that announced rows may lack
        (`dtrans.protocol.tables.rows_ahead`).
    """

    rows: int
    row: tuple[int, ...]
    dtype: Any
    gradients: Mapping[int, str]
    backed: bool = False
    on_trainers: bool = False
    moves: bool = False
    staleness: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """Row ids with an array for each row: a gradient of rows, or values of rows.

    Attributes:
      ids: increasing row ids.
      rows: gradient or value of each row.
    """

    ids: np.ndarray
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ServerBlocks:
    """Blocks of one server, and the messages about them.

    Attributes:
      endpoint: endpoint of the server.
      trainers: number of trainers.
      sync_mode: True if an update uses the gradients of all trainers.
      on_trainer_exit: rule for updates after a trainer has left.
      params: type in which each block that trainers request is sent, by block name.
      gradients: type of each gradient that trainers send, by name; gradients of tables are left
        out.
      sent: for each gradient that updates read, a dict: trainer id -> name under which this
        trainer sends the gradient.
      arguments: for each step argument that the update reads, by name, a dict: trainer id -> name
        under which this trainer sends the argument.
      exchanges: exchanges with other servers in a step, in order.
      backed: names of the blocks for which the server stores the values that each trainer has
        received last (delay compensation).
      tables: specification of each block of a table, by block name.
    """

    endpoint: str
    trainers: int
    sync_mode: bool
    on_trainer_exit: str
    params: Mapping[str, Any]
    gradients: Mapping[str, Any]
    sent: Sequence[Mapping[int, str]]
    arguments: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    exchanges: Sequence[Exchange] = ()
    backed: frozenset[str] = frozenset()
    tables: Mapping[str, TableSpec] = dataclasses.field(default_factory=dict)


class StepUpdate(Protocol):
    """Update of a synchronous server, which computes one step at a time."""

    @property
    def state(self) -> dict[str, Any]:
        """The arrays of the state, by name."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The parameters by block name, as arrays whose memory can be sent."""

    @property
    def exchange(self) -> Exchange | None:
        """The exchange that the update waits for; None if it does not wait."""

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """Start an update, and compute it up to the first exchange.

        Args:
          grads: gradients by name; gradients of tables are `RowGradient`s.
          present: ids of the trainers whose gradients are used.
          step: number of complete updates.

        Returns:
          The vectors for other servers; None if the update is complete.
        """

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """Continue the update up to the next exchange.

        Args:
          arrived: vectors from other servers.

        Returns:
          The vectors for other servers; None if the update is complete.
        """

    def rows(self, name: str, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Return rows of a table's block, as an array whose memory can be sent.

        Args:
          name: name of the block.
          ids: row ids in the block.
          train: True if gradients of these rows follow.
        """


class BlockUpdate(Protocol):
    """Update of an asynchronous server, which computes one block at a time."""

    def begin(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the lr_sched block once for a step of a trainer.

        Returns:
          The changed state, and the outputs that the updates of this step's blocks read.
        """

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """Return the blocks whose gradients have all arrived, except the blocks in `used`."""

    def apply(
        self,
        block: str,
        grads: Mapping[str, Any],
        state: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Update one block, wait for the computation, and return the changed state.

        Args:
          block: name of the block.
          grads: gradients by name.
          state: the state before the update.
          values: outputs of `begin` that the update reads.
        """

    def rows(
        self, name: str, ids: np.ndarray, state: Mapping[str, Any], *, train: bool
    ) -> np.ndarray:
        """Return rows of a table's block. See `StepUpdate.rows`."""
