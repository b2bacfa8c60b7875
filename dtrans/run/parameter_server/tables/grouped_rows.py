"""Initialization of new rows of several embedding tables in one call.

A step may look up a few new rows in each of many tables. A call for each table would be slow.
Tables with equal shapes and inits have equal programs that initialize rows: the programs differ
only in the values of the PRNG keys. Such tables form a *group*. One call of a compiled loop
initializes the new rows of all tables of a group. An iteration runs the program of one table, so a
row has the same bits as in a single call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.parameter_server.tables.touched_rows import LEAST
from dtrans.run.base.lowered import jitted_once
from dtrans.run.parameter_server.tables.new_rows import RowMaker
from dtrans.run.parameter_server.tables.table_memory import (
    NewTableRows,
    TableMemory,
    find_slots,
    store_together,
)


SIZES = (LEAST, 8 * LEAST)  # possible numbers of rows of each table in one call

_New = tuple[TableMemory, np.ndarray]  # a table, and the ids of its new rows


class GroupedRows:
    """Initializer of the new rows that one request looks up in several embedding tables.

    Args:
      memory: the blocks (rows of a table on this server), by name.
    """

    def __init__(self, memory: Mapping[str, TableMemory]) -> None:
        self._memory = memory
        # (program for one table, its number of rows) -> group
        self._groups: dict[tuple[Callable[..., Any], int], _Group] = {}

    def create(self, ids: Mapping[str, np.ndarray]) -> None:
        """Initialize and store the rows of a lookup that do not exist yet.

        A server calls this method before it reads the rows of one request, which may be rows of
        many tables.

        Args:
          ids: sorted ids of the rows that are looked up in each block, by the block's name.
        """
        wanted: list[tuple[TableMemory, np.ndarray]] = []
        for name, rows in ids.items():
            table = self._memory.get(name)
            if table is not None and table.maker is not None and table.table.row_filter is None:
                wanted.append((table, rows))
        if not wanted:
            return
        found = find_slots(wanted)
        ends = np.cumsum(list(map(len, found)))
        is_new = np.concatenate(found) < 0
        if is_new.any():
            # the number of new rows up to the end of each table
            counts = np.concatenate([[0], np.cumsum(is_new)])[ends]
            self._store(wanted, found, np.diff(counts, prepend=0))
        for (table, rows), slots in zip(wanted, found, strict=True):
            table.note_slots(rows, slots, all_exist=True)

    def _store(
        self,
        wanted: Sequence[tuple[TableMemory, np.ndarray]],
        found: Sequence[np.ndarray],
        counts: np.ndarray,
    ) -> None:
        """Initialize and store new rows, and write their indices in memory (slots) into `found`.

        Args:
          wanted: blocks of tables, each with ids of its rows.
          found: for each block, the slots of these rows; negative for a row that does not exist.
          counts: number of rows of each block that do not exist.
        """
        at: list[tuple[np.ndarray, np.ndarray]] = []  # slots of a block, and positions of new rows
        new: list[_New] = []
        for i in np.flatnonzero(counts).tolist():
            places = np.flatnonzero(found[i] < 0)
            at.append((found[i], places))
            new.append((wanted[i][0], wanted[i][1][places]))
        stored = []
        initial = self._initialize(new)
        for (table, ids), (slots, places), rows in zip(new, at, initial, strict=True):
            stored.append(NewTableRows(table, ids, slots[places], rows))
        for (slots, places), its_slots in zip(at, store_together(stored), strict=True):
            slots[places] = its_slots

    def _initialize(self, new: Sequence[_New]) -> list[list[np.ndarray]]:
        """Return the initial rows of tables. One call serves all tables with equal programs."""
        found: list[list[np.ndarray]] = [[] for _ in new]
        groups: dict[Hashable, list[int]] = {}
        for i, (table, ids) in enumerate(new):
            groups.setdefault(self._key(table, len(ids)) or i, []).append(i)
        for key, members in groups.items():
            # The loop of a group is compiled only if it initializes rows of several tables.
            if isinstance(key, tuple) and len(members) > 1:
                tables = [(_maker(new[i][0]), new[i][1]) for i in members]
                for i, rows in zip(members, self._group(*key).initialize(tables), strict=True):
                    found[i] = rows
            else:
                for i in members:
                    found[i] = _maker(new[i][0])(new[i][1])
        return found

    def _key(self, table: TableMemory, count: int) -> tuple[Callable[..., Any], int] | None:
        """Return a key that is equal for tables of one group: the program, and its number of rows.

        Return None if the table is initialized alone.

        Args:
          table: the table.
          count: number of its new rows.
        """
        maker = _maker(table)
        if count > SIZES[-1] or maker.is_summed:
            return None
        size = next(x for x in SIZES if count <= x)
        return maker.program(size)[0], size

    def _group(self, fn: Callable[..., Any], size: int) -> _Group:
        if (fn, size) not in self._groups:
            equal = []
            for table in self._memory.values():
                other = table.maker
                if other is not None and not other.is_summed and other.program(size)[0] is fn:
                    equal.append(other)
            self._groups[fn, size] = _Group(fn, size, equal)
        return self._groups[fn, size]


def _maker(table: TableMemory) -> RowMaker:
    assert table.maker is not None
    return table.maker


class _Group:
    """Tables with equal initializers of rows. One compiled loop initializes rows of all tables.

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
        """Return zeros to fill with indices of tables, and with the ids of their new rows."""
        most = len(self._number_of)
        return np.zeros(most, np.int32), np.zeros((most, self._size), np.int32)

    def initialize(self, tables: Sequence[tuple[RowMaker, np.ndarray]]) -> list[list[np.ndarray]]:
        """Return the initial rows of each table and of its optimizer state, as a list of arrays.

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
