"""Update of a synchronous server that depends on other servers.

An update that reduces over rows of several servers has several phases. Between two phases, the
servers exchange partial results. In a job with replicas, a backup stores a copy of the server's
state. The server then answers trainers only after the backup has received the update's inputs.

No function here waits. The functions that continue an update return True if the server may answer
its trainers now.

Read next: `server_peers` (the other servers), `exchange` (partial results) and `replication`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from dtrans.errors import WireError
from dtrans.protocol import wire
from dtrans.protocol.server.admission import welcome
from dtrans.protocol.server.exchange import Exchange
from dtrans.protocol.server.replication import (
    MERGED,
    NewReplica,
    Replication,
    StoredReplicas,
    gradient_blocks,
    vector_blocks,
)
from dtrans.protocol.server.server_peers import ServerPeers
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry
from dtrans.protocol.server_blocks import StepUpdate, Vectors


class JointUpdate:
    """Update of a synchronous server, with the waits for partial results of other servers.

    Args:
      update: computes the new state from the gradients.
      peers: the other servers.
      trainers: the server's trainers.
      say: function that sends a message.
      step: number of updates that the state already contains.
      replication: the servers that store copies of each other's states (replicas); None without
        replicas.
      new_replica: function that creates the update for a copy of another server's state
        (`Replica`).

    Attributes:
      peers: the other servers.
      step: number of complete updates.
      waits_for_backup: True if the newest update or eviction is complete, but the backup lacks it.
        The server then answers no trainer.
      replicas: copies of other servers' states.
    """

    def __init__(
        self,
        update: StepUpdate,
        peers: ServerPeers,
        trainers: TrainerRegistry,
        say: Say,
        step: int = 0,
        replication: Replication | None = None,
        new_replica: NewReplica | None = None,
    ) -> None:
        self.peers = peers
        self.step = step
        self.waits_for_backup = False
        primaries = {} if replication is None else replication.primaries
        self.replicas = StoredReplicas(primaries, new_replica)
        self._backup = None if replication is None else replication.backup
        self._first = step
        self._evictions = 0  # number of evictions that were sent to the backup
        self._update, self._trainers, self._say = update, trainers, say

    @property
    def exchange(self) -> Exchange | None:
        """Exchange for which the update waits now; None if it does not wait."""
        return self._update.exchange

    def missing(self) -> list[str]:
        """Return the endpoints of the servers for which the update waits.

        First, it waits for the partial results of other servers. When all have arrived, it waits
        for the backup to acknowledge the merged gradients.
        """
        exchange = self.exchange
        if exchange is not None:
            return self.peers.missing(self.step, exchange)
        return [] if self._backup is None or self.is_replicated else [self._backup]

    @property
    def is_replicated(self) -> bool:
        """True if the backup has the inputs of all complete updates, or if there is no backup."""
        if self._backup is None or self.step + self._evictions == self._first:
            return True
        return self.peers.known[self._backup].replicated >= self.step + self._evictions

    def replicate_state(self) -> None:
        """Send the state at the beginning of a generation (part between failures) to the backup."""
        if self._backup is not None:
            blocks, rows = self._update.state_blocks()
            fields = {"rows": rows} if rows else {}
            self._say(self._backup, "replica", blocks, step=self.step, is_state=True, **fields)

    def replicate_eviction(self, table: str, unused_for: int) -> bool:
        """Send an eviction of table rows to the backup, and begin to wait for the backup.

        Args:
          table, unused_for: as for `StoredTables.evict`.

        Returns:
          True if there is no backup, so that the server may answer its trainers now.
        """
        if self._backup is not None:
            self._evictions += 1
            fields = {"table": table, "unused_for": unused_for}
            self._say(self._backup, "replica_evict", step=self.step, **fields)
            self.waits_for_backup = True
        return not self.waits_for_backup

    def _replicate(self, inputs: Iterable[tuple[str, Any]], rows: Mapping[str, int] = {}) -> None:
        """Send inputs of the current step to the backup.

        Args:
          inputs: the arrays, by name.
          rows: number of rows of gradients of tables, by name.
        """
        if self._backup is not None:
            blocks = [(n, np.asarray(x)) for n, x in inputs]
            fields = {"rows": {**rows}} if rows else {}
            if blocks:
                self._say(self._backup, "replica", blocks, step=self.step, is_state=False, **fields)

    @property
    def can_go_on(self) -> bool:
        """True if the update waits for an exchange, and all partial results have arrived."""
        return self.exchange is not None and not self.missing()

    def begin(self, grads: Mapping[str, Any], trainers: Collection[int]) -> bool:
        """Start an update. Return True if the server may answer its trainers now.

        Args:
          grads: gradients by name.
          trainers: ids of the trainers that computed the gradients.
        """
        present = frozenset(trainers)
        if self._backup is not None:
            grads = self._update.merge(grads, present, self.step)
            self._replicate(*gradient_blocks(grads))
            present = MERGED
        return self._exchange(self._update.begin(grads, present, self.step))

    def go_on(self) -> bool:
        """Continue the update with the received partial results.

        Returns:
          True if the server may answer its trainers now.
        """
        return self._exchange(self._go_on())

    def _go_on(self) -> Vectors | None:
        exchange = self.exchange
        assert exchange is not None
        arrived = self.peers.collected(self.step, exchange)
        self._replicate(vector_blocks(exchange.level, arrived))
        return self._update.go_on(arrived)

    def _exchange(self, outgoing: Vectors | None) -> bool:
        """Send vectors, and continue the update until it is complete or has to wait for a peer.

        Args:
          outgoing: vectors to send, by the receiver's endpoint; None if the update is complete.

        Returns:
          True if the update is complete, and the backup has its inputs.
        """
        while outgoing is not None:
            exchange = self.exchange
            assert exchange is not None
            for ep, vectors in outgoing.items():
                blocks = [(v.dtype.name, v) for v in vectors]
                self._say(ep, "partials", blocks, step=self.step, level=exchange.level)
            if not self.can_go_on:
                return False
            outgoing = self._go_on()
        self.peers.end_step(self.step)
        self.step += 1
        self.waits_for_backup = not self.is_replicated
        return not self.waits_for_backup

    def end_wait_for_backup(self) -> bool:
        """End the wait for the backup if the backup has all inputs. Return True if a wait ended."""
        if not self.waits_for_backup or not self.is_replicated:
            return False
        self.waits_for_backup = False
        return True

    def take(self, address: bytes, message: wire.Message) -> bool:
        """Handle a message if its sender is another server. Return False for other senders.

        Raises:
          WireError: the message is not expected.
        """
        sender = self.peers.name(address)
        if message.op == "peer":
            self._welcome(address, message)
        elif sender is None:
            return False
        elif message.op in ("replica", "replica_evict"):
            self._take_replica(address, sender, message)
        elif message.op != "partials":
            raise WireError(
                f"a `{message.op}` message from pserver {sender}; servers send each other only "
                "`peer`, `partials`, `replica` and `replica_evict`"
            )
        else:
            self.peers.take(address, message, self.step)
        return True

    def _take_replica(self, address: bytes, sender: str, message: wire.Message) -> None:
        """Store inputs for an update of a replica, or evict rows of the replica.

        Acknowledge each complete step, and each eviction.
        """
        if not self.peers.known[sender].messages.take(message):
            return
        count = self.replicas.take(sender, message)
        if count is not None:
            self._say(address, "replicated", count=count)

    def _welcome(self, address: bytes, message: wire.Message) -> None:
        """Answer the greeting of another server."""
        k = self._trainers.by_address.get(address)
        if k is not None:
            raise WireError(f"trainer {k} sent a `peer` message, which only servers send")
        if self.peers.meet(address, message):
            heard = self.peers.known[message["endpoint"]].messages.received
            self._say(
                address, "welcome", **welcome(self._trainers.secret, message, self.step, heard)
            )
            count = self.replicas.received(message["endpoint"])
            # acknowledge again, because a broken connection may have lost the last acknowledgement
            if count is not None:
                self._say(address, "replicated", count=count)
            return
        reason = f"the end of another job in which pserver {message['endpoint']} takes part"
        self._say(address, "waiting", reason=reason)
