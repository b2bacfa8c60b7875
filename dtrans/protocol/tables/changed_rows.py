"""Which rows of a server's tables have changed since each trainer of GEO-SGD was told of them last.

A trainer keeps the rows that it has asked for. What it has changed itself is no news to it. A
server notes what is (`UnseenChanges`), and a trainer receives it (`ChangedInbox`).

Source: `AsyncSparseParamUpdateRecorder` in
paddle/fluid/operators/distributed/async_sparse_param_update_recorder.h, which tells a trainer of
its own changes, too, and of rows that it does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrans.errors import PeerError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.served import RowGradient, ServedRows
from dtrans.protocol.tables.table_rows import BlockRowSet


KEPT, CHANGED = 1, 2  # what a trainer has of a row; 0 where it does not have it


class UnseenChanges:
    """The rows that one server's trainers have, and those that others have changed since.

    Args:
      tables: the blocks that rows are asked of; of those that trainers keep, it is noted which.
      trainers: how many there are.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.changed_rows import UnseenChanges
      >>> from dtrans.protocol.served import ServedRows
      >>> rows = UnseenChanges({"emb": ServedRows(9, (2,), "float32", {}, kept=True)}, trainers=2)
      >>> rows.asked(0, "emb", np.array([1, 2, 3]))
      >>> rows.changed(1, "emb", np.array([2, 3, 4]))
      >>> rows.changed(0, "emb", np.array([1]))
      >>> rows.take(0, "emb").tolist(), rows.take(0, "emb").tolist()
      ([2, 3], [])
    """

    def __init__(self, tables: Mapping[str, ServedRows], trainers: int) -> None:
        self.tables = tuple(n for n, t in tables.items() if t.kept)
        self._rows = {n: tables[n].rows for n in self.tables}
        self._trainers = trainers
        self._has: dict[tuple[int, str], np.ndarray] = {}
        self._news: dict[tuple[int, str], list[np.ndarray]] = {}
        for k in range(trainers):
            self.forget(k)

    def asked(self, k: int, name: str, ids: np.ndarray) -> None:
        """Trainer k has these rows of a block from now on."""
        if name in self._rows:
            has = self._has[k, name]
            has[ids] = np.maximum(has[ids], KEPT)

    def changed(self, k: int, name: str, ids: np.ndarray) -> None:
        """Trainer k has changed these rows of a block: others are to be told of those that they
        have."""
        if name not in self._rows:
            return
        for other in range(self._trainers):
            has = self._has[other, name]
            news = ids[has[ids] == KEPT]
            if other != k and len(news):
                has[news] = CHANGED
                self._news[other, name].append(news)

    def take(self, k: int, name: str) -> np.ndarray:
        """The rows of a block that trainer k is to be told of, increasing; it is told."""
        news, self._news[k, name] = self._news[k, name], []
        ids = np.sort(np.concatenate([np.empty(0, np.int32), *news]))
        self._has[k, name][ids] = KEPT
        return ids

    def has(self, name: str) -> np.ndarray:
        """Return for each trainer what it has of each row of a block: `KEPT`, `CHANGED`, or 0."""
        return np.stack([self._has[k, name] for k in range(self._trainers)])

    def restore(self, name: str, has: np.ndarray) -> None:
        """Go on from what `has` returned."""
        for k, rows in enumerate(has):
            self._has[k, name] = rows.astype(np.uint8)
            self._news[k, name] = [np.flatnonzero(rows == CHANGED)]

    def forget(self, k: int) -> None:
        """Trainer k has no rows."""
        for n, rows in self._rows.items():
            # the system gives memory when it is written to
            self._has[k, n] = np.zeros(rows, np.uint8)
            self._news[k, n] = []


@dataclasses.dataclass(frozen=True)
class KeptBlock:
    """A block of a table of which a trainer keeps rows.

    Attributes:
      table: what the trainer calls the table.
      span: which rows of it the block has.
      row, dtype: of one row.
    """

    table: str
    span: BlockRowSet
    row: tuple[int, ...]
    dtype: Any


class ChangedInbox:
    """The rows that servers tell a trainer of with one answer.

    Args:
      blocks: by server and name; each server tells of all that it has.
    """

    def __init__(self, blocks: Mapping[tuple[str, str], KeptBlock]) -> None:
        self._blocks = blocks
        self._inboxes: dict[tuple[str, str], Inbox] = {}

    def take(self, endpoint: str, message: wire.Message) -> None:
        """Take a `changed`. Raises PeerError for one that was not asked for, WireError for one that
        is malformed."""
        name, count, key = message["table"], message["count"], (endpoint, message["table"])
        block = self._blocks.get(key)
        if block is None or not 0 <= count <= block.span.rows:
            raise PeerError(
                f"pserver {endpoint} tells of {wire.brief(count)} rows of {wire.brief(name)}, not "
                "asked for"
            )
        if key not in self._inboxes:
            memory = {
                "ids": np.empty(count, np.int32),
                "rows": np.empty((count, *block.row), block.dtype),
            }
            self._inboxes[key] = Inbox(memory, lambda n: f"a `changed` with {wire.brief(n)}")
        self._inboxes[key].take(message)
        if not self._inboxes[key].missing():
            ids = self._inboxes[key].memory["ids"]
            if count and (ids[0] < 0 or ids[-1] >= block.span.rows or np.any(ids[1:] <= ids[:-1])):
                raise PeerError(
                    f"rows of {name} that pserver {endpoint} tells of do not go up to "
                    f"{block.span.rows - 1}"
                )

    def check_whole(self, endpoint: str) -> None:
        """Raise PeerError unless a server has told of all of its blocks."""
        for ep, name in self._blocks:
            inbox = self._inboxes.get((ep, name))
            if ep == endpoint and (inbox is None or inbox.missing()):
                raise PeerError(
                    f"pserver {endpoint} has not told of all rows of {name} that have changed"
                )

    def rows(self) -> dict[str, RowGradient]:
        """The numbers and values of all that have come, by table."""
        found: dict[str, list[RowGradient]] = {block.table: [] for block in self._blocks.values()}
        for key, inbox in self._inboxes.items():
            block, memory = self._blocks[key], inbox.memory
            found[block.table].append(
                RowGradient(block.span.in_leaf(memory["ids"]), memory["rows"])
            )
        return {
            table: RowGradient(
                np.concatenate([x.ids for x in of]), np.concatenate([x.rows for x in of])
            )
            for table, of in found.items()
        }
