"""Rows of a table that are made when they are first asked for: those of the user's init, bit for bit.

A server begins without any. What it has of a block, and of the state that belongs to its rows, stands for arrays: it
has their types, and whoever reads it as an array makes all rows (`NewRows`, of blocks that nothing has been done to,
and `dtrans.run.parameter_server.table_memory`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn, jaxpr_as_fun
from dtrans.parameter_server.tables.touched_rows import rooms


class ArrayLike(abc.ABC):
    """What stands for an array that nobody has made yet.

    Args:
      like: its type.
    """

    def __init__(self, like: Any) -> None:
        self.shape: tuple[int, ...] = tuple(like.shape)
        self.dtype = np.dtype(like.dtype)

    @abc.abstractmethod
    def made(self) -> np.ndarray:
        """The array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.made() if dtype is None else self.made().astype(dtype)

    def __getitem__(self, at: Any) -> Any:
        return self.made()[at]

    def __len__(self) -> int:
        return self.shape[0]


class RowMaker:
    """Makes rows of a block and of its state.

    Args:
      eqn: the `init_on_use` of the block.
      args: what the init was given.
    """

    def __init__(self, eqn: JaxprEqn, args: Sequence[Any]) -> None:
        self.types = eqn.params["types"]
        self._write, self._args = eqn.params["write"], list(args)
        self._fns: dict[int, Callable[..., Sequence[Any]]] = {}

    def __call__(self, ids: np.ndarray) -> list[np.ndarray]:
        """Rows with these numbers, of the block and of each array of its state."""
        if not len(ids):
            return [np.empty((0, *t.shape[1:]), t.dtype) for t in self.types]
        parts = [self._some(ids[start:stop], size) for start, stop, size in rooms(len(ids))]
        return [np.concatenate(of) for of in zip(*parts, strict=True)]

    def _some(self, ids: np.ndarray, size: int) -> list[np.ndarray]:
        if size not in self._fns:
            self._fns[size] = jax.jit(jaxpr_as_fun(self._write(size)))
        numbers = np.concatenate([ids, np.zeros(size - len(ids), ids.dtype)]).astype(np.int32)
        return [np.asarray(x)[: len(ids)] for x in self._fns[size](numbers, *self._args)]


class NewRows(ArrayLike):
    """A block of a table, or an array of its state, of which no row is made.

    Args:
      maker: makes rows.
      index: of the arrays that it makes, which one this is.
    """

    def __init__(self, maker: RowMaker, index: int) -> None:
        super().__init__(maker.types[index])
        self.maker, self._index = maker, index

    def made(self) -> np.ndarray:
        return self.maker(np.arange(len(self)))[self._index]


def new_rows(eqn: JaxprEqn, args: Sequence[Any]) -> list[NewRows]:
    """What an `init_on_use` equation makes."""
    maker = RowMaker(eqn, args)
    return [NewRows(maker, i) for i in range(len(maker.types))]
