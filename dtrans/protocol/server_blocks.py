"""Description of one parameter server: the arrays that it stores, sends and receives.

A *block* is an array on one server: a whole parameter, or some rows of a parameter or table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.protocol.server.exchange import Exchange


Vectors = Mapping[str, Sequence[Any]]  # endpoint of a server -> vectors sent to or from it


@dataclasses.dataclass(frozen=True, eq=False)
class TableSpec:
    """Part of an embedding table on one server, from which trainers request single rows.

    Trainers send the gradients of the rows that they have requested.

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
      staleness: number of the newest updates that rows may lack, if a trainer requests them early,
        before the step that uses them (`dtrans.protocol.tables.rows_ahead`).
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
    """Gradient of a table that is zero in most rows: the ids of the other rows, and their values.

    The class is also used for values of rows instead of gradients.

    Attributes:
      ids: increasing row ids.
      rows: gradient or value of each row, in the order of `ids`.
    """

    ids: np.ndarray
    rows: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ServerBlocks:
    """Description of one server: its parameters and tables, and the arrays in its messages.

    A *block* is an array on one server: a whole parameter, or some rows of a parameter or table.

    Attributes:
      endpoint: endpoint of the server.
      trainers: number of trainers.
      sync_mode: True if an update uses the gradients of all trainers.
      on_trainer_exit: the user's option for trainers that leave before other trainers do.
      params: name of each block that trainers request -> shape and dtype of the array that the
        server sends.
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
      levels: for compressed gradients with sizes that change during a ramp-up (`dtrans.TopK`), the
        types of gradients in each phase of the ramp-up, like `gradients`. Trainers' messages have
        the index of the phase. Empty otherwise.
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
    """Part of a server's update that can run before all gradients of the step have arrived.

    It reads no results of other parts. The rows of a large parameter may be divided over several
    parts. These parts are then in the order of the rows.

    Attributes:
      sent: gradients that the part reads, as in `ServerBlocks.sent`.
      params: names of the parameter blocks that the part updates.
      rows: rows of these gradients and blocks; `slice(None)` if the part has all rows.
    """

    sent: Sequence[Mapping[int, str]]
    params: Sequence[str]
    rows: slice = dataclasses.field(default_factory=lambda: slice(None))


class StepUpdate(Protocol):
    """Interface of a synchronous server to its update, which computes a step's new parameters."""

    @property
    def parts(self) -> Sequence[UpdatePart]:
        """Parts of the update that can run separately; empty if the update runs as a whole."""

    def update_part(
        self, number: int, grads: Mapping[str, Any], present: frozenset[int], step: int
    ) -> Mapping[str, Any]:
        """Compute some of a step's new parameters as soon as their gradients have arrived.

        The parameters can be sent early. The state stays unchanged until `begin`, which computes
        the rest.

        Args:
          number: index of the part in `parts`.
          grads: gradients by name, at least those of the part.
          present, step: as for `begin`.

        Returns:
          The part's rows of the new parameters, by the name of the block (a parameter's rows on
          this server).
        """

    @property
    def state(self) -> dict[str, Any]:
        """Arrays of the state, by name."""

    @property
    def old(self) -> dict[str, Any] | None:
        """Arrays of the previous state, by name; None if the previous state is not stored."""

    def newest(self) -> dict[str, Any]:
        """Return the arrays of the state by name. For a table, it is a copy of its current rows."""

    def evict(self, name: str, unused_for: int) -> object:
        """Delete rows of a table, if this update runs on a copy of another server's state.

        The arguments are those of `dtrans.protocol.tables.stored_tables.StoredTables.evict`.
        """

    def state_blocks(self) -> tuple[list[tuple[str, np.ndarray]], dict[str, int]]:
        """Return all arrays of the state, to send them to another server that stores a copy.

        Returns:
          The name and the values of each array; and the number of rows of each array with a varying
          number (`Primary.varying`), by name.
        """

    def merge(
        self, grads: Mapping[str, Any], present: frozenset[int], step: int
    ) -> Mapping[str, Any]:
        """Reduce gradients over trainers, before `begin` computes the update from the results.

        The arguments are those of `begin`.
        """

    @property
    def values(self) -> Mapping[str, Any]:
        """Current parameters to send, by the name of the block (a parameter's rows here)."""

    @property
    def exchange(self) -> Exchange | None:
        """Exchange with other servers for which the update waits now; None if it does not wait.

        Some updates need values of other servers, such as the norm of all gradients.
        """

    def begin(self, grads: Mapping[str, Any], present: frozenset[int], step: int) -> Vectors | None:
        """Start the update of a step; stop when it needs values of other servers.

        For example, clipping by the global norm needs the norms of the other servers' gradients.

        Args:
          grads: gradients by name; gradients of tables are `RowGradient`s.
          present: ids of the trainers that computed the gradients.
          step: number of complete updates.

        Returns:
          The vectors for other servers; None if the update is complete.
        """

    def go_on(self, arrived: Vectors | None) -> Vectors | None:
        """Continue the update with values of other servers, until it needs further values.

        Args:
          arrived: vectors from other servers.

        Returns:
          The vectors for other servers; None if the update is complete.
        """

    def create_rows(self, ids: Mapping[str, np.ndarray]) -> None:
        """Store new rows of a table, with initial values, before a trainer first reads them.

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
    """Interface of an asynchronous server to its updates, one for each parameter.

    In contrast to `StepUpdate`, a parameter is updated as soon as one trainer's gradient has
    arrived. A *block* is a parameter's rows on this server.
    """

    def begin(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Compute the values of a trainer's step that all updates read, such as the learning rate.

        Args:
          state: the arrays of the server's state, by name.

        Returns:
          The changed arrays of the state, and the values for the updates.
        """

    def ready(self, arrived: Collection[str], used: Collection[str]) -> list[str]:
        """Return the names of the blocks that can be updated with the gradients that have arrived.

        A block is a parameter's rows on this server.

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
        """Update one block (a parameter's rows on this server) with a trainer's gradient.

        The method waits until the result is computed.

        Args:
          block: name of the block.
          grads: gradients by name.
          state: the arrays of the server's state before the update, by name.
          values: results of `begin` that the update reads, such as the learning rate.

        Returns:
          The changed arrays of the state, by name.
        """

    def create_rows(self, ids: Mapping[str, np.ndarray]) -> None:
        """Create rows that do not exist. See `StepUpdate.create_rows`."""

    def rows(
        self, name: str, ids: np.ndarray, state: Mapping[str, Any], *, train: bool
    ) -> np.ndarray:
        """Return rows of a table's block. See `StepUpdate.rows`."""
