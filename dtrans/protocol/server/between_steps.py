"""Evictions of table rows between two steps of a synchronous server.

The server evicts rows when all trainers have requested the eviction (`evict`). So no trainer is in
the middle of a step, where it may need the rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.server.joint_update import JointUpdate
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry
from dtrans.protocol.server_blocks import ServerBlocks
from dtrans.protocol.tables.stored_tables import StoredTables, check_eviction, evict


class BetweenSteps:
    """Requests for evictions, which wait until all trainers have sent the same request.

    Args:
      served: the server's blocks.
      trainers: the server's trainers.
      joint: the server's update; it also sends evictions to the server's backup.
      say: function that sends a message.

    Attributes:
      evicting: dict from the id of each requesting trainer to the table and `unused_for` of its
        request.
    """

    def __init__(
        self, served: ServerBlocks, trainers: TrainerRegistry, joint: JointUpdate, say: Say
    ) -> None:
        self._served, self._trainers, self._joint, self._say = served, trainers, joint, say
        self.evicting: dict[int, tuple[str, int]] = {}
        self._requests: dict[int, dict[str, int]] = {}  # trainer id -> `wire.Message.request`
        self._answer: dict[str, Any] = {}  # fields of the `evicted` messages

    def evict(self, k: int, message: wire.Message, step: int, in_step: Collection[int]) -> None:
        """Record trainer k's request to evict rows.

        Args:
          k: id of the trainer.
          message: the request.
          step: number of complete updates.
          in_step: ids of the trainers that are in the middle of the next step.

        Raises:
          WireError: the request is invalid, or its sender is in the middle of a step. Also raised
            if the server has not answered the sender's last request yet.
          PeerError: another trainer has requested a different eviction, or has begun the next step.
        """
        table, unused_for = check_eviction(self._served.endpoint, self._served.tables, k, message)
        if k in in_step:
            raise WireError(
                f"trainer {k} sent `evict` in the middle of step {step}; rows can be evicted only "
                "between two steps"
            )
        if k in self.evicting:
            raise WireError(
                f"trainer {k} sent a second `evict` before the answer to its first `evict`"
            )
        for other, before in self.evicting.items():
            if before != (table, unused_for):
                raise PeerError(
                    f"after step {step}, trainer {k} evicts rows of {table} with "
                    f"unused_for={unused_for}, but trainer {other} evicts rows of {before[0]} with "
                    f"unused_for={before[1]}; all trainers must call job.tables.evict with the "
                    "same arguments, between the same two steps"
                )
        self.evicting[k], self._requests[k] = (table, unused_for), message.request
        for other in in_step:
            self.check_step(other, step)

    def check_step(self, k: int, step: int) -> None:
        """Raise PeerError if trainer k begins a step, but another trainer waits to evict rows."""
        if self.evicting:
            other = min(self.evicting)
            raise PeerError(
                f"trainer {other} evicts rows of {self.evicting[other][0]} after step {step}, but "
                f"trainer {k} continues without an eviction: all trainers must call "
                "job.tables.evict between the same two steps"
            )

    def carry_out(self, stored: StoredTables | None) -> str:
        """Evict the requested rows; return the name of the table.

        If another server stores a copy of this server (its backup), it must evict the rows first.
        Without a backup, this method also answers all trainers.
        """
        (name, unused_for), *_ = self.evicting.values()
        self._answer = evict(stored, name, unused_for, np.empty(0, np.int32))
        if self._answer["error"] or self._joint.replicate_eviction(name, unused_for):
            self.answer()
        return name

    def answer(self) -> None:
        """Answer all trainers. A backup server, if there is one, has evicted the rows before."""
        for k in sorted(self.evicting):
            address = self._trainers.known[k].address
            self._say(address, "evicted", **self._answer, **self._requests.pop(k))
        self.evicting.clear()
