"""Rows of a table as servers have them, for evaluation: no step is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dtrans.parameter_server.plan import PServerPlan
from dtrans.protocol.tables.table_rows import unique_ids
from dtrans.run.parameter_server.tables.table_changes import table_of


def looked_up(
    plan: PServerPlan, name: str, ids: Any, read: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Rows of a table.

    Args:
      name: of a leaf that the plan has as a table: `params/emb`.
      ids: the numbers of rows, of any shape.
      read: gives rows by numbers that increase; there is at least one.

    Returns:
      An array of the shape of `ids`, followed by that of a row.

    Raises:
      ConfigError: no table. BatchError: a row that it does not have, or numbers that are no
        integers.
    """
    rows, wanted = table_of(plan, name).lookups.rows, np.asarray(ids)
    if not wanted.size:
        t = plan.main.inputs[name]
        return np.empty((*wanted.shape, *t.shape[1:]), t.dtype)
    uniq = unique_ids([wanted], table=name, rows=rows, size=wanted.size)
    uniq = uniq[: np.searchsorted(uniq, rows)]
    return np.asarray(read(uniq)[np.searchsorted(uniq, wanted)])
