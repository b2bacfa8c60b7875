"""Requests of trainers for rows of tables, and memory for the gradients of these rows.

    prefetch with train    requests rows; in the same step, the trainer sends their gradient
    prefetch with ahead    requests rows of a later step (`dtrans.protocol.tables.rows_ahead`)
    other prefetch         requests rows, for example for an evaluation; no gradient follows
    row_ids                contains the row ids of the next gradient, and requests nothing

With delay compensation, the server stores the values that a `prefetch` with `train` has returned,
until it has used the gradient of these rows.

A request may consist of several messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrans.errors import WireError
from dtrans.ops import BACKUP
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server_blocks import RowGradient, TableSpec


class RowRequests:
    """Requests of one server's trainers for rows of tables.

    Args:
      endpoint: endpoint of the server.
      tables: specification of each block of a table, by name.
    """

    def __init__(self, endpoint: str, tables: Mapping[str, TableSpec]) -> None:
        self._endpoint = endpoint
        self._tables = tables
        # (trainer, name of a table gradient) -> row ids of the gradient
        self._ids: dict[tuple[int, str], np.ndarray] = {}
        # (trainer, op, block, `ahead`) of an incomplete request -> its `train`, and its row ids
        self._begun: dict[tuple[int, str, str, int], tuple[bool, Inbox]] = {}
        # (trainer, block) -> row values that were sent to the trainer (delay compensation)
        self._backups: dict[tuple[int, str], RowGradient] = {}
        # (trainer, block) -> row ids of each step whose gradient is pending. Several steps may be
        # pending, because a communicator may send a gradient after lookups of later steps.
        self._under_way: dict[tuple[int, str], list[np.ndarray]] = {}

    def memory_of(self, k: int) -> dict[str, np.ndarray]:
        """Return an array without rows for each table gradient of trainer k, by name.

        A request replaces such an array by memory for the requested rows.
        """
        return {t.gradients[k]: np.empty((0, *t.row), t.dtype) for t in self._tables.values()}

    def take(
        self, k: int, message: wire.Message, grads: Inbox
    ) -> tuple[str, np.ndarray, bool] | None:
        """Receive a `prefetch` message of trainer k.

        Args:
          grads: the trainer's gradients. If a gradient of the rows follows in this step, memory
            for it is added.

        Returns:
          The name of the block, the row ids and `train`; None until the request is complete.

        Raises:
          WireError: the request is malformed.
        """
        name, table = message["table"], self._tables.get(message["table"])
        if table is None:
            raise WireError(
                f"trainer {k} requests rows of {wire.brief(name)}, which is not a table of pserver "
                f"{self._endpoint}"
            )
        numbers = self._numbers(k, message, name, table, message["train"])
        if numbers is None:
            return None
        train, ids = numbers
        if train and "ahead" not in message.fields:
            self._expect(k, message, table, ids, grads)
        return name, ids, train

    def begin(
        self, k: int, message: wire.Message, name: str, ids: np.ndarray, grads: Inbox
    ) -> None:
        """Allocate the gradient of announced rows when the step that uses them begins.

        Args:
          message: the step's message with the first gradient.
          name: name of the block.
          ids: row ids in the block.
          grads: the trainer's gradients, to which the memory is added.
        """
        self._expect(k, message, self._tables[name], ids, grads)

    def answered(self, k: int, name: str, ids: np.ndarray, rows: np.ndarray) -> None:
        """Record the rows that were sent to trainer k, until their gradient arrives.

        Each step requests rows of every block once; the request may contain no row ids.
        """
        if not self._tables[name].on_trainers:
            self._under_way.setdefault((k, name), []).append(ids)
        if self._tables[name].backed:
            self._backups[k, name] = RowGradient(ids, rows)

    def follows(self, k: int, message: wire.Message, grads: Inbox) -> None:
        """Receive the row ids of the gradient that trainer k sends next."""
        gradient = message["gradient"]
        blocks = {table.gradients[k]: name for name, table in self._tables.items()}
        if gradient not in blocks:
            raise WireError(
                f"trainer {k} sends row ids of {wire.brief(gradient)}, which is not a gradient of "
                f"a table of pserver {self._endpoint}"
            )
        name = blocks[gradient]
        table = self._tables[name]
        numbers = self._numbers(k, message, name, table, True)
        if numbers is None:
            return
        _, ids = numbers
        if table.backed and not np.all(np.isin(ids, self._received(k, name).ids)):
            raise WireError(
                f"trainer {k} sends a gradient of rows of {name} that it did not request"
            )
        self._expect(k, message, table, ids, grads)

    def _numbers(
        self, k: int, message: wire.Message, name: str, table: TableSpec, train: bool
    ) -> tuple[bool, np.ndarray] | None:
        """Receive row ids of a request, which may consist of several messages.

        Returns:
          `train` of the request's first message, and the row ids; None if row ids are missing.
        """
        count, key = message["count"], (k, message.op, name, message.fields.get("ahead", 0))
        if not 0 <= count <= table.rows:
            raise WireError(
                f"trainer {k} requests {wire.brief(count)} rows of {name}, which has {table.rows}"
            )
        refusal = lambda n: f"a `{message.op}` message with the block {wire.brief(n)}"
        fresh = train, Inbox({"ids": np.empty(count, np.int32)}, refusal)
        train, inbox = self._begun.get(key, fresh)
        inbox.take(message)  # if it raises, the earlier messages of the request stay
        if inbox.missing():
            self._begun[key] = train, inbox
            return None
        self._begun.pop(key, None)
        ids = inbox.memory["ids"]
        if count and (ids[0] < 0 or ids[-1] >= table.rows or np.any(ids[1:] <= ids[:-1])):
            raise WireError(
                f"trainer {k} sends row ids of {name} that do not increase within 0 to "
                f"{table.rows - 1}"
            )
        return train, ids

    def _expect(
        self, k: int, message: wire.Message, table: TableSpec, ids: np.ndarray, grads: Inbox
    ) -> None:
        """Allocate zeros for the gradient of these rows. A trainer need not send the gradient."""
        gradient = table.gradients[k]
        if grads.has_begun(gradient):
            raise WireError(
                f"trainer {k} sent row ids for gradient {gradient} in a `{message.op}` message of "
                f"step {message['step']}, but a part of this gradient has already arrived; row ids "
                "must come first"
            )
        self._ids[k, gradient] = ids
        grads.renew(gradient, np.zeros((len(ids), *table.row), table.dtype))

    def under_way(self, name: str) -> np.ndarray:
        """Return the ids of a block's rows whose gradients are pending or incomplete."""
        ids = [np.empty(0, np.int32)]
        for k, gradient in self._tables[name].gradients.items():
            ids.append(self._gradient_ids(k, gradient))
        for (_, block), steps in self._under_way.items():
            if block == name:
                ids += steps
        return np.unique(np.concatenate(ids))

    def _gradient_ids(self, k: int, gradient: str) -> np.ndarray:
        """Return the row ids of a gradient of trainer k; empty if no rows are requested."""
        return self._ids.get((k, gradient), np.empty(0, np.int32))

    def gradients(self, k: int, grads: Inbox) -> dict[str, Any]:
        """Return the gradients of trainer k by name; gradients of tables are `RowGradient`s."""
        found: dict[str, Any] = {**grads.memory}
        for name in self.memory_of(k):
            found[name] = RowGradient(self._gradient_ids(k, name), grads.memory[name])
        return found

    def backups(self, k: int) -> dict[str, RowGradient]:
        """Return the values of rows that trainer k used to compute its current gradients.

        The result contains only tables with delay compensation. Its keys are the names under which
        updates read these values.
        """
        found = {}
        for n, t in self._tables.items():
            if t.backed:
                backup = self._received(k, n)
                ids = self._gradient_ids(k, t.gradients[k])
                found[n + BACKUP] = RowGradient(ids, backup.rows[np.searchsorted(backup.ids, ids)])
        return found

    def used(self, k: int, grads: Inbox, steps: int | None = None) -> None:
        """Release the row ids and memory of trainer k's table gradients after an update used them.

        Args:
          grads: the trainer's gradients. The memory of table gradients is released.
          steps: number of steps whose gradients were used; None if the trainer has left.
        """
        for n, t in self._tables.items():
            del self._under_way.get((k, n), [])[:steps]
            self._backups.pop((k, n), None)
            self._ids.pop((k, t.gradients[k]), None)
        for n, none in self.memory_of(k).items():
            grads.renew(n, none)

    def _received(self, k: int, name: str) -> RowGradient:
        """Return the stored values that were sent to trainer k for a block; empty if none are."""
        t = self._tables[name]
        return self._backups.get((k, name)) or RowGradient(
            np.empty(0, np.int32), np.empty((0, *t.row), t.dtype)
        )
