"""A trainer's connection to one server, which detects messages lost with a broken connection.

When a connection breaks, ZeroMQ reconnects, but loses the messages in transit. So both processes
count the messages that they send and receive. After a reconnection, the trainer's `hello` contains
its counts, and the server refuses the trainer if a message is missing: a step without it would be
wrong.

Until the server's welcome, the trainer sends `hello` on every new connection, because the first
connection may be to a server of the previous job. After `complete`, `hello` has the field
`leaves`. A Unix socket breaks only when its process ends, so the trainer does not wait for a
reconnection there.

Read `trainer_line` next: it sends requests and receives answers over this connection.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dtrans.errors import PeerError
from dtrans.protocol import token, wire
from dtrans.protocol.transport import RETRY


class ServerConnection:
    """Connection of one trainer to one server, from the trainer's side.

    Args:
      endpoint: `host:port` of the server.
      trainer: id of the trainer.
      trainers: number of trainers.
      session: random word that identifies this trainer process to all servers.
      sync_mode: True if the trainer makes synchronous steps.
      plan: parts of the fingerprint of the trainer's plan.
      secret: the job's token.
      say: function that sends the frames of one message.
      retry: seconds for which the trainer waits for a reconnection.

    Attributes:
      me: name of the trainer in messages, such as "trainer 0".
      welcomed: True if the server has welcomed the trainer.
      gone: True if the server has ended, or did not reconnect in time.
      before_it_speaks: called before each message is sent; it handles pending connection events.
    """

    def __init__(
        self,
        endpoint: str,
        trainer: int,
        trainers: int,
        *,
        session: str,
        sync_mode: bool,
        plan: Mapping[str, str],
        secret: str,
        say: Callable[[list[Any]], None],
        retry: float = RETRY,
    ) -> None:
        self.endpoint = endpoint
        self.me = f"trainer {trainer}"
        self.welcomed = False
        self.gone = False
        self.before_it_speaks: Callable[[], object] | None = None
        self._secret, self._say_now, self._retry = secret, say, retry
        self._lost_since: float | None = None
        self._sent = self._received = 0
        self._leaves = False  # True if `complete` was sent
        self._aborts = False  # True if `abort` was sent; then the trainer does not reconnect
        # arguments of `_say` for messages that wait for a reconnection
        self._pending: list[tuple[list[Any], str]] = []
        self._hello = {
            "trainer": trainer,
            "trainers": trainers,
            "session": session,
            "order": sys.byteorder,
            "sync_mode": sync_mode,
            "plan": {**plan},
            "nonce": token.new_token(),
        }

    # -- the connection --------------------------------------------------------------------------

    def opened(self, *, local: bool = False) -> None:
        """Reset the state for a new link to the server.

        Args:
          local: True if the link uses a Unix socket.
        """
        self.welcomed = self.gone = False
        self._lost_since, self._hello["local"] = None, local

    def connected(self) -> None:
        """Send `hello` on a new connection, unless the server has already answered one on it."""
        is_back = self._lost_since is not None
        if self.welcomed and not is_back:
            return
        counts = {"sent": self._sent, "heard": self._received, "back": is_back}
        if self._leaves:
            counts["leaves"] = True
        self._say_now([wire.header("hello", **self._hello, **counts)])

    def broken(self, now: float) -> None:
        """Handle the end of the connection. Messages in transit are lost."""
        if self.welcomed and (self._hello["local"] or self._aborts):
            self.gone = True
        elif self.welcomed and self._lost_since is None:
            self._lost_since = now

    @property
    def retries_until(self) -> float:
        """Time until which the trainer waits for a reconnection; infinity if it does not wait."""
        if self._lost_since is None or self.gone:
            return math.inf
        return self._lost_since + self._retry

    def give_up(self, now: float) -> None:
        """Set `gone` if the time for a reconnection has passed."""
        self.gone = self.gone or now >= self.retries_until

    # -- messages --------------------------------------------------------------------------------

    def _say(self, frames: list[Any], op: str = "") -> None:
        """Send a message, or keep it until the reconnection if the connection is broken.

        Args:
          op: kind of the message; may be omitted for messages that are counted.
        """
        if self.before_it_speaks is not None:
            self.before_it_speaks()
        if self._lost_since is not None:
            self._pending.append((frames, op))
            return
        self._sent += op not in wire.UNCOUNTED
        self._leaves |= op == "complete"
        self._say_now(frames)

    def tell(self, op: str, **fields: Any) -> None:
        """Send a message without arrays."""
        self._aborts |= op == "abort"
        self._say([wire.header(op, **fields)], op)

    def answer_goodbye(self) -> None:
        """Answer the server's `goodbye`, so that the server can end.

        A server does not wait for this answer on a Unix socket, where no message can be lost.
        """
        if not self._hello["local"]:
            self.tell("goodbye")

    def _count(self, message: wire.Message) -> bool:
        """Count a message from the server. Return True for the welcome after a reconnection.

        Raises:
          PeerError: the server refused the trainer, or does not have the job's token.
        """
        if message.op == "refuse":
            self.gone = bool(message.fields.get("last"))
            raise PeerError(f"pserver {self.endpoint} refused {self.me}: {message['reason']}")
        self._received += message.op not in wire.UNCOUNTED
        if message.op != "welcome" or not self.welcomed:
            return False
        if self._lost_since is not None:  # otherwise this answers a second `hello`
            self._check_proof(message.fields)
            self._lost_since = None
            pending, self._pending = self._pending, []
            for frames, op in pending:
                self._say(frames, op)
        return True

    # -- admission -------------------------------------------------------------------------------

    def admit(self, welcome: Mapping[str, Any]) -> str:
        """Accept a welcome if its sender has the job's token.

        Returns:
          The server's local address; empty if it has none.

        Raises:
          PeerError: the sender does not have the job's token.
        """
        self._check_proof(welcome)
        self.welcomed = True
        return str(welcome["local"])

    def _check_proof(self, welcome: Mapping[str, Any]) -> None:
        """Raise PeerError if the sender of a welcome does not have the job's token."""
        proof, purpose = welcome.get("proof"), f"welcome {self._hello['nonce']}"
        if not token.is_shown(proof, self._secret, purpose):
            raise PeerError(
                f"the process that welcomes {self.me} as pserver {self.endpoint} does not have the "
                "job's token"
            )

    def barred(self, why: str) -> PeerError:
        """Return the error for a server that rejects this trainer's key or password."""
        return PeerError(f"pserver {self.endpoint} does not admit {self.me}: {why}")
