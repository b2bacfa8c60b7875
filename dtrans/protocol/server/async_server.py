"""Asynchronous parameter server: it updates a block whenever a gradient of the block arrives.

    every trainer:  hello                             once
                    recv                              the initial values
                    prefetch..., send..., recv        every step
                    complete                          once

Trainers do not wait for each other. When the first gradient of a trainer's step is complete, the
server runs the lr_sched block: the equations with the role lr_sched, such as a learning rate
schedule. All updates of this step use its outputs. So counts in the optimizer's state count the
steps of all trainers. The answer to `recv` contains the newest values. With one trainer, the
result equals sequential training.

One loop handles the messages and updates one block at a time. So no update is lost, in contrast to
threads that add to a block without a lock (Hogwild). A trainer's communicator may merge the
gradients of n steps. The server then runs the lr_sched block n times, but updates the blocks once.

A trainer requests rows of tables before it uses them (`prefetch`), and receives the newest values.
It sends their gradients by `send`, like all gradients. Trainers of GEO-SGD store the rows that they
have requested. Before the answer to `recv`, the server sends such a trainer the stored rows that
other trainers have changed (`changed_rows`).

With delay compensation (`dtrans.parameter_server.dc_asgd`), the server also stores the values that
it has sent to each trainer. It stores the values of table rows until it has used their gradients.

If a trainer fails or is lost, the other trainers continue. The server drops the incomplete
gradients of the failed trainer. The server ends when every trainer has left. If all trainers have
failed, it ends with an error. In a job with snapshots, the server instead reports a
lost trainer to the launcher, which starts the trainer again (`dtrans.protocol.generations`).

Source of the behaviour: `RunAsyncLoop` in
paddle/fluid/operators/distributed_ops/listen_and_serv_op.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dtrans.errors import LostPeerError, PeerError, WireError
from dtrans.ops import BACKUP, MAX_MERGED, backup_of
from dtrans.protocol import wire
from dtrans.protocol.server.async_steps import AsyncSteps, StepUpdates
from dtrans.protocol.server.server_peers import ServerPeers
from dtrans.protocol.server.step_counts import MAX_STEPS, StepCounts
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry, answer, log, wanted
from dtrans.protocol.server_blocks import BlockUpdate, ServerBlocks
from dtrans.protocol.tables.changed_rows import UnseenChanges
from dtrans.protocol.tables.row_requests import RowRequests
from dtrans.protocol.tables.stored_tables import StoredTables, check_eviction, evict


class AsyncServer:
    """Handler of the messages of an asynchronous server.

    Args:
      served: description of the server's arrays and messages.
      update: computes the new state of one block at a time.
      state: initial arrays by name; updated in place.
      trainers: the server's trainers.
      say: function that sends a message.
      counts: number of each trainer's steps before this generation, by id.
      has_snapshots: True in a job with snapshots.

    Attributes:
      between_steps: function that is called when a trainer has ended a step. Its argument is the
        number of all trainers' steps.
      endpoint: endpoint of the server.
      peers: the other servers; always empty.
      counts: numbers of the trainers' steps, in all generations.
      tables: the server's blocks of tables; None if it has none.
    """

    # the step in every welcome is 0, because each trainer counts its steps from 0
    step = 0
    word, idle = "asynchronous", "serving"

    def __init__(
        self,
        served: ServerBlocks,
        update: BlockUpdate,
        state: dict[str, Any],
        trainers: TrainerRegistry,
        say: Say,
        *,
        counts: Mapping[int, int] = {},
        has_snapshots: bool = False,
    ) -> None:
        self.between_steps: Callable[[int], object] | None = None
        self.endpoint = served.endpoint
        self.state = state
        self.peers = ServerPeers(served.endpoint, (), on_trainer_exit="")
        self._trainers = trainers
        self._say = say
        self._served = served
        self._blocks = update
        self._requests = RowRequests(served.endpoint, served.tables)
        self._steps = AsyncSteps(served, self._requests)
        self._changed = UnseenChanges(served.tables, trainers.count)
        self._failed: set[int] = set()
        self._has_snapshots = has_snapshots
        # After a failure, trainers of GEO-SGD repeat a push on the servers that have not received
        # the complete push. So these servers must not have applied a part of the push.
        self._applies_at_once = has_snapshots and served.adds_changes
        self.counts = StepCounts(served.endpoint, counts)
        self.tables: StoredTables | None = None

    def step_count(self) -> int:
        """Return the largest number of steps that a trainer has made."""
        return self.counts.largest

    def count_of(self, k: int) -> int | None:
        """Return the number of trainer k's steps, to be sent to trainer k; None for 0 steps."""
        return self.counts.of_trainer(k) or None

    def progress(self) -> dict[int, int]:
        """Return a map from the id of each trainer to the number of its steps.

        If this server receives no gradients, it cannot count steps, and the map is empty.
        """
        if not self._served.gradients and not self._served.tables:
            return {}
        return {k: self.counts.of_trainer(k) for k in self._steps.begun}

    def staleness(self, k: int) -> int | None:
        """Return the staleness of trainer k's last gradients; None before the first gradients.

        Staleness is the number of other trainers' steps that were missing in the parameters from
        which the gradients were computed.
        """
        return self._steps.begun[k].staleness if k in self._steps.begun else None

    def doing(self, k: int) -> str:
        """Return the progress of trainer k in its step, for the job's status."""
        if k not in self._trainers.known:
            return "not here yet"
        return self._steps.begun[k].grads.phase() if k in self._steps.begun else "computing"

    def awaited(self) -> str:
        """Return an empty text, because trainers do not wait for each other."""
        return ""

    # -- messages of trainers --------------------------------------------------------------------

    def send(self, k: int, message: wire.Message) -> None:
        """Receive gradients of trainer k, and update each block with a complete gradient."""
        step = self._steps.check_number(k, message)
        steps: Any = message.fields.get("steps", 1)
        most = MAX_STEPS if self._served.adds_changes else MAX_MERGED
        if not 1 <= steps <= most:
            raise WireError(
                f"trainer {k} sent pserver {self.endpoint} merged gradients of {steps} steps, "
                f"expected 1 to {most} steps"
            )
        step.grads.take(message)
        full = step.grads.memory.keys() - step.grads.missing()
        if self._applies_at_once and len(full) < len(step.grads.memory):
            return
        inputs = self._requests.gradients(k, step.grads) | self._requests.backups(k)
        for name in self._served.backed:
            inputs[name + BACKUP] = self.state[backup_of(name, k)]
        # Servers of GEO-SGD have no learning rate schedule that counts the steps of a push.
        merged = 1 if self._served.adds_changes else steps
        for block in step.updates.take(self._blocks, self.state, full, inputs, merged):
            if block in self._changed.tables:
                gradient = self._served.tables[block].gradients[k]
                self._changed.changed(k, block, inputs[gradient].ids)
        if len(full) == len(step.grads.memory):
            step.number += 1
            step.staleness = self.counts.of_others(k) - step.read
            self.counts.add(k, steps)
            step.grads.clear()
            self._requests.used(k, step.grads, steps)
            step.updates = StepUpdates()
            self._note_count()

    def _note_count(self) -> None:
        if self.between_steps is not None:
            self.between_steps(self.counts.total)

    def send_barrier(self, k: int, message: wire.Message) -> None:
        """Refuse `send_barrier`, which only synchronous trainers send."""
        raise WireError(
            f"trainer {k} sent `send_barrier`, but pserver {self.endpoint} is asynchronous; every "
            "role must plan the same sync_mode"
        )

    def prefetch(self, k: int, message: wire.Message) -> None:
        """Answer a request for rows of tables with the newest values."""
        step = self._steps.check_number(k, message)
        if "ahead" in message.fields:
            raise WireError(
                f"trainer {k} requested rows of a later step (`prefetch` with `ahead`), but "
                f"pserver {self.endpoint} is asynchronous; every role must plan the same sync_mode"
            )
        asked = self._requests.take(k, message, step.grads)
        if asked is not None:
            blocks, train = asked
            if train:
                self._blocks.create_rows(blocks)
            found = []
            for name, ids in blocks.items():
                found.append((name, self._blocks.rows(name, ids, self.state, train=train)))
            # Record the answer only now: an error above refuses the request.
            if train:
                for name, rows in found:
                    self._requests.answered(k, name, blocks[name], rows)
                    self._changed.asked(k, name, blocks[name])
            at = {"step": message["step"], **message.request}
            self._say(self._trainers.known[k].address, "rows", found, **at)

    def row_ids(self, k: int, message: wire.Message) -> None:
        """Receive the row ids of the gradients of tables that trainer k sends next."""
        step = self._steps.check_number(k, message)
        self._requests.take_row_ids(k, message, step.grads)

    def evict(self, k: int, message: wire.Message) -> None:
        """Evict the rows of a table that have no recent update and no pending gradient."""
        name, unused_for = check_eviction(self.endpoint, self._served.tables, k, message)
        self._steps.check_number(k, message)
        fields = evict(self.tables, name, unused_for, self._requests.under_way(name))
        self._say(self._trainers.known[k].address, "evicted", **fields, **message.request)

    def check_between(self, k: int, message: wire.Message) -> None:
        """Raise WireError if trainer k is in the middle of a step.

        For example, a trainer may request a checkpoint only between two steps.
        """
        self._steps.check_between(k, message)

    def saving(self, k: int, message: wire.Message) -> None:
        """Check the step of a `saving` message: the trainer waits for a checkpoint.

        An asynchronous server does nothing else.
        """
        self._steps.check_number(k, message)

    def recv(self, k: int, message: wire.Message) -> None:
        """Answer a request for parameters with the newest values."""
        t = self._trainers.known[k]
        step = self._steps.check_between(k, message)
        count = message.fields.get("count", 0)
        self.counts.check(k, count)
        if "blocks" in message.fields:
            t.wants = wanted(self._served, k, message["blocks"])
        if "changed" in message.fields:
            self._tell_changed(k, message)
        if self.counts.adopt(k, count):
            self._note_count()
        step.read = self.counts.of_others(k)
        values = {}
        for name in t.wants:
            values[name] = np.asarray(self.state[name])
            if name in self._served.backed:
                self.state[backup_of(name, k)] = self.state[name]
        answer(self._say, t, t.wants, message["step"], values)

    def _tell_changed(self, k: int, message: wire.Message) -> None:
        """Send trainer k the rows that it stores and that other trainers have changed.

        If the trainer stores no rows, send nothing, and reset the record of its rows.
        """
        if not self._changed.tables:
            raise WireError(
                f"trainer {k} sent `changed`, which is for tables of GEO-SGD; pserver "
                f"{self.endpoint} has no such table"
            )
        if not message["changed"]:
            self._changed.forget(k)
            return
        for name in self._changed.tables:
            ids = self._changed.take(k, name)
            news = [("ids", ids), ("rows", self._blocks.rows(name, ids, self.state, train=False))]
            fields = {"step": message["step"], "table": name, "count": len(ids)}
            self._say(self._trainers.known[k].address, "changed", news, **fields)

    def complete(self, k: int, message: wire.Message) -> None:
        """Handle the end of trainer k after its last step."""
        t = self._trainers.known[k]
        t.done = True
        self._say(t.address, "goodbye")
        if self._steps.of_trainer(k).grads.begun:
            log.warning(
                "pserver %s used only the complete gradients of the last step of trainer %d",
                self.endpoint,
                k,
            )
        self._requests.used(k, self._steps.of_trainer(k).grads)
        self._changed.forget(k)

    def abort(self, k: int, message: wire.Message) -> None:
        """Handle the failure of trainer k. The other trainers continue."""
        self._say(self._trainers.known[k].address, "goodbye")
        self._leave(k, f"trainer {k} failed: {message['reason']}")

    def _leave(self, k: int, reason: str) -> None:
        """Mark trainer k as failed; raise PeerError if all trainers have failed."""
        self._trainers.known[k].done = self._trainers.known[k].failed = True
        self._failed.add(k)
        self._requests.used(k, self._steps.of_trainer(k).grads)
        self._changed.forget(k)
        if len(self._failed) == self._trainers.count:
            raise PeerError(reason)
        log.warning("pserver %s continues without a trainer: %s", self.endpoint, reason)

    # -- other servers, and the clock ------------------------------------------------------------

    def take_peer(self, address: bytes, message: wire.Message) -> bool:
        """Return False, because asynchronous servers do not communicate with each other."""
        return False

    def look(self, now: float) -> None:
        """Mark lost trainers as failed, and check the deadline for the trainers' first connection.

        Raises:
          LostPeerError: in a job with snapshots, a trainer is lost.
          PeerError: all trainers have failed.
          DeadlineError: a trainer did not connect in time.
        """
        for k, why in self._trainers.lost(now).items():
            if self._has_snapshots:
                raise LostPeerError(why, f"trainer {k}")
            self._leave(k, why)
        self._trainers.absent(now)
