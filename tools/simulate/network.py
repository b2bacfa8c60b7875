"""Connections of a virtual network, and each process's `dtrans.protocol.transport` over them.

A connection keeps the order of its messages, as TCP does; messages of different connections
overtake each other. A message takes the connection's delay and its bytes over the bandwidth. It is
read when it arrives: its sender may not write to its memory before.

A connection that breaks loses the messages on their way. It is made again after a while if somebody
listens, and both ends hear of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import msgpack

from dtrans.protocol.transport import Event
from tools.simulate.clock import Clock
from tools.simulate.process import Process


RETRY = 0.1  # seconds after which a connection is tried again where nobody listens


class Network:
    """The connections of one job.

    Args:
      delay: draws the seconds of a message.
      patience: seconds without a sign of the other end after which a connection breaks.
      bandwidth: bytes a second.

    Attributes:
      listeners: that are open, by their endpoints.
      doubled: name of a connection to the number of its client's message that arrives twice.
      garbled: the same, of a message that arrives malformed; it is taken out when it arrives.
      late: name of a connection to the time before which it does not come up.
    """

    def __init__(
        self, clock: Clock, delay: Callable[[], float], patience: float, bandwidth: float = 1e9
    ) -> None:
        self.clock = clock
        self.delay, self.patience = delay, patience
        self.bandwidth = bandwidth
        self.connections: list[SimulatedLink] = []
        self.listeners: dict[str, SimulatedListener] = {}
        self.doubled: dict[str, int] = {}
        self.garbled: dict[str, int] = {}
        self.late: dict[str, float] = {}
        self._addresses = itertools.count()

    def break_all(self, name: str, seconds: float) -> None:
        """Break all connections of a process, which come up again after some seconds."""
        for c in self.connections:
            if name in (c.client.name, c.server_name):
                c.break_off(seconds)

    def address(self) -> bytes:
        """Return a new address of a client at a listener."""
        return b"%d" % next(self._addresses)


class SimulatedTransport:
    """Links and listeners of a process, as `dtrans.protocol.transport.Transport`.

    Args:
      token: of the job that the process belongs to; listeners bar links with another one.
    """

    def __init__(self, network: Network, process: Process, token: str = "") -> None:
        self._network, self._process, self._token = network, process, token
        self._opened: list[SimulatedLink | SimulatedListener] = []

    def now(self) -> float:
        """Return the time of the process: of the event that it handles, and what it has spent."""
        return self._process.now

    def connect(self, endpoint: str, /, *, user: str, role: str, name: str = "") -> SimulatedLink:
        """Open a link, which comes up a little later."""
        address = endpoint.removeprefix("/")
        link = SimulatedLink(self._network, self._process, address, self._token)
        self._opened.append(link)
        return link

    def bind(
        self,
        endpoint: str,
        /,
        users: Mapping[str, str] = {},
        *,
        frame: int = 0,
        messages: int = 0,
        has_local: bool = False,
    ) -> SimulatedListener:
        """Open a listener, to which anybody may connect."""
        listener = SimulatedListener(
            self._network, self._process, endpoint, self._token, has_local=has_local
        )
        self._opened.append(listener)
        return listener

    def reaches(self, local: str, /) -> bool:
        """Return True: all processes are on one host."""
        return True

    def poll(self, until: float) -> Iterator[Event]:
        """Take the first event that has come, if any; the process decides when to look again."""
        event = self._process.next_event()
        if event is not None:
            yield event

    def wake(self) -> None:
        """Let the process take a step."""
        self._process.wake_at(self._network.clock.now)

    def close(self, linger: float = 0.0) -> None:
        """Close all links and listeners; what was sent still arrives."""
        for opened in self._opened:
            opened.close()
        self._opened.clear()


class SimulatedListener:
    """An endpoint of a process."""

    def __init__(
        self,
        network: Network,
        process: Process,
        endpoint: str,
        token: str,
        *,
        has_local: bool = False,
    ) -> None:
        self.endpoint, self.local = endpoint, f"/{endpoint}" * has_local
        self.process, self.token = process, token
        self.connections: dict[bytes, SimulatedLink] = {}
        self._network = network
        network.listeners[endpoint] = self

    def send(self, address: bytes, frames: Sequence[Any], /) -> None:
        """Send a message; it is lost if the connection is gone."""
        if address in self.connections:
            self.connections[address].to_client(frames)

    def close(self, linger: float = 0.0) -> None:
        """Close it, and all connections to it."""
        if self._network.listeners.get(self.endpoint) is self:
            del self._network.listeners[self.endpoint]
        for connection in list(self.connections.values()):
            connection.close_by_server()


class SimulatedLink:
    """A connection of a process to a listener. Made by `SimulatedTransport.connect`.

    Attributes:
      client, server_name: its two ends.
      up: it is established.
      address: the name by which the listener knows it.
      paused_until: for each direction, the time until which nothing passes: to the server, and to
        the client.
    """

    def __init__(self, network: Network, client: Process, endpoint: str, token: str) -> None:
        self.network, self.client, self._endpoint = network, client, endpoint
        self.server_name, self._token = f"pserver {endpoint}", token
        self.up = False
        self.address = network.address()
        self.paused_until = [0.0, 0.0]
        self._listener: SimulatedListener
        self._doubled = network.doubled.get(self.name, -1)
        self._closed = False
        self._epoch = 0  # changes with each establishment and break
        self._last = [0.0, 0.0]  # when the last message of each direction arrives
        self._pending: list[Sequence[Any]] = []
        self._sent = 0
        network.connections.append(self)
        network.clock.at(network.clock.now + network.delay(), self.establish)

    @property
    def name(self) -> str:
        """The names of its ends."""
        return f"{self.client.name} {self.server_name}"

    def establish(self) -> None:
        """Come up if the server is there; else try again."""
        clock, listener = self.network.clock, self.network.listeners.get(self._endpoint)
        late = self.network.late.get(self.name, 0.0)
        if self.up or self._closed or not self.client.there:
            return
        if clock.now < late:
            clock.at(late, self.establish)
            return
        if listener is None:
            clock.at(clock.now + RETRY, self.establish)
            return
        if listener.token != self._token:
            listener.process.deliver(Event("refused", listener))
            self.client.deliver(Event("barred", self, reason="it does not have the job's token"))
            return
        self.up, self._listener = True, listener
        self._epoch += 1
        self._last = [clock.now, clock.now]
        listener.connections[self.address] = self
        self._arrive(0, Event("connected", listener, address=self.address), clock.now)
        self._arrive(1, Event("connected", self), clock.now)
        pending, self._pending = self._pending, []
        for frames in pending:
            self._to_server(frames, clock.now)

    def send(self, frames: Sequence[Any], /) -> None:
        """Send a message of the client."""
        self._to_server(frames, self.client.now)

    def _to_server(self, frames: Sequence[Any], now: float) -> None:
        if not self.up:
            self._pending.append(frames)
            return
        if self._sent == self.network.garbled.get(self.name, -1):
            del self.network.garbled[self.name]
            frames = garble(frames, self._sent)
        for _ in range(1 + (self._sent == self._doubled)):
            self._arrive(0, Event("message", self._listener, frames, self.address), now)
        self._sent += 1

    def to_client(self, frames: Sequence[Any]) -> None:
        """Send a message of the server."""
        if self.up:
            self._arrive(1, Event("message", self, frames), self._listener.process.now)

    def changes(self) -> Iterator[Event]:
        """Take the events of the connection, ahead of messages before them."""
        while (event := self.client.next_event(self, changes_only=True)) is not None:
            yield event

    def hold(self, way: int, seconds: float) -> None:
        """Let nothing pass in one direction for a while; after `patience` the connection breaks."""
        now, patience = self.network.clock.now, self.network.patience
        self.paused_until[way] = now + seconds
        if seconds > patience:
            self.network.clock.at(now + patience, lambda: self.break_off(seconds - patience))

    def break_off(self, seconds: float = 0.0) -> None:
        """Lose the messages on their way, and come up again after some seconds."""
        if not self.up:
            return
        self.up = False
        self._epoch += 1
        clock, listener = self.network.clock, self._listener
        del listener.connections[self.address]
        listener.process.deliver(Event("lost", listener, address=self.address))
        if self.client.there:
            heard = clock.now + self.network.delay()
            clock.at(heard, self._broken)
            # a client hears of the break before it hears of the next connection
            again = clock.now + seconds + 2 * self.network.delay()
            clock.at(max(heard, again), self.establish)

    def _broken(self) -> None:
        if not self._closed:
            self.client.deliver(Event("broken", self))

    def close(self, linger: float = 0.0) -> None:
        """Close it from the client's end: sent messages still arrive, and then the end."""
        self._closed = True
        self.client.forget(self)
        self._end(0)

    def close_by_server(self) -> None:
        """Close it from the server's end: sent messages still arrive, and then the end."""
        self._end(1)

    def _end(self, way: int) -> None:
        if not self.up:
            return
        epoch = self._epoch

        def end() -> None:
            if self._epoch == epoch:
                self.break_off()

        self.network.clock.at(max(self._last[way], self.network.clock.now), end)

    def _arrive(self, way: int, event: Event, now: float) -> None:
        """Deliver an event to the other end: the server (0), or the client (1)."""
        network = self.network
        start = max(now, self.paused_until[way])
        time = self._last[way] = max(
            self._last[way],
            start + network.delay() + sum(map(_size, event.frames)) / network.bandwidth,
        )
        epoch, to = self._epoch, self.client if way else self._listener.process

        def deliver() -> None:
            if self._epoch == epoch and not (way and self._closed):
                to.deliver(event)

        network.clock.at(time, deliver)


def garble(frames: Sequence[Any], number: int) -> list[Any]:
    """Return the frames of a malformed message: the last bytes, or a field, are missing."""
    header = bytes(frames[0])
    if number % 3 == 0:
        return [header[: len(header) // 2], *frames[1:]]
    if number % 3 == 1 and len(frames) > 1:
        return [*frames[:-1], memoryview(frames[-1]).cast("B")[:-1]]
    return [msgpack.packb({**msgpack.unpackb(header), "op": "garbled"}), *frames[1:]]


def _size(frame: Any) -> int:
    return len(frame) if isinstance(frame, bytes) else int(frame.nbytes)


def drawn_delay(random: Random, typical: float) -> Callable[[], float]:
    """Return a function that draws delays: mostly near a typical one, and seldom much longer."""
    return lambda: random.expovariate(1.0) * typical * (20.0 if random.random() < 0.02 else 1.0)
