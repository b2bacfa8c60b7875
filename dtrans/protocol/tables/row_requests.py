"""Requests of trainers for rows of tables, and memory for the gradients of these rows.

    prefetch  train        the rows; the gradient of the step has the same ones
              ahead        the same, for a later step (`dtrans.protocol.tables.rows_ahead`)
              otherwise    the rows, which no step trains
    row_ids                no rows: announces those of the step's gradient

With delay compensation, the server stores the rows that a trainer trains as it receives them, until
their gradient is used.

A request may come in several messages. A malformed one is refused, and changes nothing.
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
    """Requests of one server's trainers.

    Args:
      endpoint: of the server.
      tables: blocks that rows are asked from.
    """

    def __init__(self, endpoint: str, tables: Mapping[str, TableSpec]) -> None:
        self._endpoint = endpoint
        self._tables = tables
        self._ids: dict[tuple[int, str], np.ndarray] = {}  # rows that a trainer trains
        self._begun: dict[tuple[int, str, str, int], tuple[bool, Inbox]] = {}
        # rows of a block as a trainer has received them
        self._backups: dict[tuple[int, str], RowGradient] = {}
        # rows of each step with pending gradients: a communicator sends gradients of earlier steps
        # after later steps have looked up their rows
        self._under_way: dict[tuple[int, str], list[np.ndarray]] = {}

    def memory_of(self, k: int) -> dict[str, np.ndarray]:
        """Return memory for the gradients of trainer k before its first request: name to an array
        without rows."""
        return {t.gradients[k]: np.empty((0, *t.row), t.dtype) for t in self._tables.values()}

    def take(
        self, k: int, message: wire.Message, grads: Inbox
    ) -> tuple[str, np.ndarray, bool] | None:
        """Take a message of a `prefetch`.

        Returns:
          The block, its row ids and `train`, when the request is complete.

        Args:
          grads: gradients of the trainer; they get memory for those of these rows, unless a later
            step looks them up.
        """
        name, table = message["table"], self._tables.get(message["table"])
        if table is None:
            raise WireError(
                f"trainer {k} asks for rows of {wire.brief(name)}, which is no table of "
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
        """Allocate the gradient of announced rows: the first gradient of their step has come."""
        self._expect(k, message, self._tables[name], ids, grads)

    def answered(self, k: int, name: str, ids: np.ndarray, rows: np.ndarray) -> None:
        """Note the rows that a step of a trainer looks up and trains, as it receives them.

        Each step looks up every block once, also for no rows.
        """
        if not self._tables[name].on_trainers:
            self._under_way.setdefault((k, name), []).append(ids)
        if self._tables[name].backed:
            self._backups[k, name] = RowGradient(ids, rows)

    def follows(self, k: int, message: wire.Message, grads: Inbox) -> None:
        """Take a `row_ids`, which has the row ids of a gradient that follows in this step."""
        gradient = message["gradient"]
        found = next(((n, t) for n, t in self._tables.items() if t.gradients[k] == gradient), None)
        if found is None:
            raise WireError(
                f"trainer {k} has rows of {wire.brief(gradient)}, and {self._endpoint} has no such "
                "table"
            )
        name, table = found
        numbers = self._numbers(k, message, name, table, True)
        if numbers is None:
            return
        _, ids = numbers
        if table.backed and not np.all(np.isin(ids, self._received(k, name).ids)):
            raise WireError(f"a gradient of rows of {name} that trainer {k} has not asked for")
        self._expect(k, message, table, ids, grads)

    def _numbers(
        self, k: int, message: wire.Message, name: str, table: TableSpec, train: bool
    ) -> tuple[bool, np.ndarray] | None:
        """Return `train` of a request's first message and its row ids, when all messages are
        here."""
        count, key = message["count"], (k, message.op, name, message.fields.get("ahead", 0))
        if not 0 <= count <= table.rows:
            raise WireError(
                f"trainer {k} asks for {wire.brief(count)} rows of {name}, which has {table.rows}"
            )
        refusal = lambda n: f"a `{message.op}` with {wire.brief(n)}"
        fresh = train, Inbox({"ids": np.empty(count, np.int32)}, refusal)
        train, inbox = self._begun.pop(key, fresh)
        inbox.take(message)
        if inbox.missing():
            self._begun[key] = train, inbox
            return None
        ids = inbox.memory["ids"]
        if count and (ids[0] < 0 or ids[-1] >= table.rows or np.any(ids[1:] <= ids[:-1])):
            raise WireError(
                f"the rows of {name} that trainer {k} asks for do not go up from 0 to "
                f"{table.rows - 1}"
            )
        return train, ids

    def _expect(
        self, k: int, message: wire.Message, table: TableSpec, ids: np.ndarray, grads: Inbox
    ) -> None:
        """Allocate a gradient of these rows as zeros, which updates use if it never comes."""
        gradient = table.gradients[k]
        if grads.has_begun(gradient):
            raise WireError(
                f"a `{message.op}` of step {message['step']} after its gradient, {gradient}"
            )
        self._ids[k, gradient] = ids
        grads.renew(gradient, np.zeros((len(ids), *table.row), table.dtype))

    def under_way(self, name: str) -> np.ndarray:
        """Return the rows of a block whose gradients are pending, or here in part."""
        ids = [
            self._ids.get((k, gradient), ()) for k, gradient in self._tables[name].gradients.items()
        ]
        for (_, block), steps in self._under_way.items():
            ids += steps if block == name else ()
        return np.unique(np.concatenate([np.asarray(x, np.int32) for x in ids]))

    def gradients(self, k: int, grads: Inbox) -> dict[str, Any]:
        """Return the gradients of trainer k by name, those of tables with their row ids."""
        none = np.empty(0, np.int32)
        rows = {
            n: RowGradient(self._ids.get((k, n), none), grads.memory[n]) for n in self.memory_of(k)
        }
        return {**grads.memory, **rows}

    def backups(self, k: int) -> dict[str, RowGradient]:
        """Return, for updates that read them, the rows of trainer k's gradients as it received
        them."""
        found = {}
        for n, t in self._tables.items():
            if t.backed:
                backup = self._received(k, n)
                ids = self._ids.get((k, t.gradients[k]), np.empty(0, np.int32))
                found[n + BACKUP] = RowGradient(ids, backup.rows[np.searchsorted(backup.ids, ids)])
        return found

    def used(self, k: int, grads: Inbox, steps: int | None = None) -> None:
        """Forget the rows of trainer k whose gradients are used.

        Args:
          steps: number of steps that the gradients belong to; None if no more come.
        """
        for n, t in self._tables.items():
            del self._under_way.get((k, n), [])[:steps]
            self._backups.pop((k, n), None)
            self._ids.pop((k, t.gradients[k]), None)
        for n, none in self.memory_of(k).items():
            grads.renew(n, none)

    def _received(self, k: int, name: str) -> RowGradient:
        t = self._tables[name]
        return self._backups.get((k, name)) or RowGradient(
            np.empty(0, np.int32), np.empty((0, *t.row), t.dtype)
        )
