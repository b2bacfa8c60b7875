"""Interface through which the protocol's state machines send messages, wait and read the clock.

    link        this process's end of a connection to a listener of another process; when the
                connection breaks, the transport connects again
    listener    an endpoint of this process to which other processes connect; the listener assigns
                an address to each connected process

`dtrans.run.net.zmq_transport` implements the interface over ZeroMQ, and `tools.simulate.network`
implements it over a virtual network.

A connection keeps its messages in order. A link delivers the last messages of a connection before
the event that reports the connection's end. A listener may report the end before the last
messages. Only one thread at a time may use a transport, but any thread may call `wake`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol


SERVER = "server"  # role whose key every listener uses
ROLE_USER = (
    "a role of parameter servers"  # user name with which trainers and servers connect to servers
)
LINGER = 5.0  # maximum number of seconds in which a closed link or listener sends its last messages
RETRY = 5.0  # seconds in which a process must reconnect after its connection has broken

EventKind = Literal["message", "connected", "broken", "barred", "lost", "refused"]


class Event(NamedTuple):
    """Something that happened to a connection: a message, or its start, end or refusal.

    A *link* is a connection of this process to another process. A *listener* accepts connections.

    Attributes:
      kind: the kind of the event. Links and listeners report a `message`. A link also reports
        `connected` after each connection and reconnection, `broken`, and `barred` if the listener
        rejects this process. A listener also reports the first connection of an address
        (`connected`), the end of a connection (`lost`), and each process that it rejects
        (`refused`).
      source: the link or the listener.
      frames: the frames of a message, without the address.
      address: at a listener, the address of the other process.
      user: at a listener, the user name of a message's sender.
      reason: for a `barred` event, the reason for the rejection.
    """

    kind: EventKind
    source: object
    frames: Sequence[Any] = ()
    address: bytes = b""
    user: str = ""
    reason: str = ""


class Link(Protocol):
    """Connection to a listener of another process."""

    def send(self, frames: Sequence[Any], /) -> None:
        """Send a message, or drop it if the transport has given up the connection.

        The caller must not write to the memory of `frames` until the message has been sent.
        """

    def changes(self) -> Iterator[Event]:
        """Yield the events about the connection itself: `connected`, `broken` and `barred`.

        A sender calls it before it sends, without waiting. The next `poll` yields the messages that
        arrived before these events.
        """

    def close(self, linger: float = 0.0) -> None:
        """Close the link, after at most `linger` seconds in which pending messages are sent."""


class Listener(Protocol):
    """Endpoint of this process to which other processes connect.

    Attributes:
      endpoint: the `host:port` to connect to.
      local: address of a Unix socket for processes on the same host; empty if there is none.
    """

    endpoint: str
    local: str

    @property
    def silent(self) -> int:
        """Number of processes that have connected but have not sent a message yet."""

    def send(self, address: bytes, frames: Sequence[Any], /) -> None:
        """Send a message to an address, or drop it if the connection has ended."""

    def close(self, linger: float = 0.0) -> None:
        """Close the listener and release its endpoint.

        Pending messages are sent for at most `linger` seconds.
        """


class Transport(Protocol):
    """Connections of one process, and its clock: ZeroMQ in real jobs, simulated in tests."""

    def now(self) -> float:
        """Return the time in seconds."""

    def connect(self, endpoint: str, /, *, user: str, role: str, name: str = "") -> Link:
        """Open a link to a listener.

        Args:
          endpoint: the listener's `host:port`, or its local address.
          user: user name under which this process connects.
          role: role of this process; it selects the key if roles have separate keys.
          name: name of this process in error messages; by default its role.

        Raises:
          ConfigError: the endpoint is on another host, and neither a token nor keys protect the
            messages.
        """

    def bind(
        self, endpoint: str, /, users: Mapping[str, str], *, frame: int, messages: int
    ) -> Listener:
        """Open a listener.

        Args:
          endpoint: `host:port`; the port `*` selects a free port.
          users: maps each user name to the role that may connect under it. An empty role admits all
            roles.
          frame: bytes of the largest accepted frame. The connection of a process that sends a
            larger frame is closed.
          messages: capacity of the receive queue, and of the send queue, of each address.

        Raises:
          ConfigError: the endpoint cannot be bound.
        """

    def reaches(self, local: str, /) -> bool:
        """Return True if this process can connect to a Unix socket, as it is on the same host.

        Args:
          local: the address of the socket, which another process has sent.
        """

    def poll(self, until: float) -> Iterator[Event]:
        """Wait for an event, and yield all pending events.

        The wait also ends at the time `until`, or when another thread calls `wake`. If the caller
        stops reading the iterator, the next poll yields the remaining events.

        Args:
          until: time at which the wait ends. If this time has passed, `poll` does not wait.
        """

    def wake(self) -> None:
        """Interrupt the poll of another thread. If no thread polls now, interrupt the next poll."""

    def close(self, linger: float = 0.0) -> None:
        """Close all links and listeners, after at most `linger` seconds for pending messages."""
