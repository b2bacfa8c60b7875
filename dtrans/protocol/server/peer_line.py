"""One server's connection to another: the greeting, and messages that wait for the welcome.

When a connection breaks, ZeroMQ reconnects, but loses the messages in transit. So each connection
begins with a greeting that contains the number of messages sent before. The other server refuses
this server if it has received fewer. All other messages are sent after the welcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtrans.errors import PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.server.server_peers import ServerPeer
from dtrans.protocol.transport import RETRY, Event


class PeerLine:
    """Connection of one server to another. It updates the state `peer` of the other server.

    Args:
      me: endpoint of this server.
      peer: state of the other server.
      greeting: fields of the greeting (`ServerPeers.greeting`).
      secret: the job's token.
      say: function that sends the frames of one message.
      retry: seconds for which this server waits for a reconnection.
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
        """Send partial results of one exchange.

        Args:
          step: number of the step, for the error.
          messages: frames of each message.

        Raises:
          PeerError: the other server has ended.
        """
        if self.peer.gone:
            raise PeerError(
                f"pserver {self.peer.endpoint} went away before pserver {self.me} completed step "
                f"{step}"
            )
        self._outbox += messages
        self._empty()

    def connected(self) -> None:
        """Send the greeting on a new connection, also after a reconnection."""
        if not self.peer.welcomed or self._lost:
            counts = {"sent": self._sent, "back": self._lost}
            self._say([wire.header("peer", **self._greeting, **counts)])

    def broken(self, now: float) -> None:
        """Handle the end of the connection. Messages in transit are lost."""
        if self.peer.welcomed and not self._lost:
            self._lost, self._lost_since = True, now

    def look(self, now: float) -> None:
        """Mark the other server as gone if the time for a reconnection has passed."""
        self.peer.gone = self.peer.gone or (self._lost and now - self._lost_since > self._retry)

    def barred(self, why: str) -> PeerError:
        """Return the error for a server that rejects this server's key or password."""
        return PeerError(f"pserver {self.peer.endpoint} does not admit pserver {self.me}: {why}")

    def take(self, event: Event, now: float) -> None:
        """Handle an event of the link.

        Raises:
          PeerError: the other server refused this one, or sent a malformed message.
        """
        if event.kind == "message":
            self.heard(event.frames)
        elif event.kind == "connected":
            self.connected()
        elif event.kind == "broken":
            self.broken(now)
        else:
            raise self.barred(event.reason)

    def heard(self, frames: Sequence[Any]) -> None:
        """Handle a message from the other server.

        Raises:
          PeerError: the other server refused this one, or the message is malformed.
        """
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
            proof = message.fields.get("proof")
            if not token.is_shown(proof, self._secret, f"welcome {self._nonce}"):
                raise PeerError(
                    f"the process that welcomes pserver {self.me} as pserver {peer.endpoint} does "
                    "not have the job's token"
                )
            peer.welcomed, self._lost = True, False
        self._empty()

    def _empty(self) -> None:
        """Send the waiting messages if the other server has welcomed this one.

        The other server ignores messages before its welcome.
        """
        while self.peer.welcomed and not self._lost and self._outbox:
            self._sent += 1
            self._say(self._outbox.pop(0))
