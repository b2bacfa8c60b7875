"""Connections of a virtual network. Each keeps the order of its messages, as TCP does; different
ones overtake.

A message takes the connection's delay and its bytes over the bandwidth, and is read when it
arrives: whoever sends memory may not write it before. A connection that breaks loses what is on its
way, and is made anew after a while where somebody still listens; both ends are told, the server by
an empty message from the same address.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

from tools.simulate.clock import Clock


class Actor(Protocol):
    """A process: what happens to it is put into its queue."""

    name: str

    @property
    def there(self) -> bool:
        """Return True while it runs."""

    def deliver(self, event: tuple[Any, ...]) -> None:
        """Let it take an event when it comes to it."""


class Network:
    """The connections of one job.

    Args:
      delay: draws the seconds that a message is under way.
      patience: seconds without a sign of the other end after which a connection breaks.
      bandwidth: bytes a second.
    """

    def __init__(
        self, clock: Clock, delay: Callable[[], float], patience: float, bandwidth: float = 1e9
    ) -> None:
        self.clock = clock
        self.delay, self.patience = delay, patience
        self.bandwidth = bandwidth
        self.connections: list[SimulatedConnection] = []
        self._addresses = itertools.count()

    def connect(self, client: Actor, server: Actor, key: Any) -> SimulatedConnection:
        """A connection, which the client calls `key`; it is up a little later."""
        made = SimulatedConnection(self, client, server, key)
        self.connections.append(made)
        self.clock.at(self.clock.now + self.delay(), made.establish)
        return made

    def break_all(self, name: str, seconds: float) -> None:
        """Break all connections of a process, which come up again after some seconds."""
        for c in self.connections:
            if name in (c.client.name, c.server.name):
                c.break_off(seconds)

    def address(self) -> bytes:
        """A new address, as a server sees who has connected."""
        return b"%d" % next(self._addresses)


class SimulatedConnection:
    """One connection of a client to a server's door. Made by `Network.connect`.

    Attributes:
      up: whether it is established.
      address: what the server knows it by.
      doubled: the number of the client's message that arrives twice.
      held: until when each direction lets nothing through: to the server, and to the client.
    """

    def __init__(self, network: Network, client: Actor, server: Actor, key: Any) -> None:
        self.network, self.client, self.server, self.key = network, client, server, key
        self.up = False
        self.address = network.address()
        self.doubled = -1
        self.held = [0.0, 0.0]
        self._closed = False
        self._made = 0  # how often it was
        self._last = [0.0, 0.0]  # when the last message of each direction arrives
        self._pending: list[Sequence[Any]] = []
        self._sent = 0

    def establish(self) -> None:
        """Come up, where the server is there; else try again."""
        clock = self.network.clock
        if self.up or self._closed or not self.client.there:
            return
        if not self.server.there:
            clock.at(clock.now + 0.1, self.establish)
            return
        self.up = True
        self._made += 1
        self._last = [clock.now, clock.now]
        self.server.deliver(("accepted", self))
        self._arrive(0, ("message", self.address, [b""]), 0)
        self._arrive(1, ("connected", self.key), 0)
        pending, self._pending = self._pending, []
        for frames in pending:
            self.to_server(frames)

    def to_server(self, frames: Sequence[Any], later: float = 0.0) -> None:
        """Send a message of the client."""
        if not self.up:
            self._pending.append(frames)
            return
        for _ in range(1 + (self._sent == self.doubled)):
            self._arrive(0, ("message", self.address, frames), later)
        self._sent += 1

    def to_client(self, frames: Sequence[Any], later: float = 0.0) -> None:
        """Send a message of the server; nobody hears it where the connection is gone."""
        if self.up:
            self._arrive(1, ("answer", self.key, frames), later)

    def hold(self, way: int, seconds: float) -> None:
        """Let nothing through in one direction for a while; too long, and the connection breaks."""
        now, patience = self.network.clock.now, self.network.patience
        self.held[way] = now + seconds
        if seconds > patience:
            self.network.clock.at(now + patience, lambda: self.break_off(seconds - patience))

    def break_off(self, seconds: float = 0.0) -> None:
        """Lose what is on its way, and come up again after some seconds."""
        if not self.up:
            return
        self.up = False
        self._made += 1
        clock = self.network.clock
        self.server.deliver(("lost", self.address))
        if self.client.there:
            clock.at(
                clock.now + self.network.delay(), lambda: self.client.deliver(("broken", self.key))
            )
            clock.at(clock.now + seconds + 2 * self.network.delay(), self.establish)

    def close(self, way: int) -> None:
        """Be closed by the client (0) or the server (1): what it has sent still arrives, and then
        the end."""
        if way == 0:
            self._closed = True
        if not self.up:
            return
        made = self._made

        def end() -> None:
            if self._made == made:
                self.break_off()

        self.network.clock.at(max(self._last[way], self.network.clock.now), end)

    def _arrive(self, way: int, event: tuple[Any, ...], later: float) -> None:
        network = self.network
        size = sum(_size(x) for x in event[2]) if len(event) > 2 else 0
        start = max(network.clock.now + later, self.held[way])
        time = self._last[way] = max(
            self._last[way], start + network.delay() + size / network.bandwidth
        )
        made = self._made

        def deliver() -> None:
            if self._made == made:
                (self.client if way else self.server).deliver(event)

        network.clock.at(time, deliver)


def _size(frame: Any) -> int:
    return len(frame) if isinstance(frame, bytes) else int(frame.nbytes)


def drawn_delay(random: Random, typical: float) -> Callable[[], float]:
    """Delays that are mostly typical, and seldom much longer."""
    return lambda: random.expovariate(1.0) * typical * (20.0 if random.random() < 0.02 else 1.0)
