"""ZeroMQ sockets with dtrans's defaults: authentication, size limits and heartbeats.

A bound socket admits only peers with a key or the password of the job (`dtrans.run.net.keys`). A
Unix socket also requires that the peer belongs to the same operating system user. ZeroMQ reads
messages only from admitted peers, so only these peers can send large messages. For each connection,
ZeroMQ sends a request to an internal socket (ZAP, RFC 27). A thread of this process answers it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dtrans.endpoints import is_loopback, resolve_host, split_endpoint
from dtrans.errors import ConfigError
from dtrans.protocol import token, wire
from dtrans.run.net.keys import Keys


log = logging.getLogger(__name__)
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_OTHER_MECHANISM = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
ZAP = "inproc://zeromq.zap.01"  # address to which ZeroMQ sends authentication requests (RFC 27)
PATIENCE = 30.0  # seconds without a heartbeat after which a connection ends
HANDSHAKE = 10.0  # timeout of a handshake in seconds
BROKEN = 3  # consecutive failed handshakes after which `offers_curve` is called
GREETING = 1.0  # timeout of `offers_curve` in seconds
CURVE_BYTES = 33  # bytes that CURVE adds to a frame: command name, nonce, MAC and flags


def tcp_address(endpoint: str) -> str:
    """Return an endpoint in ZeroMQ's notation."""
    host, port = split_endpoint(endpoint)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bound_address(endpoint: str) -> str:
    """Return the address to bind for an endpoint of this process, in ZeroMQ's notation.

    If the endpoint's host is a name that resolves to loopback on this host, return a wildcard,
    which binds all addresses of this host. For example, Debian resolves a host's own name to
    127.0.1.1, and other hosts resolve the same name to a network address.

    Example:
      >>> from dtrans.run.net.sockets import bound_address
      >>> bound_address("10.0.0.2:6174"), bound_address("127.0.0.1:6174")
      ('tcp://10.0.0.2:6174', 'tcp://127.0.0.1:6174')
    """
    host, port = split_endpoint(endpoint)
    is_host_name = not is_loopback(host) and is_loopback(resolve_host(host))
    return f"tcp://*:{port}" if is_host_name else tcp_address(endpoint)


def new_socket(context: zmq.Context[Any], kind: int, patience: float = PATIENCE) -> zmq.Socket[Any]:
    """Return a socket with dtrans's limits, for `bind` or `connect`.

    When the socket is closed, it drops unsent messages. To send them first, pass `linger` to
    `close`.

    Args:
      context: the ZeroMQ context.
      kind: type of the socket, such as `zmq.DEALER`.
      patience: seconds without a heartbeat after which ZeroMQ ends a connection. `inf` is for a
        process that may not read its messages for a long time.
    """
    new = context.socket(kind)
    # `bind` copies this option for peers that have disconnected. With the default of -1,
    # `context.term()` would wait forever if a peer disconnects just before the socket is closed.
    new.setsockopt(zmq.LINGER, 0)
    new.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
    # The queues of a connecting socket need no limits, because each step waits for answers. `limit`
    # sets the limits of bound sockets.
    new.setsockopt(zmq.SNDHWM, 0)
    new.setsockopt(zmq.RCVHWM, 0)
    new.setsockopt(zmq.IPV6, 1)
    new.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE * 1000))
    # ZeroMQ sends a heartbeat every tenth of `patience`, and ends the connection if no answer
    # arrives for 0.9 of `patience`. This is long, because after a short outage TCP retransmits at
    # increasing intervals.
    if math.isfinite(patience):
        new.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(patience * 100)))
        new.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(patience * 900)))
    if kind == zmq.ROUTER:
        # Without this option, ZeroMQ refuses a peer that reconnects before its old connection ends.
        new.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if kind == zmq.DEALER:
        # The other process recognizes this socket by its id after a reconnection.
        new.setsockopt_string(zmq.ROUTING_ID, token.new_token())
    return new


def bind(unbound: zmq.Socket[Any], address: str, keys: Keys, reach: str = "") -> str:
    """Bind a socket. The socket's context needs an `Authenticator`, which admits peers.

    Args:
      unbound: the socket.
      address: `tcp://host:port`, with `*` for a free port, or `ipc://path`.
      keys: keys of the job.
      reach: address to which peers connect; by default `address`.

    Returns:
      The bound address with its port, in ZeroMQ's notation.
    """
    keys.guard(unbound, reach or address)
    with _room_for_curve(unbound, keys, reach or address):
        unbound.bind(address)
    return str(unbound.get_string(zmq.LAST_ENDPOINT))


def connect(unbound: zmq.Socket[Any], address: str, keys: Keys, user: str, role: str) -> None:
    """Connect a socket.

    Args:
      unbound: the socket.
      address: address of the listener, in ZeroMQ's notation.
      keys: keys of the job.
      user: user name under which this process connects.
      role: role of this process, which selects the key if roles have separate keys.
    """
    keys.show(unbound, address, user, role)
    with _room_for_curve(unbound, keys, address):
        unbound.connect(address)


@contextlib.contextmanager
def _room_for_curve(unbound: zmq.Socket[Any], keys: Keys, address: str) -> Iterator[None]:
    """Allow slightly larger frames, since encryption (CURVE) adds bytes to each frame.

    The larger limit holds within the `with` block. The caller binds or connects the socket in the
    block, because ZeroMQ copies the limit at that time.
    """
    limit = unbound.getsockopt(zmq.MAXMSGSIZE)
    assert isinstance(limit, int)
    unbound.setsockopt(zmq.MAXMSGSIZE, limit + CURVE_BYTES * keys.encrypts(address))
    try:
        yield
    finally:
        unbound.setsockopt(zmq.MAXMSGSIZE, limit)


def limit(bound: zmq.Socket[Any], frame: int, messages: int) -> None:
    """Limit the size and number of messages of a socket, before it is bound.

    Args:
      bound: the socket.
      frame: bytes of the largest frame. ZeroMQ closes the connection of a peer that sends a larger
        frame.
      messages: maximum length of each peer's receive queue, and of its send queue. If the receive
        queue is full, messages wait at the peer. If the send queue is full, messages are dropped.
    """
    bound.setsockopt(zmq.MAXMSGSIZE, frame)
    bound.setsockopt(zmq.RCVHWM, messages)
    bound.setsockopt(zmq.SNDHWM, messages)


def check_host(who: str, endpoint: str, remedy: str, keys: Keys, *, allow_remote: bool) -> None:
    """Check that this process may bind an endpoint.

    Args:
      who: name of this process, for errors.
      endpoint: `host:port`.
      remedy: the option with which the user allows connections from other hosts.
      keys: keys of the job.
      allow_remote: True if the user allows connections from other hosts.

    Raises:
      ConfigError: the endpoint is not on loopback, and `allow_remote` is False or the job has
        neither a token nor keys.
    """
    if not is_loopback(split_endpoint(endpoint)[0]) and not allow_remote:
        needs = [remedy]
        if not keys.token and not keys.folder:
            needs.append(token.NEEDED)
        raise ConfigError(
            f"{who} is at {endpoint}, which is not on loopback, so other hosts can connect to it. "
            f"To allow this, set {' and '.join(needs)}"
        )
    keys.check(f"{who} is at {endpoint}", endpoint)


class Authenticator:
    """Thread that admits peers to the bound sockets of a context, until `close` is called.

    `user_of` returns the user name of the peer that sent a message.

    Args:
      context: the ZeroMQ context of the bound sockets.
      keys: keys of the job.
      users: maps each user name to the role that may connect under it. An empty role admits all
        roles.
    """

    def __init__(self, context: zmq.Context[Any], keys: Keys, users: Mapping[str, str]) -> None:
        self._context = context
        self._requests = context.socket(zmq.REP)
        self._requests.bind(ZAP)
        self._thread = threading.Thread(
            target=self._answer, args=(keys, users), name="dtrans authenticator", daemon=True
        )
        self._thread.start()

    def _answer(self, keys: Keys, users: Mapping[str, str]) -> None:
        with contextlib.closing(self._requests):
            self._requests.linger = 0
            # A request of ZeroMQ has several frames. A single frame from `close` ends the loop.
            while len(frames := self._requests.recv_multipart()) > 1:
                version, request, _, origin, _, mechanism, *credentials = frames
                user = None
                if _is_same_user(origin.decode(errors="replace")):
                    user = _find_user(keys, users, mechanism, credentials)
                status = b"400" if user is None else b"200"
                self._requests.send_multipart(
                    [version, request, status, b"", (user or "").encode(), b""]
                )
            # The next authenticator may bind the address before ZeroMQ, in the background, has
            # closed this socket. So the address is released here.
            self._requests.unbind(ZAP)

    def close(self) -> None:
        """Stop the thread. From then on, ZeroMQ refuses all new peers."""
        with contextlib.closing(self._context.socket(zmq.REQ)) as line:
            line.linger = 0
            line.connect(ZAP)
            line.send(b"")
            self._thread.join()


def _is_same_user(origin: str) -> bool:
    """Return True for a peer that connects by TCP, or runs as this operating system user.

    Args:
      origin: the peer's IP address, or `name:uid:gid:pid` for a peer on a Unix socket.
    """
    try:
        ipaddress.ip_address(origin.partition("%")[0])
    except ValueError:
        return origin.rsplit(":", 3)[1:2] == [str(os.geteuid())]
    return True


def _find_user(
    keys: Keys, users: Mapping[str, str], mechanism: bytes, credentials: list[bytes]
) -> str | None:
    """Return the user that these credentials authenticate; None if the credentials are wrong."""
    if mechanism == b"CURVE":
        try:
            return keys.users_by_key(users).get(credentials[0])
        except ConfigError as e:  # A file in the folder of keys cannot be read.
            log.error("refused all peers, because keys cannot be read: %s", e)
            return None
    if mechanism != b"PLAIN" or len(credentials) != 2:
        return None
    user, password = (x.decode(errors="replace") for x in credentials)
    if user in users and token.is_shown(password, keys.secret, user):
        return user
    return None


class Handshakes:
    """Observer of the connection attempts of a connecting socket.

    It notices if the listener refuses this process, and finds the reason for the error message.

    Args:
      connecting: the socket, before it is connected.
      keys: keys of the job.
      address: address to which the socket connects.

    Attributes:
      monitor: ZeroMQ socket from which the events are read. The caller polls it.
    """

    def __init__(self, connecting: zmq.Socket[Any], keys: Keys, address: str) -> None:
        self.monitor: zmq.Socket[Any] = connecting.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
        )
        self._socket, self._keys, self._address = connecting, keys, address
        self._broken = 0  # consecutive handshakes that failed without a reason

    def take(self) -> tuple[int, str]:
        """Read the next event.

        Returns:
          The event and a text. If the listener rejects this process's mechanism, key or password,
          the text is the reason, otherwise it is empty.
        """
        found = recv_monitor_message(self.monitor)
        event = int(found["event"])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken = 0
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and found["value"] == _OTHER_MECHANISM:
            return event, self._keys.other_mechanism(self._address)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return event, self._keys.other_keys()
        # If this process has a wrong public key of the server, the CURVE server closes the
        # connection without a reason. A tunnel to a server that has not started also closes the
        # connection, but sends no greeting. `offers_curve` distinguishes the two cases.
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._keys.encrypts(self._address):
            self._broken += 1
            if self._broken == BROKEN:
                self._broken = 0
                if offers_curve(self._address):
                    return event, self._keys.other_keys()
        return event, ""

    def close(self) -> None:
        """Stop reading events. Call this method before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)


def offers_curve(address: str) -> bool:
    """Return True if a ZeroMQ listener that encrypts with CURVE (RFC 37) is at an address.

    After repeated failed handshakes, this distinguishes wrong keys from a server that has not
    started.
    """
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        if address.startswith("ipc:"):
            line = stack.enter_context(socket.socket(socket.AF_UNIX))
            line.settimeout(GREETING)
            line.connect(address.removeprefix("ipc://"))
        else:
            where = split_endpoint(address.removeprefix("tcp://"))
            line = stack.enter_context(socket.create_connection(where, GREETING))
        line.sendall(greeting)
        return line.makefile("rb").read(len(greeting))[12:32].rstrip(b"\0") == b"CURVE"
    return False


def user_of(frame: zmq.Frame) -> str:
    """Return the user name of the peer that sent a frame."""
    return str(frame.get("User-Id"))


class PeerIds:
    """Record of a bound socket's peers, which reports the ends of their connections.

    ZeroMQ reports the end of a connection by its file descriptor, but messages carry the peer's id.
    This class maps one to the other.

    Args:
      bound: the socket, before it is bound.
      refused: function that is called for each refused connection.

    Attributes:
      monitor: ZeroMQ socket from which connection events are read. The caller polls it.
    """

    def __init__(self, bound: zmq.Socket[Any], refused: Callable[[], None]) -> None:
        events = _REFUSED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        where = f"inproc://monitor.{token.new_token()}"
        bound.monitor(where, events)
        self.monitor: zmq.Socket[Any] = bound.context.socket(zmq.PAIR)
        # The queue has no limit. With a limit, ZeroMQ's I/O thread would wait until this process
        # reads the events.
        self.monitor.rcvhwm = 0
        self.monitor.connect(where)
        self._bound, self._refused = bound, refused
        self._silent: set[int] = set()  # file descriptors of connections without a message yet
        self._ids: dict[int, bytes] = {}  # file descriptor of a connection -> id of the peer
        self._lost: list[bytes] = []

    @property
    def silent(self) -> int:
        """Number of peers that have connected but have not sent a message yet."""
        return len(self._silent)

    def add(self, address: zmq.Frame) -> bool:
        """Record the connection of a peer that has sent a message.

        Args:
          address: first frame of the message, which is the peer's id.

        Returns:
          True if the connection is open. If it has already ended, False: the caller must treat the
          peer as lost after this message.
        """
        # A file descriptor may be reused, so the events before the message are read first.
        self.read_monitor()
        connection, peer = int(address.get(zmq.SRCFD)), bytes(address.buffer)
        if connection in self._silent or connection in self._ids:
            self._silent.discard(connection)
            self._ids[connection] = peer
            return True
        # `take_lost` must not report the peer before this message, so the caller reports it.
        while peer in self._lost:
            self._lost.remove(peer)
        return False

    def is_connected(self, peer: bytes) -> bool:
        """Return True if the peer has an open connection."""
        return peer in self._ids.values()

    def read_monitor(self) -> None:
        """Handle all pending connection events."""
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            found = recv_monitor_message(self.monitor)
            event, connection = int(found["event"]), int(found["value"])
            if event & _REFUSED:
                self._refused()
            elif event == zmq.EVENT_ACCEPTED:
                self._silent.add(connection)
            elif event == zmq.EVENT_DISCONNECTED:
                self._silent.discard(connection)
                peer = self._ids.pop(connection, None)
                # A peer that has reconnected before its old connection ended is not lost.
                if peer is not None and not self.is_connected(peer):
                    self._lost.append(peer)

    def take_lost(self) -> Iterator[bytes]:
        """Yield the id of each peer that has disconnected since the last call."""
        while self._lost:
            yield self._lost.pop()

    def close(self) -> None:
        """Stop reading events. Call this method before the socket is closed."""
        self._bound.disable_monitor()
        self.monitor.close(linger=0)


# Default timeout of a wait for another process, in seconds; the same as Paddle's FLAGS_rpc_deadline
DEADLINE = 180.0
