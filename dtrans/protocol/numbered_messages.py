"""Numbers of the messages on one connection, so that a new connection resumes a broken one.

A network that breaks a connection loses the messages in transit. Each end therefore numbers the
messages that it sends (`number`), and reports how many it has received (`heard`). It stores a sent
message until the other end has reported its receipt. After a break, each end repeats the messages
that the other end lacks.

A receiver accepts messages in the order of their numbers. It drops a message that it has already
received. It also drops a message that follows a gap, because the sender repeats both. So every
numbered message is processed exactly once and in order, and operations need no rule for outages.

Source: go-back-N retransmission (Bertsekas and Gallager, Data Networks, section 2.4).
"""

from __future__ import annotations

import collections
from typing import Any

from dtrans.errors import WireError
from dtrans.protocol import wire


class NumberedMessages:
    """Messages that one end of a connection sends and receives.

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
        """The frames of each message that the other end may lack."""
        return [frames for _, frames in self._stored]

    def stamp(self) -> dict[str, int]:
        """Return the header fields of the next message, and count it."""
        self.sent += 1
        return {"number": self.sent, "heard": self.received}

    def store(self, frames: list[Any]) -> None:
        """Store the message with the last number until its receipt is reported."""
        self._stored.append((self.sent, frames))

    def take(self, message: wire.Message) -> bool:
        """Count a received message; return False if the receiver must drop it.

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
        """Release the first `heard` messages, which the other end has received."""
        while self._stored and self._stored[0][0] <= heard:
            self._stored.popleft()

    def check_resumable(self, heard: int) -> None:
        """Check that the messages after the first `heard` ones are stored.

        Raises:
          WireError: the other end has received more than was sent, or lacks a released message.
        """
        released = self.sent - len(self._stored)
        if not released <= heard <= self.sent:
            raise WireError(
                f"a connection cannot be resumed after {heard} messages: {self.sent} were sent, "
                f"and {released} of them are released"
            )

    def clear(self) -> None:
        """Release all messages, because the other end does not need them."""
        self._stored.clear()
