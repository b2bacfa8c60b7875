"""A trainer's connection to one server, which may break and be made again with nothing lost.

ZeroMQ makes a broken connection again, and loses the messages that were on their way. So both ends
count the messages that they send and receive. `hello` tells the server these counts on each new
connection. The server refuses it if a message is missing, since a step without it would be wrong.

Before the server's welcome, `hello` alone was sent: the trainer
sends it on every new connection, because the first may be to a server of the job before. After
`complete`, the field `leaves` of `hello` repeats it. A Unix socket breaks only with its process, so
the trainer does not wait for it.

Read `trainer_line` next: requests and answers over this connection.
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
    """One trainer's end of a connection to one server.

    Args:
      endpoint: of the server, `host:port`.
      trainer, trainers: the trainer's id, and the number of trainers.
      session: a random word of this trainer, the same for all servers.
      sync_mode: the trainer makes synchronous steps.
      plan: the parts of the fingerprint of its plan.
      secret: the job's token.
      say: sends the frames of one message.
      retry: seconds in which a broken connection may be made again.

    Attributes:
      me: name of the trainer in messages.
      welcomed: the server has welcomed the trainer on this connection.
      gone: the server has ended, or the connection is lost for good.
      before_it_speaks: called before each message; it takes pending events of the connection.
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
        self._leaves = False  # `complete` was sent
        self._aborts = False  # `abort` was sent, and the trainer only waits until it is heard
        # messages for the next connection, as arguments of `_say`
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
        """Begin again on another connection; a `local` one is a Unix socket."""
        self.welcomed = self.gone = False
        self._lost_since, self._hello["local"] = None, local

    def connected(self) -> None:
        """Send `hello` on a new connection, unless the server has welcomed this trainer on it."""
        if not self.welcomed or self._lost_since is not None:
            is_back = self._lost_since is not None
            counts = {"sent": self._sent, "heard": self._received, "back": is_back}
            leaves = {"leaves": True} if self._leaves else {}
            self._say_now([wire.header("hello", **self._hello, **counts, **leaves)])

    def broken(self, now: float) -> None:
        """Note that the connection has ended; messages on their way are lost."""
        if self.welcomed and (self._hello["local"] or self._aborts):
            self.gone = True
        elif self.welcomed and self._lost_since is None:
            self._lost_since = now

    @property
    def retries_until(self) -> float:
        """The time at which a broken connection is given up."""
        return math.inf if self._lost_since is None or self.gone else self._lost_since + self._retry

    def give_up(self, now: float) -> None:
        """Mark the server as gone if a broken connection was not made again in time."""
        self.gone = self.gone or now >= self.retries_until

    # -- messages --------------------------------------------------------------------------------

    def _say(self, frames: list[Any], op: str = "") -> None:
        """Send a message, now or on the next connection.

        Args:
          op: of the message, if it may be one that is not counted.
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
        """Send a message that needs no answer."""
        self._aborts |= op == "abort"
        self._say([wire.header(op, **fields)], op)

    def answer_goodbye(self) -> None:
        """Let the server end. By a Unix socket no message is lost: there it has ended already."""
        if not self._hello["local"]:
            self.tell("goodbye")

    def _count(self, message: wire.Message) -> bool:
        """Count a message of the server. Return True if it concerns the connection alone.

        Raises:
          PeerError: the server refuses the trainer, or does not have the job's token.
        """
        if message.op == "refuse":
            self.gone = bool(message.fields.get("last"))
            raise PeerError(f"pserver {self.endpoint} refused {self.me}: {message['reason']}")
        self._received += message.op not in wire.UNCOUNTED
        if message.op != "welcome" or not self.welcomed:
            return False
        if self._lost_since is not None:  # else `hello` was sent twice
            self._check_proof(message.fields)
            self._lost_since = None
            pending, self._pending = self._pending, []
            for frames, op in pending:
                self._say(frames, op)
        return True

    # -- admission -------------------------------------------------------------------------------

    def admit(self, welcome: Mapping[str, Any]) -> str:
        """Take the fields of a welcome; return the server's local address, or an empty text.

        Raises:
          PeerError: the server does not have the job's token.
        """
        self._check_proof(welcome)
        self.welcomed = True
        return str(welcome["local"])

    def _check_proof(self, welcome: Mapping[str, Any]) -> None:
        """Raise PeerError if the sender of a welcome does not have the job's token."""
        proof, purpose = welcome.get("proof"), f"welcome {self._hello['nonce']}"
        if not token.is_shown(proof, self._secret, purpose):
            raise PeerError(
                f"what welcomes {self.me} as pserver {self.endpoint} has not the job's token"
            )

    def barred(self, why: str) -> PeerError:
        """Return the error for a server that does not let this trainer in."""
        return PeerError(f"pserver {self.endpoint} does not let {self.me} in: {why}")
