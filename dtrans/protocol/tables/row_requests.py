"""Requests of trainers for rows of tables, and memory for the gradients of these rows.

    prefetch with train    requests rows; in the same step, the trainer sends their gradients
    prefetch with ahead    requests rows of a later step (`dtrans.protocol.tables.rows_ahead`)
    other prefetch         requests rows, for example for an evaluation; no gradient follows
    row_ids                contains the row ids of the next gradients, and requests nothing

With delay compensation, the server stores the values that a `prefetch` with `train` has returned,
until it has used the gradient of these rows.

One `prefetch` requests rows of several tables. A request may consist of several messages, which
have the same `counts`. A trainer sends all of them before the next request with the same `ahead`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import WireError
from dtrans.ops import BACKUP
from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server_blocks import RowGradient, TableSpec


class RowRequests:
    """Requests for table rows at one server, and memory for the gradients that follow them.

    A trainer sends the gradients of its rows without ids, in the order in which it requested the
    rows. So the server records the ids of each request.

    Args:
      endpoint: endpoint of the server.
      tables: specification of each block of a table, by name.
    """

    def __init__(self, endpoint: str, tables: Mapping[str, TableSpec]) -> None:
        self._endpoint = endpoint
        self._tables = tables
        # (trainer, name of a table gradient) -> row ids of the gradient
        self._ids: dict[tuple[int, str], np.ndarray] = {}
        # (trainer, op, `ahead`) of an incomplete request -> its `train`, and its row ids
        self._begun: dict[tuple[int, str, int], tuple[bool, Inbox]] = {}
        # (trainer, block) -> row values that were sent to the trainer (delay compensation)
        self._backups: dict[tuple[int, str], RowGradient] = {}
        # (trainer, block) -> row ids of each step whose gradient is pending. Several steps may be
        # pending, because a communicator may send a gradient after lookups of later steps.
        self._under_way: dict[tuple[int, str], list[np.ndarray]] = {}

    def memory_of(self, k: int) -> dict[str, np.ndarray]:
        """Return empty memory (0 rows) for each table gradient of a trainer, by name.

        When the trainer requests rows, this memory is replaced by memory for the gradients of these
        rows.

        Args:
          k: id of the trainer.
        """
        return {t.gradients[k]: np.empty((0, *t.row), t.dtype) for t in self._tables.values()}

    def take(
        self, k: int, message: wire.Message, grads: Inbox
    ) -> tuple[dict[str, np.ndarray], bool] | None:
        """Receive one message of a trainer's request for rows (`prefetch`).

        Args:
          k: id of the trainer.
          message: the message.
          grads: receiver of the trainer's gradients. If gradients of the rows follow in this step,
            memory for them is added.

        Returns:
          The row ids in each block (the part of a table on this server) by name, and True if
          gradients follow. None until the request is complete.

        Raises:
          WireError: the request is malformed.
        """
        for name in message["counts"]:
            if name not in self._tables:
                raise WireError(
                    f"trainer {k} requests rows of {wire.brief(name)}, which is not a table of "
                    f"pserver {self._endpoint}"
                )
        blocks = {name: name for name in self._tables}
        numbers = self._numbers(k, message, blocks, train=message["train"])
        if numbers is None:
            return None
        ids, train = numbers
        if train and "ahead" not in message.fields:
            self.expect(k, message, ids, grads)
        return ids, train

    def expect(
        self, k: int, message: wire.Message, ids: Mapping[str, np.ndarray], grads: Inbox
    ) -> None:
        """Add memory, filled with zeros, for a trainer's gradients of some rows.

        Gradients that the trainer does not send stay zero.

        Args:
          k: id of the trainer.
          message: the trainer's request for the rows; gradients may arrive after it.
          ids: row ids in each block, by the block's name.
          grads: the trainer's gradients, to which the memory is added.

        Raises:
          WireError: a part of such a gradient has already arrived. No memory is added.
        """
        memory, ids_of = {}, {}
        for name, rows in ids.items():
            table = self._tables[name]
            gradient = table.gradients[k]
            if grads.has_begun(gradient):
                raise WireError(
                    f"trainer {k} sent row ids for gradient {gradient} in a `{message.op}` message "
                    f"of step {message['step']}, but a part of this gradient has already arrived; "
                    "row ids must come first"
                )
            memory[gradient] = np.zeros((len(rows), *table.row), table.dtype)
            ids_of[k, gradient] = rows
        self._ids |= ids_of
        grads.renew(memory)

    def answered(self, k: int, name: str, ids: np.ndarray, rows: np.ndarray) -> None:
        """Record the rows that were sent to trainer k, until their gradients have been used.

        A row with a pending gradient must not be evicted. With delay compensation, the update also
        reads the values that were sent.

        Args:
          k: id of the trainer.
          name: name of the block (the part of a table on this server).
          ids: row ids in the block. Each step requests rows of every block once, possibly 0 rows.
          rows: the values that were sent.
        """
        if not self._tables[name].on_trainers:
            self._under_way.setdefault((k, name), []).append(ids)
        if self._tables[name].backed:
            self._backups[k, name] = RowGradient(ids, rows)

    def take_row_ids(self, k: int, message: wire.Message, grads: Inbox) -> None:
        """Receive a `row_ids` message: trainer k sends gradients of these table rows next.

        A communicator merges gradients of several steps, so their rows differ from the rows of one
        request.
        """
        blocks = {table.gradients[k]: name for name, table in self._tables.items()}
        for gradient in message["counts"]:
            if gradient not in blocks:
                raise WireError(
                    f"trainer {k} sends row ids of {wire.brief(gradient)}, which is not a gradient "
                    f"of a table of pserver {self._endpoint}"
                )
        numbers = self._numbers(k, message, blocks, train=True)
        if numbers is None:
            return
        ids, _ = numbers
        for name, rows in ids.items():
            is_backed = self._tables[name].backed
            if is_backed and not np.all(np.isin(rows, self._received(k, name).ids)):
                raise WireError(
                    f"trainer {k} sends a gradient for rows of {name}, but has not requested these "
                    "rows"
                )
        self.expect(k, message, ids, grads)

    def _numbers(
        self, k: int, message: wire.Message, blocks: Mapping[str, str], *, train: bool
    ) -> tuple[dict[str, np.ndarray], bool] | None:
        """Receive row ids of one or several blocks, possibly in several messages.

        Args:
          k: id of the trainer.
          message: the message.
          blocks: maps each name in the message's `counts` to the name of a block (the part of a
            table on this server).
          train: True if gradients of the rows follow.

        Returns:
          The row ids in each block, by name, and `train` of the request's first message; None if
          row ids are missing.

        Raises:
          WireError: the message is malformed, or belongs to another request than the earlier
            messages.
        """
        counts = message["counts"]
        if not counts:
            raise WireError(f"trainer {k} sends a `{message.op}` message without a table")
        memory = {}
        for label, count in counts.items():
            rows = self._tables[blocks[label]].rows
            if type(count) is not int or not 0 <= count <= rows:
                raise WireError(
                    f"trainer {k} requests {wire.brief(count)} rows of {blocks[label]}, which has "
                    f"{rows} rows"
                )
            memory[label] = np.empty(count, np.int32)
        key = k, message.op, message.fields.get("ahead", 0)
        refusal = lambda n: f"a `{message.op}` message with the block {wire.brief(n)}"
        train, inbox = self._begun.get(key, (train, Inbox(memory, refusal)))
        begun = {label: len(ids) for label, ids in inbox.memory.items()}
        if begun != counts:
            raise WireError(
                f"trainer {k} sends a `{message.op}` message with the counts {wire.brief(counts)}, "
                f"but its request with the counts {wire.brief(begun)} is incomplete"
            )
        inbox.take(message)  # an error here does not delete the request's earlier messages
        if inbox.missing():
            self._begun[key] = train, inbox
            return None
        self._begun.pop(key, None)
        found = {blocks[label]: ids for label, ids in inbox.memory.items()}
        all_increase = _increase(list(found.values()))
        for name, ids in found.items():
            rows = self._tables[name].rows
            is_inside = not len(ids) or (ids[0] >= 0 and ids[-1] < rows)
            if not is_inside or not (all_increase or _increase([ids])):
                raise WireError(
                    f"trainer {k} sends row ids of {name} that are not increasing numbers from 0 "
                    f"to {rows - 1}"
                )
        return found, train

    def under_way(self, name: str) -> np.ndarray:
        """Return the ids of a block's rows that wait for a gradient, so that they are not evicted.

        Args:
          name: name of the block (the part of a table on this server).
        """
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
        """Return the row values from which trainer k has computed its current gradients.

        Delay compensation corrects a gradient by the change of the row since then. The result
        contains only tables with delay compensation, under the names by which updates read these
        values.
        """
        found = {}
        for n, t in self._tables.items():
            if t.backed:
                backup = self._received(k, n)
                ids = self._gradient_ids(k, t.gradients[k])
                found[n + BACKUP] = RowGradient(ids, backup.rows[np.searchsorted(backup.ids, ids)])
        return found

    def used(self, k: int, grads: Inbox, steps: int | None = None) -> None:
        """Release the row ids and the memory of trainer k's table gradients, after an update.

        Args:
          k: id of the trainer.
          grads: receiver of the trainer's gradients. The memory of table gradients is released.
          steps: number of steps from which the used gradients were merged; None if the trainer has
            left.
        """
        for n, t in self._tables.items():
            del self._under_way.get((k, n), [])[:steps]
            self._backups.pop((k, n), None)
            self._ids.pop((k, t.gradients[k]), None)
        grads.renew(self.memory_of(k))

    def _received(self, k: int, name: str) -> RowGradient:
        """Return the rows of one table that were sent to trainer k and wait for their gradient.

        Only tables with delay compensation have such rows; the result may have 0 rows.
        """
        t = self._tables[name]
        return self._backups.get((k, name)) or RowGradient(
            np.empty(0, np.int32), np.empty((0, *t.row), t.dtype)
        )


def _increase(arrays: Sequence[np.ndarray]) -> bool:
    """Return True if the numbers of each array increase; one pass compares all of them."""
    numbers = np.concatenate(arrays)
    increases = numbers[1:] > numbers[:-1]
    # The last number of an array may be larger than the first one of the next array.
    ends = np.cumsum([len(x) for x in arrays])
    increases[ends[(ends > 0) & (ends < len(numbers))] - 1] = True
    return bool(increases.all())
