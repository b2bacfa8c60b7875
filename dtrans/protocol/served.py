"""What the protocol of one server is about: who sends what, and who asks for what; not how an
update is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.protocol.exchange import Exchange


Vectors = Mapping[str, Sequence[Any]]  # by endpoint: where they go, or where they came from


@dataclasses.dataclass(frozen=True, eq=False)
class ServedRows:
    """A block of a table: trainers ask for rows of it, and send the gradients of rows.

    Attributes:
      rows: how many it has.
      row: the shape of one.
      dtype: of its entries.
      gradients: trainer to the name under which it sends the gradient.
      backed: whether the update reads what the trainer has received of the rows, too.
      kept: whether trainers keep the rows that they have asked for, and are told which of these
        have changed (GEO-SGD).
      moves: whether an update moves rows too of which there is no gradient.
      staleness: how many updates rows may lack that a trainer has announced
        (`dtrans.protocol.tables.rows_ahead`).
    """

    rows: int
    row: tuple[int, ...]
    dtype: Any
    gradients: Mapping[int, str]
    backed: bool = False
    kept: bool = False
    moves: bool = False
    staleness: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """What a trainer sends for a block of a table, or has received of it.

    Attributes:
      ids: the numbers of rows in the block, increasing.
      rows: the gradient of each; or each as it was received.
    """

    ids: np.ndarray
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ServedBlocks:
    """The blocks that one server holds, and what is sent about them.

    Attributes:
      endpoint: the server's.
      trainers: how many there are to be.
      sync_mode: whether an update is of all trainers.
      on_trainer_exit: what later updates are made of when a trainer has left.
      params: the blocks that trainers ask for: name to type, as bytes travel.
      gradients: what trainers send: name to type.
      sent: of each gradient that is read: trainer to the name under which it comes.
      arguments: the arguments of the step that the update reads: name to what each trainer sends it
        as.
      exchanges: the exchanges with other servers that a step has, in order.
      tables: the blocks of which trainers ask for rows; their gradients are in `sent`, and not in
        `gradients`.
      backed: the blocks of which the server keeps what each trainer has received last.
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
    tables: Mapping[str, ServedRows] = dataclasses.field(default_factory=dict)


class StepUpdate(Protocol):
    """What makes the new state of a synchronous server, one step at a time."""

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
        """Make a step of the gradients of some trainers, as far as the first exchange; see `go_on`.

        Those of tables are `RowGradient`s.
        """

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """Make it as far as the next exchange, and return the vectors for other servers; None when
        it is made."""

    def rows(self, name: str, ids: np.ndarray, *, train: bool) -> np.ndarray:
        """Rows of a block of a table, as memory to send from; `train`: whether they are to be
        updated."""


class BlockUpdate(Protocol):
    """What makes the new state of an asynchronous server, one block at a time."""

    def begin(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a step of a trainer: the state that is new, and the values that blocks of this step
        read."""

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """The blocks whose gradients have all come, and that were not updated with them yet."""

    def apply(
        self,
        block: str,
        grads: Mapping[str, Any],
        state: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The state that is new after a block's update; it is computed when this returns."""

    def rows(
        self, name: str, ids: np.ndarray, state: Mapping[str, Any], *, train: bool
    ) -> np.ndarray:
        """As `StepUpdate.rows`."""
