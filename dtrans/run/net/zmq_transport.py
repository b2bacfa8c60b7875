"""Transport of real jobs: ZeroMQ sockets with the limits, keys and monitors of this package.

A link is a DEALER socket. A door is a ROUTER socket, bound to its endpoint and optionally to a Unix
socket. ZeroMQ reports on a second socket, the monitor, which connections begin and end. The
transport polls both.
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
from dtrans.run.net.sockets import (
    PATIENCE,
    Authenticator,
    Handshakes,
    PeerIds,
    bind,
    bound_address,
    connect,
    limit,
    new_socket,
    tcp_address,
    user_of,
)
from dtrans.run.net.temp_dir import TempDir


MAX_POLL = 3600.0  # largest timeout of a poll in seconds: ZeroMQ's is a C int of milliseconds


class ZmqLink:
    """Connecting socket and its monitor. `ZmqTransport.connect` returns it."""

    def __init__(
        self,
        transport: ZmqTransport,
        address: str,
        user: str,
        role: str,
    ) -> None:
        self._transport = transport
        self.socket = new_socket(transport.context, zmq.DEALER, transport.patience)
        # an empty message tells the door of the connection, though this process may be computing
        self.socket.setsockopt(zmq.PROBE_ROUTER, 1)
        self._handshakes = Handshakes(self.socket, transport.keys, address)
        self.monitor = self._handshakes.monitor
        self._changes: collections.deque[Event] = collections.deque()
        self._poller = zmq.Poller()
        for polled in self.polled:
            self._poller.register(polled, zmq.POLLIN)
        try:
            connect(self.socket, address, transport.keys, user, role)
        except BaseException:  # `ZmqTransport.close` would wait forever for an open socket
            self.close()
            raise

    @property
    def polled(self) -> tuple[zmq.Socket[Any], ...]:
        """The sockets to poll."""
        return (self.socket, self.monitor)

    @property
    def is_due(self) -> bool:
        """True if events that were read from the monitor have not been taken."""
        return bool(self._changes)

    def poll(self, milliseconds: int) -> dict[Any, int]:
        """Poll only the sockets of this link."""
        return dict(self._poller.poll(milliseconds))

    def send(self, frames: Sequence[Any], /) -> None:
        """Send a message; see `dtrans.protocol.transport.Link`."""
        # ZeroMQ ends a connection to a process with another protocol, and a blocking send would
        # then wait forever
        with contextlib.suppress(zmq.Again):
            if len(frames) == 1:  # copying a header takes less time than tracking its memory
                self.socket.send(frames[0], zmq.NOBLOCK)
            else:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def changes(self) -> Iterator[Event]:
        """Take events of the connection; see `dtrans.protocol.transport.Link`."""
        self._read_monitor()
        while self._changes:
            yield self._changes.popleft()

    def events(self, ready: Mapping[Any, int]) -> Iterator[Event]:
        """Take events of this link: one message, or all changes after their earlier messages."""
        if self.monitor in ready:
            self._read_monitor()
        if not self._changes:
            if self.socket in ready:
                yield Event("message", self, self.socket.recv_multipart(copy=False))
            return
        while self._changes:
            # the monitor was read before the socket: all messages of an ended connection are here
            while self._changes and self._changes[0].kind == "broken" and self.socket.poll(0):
                yield Event("message", self, self.socket.recv_multipart(copy=False))
            if self._changes:
                yield self._changes.popleft()

    def _read_monitor(self) -> None:
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:  # faster than a poll
            event, reason = self._handshakes.take()
            if reason:
                self._changes.append(Event("barred", self, reason=reason))
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._changes.append(Event("connected", self))
            elif event == zmq.EVENT_DISCONNECTED:
                self._changes.append(Event("broken", self))

    def close(self, linger: float = 0.0) -> None:
        """Close the link; see `dtrans.protocol.transport.Link`."""
        if self.socket.closed:
            return
        self._transport.forget(self)
        self._changes.clear()
        self._handshakes.close()
        self.socket.close(linger=int(linger * 1000))


class ZmqDoor:
    """Bound socket and its monitor. `ZmqTransport.bind` returns it.

    Attributes:
      endpoint: the endpoint that others connect to.
      local: the path of its Unix socket; empty if it has none.
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
        # a context has one authenticator, which has the keys and users of one door
        is_first = not any(isinstance(x, ZmqDoor) for x in transport.owners)
        self._context = transport.context if is_first else zmq.Context()
        self.socket = new_socket(self._context, zmq.ROUTER, transport.patience)
        limit(self.socket, frame, messages)
        self._peers = PeerIds(self.socket, self._count_refused)
        self.monitor = self._peers.monitor
        self._authenticator = Authenticator(self._context, keys, users)
        self._folder: TempDir | None = None

    @property
    def polled(self) -> tuple[zmq.Socket[Any], ...]:
        """The sockets to poll."""
        return (self.socket, self.monitor)

    def open(self, endpoint: str, reach: str, *, has_local: bool) -> None:
        """Bind the socket.

        Args:
          endpoint: the endpoint to bind.
          reach: the endpoint that others connect to; empty for `endpoint`.
          has_local: True to bind a Unix socket, too.
        """
        host, _, port = (reach or endpoint).rpartition(":")
        bound = f"tcp://{endpoint}" if reach or port == "*" else bound_address(endpoint)
        try:
            self._bound = bind(self.socket, bound, self._keys, f"tcp://{host}")
            self.endpoint = f"{host}:{self._bound.rpartition(':')[2]}"
            if has_local:
                self._folder = TempDir()
                path = str(self._folder.path / "socket")
                if len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN:
                    bind(self.socket, f"ipc://{path}", self._keys)
                    self.local = path
        except BaseException:
            self.close()
            raise

    def send(self, address: bytes, frames: Sequence[Any], /) -> None:
        """Send a message; see `dtrans.protocol.transport.Door`."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([address, *frames], zmq.NOBLOCK, copy=len(frames) == 1)

    def events(self, ready: Mapping[Any, int]) -> Iterator[Event]:
        """Take events of a door after a poll: at most one message."""
        if self.socket in ready:
            address, *frames = self.socket.recv_multipart(copy=False)
            self._peers.add(address)
            yield _message_event(self, address, frames)
        if self.monitor in ready:
            self._peers.read_monitor()
        for lost in self._peers.take_lost():
            yield Event("lost", self, address=lost)
        while self._refused:
            self._refused -= 1
            yield Event("refused", self)

    def _count_refused(self) -> None:
        self._refused += 1

    def close(self, linger: float = 0.0) -> None:
        """Close the door; see `dtrans.protocol.transport.Door`."""
        if self.socket.closed:
            return
        self._transport.forget(self)
        self._free_endpoint(linger)
        self._authenticator.close()
        self._peers.close()
        self.socket.close(linger=int(linger * 1000))
        if self._folder is not None:
            self._folder.close()
        if self._context is not self._transport.context:
            self._context.term()

    def _free_endpoint(self, linger: float) -> None:
        """Stop listening, and wait until another process can bind the endpoint.

        ZeroMQ closes listening sockets in its I/O thread.
        """
        if not self._bound:
            return
        self.socket.linger = int(linger * 1000)
        until = time.monotonic() + LINGER
        self.socket.unbind(self._bound)
        while self.monitor.poll(max(0, int((until - time.monotonic()) * 1000))):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_CLOSED:
                return


def _message_event(door: ZmqDoor, address: zmq.Frame, frames: list[zmq.Frame]) -> Event:
    """Return the event of a message. An empty message announces a connection (PROBE_ROUTER)."""
    if len(frames) == 1 and not len(frames[0]):
        return Event("connected", door, address=bytes(address.buffer))
    return Event("message", door, frames, bytes(address.buffer), user_of(address))


class ZmqTransport:
    """`dtrans.protocol.transport.Transport` over the sockets of one thread.

    Args:
      keys: the keys of the job.
      patience: seconds without a heartbeat of another process after which its connection ends.
        `inf` is for processes that may not read their messages for long.

    Attributes:
      context: the ZeroMQ context of its sockets.
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
        """Open a link; see `dtrans.protocol.transport.Transport`."""
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
        """Open a door; see `dtrans.protocol.transport.Transport`.

        Args:
          reach: the endpoint that others connect to; by default `endpoint`.
          name: the name of the door in errors; by default the endpoint.
          has_local: True to bind a Unix socket, too.
          keys: the keys that authenticate peers; by default those of the transport.

        Raises:
          ConfigError: the endpoint cannot be bound.
        """
        door = ZmqDoor(self, keys or self.keys, users, frame, messages)
        try:
            door.open(endpoint, reach, has_local=has_local)
        except zmq.ZMQError as e:
            reason = zmq.strerror(e.errno or 0)
            raise ConfigError(f"{name or endpoint} cannot be bound: {reason}") from e
        self._listen_to(door)
        return door

    def _listen_to(self, owner: ZmqLink | ZmqDoor) -> None:
        for polled in owner.polled:
            self._owners[polled] = owner
            self._poller.register(polled, zmq.POLLIN)

    def forget(self, closing: ZmqLink | ZmqDoor) -> None:
        """Stop polling a link or a door."""
        for polled in closing.polled:
            if self._owners.pop(polled, None) is not None:
                self._poller.unregister(polled)

    def reaches(self, local: str, /) -> bool:
        """Return True if this process can connect to the Unix socket of another process."""
        return os.path.exists(local)

    def poll(self, until: float, link: Link | None = None) -> Iterator[Event]:
        """Wait for events and take them; see `dtrans.protocol.transport.Transport`."""
        only = link if isinstance(link, ZmqLink) else None
        due = [x for x in (self._owners.values() if only is None else (only,)) if x.is_due]
        wait = 0.0 if due else max(0.0, min(until - time.monotonic(), MAX_POLL))
        milliseconds = math.ceil(wait * 1000)
        ready = dict(self._poller.poll(milliseconds)) if only is None else only.poll(milliseconds)
        if self._wake in ready:
            os.read(self._wake, 4096)
        found = (self._owners[x] for x in ready if x != self._wake)
        for owner in dict.fromkeys([*due, *found]):
            if not owner.socket.closed:  # the taker of an earlier event may close it
                yield from owner.events(ready)

    def wake(self) -> None:
        """End the current poll of another thread, or the next poll."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: a poll ends anyway
            os.write(self._waker, b"+")

    def close(self, linger: float = 0.0) -> None:
        """Close all links and doors.

        Args:
          linger: seconds that sent messages have to leave.
        """
        if self.context.closed:
            return
        for owner in self.owners:
            owner.close(linger)
        self.context.term()
        os.close(self._wake)
        os.close(self._waker)
