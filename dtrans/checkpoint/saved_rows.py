"""Rows of tables as checkpoints have them: those that are made, some at a time, and what makes the
others.

A block of a table and the arrays of the optimizer's state that belong to its rows are one
`TableRows`. In a state they stand under their names, each as an array that nobody has made yet
(`ArrayLike`): who writes a state takes its segments, and whoever reads it as an array makes all
rows.

    running server      a snapshot (`dtrans.run.parameter_server.tables.row_snapshot`)
    restored server     `SavedTable`, which a server takes its rows from
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
    """What stands for an array that nobody has made yet.

    Args:
      like: its type.
      table: the rows that it belongs to, if they are there one by one.
    """

    def __init__(self, like: Any, table: TableRows | None = None) -> None:
        self.shape: tuple[int, ...] = tuple(like.shape)
        self.dtype = np.dtype(like.dtype)
        self.table = table

    @abc.abstractmethod
    def made(self) -> np.ndarray:
        """The array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.made() if dtype is None else self.made().astype(dtype)

    def __getitem__(self, at: Any) -> Any:
        return self.made()[at]

    def __len__(self) -> int:
        return self.shape[0]


@dataclasses.dataclass(frozen=True, eq=False)
class RowSegment:
    """Some rows of a block.

    Attributes:
      ids: their numbers in the block, increasing.
      changed: of each n + 1 where step n has changed it last, n = 0 where none has; -(n + 1) where
        it was given up before step n: it is not made.
      rows: of the block, and of each array of its state, those that are made.
    """

    ids: np.ndarray
    changed: np.ndarray
    rows: Sequence[np.ndarray]

    @property
    def made(self) -> np.ndarray:
        """The numbers of rows that are made."""
        return self.ids[self.changed > 0]


@dataclasses.dataclass(frozen=True, eq=False)
class Begins:
    """What rows are before anybody has asked for them.

    Attributes:
      eqn: the `init_on_use` that makes them.
      args: what the init was given.
    """

    eqn: JaxprEqn
    args: Sequence[Any]

    def all(self) -> list[np.ndarray]:
        """All rows, of the block and of each array of its state."""
        make = jax.jit(lambda *args: self.eqn.primitive.bind(*args, **self.eqn.params))
        return [np.asarray(x) for x in make(*self.args)]


class TableRows(abc.ABC):
    """Rows of a block of a table, and of its state.

    Attributes:
      names: of the block, and of the arrays of its state.
      rows: how many it has, made or not.
      step: how many updates were made.
      evicted: how many rows were given up so far.
      begins: what the other rows are; None where all are made.
    """

    names: tuple[str, ...]
    rows: int
    step: int
    evicted: int
    begins: Begins | None

    @abc.abstractmethod
    def segments(self) -> Iterator[RowSegment]:
        """The rows that are made or were given up, in increasing order, a bounded number at a
        time."""

    @abc.abstractmethod
    def first(self, ids: np.ndarray) -> list[np.ndarray]:
        """Rows as the init makes them, of the block and of each array of its state; where `begins`
        is there."""

    def close(self) -> None:
        """Let go of what is kept for a reader of segments: nothing, where rows are all there."""
        return


class SavedTable(TableRows):
    """Rows of a block that were saved.

    Args:
      names, rows, step, evicted, begins: as of `TableRows`.
      segment: all rows.
      probe: some rows as the init of the job made them that saved: their numbers, and the rows of
        each array.
    """

    def __init__(
        self,
        names: Sequence[str],
        segment: RowSegment,
        *,
        rows: int,
        step: int,
        evicted: int,
        begins: Begins | None,
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
    """A block, or an array of its state, of which rows are there one by one."""

    def __init__(self, like: Any, table: TableRows, index: int) -> None:
        super().__init__(like, table)
        self._table, self._index = table, index

    def made(self) -> np.ndarray:
        begins = self._table.begins
        found = (
            np.empty(self.shape, self.dtype)
            if begins is None
            else np.array(begins.all()[self._index])
        )
        for segment in self._table.segments():
            found[segment.made] = segment.rows[self._index]
        return found
