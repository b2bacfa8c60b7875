"""State of one trainer at a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtrans.protocol import wire
from dtrans.protocol.numbered_messages import NumberedMessages


@dataclasses.dataclass
class Trainer:
    """State of one trainer at a server.

    Attributes:
      session: random word that identifies the trainer's process.
      address: address from which it sends.
      wants: names of the blocks that it receives with each answer to `recv`.
      lost: time at which its connection ended; None while it is connected.
      local: True if it is connected by a Unix socket.
      connection: number of its connection, from its last `hello`.
      messages: numbers of the messages to and from it, and stored messages to it.
      heard_at: time of its last message.
      received: number of bytes from it.
      sent: number of bytes to it.
      done: True if it has left the job, by `complete` or by a failure.
      left_at: number of the server's updates when it left by `complete`.
      failed: True if it has left without `complete`.
      parted: True if it has left, and does not need `goodbye` any more.
    """

    session: str
    address: bytes
    wants: tuple[str, ...] = ()
    lost: float | None = None
    local: bool = False
    connection: int = 0
    messages: NumberedMessages = dataclasses.field(default_factory=NumberedMessages)
    heard_at: float = 0.0
    received: int = 0
    sent: int = 0
    done: bool = False
    left_at: int = 0
    failed: bool = False
    parted: bool = False

    @classmethod
    def from_hello(cls, address: bytes, message: wire.Message) -> Trainer:
        """Return the state of a trainer after its first `hello`."""
        return cls(
            message["session"],
            address,
            local=message.fields.get("local", False),
            connection=message.fields.get("connection", 0),
        )

    def move(self, address: bytes, message: wire.Message) -> None:
        """Continue on the new connection of a later `hello`.

        The trainer has reconnected, or moves from TCP to the Unix socket.

        Raises:
          WireError: the server has already released a message that the trainer lacks.
        """
        heard = message.fields.get("heard", 0)
        self.messages.check_resumable(heard)
        self.messages.acknowledge(heard)
        self.address, self.lost = address, None
        self.local = message.fields.get("local", False)
        self.connection = message.fields.get("connection", 0)

    def framed(
        self, op: str, blocks: Sequence[tuple[str, Any]], fields: Mapping[str, Any]
    ) -> Iterator[list[Any]]:
        """Count and store the messages to the trainer; yield the frames of each message."""
        is_numbered = op not in wire.UNCOUNTED
        stamp = self.messages.stamp if is_numbered else dict
        for frames in wire.framed(op, blocks, stamp, **fields):
            if is_numbered and not self.local:
                self.messages.store(frames)
            yield frames
        if op == "welcome":
            yield from self.messages.stored
