"""Initialization of rows of an embedding table on first use, with the same bits as the user's init.

A server starts without table rows. `NewRows` is a placeholder for the rows of a table on a server,
or for an array of their optimizer state. The placeholder has the array's shape and dtype. Its
conversion to an array initializes all rows. `table_memory` initializes only the rows that are used.

PRNG keys are computed separately. So tables of equal shapes share the compiled program that
initializes rows.

XLA chooses the order of a sum by the shape of an array. So if the init adds up numbers within a row
(a norm), all calls initialize the same number of rows. So the bits of a row do not depend on the
number of rows that are initialized together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    equations,
    evaluate,
    facts_of,
    jaxpr_as_fun,
    opened,
)
from dtrans.checkpoint.saved_rows import ArrayLike
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import variables
from dtrans.parameter_server.tables.touched_rows import split_by_capacity
from dtrans.run.base.lowered import jitted_once


TOGETHER = 64  # number of rows of each call of an initializer that adds up the numbers within a row


class RowMaker:
    """Initializer of a table's rows, and of their optimizer state, on one server.

    Args:
      eqn: the `init_on_use` equation of the server's startup program.
      args: the arguments of the user's `init`.

    Attributes:
      types: shape and dtype of the rows on this server, and of each array of their optimizer state.
      is_summed: True if the init sums numbers within a row.
    """

    def __init__(self, eqn: JaxprEqn, args: Sequence[Any]) -> None:
        self.eqn, self.args = eqn, list(args)
        self.types, self._write = eqn.params["types"], eqn.params["write"]
        # number of rows -> (compiled function, its arguments after the ids)
        self._fns: dict[int, tuple[Callable[..., Sequence[Any]], list[Any]]] = {}
        self.is_summed = any(map(_sums, equations(self._write(TOGETHER).jaxpr)))

    def __call__(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return the initial values of rows and of their optimizer state, one array for each."""
        if not len(ids):
            return [np.empty((0, *t.shape[1:]), t.dtype) for t in self.types]
        calls = split_by_capacity(len(ids))
        if self.is_summed:
            calls = _equal_calls(len(ids))
        parts = [self._initialize(ids[start:stop], size) for start, stop, size in calls]
        return list(map(np.concatenate, zip(*parts, strict=True)))

    def _initialize(self, ids: np.ndarray, size: int) -> list[np.ndarray]:
        """Initialize at most `size` rows with the function for `size` rows."""
        padded = np.concatenate([ids, np.zeros(size - len(ids), ids.dtype)]).astype(np.int32)
        fn, operands = self.program(size)
        return [np.asarray(x)[: len(ids)] for x in fn(padded, *operands)]

    def program(self, size: int) -> tuple[Callable[..., Sequence[Any]], list[Any]]:
        """Return a compiled function that initializes `size` rows, and its operands after the ids.

        Tables of one shape and one init have the same function.
        """
        if size not in self._fns:
            keys, rows = split_keys(self._write(size))
            operands = evaluate(keys, *self.args)
            ids = np.zeros(size, np.int32)
            self._fns[size] = jitted_once(jaxpr_as_fun(rows), ids, *operands), operands
        return self._fns[size]


def _sums(eqn: JaxprEqn) -> bool:
    """Return True if an equation adds or multiplies several numbers of an array."""
    facts = facts_of(eqn)
    combines = facts.axes or facts.flops in ("product", "window") or facts.last_axes(eqn)
    return bool(combines) and any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)


def _equal_calls(count: int) -> Iterator[tuple[int, int, int]]:
    """Divide rows among calls that initialize `TOGETHER` rows each.

    Yield (start, stop, size) of each call: the range of its rows, and `TOGETHER`.
    """
    for start in range(0, count, TOGETHER):
        yield start, min(start + TOGETHER, count), TOGETHER


def split_keys(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Split an initializer of rows into a function that computes PRNG keys, and the remainder.

    The first function has the equations that do not depend on ids and compute no floating-point
    values. The second function is equal for tables of equal shapes. It has all floating-point
    equations, because the bits of their results depend on XLA's fusions.

    Args:
      jaxpr: the initializer: a function of row ids, followed by the arguments of the init.

    Returns:
      (keys, rows). The arguments of `keys` are the arguments of the init. The arguments of `rows`
      are the ids, and the outputs of `keys`.
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
    """Placeholder for a table's rows, or for an array of their state, before initialization.

    Args:
      maker: initializes rows.
      index: the index of the array in the maker's outputs.
    """

    def __init__(self, maker: RowMaker, index: int) -> None:
        super().__init__(maker.types[index])
        self.maker, self._index = maker, index

    def materialize(self) -> np.ndarray:
        return self.maker(np.arange(len(self)))[self._index]


class KnownRows(ArrayLike):
    """All rows of a table on a server, for example from a checkpoint, with an initializer.

    With the initializer, rows can be evicted, and initialized again later.

    Args:
      array: the rows.
      maker: computes initial values of rows.
    """

    def __init__(self, array: Any, maker: RowMaker) -> None:
        super().__init__(array)
        self.maker, self._array = maker, np.asarray(array)

    def materialize(self) -> np.ndarray:
        return self._array


def with_makers(state: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Add initializers of rows to the tables of a server's state, for example from a checkpoint.

    With the initializers, rows can be evicted, and initialized again later.

    Args:
      state: the state, by name.
      first: the outputs of the server's startup program, by name.
    """
    found = dict(state)
    for n, x in state.items():
        new = first.get(n)
        has_maker = isinstance(x, ArrayLike) and (x.table is None or x.table.begins is not None)
        if isinstance(new, NewRows) and not has_maker:
            found[n] = KnownRows(x, new.maker)
    return found


def new_rows(eqn: JaxprEqn, args: Sequence[Any]) -> list[NewRows]:
    """Return placeholders for the rows of a table, which are initialized on first use.

    Args:
      eqn: the `init_on_use` equation of the server's startup program.
      args: its operands, the arguments of the user's `init`.
    """
    maker = RowMaker(eqn, args)
    return [NewRows(maker, i) for i in range(len(maker.types))]
