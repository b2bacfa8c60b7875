"""Sockets as this package makes them: on loopback unless told otherwise, with bounded queues of what lingers.

A socket that is bound lets in who shows the password that is made of the job's token (`dtrans.protocol.token`), by the
mechanism PLAIN of ZeroMQ. Before that nothing is read but a short greeting, so that no message of a stranger reaches
this process, however long it is. ZeroMQ asks about each connection by a socket of its own, which a thread answers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dtrans.endpoints import is_loopback, split_endpoint
from dtrans.errors import ConfigError
from dtrans.protocol import token, wire


LINGER = 5.0  # seconds that closing may take to hand over the last words
ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks (RFC 27)
PATIENCE = 30.0  # seconds without a sign of the other end's process after which a connection is given up
HANDSHAKE = 10.0  # seconds that one may take


def tcp_address(endpoint: str) -> str:
    """An endpoint as ZeroMQ writes it."""
    host, port = split_endpoint(endpoint)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def new_socket(
    context: zmq.Context[Any], kind: int, user: str = "", secret: str = "", patience: float = PATIENCE
) -> zmq.Socket[Any]:
    """A socket with the limits that all of ours have. Who wants last words of it to go says so when closing it.

    Args:
      user: as whom it connects; without one it is to be bound, and a `Doorkeeper` says who may connect to it.
      secret: the token that it shows something of.
      patience: seconds without a sign of the other end's process after which ZeroMQ ends a connection.
    """
    made = context.socket(kind)
    # ZeroMQ keeps a copy of this from when a socket is bound, and goes by that copy for peers that have gone: by its
    # default, to end the context would wait for ever where one goes just before the socket is closed
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
    made.setsockopt(zmq.SNDHWM, 0)  # a step's gradients are what bounds the queue
    made.setsockopt(zmq.RCVHWM, 0)  # of what is sent to sockets that connect; `limit` is for those that are bound
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE * 1000))
    # many signs in the time that one may be late: TCP sends again, less and less often, what an outage has lost
    made.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(patience * 100)))
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(patience * 900)))
    if kind == zmq.ROUTER:
        # who comes again is who it was, also before the old connection has ended
        made.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if user and kind == zmq.DEALER:
        made.setsockopt_string(zmq.ROUTING_ID, token.new_token())  # of this socket, whatever becomes of its connections
    if user:
        made.setsockopt_string(zmq.PLAIN_USERNAME, user)
        made.setsockopt_string(zmq.PLAIN_PASSWORD, token.shown(secret, user))
    else:
        made.setsockopt(zmq.PLAIN_SERVER, 1)
        made.setsockopt_string(zmq.ZAP_DOMAIN, "dtrans")
    return made


def limit(bound: zmq.Socket[Any], frame: int, messages: int) -> None:
    """Let a socket, before it is bound, take nothing larger and nothing more than a plan has.

    Args:
      frame: bytes of the largest frame; whoever sends a larger one is cut off.
      messages: how many of one peer may wait to be read, before they wait at the peer; and how many to one peer may
        wait to be sent, before they are dropped.
    """
    bound.setsockopt(zmq.MAXMSGSIZE, frame)
    bound.setsockopt(zmq.RCVHWM, messages)
    bound.setsockopt(zmq.SNDHWM, messages)


def check_host(who: str, endpoint: str, remedy: str, *, allow_remote: bool) -> None:
    """Raise ConfigError for an endpoint that may not be bound: beyond loopback that takes leave, and a token.

    Args:
      who: is to bind it, for the message.
      remedy: how users give leave.
    """
    if is_loopback(split_endpoint(endpoint)[0]):
        return
    needs = [remedy] * (not allow_remote) + [token.NEEDED] * (not token.job_token())
    if needs:
        raise ConfigError(
            f"{who} is at {endpoint}, which is not on loopback; nothing that is sent is encrypted, so binding it needs "
            f"{' and '.join(needs)}"
        )


class Doorkeeper:
    """Lets peers in to the bound sockets of a context, from now on until it is closed.

    Who has come in is known: `user_of` says as whom somebody connected who has sent a message.

    Args:
      secret: the token of which they must show something.
      users: as whom they may come; each shows something else.
    """

    def __init__(self, context: zmq.Context[Any], secret: str, users: Collection[str]) -> None:
        self._context = context
        self._asked = context.socket(zmq.REP)
        self._asked.bind(ZAP)
        self._thread = threading.Thread(
            target=self._answer, args=(secret, users), name="dtrans doorkeeper", daemon=True
        )
        self._thread.start()

    def _answer(self, secret: str, users: Collection[str]) -> None:
        with contextlib.closing(self._asked):
            self._asked.linger = 0
            while len(asked := self._asked.recv_multipart()) > 1:
                version, request, _, _, _, mechanism, *shown = asked
                user, password = (x.decode(errors="replace") for x in (*shown, b"", b"")[:2])
                ok = mechanism == b"PLAIN" and user in users and token.is_shown(password, secret, user)
                self._asked.send_multipart([version, request, b"200" if ok else b"400", b"", user.encode(), b""])
            self._asked.unbind(ZAP)  # at once: another may be bound to it next

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.closing(self._context.socket(zmq.REQ)) as line:
            line.linger = 0
            line.connect(ZAP)
            line.send(b"")
            self._thread.join()


def user_of(frame: zmq.Frame) -> str:
    """As whom somebody connected who sent a frame."""
    return str(frame.get("User-Id"))


_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Speakers:
    """Who speaks by which connection of a bound socket, and whose connections have ended.

    Args:
      bound: before it is bound.
      refused: is called for each connection that is not let in.

    Attributes:
      monitor: what to poll beside the socket.
    """

    def __init__(self, bound: zmq.Socket[Any], refused: Callable[[], None]) -> None:
        self.monitor: zmq.Socket[Any] = bound.get_monitor_socket(_REFUSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._bound, self._refused = bound, refused
        self._known: dict[int, bytes] = {}  # by the file descriptors of their connections
        self._lost: list[bytes] = []

    def know(self, address: zmq.Frame) -> None:
        """Note by which connection somebody speaks. One that has the number of another comes behind its end."""
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
                if speaker not in self._known.values():  # else it has come by another connection before
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
