"""Admission of messages by their generation.

A generation is a part of a job between failures (`dtrans.protocol.generations`).
"""

from __future__ import annotations

from dtrans.protocol import wire
from dtrans.protocol.generations import Generation
from dtrans.protocol.server.trainer_registry import Say


class GenerationGate:
    """Filter of the messages that a server receives between two failures of the job (a generation).

    Args:
      generation: the generation.
      say: function that sends a message.
      every: number of steps between two snapshots.

    Attributes:
      number: number of the generation.
      early: greetings of later generations, by address. The server handles them in the next
        generation.
      is_closed: True if the generation is ending. The server then handles no more messages of the
        generation, and stores all greetings.
      lost: names of the lost servers in the last announcement that the generation is ending.
    """

    def __init__(self, generation: Generation, say: Say, every: int = 0) -> None:
        self.number = generation.number
        self.is_closed = False
        self.lost: tuple[str, ...] = ()
        self.early: dict[bytes, wire.Message] = {}
        self._generation, self._say, self._every = generation, say, every

    @property
    def fields(self) -> dict[str, int]:
        """Header fields of a `welcome`: generation, snapshot, and steps between snapshots."""
        fields = {"generation": self.number, "every": self._every}
        if self._generation.snapshot is not None:
            fields["snapshot"] = self._generation.snapshot
        return fields

    def admits(self, address: bytes, message: wire.Message, *, is_known: bool) -> bool:
        """Return True if this generation handles a message; otherwise drop, store or answer it.

        Args:
          address: address of the sender.
          message: the message.
          is_known: True if the sender has greeted the server in this generation. Other senders have
            not left an old generation yet, so their messages are dropped.
        """
        if message.op not in ("hello", "peer"):
            return is_known and not self.is_closed
        generation = message.fields.get("generation", 0)
        if generation > self.number or self.is_closed:
            self.early[address] = message
            self._say(address, "waiting", reason="the servers to go back to a snapshot")
            return False
        if generation < self.number and message.op == "hello":
            # A live trainer greets again after `rewind`. A lost process must not be admitted: the
            # end of its connection would count as the failure of the process that replaces it.
            self._say(address, "rewind", generation=self.number)
        return bool(generation == self.number)

    def lose(self, address: bytes) -> None:
        """Drop the stored greeting of an address, because its connection has ended."""
        self.early.pop(address, None)
