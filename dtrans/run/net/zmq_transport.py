"""Transport of real jobs, over ZeroMQ sockets.

A link is a DEALER socket. A listener is a ROUTER socket that is bound to its endpoint, and
optionally to a Unix socket. For each link or listener, ZeroMQ reports connection events on a second
socket, the monitor. The transport polls both sockets.

Over a Unix socket, large frames are sent in shared memory if both processes agree
(`memory_channel`).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dtrans.errors import ConfigError, WireError
from dtrans.protocol import wire
from dtrans.protocol.transport import LINGER, Event
from dtrans.run.net.keys import STATUS, Keys
from dtrans.run.net.memory_channel import (
    IS_AVAILABLE,
    LEAST,
    MemoryChannel,
    knock,
    open_door,
)
from dtrans.run.net.net_options import allows_shared_memory
from dtrans.run.net.shared_memory import LentMemory
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


log = logging.getLogger(__name__)
# maximum seconds of a poll, because ZeroMQ stores the timeout as a C int of milliseconds
MAX_POLL = 3600.0


class ZmqLink:
    """Connection to a listener of another process. `ZmqTransport.connect` creates it.

    A link has two ZeroMQ sockets: one for messages, and a *monitor*, on which ZeroMQ reports
    connection events.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        address: str,
        user: str,
        role: str,
    ) -> None:
        self._transport = transport
        self.socket = new_socket(transport.context, zmq.DEALER, transport.patience)
        # With this option, ZeroMQ sends an empty message on the first connection, even while this
        # process computes. So the listener knows the link's id at once. ZeroMQ does not repeat the
        # message after a reconnection.
        self.socket.setsockopt(zmq.PROBE_ROUTER, 1)
        self._handshakes = Handshakes(self.socket, transport.keys, address)
        self.monitor = self._handshakes.monitor
        self._changes: collections.deque[Event] = collections.deque()
        self._channel = transport.take_channel(address)
        self._id = self.socket.getsockopt_string(zmq.ROUTING_ID).encode()
        try:
            connect(self.socket, address, transport.keys, user, role)
        except BaseException:  # An open socket would make `ZmqTransport.close` wait forever.
            self.close()
            raise

    @property
    def polled(self) -> tuple[Any, ...]:
        """The sockets to poll, and the file numbers to poll."""
        return (self.socket, self.monitor)

    @property
    def is_due(self) -> bool:
        """True if the link has events in memory, so that the next poll need not wait."""
        return bool(self._changes)

    def send(self, frames: Sequence[Any], /) -> None:
        """Send a message; see `dtrans.protocol.transport.Link`."""
        if self._channel is not None and _has_large(frames):
            frames = self._channel.pack(frames)
        # If the other process uses another protocol, ZeroMQ gives up the connection. A blocking
        # send would then wait forever.
        with contextlib.suppress(zmq.Again):
            # For a single header, a copy is faster than tracking the use of its memory.
            if len(frames) == 1:
                self.socket.send(frames[0], zmq.NOBLOCK)
            else:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def changes(self) -> Iterator[Event]:
        """Yield connection events; see `dtrans.protocol.transport.Link`."""
        self._read_monitor()
        while self._changes:
            yield self._changes.popleft()

    def events(self, ready: Mapping[Any, int]) -> Iterator[Event]:
        """Yield all pending connection events, after the messages that arrived before them.

        Without connection events, yield the next message.

        Args:
          ready: the sockets that have data to read, as a poll returns them.
        """
        if self.monitor in ready:
            self._read_monitor()
        if self._channel is not None and self._channel.file_number in ready:
            self._channel.take()
            self._transport.unwatch(self._channel.file_number)
        if not self._changes:
            if self.socket in ready:
                yield Event("message", self, self._receive())
            return
        while self._changes:
            # The monitor was read first. So the socket has all messages that arrived before the
            # connection ended.
            while self._changes and self._changes[0].kind == "broken" and self.socket.poll(0):
                yield Event("message", self, self._receive())
            if self._changes:
                yield self._changes.popleft()

    def _receive(self) -> Sequence[Any]:
        """Return the frames of the next message. The first message begins the memory's agreement.

        Only then, the listener knows this link: ZeroMQ has authenticated it.
        """
        frames = self.socket.recv_multipart(copy=False)
        channel = self._channel
        if channel is not None and not channel.address:
            channel.offer(self._id)
            if not channel.is_settled:
                self._transport.watch(channel.file_number, self)
        return _without_places(frames, channel)

    def report_memory(self) -> None:
        """Tell the listener which of its frames in shared memory this process has released."""
        if self._channel is not None:
            self._channel.report()

    def _read_monitor(self) -> None:
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:  # This check is faster than `poll`.
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
        if self._channel is not None:
            self._transport.unwatch(self._channel.file_number)
            self._channel.close()
        self._changes.clear()
        self._handshakes.close()
        self.socket.close(linger=int(linger * 1000))


class ZmqListener:
    """Bound socket to which other processes connect. `ZmqTransport.bind` creates it.

    A second socket, the monitor, reports connection events.

    Attributes:
      endpoint: the `host:port` to which other processes connect.
      local: path of the Unix socket; empty if the listener has none.
      is_due: always False, because a listener stores no events between two polls.
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
        # ZeroMQ allows one authenticator for each context, and an authenticator admits the users of
        # one listener. So each further listener gets its own context.
        is_first = not any(isinstance(x, ZmqListener) for x in transport.owners)
        self._context = transport.context if is_first else zmq.Context()
        self.socket = new_socket(self._context, zmq.ROUTER, transport.patience)
        limit(self.socket, frame, messages)
        self._peers = PeerIds(self.socket, self._count_refused)
        self.monitor = self._peers.monitor
        self._authenticator = Authenticator(self._context, keys, users)
        self._folder: TempDir | None = None
        self._door: socket.socket | None = None  # for descriptors of memory files
        # users that may share memory; observers read only the status
        self._users = {user for user, role in users.items() if role != STATUS}
        self._members: set[bytes] = set()  # ids of connected processes of these users
        self._unsettled: dict[int, MemoryChannel] = {}  # file number -> channel
        self._channels: dict[bytes, MemoryChannel] = {}  # id of a process -> channel
        # channels of processes whose connections have ended, but that may still read the memory
        self._lost_channels: list[MemoryChannel] = []

    @property
    def polled(self) -> tuple[Any, ...]:
        """The sockets to poll, and the file numbers to poll."""
        door = () if self._door is None else (self._door.fileno(),)
        return (self.socket, self.monitor, *door)

    def open(self, endpoint: str, reach: str, *, has_local: bool) -> None:
        """Bind the socket.

        Args:
          endpoint: the endpoint to bind.
          reach: endpoint to which other processes connect; empty to use `endpoint`.
          has_local: True to also bind a Unix socket.
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
                    self._door = open_door(path)
                    self.local = path
        except BaseException:
            self.close()
            raise

    @property
    def silent(self) -> int:
        """Number of peers that have connected but have not sent a message yet."""
        self._peers.read_monitor()
        return self._peers.silent

    def send(self, address: bytes, frames: Sequence[Any], /) -> None:
        """Send a message; see `dtrans.protocol.transport.Listener`."""
        channel = self._channels.get(address)
        if channel is not None and _has_large(frames):
            frames = channel.pack(frames)
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([address, *frames], zmq.NOBLOCK, copy=len(frames) == 1)

    def events(self, ready: Mapping[Any, int]) -> Iterator[Event]:
        """Yield at most one message, and all pending connection events.

        Args:
          ready: the sockets that have data to read, as a poll returns them.
        """
        if self._door is not None:
            self._agree_on_memory(self._door, ready)
        if self.socket in ready:
            address, *frames = self.socket.recv_multipart(copy=False)
            peer = bytes(address.buffer)
            is_open = self._peers.add(address)
            # Report the end of an earlier connection before the first message of a later
            # connection.
            for lost in self._peers.take_lost():
                yield self._lost(lost)
            event = _message_event(self, address, frames, self._channels.get(peer))
            if event.user in self._users:
                self._members.add(peer)
            yield event
            if not is_open and not self._peers.is_connected(peer):
                yield self._lost(peer)
        if self.monitor in ready:
            self._peers.read_monitor()
        for lost in self._peers.take_lost():
            yield self._lost(lost)
        while self._refused:
            self._refused -= 1
            yield Event("refused", self)

    def _count_refused(self) -> None:
        self._refused += 1

    def report_memory(self) -> None:
        """Tell other processes which of their frames in shared memory this process has released."""
        for channel in self._channels.values():
            channel.report()
        # Otherwise the listener would keep the socket and the memory of every ended process.
        self._lost_channels = [x for x in self._lost_channels if not x.has_ended()]

    def _lost(self, address: bytes) -> Event:
        """Return the event for the end of a connection."""
        self._members.discard(address)
        channel = self._channels.pop(address, None)
        if channel is not None:
            channel.lose()
            self._lost_channels.append(channel)
        return Event("lost", self, address=address)

    def _agree_on_memory(self, door: socket.socket, ready: Mapping[Any, int]) -> None:
        """Handle connections for descriptors of memory files, and messages on them.

        Args:
          door: the socket that listens for these connections.
          ready: as for `events`.
        """
        for number in self._unsettled.keys() & ready.keys():
            channel = self._unsettled[number]
            channel.take(self._members)
            if channel.address in self._members:
                self._channels[channel.address] = channel
            if channel.is_settled:
                self._transport.unwatch(number)
                del self._unsettled[number]
        if door.fileno() in ready:
            line, _ = door.accept()
            lent = self._transport.lent
            if lent is None:
                line.close()  # the other process then sends all arrays as bytes
                return
            channel = MemoryChannel(line, lent)
            self._unsettled[channel.file_number] = channel
            self._transport.watch(channel.file_number, self)

    def close(self, linger: float = 0.0) -> None:
        """Close the listener; see `dtrans.protocol.transport.Listener`."""
        if self.socket.closed:
            return
        self._transport.forget(self)
        for number, channel in self._unsettled.items():
            self._transport.unwatch(number)
            channel.close()
        for channel in (*self._channels.values(), *self._lost_channels):
            channel.close()
        if self._door is not None:
            self._door.close()
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

        ZeroMQ closes listening sockets later, in its I/O thread.
        """
        if not self._bound:
            return
        self.socket.linger = int(linger * 1000)
        until = time.monotonic() + LINGER
        self.socket.unbind(self._bound)
        while self.monitor.poll(max(0, int((until - time.monotonic()) * 1000))):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_CLOSED:
                return


def _message_event(
    listener: ZmqListener,
    address: zmq.Frame,
    frames: list[zmq.Frame],
    channel: MemoryChannel | None,
) -> Event:
    """Return the event for a received message.

    A peer's first message is empty, because its socket has the option PROBE_ROUTER. It gives the
    event `connected`.
    """
    if len(frames) == 1 and not len(frames[0]):
        return Event("connected", listener, address=bytes(address.buffer))
    message = _without_places(frames, channel)
    return Event("message", listener, message, bytes(address.buffer), user_of(address))


def _has_large(frames: Sequence[Any]) -> bool:
    """Return True if a frame after the header can be sent in shared memory."""
    return any(len(frame) >= LEAST for frame in frames[1:])


def _without_places(frames: list[Any], channel: MemoryChannel | None) -> Sequence[Any]:
    """Replace places in shared memory by the frames there.

    A message with wrong places is returned unchanged, and `wire.parse` refuses it.
    """
    if channel is None or bytes(frames[0].buffer[:1]) != wire.PLACES:
        return frames
    try:
        return channel.unpack(frames)
    except WireError as e:
        log.warning("another process of this host sent %s", e)
        return frames


class ZmqTransport:
    """Messages between the processes of a real job, over ZeroMQ.

    The class implements `dtrans.protocol.transport.Transport`. Simulated jobs use another
    implementation.

    Args:
      keys: keys of the job.
      patience: seconds without a heartbeat after which a connection ends. `inf` is for a process
        that may not read its messages for a long time.

    Attributes:
      keys: keys of the job.
      patience: the argument `patience`.
      context: ZeroMQ context of the sockets.
    """

    def __init__(self, keys: Keys, patience: float = PATIENCE) -> None:
        self.keys, self.patience = keys, patience
        self.context: zmq.Context[Any] = zmq.Context()
        self._owners: dict[Any, ZmqLink | ZmqListener] = {}  # socket -> its link or listener
        self._poller = zmq.Poller()
        self._lent: LentMemory | None = None
        self._uses_memory = IS_AVAILABLE and allows_shared_memory()
        self._knocked: dict[str, socket.socket] = {}  # address -> connection for descriptors
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._poller.register(self._wake, zmq.POLLIN)

    @property
    def owners(self) -> Sequence[ZmqLink | ZmqListener]:
        """The links and listeners that are open."""
        return tuple(dict.fromkeys(self._owners.values()))

    @property
    def lent(self) -> LentMemory | None:
        """Memory of this process, in which processes of this host read frames.

        None if the system has none, or DTRANS_SHARED_MEMORY is "disabled".
        """
        if self._lent is None and self._uses_memory:
            try:
                self._lent = LentMemory()
            except OSError as e:
                log.info("no shared memory: %s", e)
                self._uses_memory = False
        return self._lent

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
    ) -> ZmqListener:
        """Open a listener; see `dtrans.protocol.transport.Transport`.

        Args:
          endpoint: `host:port`; the port `*` selects a free port.
          users: maps each user name to the role that may connect under it. An empty role admits
            all roles.
          frame: bytes of the largest accepted frame.
          messages: maximum length of each peer's receive queue, and of its send queue.
          reach: endpoint to which other processes connect; by default `endpoint`.
          name: name of the listener in errors; by default the endpoint.
          has_local: True to also bind a Unix socket.
          keys: keys by which peers are authenticated; by default the transport's keys.

        Raises:
          ConfigError: the endpoint cannot be bound.
        """
        listener = ZmqListener(self, keys or self.keys, users, frame, messages)
        try:
            listener.open(endpoint, reach, has_local=has_local)
        except zmq.ZMQError as e:
            reason = zmq.strerror(e.errno or 0)
            raise ConfigError(f"{name or endpoint} cannot be bound: {reason}") from e
        self._listen_to(listener)
        return listener

    def _listen_to(self, owner: ZmqLink | ZmqListener) -> None:
        for polled in owner.polled:
            self.watch(polled, owner)

    def forget(self, closing: ZmqLink | ZmqListener) -> None:
        """Stop polling a link or listener that is being closed."""
        for polled in closing.polled:
            self.unwatch(polled)

    def watch(self, polled: Any, owner: ZmqLink | ZmqListener) -> None:
        """Poll a socket or a file number of a link or listener."""
        self._owners[polled] = owner
        self._poller.register(polled, zmq.POLLIN)

    def unwatch(self, polled: Any) -> None:
        """Stop polling a socket or a file number, if it is polled."""
        if self._owners.pop(polled, None) is not None:
            self._poller.unregister(polled)

    def reaches(self, local: str, /) -> bool:
        """Return True if this process can connect to the Unix socket with the path `local`."""
        if not IS_AVAILABLE:
            return os.path.exists(local)
        line = knock(local)
        if line is None:
            return False
        self._knocked[f"ipc://{local}"] = line
        return True

    def take_channel(self, address: str) -> MemoryChannel | None:
        """Return a channel for memory that is shared with a listener; None if there is none.

        Args:
          address: the address to which a link connects, in ZeroMQ's notation.
        """
        line = self._knocked.pop(address, None)
        if line is None:
            return None
        if self.lent is None:
            line.close()
            return None
        return MemoryChannel(line, self.lent)

    def poll(self, until: float) -> Iterator[Event]:
        """Wait for events, and yield them; see `dtrans.protocol.transport.Transport`."""
        owners = self.owners
        for owner in owners:
            owner.report_memory()
        due = [x for x in owners if x.is_due]
        wait = 0.0
        if not due:
            wait = max(0.0, min(until - time.monotonic(), MAX_POLL))
        ready = dict(self._poller.poll(math.ceil(wait * 1000)))
        if self._wake in ready:
            os.read(self._wake, 4096)
        found = [self._owners[x] for x in ready if x != self._wake]
        for owner in dict.fromkeys([*due, *found]):
            # The caller may have closed the link or listener because of an earlier event.
            if not owner.socket.closed:
                yield from owner.events(ready)

    def wake(self) -> None:
        """Interrupt the poll of another thread. If no thread polls now, interrupt the next poll."""
        with contextlib.suppress(BlockingIOError):  # A full pipe already interrupts the poll.
            os.write(self._waker, b"+")

    def close(self, linger: float = 0.0) -> None:
        """Close all links and listeners.

        Args:
          linger: seconds for which pending messages are still sent.
        """
        if self.context.closed:
            return
        for owner in self.owners:
            owner.close(linger)
        for line in self._knocked.values():
            line.close()
        if self._lent is not None:
            self._lent.close()
        self.context.term()
        os.close(self._wake)
        os.close(self._waker)
