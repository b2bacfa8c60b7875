"""Peers of a server: the other servers with which it exchanges partial results.

A server connects to each server that takes part in one of its reductions. Its greeting contains a
digest of all data that the two servers exchange. A server sends partial results over its own
connection to the peer (`dtrans.protocol.server.peer_line`), and receives the peer's partial results
at its listener. No function here waits: the server's loop checks `missing`.

Each exchange of a step has its own level. Partial results of later levels and of the next step may
arrive early, and are stored. The server stores all partial results of a step until the step's
update is complete, so that it can detect a repeated message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import LostPeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.numbered_messages import NumberedMessages
from dtrans.protocol.server.admission import check_plan, welcome
from dtrans.protocol.server.exchange import Exchange, vector_types
from dtrans.protocol.server.replication import MERGED, Replication, StoredReplicas, vector_blocks
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry
from dtrans.protocol.server_blocks import StepUpdate, Vectors


@dataclasses.dataclass
class ServerPeer:
    """State of another server.

    Attributes:
      endpoint: `host:port` of the server.
      layout: digest of all data that the peer and this server exchange.
      address: address from which the peer sends; None before its greeting.
      welcomed: True if the peer has welcomed this server.
      gone: True if the peer has ended, or did not reconnect in time.
      messages: messages to and from the peer.
      nonce: random word that identifies the peer's process, from its greeting.
      replicated: number of this server's updates that a backup can compute; -1 before the first.
    """

    endpoint: str
    layout: str
    address: bytes | None = None
    welcomed: bool = False
    gone: bool = False
    messages: NumberedMessages = dataclasses.field(default_factory=NumberedMessages)
    nonce: str = ""
    replicated: int = -1


class ServerPeers:
    """Peers of one server, and the partial results that the peers have sent.

    Args:
      me: endpoint of this server.
      exchanges: exchanges of this server in each step.
      on_trainer_exit: the job's option `on_trainer_exit`; a peer with another value is refused.
      plan: parts of the plan's fingerprint; a peer with other parts is refused.
      epoch: number of the epoch, which greetings contain.
      replication: replicas of this server; None without replicas.

    Attributes:
      known: state of each peer, by endpoint.
    """

    def __init__(
        self,
        me: str,
        exchanges: Sequence[Exchange],
        *,
        on_trainer_exit: str,
        plan: Mapping[str, str] = {},
        epoch: int = 0,
        replication: Replication | None = None,
    ) -> None:
        self.me, self._epoch = me, epoch
        layouts = _layouts(me, exchanges, replication)
        self.known = {ep: ServerPeer(ep, layout) for ep, layout in layouts.items()}
        self._levels = {x.level: x for x in exchanges}
        self._by_address: dict[bytes, str] = {}
        self._arrivals: dict[tuple[int, int, str], Inbox] = {}
        self._pool = BufferPool()
        self._on_trainer_exit = on_trainer_exit
        self._plan = plan

    # -- identities ------------------------------------------------------------------------------

    def greeting(self, peer: ServerPeer) -> dict[str, Any]:
        """Return the header fields of the greeting to a peer."""
        return {
            "endpoint": self.me,
            "order": sys.byteorder,
            "on_trainer_exit": self._on_trainer_exit,
            "layout": peer.layout,
            "plan": {**self._plan},
            "epoch": self._epoch,
        }

    @property
    def unsettled(self) -> list[str]:
        """Endpoints of the live peers that have not yet greeted and welcomed this server.

        This server must not end before these peers have greeted it. Otherwise they would greet the
        next job's server on the same endpoint.
        """
        found = []
        for endpoint, peer in self.known.items():
            is_settled = peer.welcomed and peer.address is not None
            if not is_settled and not peer.gone:
                found.append(endpoint)
        return found

    def check(self, wanted: Collection[str], what: str) -> None:
        """Check that the peers that this server waits for are alive.

        Args:
          wanted: endpoints of the peers.
          what: description of what this server waits for, for the error.

        Raises:
          LostPeerError: a peer has ended.
        """
        for ep in wanted:
            if self.known[ep].gone:
                raise LostPeerError(
                    f"pserver {ep} went away while pserver {self.me} waited for {what}",
                    f"pserver {ep}",
                )

    def name(self, address: bytes) -> str | None:
        """Return the endpoint of the peer at an address; None if no peer has greeted from there."""
        return self._by_address.get(address)

    @property
    def addresses(self) -> list[bytes]:
        """Addresses of all peers that have greeted this server."""
        return list(self._by_address)

    def meet(self, address: bytes, message: wire.Message) -> bool:
        """Handle a peer's greeting: register the peer's address.

        Returns:
          True if the peer is registered. False if it belongs to the previous or next job on the
          same endpoint, so that it has to wait.

        Raises:
          WireError: the sender is not a peer, has another plan, or cannot resume its connection.
        """
        ep = message["endpoint"]
        if ep not in self.known:
            raise WireError(
                f"pserver {wire.brief(ep)} has no reduction in common with pserver {self.me}; "
                "every role must plan the same step with the same options"
            )
        if message["order"] != sys.byteorder:
            raise WireError(
                f"pserver {ep} is {message['order']}-endian, pserver {self.me} is "
                f"{sys.byteorder}-endian; run all roles on machines with the same byte order"
            )
        if message["layout"] != self.known[ep].layout:
            raise WireError(
                f"pserver {ep} and pserver {self.me} have different plans for the reductions "
                "between them; every role must plan the same step with the same options"
            )
        if self._by_address.get(address, ep) != ep:
            raise WireError(
                f"the process that has greeted as pserver {self._by_address[address]} now greets "
                f"as pserver {ep}"
            )
        on_trainer_exit = message.fields.get("on_trainer_exit", self._on_trainer_exit)
        if on_trainer_exit != self._on_trainer_exit:
            raise WireError(
                f"pserver {ep} is planned with on_trainer_exit={wire.brief(on_trainer_exit)}, "
                f"pserver {self.me} with {self._on_trainer_exit!r}; every role must plan the same "
                "step with the same options"
            )
        check_plan(f"pserver {self.me}", self._plan, f"pserver {ep}", message)
        is_new = self.known[ep].address is None and not message.fields.get("back", False)
        # After a reconnection, ZeroMQ may deliver a greeting under a temporary address. So one
        # process may greet from two addresses, and only its nonce identifies it.
        nonce = message.fields.get("nonce", "")
        is_same = bool(nonce) and nonce == self.known[ep].nonce
        if address not in self._by_address and not is_new and not is_same:
            # The sender is not this job's peer: it is a process of the next job, or a process of
            # the previous job that has reconnected.
            return False
        self._by_address[address] = ep
        self.known[ep].address, self.known[ep].nonce = address, nonce
        return True

    # -- partial results -------------------------------------------------------------------------

    def take(self, address: bytes, message: wire.Message, step: int) -> None:
        """Store partial results from a peer.

        Args:
          address: address of the peer.
          message: a `partials` message.
          step: current step of this server.

        Raises:
          WireError: this server does not expect the partial results. Nothing has been stored.
        """
        source = self._by_address[address]
        if not self.known[source].messages.take(message):
            return
        level = message["level"]
        exchange = self._levels.get(level)
        if exchange is None or source not in exchange.sources:
            raise WireError(
                f"pserver {source} sent `partials` of level {level}, but pserver {self.me} expects "
                f"none of this level from pserver {source}"
            )
        if message["step"] not in (step, step + 1):
            raise WireError(
                f"pserver {source} sent `partials` of step {message['step']}, but pserver "
                f"{self.me} is at step {step}"
            )
        key = (message["step"], level, source)
        arrival = self._arrivals.get(key) or self._room(exchange, source)
        arrival.take(message)
        self._arrivals[key] = arrival

    def _room(self, exchange: Exchange, source: str) -> Inbox:
        """Return an inbox for the vectors that a peer sends in one exchange: one for each dtype."""
        vectors: dict[str, np.ndarray] = {}
        for dtype, size in vector_types(exchange.sources[source]):
            key = f"{source} {exchange.level} {dtype}"
            vectors[dtype] = self._pool.take(key, (size,), dtype)
        return Inbox(
            vectors,
            lambda name: (
                f"`partials` of dtype {wire.brief(name)} from pserver {source}, expected "
                f"{', '.join(vectors)}"
            ),
        )

    def missing(self, step: int, exchange: Exchange) -> list[str]:
        """Return the endpoints of the peers whose vectors have not arrived completely."""
        found = []
        for endpoint in exchange.sources:
            inbox = self._arrivals.get((step, exchange.level, endpoint))
            if inbox is None or inbox.missing():
                found.append(endpoint)
        return found

    def collected(self, step: int, exchange: Exchange) -> dict[str, list[np.ndarray]]:
        """Return a map from each peer's endpoint to its vectors, which must be complete."""
        found = {}
        for endpoint in exchange.sources:
            found[endpoint] = list(self._arrivals[step, exchange.level, endpoint].memory.values())
        return found

    def end_step(self, step: int) -> None:
        """Release the vectors of a step whose update is complete."""
        self._arrivals = {key: a for key, a in self._arrivals.items() if key[0] > step}

    def named(self, endpoints: Sequence[str]) -> str:
        """Return a text with the names of peers, and of those peers that have not connected."""
        servers = ("pserver " if len(endpoints) == 1 else "pservers ") + ", ".join(endpoints)
        absent = [ep for ep in endpoints if self.known[ep].address is None]
        return f"{servers} (not connected: {', '.join(absent)})" if absent else servers


class JointUpdate:
    """Update of a synchronous server, which may need other servers' partial results.

    Args:
      update: computes the new state from the gradients.
      peers: the other servers.
      trainers: the server's trainers.
      say: function that sends a message.
      step: number of updates before the first one.
      backup: endpoint of the server with the copy of this server's state; None without replicas.
      replicas: copies of other servers' states.

    Attributes:
      peers: the other servers.
      step: number of complete updates.
    """

    def __init__(
        self,
        update: StepUpdate,
        peers: ServerPeers,
        trainers: TrainerRegistry,
        say: Say,
        step: int = 0,
        backup: str | None = None,
        replicas: StoredReplicas | None = None,
    ) -> None:
        self.peers = peers
        self.step = step
        self.replicas = StoredReplicas() if replicas is None else replicas
        self._backup, self._first = backup, step
        self._update, self._trainers, self._say = update, trainers, say

    @property
    def exchange(self) -> Exchange | None:
        """Exchange whose partial results the update waits for; None if it does not wait."""
        return self._update.exchange

    def missing(self) -> list[str]:
        """Return the endpoints of the servers for which the update waits.

        These are the servers whose partial results have not arrived. If all have arrived, it is the
        backup, which has not acknowledged the merged gradients.
        """
        exchange = self.exchange
        if exchange is not None:
            return self.peers.missing(self.step, exchange)
        return [] if self._backup is None or self.is_replicated else [self._backup]

    @property
    def is_replicated(self) -> bool:
        """True if the backup can compute all complete updates, or if there are no replicas."""
        if self._backup is None or self.step == self._first:
            return True
        return self.peers.known[self._backup].replicated >= self.step

    def replicate_state(self) -> None:
        """Send the state at the beginning of an epoch to the backup."""
        if self._backup is not None:
            blocks = self._update.state_blocks()
            self._say(self._backup, "replica", blocks, step=self.step, is_state=True)

    def _replicate(self, inputs: Iterable[tuple[str, Any]]) -> None:
        """Send inputs of the current step to the backup."""
        if self._backup is not None:
            blocks = [(n, np.asarray(x)) for n, x in inputs]
            if blocks:
                self._say(self._backup, "replica", blocks, step=self.step, is_state=False)

    @property
    def can_go_on(self) -> bool:
        """True if the update waits for an exchange, and all partial results have arrived."""
        return self.exchange is not None and not self.missing()

    def begin(self, grads: Mapping[str, Any], trainers: Collection[int]) -> bool:
        """Start an update. Return True if the update is already complete.

        Args:
          grads: gradients by name.
          trainers: ids of the trainers whose gradients the update uses.
        """
        present = frozenset(trainers)
        if self._backup is not None:
            grads = self._update.merge(grads, present, self.step)
            self._replicate(grads.items())
            present = MERGED
        return self._exchange(self._update.begin(grads, present, self.step))

    def go_on(self) -> bool:
        """Continue the update with the received partial results; return True if it is complete."""
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
          True if the update is complete.
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
        elif message.op == "replica":
            self._take_replica(address, sender, message)
        elif message.op != "partials":
            raise WireError(
                f"a `{message.op}` message from pserver {sender}; servers send each other only "
                "`peer`, `partials` and `replica`"
            )
        else:
            self.peers.take(address, message, self.step)
        return True

    def _take_replica(self, address: bytes, sender: str, message: wire.Message) -> None:
        """Store inputs of a primary, and acknowledge those of a complete step."""
        if not self.peers.known[sender].messages.take(message):
            return
        step = self.replicas.take(sender, message)
        if step is not None:
            self._say(address, "replicated", step=step)

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
            step = self.replicas.due(message["endpoint"])
            if step is not None:  # a broken connection may have lost the last acknowledgement
                self._say(address, "replicated", step=step)
            return
        reason = f"the end of another job in which pserver {message['endpoint']} takes part"
        self._say(address, "waiting", reason=reason)


def _layouts(
    me: str, exchanges: Sequence[Exchange], replication: Replication | None
) -> dict[str, str]:
    """Return a map from each peer's endpoint to a digest of all data exchanged with the peer."""
    found: dict[str, str] = {}
    for x in exchanges:
        for ep in x.peers:
            found[ep] = found.get(ep, "") + x.fingerprint(ep)
    for ep in () if replication is None else replication.partners:
        assert replication is not None
        replicas = set[str]()
        if ep == replication.backup:
            replicas.add(f"replica of {me} on {ep}")
        if ep in replication.primaries:
            replicas.add(f"replica of {ep} on {me}")
        found[ep] = found.get(ep, "") + ", ".join(sorted(replicas))
    return {ep: hashlib.sha256(text.encode()).hexdigest() for ep, text in found.items() if text}
