"""What trainers ask of tables: rows by their numbers, and room for the gradients of these.

    prefetch  train        the rows, and the gradient of the step is of them
              otherwise    the rows, for whoever looks at them

A request may come in several messages. One that cannot be is refused, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrans.errors import WireError
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
        self._begun: dict[tuple[int, str], tuple[bool, Inbox]] = {}

    def memory_of(self, k: int) -> dict[str, np.ndarray]:
        """The gradients of trainer k, before it has asked for any row: name to an array without rows."""
        return {t.gradients[k]: np.empty((0, *t.row), t.dtype) for t in self._tables.values()}

    def take(self, k: int, message: wire.Message, grads: Inbox) -> tuple[str, np.ndarray] | None:
        """Take a message; the block and the numbers of rows in it that are to be answered with, when all have come.

        Args:
          grads: where the trainer's gradients arrive: there is room for those of these rows afterwards.
        """
        name, count, train = message["table"], message["count"], message["train"]
        table = self._tables.get(name)
        if table is None:
            raise WireError(f"trainer {k} asks for rows of {wire.brief(name)}, which is no table of {self._endpoint}")
        if not 0 <= count <= table.rows:
            raise WireError(f"trainer {k} asks for {wire.brief(count)} rows of {name}, which has {table.rows}")
        fresh = (train, Inbox({"ids": np.empty(count, np.int32)}, lambda n: f"a `prefetch` with {wire.brief(n)}"))
        train, inbox = self._begun.pop((k, name), fresh)
        inbox.take(message)
        if inbox.missing():
            self._begun[k, name] = train, inbox
            return None
        ids = inbox.memory["ids"]
        if count and (ids[0] < 0 or ids[-1] >= table.rows or np.any(ids[1:] <= ids[:-1])):
            raise WireError(f"the rows of {name} that trainer {k} asks for do not go up from 0 to {table.rows - 1}")
        if train:
            gradient = table.gradients[k]
            if grads.has_begun(gradient):
                raise WireError(f"a `prefetch` of {name} in step {message['step']} after its gradient")
            self._ids[k, gradient] = ids
            grads.renew(gradient, np.empty((count, *table.row), table.dtype))
        return name, ids

    def gradients(self, k: int, grads: Inbox) -> dict[str, Any]:
        """The gradients of trainer k, by name: those of tables with the numbers of their rows."""
        none = np.empty(0, np.int32)
        rows = {n: RowGradient(self._ids.get((k, n), none), grads.memory[n]) for n in self.memory_of(k)}
        return {**grads.memory, **rows}
