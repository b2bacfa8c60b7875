"""Rows of a table that are initialized on first use, bit for bit as by the user's init.

A server starts without table rows. `NewRows` stands for a block, or for state with a row for each
of its rows. It has the array's type; reading it initializes all rows. `table_memory` replaces it
when rows are used.

Keys of random numbers are computed first, so that tables of one shape share the program that
initializes their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import ClosedJaxpr, JaxprEqn, Literal, Var, evaluate, jaxpr_as_fun, opened
from dtrans.checkpoint.saved_rows import ArrayLike
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import variables
from dtrans.parameter_server.tables.touched_rows import rooms
from dtrans.run.base.lowered import jitted_once


class RowMaker:
    """Initializer of the rows of a block and of its state.

    Args:
      eqn: the block's `init_on_use`.
      args: the arguments of the init.

    Attributes:
      types: types of the block, and of each array of its state.
    """

    def __init__(self, eqn: JaxprEqn, args: Sequence[Any]) -> None:
        self.eqn, self.args = eqn, list(args)
        self.types, self._write = eqn.params["types"], eqn.params["write"]
        # by number of rows: the compiled function of ids, and its other arguments
        self._fns: dict[int, tuple[Callable[..., Sequence[Any]], list[Any]]] = {}

    def __call__(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return initial rows of the block and of each array of its state."""
        if not len(ids):
            return [np.empty((0, *t.shape[1:]), t.dtype) for t in self.types]
        parts = [self._initialize(ids[start:stop], size) for start, stop, size in rooms(len(ids))]
        return list(map(np.concatenate, zip(*parts, strict=True)))

    def _initialize(self, ids: np.ndarray, size: int) -> list[np.ndarray]:
        """Initialize at most `size` rows with the function for `size` rows."""
        padded = np.concatenate([ids, np.zeros(size - len(ids), ids.dtype)]).astype(np.int32)
        if size not in self._fns:
            keys, rows = split_keys(self._write(size))
            operands = evaluate(keys, *self.args)
            self._fns[size] = jitted_once(jaxpr_as_fun(rows), padded, *operands), operands
        fn, operands = self._fns[size]
        return [np.asarray(x)[: len(ids)] for x in fn(padded, *operands)]


def split_keys(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Split the initializer of rows into the part without floating-point numbers, and the rest.

    The first part computes keys of random numbers. The second is equal for tables of one shape,
    whose keys differ. Floating-point numbers stay in one function: its fusions decide their bits.

    Args:
      jaxpr: a function of ids of rows, and of the arguments of the init.

    Returns:
      A function of the arguments of the init, and one of ids and of the first one's outputs.
    """
    inner = opened(jaxpr)
    ids, *args = inner.invars
    first, rest = Builder(jaxpr), Builder(jaxpr)
    first.invars += args
    known = {*args, *inner.constvars}
    for eqn in inner.eqns:
        ready = all(isinstance(a, Literal) or a in known for a in eqn.invars)
        if ready and not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
            first.keep(eqn)
            known.update(eqn.outvars)
        else:
            rest.keep(eqn)
    read: dict[Var, None] = {}
    for atoms in (*(e.invars for e in rest.eqns), inner.outvars):
        read |= dict.fromkeys(variables(atoms))
    passed = [v for v in read if v in known and v not in inner.constvars]
    rest.invars += [ids, *passed]
    return first.build(passed), rest.build(inner.outvars)


class NewRows(ArrayLike):
    """A block of a table, or an array of its state, without rows so far.

    Args:
      maker: initializes rows.
      index: the array's position in the maker's outputs.
    """

    def __init__(self, maker: RowMaker, index: int) -> None:
        super().__init__(maker.types[index])
        self.maker, self._index = maker, index

    def materialize(self) -> np.ndarray:
        return self.maker(np.arange(len(self)))[self._index]


class KnownRows(ArrayLike):
    """A block, or an array of its state, that has all its rows.

    `maker` can compute their initial values.

    Args:
      array: the rows.
      maker: initializes rows.
    """

    def __init__(self, array: Any, maker: RowMaker) -> None:
        super().__init__(array)
        self.maker, self._array = maker, np.asarray(array)

    def materialize(self) -> np.ndarray:
        return self._array


def with_makers(state: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server's state whose tables know the initializer of their rows.

    Args:
      state: from a checkpoint, say.
      first: the outputs of the server's startup program.
    """
    found = dict(state)
    for n, x in state.items():
        new = first.get(n)
        has_maker = isinstance(x, ArrayLike) and (x.table is None or x.table.begins is not None)
        if isinstance(new, NewRows) and not has_maker:
            found[n] = KnownRows(x, new.maker)
    return found


def new_rows(eqn: JaxprEqn, args: Sequence[Any]) -> list[NewRows]:
    """Return the outputs of an `init_on_use` equation."""
    maker = RowMaker(eqn, args)
    return [NewRows(maker, i) for i in range(len(maker.types))]
