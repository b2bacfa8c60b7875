"""Specification of one server for the protocol: its blocks, their senders and their readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.protocol.server.exchange import Exchange


Vectors = Mapping[str, Sequence[Any]]  # by the endpoint that they go to, or come from


@dataclasses.dataclass(frozen=True, eq=False)
class TableSpec:
    """A block of a table: trainers ask for its rows, and send gradients of rows.

    Attributes:
      rows: number of rows.
      row: shape of a row.
      dtype: of the entries.
      gradients: trainer to the name of the gradient that it sends.
      backed: the update also reads the rows as the trainer has received them.
      on_trainers: trainers store the rows that they have asked for, and receive their changes
        (GEO-SGD).
      moves: an update also moves rows without a gradient.
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
    """Rows of a block of a table that a trainer sends or receives.

    Attributes:
      ids: increasing row ids in the block.
      rows: the gradient of each row; or each row as it was received.
    """

    ids: np.ndarray
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ServerBlocks:
    """The blocks of one server, and the messages about them.

    Attributes:
      endpoint: of the server.
      trainers: number of trainers.
      sync_mode: an update uses the gradients of all trainers.
      on_trainer_exit: rule for later updates when a trainer has left.
      params: name to type, as bytes travel, of the blocks that trainers ask for.
      gradients: name to type of the gradients that trainers send.
      sent: for each gradient that updates read, trainer to the name that it sends it under.
      arguments: for each step argument that the update reads, trainer to the name that it sends it
        under.
      exchanges: exchanges with other servers in a step, in order.
      tables: blocks whose rows trainers ask for. Their gradients are in `sent`, and not in
        `gradients`.
      backed: blocks that the server stores as each trainer has received them last.
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
    """Update of a synchronous server, one step at a time."""

    @property
    def state(self) -> dict[str, Any]:
        """Name to array."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The parameters as memory to send from."""

    @property
    def exchange(self) -> Exchange | None:
        """The exchange that the update waits for."""

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """Begin an update with the gradients of some trainers; return as `go_on`.

        Gradients of tables are `RowGradient`s.
        """

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """Continue as far as the next exchange.

        Returns:
          The vectors for other servers; None if the update is complete.
        """

    def rows(self, name: str, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Return rows of a block of a table, as memory to send from.

        Args:
          train: the rows are to be updated.
        """


class BlockUpdate(Protocol):
    """Update of an asynchronous server, one block at a time."""

    def begin(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a step of a trainer; return the new state, and the values that blocks of this step
        read."""

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """Return the blocks whose gradients are all here, and that no update has used yet."""

    def apply(
        self,
        block: str,
        grads: Mapping[str, Any],
        state: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the new state after a block's update; it is computed when this returns."""

    def rows(
        self, name: str, ids: np.ndarray, state: Mapping[str, Any], *, train: bool
    ) -> np.ndarray:
        """Return rows, as `StepUpdate.rows`."""
