"""Numbers of the messages between two processes, so that a new connection resumes a broken one.

When a connection breaks, the messages in transit are lost. Each process therefore numbers the
messages that it sends (`number`), and reports how many messages it has received (`heard`). The
sender stores a message until the receiver has reported its receipt. After a reconnection, each
process repeats the messages that the other process lacks.

A receiver accepts messages in the order of their numbers. It drops a message that it has already
received. If a message is missing, the receiver drops the later messages, because the sender
repeats all of them. So each numbered message is processed exactly once and in order.

Source: go-back-N retransmission (Bertsekas and Gallager, Data Networks, section 2.4).
"""

from __future__ import annotations

import collections
from typing import Any

from dtrans.errors import WireError
from dtrans.protocol import wire


class NumberedMessages:
    """Numbers of the messages on one connection, with copies of those that may have to be repeated.

    Each of the two connected processes has such an object.

    Attributes:
      sent: number of messages sent.
      received: number of messages received.

    Example:
      >>> from dtrans.protocol.numbered_messages import NumberedMessages
      >>> from dtrans.protocol import wire
      >>> here, there = NumberedMessages(), NumberedMessages()
      >>> message = [wire.header("recv", step=1, **here.stamp())]
      >>> here.store(message)
      >>> there.take(wire.parse(message)), there.take(wire.parse(message))
      (True, False)
      >>> here.acknowledge(there.received)
      >>> here.stored
      []
    """

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._stored: collections.deque[tuple[int, list[Any]]] = collections.deque()

    @property
    def stored(self) -> list[list[Any]]:
        """Frames of each sent message, until the other process reports that it has arrived."""
        return [frames for _, frames in self._stored]

    def stamp(self) -> dict[str, int]:
        """Assign a number to the next message; return its header fields `number` and `heard`.

        The field `heard` tells the other process how many of its messages have arrived.
        """
        self.sent += 1
        return {"number": self.sent, "heard": self.received}

    def store(self, frames: list[Any]) -> None:
        """Store the message with the last number, until the other process reports its receipt."""
        self._stored.append((self.sent, frames))

    def take(self, message: wire.Message) -> bool:
        """Count a received message; return False for a repeated message, which must be dropped.

        A message that follows a missing one is also dropped, because the sender repeats both.
        Messages without a number are neither counted nor dropped.
        """
        self.acknowledge(message.fields.get("heard", 0))
        number = message.fields.get("number")
        if number is None:
            return True
        is_next: bool = number == self.received + 1
        self.received += is_next
        return is_next

    def acknowledge(self, heard: int) -> None:
        """Release the first `heard` messages, which the other process has received."""
        while self._stored and self._stored[0][0] <= heard:
            self._stored.popleft()

    def check_resumable(self, heard: int) -> None:
        """Raise WireError if a broken connection cannot be resumed without losing messages.

        Args:
          heard: number of messages of this process that the other process has received.

        Raises:
          WireError: `heard` is more than the number of sent messages, or the other process lacks a
            message that this process has already released.
        """
        released = self.sent - len(self._stored)
        if not released <= heard <= self.sent:
            raise WireError(
                f"the connection cannot be resumed after message {heard}: this process has sent "
                f"{self.sent} messages, and has already deleted the first {released}"
            )

    def clear(self) -> None:
        """Release all stored messages."""
        self._stored.clear()
