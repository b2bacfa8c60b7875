"""ZeroMQ sockets with dtrans's defaults: authentication, size limits and heartbeats.

A bound socket admits peers with a key or the password of the job (`dtrans.run.net.keys`). On a Unix
socket it admits only processes of the same user. ZeroMQ reads no message before a peer is admitted,
so a stranger cannot send this process a large one. ZeroMQ asks about each connection on an internal
socket (ZAP, RFC 27), which a thread answers.
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
ZAP = "inproc://zeromq.zap.01"  # address of authentication requests (RFC 27)
# seconds without a heartbeat of the other process after which a connection ends
PATIENCE = 30.0
HANDSHAKE = 10.0  # seconds that a handshake may take
# handshakes in a row that the other end breaks off before this end asks for its mechanism
BROKEN = 3
GREETING = 1.0  # seconds that a greeting may take
CURVE_BYTES = 33  # bytes that CURVE adds to a frame: command name, nonce, MAC and flags


def tcp_address(endpoint: str) -> str:
    """Return an endpoint in ZeroMQ's notation."""
    host, port = split_endpoint(endpoint)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bound_address(endpoint: str) -> str:
    """Return the address to bind for an endpoint of this process, in ZeroMQ's notation.

    It is the endpoint, or every address of this host if the host's name resolves to loopback here.
    Debian resolves the name of the host to 127.0.1.1, and other hosts resolve it to an address that
    they reach.

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

    Unsent messages are dropped when it is closed, unless `close` gets a linger time.

    Args:
      patience: seconds without a heartbeat of the other process after which ZeroMQ ends a
        connection. `inf` suits a process that may leave its messages unread for long.
    """
    new = context.socket(kind)
    # ZeroMQ copies this option when a socket is bound, and uses the copy for peers that have gone.
    # With its default, `context.term()` would wait forever if a peer goes just before the socket is
    # closed.
    new.setsockopt(zmq.LINGER, 0)
    new.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
    new.setsockopt(zmq.SNDHWM, 0)  # the gradients of a step limit the queue
    new.setsockopt(zmq.RCVHWM, 0)  # for connecting sockets; `limit` is for bound ones
    new.setsockopt(zmq.IPV6, 1)
    new.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE * 1000))
    # several heartbeats within the timeout: after an outage, TCP sends lost ones again at
    # increasing intervals
    if math.isfinite(patience):
        new.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(patience * 100)))
        new.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(patience * 900)))
    if kind == zmq.ROUTER:
        # a peer that connects again keeps its id, also before its old connection has ended
        new.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if kind == zmq.DEALER:
        # one id for all connections of this socket
        new.setsockopt_string(zmq.ROUTING_ID, token.new_token())
    return new


def bind(unbound: zmq.Socket[Any], address: str, keys: Keys, reach: str = "") -> str:
    """Bind a socket whose peers an `Authenticator` admits.

    Args:
      address: `tcp://host:port`, with `*` for any free port, or `ipc://path`.
      reach: the address that peers connect to; by default `address`.

    Returns:
      The address with its port, in ZeroMQ's notation.
    """
    keys.guard(unbound, reach or address)
    with _room_for_curve(unbound, keys, reach or address):
        unbound.bind(address)
    return str(unbound.get_string(zmq.LAST_ENDPOINT))


def connect(unbound: zmq.Socket[Any], address: str, keys: Keys, user: str, role: str) -> None:
    """Connect a socket.

    Args:
      user: the name under which the other end knows this process.
      role: the role of this process, whose key it uses if roles have separate keys.
    """
    keys.show(unbound, address, user, role)
    with _room_for_curve(unbound, keys, address):
        unbound.connect(address)


@contextlib.contextmanager
def _room_for_curve(unbound: zmq.Socket[Any], keys: Keys, address: str) -> Iterator[None]:
    """Raise the limit of a frame by the bytes of encryption, while a socket is bound or connected.

    ZeroMQ copies the limit for each address.
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
      frame: bytes of the largest frame. ZeroMQ ends the connection of a peer that sends more.
      messages: largest number of messages in each queue of a peer. Further received messages wait
        at the peer. Further sent messages are dropped.
    """
    bound.setsockopt(zmq.MAXMSGSIZE, frame)
    bound.setsockopt(zmq.RCVHWM, messages)
    bound.setsockopt(zmq.SNDHWM, messages)


def check_host(who: str, endpoint: str, remedy: str, keys: Keys, *, allow_remote: bool) -> None:
    """Check that this process may bind an endpoint.

    Args:
      who: the subject of the error.
      remedy: the option with which users allow other hosts.

    Raises:
      ConfigError: other hosts reach the endpoint, and `allow_remote` is False or there is no token.
    """
    if not is_loopback(split_endpoint(endpoint)[0]) and not allow_remote:
        needs = [remedy] + [token.NEEDED] * (not keys.token and not keys.folder)
        raise ConfigError(
            f"{who} is at {endpoint}, which is not on loopback; to bind an address that other "
            f"hosts reach needs {' and '.join(needs)}"
        )
    keys.check(f"{who} is at {endpoint}", endpoint)


class Authenticator:
    """Thread that admits peers to the bound sockets of a context, until it is closed.

    `user_of` returns the user of a peer from its messages.

    Args:
      keys: the keys of the job.
      users: the users that are admitted. Only the role of a user may connect as it; every role may
        if it is empty.
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
            # `close` sends a single frame
            while len(frames := self._requests.recv_multipart()) > 1:
                version, request, _, origin, _, mechanism, *credentials = frames
                user = None
                if _is_same_user(origin.decode(errors="replace")):
                    user = _find_user(keys, users, mechanism, credentials)
                status = b"400" if user is None else b"200"
                self._requests.send_multipart(
                    [version, request, status, b"", (user or "").encode(), b""]
                )
            # now, and not when ZeroMQ closes the socket: the next authenticator binds this address
            self._requests.unbind(ZAP)

    def close(self) -> None:
        """Stop the thread. ZeroMQ admits no peers afterwards."""
        with contextlib.closing(self._context.socket(zmq.REQ)) as line:
            line.linger = 0
            line.connect(ZAP)
            line.send(b"")
            self._thread.join()


def _is_same_user(origin: str) -> bool:
    """Return False for a process of another user that connects by a Unix socket.

    Args:
      origin: ZeroMQ's description of the peer: its IP address, or `name:uid:gid:pid`.
    """
    try:
        ipaddress.ip_address(origin.partition("%")[0])
    except ValueError:
        return origin.rsplit(":", 3)[1:2] == [str(os.geteuid())]
    return True


def _find_user(
    keys: Keys, users: Mapping[str, str], mechanism: bytes, credentials: list[bytes]
) -> str | None:
    """Return the user with these credentials; None if they are wrong."""
    if mechanism == b"CURVE":
        try:
            return keys.users_by_key(users).get(credentials[0])
        except ConfigError as e:  # a file of the folder of keys cannot be read
            log.error("no peer is admitted: %s", e)
            return None
    user, password = (x.decode(errors="replace") for x in (*credentials, b"", b"")[:2])
    is_right = (
        mechanism == b"PLAIN" and user in users and token.is_shown(password, keys.secret, user)
    )
    return user if is_right else None


class Handshakes:
    """Events of a connecting socket: its connections begin, end, or are refused.

    Args:
      connecting: the socket, before it is connected.
      keys: the keys of the job.
      address: the address of the other end.

    Attributes:
      monitor: a socket to poll, which has the events.
    """

    def __init__(self, connecting: zmq.Socket[Any], keys: Keys, address: str) -> None:
        self.monitor: zmq.Socket[Any] = connecting.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
        )
        self._socket, self._keys, self._address = connecting, keys, address
        self._broken = 0  # handshakes in a row that the other end broke off

    def take(self) -> tuple[int, str]:
        """Take the next event.

        Returns:
          The event, and the reason if the other end refuses this process's key; else "".
        """
        found = recv_monitor_message(self.monitor)
        event = int(found["event"])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken = 0
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and found["value"] == _OTHER_MECHANISM:
            return event, self._keys.other_mechanism(self._address)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return event, self._keys.other_keys(self._address)
        # A CURVE server breaks off the handshake of a client with another server key, and gives no
        # reason. So does a tunnel without a server. Only a server sends a greeting, which
        # `offers_curve` waits for.
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._keys.encrypts(self._address):
            self._broken += 1
            if self._broken == BROKEN:
                self._broken = 0
                if offers_curve(self._address):
                    return event, self._keys.other_keys(self._address)
        return event, ""

    def close(self) -> None:
        """Stop the monitor, before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)


def offers_curve(address: str) -> bool:
    """Return True if the other end sends the greeting of a ZeroMQ socket with CURVE (RFC 37)."""
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
    """Return the user of the peer that sent a frame."""
    return str(frame.get("User-Id"))


class PeerIds:
    """Ids of the peers of a bound socket by connection, and the peers that have gone.

    Args:
      bound: the socket, before it is bound.
      refused: called for each connection that is refused.

    Attributes:
      monitor: a socket to poll, which has the events.
    """

    def __init__(self, bound: zmq.Socket[Any], refused: Callable[[], None]) -> None:
        self.monitor: zmq.Socket[Any] = bound.get_monitor_socket(
            _REFUSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._bound, self._refused = bound, refused
        self._ids: dict[int, bytes] = {}  # by file descriptor of the connection
        self._lost: list[bytes] = []

    def add(self, address: zmq.Frame) -> None:
        """Note the connection of a peer that has sent a message.

        Args:
          address: the first frame of the message, with the peer's id.
        """
        connection, peer = int(address.get(zmq.SRCFD)), bytes(address.buffer)
        if self._ids.get(connection) != peer:
            # the descriptor may be reused: first read the end of its earlier connection
            self.read_monitor()
            self._ids[connection] = peer

    def read_monitor(self) -> None:
        """Read all events of the monitor."""
        while self.monitor.poll(0):
            found = recv_monitor_message(self.monitor)
            if found["event"] & _REFUSED:
                self._refused()
            elif found["event"] == zmq.EVENT_DISCONNECTED and found["value"] in self._ids:
                peer = self._ids.pop(found["value"])
                # a peer may connect again before its old connection ends
                if peer not in self._ids.values():
                    self._lost.append(peer)

    def take_lost(self) -> Iterator[bytes]:
        """Yield the ids of peers whose connections have ended, each once."""
        while self._lost:
            yield self._lost.pop()

    def close(self) -> None:
        """Stop the monitor, before the socket is closed."""
        self._bound.disable_monitor()
        self.monitor.close(linger=0)


# seconds that a wait may take; the default of Paddle's FLAGS_rpc_deadline
DEADLINE = 180.0
