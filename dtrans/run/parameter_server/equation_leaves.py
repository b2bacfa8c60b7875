"""Arrays and table rows that communication equations send or receive: names, servers and rows.

A `Leaf` lists the servers of a parameter or gradient, and the name of its block (rows) on each
server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.ops import DELTA
from dtrans.protocol.tables.table_rows import BlockPart, WantedRows, block_parts, wanted_of
from dtrans.protocol.trainer.traffic import Leaf


def leaf_of(eqn: JaxprEqn, t: Any) -> Leaf:
    """Return the servers and names for an array that a `send` or `recv` equation communicates.

    Args:
      eqn: an equation with one operand (`send`) or one output (`recv`).
      t: shape and dtype of the array.
    """
    p = eqn.params
    merge, spans = p.get("merge", "sum"), p.get("spans", ())
    return Leaf(p["epmap"], p["names"], p.get("sections", ()), t.shape, t.dtype, merge, spans)


def received_leaf(eqn: JaxprEqn) -> Leaf:
    """Return the servers and names for the parameter that a `recv` equation receives.

    The equation's output may be one array, or one array for each block (rows on one server).
    """
    types = eqn.params["types"]
    if len(types) == 1:
        return leaf_of(eqn, types[0])
    rows = tuple(t.shape[0] for t in types)
    shape = (sum(rows), *types[0].shape[1:])
    return Leaf(eqn.params["epmap"], eqn.params["names"], rows, shape, types[0].dtype)


def sent_blocks(eqn: JaxprEqn, values: Sequence[Any]) -> list[tuple[str, str, Any]]:
    """Return what a `send` equation sends: (endpoint, name, array) for each server.

    Args:
      eqn: the equation.
      values: the arrays to send, or one gradient that is cut into blocks of rows.
    """
    p = eqn.params
    if "sections" in p:
        return list(leaf_of(eqn, eqn.invars[0].aval).blocks(values[0]))
    return list(zip(p["epmap"], p["names"], values, strict=True))


def parts_in(eqns: Sequence[JaxprEqn], ids: Sequence[np.ndarray]) -> list[list[BlockPart]]:
    """Divide ids of rows of several tables among the blocks of each table (see `block_parts`).

    Args:
      eqns: a `prefetch` or `send_rows` equation for each table.
      ids: sorted ids of rows of each table.
    """
    return block_parts(ids, [eqn.params["spans"] for eqn in eqns])


def rows_wanted(eqn: JaxprEqn, rows: np.ndarray, parts: Sequence[BlockPart]) -> list[WantedRows]:
    """Return the requests for rows of a table: for each server, the ids and memory for the rows.

    Args:
      eqn: a `prefetch` equation.
      rows: memory for the rows.
      parts: each block's part of the row ids.
    """
    p = eqn.params
    return wanted_of(rows, epmap=p["epmap"], names=p["names"], parts=parts)


def drop_padding(uniq: np.ndarray, table: Leaf) -> np.ndarray:
    """Remove the padding of sorted row ids.

    Ids are padded to a fixed length with the table's number of rows, which is not a valid id. For a
    table of 9 rows, [1, 4, 9, 9] becomes [1, 4].
    """
    return uniq[: np.searchsorted(uniq, sum(x.rows for x in table.spans))]


def as_deltas(leaf: Leaf) -> Leaf:
    """Rename the blocks of a leaf to the names under which GEO-SGD sends changes of the blocks."""
    return dataclasses.replace(leaf, names=tuple(n + DELTA for n in leaf.names))
