"""Embedding tables in the state of a server, without memory for rows that no step has used.

A row of a table exists after its first lookup; all other rows have the values of the init. In a
saved or restored state, a placeholder (`ArrayLike`) replaces each array of a table. The placeholder
refers to a `TableRows`, which reads the existing rows of the table and of its optimizer state in
segments. The init generates all other rows. A checkpoint contains the existing rows only.
Converting an `ArrayLike` to an array generates all rows.

    saving a running server   a snapshot (`dtrans.run.parameter_server.tables.row_snapshot`)
    restoring a server        `SavedTable`, from which the server reads its rows
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn


# If a filter has not admitted a row yet, its integer in `RowSegment.changed` is smaller by this
# factor times the row's count of updates. Step numbers are smaller than the factor.
COUNTS = 1 << 40


class ArrayLike(abc.ABC):
    """Array of a table that is not in memory; NumPy functions convert it to an array.

    Args:
      like: an array or type with the shape and dtype of this array.
      table: the object that reads the rows of the table (`TableRows`); None if there is no table.
    """

    def __init__(self, like: Any, table: TableRows | None = None) -> None:
        self.shape: tuple[int, ...] = tuple(like.shape)
        self.dtype = np.dtype(like.dtype)
        self.table = table

    @abc.abstractmethod
    def materialize(self) -> np.ndarray:
        """Return the values as a NumPy array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.materialize() if dtype is None else self.materialize().astype(dtype)

    def __getitem__(self, at: Any) -> Any:
        return self.materialize()[at]

    def __len__(self) -> int:
        return self.shape[0]


@dataclasses.dataclass(frozen=True, eq=False)
class RowSegment:
    """Some rows of a server's part of a table, and the same rows of its optimizer state.

    Attributes:
      ids: indices of the rows within the server's part, increasing.
      changed: history of each row as one integer. `1`: the row exists, but no step has changed it.
        `n + 1`: the row exists, and step n was the last to change it. `-1`: the row does not exist.
        `-(n + 1)`: the row was evicted before step n. With a row filter, a row exists only after
        several updates. If the filter has counted c updates of a missing row, the integer is
        smaller by `c * COUNTS`.
      rows: the existing rows, as one array for the table and one for each state array.
    """

    ids: np.ndarray
    changed: np.ndarray
    rows: Sequence[np.ndarray]

    @property
    def present(self) -> np.ndarray:
        """The ids of the rows that exist."""
        return self.ids[self.changed > 0]


def split_counts(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack `RowSegment.changed` of rows that do not exist: counts of updates, and evictions.

    A row filter creates a row only after several updates, so a checkpoint stores the updates
    counted so far. `RowSegment.changed` packs the count and the last eviction into one integer.

    Args:
      numbers: `RowSegment.changed` of rows that do not exist, or -1 for rows never used.

    Returns:
      Two arrays. The first has the count of each row. The second has the number without the count:
        -(n + 1) for a row that was evicted before step n, and -1 for other rows.
    """
    counts, others = np.divmod(-numbers, COUNTS)
    return counts, -others


@dataclasses.dataclass(frozen=True, eq=False)
class InitRows:
    """Generator of the initial rows of a table's block on one server.

    Attributes:
      eqn: the `init_on_use` equation, which generates the rows.
      args: the arguments of the init.
    """

    eqn: JaxprEqn
    args: Sequence[Any]

    def all(self) -> list[np.ndarray]:
        """Return all initial rows, as one array for the block and one for each state array."""
        make = jax.jit(lambda *args: self.eqn.primitive.bind(*args, **self.eqn.params))
        return [np.asarray(x) for x in make(*self.args)]


class TableRows(abc.ABC):
    """Rows of a server's part of a table (a *block*), and of its optimizer state.

    Attributes:
      names: the names of the block and of its state arrays.
      rows: the number of rows, including rows that do not exist yet.
      step: the number of updates so far.
      evicted: the number of rows that were evicted so far.
      begins: computes the initial values of rows that do not exist yet; None if all rows exist.
    """

    names: tuple[str, ...]
    rows: int
    step: int
    evicted: int
    begins: InitRows | None

    @abc.abstractmethod
    def segments(self) -> Iterator[RowSegment]:
        """Yield the stored rows by increasing id, in segments with a bounded number of rows.

        Existing rows, evicted rows, and rows with a count of a row filter are stored.
        """

    @abc.abstractmethod
    def first(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return the initial rows with these ids, one array for each name.

        `begins` must not be None.
        """

    def close(self) -> None:
        """End reading. The base class does nothing."""
        return


class SavedTable(TableRows):
    """Rows of a server's part of a table (a *block*), read from a checkpoint.

    Args:
      names, rows, step, evicted, begins: as in `TableRows`.
      segment: all saved rows.
      probe: some ids, and the initial rows with these ids in the job that saved, one array for each
        name. `check_first` compares them with this job's initial rows.
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
    """One array of a table's block: the parameter's rows (index 0), or rows of optimizer state."""

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
