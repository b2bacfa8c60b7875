"""Virtual network, and its implementation of `dtrans.protocol.transport`.

A connection keeps its messages in order, as TCP does, but messages of different connections may
overtake each other. The duration of a message is the connection's delay plus its size divided by
the bandwidth. The frames of a message are not copied, so its sender must not change them before the
message arrives.

When a connection breaks, its messages in transit are lost, and both processes receive an event. The
connection is restored after some time if the listener is open.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import msgpack

from dtrans.protocol.transport import Event
from tools.simulate.clock import Clock, Slot
from tools.simulate.process import Process


# Longest delay of a message or connection in seconds. A connection, a greeting and its answer then
# take less than the shortest deadline of a case. Only an event of the case (`Event`) is slower.
SLOWEST = 1.0
RETRY = 0.1  # seconds between two attempts to connect to an endpoint without a listener


class Network:
    """Virtual network of one job.

    Args:
      clock: virtual clock.
      delay: returns a random delay of a message in seconds.
      patience: seconds after which a stopped connection breaks.
      bandwidth: bytes per second.

    Attributes:
      connections: all connections.
      listeners: each open listener, by endpoint.
      doubled: number of the client's message that arrives twice, by name of the connection.
      garbled: number of the client's message that arrives malformed, by name of the connection.
        The entry is removed when the message is sent.
      late: time before which a connection cannot be established, by name of the connection.
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
        self._addresses: collections.Counter[str] = collections.Counter()

    def break_all(self, name: str, seconds: float) -> None:
        """Break all connections of a process for some seconds."""
        for c in self.connections:
            if name in (c.client.name, c.server_name):
                c.break_off(seconds)

    def address(self, client: Process) -> bytes:
        """Return a new address for a client. It does not depend on other processes."""
        name = f"{client.name} ({client.number})"
        self._addresses[name] += 1
        return f"{name} #{self._addresses[name]}".encode()


class SimulatedTransport:
    """Implementation of `dtrans.protocol.transport.Transport` over the virtual network.

    Args:
      network: the virtual network.
      process: the process that uses this transport.
      token: token of the process's job; a listener refuses links with another token.
    """

    def __init__(self, network: Network, process: Process, token: str = "") -> None:
        self._network, self._process, self._token = network, process, token
        self._opened: list[SimulatedLink | SimulatedListener] = []

    def now(self) -> float:
        """Return the time of the process. See `Process.now`."""
        return self._process.now

    def connect(self, endpoint: str, /, *, user: str, role: str, name: str = "") -> SimulatedLink:
        """Open a link, which is established after a delay."""
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
        """Open a listener, which admits all users and roles."""
        listener = SimulatedListener(
            self._network, self._process, endpoint, self._token, has_local=has_local
        )
        self._opened.append(listener)
        return listener

    def reaches(self, local: str, /) -> bool:
        """Return True, because all simulated processes are on one host."""
        return True

    def poll(self, until: float) -> Iterator[Event]:
        """Yield the first queued event, if there is one, without waiting."""
        event = self._process.next_event()
        if event is not None:
            yield event

    def wake(self) -> None:
        """Schedule a step of the process now."""
        self._process.wake_at(self._network.clock.now)

    def close(self, linger: float = 0.0) -> None:
        """Close all links and listeners. Messages that were sent still arrive."""
        for opened in self._opened:
            opened.close()
        self._opened.clear()


class SimulatedListener:
    """Listener of a simulated process."""

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
        self.knows: Callable[[bytes], bool] = lambda address: False
        self.connections: dict[bytes, SimulatedLink] = {}
        self._network = network
        network.listeners[endpoint] = self

    @property
    def silent(self) -> int:
        """Number of open connections on which no message has been received."""
        return sum(x.is_silent for x in self.connections.values())

    def send(self, address: bytes, frames: Sequence[Any], /) -> None:
        """Send a message, or drop it if the connection has ended."""
        if address in self.connections:
            self.connections[address].to_client(frames)

    def close(self, linger: float = 0.0) -> None:
        """Close the listener, and all connections to it."""
        if self._network.listeners.get(self.endpoint) is self:
            del self._network.listeners[self.endpoint]
        for connection in list(self.connections.values()):
            connection.close_by_server()


class SimulatedLink:
    """Connection of a process to a listener. `SimulatedTransport.connect` creates it.

    Attributes:
      client: process that connects.
      server_name: name of the process that listens.
      up: True while the connection is established.
      is_silent: True if nothing has arrived at the server since the connection was established.
      address: address of the client at the listener.
      paused_until: time until which no message arrives at the server, and the same for the client.
    """

    def __init__(self, network: Network, client: Process, endpoint: str, token: str) -> None:
        self.network, self.client, self._endpoint = network, client, endpoint
        self.server_name, self._token = f"pserver {endpoint}", token
        self.up = self.is_silent = False
        self.address = network.address(client)
        self.paused_until = [0.0, 0.0]
        self._listener: SimulatedListener
        self._doubled = network.doubled.get(self.name, -1)
        self._closed = False
        self._generation = 0  # incremented when the connection is established and when it breaks
        self._last = [0.0, 0.0]  # arrival of the last message to the server, and to the client
        self._pending: list[Sequence[Any]] = []
        self._sent = 0
        network.connections.append(self)
        self._connect_at(network.clock.now + network.delay())

    @property
    def name(self) -> str:
        """Names of the client and of the server."""
        return f"{self.client.name} {self.server_name}"

    @property
    def is_closed(self) -> bool:
        """True if the client has closed the connection."""
        return self._closed

    @property
    def server(self) -> Process:
        """The process that listens. The connection must have been established before."""
        return self._listener.process

    @property
    def is_known(self) -> bool:
        """True if the server has admitted the client at this address."""
        return self._listener.knows(self.address)

    def _connect_at(self, time: float) -> None:
        self.network.clock.at(time, self.establish, self._slot(1, "connect"))

    def _slot(self, way: int, event: Any) -> Slot:
        """Return the slot of an event at the server (`way` 0) or at the client (`way` 1)."""
        return Slot(self.client if way else self._listener.process, (self.address, way), event)

    def establish(self) -> None:
        """Establish the connection if the listener is open; otherwise try again later."""
        clock, listener = self.network.clock, self.network.listeners.get(self._endpoint)
        late = self.network.late.get(self.name, 0.0)
        if self.up or self._closed or not self.client.there:
            return
        if clock.now < late:
            self._connect_at(late)
            return
        if listener is None:
            self._connect_at(clock.now + RETRY)
            return
        if listener.token != self._token:
            listener.process.deliver(Event("refused", listener))
            self.client.deliver(Event("barred", self, reason="it does not have the job's token"))
            return
        self.up, self._listener = True, listener
        self._generation += 1
        self._last = [clock.now, clock.now]
        listener.connections[self.address] = self
        self.is_silent = True
        if self._generation == 1:  # ZeroMQ does not announce a reconnection to the listener
            self._arrive(0, Event("connected", listener, address=self.address), clock.now)
        self._arrive(1, Event("connected", self), clock.now)
        pending, self._pending = self._pending, []
        for frames in pending:
            self._to_server(frames, clock.now)

    def send(self, frames: Sequence[Any], /) -> None:
        """Send a message to the server."""
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
        """Send a message to the client."""
        if self.up:
            self._arrive(1, Event("message", self, frames), self._listener.process.now)

    def changes(self) -> Iterator[Event]:
        """Yield connection events, even if earlier messages are unread."""
        while (event := self.client.next_event(self, changes_only=True)) is not None:
            yield event

    def hold(self, way: int, seconds: float) -> None:
        """Stop messages in one direction for some seconds; after `patience` the connection breaks.

        Args:
          way: 0 for messages to the server, 1 for messages to the client.
          seconds: duration of the stop.
        """
        now, patience = self.network.clock.now, self.network.patience
        self.paused_until[way] = now + seconds
        if seconds > patience:
            self.network.clock.at(now + patience, lambda: self.break_off(seconds - patience))

    def break_off(self, seconds: float = 0.0) -> None:
        """Break the connection; its messages in transit are lost. Restore it after some seconds."""
        if self.up:
            self._break(seconds, self._slot(0, "lost"), self._slot(1, "broken"))

    @property
    def to_server(self) -> Slot:
        """Slot of the connection's messages to the server."""
        return self._slot(0, "message")

    def vanish(self) -> None:
        """End a connection that the client has closed; drop all its messages, and add no event."""
        self.up = False
        self._generation += 1
        del self._listener.connections[self.address]
        for way in (0, 1):
            self.network.clock.forget((self.address, way))

    def _break(self, seconds: float, lost: Slot | None = None, broken: Slot | None = None) -> None:
        """Break the connection.

        Args:
          seconds: time after which the connection is restored.
          lost, broken: slots of the events at the server and at the client.
        """
        self.up = False
        self._generation += 1
        clock, listener = self.network.clock, self._listener
        del listener.connections[self.address]
        for way in (0, 1):
            clock.forget((self.address, way))
        clock.at(clock.now, self._lost, lost)
        if self.client.there and not self._closed:
            heard = clock.now + self.network.delay()
            clock.at(heard, self._broken, broken)
            # The client must receive the event of the break before the next `connected`.
            again = clock.now + seconds + 2 * self.network.delay()
            self._connect_at(max(heard, again))

    def _lost(self) -> None:
        listener = self._listener
        listener.process.deliver(Event("lost", listener, address=self.address))

    def _broken(self) -> None:
        if not self._closed:
            self.client.deliver(Event("broken", self))

    def close(self, linger: float = 0.0) -> None:
        """Close the connection by the client, after the arrival of the messages that were sent."""
        self._closed = True
        self.client.forget(self)
        self.network.clock.forget((self.address, 1))
        self._end(0)

    def close_by_server(self) -> None:
        """Close the connection by the server, after the arrival of the messages that were sent."""
        self._end(1)

    def _end(self, way: int) -> None:
        if not self.up:
            return
        generation = self._generation

        def end() -> None:
            if self._generation == generation:
                self._break(0.0)

        time = max(self._last[way], self.network.clock.now)
        self.network.clock.at(time, end, self._slot(way, "end"))

    def _arrive(self, way: int, event: Event, now: float) -> None:
        """Schedule the arrival of an event at the server (`way` 0) or at the client (`way` 1)."""
        network = self.network
        start = max(now, self.paused_until[way])
        time = self._last[way] = max(
            self._last[way],
            start + network.delay() + sum(map(_size, event.frames)) / network.bandwidth,
        )
        generation, to = self._generation, self.client if way else self._listener.process

        def deliver() -> None:
            if self._generation == generation and not (way and self._closed):
                self.is_silent &= bool(way)
                to.deliver(event)

        network.clock.at(time, deliver, self._slot(way, event))


def garble(frames: Sequence[Any], number: int) -> list[Any]:
    """Return a malformed message: its last bytes are missing, or its op is unknown.

    Args:
      frames: frames of the original message.
      number: number of the message; it selects one of three changes.
    """
    header = bytes(frames[0])
    if number % 3 == 0:
        return [header[: len(header) // 2], *frames[1:]]
    if number % 3 == 1 and len(frames) > 1:
        return [*frames[:-1], memoryview(frames[-1]).cast("B")[:-1]]
    return [msgpack.packb({**msgpack.unpackb(header), "op": "garbled"}), *frames[1:]]


def _size(frame: Any) -> int:
    return len(frame) if isinstance(frame, bytes) else int(frame.nbytes)


def drawn_delay(random: Random, typical: float, longest: float = math.inf) -> Callable[[], float]:
    """Return a function that returns random delays: 98 % near `typical`, 2 % much longer.

    Args:
      random: source of random numbers.
      typical: the typical delay in seconds.
      longest: the longest possible delay in seconds.
    """

    def delay() -> float:
        drawn = random.expovariate(1.0) * typical * (20.0 if random.random() < 0.02 else 1.0)
        return min(drawn, longest)

    return delay
