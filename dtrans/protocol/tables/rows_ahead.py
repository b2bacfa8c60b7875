"""Rows of tables that a synchronous trainer asks for before the step that looks them up.

A trainer announces the rows of a later step, and computes this one while they travel. It says how
many steps ahead that is. The server derives the last update that has to be in these rows: it comes
`staleness` steps before they are looked up, or now if that has passed. After it the rows are *due*.

    at once   the rows as they are, unless each update moves all rows
    when due  the rows that updates have changed since; all of them if none were sent before

There is no race. A connection keeps its order, so an announcement of step t reaches the server
before the end of that step. Update t needs that end, so rows are read after t updates. The server
knows the rows that later updates change: they have gradients. Rows that are due after an update
leave before the answer to `recv` of the same step. So a step that begins has its rows, and waits
for none.

A step may look up different rows than were announced. Then it asks for them as usual, and both
sides forget the announcement. They also forget announcements of a table whose rows are evicted
(`job.tables.evict`): all trainers wait for that, and no rows are on their way.
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


MOST = 64  # steps that rows may be announced ahead

AT = "at"  # name of the places, in an announcement, of rows that are sent again


# -- a server's side -------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Announced:
    """The rows of a block that a trainer has announced for a step.

    Attributes:
      ids: row ids in the block.
      due: number of updates that have to be in the rows.
      changed: True for rows that updates have changed since they were sent.
    """

    ids: np.ndarray
    due: int
    changed: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class DueRows:
    """Rows to send to a trainer.

    Attributes:
      trainer: that has announced them.
      name: of the block.
      target: step that looks the rows up.
      ids: row ids to send.
      at: their places among the announced rows; None for all of them.
      is_last: no more rows follow.
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
    """Announcements of one server's trainers.

    Args:
      tables: blocks that rows are asked from.
    """

    def __init__(self, tables: Mapping[str, TableSpec]) -> None:
        self._tables = tables
        # by trainer, block and the step that looks them up
        self._of: dict[tuple[int, str, int], _Announced] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def announce(self, k: int, name: str, step: int, ahead: int, ids: np.ndarray) -> DueRows | None:
        """Note an announcement of trainer k (`check` it first); return the rows to send at once."""
        target, table = step + ahead, self._tables[name]
        due = max(step, target - table.staleness)
        goes_now = due == step or not table.moves
        self._of[k, name, target] = _Announced(ids, due, np.full(len(ids), not goes_now))
        return DueRows(k, name, target, ids, None, due == step) if goes_now else None

    def check(self, k: int, name: str, step: int, ahead: int) -> None:
        """Raise WireError if trainer k repeats an announcement, or makes it too far ahead."""
        if not 1 <= ahead <= MOST:
            raise WireError(
                f"trainer {k} announces rows of {name} {ahead} steps ahead, which may be 1 to "
                f"{MOST}"
            )
        if (k, name, step + ahead) in self._of:
            raise WireError(
                f"trainer {k} announces rows of {name} for step {step + ahead} a second time"
            )

    def end_update(
        self, step: int, touched: Mapping[str, Sequence[np.ndarray]]
    ) -> Iterator[DueRows]:
        """Note the end of an update; yield the rows that are due.

        Args:
          touched: for each block, row ids of the gradients.
        """
        for (k, name, target), x in list(self._of.items()):
            if target < step:
                del self._of[k, name, target]  # its step looked up different rows, or was not made
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
        """Return the blocks and row ids of trainer k's gradients in this step, if it has
        announced them."""
        names = [n for i, n, target in self._of if (i, target) == (k, step)]
        return [(n, self._of.pop((k, n, step)).ids) for n in names]

    def drop(self, k: int, name: str, step: int) -> None:
        """Forget trainer k's announcement of a block for this step: it looks up different rows."""
        self._of.pop((k, name, step), None)

    def forget_rows(self, name: str) -> None:
        """Forget all announcements of a block: rows of it are evicted."""
        for key in [x for x in self._of if x[1] == name]:
            del self._of[key]

    def forget(self, k: int) -> None:
        """Forget all announcements of trainer k: it has left."""
        for key in [x for x in self._of if x[0] == k]:
            del self._of[key]


# -- a trainer's side ------------------------------------------------------------------------------


class ComingRows:
    """Announced rows of one server, which a trainer receives.

    Args:
      endpoint: of the server.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._expected: dict[
            tuple[str, int], Inbox
        ] = {}  # by block and the step that looks them up
        self._again: dict[tuple[str, int], Inbox] = {}
        self._here: set[tuple[str, int]] = set()  # announcements that are complete

    def expect(self, name: str, target: int, rows: np.ndarray) -> None:
        """Receive announced rows into this memory."""
        self._expected[name, target] = Inbox({name: rows}, self._not_asked)

    def take(self, message: wire.Message) -> None:
        """Take rows. Raises PeerError for rows that were not announced, WireError for malformed
        ones."""
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
                f"{wire.brief(count)} rows of {key[0]} again, of {len(rows)} that were announced"
            )
        if key not in self._again:
            room = np.empty((count, *rows.shape[1:]), rows.dtype)
            self._again[key] = Inbox({AT: np.empty(count, np.int32), key[0]: room}, self._not_asked)
        return self._again[key]

    def _put(self, key: tuple[str, int], inbox: Inbox) -> None:
        """Copy rows that were sent again to their places."""
        if self._again.pop(key, None) is None:
            return
        rows, at = self._expected[key].memory[key[0]], inbox.memory[AT]
        if len(at) and (at.min() < 0 or at.max() >= len(rows)):
            raise WireError(f"rows of {key[0]} again that were not announced")
        rows[at] = inbox.memory[key[0]]

    def collect(self, name: str, target: int) -> None:
        """End an announcement. Raises PeerError if its rows are not here."""
        here = (name, target) in self._here and not self._expected[name, target].missing()
        self._expected.pop((name, target))
        self._here.discard((name, target))
        if not here:
            raise PeerError(
                f"pserver {self._endpoint} has not sent the rows of {name} announced for step "
                f"{target}"
            )

    def forget(self, name: str, target: int) -> None:
        """Forget an announcement, as the server does."""
        self._expected.pop((name, target))
        self._here.discard((name, target))

    def _not_asked(self, name: str) -> str:
        return f"pserver {self._endpoint} sent {wire.brief(name)} among rows that were announced"
