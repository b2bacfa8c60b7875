"""Rows of a table that are made when they are first asked for: those of the user's init, bit for
bit.

A server begins without any. What it has of a block, and of the state that belongs to its rows,
stands for arrays: it has their types, and whoever reads it as an array makes all rows (`NewRows`,
of blocks that nothing has been done to, and `dtrans.run.parameter_server.tables.table_memory`).

The keys of random numbers are made first, so that tables of one shape share the program that makes
their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import ClosedJaxpr, JaxprEqn, Literal, Var, evaluate, jaxpr_as_fun, opened
from dtrans.checkpoint.saved_rows import ArrayLike
from dtrans.ir.builder import Builder
from dtrans.parameter_server.tables.touched_rows import rooms
from dtrans.run.base.lowered import jitted_once


class RowMaker:
    """Makes rows of a block and of its state.

    Args:
      eqn: the `init_on_use` of the block.
      args: what the init was given.

    Attributes:
      types: of the block, and of each array of its state.
    """

    def __init__(self, eqn: JaxprEqn, args: Sequence[Any]) -> None:
        self.eqn, self.args = eqn, list(args)
        self.types, self._write = eqn.params["types"], eqn.params["write"]
        # by size: what makes rows of their numbers, and of what does not depend on these
        self._fns: dict[int, tuple[Callable[..., Sequence[Any]], list[Any]]] = {}

    def __call__(self, ids: np.ndarray) -> list[np.ndarray]:
        """Rows with these numbers, of the block and of each array of its state."""
        if not len(ids):
            return [np.empty((0, *t.shape[1:]), t.dtype) for t in self.types]
        parts = [self._some(ids[start:stop], size) for start, stop, size in rooms(len(ids))]
        return [np.concatenate(of) for of in zip(*parts, strict=True)]

    def _some(self, ids: np.ndarray, size: int) -> list[np.ndarray]:
        numbers = np.concatenate([ids, np.zeros(size - len(ids), ids.dtype)]).astype(np.int32)
        if size not in self._fns:
            keys, rows = keys_first(self._write(size))
            made = evaluate(keys, *self.args)
            self._fns[size] = jitted_once(jaxpr_as_fun(rows), numbers, *made), made
        fn, made = self._fns[size]
        return [np.asarray(x)[: len(ids)] for x in fn(numbers, *made)]


def keys_first(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Cut what makes rows: the keys of random numbers, and what makes rows of their numbers and of
    these keys.

    Numbers that are rounded stay where they are, so that rows have the same bits. What is left is
    the same for tables of one shape, whose keys differ.

    Args:
      jaxpr: of the numbers of rows, and of what the init was given.

    Returns:
      A function of what the init was given, and one of the numbers and of what the first returns.
    """
    inner = opened(jaxpr)
    numbers, *args = inner.invars
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
    read = [
        a
        for atoms in (*(e.invars for e in rest.eqns), inner.outvars)
        for a in atoms
        if isinstance(a, Var)
    ]
    made = [v for v in dict.fromkeys(read) if v in known and v not in inner.constvars]
    rest.invars += [numbers, *made]
    return first.build(made), rest.build(inner.outvars)


class NewRows(ArrayLike):
    """A block of a table, or an array of its state, of which no row is made.

    Args:
      maker: makes rows.
      index: of the arrays that it makes, which one this is.
    """

    def __init__(self, maker: RowMaker, index: int) -> None:
        super().__init__(maker.types[index])
        self.maker, self._index = maker, index

    def materialize(self) -> np.ndarray:
        return self.maker(np.arange(len(self)))[self._index]


class MadeRows(ArrayLike):
    """A block, or an array of its state, that is there, and whose rows the init can make again.

    Args:
      array: it.
      maker: makes rows.
    """

    def __init__(self, array: Any, maker: RowMaker) -> None:
        super().__init__(array)
        self.maker, self._array = maker, np.asarray(array)

    def materialize(self) -> np.ndarray:
        return self._array


def made_again(state: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """A state of a server, with what makes rows of tables.

    Args:
      first: what the init makes.
    """
    has_maker = lambda x: (
        isinstance(x, ArrayLike) and (x.table is None or x.table.begins is not None)
    )
    is_due = lambda x, new: isinstance(new, NewRows) and not has_maker(x)
    with_maker = lambda x, new: MadeRows(x, new.maker) if is_due(x, new) else x
    return {n: with_maker(x, first.get(n)) for n, x in state.items()}


def new_rows(eqn: JaxprEqn, args: Sequence[Any]) -> list[NewRows]:
    """What an `init_on_use` equation makes."""
    maker = RowMaker(eqn, args)
    return [NewRows(maker, i) for i in range(len(maker.types))]
