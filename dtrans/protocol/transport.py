"""Interface by which drivers of the protocol's machines send, wait and read the clock.

    link    a connection to a door; the transport makes it again where it ends
    door    an endpoint that others connect to; whoever connects has an address there

`dtrans.run.net.zmq_transport` implements it over ZeroMQ and `tools.simulate.network` over a virtual
network.

Messages of one connection keep their order. The last messages of a connection come before the event
of its end. A transport belongs to one thread at a time; only `wake` may be called from another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol


SERVER = "server"  # role name of servers, which every listening socket has
DOOR = "a role of parameter servers"  # user name of all roles at a server
LINGER = 5.0  # seconds that the last messages may take to leave
# seconds in which a connection that a network has broken may be made again, with nothing lost
RETRY = 5.0

EventKind = Literal["message", "connected", "broken", "barred", "lost", "refused"]


class Event(NamedTuple):
    """Something that has happened at a link or at a door.

    Attributes:
      kind: `message` at both. At a link: the connection is `connected` (each time that it is made),
        it is `broken`, or the other end has `barred` this one. At a door: an address has
        `connected`, its connection is `lost`, or a stranger was `refused`.
      source: the link or door.
      frames: of a message, without an address. Their memory lives as long as somebody holds them.
      address: of the sender, at a door.
      user: the user name of the sender of a message, at a door.
      reason: for which the other end has barred this one.
    """

    kind: EventKind
    source: object
    frames: Sequence[Any] = ()
    address: bytes = b""
    user: str = ""
    reason: str = ""


class Link(Protocol):
    """A connection to a door."""

    def send(self, frames: Sequence[Any], /) -> None:
        """Send a message. Its frames may not be written to before it has left.

        A message is dropped if the transport has given up the connection.
        """

    def changes(self) -> Iterator[Event]:
        """Take the events of the connection that have happened, ahead of messages before them."""

    def close(self, linger: float = 0.0) -> None:
        """Close it. Sent messages have `linger` seconds to leave."""


class Door(Protocol):
    """An endpoint of this process that others connect to.

    Attributes:
      endpoint: where others connect to it.
      local: where processes of the same host may connect instead; empty, if nowhere.
    """

    endpoint: str
    local: str

    def send(self, address: bytes, frames: Sequence[Any], /) -> None:
        """Send a message to an address; it is dropped if its connection has ended."""

    def close(self, linger: float = 0.0) -> None:
        """Close it, and free the endpoint. Sent messages have `linger` seconds to leave."""


class Transport(Protocol):
    """Links and doors of one process, and its clock."""

    def now(self) -> float:
        """Return the time in seconds."""

    def connect(self, endpoint: str, /, *, user: str, role: str, name: str = "") -> Link:
        """Open a link to a door.

        Args:
          endpoint: `host:port`, or where a door is `local`.
          user: the name as which the door knows this process.
          role: of this process; its key is shown where roles have separate keys.
          name: of this process in messages; the role by default.

        Raises:
          ConfigError: nothing protects messages to this endpoint.
        """

    def bind(
        self, endpoint: str, /, users: Mapping[str, str], *, frame: int, messages: int
    ) -> Door:
        """Open a door.

        Args:
          endpoint: `host:port`; port `*` stands for a free one.
          users: names as which others may connect, each with the role that may; an empty role
            stands for all.
          frame: bytes of the largest frame; the sender of a larger one is cut off.
          messages: messages of one address that may wait to be read, and to be sent.

        Raises:
          ConfigError: it cannot be bound.
        """

    def reaches(self, local: str, /) -> bool:
        """Return True if this process can connect to the local address of another one."""

    def poll(self, until: float, link: Link | None = None) -> Iterator[Event]:
        """Wait until something happens, or until a time; take what has happened.

        It ends early, with no event, after `wake`. Events that are not taken from the iterator
        come with the next poll.

        Args:
          until: the time; events that have happened are taken also if it has passed.
          link: the only one whose events are taken; all links and doors by default.
        """

    def wake(self) -> None:
        """End the poll that another thread is in, or the next one."""

    def close(self, linger: float = 0.0) -> None:
        """Close all links and doors. Sent messages have `linger` seconds to leave."""
