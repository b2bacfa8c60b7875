"""Peers of a server: the other servers with which it exchanges partial results.

A server connects to each server that takes part in one of its reductions. Its greeting contains a
digest of all data that the two servers exchange. A server sends partial results over its own
connection to the peer (`dtrans.protocol.server.peer_line`), and receives the peer's partial results
at its listener. No function here waits: `JointUpdate` checks `missing`.

Each exchange of a step has its own level. Partial results of later levels and of the next step may
arrive early, and are stored. The server stores all partial results of a step until the step's
update is complete, so that it can detect a repeated message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import LostPeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.numbered_messages import NumberedMessages
from dtrans.protocol.server.admission import check_plan
from dtrans.protocol.server.exchange import Exchange, vector_types
from dtrans.protocol.server.replication import Replication


@dataclasses.dataclass
class ServerPeer:
    """State of another server.

    Attributes:
      endpoint: `host:port` of the server.
      layout: digest of all data that the peer and this server exchange.
      address: address from which the peer sends; None before its greeting.
      welcomed: True if the peer has welcomed this server.
      gone: True if the peer has ended, or did not reconnect in time.
      lost_at: time at which the peer's connection to this server ended; None while it is open.
      has_left: True if the peer has greeted this server, and did not reconnect in time afterwards.
      messages: messages to and from the peer.
      nonce: random word that identifies the peer's process, from its greeting.
      replicated: only for a peer that stores a copy of this server's state. The number of updates
        and evictions for which the peer has the inputs; -1 before the peer has the state.
    """

    endpoint: str
    layout: str
    address: bytes | None = None
    welcomed: bool = False
    gone: bool = False
    lost_at: float | None = None
    has_left: bool = False
    messages: NumberedMessages = dataclasses.field(default_factory=NumberedMessages)
    nonce: str = ""
    replicated: int = -1


class ServerPeers:
    """Peers of one server, and the partial results that the peers have sent.

    Args:
      me: endpoint of this server.
      exchanges: exchanges of this server in each step.
      on_trainer_exit: the job's option `on_trainer_exit`; a peer with another value is refused.
      plan: digest (hash) of each part of the plan, by name; a peer with other digests is refused.
      generation: number of the generation, which greetings contain.
      replication: the servers that store copies of each other's states (replicas); None without
        replicas.

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
        generation: int = 0,
        replication: Replication | None = None,
    ) -> None:
        self.me, self._generation = me, generation
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
            "generation": self._generation,
        }

    @property
    def unsettled(self) -> list[str]:
        """Endpoints of the live peers that have not yet greeted and welcomed this server.

        This server must not end before these peers have greeted it. Otherwise the peers would
        greet the next job's server on the same endpoint. A peer that has left sends no welcome.
        """
        found = []
        for endpoint, peer in self.known.items():
            is_settled = peer.welcomed and peer.address is not None
            if not is_settled and not peer.gone and not peer.has_left:
                found.append(endpoint)
        return found

    def lose(self, address: bytes, now: float) -> None:
        """Handle the end of the connection at an address, if the address is a peer's."""
        endpoint = self._by_address.get(address)
        if endpoint is not None and self.known[endpoint].address == address:
            self.known[endpoint].lost_at = now

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
          True if the peer is registered. False if the sender belongs to the previous or next job on
          the same endpoint, and has to wait.

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
        self.known[ep].lost_at, self.known[ep].has_left = None, False
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
        """Return an inbox for a peer's vectors in one exchange: a vector for each dtype."""
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
        """Return the endpoints of the peers that have not sent all their vectors."""
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
        """Release the vectors of a step after its update."""
        self._arrivals = {key: a for key, a in self._arrivals.items() if key[0] > step}

    def named(self, endpoints: Sequence[str]) -> str:
        """Return a text that names peers, and marks those that have not connected."""
        servers = ("pserver " if len(endpoints) == 1 else "pservers ") + ", ".join(endpoints)
        absent = [ep for ep in endpoints if self.known[ep].address is None]
        return f"{servers} (not connected: {', '.join(absent)})" if absent else servers


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
