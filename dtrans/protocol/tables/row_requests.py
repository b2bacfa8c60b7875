"""What trainers ask of tables: rows by their numbers, and room for the gradients of these.

    prefetch  train        the rows, and the gradient of the step is of them
              ahead        the same, of a later step (`dtrans.protocol.tables.rows_ahead`)
              otherwise    the rows, for whoever looks at them
    row_ids                nothing: the gradient of the step is of these rows

Where gradients are compensated for their delay, rows that a trainer trains are kept as it receives
them, until their gradient is used.

A request may come in several messages. One that cannot be is refused, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrans.errors import WireError
from dtrans.ops import BACKUP
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.served import RowGradient, ServedRows


class RowRequests:
    """The requests of one server's trainers.

    Args:
      endpoint: the server's.
      tables: the blocks that rows are asked of.
    """

    def __init__(self, endpoint: str, tables: Mapping[str, ServedRows]) -> None:
        self._endpoint = endpoint
        self._tables = tables
        self._ids: dict[tuple[int, str], np.ndarray] = {}  # of the rows that a trainer trains
        self._begun: dict[tuple[int, str, str, int], tuple[bool, Inbox]] = {}
        self._given: dict[
            tuple[int, str], RowGradient
        ] = {}  # rows of a block as a trainer has received them
        # rows of each step whose gradients are to come: a communicator sends those of earlier steps
        # after later steps have looked up theirs
        self._under_way: dict[tuple[int, str], list[np.ndarray]] = {}

    def memory_of(self, k: int) -> dict[str, np.ndarray]:
        """The gradients of trainer k, before it has asked for any row: name to an array without
        rows."""
        return {t.gradients[k]: np.empty((0, *t.row), t.dtype) for t in self._tables.values()}

    def take(
        self, k: int, message: wire.Message, grads: Inbox
    ) -> tuple[str, np.ndarray, bool] | None:
        """Take a message; the block, the rows of it that are to be answered with, and `train`, when
        all have come.

        Args:
          grads: where the trainer's gradients arrive: there is room for those of these rows
            afterwards, unless they are of a later step.
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
        """Make room for the gradient of rows that trainer k has announced: the first of its step
        has come."""
        self._expect(k, message, self._tables[name], ids, grads)

    def answered(self, k: int, name: str, ids: np.ndarray, rows: np.ndarray) -> None:
        """Note the rows that a step of a trainer looks up and trains, as it receives them.

        Each step looks up every block once, also for no rows.
        """
        if not self._tables[name].kept:
            self._under_way.setdefault((k, name), []).append(ids)
        if self._tables[name].backed:
            self._given[k, name] = RowGradient(ids, rows)

    def follows(self, k: int, message: wire.Message, grads: Inbox) -> None:
        """Take a message that says of which rows the gradient is that follows in this step."""
        gradient = message["gradient"]
        found = next(((n, t) for n, t in self._tables.items() if t.gradients[k] == gradient), None)
        if found is None:
            raise WireError(
                f"trainer {k} has rows of {wire.brief(gradient)}, of which {self._endpoint} has no "
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
        self, k: int, message: wire.Message, name: str, table: ServedRows, train: bool
    ) -> tuple[bool, np.ndarray] | None:
        """The numbers of rows in the messages of a request, and what its first one says of them,
        when all have come."""
        count, key = message["count"], (k, message.op, name, message.fields.get("ahead", 0))
        if not 0 <= count <= table.rows:
            raise WireError(
                f"trainer {k} asks for {wire.brief(count)} rows of {name}, which has {table.rows}"
            )
        fresh = (
            train,
            Inbox(
                {"ids": np.empty(count, np.int32)},
                lambda n: f"a `{message.op}` with {wire.brief(n)}",
            ),
        )
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
        self, k: int, message: wire.Message, table: ServedRows, ids: np.ndarray, grads: Inbox
    ) -> None:
        """Make room for a gradient of these rows: zeros, of which updates are made where none comes
        any more."""
        gradient = table.gradients[k]
        if grads.has_begun(gradient):
            raise WireError(
                f"a `{message.op}` of step {message['step']} after its gradient, {gradient}"
            )
        self._ids[k, gradient] = ids
        grads.renew(gradient, np.zeros((len(ids), *table.row), table.dtype))

    def under_way(self, name: str) -> np.ndarray:
        """Return the rows of a block whose gradients are to come, or have come in part."""
        ids = [
            self._ids.get((k, gradient), ()) for k, gradient in self._tables[name].gradients.items()
        ]
        for (_, block), steps in self._under_way.items():
            ids += steps if block == name else ()
        return np.unique(np.concatenate([np.asarray(x, np.int32) for x in ids]))

    def gradients(self, k: int, grads: Inbox) -> dict[str, Any]:
        """The gradients of trainer k, by name: those of tables with the numbers of their rows."""
        none = np.empty(0, np.int32)
        rows = {
            n: RowGradient(self._ids.get((k, n), none), grads.memory[n]) for n in self.memory_of(k)
        }
        return {**grads.memory, **rows}

    def backups(self, k: int) -> dict[str, RowGradient]:
        """What trainer k has received of the rows that its gradients are of, where updates read
        it."""
        found = {}
        for n, t in self._tables.items():
            if t.backed:
                given, ids = (
                    self._received(k, n),
                    self._ids.get((k, t.gradients[k]), np.empty(0, np.int32)),
                )
                found[n + BACKUP] = RowGradient(ids, given.rows[np.searchsorted(given.ids, ids)])
        return found

    def used(self, k: int, grads: Inbox, steps: int | None = None) -> None:
        """Forget the rows of trainer k whose gradients are used.

        Args:
          steps: number of steps that the gradients are of; None if no more come.
        """
        for n, t in self._tables.items():
            del self._under_way.get((k, n), [])[:steps]
            self._given.pop((k, n), None)
            self._ids.pop((k, t.gradients[k]), None)
        for n, none in self.memory_of(k).items():
            grads.renew(n, none)

    def _received(self, k: int, name: str) -> RowGradient:
        t = self._tables[name]
        return self._given.get((k, name)) or RowGradient(
            np.empty(0, np.int32), np.empty((0, *t.row), t.dtype)
        )
