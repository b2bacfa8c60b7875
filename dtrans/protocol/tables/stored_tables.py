"""Requests about tables between two steps: reports, changed rows and evictions.

    tables          requests a report of each block
    changed_since   requests the ids of the rows that were changed or evicted after a given step
    evict           requests the eviction of rows without recent gradients

A synchronous server evicts rows when all trainers have requested the eviction
(`dtrans.protocol.server.between_steps`). An asynchronous server evicts rows at once, except rows
with a pending gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.errors import DtransError, WireError
from dtrans.protocol import wire
from dtrans.protocol.server.trainer_registry import Say
from dtrans.protocol.server_blocks import TableSpec


@dataclasses.dataclass(frozen=True)
class TableReport:
    """Report of one part of a table on one server: its numbers of rows, and its size in memory.

    Attributes:
      name: name of the block.
      endpoint: endpoint of the server.
      rows: number of rows of the block.
      created: number of materialized rows: rows that are stored in memory.
      bytes: bytes of memory for the materialized rows, with their optimizer state and hash table.
      limit: maximum number of materialized rows; None if there is no limit.
      evicted: number of rows evicted so far (`job.tables.evict`).
      step: number of updates since the server started.

    Example:
      >>> from dtrans.protocol.tables.stored_tables import TableReport
      >>> print(TableReport("params/emb", "127.0.0.1:6174", 1000, 2, 48, None, 3, 9))
      params/emb: 2 of 1,000 rows materialized, 48 bytes; 3 evicted
    """

    name: str
    endpoint: str
    rows: int
    created: int
    bytes: int
    limit: int | None
    evicted: int
    step: int

    def __str__(self) -> str:
        text = f"{self.name}: {self.created:,} of {self.rows:,} rows materialized, "
        text += f"{self.bytes:,} bytes"
        if self.evicted:
            text += f"; {self.evicted:,} evicted"
        return text


class StoredTables(Protocol):
    """Interface to the tables of one server, for reports, evictions and queries of changed rows.

    A server has a *block* of each table, that is, some of the table's rows. Each method may raise
    StateError if the server cannot answer in its current state.
    """

    def report(self) -> Sequence[TableReport]:
        """Return the size of each table on this server: its rows, and its memory."""

    def evict(self, name: str, unused_for: int, under_way: np.ndarray) -> int:
        """Delete the rows of a block that had no gradient recently; return how many they were.

        Args:
          name: name of the block.
          unused_for: number of steps; a row is evicted if no gradient of it was used in the last
            `unused_for` steps.
          under_way: ids of rows with pending gradients. These rows are not evicted.
        """

    def changed(self, name: str, since: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the ids of the rows of a block that were changed, or evicted, after a step.

        Args:
          name: name of the block.
          since: number of the step.

        Returns:
          The current step of the block, the ids of the changed rows, the ids of the evicted rows.
        """


def check_eviction(
    endpoint: str, tables: Mapping[str, TableSpec], k: int, message: wire.Message
) -> tuple[str, int]:
    """Check a trainer's request to evict rows, and return the block's name and the number of steps.

    Rows without a gradient in this number of steps are evicted.

    Args:
      endpoint: the server's endpoint, for errors.
      tables: the server's tables, by the block's name.
      k: id of the trainer.
      message: the `evict` message.

    Raises:
      WireError: a field is invalid.
    """
    name, unused_for = message["table"], message["unused_for"]
    if name not in tables:
        raise WireError(
            f"trainer {k} evicts rows of {wire.brief(name)}, which is not a table of pserver "
            f"{endpoint}"
        )
    if tables[name].on_trainers:
        raise WireError(
            f"trainer {k} evicts rows of {name}, but with GEO-SGD trainers store the rows"
        )
    if unused_for < 1:
        raise WireError(
            f"trainer {k} evicts rows of {name} with unused_for={wire.brief(unused_for)}, expected "
            "at least 1"
        )
    return name, unused_for


def evict(
    stored: StoredTables | None, name: str, unused_for: int, under_way: np.ndarray
) -> dict[str, Any]:
    """Evict rows, and return the fields of the answer to the trainer, such as an error.

    Args:
      stored: the server's tables, or None.
      name, unused_for, under_way: as for `StoredTables.evict`.
    """
    try:
        if stored is None:
            raise WireError(f"this server cannot evict rows of {name}")
        return {"table": name, "count": stored.evict(name, unused_for, under_way), "error": ""}
    except DtransError as e:
        return {"table": name, "count": 0, "error": str(e)}


def tell_report(
    stored: StoredTables | None, say: Say, address: bytes, message: wire.Message
) -> None:
    """Answer a trainer's question for the sizes of this server's tables (a `tables` message)."""
    tables = []
    if stored is not None:
        tables = [list(dataclasses.astuple(report)) for report in stored.report()]
    say(address, "report", tables=tables, **message.request)


def tell_changes(
    stored: StoredTables | None, say: Say, address: bytes, message: wire.Message
) -> None:
    """Answer a `changed_since` message with the changed rows, or with an error."""
    now, ids, gone, error = 0, np.empty(0, np.int32), np.empty(0, np.int32), ""
    try:
        if stored is None:
            raise WireError(
                f"this server does not record changes of {wire.brief(message['table'])}"
            )
        now, ids, gone = stored.changed(message["table"], message["since"])
    except DtransError as e:
        error = str(e)
    blocks = [
        ("ids", ids.astype(np.int32, copy=False)),
        ("gone", gone.astype(np.int32, copy=False)),
    ]
    fields = {
        "table": message["table"],
        "now": now,
        "count": len(ids),
        "gone": len(gone),
        "error": error,
    }
    say(address, "changes", blocks, **fields, **message.request)


def reports_of(tables: Any) -> list[TableReport]:
    """Return the reports in the field `tables` of a `report` message.

    Raises:
      WireError: the field is malformed.
    """
    found = []
    for row in tables:
        if not isinstance(row, list) or [type(x) for x in row] not in _REPORTED:
            raise WireError(f"a `report` message with a malformed report: {wire.brief(row)}")
        found.append(TableReport(*row))
    return found


_REPORTED = [[str, str, int, int, int, limit, int, int] for limit in (int, type(None))]
