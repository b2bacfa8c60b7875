"""Requests about tables between two steps: reports, changed rows and evictions.

    tables          a report of each block
    changed_since   row ids that steps after one have changed, and those evicted since
    evict           evicts rows that none of the last steps has updated

A synchronous server evicts rows when all trainers have asked for it between the same two steps, and
so does every server. Then no trainer is in the middle of a step, with rows that are gone. An
asynchronous server evicts rows at once, except those with a pending gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.errors import DtransError, PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.server.trainer_registry import Say
from dtrans.protocol.server_blocks import TableSpec


@dataclasses.dataclass(frozen=True)
class TableReport:
    """Report of a server's block of a table.

    Attributes:
      name: of the block.
      endpoint: of the server.
      rows: number of rows, materialized or not.
      created: number of rows that are materialized.
      bytes: size of these rows, with the optimizer's state of each.
      limit: largest number of materialized rows; None if there is no limit.
      evicted: number of rows evicted so far (`job.tables.evict`).
      step: number of updates since the server began.

    Example:
      >>> from dtrans.protocol.tables.stored_tables import TableReport
      >>> print(TableReport("params/emb", "127.0.0.1:6174", 1000, 2, 48, None, 3, 9))
      params/emb: 2 of 1,000 rows are made, 48 bytes; 3 were given up
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
        text = f"{self.name}: {self.created:,} of {self.rows:,} rows are made, {self.bytes:,} bytes"
        if not self.evicted:
            return text
        verb = "was" if self.evicted == 1 else "were"
        return f"{text}; {self.evicted:,} {verb} given up"


class StoredTables(Protocol):
    """Blocks of tables of one server. Every method may raise StateError if it cannot answer."""

    def report(self) -> Sequence[TableReport]:
        """Return a report of each block."""

    def evict(self, name: str, unused_for: int, under_way: np.ndarray) -> int:
        """Evict rows that no recent step has updated; return their number.

        Rows in `under_way` stay.
        """

    def changed(self, name: str, since: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the step of a block, rows changed by steps after `since`, and evicted ones."""


def check_eviction(
    endpoint: str, tables: Mapping[str, TableSpec], k: int, message: wire.Message
) -> tuple[str, int]:
    """Return the block of an `evict` and its number of steps. Raises WireError if it is invalid."""
    name, unused_for = message["table"], message["unused_for"]
    if name not in tables:
        raise WireError(
            f"trainer {k} gives up rows of {wire.brief(name)}, which is no table of {endpoint}"
        )
    if tables[name].on_trainers:
        raise WireError(f"trainer {k} gives up rows of {name}, which trainers of GEO-SGD keep")
    if unused_for < 1:
        raise WireError(
            f"trainer {k} gives up rows that were not used for {wire.brief(unused_for)} steps"
        )
    return name, unused_for


class PendingEvictions:
    """Evictions that wait until all trainers of a synchronous server have asked for them.

    Attributes:
      asked: trainer to (table, unused_for) of its `evict`.
    """

    def __init__(self) -> None:
        self.asked: dict[int, tuple[str, int]] = {}
        self._requests: dict[int, dict[str, int]] = {}  # by which trainers know their answers

    def ask(self, k: int, rows: tuple[str, int], request: dict[str, int], step: int) -> None:
        """Note an `evict` of trainer k, which has made `step` steps.

        Raises:
          WireError: its last `evict` was not answered.
          PeerError: another trainer evicts different rows.
        """
        if k in self.asked:
            raise WireError("a second `evict`, and the first was not answered")
        for other, before in self.asked.items():
            if before != rows:
                raise PeerError(
                    f"after step {step} trainer {k} gives up rows of {rows[0]} that were not used "
                    f"for {rows[1]} steps, and trainer {other} gives up rows of {before[0]} that "
                    f"were not used for {before[1]} steps; all trainers must call "
                    "job.tables.evict with the same arguments, between the same two steps"
                )
        self.asked[k], self._requests[k] = rows, request

    def check_none(self, k: int, step: int) -> None:
        """Raise PeerError if other trainers wait for an eviction, and trainer k continues."""
        if self.asked:
            other = min(self.asked)
            raise PeerError(
                f"trainer {other} gives up rows of {self.asked[other][0]} after step {step}, and "
                f"trainer {k} continues without it: all trainers must call job.tables.evict "
                "between the same two steps"
            )

    def carry_out(self, stored: StoredTables | None) -> tuple[str, dict[int, dict[str, Any]]]:
        """Evict rows; return the table, and the fields of each trainer's answer."""
        (name, unused_for), *_ = self.asked.values()
        fields = evict(stored, name, unused_for, np.empty(0, np.int32))
        answers = {k: {**fields, **self._requests.pop(k)} for k in sorted(self.asked)}
        self.asked.clear()
        return name, answers


def evict(
    stored: StoredTables | None, name: str, unused_for: int, under_way: np.ndarray
) -> dict[str, Any]:
    """Evict rows, and return the fields of the answer."""
    try:
        if stored is None:
            raise WireError(f"nothing here can give up rows of {name}")
        return {"table": name, "count": stored.evict(name, unused_for, under_way), "error": ""}
    except DtransError as e:
        return {"table": name, "count": 0, "error": str(e)}


def tell_report(
    stored: StoredTables | None, say: Say, address: bytes, message: wire.Message
) -> None:
    """Send reports of all blocks."""
    rows = [] if stored is None else stored.report()
    say(address, "report", tables=[list(dataclasses.astuple(x)) for x in rows], **message.request)


def tell_changes(
    stored: StoredTables | None, say: Say, address: bytes, message: wire.Message
) -> None:
    """Send the changed rows, or the reason for which they are not known."""
    now, ids, gone, error = 0, np.empty(0, np.int32), np.empty(0, np.int32), ""
    try:
        if stored is None:
            raise WireError(
                f"nothing here knows which rows of {wire.brief(message['table'])} have changed"
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
    """Return the reports that a `report` lists. Raises WireError if it is malformed."""
    found = []
    for row in tables if isinstance(tables, list) else [None]:
        if not isinstance(row, list) or [type(x) for x in row] not in _REPORTED:
            raise WireError(f"a report of a table that is none: {wire.brief(row)}")
        found.append(TableReport(*row))
    return found


_REPORTED = [[str, str, int, int, int, limit, int, int] for limit in (int, type(None))]
