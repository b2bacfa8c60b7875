"""The transport of real jobs: ZeroMQ's sockets with the limits, keys and monitors of this package.

A link is a DEALER socket. A door is a ROUTER socket that is bound to its endpoint and, on request,
to a Unix socket. A second socket, the monitor, reports connections that are made and end. Both are
polled; nothing else of this package reads them.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dtrans.errors import ConfigError
from dtrans.protocol.transport import LINGER, Event, Link
from dtrans.run.net.keys import Keys
from dtrans.run.net.own_folder import OwnFolder
from dtrans.run.net.sockets import (
    PATIENCE,
    Doorkeeper,
    Handshakes,
    Speakers,
    bind,
    bound_address,
    connect,
    limit,
    new_socket,
    tcp_address,
    user_of,
)


LONG = 3600.0  # seconds that one poll of ZeroMQ takes at most: its timeout is a C int


class ZmqLink:
    """A connecting socket and its monitor. Made by `ZmqTransport.connect`."""

    def __init__(
        self,
        transport: ZmqTransport,
        address: str,
        user: str,
        role: str,
    ) -> None:
        self._transport = transport
        self.socket = new_socket(transport.context, zmq.DEALER, transport.patience)
        # the door learns of the connection though this process may compute for long
        self.socket.setsockopt(zmq.PROBE_ROUTER, 1)
        self._handshakes = Handshakes(self.socket, transport.keys, address)
        self.monitor = self._handshakes.monitor
        self._changes: collections.deque[Event] = collections.deque()
        self._poller = zmq.Poller()
        for polled in self.polled:
            self._poller.register(polled, zmq.POLLIN)
        try:
            connect(self.socket, address, transport.keys, user, role)
        except BaseException:  # an open socket would let the transport never close
            self.close()
            raise

    @property
    def polled(self) -> tuple[zmq.Socket[Any], ...]:
        """The sockets to poll."""
        return (self.socket, self.monitor)

    @property
    def is_due(self) -> bool:
        """Return True if events wait that were read from the monitor before."""
        return bool(self._changes)

    def poll(self, milliseconds: int) -> dict[Any, int]:
        """Wait for this link alone."""
        return dict(self._poller.poll(milliseconds))

    def send(self, frames: Sequence[Any], /) -> None:
        """Send a message, as `dtrans.protocol.transport.Link` says."""
        # ZeroMQ gives up a connection to something that does not speak its protocol, and would then
        # block a send for ever
        with contextlib.suppress(zmq.Again):
            if len(frames) == 1:  # a header is copied faster than it is tracked
                self.socket.send(frames[0], zmq.NOBLOCK)
            else:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def changes(self) -> Iterator[Event]:
        """Take events of the connection, as `dtrans.protocol.transport.Link` says."""
        self._read_monitor()
        while self._changes:
            yield self._changes.popleft()

    def events(self, ready: Mapping[Any, int]) -> Iterator[Event]:
        """Take events of this link: one message, or all changes, each behind messages before it."""
        if self.monitor in ready:
            self._read_monitor()
        if not self._changes:
            if self.socket in ready:
                yield Event("message", self, self.socket.recv_multipart(copy=False))
            return
        while self._changes:
            # the monitor was read first: last words of a connection that has ended are there by now
            while self._changes and self._changes[0].kind == "broken" and self.socket.poll(0):
                yield Event("message", self, self.socket.recv_multipart(copy=False))
            if self._changes:
                yield self._changes.popleft()

    def _read_monitor(self) -> None:
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than a poll
            event, reason = self._handshakes.take()
            if reason:
                self._changes.append(Event("barred", self, reason=reason))
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._changes.append(Event("connected", self))
            elif event == zmq.EVENT_DISCONNECTED:
                self._changes.append(Event("broken", self))

    def close(self, linger: float = 0.0) -> None:
        """Close it, as `dtrans.protocol.transport.Link` says."""
        if self.socket.closed:
            return
        self._transport.forget(self)
        self._changes.clear()
        self._handshakes.close()
        self.socket.close(linger=int(linger * 1000))


class ZmqDoor:
    """A bound socket and its monitor. Made by `ZmqTransport.bind`.

    Attributes:
      endpoint: where others connect to it.
      local: the path of its Unix socket; empty, if it has none.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        keys: Keys,
        users: Mapping[str, str],
        frame: int,
        messages: int,
    ) -> None:
        self.endpoint = self.local = ""
        self._keys = keys
        self.is_due = False
        self._transport, self._bound, self._refused = transport, "", 0
        # ZeroMQ asks one doorkeeper per context, which knows the keys and users of one door
        is_first = not any(isinstance(x, ZmqDoor) for x in transport.owners)
        self._context = transport.context if is_first else zmq.Context()
        self.socket = new_socket(self._context, zmq.ROUTER, transport.patience)
        limit(self.socket, frame, messages)
        self._speakers = Speakers(self.socket, self._count_refused)
        self.monitor = self._speakers.monitor
        self._doorkeeper = Doorkeeper(self._context, keys, users)
        self._folder: OwnFolder | None = None

    @property
    def polled(self) -> tuple[zmq.Socket[Any], ...]:
        """The sockets to poll."""
        return (self.socket, self.monitor)

    def open(self, endpoint: str, reach: str, *, has_local: bool) -> None:
        """Bind the socket to an endpoint; others reach it by `reach`, where that is not empty."""
        host, _, port = (reach or endpoint).rpartition(":")
        bound = f"tcp://{endpoint}" if reach or port == "*" else bound_address(endpoint)
        try:
            self._bound = bind(self.socket, bound, self._keys, f"tcp://{host}")
            self.endpoint = f"{host}:{self._bound.rpartition(':')[2]}"
            if has_local:
                self._folder = OwnFolder()
                path = str(self._folder.path / "socket")
                if len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN:
                    bind(self.socket, f"ipc://{path}", self._keys)
                    self.local = path
        except BaseException:
            self.close()
            raise

    def send(self, address: bytes, frames: Sequence[Any], /) -> None:
        """Send a message, as `dtrans.protocol.transport.Door` says."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([address, *frames], zmq.NOBLOCK, copy=len(frames) == 1)

    def events(self, ready: Mapping[Any, int]) -> Iterator[Event]:
        """Take the events of a ready door: at most one message."""
        if self.socket in ready:
            address, *frames = self.socket.recv_multipart(copy=False)
            self._speakers.know(address)
            yield _at_door(self, address, frames)
        if self.monitor in ready:
            self._speakers.listen()
        for lost in self._speakers.lost():
            yield Event("lost", self, address=lost)
        while self._refused:
            self._refused -= 1
            yield Event("refused", self)

    def _count_refused(self) -> None:
        self._refused += 1

    def close(self, linger: float = 0.0) -> None:
        """Close it, as `dtrans.protocol.transport.Door` says."""
        if self.socket.closed:
            return
        self._transport.forget(self)
        self._free_endpoint(linger)
        self._doorkeeper.close()
        self._speakers.close()
        self.socket.close(linger=int(linger * 1000))
        if self._folder is not None:
            self._folder.close()
        if self._context is not self._transport.context:
            self._context.term()

    def _free_endpoint(self, linger: float) -> None:
        """Stop listening, and wait until the endpoint can be bound again.

        ZeroMQ closes listening sockets in a thread of its own.
        """
        if not self._bound:
            return
        self.socket.linger = int(linger * 1000)
        until = time.monotonic() + LINGER
        self.socket.unbind(self._bound)
        while self.monitor.poll(max(0, int((until - time.monotonic()) * 1000))):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_CLOSED:
                return


def _at_door(door: ZmqDoor, address: zmq.Frame, frames: list[zmq.Frame]) -> Event:
    """Return the event of a message; an empty one says that a connection is made (PROBE_ROUTER)."""
    if len(frames) == 1 and not len(frames[0]):
        return Event("connected", door, address=bytes(address.buffer))
    return Event("message", door, frames, bytes(address.buffer), user_of(address))


class ZmqTransport:
    """Sockets of one thread of a process, as `dtrans.protocol.transport.Transport`.

    Args:
      keys: of the job.
      patience: seconds without a sign of another process after which its connection ends. `inf`
        waits for ever, also for a process that does not read its messages.

    Attributes:
      context: of ZeroMQ.
    """

    def __init__(self, keys: Keys, patience: float = PATIENCE) -> None:
        self.keys, self.patience = keys, patience
        self.context: zmq.Context[Any] = zmq.Context()
        self._owners: dict[Any, ZmqLink | ZmqDoor] = {}  # by their sockets
        self._poller = zmq.Poller()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._poller.register(self._wake, zmq.POLLIN)

    @property
    def owners(self) -> Sequence[ZmqLink | ZmqDoor]:
        """The links and doors that are open."""
        return tuple(dict.fromkeys(self._owners.values()))

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def connect(self, endpoint: str, /, *, user: str, role: str, name: str = "") -> ZmqLink:
        """Open a link, as `dtrans.protocol.transport.Transport` says."""
        if endpoint.startswith("/"):
            address = f"ipc://{endpoint}"
        else:
            address = tcp_address(endpoint)
            self.keys.check(f"{name or role} connects to {endpoint}", address)
        link = ZmqLink(self, address, user, role)
        self._listen_to(link)
        return link

    def bind(
        self,
        endpoint: str,
        /,
        users: Mapping[str, str],
        *,
        frame: int,
        messages: int,
        reach: str = "",
        name: str = "",
        has_local: bool = False,
        keys: Keys | None = None,
    ) -> ZmqDoor:
        """Open a door, as `dtrans.protocol.transport.Transport` says.

        Args:
          reach: the endpoint by which others reach this one, if it is another.
          name: of the door in messages; the endpoint by default.
          has_local: bind a Unix socket too.
          keys: that others show here; those of the transport by default.
        """
        door = ZmqDoor(self, keys or self.keys, users, frame, messages)
        try:
            door.open(endpoint, reach, has_local=has_local)
        except zmq.ZMQError as e:
            why = zmq.strerror(e.errno or 0)
            raise ConfigError(f"{name or endpoint} cannot be bound: {why}") from e
        self._listen_to(door)
        return door

    def _listen_to(self, owner: ZmqLink | ZmqDoor) -> None:
        for polled in owner.polled:
            self._owners[polled] = owner
            self._poller.register(polled, zmq.POLLIN)

    def forget(self, closing: ZmqLink | ZmqDoor) -> None:
        """Poll a link or a door no more."""
        for polled in closing.polled:
            if self._owners.pop(polled, None) is not None:
                self._poller.unregister(polled)

    def reaches(self, local: str, /) -> bool:
        """Return True if this process can connect to what another process calls `local`."""
        return os.path.exists(local)

    def poll(self, until: float, link: Link | None = None) -> Iterator[Event]:
        """Wait and take events, as `dtrans.protocol.transport.Transport` says."""
        only = link if isinstance(link, ZmqLink) else None
        due = [x for x in (self._owners.values() if only is None else (only,)) if x.is_due]
        wait = 0.0 if due else max(0.0, min(until - time.monotonic(), LONG))
        milliseconds = math.ceil(wait * 1000)
        ready = dict(self._poller.poll(milliseconds)) if only is None else only.poll(milliseconds)
        if self._wake in ready:
            os.read(self._wake, 4096)
        found = (self._owners[x] for x in ready if x != self._wake)
        for owner in dict.fromkeys([*due, *found]):
            if not owner.socket.closed:  # by whoever took the event before
                yield from owner.events(ready)

    def wake(self) -> None:
        """End the poll that another thread is in, or the next one."""
        with contextlib.suppress(BlockingIOError):  # it is full, so the poll ends
            os.write(self._waker, b"+")

    def close(self, linger: float = 0.0) -> None:
        """Close all links and doors. Sent messages have so many seconds to leave."""
        if self.context.closed:
            return
        for owner in self.owners:
            owner.close(linger)
        self.context.term()
        os.close(self._wake)
        os.close(self._waker)
