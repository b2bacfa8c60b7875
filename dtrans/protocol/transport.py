"""Interface through which the protocol's state machines send messages, wait and read the clock.

    link        this process's end of a connection to a listener of another process; when the
                connection breaks, the transport connects again
    listener    an endpoint of this process to which other processes connect; the listener assigns
                an address to each connected process

`dtrans.run.net.zmq_transport` implements the interface over ZeroMQ, and `tools.simulate.network`
implements it over a virtual network.

A connection keeps its messages in order. A link delivers the last messages of a connection before
the event that reports its end. A listener may report the end first. Only one thread at a time may
use a transport, but any thread may call `wake`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol


SERVER = "server"  # role whose key every listener uses
ROLE_USER = (
    "a role of parameter servers"  # user name with which trainers and servers connect to servers
)
LINGER = 5.0  # seconds for which a closed link or listener still sends its last messages
RETRY = 5.0  # seconds until a process whose connection broke counts as gone

EventKind = Literal["message", "connected", "broken", "barred", "lost", "refused"]


class Event(NamedTuple):
    """Event at a link or at a listener.

    Attributes:
      kind: the kind of the event. Both have `message`. Events of a link: `connected` (after each
        reconnection, too), `broken`, and `barred` if the listener rejects this process. Events of
        a listener: `connected` for the first connection of an address, `lost` if the connection of
        an address ended, and `refused` if the listener rejected a process.
      source: the link or the listener.
      frames: the frames of a message, without the address.
      address: at a listener, the address of the other process.
      user: at a listener, the user name of a message's sender.
      reason: the reason of a `barred` event.
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
        """Send a message. The caller may not write to `frames` until the message has been sent.

        The transport drops the message if it has given up the connection.
        """

    def changes(self) -> Iterator[Event]:
        """Yield the `connected`, `broken` and `barred` events, even if earlier messages are unread.

        The messages remain for the next `poll`.
        """

    def close(self, linger: float = 0.0) -> None:
        """Close the link, after at most `linger` seconds in which pending messages are sent."""


class Listener(Protocol):
    """Endpoint of this process to which other processes connect.

    Attributes:
      endpoint: the `host:port` to connect to.
      local: a local address, which only processes on the same host can use; empty if there is none.
    """

    endpoint: str
    local: str

    @property
    def silent(self) -> int:
        """Number of open connections on which no message has been received."""

    def send(self, address: bytes, frames: Sequence[Any], /) -> None:
        """Send a message to an address, or drop it if the connection has ended."""

    def close(self, linger: float = 0.0) -> None:
        """Close the listener and release its endpoint.

        Pending messages are sent for at most `linger` seconds.
        """


class Transport(Protocol):
    """Links and listeners of one process, and its clock."""

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
          users: user name to the role that may connect under it; an empty role admits all roles.
          frame: bytes of the largest accepted frame. The connection of a process that sends a
            larger frame is closed.
          messages: capacity of the receive queue, and of the send queue, of each address.

        Raises:
          ConfigError: the endpoint cannot be bound.
        """

    def reaches(self, local: str, /) -> bool:
        """Return True if this process can connect to this local address of another process."""

    def poll(self, until: float) -> Iterator[Event]:
        """Wait for an event, and yield the pending events.

        The wait ends without an event at the time `until`, and after `wake`. Events that the
        caller does not read from the iterator are returned by the next poll.

        Args:
          until: time at which the wait ends. If it has passed, pending events are still returned.
        """

    def wake(self) -> None:
        """Interrupt the poll of another thread, or the next poll if there is none now."""

    def close(self, linger: float = 0.0) -> None:
        """Close all links and listeners, after at most `linger` seconds for pending messages."""
