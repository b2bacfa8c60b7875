"""Answers of a synchronous server to requests for table rows, for this and for later steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.protocol import wire
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry
from dtrans.protocol.server_blocks import ServerBlocks, StepUpdate
from dtrans.protocol.tables.row_requests import RowRequests
from dtrans.protocol.tables.rows_ahead import DueRows, RowsAhead, due_messages


class RowAnswers:
    """Answers of a synchronous server to trainers that look up rows of embedding tables.

    A trainer may also request the rows of a later step early ("announce" them). The server then
    sends them again if an update changes them meanwhile.

    Args:
      served: the server's blocks.
      update: the server's update, from which the current rows are read.
      trainers: the server's trainers.
      say: function that sends a message.

    Attributes:
      requests: the row ids that trainers have requested, and memory for gradients of these rows.
    """

    def __init__(
        self, served: ServerBlocks, update: StepUpdate, trainers: TrainerRegistry, say: Say
    ) -> None:
        self.requests = RowRequests(served.endpoint, served.tables)
        self._tables, self._update = served.tables, update
        self._trainers, self._say = trainers, say
        self._ahead = RowsAhead(served.tables)
        # block name -> row ids of each trainer's gradient in the current update
        self._touched: dict[str, list[np.ndarray]] = {}

    def take(self, k: int, message: wire.Message, grads: Inbox) -> None:
        """Handle trainer k's request for rows (`prefetch`), and send the rows when it is complete.

        A request may arrive in several messages.

        Args:
          k: id of the trainer.
          message: the message.
          grads: receiver of the trainer's gradients. If gradients of the requested rows follow in
            this step, memory for them is added.
        """
        step, ahead = message["step"], message.fields.get("ahead")
        if ahead is not None:
            for name in message["counts"]:
                self._ahead.check(k, name, step, ahead)
        asked = self.requests.take(k, message, grads)
        if asked is None:
            return
        blocks, train = asked
        if train:
            self._update.create_rows(blocks)
        rows = [(n, self._update.rows(n, ids, train=train)) for n, ids in blocks.items()]

        if ahead is not None:
            due = []
            for name, current in rows:
                found = self._ahead.announce(k, name, step, ahead, blocks[name])
                if found is not None:
                    due.append((found, current))
            self._send_due(due, step)
            return
        if train:
            for name in blocks:
                self._ahead.drop(k, name, step)
        address = self._trainers.known[k].address
        self._say(address, "rows", rows, step=step, **message.request)

    def begin(self, k: int, message: wire.Message, grads: Inbox) -> None:
        """Prepare a trainer's step: add memory for gradients of rows that it has requested earlier.

        Args:
          k: id of the trainer.
          message: the first message of the step.
          grads: receiver of the trainer's gradients.
        """
        self.requests.expect(k, message, dict(self._ahead.begin(k, message["step"])), grads)

    def gradients(self, grads: Mapping[int, Inbox], counted: Collection[int]) -> dict[str, Any]:
        """Return all trainers' gradients, which an update reads, by name.

        The gradient of a table is a `RowGradient`: row ids, and the gradients of these rows.

        Args:
          grads: maps the id of each trainer to the inbox with its gradients.
          counted: ids of the trainers that contribute gradients to the update.
        """
        found: dict[str, Any] = {}
        for k, inbox in grads.items():
            found |= self.requests.gradients(k, inbox)
        for name, table in self._tables.items():
            self._touched[name] = [found[table.gradients[k]].ids for k in counted]
        return found

    def send_changed(self, step: int) -> None:
        """Send rows that trainers have requested for later steps, after an update has changed them.

        Args:
          step: number of complete updates.
        """
        due = []
        for x in self._ahead.end_update(step, self._touched):
            due.append((x, self._update.rows(x.name, x.ids, train=True)))
        self._send_due(due, step)

    def _send_due(self, due: Sequence[tuple[DueRows, np.ndarray]], step: int) -> None:
        """Send rows that trainers have requested for later steps, with their current values."""
        for trainer, blocks, fields in due_messages(due):
            address = self._trainers.known[trainer].address
            self._say(address, "rows", blocks, step=step, **fields)

    def forget_trainer(self, k: int) -> None:
        """Forget the rows that trainer k, which has left, has requested for later steps."""
        self._ahead.forget(k)

    def forget_table(self, name: str) -> None:
        """Forget all requests for rows of later steps of one block, after rows of it were evicted.

        The server sends no message: trainers forget the same requests when the eviction ends.

        Args:
          name: name of the block (the part of a table on this server).
        """
        self._ahead.forget_rows(name)
