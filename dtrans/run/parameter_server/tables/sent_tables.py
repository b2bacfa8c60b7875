"""Embedding tables in messages: a server sends its state to its backup server.

The sender, called *primary*, sends the rows that exist. The backup initializes all other rows on
first use, with the arguments of the init that the primary sends:

    NAME            the existing rows of the block, and of each array of its optimizer state
    ids NAME        the ids of existing rows, of evicted rows, and of rows that a row filter counted
    changed NAME    the attribute `changed` of a `dtrans.checkpoint.saved_rows.RowSegment`
    counts NAME     the numbers of updates and of evicted rows, and 1 if `init` arrays follow
    init I NAME     bytes of argument I of the init, if the primary can initialize rows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.checkpoint.assemble import as_jax
from dtrans.checkpoint.saved_rows import InitRows, RowSegment, TableArray, TableRows
from dtrans.ir.array_fns import words, words_type
from dtrans.ir.cost import nbytes
from dtrans.ir.program import Program
from dtrans.ops import init_on_use_p
from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.run.parameter_server.tables.row_snapshot import RowSnapshot
from dtrans.run.parameter_server.tables.table_memory import TableMemory
from dtrans.run.parameter_server.update import ServerUpdate


class _SentTable(TableRows):
    """Rows of a table that a backup server has received.

    Args:
      table: description of the rows.
      segment: all rows.
      step: the number of updates.
      evicted: the number of evicted rows.
      begins: computes initial rows; None if all rows exist.
    """

    def __init__(
        self,
        table: TableBlock,
        segment: RowSegment,
        step: int,
        evicted: int,
        begins: InitRows | None,
    ) -> None:
        self.names, self.rows, self.begins = table.arrays, table.rows, begins
        self.step, self.evicted = step, evicted
        self._segment = segment

    def segments(self) -> Iterator[RowSegment]:
        yield self._segment

    def first(self, ids: np.ndarray) -> list[np.ndarray]:
        assert self.begins is not None
        return [x[ids] for x in self.begins.all()]


def sent_arrays(
    memory: Mapping[str, TableMemory],
) -> tuple[list[tuple[str, np.ndarray]], dict[str, int]]:
    """Convert a server's tables to named arrays, to send them to the backup server.

    Args:
      memory: the tables' blocks on this server, by name.

    Returns:
      A list of pairs (name, array), and a dict from name to number of rows.
    """
    blocks, rows = list[tuple[str, np.ndarray]](), dict[str, int]()
    for name, table in memory.items():
        snapshot = RowSnapshot(table)
        parts = list(snapshot.segments())
        arrays = [x[:0] for x in table.arrays.values()]
        for i, x in enumerate(arrays):
            arrays[i] = np.concatenate([x, *(part.rows[i] for part in parts)])
        varying = dict(zip(table.arrays, arrays, strict=True))
        none = np.empty(0, np.int64)
        ids = np.concatenate([none, *(part.ids for part in parts)]).astype(np.int32)
        varying |= {
            f"ids {name}": ids,
            f"changed {name}": np.concatenate([none, *(part.changed for part in parts)]),
        }
        if table.maker is not None:
            for i, x in enumerate(table.maker.args):
                varying[f"init {i} {name}"] = _bytes_of(x)
        counts = np.array([table.step, table.evicted, table.maker is not None], np.int64)
        blocks += [*varying.items(), (f"counts {name}", counts)]
        rows |= {n: len(x) for n, x in varying.items()}
    return blocks, rows


def sent_types(update: ServerUpdate, startup: Program) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the largest shape and the dtype of each array that a server sends of its tables.

    The backup server uses them to refuse other arrays.

    Args:
      update: the update of the sending server.
      startup: the startup program of the sending server.

    Returns:
      The types by name, and the names of the arguments of the init, which may be left out.
    """
    types, optional = dict[str, Any](), set[str]()
    inits = _inits_in(startup)
    for name, table in _tables_by_rows(update).items():
        types |= {n: words_type(update.types[n]) for n in table.arrays}
        types[f"ids {name}"] = jax.ShapeDtypeStruct((table.rows,), np.int32)
        types[f"changed {name}"] = jax.ShapeDtypeStruct((table.rows,), np.int64)
        types[f"counts {name}"] = jax.ShapeDtypeStruct((3,), np.int64)
        for i, v in enumerate(inits[name].invars if name in inits else ()):
            size = nbytes(words_type(v.aval))
            types[f"init {i} {name}"] = jax.ShapeDtypeStruct((size,), np.uint8)
            optional.add(f"init {i} {name}")
    return types, frozenset(optional)


def received_tables(
    update: ServerUpdate, startup: Program, arrays: Mapping[str, np.ndarray]
) -> dict[str, TableArray]:
    """Return tables and their optimizer state, from the arrays that a backup server has received.

    Args:
      update, startup: as for `sent_types`.
      arrays: the received arrays, by name.
    """
    found, inits = dict[str, TableArray](), _inits_in(startup)
    for name, table in _tables_by_rows(update).items():
        begins, (step, evicted, has_init) = None, map(int, arrays[f"counts {name}"])
        if has_init:
            args = []
            for i, v in enumerate(inits[name].invars):
                t = words_type(v.aval)
                x = arrays[f"init {i} {name}"].view(t.dtype).reshape(t.shape)
                args.append(as_jax(x, v.aval.dtype))
            begins = InitRows(inits[name], args)
        rows = [arrays[n] for n in table.arrays]
        segment = RowSegment(arrays[f"ids {name}"], arrays[f"changed {name}"], rows)
        sent = _SentTable(table, segment, step, evicted, begins)
        for i, n in enumerate(table.arrays):
            found[n] = TableArray(update.types[n], sent, i)
    return found


def _tables_by_rows(update: ServerUpdate) -> dict[str, TableBlock]:
    return {n: t for n, t in update.tables.items() if not t.updates_all}


def _inits_in(startup: Program) -> dict[str, JaxprEqn]:
    """Return the equation that initializes rows of each block, by the block's name."""
    return {e.params["table"]: e for e in startup.eqns if e.primitive is init_on_use_p}


def _bytes_of(x: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(words(x))).reshape(-1).view(np.uint8)
