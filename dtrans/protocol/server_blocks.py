"""Specification of one server: its blocks and tables, and the interface to its updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.protocol.server.exchange import Exchange


Vectors = Mapping[str, Sequence[Any]]  # endpoint of a server -> vectors sent to or from it


@dataclasses.dataclass(frozen=True, eq=False)
class TableSpec:
    """Block of a table. Trainers request rows of the block, and send gradients of these rows.

    Attributes:
      rows: number of rows.
      row: shape of a row.
      dtype: dtype of the rows.
      gradients: maps the id of each trainer to the name of the gradient that the trainer sends.
      backed: True if the update also reads the values that the trainer has received (delay
        compensation).
      on_trainers: True if trainers store the rows that they have requested, and the server sends
        them other trainers' changes of these rows (GEO-SGD).
      moves: True if an update also changes rows without a gradient.
      staleness: number of newest updates that announced rows need not include
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
    """Row ids, and the gradient or the values of these rows.

    Attributes:
      ids: increasing row ids.
      rows: gradient or value of each row, in the order of `ids`.
    """

    ids: np.ndarray
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ServerBlocks:
    """Blocks of one server, and the arrays that trainers send and receive.

    Attributes:
      endpoint: endpoint of the server.
      trainers: number of trainers.
      sync_mode: True if an update uses the gradients of all trainers.
      on_trainer_exit: rule for trainers that leave before other trainers do.
      params: shape and dtype of the array that a server sends for each block that trainers request
        (dict by block's name).
      gradients: shape and dtype of each gradient that trainers send, by name. Gradients of tables
        are not included.
      sent: one dict for each gradient that updates read. The dict maps the id of a trainer to the
        name under which this trainer sends the gradient.
      arguments: for each step argument that the update reads, a dict. It maps the id of a trainer
        to the name under which this trainer sends the argument.
      exchanges: exchanges with other servers in a step, in order.
      backed: names of the blocks with delay compensation. For these blocks, the server stores the
        values that it has last sent to each trainer.
      tables: maps the name of each block of a table to its specification.
      adds_changes: True if trainers send changes of parameters, which the server adds (GEO-SGD).
      levels: if the types of gradients depend on a level, which the trainers' messages name: the
        types at each level, like `gradients`.
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
    adds_changes: bool = False
    levels: Sequence[Mapping[str, Any]] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class UpdatePart:
    """Part of a synchronous server's update. It reads no results of other parts.

    The rows of a large block may be divided over several parts. These parts are then in the order
    of the rows.

    Attributes:
      sent: gradients that the part reads, as in `ServerBlocks.sent`.
      params: names of the parameter blocks that the part updates.
      rows: rows of these gradients and blocks; `slice(None)` if the part has all rows.
    """

    sent: Sequence[Mapping[int, str]]
    params: Sequence[str]
    rows: slice = dataclasses.field(default_factory=lambda: slice(None))


class StepUpdate(Protocol):
    """Update of a synchronous server, which computes one step at a time."""

    @property
    def parts(self) -> Sequence[UpdatePart]:
        """Parts of the update; empty if the update runs as one part."""

    def update_part(
        self, number: int, grads: Mapping[str, Any], present: frozenset[int], step: int
    ) -> Mapping[str, Any]:
        """Run one part before `begin`; return its rows of the new parameters, by block name.

        The state stays unchanged until `begin`, which runs the remaining parts.

        Args:
          number: index of the part in `parts`.
          grads: gradients by name, at least those of the part.
          present, step: as for `begin`.
        """

    @property
    def state(self) -> dict[str, Any]:
        """Arrays of the state, by name."""

    @property
    def old(self) -> dict[str, Any] | None:
        """Arrays of the previous state, by name; None if the previous state is not stored."""

    def newest(self) -> dict[str, Any]:
        """Return the arrays of the state, by name. Tables are snapshots."""

    def evict(self, name: str, unused_for: int) -> object:
        """Evict rows of a table's block between two updates, in a copy of another server's state.

        The arguments are those of `dtrans.protocol.tables.stored_tables.StoredTables.evict`.
        """

    def state_blocks(self) -> tuple[list[tuple[str, np.ndarray]], dict[str, int]]:
        """Return the name and the values of each array of the state, to be sent to a backup.

        The second result has the number of rows of each array of `Primary.varying`, by name.
        """

    def merge(
        self, grads: Mapping[str, Any], present: frozenset[int], step: int
    ) -> Mapping[str, Any]:
        """Reduce gradients over trainers; return the results, which are then passed to `begin`.

        The arguments are those of `begin`.
        """

    @property
    def values(self) -> Mapping[str, Any]:
        """Arrays, or `RowPieces`, that the server sends for the parameters, by block name."""

    @property
    def exchange(self) -> Exchange | None:
        """Exchange whose vectors the update waits for; None if it does not wait."""

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """Start an update, and compute it up to the first exchange.

        Args:
          grads: gradients by name; gradients of tables are `RowGradient`s.
          present: ids of the trainers whose gradients the update uses.
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

    def create_rows(self, ids: Mapping[str, np.ndarray]) -> None:
        """Create rows that do not exist, before `rows` reads them with `train`.

        Args:
          ids: row ids in each block of a table, by the block's name.
        """

    def rows(self, name: str, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Return rows of a table's block, as an array to send.

        Args:
          name: name of the block.
          ids: row ids in the block.
          train: True if gradients of these rows follow.
        """


class BlockUpdate(Protocol):
    """Update of an asynchronous server, which computes one block at a time."""

    def begin(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the block of learning rate schedules (`lr_sched`) once, for one step of a trainer.

        Returns:
          The changed state, and the outputs that the step's updates of blocks read.
        """

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """Return the names of the blocks that can be updated.

        Args:
          arrived: names of the complete gradients.
          used: names of blocks to leave out, because this step has already updated them.
        """

    def apply(
        self,
        block: str,
        grads: Mapping[str, Any],
        state: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Compute the update of one block; return the changed state when it is complete.

        Args:
          block: name of the block.
          grads: gradients by name.
          state: the state before the update.
          values: outputs of `begin` that the update reads.
        """

    def create_rows(self, ids: Mapping[str, np.ndarray]) -> None:
        """Create rows that do not exist. See `StepUpdate.create_rows`."""

    def rows(
        self, name: str, ids: np.ndarray, state: Mapping[str, Any], *, train: bool
    ) -> np.ndarray:
        """Return rows of a table's block. See `StepUpdate.rows`."""
