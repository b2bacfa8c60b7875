"""Connection of a trainer to one server. No message is lost if the network breaks the connection.

When a connection breaks, ZeroMQ reconnects, but loses the messages in transit. The trainer then
sends `hello` with the number of messages that it has received. The server's `welcome` contains the
number of messages that the server has received. Each process repeats the messages that the other
process lacks (`dtrans.protocol.numbered_messages`).

Before the first welcome, the trainer sends `hello` on every new connection, because a server of the
previous job may still listen at the endpoint. If a connection breaks before the server has answered
`hello`, the trainer cannot know whether `hello` has arrived. So the trainer must reconnect in time,
or it fails. Without this limit, the server could already have dropped the trainer, and the trainer
would reach a server of the next job.

A Unix socket breaks only when the server's process ends, so the trainer stores no messages for it,
and waits for no reconnection.

Read `trainer_line` next: it sends requests and receives answers over this connection.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtrans.errors import PeerError
from dtrans.protocol import token, wire
from dtrans.protocol.generations import Generation, NewGeneration
from dtrans.protocol.numbered_messages import NumberedMessages
from dtrans.protocol.transport import RETRY


class ServerConnection:
    """Connection of one trainer to one server, from the trainer's side.

    Args:
      endpoint: `host:port` of the server.
      trainer: id of the trainer.
      trainers: number of trainers.
      session: random word that identifies this trainer process to all servers.
      sync_mode: True if the trainer makes synchronous steps.
      plan: digest (hash) of each part of the trainer's plan, by name.
      secret: the job's token.
      say: function that sends the frames of one message.
      retry: seconds that the trainer waits for a reconnection.
      generation: smallest number of the generation in which the trainer takes part.
      incarnation: number of the generation in which the trainer's process was started.

    Attributes:
      generation: the server's generation, after its welcome; None if the job has no snapshots.
      every: after the welcome, the number of steps between two snapshots; 0 if the job has no
        snapshots.
      count: after the welcome, the number of the trainer's steps before this connection.
      me: name of the trainer in error and log texts, such as "trainer 0".
      welcomed: True if the server has welcomed the trainer.
      gone: True if the server has ended, or did not reconnect in time.
      before_it_speaks: function that handles pending connection events. It is called before each
        message is sent.
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
        generation: int = 0,
        incarnation: int = 0,
    ) -> None:
        self.generation: Generation | None = None
        self.every = self.count = 0
        self.endpoint = endpoint
        self.me = f"trainer {trainer}"
        self.welcomed = False
        self.gone = False
        self.before_it_speaks: Callable[[], object] | None = None
        self._secret, self._say_now, self._retry = secret, say, retry
        self._is_lost = False  # True from a break until the server's welcome
        self._retry_until = math.inf
        self._is_answered = True  # False from `hello` until the server's next message
        self._is_local = False  # True if the connection is a Unix socket
        self._messages = NumberedMessages()
        self._connections = 0  # number of connections on which `hello` was sent
        # True if the trainer has sent `abort`, and therefore does not reconnect
        self._aborts = False
        # Messages without a number, to be sent after a reconnection
        self._pending: list[list[Any]] = []
        self._hello = {
            "trainer": trainer,
            "trainers": trainers,
            "session": session,
            "order": sys.byteorder,
            "sync_mode": sync_mode,
            "plan": {**plan},
            "nonce": token.new_token(),
            "generation": generation,
            "incarnation": incarnation,
        }

    # -- the connection --------------------------------------------------------------------------

    def opened(self, *, local: bool = False) -> None:
        """Start with a new link to the server, on which no `hello` was sent yet.

        Args:
          local: True if the link uses a Unix socket.
        """
        self.welcomed = self.gone = False
        self._is_lost, self._retry_until, self._is_local = False, math.inf, local
        self._is_answered = True

    def connected(self) -> None:
        """Handle a new network connection: introduce this trainer to the server by `hello`.

        This is needed until the server has accepted the trainer (`welcome`), and again after a
        break.
        """
        if self.welcomed and not self._is_lost:
            return
        # The limit `retry` does not apply to the welcome: a busy server may answer much later.
        self._retry_until, self._is_answered = math.inf, False
        self._connections += 1
        counts = {"heard": self._messages.received, "connection": self._connections}
        fields = {**self._hello, **counts, "back": self._is_lost, "local": self._is_local}
        self._say_now([wire.header("hello", **fields)])

    def broken(self, now: float) -> None:
        """Handle the end of the network connection; wait for a reconnection if one is possible.

        If none is possible, the server counts as ended (`gone`).

        Args:
          now: the current time in seconds.
        """
        if self.welcomed and (self._is_local or self._aborts):
            self.gone = True
        elif self._retry_until == math.inf and (self.welcomed or not self._is_answered):
            self._is_lost, self._retry_until = self.welcomed, now + self._retry

    @property
    def retries_until(self) -> float:
        """Time until which the trainer waits for a reconnection; infinity if it does not wait."""
        return math.inf if self.gone else self._retry_until

    def give_up(self, now: float) -> None:
        """Set `gone` if the trainer did not reconnect in time."""
        self.gone = self.gone or now >= self.retries_until

    # -- messages --------------------------------------------------------------------------------

    def _say(self, op: str, frames: Iterable[Any] = (), **fields: Any) -> None:
        """Send a message. If the connection is broken, store the message until the reconnection.

        Args:
          op: kind of the message.
          frames: the frames after the header.
          fields: the fields of the header.
        """
        if self.before_it_speaks is not None:
            self.before_it_speaks()
        is_numbered = op not in wire.UNCOUNTED
        stamp = self._messages.stamp() if is_numbered else {}
        message = [wire.header(op, **fields, **stamp), *frames]
        if is_numbered and not self._is_local:
            self._messages.store(message)
        elif self._is_lost:
            self._pending.append(message)
        if not self._is_lost:
            self._say_now(message)

    def tell(self, op: str, **fields: Any) -> None:
        """Send a message without arrays."""
        self._aborts |= op == "abort"
        self._say(op, **fields)

    def answer_goodbye(self) -> None:
        """Answer the server's `goodbye`, so that the server can end.

        On a Unix socket no message can be lost, so the server does not wait for this answer.
        """
        if not self._is_local:
            self.tell("goodbye")

    def receive(self, frames: Sequence[Any]) -> wire.Message | None:
        """Parse a message from the server, and drop it if it was received before.

        Returns:
          The message, or None. None stands for a repeated message, a message that follows a missing
          one, or a welcome after a reconnection.

        Raises:
          NewGeneration: the servers have gone back to a snapshot.
          PeerError: the server refused the trainer, or does not have the job's token.
          WireError: the message is malformed.
        """
        message = wire.parse(frames)
        self._is_answered = True
        if message.op == "rewind":
            raise NewGeneration(message["generation"])
        if message.op == "refuse":
            self.gone = bool(message.fields.get("last"))
            raise PeerError(f"pserver {self.endpoint} refused {self.me}: {message['reason']}")
        if not self._messages.take(message):
            return None
        if message.op != "welcome" or not self.welcomed:
            return message
        if self._is_lost:  # if the connection is not lost, this welcome answers a second `hello`
            self._check_proof(message.fields)
            self._resume()
        return None

    def _resume(self) -> None:
        """Repeat the messages that the server lacks, after a reconnection."""
        self._is_lost = False
        for message in (*self._messages.stored, *self._pending):
            self._say_now(message)
        self._pending.clear()

    # -- admission -------------------------------------------------------------------------------

    def admit(self, welcome: Mapping[str, Any]) -> str:
        """Accept the server's answer to `hello` (a welcome), if its sender has the job's token.

        Otherwise a process of another job could receive this trainer's gradients.

        Args:
          welcome: fields of the message.

        Returns:
          The server's local address; empty if it has none.

        Raises:
          PeerError: the sender does not have the job's token.
        """
        self._check_proof(welcome)
        self.welcomed = True
        if "generation" in welcome:
            self.generation = Generation(welcome["generation"], welcome.get("snapshot"))
            self.every = welcome.get("every", 0)
        self.count = welcome.get("count", welcome["step"])
        return str(welcome["local"])

    def _check_proof(self, welcome: Mapping[str, Any]) -> None:
        """Raise PeerError if the sender of a welcome does not have the job's token."""
        proof, purpose = welcome.get("proof"), f"welcome {self._hello['nonce']}"
        if not token.is_shown(proof, self._secret, purpose):
            raise PeerError(
                f"the process that welcomes {self.me} as pserver {self.endpoint} does not have the "
                "job's token; set the same token for all processes of the job"
            )

    def barred(self, why: str) -> PeerError:
        """Return the error for a server that rejects this trainer's key or password."""
        return PeerError(f"pserver {self.endpoint} does not admit {self.me}: {why}")
