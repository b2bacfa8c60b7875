"""Announced rows: table rows that a synchronous trainer requests for a later step.

A trainer announces the rows of a later step, and computes the current step while the server sends
the rows. The rows may lack the newest `staleness` updates before the step that uses them. They must
include all earlier updates. After the last of these earlier updates, the rows are *due*. The server
sends the rows twice:

    at once     all announced rows, if updates change only rows with gradients
    when due    the rows that updates have changed since; all announced rows if none were sent

The result does not depend on timing. A trainer announces rows before it ends its current step, and
an update needs the end of this step from all trainers. So the server always reads the announced
rows between the same two updates. It knows which rows later updates change, because these rows have
gradients. It sends due rows before the answer to `recv`, so a trainer has all rows when it begins
the next step.

If a step looks up rows that differ from the announced rows, it requests them by an ordinary
`prefetch`. The trainer and the server then drop the announcement. They also drop all announcements
for a table after an eviction (`job.tables.evict`). This is safe because all trainers wait for the
eviction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server_blocks import TableSpec
from dtrans.protocol.tables.table_rows import are_among


MOST = 64  # steps between an announcement and the step that uses the rows, at most

AT = "at"  # name of a block in a `rows` message: positions of the rows that are sent a second time


# -- server ----------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Announced:
    """Rows of a block that a trainer has requested for a later step.

    Attributes:
      ids: row ids in the block.
      due: number of updates that the rows must include.
      changed: mask of the rows that must be sent when the rows are due.
    """

    ids: np.ndarray
    due: int
    changed: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class DueRows:
    """Announced rows to send to a trainer.

    Attributes:
      trainer: id of the trainer.
      name: name of the block.
      target: number of the step that uses the rows.
      ids: ids of the rows to send.
      at: positions of these rows among the announced rows; None if all announced rows are sent.
      is_last: True if the trainer receives no further rows for this announcement.
    """

    trainer: int
    name: str
    target: int
    ids: np.ndarray
    at: np.ndarray | None
    is_last: bool

    def message(self, rows: np.ndarray) -> tuple[list[tuple[str, np.ndarray]], dict[str, Any]]:
        """Return the blocks and fields of the `rows` message.

        Args:
          rows: current values of these rows.
        """
        fields = {"table": self.name, "ahead": self.target, "last": self.is_last}
        if self.at is None:
            return [(self.name, rows)], fields
        return [(AT, self.at), (self.name, rows)], {**fields, "count": len(self.at)}


class RowsAhead:
    """Announcements: requests of one server's trainers for table rows of later steps.

    Args:
      tables: specification of each block of a table, by name.
    """

    def __init__(self, tables: Mapping[str, TableSpec]) -> None:
        self._tables = tables
        # The keys are (trainer, block, step that uses the rows).
        self._of: dict[tuple[int, str, int], _Announced] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def announce(self, k: int, name: str, step: int, ahead: int, ids: np.ndarray) -> DueRows | None:
        """Record trainer k's request for rows of a later step; return the rows to send now, or
        None.

        The caller has called `check` before.

        Args:
          name: name of the block.
          step: current step.
          ahead: number of steps until the step that uses the rows.
          ids: row ids in the block.
        """
        target, table = step + ahead, self._tables[name]
        due = max(step, target - table.staleness)
        goes_now = due == step or not table.moves
        self._of[k, name, target] = _Announced(ids, due, np.full(len(ids), not goes_now))
        if not goes_now:
            return None
        return DueRows(k, name, target, ids, None, due == step)

    def check(self, k: int, name: str, step: int, ahead: int) -> None:
        """Raise WireError if trainer k has already announced these rows, or `ahead` is wrong."""
        if not 1 <= ahead <= MOST:
            raise WireError(
                f"trainer {k} announces rows of {name} {ahead} steps ahead, expected 1 to {MOST} "
                "steps"
            )
        if (k, name, step + ahead) in self._of:
            raise WireError(
                f"trainer {k} announces rows of {name} for step {step + ahead} a second time"
            )

    def end_update(
        self, step: int, touched: Mapping[str, Sequence[np.ndarray]]
    ) -> Iterator[DueRows]:
        """Record the rows that an update has changed; yield the rows that are due now.

        Args:
          step: number of complete updates.
          touched: maps the name of each block to the row ids of each trainer's gradient.
        """
        for (k, name, target), x in list(self._of.items()):
            if target < step:
                # The trainer made its step `target` without gradients of the announced rows.
                del self._of[k, name, target]
            elif x.due >= step and self._tables[name].moves:
                if x.due == step:
                    yield DueRows(k, name, target, x.ids, None, True)
            elif x.due >= step:
                for ids in touched[name]:
                    x.changed |= are_among(x.ids, ids)
                if x.due == step:
                    at = np.flatnonzero(x.changed).astype(np.int32)
                    yield DueRows(k, name, target, x.ids[at], at, True)

    def begin(self, k: int, step: int) -> list[tuple[str, np.ndarray]]:
        """Remove trainer k's announcements for a step; return (block, row ids) of each."""
        found = []
        for trainer, name, target in list(self._of):
            if (trainer, target) == (k, step):
                found.append((name, self._of.pop((k, name, step)).ids))
        return found

    def drop(self, k: int, name: str, step: int) -> None:
        """Drop trainer k's announcement for a step that looks up other rows instead."""
        self._of.pop((k, name, step), None)

    def forget_rows(self, name: str) -> None:
        """Drop all announcements for a block."""
        self._of = {key: x for key, x in self._of.items() if key[1] != name}

    def forget(self, k: int) -> None:
        """Drop all announcements of trainer k."""
        self._of = {key: x for key, x in self._of.items() if key[0] != k}


# -- trainer ---------------------------------------------------------------------------------------


class ComingRows:
    """Rows that a trainer has requested from one server for later steps.

    Args:
      endpoint: endpoint of the server.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        # The keys are the block and the step that uses the rows.
        self._expected: dict[tuple[str, int], Inbox] = {}  # memory for all announced rows
        self._again: dict[tuple[str, int], Inbox] = {}  # memory for rows that are sent again
        self._here: set[tuple[str, int]] = set()  # announcements whose rows are complete

    def expect(self, name: str, target: int, rows: np.ndarray) -> None:
        """Record an announcement.

        Args:
          name: name of the block.
          target: number of the step that uses the rows.
          rows: memory that receives the rows.
        """
        self._expected[name, target] = Inbox({name: rows}, self._not_asked)

    def take(self, message: wire.Message) -> None:
        """Receive announced rows.

        Raises:
          PeerError: the rows were not announced, or are already complete.
          WireError: the message is malformed.
        """
        name, key = message["table"], (message["table"], message["ahead"])
        inbox = self._expected.get(key)
        if inbox is None or key in self._here:
            raise PeerError(
                f"pserver {self._endpoint} sent rows of {wire.brief(name)} that were not announced"
            )
        if "count" in message.fields:
            inbox = self._places(key, inbox.memory[name], message["count"])
        inbox.take(message)
        if not inbox.missing():
            self._put(key, inbox)
            if message["last"]:
                self._here.add(key)

    def _places(self, key: tuple[str, int], rows: np.ndarray, count: int) -> Inbox:
        if not 0 <= count <= len(rows):
            raise WireError(
                f"pserver {self._endpoint} sent {wire.brief(count)} changed rows of {key[0]}, but "
                f"only {len(rows)} rows were announced"
            )
        if key not in self._again:
            room = np.empty((count, *rows.shape[1:]), rows.dtype)
            self._again[key] = Inbox({AT: np.empty(count, np.int32), key[0]: room}, self._not_asked)
        return self._again[key]

    def _put(self, key: tuple[str, int], inbox: Inbox) -> None:
        """Copy rows that the server has sent again to their positions among the announced rows."""
        if self._again.pop(key, None) is None:
            return
        rows, at = self._expected[key].memory[key[0]], inbox.memory[AT]
        if len(at) and (at.min() < 0 or at.max() >= len(rows)):
            raise WireError(
                f"pserver {self._endpoint} sent changed rows of {key[0]} for positions outside the "
                f"{len(rows)} announced rows"
            )
        rows[at] = inbox.memory[key[0]]

    def collect(self, name: str, target: int) -> None:
        """Remove an announcement; raise PeerError if its rows are incomplete."""
        here = (name, target) in self._here and not self._expected[name, target].missing()
        self._expected.pop((name, target))
        self._here.discard((name, target))
        if not here:
            raise PeerError(
                f"pserver {self._endpoint} has not sent the rows of {name} announced for step "
                f"{target}"
            )

    def forget(self, name: str, target: int) -> None:
        """Drop an announcement after an eviction.

        The trainer sends no message: the server has dropped the same announcement.
        """
        self._expected.pop((name, target))
        self._here.discard((name, target))

    def _not_asked(self, name: str) -> str:
        return f"pserver {self._endpoint} sent announced rows with the block {wire.brief(name)}"
