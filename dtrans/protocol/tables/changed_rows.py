"""GEO-SGD: a server's record of the changed rows that it must send to each trainer.

Each trainer stores copies of the rows that it has requested, and changes them. A server records the
changes of other trainers (`UnseenChanges`), and sends the changed rows to the trainer, which
receives them by `ChangedInbox`. After the failure of a process, servers begin with an empty record.
Each trainer then requests all its rows again, so a server's snapshot contains no record.

Source: `AsyncSparseParamUpdateRecorder` in
paddle/fluid/operators/distributed/async_sparse_param_update_recorder.h. In contrast to dtrans,
Paddle also sends a trainer its own changes, and rows that the trainer does not store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import PeerError
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server_blocks import RowGradient, TableSpec
from dtrans.protocol.tables.table_rows import BlockRowSet


# State of a row at a trainer. 0: the trainer does not store the row. STORED: it stores the newest
# changes of other trainers. CHANGED: another trainer has changed the row since it was sent.
STORED, CHANGED = 1, 2


class UnseenChanges:
    """Record of the table rows that each trainer does not have in their newest version.

    For example, trainer 0 has rows 1 and 2, and trainer 1 changes row 2. Then trainer 0 must
    receive row 2 again.

    Args:
      tables: maps the name of each block to its specification. Only blocks with `on_trainers`
        are recorded.
      trainers: number of trainers.

    Attributes:
      tables: names of the recorded blocks.

    Example:
      >>> import numpy as np
      >>> from dtrans.protocol.tables.changed_rows import UnseenChanges
      >>> from dtrans.protocol.server_blocks import TableSpec
      >>> table = TableSpec(9, (2,), "float32", {}, on_trainers=True)
      >>> rows = UnseenChanges({"emb": table}, trainers=2)
      >>> rows.asked(0, "emb", np.array([1, 2, 3]))
      >>> rows.changed(1, "emb", np.array([2, 3, 4]))
      >>> rows.changed(0, "emb", np.array([1]))
      >>> rows.take(0, "emb").tolist(), rows.take(0, "emb").tolist()
      ([2, 3], [])
    """

    def __init__(self, tables: Mapping[str, TableSpec], trainers: int) -> None:
        self.tables = tuple(n for n, t in tables.items() if t.on_trainers)
        self._rows = {n: tables[n].rows for n in self.tables}
        self._trainers = trainers
        self._has: dict[tuple[int, str], np.ndarray] = {}
        self._news: dict[tuple[int, str], list[np.ndarray]] = {}
        for k in range(trainers):
            self.forget(k)

    def asked(self, k: int, name: str, ids: np.ndarray) -> None:
        """Record that trainer k now has copies of these rows, since it has requested them.

        Args:
          k: id of the trainer.
          name: name of the block (the part of a table on this server).
          ids: row ids in the block.
        """
        if name in self._rows:
            has = self._has[k, name]
            has[ids] = np.maximum(has[ids], STORED)

    def changed(self, k: int, name: str, ids: np.ndarray) -> None:
        """Record that trainer k has changed these rows, so that other trainers must receive them.

        Args:
          k: id of the trainer.
          name: name of the block (the part of a table on this server).
          ids: row ids in the block.
        """
        if name not in self._rows:
            return
        for other in range(self._trainers):
            has = self._has[other, name]
            news = ids[has[ids] == STORED]
            if other != k and len(news):
                has[news] = CHANGED
                self._news[other, name].append(news)

    def take(self, k: int, name: str) -> np.ndarray:
        """Return the sorted ids of the changed rows that must be sent to trainer k.

        Mark these rows as received by the trainer.
        """
        news, self._news[k, name] = self._news[k, name], []
        ids = np.sort(np.concatenate([np.empty(0, np.int32), *news]))
        self._has[k, name][ids] = STORED
        return ids

    def has(self, name: str) -> np.ndarray:
        """Return the state of each row at each trainer, as an array [trainer, row].

        A checkpoint contains this array. An entry is 0 if the trainer has no copy of the row, and
        `STORED` if it has the newest version. It is `CHANGED` if the trainer must receive the row
        again.

        Args:
          name: name of the block (the part of a table on this server).
        """
        return np.stack([self._has[k, name] for k in range(self._trainers)])

    def restore(self, name: str, has: np.ndarray) -> None:
        """Restore the states of a table's rows from a checkpoint, which has the result of `has`."""
        for k, rows in enumerate(has):
            self._has[k, name] = rows.astype(np.uint8)
            self._news[k, name] = [np.flatnonzero(rows == CHANGED)]

    def forget(self, k: int) -> None:
        """Record that trainer k has no copies of rows, for example because it was restarted."""
        for n, rows in self._rows.items():
            # New zeros release memory: the system allocates a page only at its first write.
            self._has[k, n] = np.zeros(rows, np.uint8)
            self._news[k, n] = []


@dataclasses.dataclass(frozen=True)
class CachedBlock:
    """Part of a table on one server, as seen by a trainer that stores copies of some rows.

    Attributes:
      table: key under which the trainer stores the table's rows.
      span: set of the table's rows that the block contains.
      row: shape of one row.
      dtype: dtype of the rows.
    """

    table: str
    span: BlockRowSet
    row: tuple[int, ...]
    dtype: Any


class ChangedInbox:
    """Receiver of the rows that other trainers have changed, in a trainer of GEO-SGD.

    Each server sends these rows before it answers the trainer's request for parameters (`recv`).

    Args:
      blocks: the parts of tables on all servers, by the server's endpoint and the part's name. A
        server sends one message (`changed`) for each of its parts.
    """

    def __init__(self, blocks: Mapping[tuple[str, str], CachedBlock]) -> None:
        self._blocks = blocks
        self._inboxes: dict[tuple[str, str], Inbox] = {}

    def take(self, endpoint: str, message: wire.Message) -> None:
        """Receive a `changed` message.

        Raises:
          PeerError: the trainer did not request the message, or a row id is invalid.
          WireError: the message is malformed.
        """
        name, count, key = message["table"], message["count"], (endpoint, message["table"])
        block = self._blocks.get(key)
        if block is None or not 0 <= count <= block.span.rows:
            raise PeerError(
                f"pserver {endpoint} sent {wire.brief(count)} changed rows of {wire.brief(name)}, "
                "which were not requested"
            )
        if key not in self._inboxes:
            memory = {
                "ids": np.empty(count, np.int32),
                "rows": np.empty((count, *block.row), block.dtype),
            }
            self._inboxes[key] = Inbox(
                memory, lambda n: f"a `changed` message with the block {wire.brief(n)}"
            )
        self._inboxes[key].take(message)
        if not self._inboxes[key].missing():
            ids = self._inboxes[key].memory["ids"]
            if count and (ids[0] < 0 or ids[-1] >= block.span.rows or np.any(ids[1:] <= ids[:-1])):
                raise PeerError(
                    f"pserver {endpoint} sent changed rows of {name} whose ids are not increasing "
                    f"numbers from 0 to {block.span.rows - 1}"
                )

    def check_complete(self, endpoint: str) -> None:
        """Raise PeerError if a server has not sent the changed rows of all its blocks."""
        for ep, name in self._blocks:
            inbox = self._inboxes.get((ep, name))
            if ep == endpoint and (inbox is None or inbox.missing()):
                raise PeerError(f"pserver {endpoint} did not send all changed rows of {name}")

    def rows(self) -> dict[str, RowGradient]:
        """Return a map from each table's key to the ids and values of its changed rows."""
        found: dict[str, list[RowGradient]] = {block.table: [] for block in self._blocks.values()}
        for key, inbox in self._inboxes.items():
            block, memory = self._blocks[key], inbox.memory
            ids = block.span.in_leaf(memory["ids"])
            found[block.table].append(RowGradient(ids, memory["rows"]))
        return {table: _concatenate(parts) for table, parts in found.items()}


def _concatenate(parts: Sequence[RowGradient]) -> RowGradient:
    ids = np.concatenate([x.ids for x in parts])
    return RowGradient(ids, np.concatenate([x.rows for x in parts]))
