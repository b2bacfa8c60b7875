"""Admission of messages by their epoch.

An epoch is a part of a job between failures (`dtrans.protocol.epochs`).
"""

from __future__ import annotations

from dtrans.protocol import wire
from dtrans.protocol.epochs import Epoch
from dtrans.protocol.server.trainer_registry import Say


class EpochGate:
    """Filter of the messages that one server receives in one epoch, a job's part between failures.

    Args:
      epoch: the epoch.
      say: function that sends a message.
      every: number of steps between two cuts (snapshots).

    Attributes:
      number: number of the epoch.
      early: greetings of later epochs, by address. The server handles them in the next epoch.
      is_closed: True if the epoch is ending. The server then handles no more messages of the
        epoch, and stores all greetings.
      lost: names of the lost servers in the last announcement that the epoch is ending.
    """

    def __init__(self, epoch: Epoch, say: Say, every: int = 0) -> None:
        self.number = epoch.number
        self.is_closed = False
        self.lost: tuple[str, ...] = ()
        self.early: dict[bytes, wire.Message] = {}
        self._epoch, self._say, self._every = epoch, say, every

    @property
    def fields(self) -> dict[str, int]:
        """Header fields of a `welcome`: the epoch, its cut (snapshot), and steps between cuts."""
        fields = {"epoch": self.number, "every": self._every}
        if self._epoch.cut is not None:
            fields["cut"] = self._epoch.cut
        return fields

    def admits(self, address: bytes, message: wire.Message, *, is_known: bool) -> bool:
        """Return True if this epoch handles a message; otherwise drop, store or answer it.

        Args:
          address: address of the sender.
          message: the message.
          is_known: True if the sender has greeted the server in this epoch. Other senders have not
            left an old epoch yet, so their messages are dropped.
        """
        if message.op not in ("hello", "peer"):
            return is_known and not self.is_closed
        epoch = message.fields.get("epoch", 0)
        if epoch > self.number or self.is_closed:
            self.early[address] = message
            self._say(address, "waiting", reason="the servers to go back to a cut")
            return False
        if epoch < self.number and message.op == "hello":
            # A live trainer greets again. The greeting of a lost process must not be admitted: the
            # end of its connection would count as the failure of the process that replaces it.
            self._say(address, "rewind", epoch=self.number)
        return bool(epoch == self.number)

    def lose(self, address: bytes) -> None:
        """Drop the stored greeting of an address whose connection has ended."""
        self.early.pop(address, None)
