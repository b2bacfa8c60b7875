"""What is said of tables between two steps: what servers have of them, which rows have changed, and
rows given up.

    tables          a report of each block
    changed_since   the numbers of rows that steps after one have changed, and of those that were given up since
    evict           rows that none of so many last steps has updated are given up

A synchronous server gives rows up when all trainers have said so between the same two steps, and so
does each server: no trainer is in the middle of a step then, and has rows that are not there any
more. An asynchronous one does it at once, and keeps rows of which a gradient is to come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans.errors import DtransError, PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.presence import Say
from dtrans.protocol.served import ServedRows


@dataclasses.dataclass(frozen=True)
class TableReport:
    """What a server has of a block of a table.

    Attributes:
      name: of the block.
      endpoint: of the server.
      rows: how many it has, made or not.
      made: how many of them are made.
      bytes: what these weigh, with the optimizer's state of each.
      limit: how many may be made at most; None where there is no limit.
      evicted: how many were given up so far (`job.tables.evict`).
      step: how many updates were made of it, since its server began.

    Example:
      >>> from dtrans.protocol.tables.held_tables import TableReport
      >>> print(TableReport("params/emb", "127.0.0.1:6174", 1000, 2, 48, None, 3, 9))
      params/emb: 2 of 1,000 rows are made, 48 bytes; 3 were given up
    """

    name: str
    endpoint: str
    rows: int
    made: int
    bytes: int
    limit: int | None
    evicted: int
    step: int

    def __str__(self) -> str:
        gone = (
            f"; {self.evicted:,} {'was' if self.evicted == 1 else 'were'} given up"
            if self.evicted
            else ""
        )
        return (
            f"{self.name}: {self.made:,} of {self.rows:,} rows are made, {self.bytes:,} bytes{gone}"
        )


class HeldTables(Protocol):
    """The blocks of tables of one server. Every method may raise StateError for what cannot be
    done."""

    def report(self) -> Sequence[TableReport]:
        """What there is of each block."""

    def evict(self, name: str, unused_for: int, under_way: np.ndarray) -> int:
        """Give up rows that none of so many last steps has updated, but those under way; how many
        they are."""

    def changed(self, name: str, since: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The step that a block is at; rows that steps after one have changed, and those that were
        given up since."""


def check_eviction(
    endpoint: str, tables: Mapping[str, ServedRows], k: int, message: wire.Message
) -> tuple[str, int]:
    """Which rows trainer k gives up: the block, and for how many steps none has updated them.
    Raises WireError."""
    name, unused_for = message["table"], message["unused_for"]
    if name not in tables:
        raise WireError(
            f"trainer {k} gives up rows of {wire.brief(name)}, which is no table of {endpoint}"
        )
    if tables[name].kept:
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
        """Note an `evict` of trainer k after some steps.

        Raises:
          WireError: its last one was not answered. PeerError: another trainer evicts other rows.
        """
        if k in self.asked:
            raise WireError("a second `evict`, and the first was not answered")
        for other, before in self.asked.items():
            if before != rows:
                raise PeerError(
                    f"after step {step} trainer {k} gives up rows of {rows[0]} that were not used "
                    f"for {rows[1]} steps, and trainer {other} those of {before[0]} for "
                    f"{before[1]}: all trainers call job.tables.evict alike, between the same two "
                    "steps"
                )
        self.asked[k], self._requests[k] = rows, request

    def check_none(self, k: int, step: int) -> None:
        """Raise PeerError if other trainers wait for an eviction, and trainer k continues."""
        if self.asked:
            other = min(self.asked)
            raise PeerError(
                f"trainer {other} gives up rows of {self.asked[other][0]} after step {step}, and "
                f"trainer {k} goes on without: all trainers call job.tables.evict, between the "
                "same two steps"
            )

    def carry_out(self, held: HeldTables | None) -> tuple[str, dict[int, dict[str, Any]]]:
        """Evict rows; return the table, and the fields of each trainer's answer."""
        (name, unused_for), *_ = self.asked.values()
        fields = evict(held, name, unused_for, np.empty(0, np.int32))
        answers = {k: {**fields, **self._requests.pop(k)} for k in sorted(self.asked)}
        self.asked.clear()
        return name, answers


def evict(
    held: HeldTables | None, name: str, unused_for: int, under_way: np.ndarray
) -> dict[str, Any]:
    """Give rows up; the fields of the answer."""
    try:
        if held is None:
            raise WireError(f"nothing here can give up rows of {name}")
        return {"table": name, "count": held.evict(name, unused_for, under_way), "error": ""}
    except DtransError as e:
        return {"table": name, "count": 0, "error": str(e)}


def tell_report(held: HeldTables | None, say: Say, address: bytes, message: wire.Message) -> None:
    """Answer what there is of tables."""
    rows = [] if held is None else held.report()
    say(address, "report", tables=[list(dataclasses.astuple(x)) for x in rows], **message.request)


def tell_changes(held: HeldTables | None, say: Say, address: bytes, message: wire.Message) -> None:
    """Answer which rows have changed; why not, where that cannot be."""
    now, ids, gone, error = 0, np.empty(0, np.int32), np.empty(0, np.int32), ""
    try:
        if held is None:
            raise WireError(
                f"nothing here knows which rows of {wire.brief(message['table'])} have changed"
            )
        now, ids, gone = held.changed(message["table"], message["since"])
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
    """What a `report` lists. Raises WireError where it is none."""
    found = []
    for row in tables if isinstance(tables, list) else [None]:
        if not isinstance(row, list) or [type(x) for x in row] not in _REPORTED:
            raise WireError(f"a report of a table that is none: {wire.brief(row)}")
        found.append(TableReport(*row))
    return found


_REPORTED = [[str, str, int, int, int, limit, int, int] for limit in (int, type(None))]
