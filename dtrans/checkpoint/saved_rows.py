"""Table rows in checkpoints: existing rows in segments, and the init of all other rows.

A `TableRows` is a block of a table with the optimizer state of its rows. A state has each of these
arrays under its name as an `ArrayLike`, which is not in memory. Writers of a state read its
segments. Reading it as an array generates all rows.

    running server      a snapshot (`dtrans.run.parameter_server.tables.row_snapshot`)
    restored server     `SavedTable`, from which a server reads its rows
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn


class ArrayLike(abc.ABC):
    """Stand-in for an array that is not in memory.

    Args:
      like: its type.
      table: the table rows that it is part of, if rows exist one by one.
    """

    def __init__(self, like: Any, table: TableRows | None = None) -> None:
        self.shape: tuple[int, ...] = tuple(like.shape)
        self.dtype = np.dtype(like.dtype)
        self.table = table

    @abc.abstractmethod
    def materialize(self) -> np.ndarray:
        """Return the array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.materialize() if dtype is None else self.materialize().astype(dtype)

    def __getitem__(self, at: Any) -> Any:
        return self.materialize()[at]

    def __len__(self) -> int:
        return self.shape[0]


@dataclasses.dataclass(frozen=True, eq=False)
class RowSegment:
    """Rows of a block.

    Attributes:
      ids: row ids in the block, increasing.
      changed: n + 1 for a row that step n changed last (n is 0 if none did). -(n + 1) for a row
        that was evicted before step n and does not exist.
      rows: the existing rows of the block, and of each array of its state.
    """

    ids: np.ndarray
    changed: np.ndarray
    rows: Sequence[np.ndarray]

    @property
    def present(self) -> np.ndarray:
        """The ids of rows that exist."""
        return self.ids[self.changed > 0]


@dataclasses.dataclass(frozen=True, eq=False)
class InitRows:
    """Initial rows of a block, before their first lookup.

    Attributes:
      eqn: the `init_on_use` equation that generates them.
      args: the arguments of the init.
    """

    eqn: JaxprEqn
    args: Sequence[Any]

    def all(self) -> list[np.ndarray]:
        """Return all rows, of the block and of each array of its state."""
        make = jax.jit(lambda *args: self.eqn.primitive.bind(*args, **self.eqn.params))
        return [np.asarray(x) for x in make(*self.args)]


class TableRows(abc.ABC):
    """Rows of a table block and of its optimizer state.

    Attributes:
      names: the names of the block and of the arrays of its state.
      rows: the number of rows, existing or not.
      step: the number of updates.
      evicted: the number of evicted rows so far.
      begins: the init of rows that do not exist; None if all do.
    """

    names: tuple[str, ...]
    rows: int
    step: int
    evicted: int
    begins: InitRows | None

    @abc.abstractmethod
    def segments(self) -> Iterator[RowSegment]:
        """Yield existing and evicted rows in increasing order, a bounded number at a time."""

    @abc.abstractmethod
    def first(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return initial rows of the block and of each array of its state; needs `begins`."""

    def close(self) -> None:
        """Release resources of a reader of segments; by default there are none."""
        return


class SavedTable(TableRows):
    """Saved rows of a table block.

    Args:
      names, rows, step, evicted, begins: as in `TableRows`.
      segment: all saved rows.
      probe: some initial rows of the job that saved: their ids, and the rows of each array.
    """

    def __init__(
        self,
        names: Sequence[str],
        segment: RowSegment,
        *,
        rows: int,
        step: int,
        evicted: int,
        begins: InitRows | None,
        probe: tuple[np.ndarray, Sequence[np.ndarray]],
    ) -> None:
        self.names, self.rows, self.begins = tuple(names), rows, begins
        self.step, self.evicted = step, evicted
        self.segment, self.probe = segment, probe

    def segments(self) -> Iterator[RowSegment]:
        yield self.segment

    def first(self, ids: np.ndarray) -> list[np.ndarray]:
        assert self.begins is not None
        return [x[ids] for x in self.begins.all()]


class TableArray(ArrayLike):
    """Table block, or an array of its state, whose rows exist one by one."""

    def __init__(self, like: Any, table: TableRows, index: int) -> None:
        super().__init__(like, table)
        self._table, self._index = table, index

    def materialize(self) -> np.ndarray:
        begins = self._table.begins
        if begins is None:
            found = np.empty(self.shape, self.dtype)
        else:
            found = np.array(begins.all()[self._index])
        for segment in self._table.segments():
            found[segment.present] = segment.rows[self._index]
        return found
