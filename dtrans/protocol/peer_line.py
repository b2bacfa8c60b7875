"""What one server says to another, and whether that one is there.

A connection that breaks has lost what was on its way, also when ZeroMQ makes it anew. So the
greeting, which is said on every connection that is made, tells how much was said before: the other
server refuses where it has heard less. Until the welcome everything else is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtrans.errors import PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.presence import RETRY
from dtrans.protocol.server_peers import ServerPeer
from dtrans.protocol.transport import Event


class PeerLine:
    """The line of one server to another; notes in `peer` whether it is there.

    Args:
      me: the endpoint of the server that speaks.
      greeting: what it says of itself (`ServerPeers.greeting`).
      secret: the job's token.
      say: sends the frames of one message.
      retry: seconds in which a connection that has ended may be made again.
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
        self._outbox: list[list[Any]] = []  # what was to be said before the welcome
        self._say = say

    def send(self, step: int, messages: Iterable[list[Any]]) -> None:
        """Send the vectors of one exchange. Raises PeerError where the other server is gone."""
        if self.peer.gone:
            raise PeerError(
                f"pserver {self.peer.endpoint} went away before pserver {self.me} came to step "
                f"{step + 1}"
            )
        self._outbox += messages
        self._empty()

    def connected(self) -> None:
        """Greet the server on a connection that was made; once more, where the one that was there
        has ended."""
        if not self.peer.welcomed or self._lost:
            self._say([wire.header("peer", **self._greeting, sent=self._sent)])

    def broken(self, now: float) -> None:
        """Note that an established connection has ended."""
        if self.peer.welcomed and not self._lost:
            self._lost, self._lost_since = True, now

    def look(self, now: float) -> None:
        """Take the other server for gone where the connection was not made again in time."""
        self.peer.gone = self.peer.gone or (self._lost and now - self._lost_since > self._retry)

    def barred(self, why: str) -> PeerError:
        """Return the error where the other server does not let this one in."""
        return PeerError(f"pserver {self.peer.endpoint} does not let pserver {self.me} in: {why}")

    def take(self, event: Event, now: float) -> None:
        """Take an event of the link. Raises PeerError where the other server refuses this one."""
        if event.kind == "message":
            self.heard(event.frames)
        elif event.kind == "connected":
            self.connected()
        elif event.kind == "broken":
            self.broken(now)
        else:
            raise self.barred(event.reason)

    def heard(self, frames: Sequence[Any]) -> None:
        """Take a message. Raises PeerError for a refusal, and for what is none of this protocol."""
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
        """Let go what is to be said, once there is who hears it: what another server took would be
        lost."""
        while self.peer.welcomed and not self._lost and self._outbox:
            self._sent += 1
            self._say(self._outbox.pop(0))
