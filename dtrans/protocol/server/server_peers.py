"""The other servers, with which a server exchanges partial results.

Each server has a connection to every other one that it shares a reduction with. Its greeting has a
fingerprint of all that the two exchange. Partial results leave by these connections
(`dtrans.protocol.server.peer_line`), and arrive at the server's own door. Nothing here waits: the
server's loop asks what is missing.

Vectors that come early are stored: those of later levels, and of the next step, since no server can
be further ahead. The vectors of a step stay until its update is complete, so that one that comes
twice is noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans.errors import PeerError, WireError
from dtrans.protocol import wire
from dtrans.protocol.buffers import BufferPool
from dtrans.protocol.inbox import Inbox
from dtrans.protocol.server.exchange import Exchange, vector_types
from dtrans.protocol.server.trainer_registry import Say, TrainerRegistry, check_plan
from dtrans.protocol.server_blocks import StepUpdate, Vectors


@dataclasses.dataclass
class ServerPeer:
    """State of another server.

    Attributes:
      layout: fingerprint of all that the two servers exchange.
      address: from which it sends; None before its greeting.
      welcomed: it has welcomed this server.
      gone: it has ended, or its connection is lost for good.
    """

    endpoint: str
    layout: str
    address: bytes | None = None
    welcomed: bool = False
    gone: bool = False
    heard: int = 0  # messages from it


class ServerPeers:
    """Peers of one server, and the vectors that they have sent.

    Args:
      me: endpoint of the server.
      exchanges: of the server in each step.
      on_trainer_exit: rule for trainers that leave; the same on all servers.
      plan: the parts of the plan's fingerprint; the same on all servers.
    """

    def __init__(
        self,
        me: str,
        exchanges: Sequence[Exchange],
        *,
        on_trainer_exit: str,
        plan: Mapping[str, str] = {},
    ) -> None:
        self.me = me
        self.known = {ep: ServerPeer(ep, layout) for ep, layout in _layouts(exchanges).items()}
        self._levels = {x.level: x for x in exchanges}
        self._by_address: dict[bytes, str] = {}
        self._arrivals: dict[tuple[int, int, str], Inbox] = {}
        self._pool = BufferPool()
        self._on_trainer_exit = on_trainer_exit
        self._plan = plan

    # -- who they are ----------------------------------------------------------------------------

    def greeting(self, peer: ServerPeer) -> dict[str, Any]:
        """Return the fields of the greeting to another server."""
        return {
            "endpoint": self.me,
            "order": sys.byteorder,
            "on_trainer_exit": self._on_trainer_exit,
            "layout": peer.layout,
            "plan": {**self._plan},
        }

    @property
    def unsettled(self) -> list[str]:
        """The servers that have not greeted or welcomed this one, and may yet.

        While there are any, this server may not end: one would greet it instead of the next server
        on this endpoint.
        """
        return [
            ep
            for ep, p in self.known.items()
            if not p.gone and not (p.welcomed and p.address is not None)
        ]

    def check(self, wanted: Collection[str], what: str) -> None:
        """Raise PeerError if one of the awaited servers is gone."""
        for ep in wanted:
            if self.known[ep].gone:
                raise PeerError(f"pserver {ep} went away while pserver {self.me} waited for {what}")

    def name(self, address: bytes) -> str | None:
        """Return the endpoint of the server that sends from an address, if it has greeted."""
        return self._by_address.get(address)

    @property
    def addresses(self) -> list[bytes]:
        """Addresses of all servers that have greeted this one."""
        return list(self._by_address)

    def meet(self, address: bytes, message: wire.Message) -> bool:
        """Take the greeting of a server.

        Returns:
          False if the server belongs to another job on this endpoint.

        Raises:
          WireError: it cannot be that server, or has another plan.
        """
        ep = message["endpoint"]
        if ep not in self.known:
            raise WireError(
                f"pserver {wire.brief(ep)} shares no reduction with pserver {self.me}; every role "
                "must plan the same "
                "step with the same options"
            )
        if message["order"] != sys.byteorder:
            raise WireError(
                f"pserver {ep} is {message['order']}-endian, pserver {self.me} is "
                f"{sys.byteorder}-endian"
            )
        if message["layout"] != self.known[ep].layout:
            raise WireError(
                f"pserver {ep} would exchange different reductions with pserver {self.me} than "
                "are planned here; every role must plan the same step with the same options"
            )
        if self._by_address.get(address, ep) != ep:
            raise WireError(f"pserver {ep} has already said that it is {self._by_address[address]}")
        on_trainer_exit = message.fields.get("on_trainer_exit", self._on_trainer_exit)
        if on_trainer_exit != self._on_trainer_exit:
            raise WireError(
                f"pserver {ep} is planned with on_trainer_exit={wire.brief(on_trainer_exit)}, "
                f"pserver {self.me} "
                f"with {self._on_trainer_exit!r}; every role must plan the same step with the same "
                "options"
            )
        check_plan(f"pserver {self.me}", self._plan, f"pserver {ep}", message)
        is_new = self.known[ep].address is None and not message.fields.get("back", False)
        if address not in self._by_address and not is_new:
            # it belongs to the next job, or, if it comes back here, to the one before
            return False
        missed = message.fields.get("sent", 0) - self.known[ep].heard
        if missed:
            raise WireError(
                f"the connection of pserver {ep} to pserver {self.me} broke, and was made again, "
                f"but {missed} messages "
                "are lost"
            )
        self._by_address[address] = ep
        self.known[ep].address = address
        return True

    # -- what comes ------------------------------------------------------------------------------

    def take(self, address: bytes, message: wire.Message, step: int) -> None:
        """Store partial results. Raises WireError, and stores nothing, if they are not due.

        Args:
          step: of this server.
        """
        source = self._by_address[address]
        self.known[source].heard += 1
        level = message["level"]
        exchange = self._levels.get(level)
        if exchange is None or source not in exchange.sources:
            raise WireError(
                f"`partials` of level {level}, at which pserver {self.me} needs nothing of {source}"
            )
        if message["step"] not in (step, step + 1):
            raise WireError(f"`partials` of step {message['step']}, pserver {self.me} is at {step}")
        key = (message["step"], level, source)
        arrival = self._arrivals.get(key) or self._room(exchange, source)
        arrival.take(message)
        self._arrivals[key] = arrival

    def _room(self, exchange: Exchange, source: str) -> Inbox:
        """Return memory for the vectors of one exchange from one peer, by dtype."""
        take = lambda dtype, size: self._pool.take(
            f"{source} {exchange.level} {dtype}", (size,), dtype
        )
        return Inbox(
            {dtype: take(dtype, size) for dtype, size in vector_types(exchange.sources[source])},
            lambda name: (
                f"`partials` of {wire.brief(name)}, which is not due from pserver {source}"
            ),
        )

    def missing(self, step: int, exchange: Exchange) -> list[str]:
        """Return the servers whose vectors are not all here."""
        arrivals = {ep: self._arrivals.get((step, exchange.level, ep)) for ep in exchange.sources}
        return [ep for ep, inbox in arrivals.items() if inbox is None or inbox.missing()]

    def collected(self, step: int, exchange: Exchange) -> dict[str, list[np.ndarray]]:
        """Return the vectors of every other server, when all of them are here."""
        return {
            ep: list(self._arrivals[step, exchange.level, ep].memory.values())
            for ep in exchange.sources
        }

    def end_step(self, step: int) -> None:
        """Release the vectors of a step, whose update is complete."""
        self._arrivals = {key: a for key, a in self._arrivals.items() if key[0] > step}

    def named(self, endpoints: Sequence[str]) -> str:
        """Return the names of servers for a message about waiting for them."""
        absent = [ep for ep in endpoints if self.known[ep].address is None]
        servers = ("pserver " if len(endpoints) == 1 else "pservers ") + ", ".join(endpoints)
        return servers + (f" ({', '.join(absent)} has not come yet)" if absent else "")


class JointUpdate:
    """The update of a synchronous server, which may need partial results of other servers.

    Args:
      update: computes new state from gradients.
      peers: the other servers.
      trainers: the server's trainers.
      say: sends a message.

    Attributes:
      step: the number of updates that are complete.
    """

    def __init__(
        self, update: StepUpdate, peers: ServerPeers, trainers: TrainerRegistry, say: Say
    ) -> None:
        self.peers = peers
        self.step = 0
        self._update, self._trainers, self._say = update, trainers, say

    @property
    def exchange(self) -> Exchange | None:
        """Return the exchange that the update waits for, if any."""
        return self._update.exchange

    def missing(self) -> list[str]:
        """Return the servers whose partial results the update waits for."""
        exchange = self.exchange
        return [] if exchange is None else self.peers.missing(self.step, exchange)

    @property
    def can_go_on(self) -> bool:
        """Return True if the partial results that the update waits for are here."""
        return self.exchange is not None and not self.missing()

    def begin(self, grads: Mapping[str, Any], trainers: Collection[int]) -> bool:
        """Begin the update with the gradients of some trainers; return True if it is complete."""
        return self._exchange(self._update.begin(grads, frozenset(trainers), self.step))

    def go_on(self) -> bool:
        """Continue the update with partial results; return True if it is complete."""
        exchange = self.exchange
        assert exchange is not None
        return self._exchange(self._update.go_on(self.peers.collected(self.step, exchange)))

    def _exchange(self, outgoing: Vectors | None) -> bool:
        """Send partial results, and continue as far as those of other servers are here."""
        while outgoing is not None:
            exchange = self.exchange
            assert exchange is not None
            for ep, vectors in outgoing.items():
                blocks = [(v.dtype.name, v) for v in vectors]
                self._say(ep, "partials", blocks, step=self.step, level=exchange.level)
            if not self.can_go_on:
                return False
            outgoing = self._update.go_on(self.peers.collected(self.step, exchange))
        self.peers.end_step(self.step)
        self.step += 1
        return True

    def take(self, address: bytes, message: wire.Message) -> bool:
        """Take a message of another server; return False for anyone else's."""
        if message.op == "peer":
            self._welcome(address, message)
        elif self.peers.name(address) is None:
            return False
        elif message.op != "partials":
            raise WireError(f"a `{message.op}` message, which servers do not take from each other")
        else:
            self.peers.take(address, message, self.step)
        return True

    def _welcome(self, address: bytes, message: wire.Message) -> None:
        """Answer the greeting of another server."""
        k = self._trainers.by_address.get(address)
        if k is not None:
            raise WireError(f"trainer {k} cannot be a pserver too")
        if self.peers.meet(address, message):
            self._say(address, "welcome", **self._trainers.welcome(message, self.step))
            return
        before = f"the end of a job that pserver {message['endpoint']} is in already"
        self._say(address, "waiting", reason=before)


def _layouts(exchanges: Sequence[Exchange]) -> dict[str, str]:
    """Return each peer, with the fingerprint of all that is exchanged with it."""
    found: dict[str, str] = {}
    for x in exchanges:
        for ep in x.peers:
            found[ep] = found.get(ep, "") + x.fingerprint(ep)
    return {ep: hashlib.sha256(text.encode()).hexdigest() for ep, text in found.items() if text}
