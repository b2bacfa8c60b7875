"""Initialization of new rows of several tables in one call.

A step looks up new rows in many tables, and few in each. Tables of one shape and one init have
equal programs that initialize rows: the programs differ only in the values of the PRNG keys. Such
tables form a *group*. One call of a compiled loop initializes the new rows of all tables of a
group. An iteration runs the program of one table, so a row has the same bits as in a single call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.parameter_server.tables.touched_rows import LEAST
from dtrans.run.base.lowered import jitted_once
from dtrans.run.parameter_server.tables.new_rows import RowMaker
from dtrans.run.parameter_server.tables.table_memory import TableMemory


SIZES = (LEAST, 8 * LEAST)  # possible numbers of rows of each table in one call

_New = tuple[TableMemory, RowMaker, np.ndarray]  # a table, its initializer, ids of its new rows


class GroupedRows:
    """Creation of the rows that one request looks up in several tables.

    Args:
      memory: the blocks of tables, by name.
    """

    def __init__(self, memory: Mapping[str, TableMemory]) -> None:
        self._memory = memory
        # (program for one table, its number of rows) -> group
        self._groups: dict[tuple[Callable[..., Any], int], _Group] = {}

    def create(self, ids: Mapping[str, np.ndarray]) -> None:
        """Initialize and store the rows that do not exist, if a group has new rows in two tables.

        `TableMemory` creates all other rows when they are looked up.

        Args:
          ids: sorted ids of rows in each block, by the block's name.
        """
        by_size: dict[int, list[_New]] = {}
        for name, wanted in ids.items():
            table = self._memory.get(name)
            if table is None or table.maker is None or table.table.row_filter is not None:
                continue
            new = table.new_ids(wanted)
            if 0 < len(new) <= SIZES[-1] and not table.maker.is_summed:
                size = next(x for x in SIZES if len(new) <= x)
                by_size.setdefault(size, []).append((table, table.maker, new))
        for size, candidates in by_size.items():
            if len(candidates) > 1:
                self._create(candidates, size)

    def _create(self, candidates: Sequence[_New], size: int) -> None:
        """Initialize and store the new rows of those candidates that form groups."""
        by_program: dict[Callable[..., Any], list[_New]] = {}
        for x in candidates:
            by_program.setdefault(x[1].program(size)[0], []).append(x)
        for fn, tables in by_program.items():
            # The loop of a group is compiled only if it initializes rows of several tables.
            if len(tables) > 1:
                found = self._group(fn, size).initialize([(maker, new) for _, maker, new in tables])
                for (table, _, new), rows in zip(tables, found, strict=True):
                    table.store(new, rows)

    def _group(self, fn: Callable[..., Any], size: int) -> _Group:
        if (fn, size) not in self._groups:
            equal = []
            for table in self._memory.values():
                other = table.maker
                if other is not None and not other.is_summed and other.program(size)[0] is fn:
                    equal.append(other)
            self._groups[fn, size] = _Group(fn, size, equal)
        return self._groups[fn, size]


class _Group:
    """Tables with equal programs.

    Args:
      fn: program that initializes rows of one table.
      size: number of rows that `fn` initializes.
      makers: the initializers of the tables.
    """

    def __init__(self, fn: Callable[..., Any], size: int, makers: Sequence[RowMaker]) -> None:
        self._size = size
        self._number_of = {maker: i for i, maker in enumerate(makers)}
        # operands of `fn` after the ids, for all tables
        self._operands = list(map(_stack, zip(*(x.program(size)[1] for x in makers), strict=True)))

        def initialize(
            count: int, numbers: jax.Array, ids: jax.Array, operands: Sequence[jax.Array]
        ) -> list[jax.Array]:
            def step(i: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
                rows = fn(ids[i], *(x[numbers[i]] for x in operands))
                return [x.at[i].set(new) for x, new in zip(found, rows, strict=True)]

            types = jax.eval_shape(fn, ids[0], *(x[0] for x in operands))
            found = [jnp.zeros((len(ids), *t.shape), t.dtype) for t in types]
            return jax.lax.fori_loop(0, count, step, found)

        numbers, ids = self._room()
        self._fn = jitted_once(initialize, 1, numbers, ids, self._operands)

    def _room(self) -> tuple[np.ndarray, np.ndarray]:
        """Return memory for the indices of tables, and for the ids of new rows in each of them."""
        most = len(self._number_of)
        return np.zeros(most, np.int32), np.zeros((most, self._size), np.int32)

    def initialize(self, tables: Sequence[tuple[RowMaker, np.ndarray]]) -> list[list[np.ndarray]]:
        """Return initial rows of each table, and of each array of its state.

        Args:
          tables: the initializer of each table, and the ids of its new rows.
        """
        numbers, ids = self._room()
        for i, (maker, new) in enumerate(tables):
            numbers[i] = self._number_of[maker]
            ids[i, : len(new)] = new
        found = self._fn(len(tables), numbers, ids, self._operands)
        arrays = list(map(np.asarray, found))
        rows = lambda i, count: [x[i, :count] for x in arrays]
        return [rows(i, len(new)) for i, (_, new) in enumerate(tables)]


def _stack(arrays: Sequence[Any]) -> jax.Array:
    return jnp.concatenate([x[None] for x in map(jnp.asarray, arrays)])
