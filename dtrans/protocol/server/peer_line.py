"""One server's connection to another: the greeting, and messages that wait for the welcome.

A connection that breaks loses the messages on their way, also if ZeroMQ makes it again. So each new
connection begins with a greeting that has the number of messages sent before. The other server
refuses it if it has received fewer. All other messages wait until the welcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtrans.errors import PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.server.server_peers import ServerPeer
from dtrans.protocol.transport import RETRY, Event


class PeerLine:
    """Connection of one server to another; marks in `peer` if that one is there.

    Args:
      me: endpoint of the server that sends.
      greeting: fields of its greeting (`ServerPeers.greeting`).
      secret: the job's token.
      say: sends the frames of one message.
      retry: seconds in which a broken connection may be made again.
    """

    def __init__(
        self,
        me: str,
        peer: ServerPeer,
        greeting: Mapping[str, Any],
        secret: str,
        say: Callable[[list[Any]], None],
        retry: float = RETRY,
    ) -> None:
        self.me = me
        self.peer = peer
        self._secret, self._nonce = secret, token.new_token()
        self._greeting = {**greeting, "nonce": self._nonce}
        self._retry, self._lost, self._sent = retry, False, 0
        self._lost_since = 0.0
        self._outbox: list[list[Any]] = []  # messages that wait for the welcome
        self._say = say

    def send(self, step: int, messages: Iterable[list[Any]]) -> None:
        """Send the vectors of one exchange. Raises PeerError if the other server is gone."""
        if self.peer.gone:
            raise PeerError(
                f"pserver {self.peer.endpoint} went away before pserver {self.me} came to step "
                f"{step + 1}"
            )
        self._outbox += messages
        self._empty()

    def connected(self) -> None:
        """Greet the other server on a new connection, also after a break."""
        if not self.peer.welcomed or self._lost:
            counts = {"sent": self._sent, "back": self._lost}
            self._say([wire.header("peer", **self._greeting, **counts)])

    def broken(self, now: float) -> None:
        """Note that an established connection has ended."""
        if self.peer.welcomed and not self._lost:
            self._lost, self._lost_since = True, now

    def look(self, now: float) -> None:
        """Mark the other server as gone if the connection was not made again in time."""
        self.peer.gone = self.peer.gone or (self._lost and now - self._lost_since > self._retry)

    def barred(self, why: str) -> PeerError:
        """Return the error for a server that does not let this one in."""
        return PeerError(f"pserver {self.peer.endpoint} does not let pserver {self.me} in: {why}")

    def take(self, event: Event, now: float) -> None:
        """Take an event of the link. Raises PeerError if the other server refuses this one."""
        if event.kind == "message":
            self.heard(event.frames)
        elif event.kind == "connected":
            self.connected()
        elif event.kind == "broken":
            self.broken(now)
        else:
            raise self.barred(event.reason)

    def heard(self, frames: Sequence[Any]) -> None:
        """Take a message. Raises PeerError for a refusal and for a malformed message."""
        peer = self.peer
        try:
            message = wire.parse(frames)
        except WireError as e:
            raise PeerError(f"pserver {peer.endpoint} answered pserver {self.me} with {e}") from e
        if message.op == "refuse":
            raise PeerError(
                f"pserver {peer.endpoint} refused pserver {self.me}: {message['reason']}"
            )
        if message.op == "welcome" and (self._lost or not peer.welcomed):
            if not token.is_shown(
                message.fields.get("proof"), self._secret, f"welcome {self._nonce}"
            ):
                raise PeerError(
                    f"what welcomes pserver {self.me} as pserver {peer.endpoint} has not the job's "
                    "token"
                )
            peer.welcomed, self._lost = True, False
        self._empty()

    def _empty(self) -> None:
        """Send waiting messages once the other server has welcomed this one: before, it would lose
        them."""
        while self.peer.welcomed and not self._lost and self._outbox:
            self._sent += 1
            self._say(self._outbox.pop(0))
