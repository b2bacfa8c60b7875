"""The rows of tables that an update is of: taken out of a server's own memory, and put back.

Programs are made for a few numbers of rows (`dtrans.parameter_server.tables.touched_rows.room_for`). Where there are
fewer, zeros lie behind them, and so are gradients: what a program makes of these goes nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrans.parameter_server.tables.touched_rows import TableBlock
from dtrans.protocol.served import RowGradient


def memory_of(tables: Mapping[str, TableBlock], state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What rows are put back into: of tables of which an update is of some rows alone, by name."""
    return {n: np.array(state[n]) for t in tables.values() if not t.whole for n in t.held}


def taken(table: TableBlock, ids: np.ndarray, size: int, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Rows of a block and of its state, and zeros behind them: `size` rows of each."""
    return {n: _padded(state[n][ids], size) for n in table.held}


def put_back(table: TableBlock, ids: np.ndarray, made: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Write rows where they belong; the memory that they are in."""
    for n in table.held:
        state[n][ids] = np.asarray(made[n])[: len(ids)]
    return {n: state[n] for n in table.held}


def among(ids: np.ndarray, size: int, gradient: RowGradient) -> np.ndarray:
    """A gradient of rows as one of `size` rows, whose first are of the rows in `ids`; others are zero."""
    found = np.zeros((size, *gradient.rows.shape[1:]), gradient.rows.dtype)
    found[np.searchsorted(ids, gradient.ids)] = gradient.rows
    return found


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])
