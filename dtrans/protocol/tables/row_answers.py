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
    """Answers to the requests for table rows that one server's trainers send.

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
        """Handle a `prefetch` of trainer k, and answer it when the request is complete.

        Args:
          grads: the trainer's gradients. If gradients of the requested rows belong to this step,
            memory for them is added.
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
        """Allocate memory for gradients of the rows that trainer k has announced for this step."""
        self.requests.expect(k, message, dict(self._ahead.begin(k, message["step"])), grads)

    def gradients(self, grads: Mapping[int, Inbox], counted: Collection[int]) -> dict[str, Any]:
        """Return all gradients by name; gradients of tables are `RowGradient`s.

        Args:
          grads: maps the id of each trainer to the inbox with its gradients.
          counted: ids of the trainers whose gradients the update uses.
        """
        found: dict[str, Any] = {}
        for k, inbox in grads.items():
            found |= self.requests.gradients(k, inbox)
        for name, table in self._tables.items():
            self._touched[name] = [found[table.gradients[k]].ids for k in counted]
        return found

    def send_changed(self, step: int) -> None:
        """Send the announced rows that are due after an update.

        Args:
          step: number of complete updates.
        """
        due = []
        for x in self._ahead.end_update(step, self._touched):
            due.append((x, self._update.rows(x.name, x.ids, train=True)))
        self._send_due(due, step)

    def _send_due(self, due: Sequence[tuple[DueRows, np.ndarray]], step: int) -> None:
        """Send announced rows, with their current values."""
        for trainer, blocks, fields in due_messages(due):
            address = self._trainers.known[trainer].address
            self._say(address, "rows", blocks, step=step, **fields)

    def forget_trainer(self, k: int) -> None:
        """Drop the announcements of trainer k, which has left."""
        self._ahead.forget(k)

    def forget_table(self, name: str) -> None:
        """Drop all announcements for a block after an eviction.

        The server sends no message: trainers drop the same announcements when the eviction ends.
        """
        self._ahead.forget_rows(name)
