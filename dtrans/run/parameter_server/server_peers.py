"""The other servers that a server exchanges partial results with.

Each has a line to every other one that it shares a reduction with, and says first who it is and, as a fingerprint,
what it takes the two of them to exchange. Partial results go out by these lines and come in by the server's own
socket; what a peer answers, that it refuses or has ended, and that it is gone, comes by the line too. Nothing here
waits: the server's loop goes on, and asks what is missing.

Vectors that come before they are wanted are kept: of later levels, and of the step after this one, since no server
can be further ahead. Those of a step stay until it is made, so that one that comes twice is known.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from dtrans.errors import PeerError, WireError
from dtrans.run.net import wire
from dtrans.run.net.buffers import BufferPool
from dtrans.run.net.sockets import LINGER, new_socket, tcp_address
from dtrans.run.parameter_server.exchange import Exchange, vector_types


class PeerLine:
    """What one server says to another."""

    def __init__(self, context: zmq.Context[Any], me: str, peer: str, greeting: Mapping[str, Any]) -> None:
        self.me = me
        self.peer = peer
        self.gone = False  # it had welcomed us, and is not there any more
        self.welcomed = False
        self._greeting = wire.header("peer", **greeting)
        self._outbox: list[list[Any]] = []  # what was to be said before the welcome
        self.socket = new_socket(context, zmq.DEALER)
        self.monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.socket.connect(tcp_address(peer))

    def send(self, step: int, level: int, vectors: Sequence[Any]) -> None:
        """The vectors of one exchange; waits until they are computed."""
        if self.gone:
            raise PeerError(f"pserver {self.peer} went away before pserver {self.me} came to step {step + 1}")
        arrays = [np.asarray(v) for v in vectors]
        for pieces, frames in wire.messages((a.dtype.name, a) for a in arrays):
            head = wire.header("partials", step=step, level=level, pieces=pieces)
            self._outbox.append([head, *frames])
        self._empty()

    def _empty(self) -> None:
        """Let go what is to be said, once there is who hears it: what another server took would be lost."""
        while self.welcomed and self._outbox:
            self.socket.send_multipart(self._outbox.pop(0), copy=False)

    def listen(self) -> None:
        """Take what is here. Raises PeerError for a refusal."""
        events = []
        # the connection first: the last words of a peer come before its end
        while self.monitor.poll(0):
            events.append(recv_monitor_message(self.monitor)["event"])
        while self.socket.poll(0):
            try:
                message = wire.parse(self.socket.recv_multipart(copy=False))
            except WireError as e:
                raise PeerError(f"pserver {self.peer} answered pserver {self.me} with {e}") from e
            if message.op == "refuse":
                raise PeerError(f"pserver {self.peer} refused pserver {self.me}: {message['reason']}")
            self.welcomed = self.welcomed or message.op == "welcome"
        if self.welcomed:
            # a connection that breaks has lost what was on its way, also when ZeroMQ makes it anew
            self.gone = self.gone or zmq.EVENT_DISCONNECTED in events
        elif zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
            self.socket.send(self._greeting)  # once more, where the server that was there has ended
        self._empty()

    def close(self, linger: float) -> None:
        """End it; `linger` is how many seconds may go into handing over what was said."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(linger * 1000))


@dataclasses.dataclass
class _Arrival:
    """The vectors of one exchange from one peer, by dtype, and how many bytes of each are here."""

    vectors: dict[str, np.ndarray]
    arrived: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return all(self.arrived.get(n) == v.nbytes for n, v in self.vectors.items())


class ServerPeers:
    """The lines of one server, and what came from the other ends.

    Args:
      me: the server's endpoint.
      exchanges: that it takes part in, each step.
      on_trainer_exit: what becomes of updates when a trainer leaves; the same on all of them.
    """

    def __init__(
        self, context: zmq.Context[Any], me: str, exchanges: Sequence[Exchange], *, on_trainer_exit: str
    ) -> None:
        self.me = me
        self._levels = {x.level: x for x in exchanges}
        self._layouts = _layouts(exchanges)
        self._by_address: dict[bytes, str] = {}
        self._arrivals: dict[tuple[int, int, str], _Arrival] = {}
        self._pool = BufferPool()
        self._on_trainer_exit = on_trainer_exit
        greeting = {"endpoint": me, "order": sys.byteorder, "on_trainer_exit": on_trainer_exit}
        self._lines = {ep: PeerLine(context, me, ep, greeting | {"layout": told}) for ep, told in self._layouts.items()}

    # -- lines -----------------------------------------------------------------------------------

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """What to poll before `listen`."""
        return [s for line in self._lines.values() for s in (line.socket, line.monitor)]

    @property
    def unsettled(self) -> list[str]:
        """The servers that have not said who they are, or have not welcomed this one, and may yet."""
        met = set(self._by_address.values())
        return [ep for ep, line in self._lines.items() if not line.gone and not (line.welcomed and ep in met)]

    @property
    def settled(self) -> bool:
        """Whether this server may end: nobody will greet it who should greet the next one on this endpoint."""
        return not self.unsettled

    def listen(self) -> None:
        """Hear what peers answer. Raises PeerError where one refuses, or says that it has ended."""
        for line in self._lines.values():
            line.listen()

    def send(self, step: int, exchange: Exchange, parcels: Mapping[str, Sequence[Any]]) -> None:
        """The vectors of one exchange, to each server that needs them. Raises PeerError for one that is gone."""
        for ep, vectors in parcels.items():
            self._lines[ep].send(step, exchange.level, vectors)

    def check(self, wanted: Collection[str], what: str) -> None:
        """Raise PeerError if one of those that are waited for is gone."""
        for ep in wanted:
            if self._lines[ep].gone:
                raise PeerError(f"pserver {ep} went away while pserver {self.me} waited for {what}")

    def close(self, *, failed: bool) -> None:
        """End all lines. Where the job has ended well, nobody waits for anything that was said here."""
        for line in self._lines.values():
            line.close(0 if failed or line.gone else LINGER)

    # -- what comes ------------------------------------------------------------------------------

    def name(self, address: bytes) -> str | None:
        """The endpoint of who speaks from there, if it has said so."""
        return self._by_address.get(address)

    @property
    def addresses(self) -> list[bytes]:
        """Of all that have said who they are."""
        return list(self._by_address)

    def meet(self, address: bytes, message: wire.Message) -> bool:
        """Who a server says it is, and whether it is new: it may be here already, and this be its next job.

        Raises WireError where it cannot be, or plans something else.
        """
        ep = message["endpoint"]
        if ep not in self._layouts:
            raise WireError(
                f"pserver {wire.brief(ep)} shares no reduction with pserver {self.me}; every role must plan the same "
                "step with the same options"
            )
        if message["order"] != sys.byteorder:
            raise WireError(f"pserver {ep} is {message['order']}-endian, pserver {self.me} is {sys.byteorder}-endian")
        if message["layout"] != self._layouts[ep]:
            raise WireError(
                f"pserver {ep} would exchange other reductions with pserver {self.me} than are planned here; every "
                "role must plan the same step with the same options"
            )
        if self._by_address.get(address, ep) != ep:
            raise WireError(f"pserver {ep} has already said that it is {self._by_address[address]}")
        on_trainer_exit = message.fields.get("on_trainer_exit", self._on_trainer_exit)
        if on_trainer_exit != self._on_trainer_exit:
            raise WireError(
                f"pserver {ep} is planned with on_trainer_exit={wire.brief(on_trainer_exit)}, pserver {self.me} "
                f"with {self._on_trainer_exit!r}; every role must plan the same step with the same options"
            )
        if address not in self._by_address and ep in self._by_address.values():
            return False
        self._by_address[address] = ep
        return True

    def take(self, address: bytes, message: wire.Message, step: int) -> None:
        """Partial results, to be kept. Raises WireError, and keeps nothing, where they are not due.

        Args:
          step: that this server is at.
        """
        source = self._by_address[address]
        level = message["level"]
        exchange = self._levels.get(level)
        if exchange is None or source not in exchange.sources:
            raise WireError(f"`partials` of level {level}, at which pserver {self.me} needs nothing of {source}")
        if message["step"] not in (step, step + 1):
            raise WireError(f"`partials` of step {message['step']}, pserver {self.me} is at {step}")
        key = (message["step"], level, source)
        arrival = self._arrivals.get(key) or self._room(exchange, source)

        def target(name: str) -> np.ndarray:
            if name not in arrival.vectors:
                raise WireError(f"`partials` of {wire.brief(name)}, which is not due from pserver {source}")
            return arrival.vectors[name].view(np.uint8)

        wire.unpack(message, target, arrival.arrived)
        self._arrivals[key] = arrival

    def _room(self, exchange: Exchange, source: str) -> _Arrival:
        take = lambda dtype, size: self._pool.take(f"{source} {exchange.level} {dtype}", (size,), dtype)
        return _Arrival({dtype: take(dtype, size) for dtype, size in vector_types(exchange.sources[source])})

    def missing(self, step: int, exchange: Exchange) -> list[str]:
        """The servers whose vectors are not all here."""
        here = lambda ep: (a := self._arrivals.get((step, exchange.level, ep))) is not None and a.complete
        return [ep for ep in exchange.sources if not here(ep)]

    def collected(self, step: int, exchange: Exchange) -> dict[str, list[np.ndarray]]:
        """The vectors of every other server, all of which are here."""
        return {ep: list(self._arrivals[step, exchange.level, ep].vectors.values()) for ep in exchange.sources}

    def made(self, step: int) -> None:
        """A step is made: what came for it may go."""
        self._arrivals = {key: a for key, a in self._arrivals.items() if key[0] > step}

    def named(self, endpoints: Sequence[str]) -> str:
        """Servers, for a message about waiting for them."""
        absent = [ep for ep in endpoints if ep not in self._by_address.values()]
        told = ("pserver " if len(endpoints) == 1 else "pservers ") + ", ".join(endpoints)
        return told + (f" ({', '.join(absent)} has not come yet)" if absent else "")


def _layouts(exchanges: Sequence[Exchange]) -> dict[str, str]:
    """Each server that anything is exchanged with, and the fingerprint of all that is."""
    found: dict[str, str] = {}
    for x in exchanges:
        for ep in x.peers:
            found[ep] = found.get(ep, "") + x.fingerprint(ep)
    return {ep: hashlib.sha256(told.encode()).hexdigest() for ep, told in found.items() if told}
