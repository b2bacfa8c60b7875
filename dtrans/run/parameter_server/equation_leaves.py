"""Leaves and table rows that communication equations send, receive or look up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.ops import DELTA
from dtrans.protocol.tables.table_rows import Positions, WantedRows, positions_of, wanted_of
from dtrans.protocol.trainer.traffic import Leaf


def leaf_of(eqn: JaxprEqn, t: Any) -> Leaf:
    """Return the leaf that a `send` of one operand sends, or that a `recv` of one output receives.

    Args:
      eqn: the equation.
      t: the type of the leaf.
    """
    p = eqn.params
    merge, spans = p.get("merge", "sum"), p.get("spans", ())
    return Leaf(p["epmap"], p["names"], p.get("sections", ()), t.shape, t.dtype, merge, spans)


def received_leaf(eqn: JaxprEqn) -> Leaf:
    """Return the leaf that a `recv` receives, as one array or as one array for each block."""
    types = eqn.params["types"]
    if len(types) == 1:
        return leaf_of(eqn, types[0])
    rows = tuple(t.shape[0] for t in types)
    shape = (sum(rows), *types[0].shape[1:])
    return Leaf(eqn.params["epmap"], eqn.params["names"], rows, shape, types[0].dtype)


def sent_blocks(eqn: JaxprEqn, values: Sequence[Any]) -> list[tuple[str, str, Any]]:
    """Return the blocks that a `send` sends: endpoint, name and array of each.

    Args:
      eqn: the equation.
      values: the blocks, or the gradient from which they are cut.
    """
    p = eqn.params
    if "sections" in p:
        return list(leaf_of(eqn, eqn.invars[0].aval).blocks(values[0]))
    return list(zip(p["epmap"], p["names"], values, strict=True))


def positions_in(eqn: JaxprEqn, uniq: np.ndarray) -> Positions:
    """Return the positions of each block's rows in the ids of a `prefetch` or `send_rows`."""
    return positions_of(uniq, eqn.params["spans"])


def rows_wanted(
    eqn: JaxprEqn, uniq: np.ndarray, rows: np.ndarray, positions: Positions
) -> list[WantedRows]:
    """Return the lookup of a `prefetch` in each block of its table.

    Args:
      eqn: the equation.
      uniq: sorted ids of the rows.
      rows: memory for the rows.
      positions: the positions of each block's rows in `uniq`.
    """
    p = eqn.params
    where = {"epmap": p["epmap"], "names": p["names"], "spans": p["spans"]}
    return wanted_of(uniq, rows, positions=positions, **where)


def drop_padding(uniq: np.ndarray, table: Leaf) -> np.ndarray:
    """Drop the padding of sorted ids: trailing entries equal to the table's number of rows."""
    return uniq[: np.searchsorted(uniq, sum(x.rows for x in table.spans))]


def as_deltas(leaf: Leaf) -> Leaf:
    """Return the leaf with other names of its blocks: the names under which deltas are sent."""
    return dataclasses.replace(leaf, names=tuple(n + DELTA for n in leaf.names))
