"""A trainer's requests for rows of embedding tables, through a background thread (communicator).

Equations record lookups. One request to each server then receives the rows of all recorded lookups.
`dtrans.run.parameter_server.tables.row_lookups` does the same without a thread.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.tables.cached_rows import CachedRows
from dtrans.protocol.tables.table_rows import (
    BlockPart,
    WantedRows,
    block_parts,
    put_in_place,
    wanted_of,
)
from dtrans.protocol.trainer.traffic import Leaf
from dtrans.run.parameter_server.equation_leaves import (
    drop_padding,
    leaf_of,
    parts_in,
    rows_wanted,
)


# function that receives current rows of tables
Receive = Callable[[Sequence[WantedRows]], object]


@dataclasses.dataclass(frozen=True, eq=False)
class _Lookup:
    """Recorded lookup of rows of one table.

    Attributes:
      eqn: the equation that looks the rows up.
      rows: memory for the rows.
      parts: each block's part of the sorted ids of the lookup.
      wanted: the rows of each block (`wanted_of`).
      finish: function to call when the rows have arrived.
    """

    eqn: JaxprEqn
    rows: np.ndarray
    parts: Sequence[BlockPart]
    wanted: Sequence[WantedRows]
    finish: Callable[[], object]


class BackgroundLookups:
    """Lookups of table rows that one trainer's step has recorded, and not requested yet."""

    def __init__(self) -> None:
        self._pending: list[_Lookup] = []
        self._pool = BufferPool()

    def record(self, eqn: JaxprEqn, uniq: np.ndarray) -> np.ndarray:
        """Record a lookup; return an array into which `receive` writes the rows.

        Args:
          eqn: the `prefetch` equation.
          uniq: sorted ids of the rows.
        """
        p, (t,) = eqn.params, eqn.params["types"]
        rows = self._pool.take(f"{p['table']} rows", t.shape, t.dtype)
        self._add(eqn, uniq, rows, lambda: None)
        return rows

    def record_local(
        self, eqn: JaxprEqn, uniq: np.ndarray, local: CachedRows
    ) -> Sequence[np.ndarray]:
        """Record a lookup of GEO-SGD; return arrays for the rows and their optimizer state.

        A GEO-SGD trainer stores the rows that it has looked up before. Only missing rows are
        requested from servers. `receive` fills the arrays.

        Args:
          eqn: a `geo_prefetch` equation.
          uniq: sorted ids of the rows, with padding.
          local: the trainer's rows of the table.
        """
        types = eqn.params["types"]
        ids = drop_padding(uniq, leaf_of(eqn, types[0]))
        new = local.missing(ids)
        rows = np.empty((len(new), *types[0].shape[1:]), types[0].dtype)
        arrays = [np.zeros(t.shape, t.dtype) for t in types]

        def finish() -> None:
            local.add(new, rows)
            for array, x in zip(arrays, local.take(ids, len(uniq)), strict=True):
                array[...] = x

        self._add(eqn, new, rows, finish)
        return arrays

    def _add(
        self, eqn: JaxprEqn, ids: np.ndarray, rows: np.ndarray, finish: Callable[[], object]
    ) -> None:
        (parts,) = parts_in([eqn], [ids])
        wanted = rows_wanted(eqn, rows, parts) if len(ids) else []
        self._pending.append(_Lookup(eqn, rows, parts, wanted, finish))

    def receive(self, receive: Callable[[str, Sequence[WantedRows]], object]) -> None:
        """Request the rows of all recorded lookups, and write them into their arrays.

        Args:
          receive: function that requests rows and waits for them. Its arguments are the trainer's
            name, and the rows of each server. It is not called if no rows are missing.
        """
        pending, self._pending = self._pending, []
        wanted: list[WantedRows] = []
        for x in pending:
            wanted += x.wanted
        if wanted:
            receive(f"trainer {pending[0].eqn.params['trainer_id']}", wanted)
        for x in pending:
            if x.wanted:
                put_in_place(x.rows, x.wanted, x.parts)
            x.finish()


def receive_local_rows(
    ids: Mapping[str, np.ndarray], leaves: Mapping[str, Leaf], receive: Receive
) -> dict[str, np.ndarray]:
    """Receive rows of several tables from the servers; return the rows by name of the table.

    A GEO-SGD trainer calls this function after a failure, for the rows that it stores.

    Args:
      ids: sorted ids of the rows, by name of the table.
      leaves: for each table by name, its servers and the names of its blocks.
      receive: function that requests rows and waits for them.
    """
    found: dict[str, np.ndarray] = {}
    lookups: dict[str, list[WantedRows]] = {}
    all_parts = block_parts(list(ids.values()), [leaves[n].spans for n in ids])
    for (table, numbers), parts in zip(ids.items(), all_parts, strict=True):
        leaf = leaves[table]
        found[table] = np.empty((len(numbers), *leaf.shape[1:]), leaf.dtype)
        lookups[table] = wanted_of(
            found[table], epmap=leaf.endpoints, names=leaf.names, parts=parts
        )
    receive(list(itertools.chain.from_iterable(lookups.values())))
    for (table, rows), parts in zip(lookups.items(), all_parts, strict=True):
        put_in_place(found[table], rows, parts)
    return found
