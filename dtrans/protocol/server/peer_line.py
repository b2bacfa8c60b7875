"""One server's connection to another server: its greeting, and its partial results.

After each connection or reconnection, this server sends a greeting. The other server's welcome
contains the number of messages that it has received. This server then sends all later messages
(`dtrans.protocol.numbered_messages`). So a broken connection loses no message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtrans.errors import LostPeerError, PeerError, WireError
from dtrans.protocol import token, wire
from dtrans.protocol.server.server_peers import ServerPeer
from dtrans.protocol.transport import RETRY, Event


class PeerLine:
    """Connection of one server to another server. It updates `peer`, the other server's state.

    Args:
      me: endpoint of this server.
      peer: state of the other server.
      greeting: fields of the greeting (`ServerPeers.greeting`).
      secret: the job's token.
      say: function that sends the frames of one message.
      retry: seconds that this server waits for a reconnection.
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
        self._retry, self._lost = retry, False
        self._retry_until = math.inf
        # step of the newest messages, and the number of messages sent before that step
        self._step, self._before = 0, 0
        self._say = say

    def send(self, step: int, messages: Iterable[list[Any]]) -> None:
        """Send partial results of one exchange, or store them until the other server's welcome.

        Args:
          step: number of the step. When it changes, the messages of earlier steps are released.
          messages: frames of each message.

        Raises:
          LostPeerError: the other server has ended.
        """
        if self.peer.gone:
            raise LostPeerError(
                f"pserver {self.peer.endpoint} went away before pserver {self.me} completed step "
                f"{step}",
                f"pserver {self.peer.endpoint}",
            )
        if step != self._step:
            # A trainer begins a step after all servers have answered the previous one. So the other
            # server has completed the previous step, and lacks no message of earlier steps.
            self.peer.messages.acknowledge(self._before)
            self._step, self._before = step, self.peer.messages.sent
        for frames in messages:
            self.peer.messages.store(frames)
            if self.peer.welcomed and not self._lost:
                self._say(frames)

    def connected(self) -> None:
        """Handle a new connection: send a greeting.

        No greeting is sent if the other server has already answered one, and the connection has not
        broken since.
        """
        if not self.peer.welcomed or self._lost:
            # The other server may be busy, and answer later than a reconnection may take.
            self._retry_until = math.inf
            self._say([wire.header("peer", **self._greeting, back=self._lost)])

    def broken(self, now: float) -> None:
        """Handle a broken connection: start the wait of `retry` seconds for a reconnection."""
        if self.peer.welcomed and self._retry_until == math.inf:
            self._lost, self._retry_until = True, now + self._retry

    def look(self, now: float) -> None:
        """Mark the other server as gone, or as having left, if it did not reconnect in time.

        `gone`: this server's connection broke after the welcome. Before the welcome, the other
        server may only be busy. `has_left`: the other server's connection to this server ended.
        """
        self.peer.gone = self.peer.gone or now > self._retry_until
        if self.peer.lost_at is not None:
            self.peer.has_left = now > self.peer.lost_at + self._retry

    def barred(self, why: str) -> PeerError:
        """Return the error to raise if the other server rejects this server's key or password."""
        return PeerError(f"pserver {self.peer.endpoint} does not admit pserver {self.me}: {why}")

    def take(self, event: Event, now: float) -> None:
        """Handle an event of the link.

        Raises:
          PeerError: the other server refused this server, or sent a malformed message.
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
          PeerError: the other server refused this server, or the message is malformed.
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
                    "not have the job's token; set the same token for all processes of the job"
                )
            peer.welcomed, self._lost = True, False
            self._send_missing(message.fields.get("heard", 0))
        if message.op == "replicated":
            peer.replicated = max(peer.replicated, message["count"])

    def _send_missing(self, heard: int) -> None:
        """Send the messages after the first `heard` ones, which the other server has received."""
        try:
            self.peer.messages.check_resumable(heard)
        except WireError as e:
            raise PeerError(f"pserver {self.peer.endpoint}: {e}") from e
        self.peer.messages.acknowledge(heard)
        for frames in self.peer.messages.stored:
            self._say(frames)
