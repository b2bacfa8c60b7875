"""Sockets as this package makes them: on loopback unless told otherwise, with bounded queues of
what lingers.

A socket that is bound lets in who shows a key or the password of the job (`dtrans.run.net.keys`),
and by a Unix socket only processes of the same user. Before that only a short greeting is read: no
message of a stranger reaches this process, however long it is. ZeroMQ asks about each connection by
another socket, which a thread answers.
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
ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks (RFC 27)
PATIENCE = (
    30.0  # seconds without a sign of the other end's process after which a connection is given up
)
HANDSHAKE = 10.0  # seconds that one may take
# handshakes in a row that the other end breaks off, after which it is asked whether it would
# encrypt
BROKEN = 3
GREETING = 1.0  # seconds that somebody may take to greet
CURVE_BYTES = 33  # that CURVE adds to a frame: a name, a nonce, a code of authentication and flags


def tcp_address(endpoint: str) -> str:
    """An endpoint as ZeroMQ writes it."""
    host, port = split_endpoint(endpoint)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bound_address(endpoint: str) -> str:
    """Return what ZeroMQ binds for an endpoint of this process.

    That is the endpoint itself. It is every address of this host where the host's name is loopback
    on it: Debian resolves a host's own name to 127.0.1.1, while other hosts resolve it to an
    address that they reach.

    Example:
      >>> from dtrans.run.net.sockets import bound_address
      >>> bound_address("10.0.0.2:6174"), bound_address("127.0.0.1:6174")
      ('tcp://10.0.0.2:6174', 'tcp://127.0.0.1:6174')
    """
    host, port = split_endpoint(endpoint)
    is_own_name = not is_loopback(host) and is_loopback(resolve_host(host))
    return f"tcp://*:{port}" if is_own_name else tcp_address(endpoint)


def new_socket(context: zmq.Context[Any], kind: int, patience: float = PATIENCE) -> zmq.Socket[Any]:
    """Return a socket with the limits that all of ours have, for `bind` or `connect`.

    Who wants last words of it to go says so when closing it.

    Args:
      patience: seconds without a sign of the other end's process after which ZeroMQ ends a
        connection; `inf` for a process that may not read its messages for long.
    """
    made = context.socket(kind)
    # ZeroMQ keeps a copy of this from when a socket is bound, and goes by that copy for peers that
    # have gone: by its default, to end the context would wait for ever where one goes just before
    # the socket is closed
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
    made.setsockopt(zmq.SNDHWM, 0)  # a step's gradients are what bounds the queue
    # of what is sent to sockets that connect; `limit` is for those that are bound
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE * 1000))
    # many signs in the time that one may be late: TCP sends again, less and less often, what an
    # outage has lost
    if math.isfinite(patience):
        made.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(patience * 100)))
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(patience * 900)))
    if kind == zmq.ROUTER:
        # who comes again is who it was, also before the old connection has ended
        made.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if kind == zmq.DEALER:
        # of this socket, whatever becomes of its connections
        made.setsockopt_string(zmq.ROUTING_ID, token.new_token())
    return made


def bind(made: zmq.Socket[Any], address: str, keys: Keys, reach: str = "") -> str:
    """Bind a socket to which a `Doorkeeper` lets peers in. Returns the address with its port, as
    ZeroMQ names it.

    Args:
      address: `tcp://host:port`, where the port may be `*`, or `ipc://path`.
      reach: the address that the others connect to, if it is another.
    """
    keys.guard(made, reach or address)
    with _room_for_curve(made, keys, reach or address):
        made.bind(address)
    return str(made.get_string(zmq.LAST_ENDPOINT))


def connect(made: zmq.Socket[Any], address: str, keys: Keys, user: str, role: str) -> None:
    """Connect a socket.

    Args:
      user: as whom; the other end knows it by that.
      role: of this process, whose key it shows where roles have separate keys.
    """
    keys.show(made, address, user, role)
    with _room_for_curve(made, keys, address):
        made.connect(address)


@contextlib.contextmanager
def _room_for_curve(made: zmq.Socket[Any], keys: Keys, address: str) -> Iterator[None]:
    """Let encrypted frames be as much larger as encryption makes them. ZeroMQ keeps a copy of the
    limit per address."""
    limit = made.getsockopt(zmq.MAXMSGSIZE)
    assert isinstance(limit, int)
    made.setsockopt(zmq.MAXMSGSIZE, limit + CURVE_BYTES * keys.encrypts(address))
    try:
        yield
    finally:
        made.setsockopt(zmq.MAXMSGSIZE, limit)


def limit(bound: zmq.Socket[Any], frame: int, messages: int) -> None:
    """Let a socket, before it is bound, take nothing larger and nothing more than a plan has.

    Args:
      frame: bytes of the largest frame; whoever sends a larger one is cut off.
      messages: how many of one peer may wait to be read, before they wait at the peer; and how many
        to one peer may wait to be sent, before they are dropped.
    """
    bound.setsockopt(zmq.MAXMSGSIZE, frame)
    bound.setsockopt(zmq.RCVHWM, messages)
    bound.setsockopt(zmq.SNDHWM, messages)


def check_host(who: str, endpoint: str, remedy: str, keys: Keys, *, allow_remote: bool) -> None:
    """Raise ConfigError for an endpoint that may not be bound: beyond loopback that takes leave,
    and keys.

    Args:
      who: is to bind it, for the message.
      remedy: how users give leave.
    """
    if not is_loopback(split_endpoint(endpoint)[0]) and not allow_remote:
        needs = [remedy] + [token.NEEDED] * (not keys.token and not keys.folder)
        raise ConfigError(
            f"{who} is at {endpoint}, which is not on loopback; to bind an address that other "
            "hosts reach needs "
            f"{' and '.join(needs)}"
        )
    keys.check(f"{who} is at {endpoint}", endpoint)


class Doorkeeper:
    """Lets peers in to the bound sockets of a context, from now on until it is closed.

    Who has come in is known: `user_of` says as whom somebody connected who has sent a message.

    Args:
      keys: of the job.
      users: as whom they may come, each with the role that alone may; an empty one lets every role
        come.
    """

    def __init__(self, context: zmq.Context[Any], keys: Keys, users: Mapping[str, str]) -> None:
        self._context = context
        self._asked = context.socket(zmq.REP)
        self._asked.bind(ZAP)
        self._thread = threading.Thread(
            target=self._answer, args=(keys, users), name="dtrans doorkeeper", daemon=True
        )
        self._thread.start()

    def _answer(self, keys: Keys, users: Mapping[str, str]) -> None:
        with contextlib.closing(self._asked):
            self._asked.linger = 0
            while len(asked := self._asked.recv_multipart()) > 1:
                version, request, _, origin, _, mechanism, *shown = asked
                user = (
                    _user(keys, users, mechanism, shown)
                    if _may_come(origin.decode(errors="replace"))
                    else None
                )
                status = b"400" if user is None else b"200"
                self._asked.send_multipart(
                    [version, request, status, b"", (user or "").encode(), b""]
                )
            self._asked.unbind(ZAP)  # at once: another may be bound to it next

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.closing(self._context.socket(zmq.REQ)) as line:
            line.linger = 0
            line.connect(ZAP)
            line.send(b"")
            self._thread.join()


def _may_come(origin: str) -> bool:
    """Return False for who comes by a Unix socket and has another uid.

    Args:
      origin: what ZeroMQ says of where a connection comes from: the other host's number, or
        `name:uid:gid:pid`.
    """
    try:
        ipaddress.ip_address(origin.partition("%")[0])
    except ValueError:
        return origin.rsplit(":", 3)[1:2] == [str(os.geteuid())]
    return True


def _user(keys: Keys, users: Mapping[str, str], mechanism: bytes, shown: list[bytes]) -> str | None:
    """Return as whom somebody may come in, or None."""
    if mechanism == b"CURVE":
        try:
            return keys.users_by_key(users).get(shown[0])
        except ConfigError as e:  # a folder of keys whose files cannot be read
            log.error("nobody is let in: %s", e)
            return None
    user, password = (x.decode(errors="replace") for x in (*shown, b"", b"")[:2])
    is_right = (
        mechanism == b"PLAIN" and user in users and token.is_shown(password, keys.secret, user)
    )
    return user if is_right else None


class Handshakes:
    """Events of a connecting socket: made and ended connections, and how the other end refuses it.

    Args:
      made: the socket, before it is connected.
      keys, address: that it shows, and where it connects to.

    Attributes:
      monitor: to poll beside the socket.
    """

    def __init__(self, made: zmq.Socket[Any], keys: Keys, address: str) -> None:
        self.monitor: zmq.Socket[Any] = made.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
        )
        self._made, self._keys, self._address = made, keys, address
        self._broken = 0  # handshakes in a row that the other end broke off

    def take(self) -> tuple[int, str]:
        """Take the next event. Returns it, and what is wrong where the other end lets nobody in
        with such keys."""
        found = recv_monitor_message(self.monitor)
        event = int(found["event"])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken = 0
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and found["value"] == _OTHER_MECHANISM:
            return event, self._keys.other_mechanism(self._address)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return event, self._keys.other_keys(self._address)
        # CURVE says nothing to who takes the server for one with another key: it breaks off. So
        # does a tunnel with nobody behind it, and a process that is stopped says nothing either:
        # neither greets
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._keys.encrypts(self._address):
            self._broken += 1
            if self._broken == BROKEN:
                self._broken = 0
                if offers_curve(self._address):
                    return event, self._keys.other_keys(self._address)
        return event, ""

    def close(self) -> None:
        """Stop listening, before the socket is closed."""
        self._made.disable_monitor()
        self.monitor.close(linger=0)


def offers_curve(address: str) -> bool:
    """Return True if somebody at an address greets as a socket of ZeroMQ that encrypts (RFC 37)."""
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
    """As whom somebody connected who sent a frame."""
    return str(frame.get("User-Id"))


class Speakers:
    """Who speaks by which connection of a bound socket, and whose connections have ended.

    Args:
      bound: before it is bound.
      refused: is called for each connection that is not let in.

    Attributes:
      monitor: what to poll beside the socket.
    """

    def __init__(self, bound: zmq.Socket[Any], refused: Callable[[], None]) -> None:
        self.monitor: zmq.Socket[Any] = bound.get_monitor_socket(
            _REFUSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._bound, self._refused = bound, refused
        self._known: dict[int, bytes] = {}  # by the file descriptors of their connections
        self._lost: list[bytes] = []

    def know(self, address: zmq.Frame) -> None:
        """Note by which connection somebody speaks. One that has the number of another comes behind
        its end."""
        connection, speaker = int(address.get(zmq.SRCFD)), bytes(address.buffer)
        if self._known.get(connection) != speaker:
            self.listen()
            self._known[connection] = speaker

    def listen(self) -> None:
        """Take what the monitor has."""
        while self.monitor.poll(0):
            found = recv_monitor_message(self.monitor)
            if found["event"] & _REFUSED:
                self._refused()
            elif found["event"] == zmq.EVENT_DISCONNECTED and found["value"] in self._known:
                speaker = self._known.pop(found["value"])
                if (
                    speaker not in self._known.values()
                ):  # else it has come by another connection before
                    self._lost.append(speaker)

    def lost(self) -> Iterator[bytes]:
        """The addresses of those whose connections have ended, each once."""
        while self._lost:
            yield self._lost.pop()

    def close(self) -> None:
        """Stop listening, before the socket is closed."""
        self._bound.disable_monitor()
        self.monitor.close(linger=0)


# seconds; Paddle's FLAGS_rpc_deadline
DEADLINE = 180.0
