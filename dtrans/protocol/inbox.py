"""Receiver of arrays that arrive in several messages: their memory, and the bytes so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from dtrans.errors import WireError
from dtrans.protocol import wire


class Inbox:
    """Receiver of named arrays that arrive in several messages, such as gradients.

    A named array in a message is called a *block*. The parts of a block arrive in order.

    Args:
      memory: maps the name of each block to contiguous memory for it.
      refusal: returns the error text for a block name that is not in `memory`.
      adopts: names of blocks that are not copied from shared memory. Their entry in `memory` is
        then replaced by the shared memory, which is read-only.
    """

    def __init__(
        self,
        memory: Mapping[str, np.ndarray],
        refusal: Callable[[str], str],
        *,
        adopts: Collection[str] = (),
    ) -> None:
        self.memory = dict(memory)
        self._adopts = adopts
        self._arrived: dict[str, int] = {}
        self._refusal = refusal

    def take(self, message: wire.Message) -> None:
        """Copy the parts of arrays in a message to the memory of these arrays.

        Raises:
          WireError: the message has a part that is not expected. Then nothing is copied.
        """
        wire.unpack(message, self._target, self._arrived, self._adopt, self._adopts)

    def _adopt(self, name: str, data: np.ndarray) -> None:
        block = self.memory[name]
        self.memory[name] = data.view(block.dtype).reshape(block.shape)

    def _target(self, name: str) -> np.ndarray:
        if name not in self.memory:
            raise WireError(self._refusal(name))
        # Views are not stored: in a deep copy of this inbox, a view would have its own memory, and
        # bytes written to the view would not reach the block.
        return self.memory[name].reshape(-1).view(np.uint8)

    @property
    def begun(self) -> bool:
        """Return True if the first bytes of any array have arrived."""
        return bool(self._arrived)

    def missing(self) -> list[str]:
        """Return the names of the arrays that have not arrived completely."""
        return [n for n in self.memory if not self.has_all(n)]

    def has_all(self, name: str) -> bool:
        """Return True if the array with this name has arrived completely."""
        return self.has_rows(name, slice(None))

    def has_rows(self, name: str, rows: slice) -> bool:
        """Return True if the first rows of an array have arrived, up to the end of a slice.

        Args:
          name: name of the array.
          rows: slice of its rows; only its end counts.
        """
        due = self.memory[name]
        if rows.stop is not None:
            due = due[: rows.stop]
        return self._arrived.get(name, -1) >= due.nbytes

    def has_begun(self, name: str) -> bool:
        """Return True if the first bytes of the array with this name have arrived."""
        return name in self._arrived

    def progress(self, name: str) -> str:
        """Return a text about the received part of an array: `8 of 32 bytes`."""
        return f"{self._arrived.get(name, 0)} of {self.memory[name].nbytes} bytes"

    def renew(self, memory: Mapping[str, np.ndarray]) -> None:
        """Replace the memory of arrays, for example when the number of their rows is known.

        No byte of these arrays has arrived yet.

        Args:
          memory: the new memory, by the array's name.
        """
        self.memory = {**self.memory, **memory}

    def zero(self) -> None:
        """Set all arrays to zero."""
        for name, x in self.memory.items():
            if x.flags.writeable:
                x.fill(0)
            else:
                self.memory[name] = np.zeros_like(x)

    def drop(self, name: str) -> None:
        """Stop expecting an array, and release its memory."""
        self.memory = {n: x for n, x in self.memory.items() if n != name}
        self._arrived.pop(name, None)

    def clear(self) -> None:
        """Prepare to receive all arrays again, for the next step."""
        self._arrived.clear()

    def phase(self) -> str:
        """Describe the progress of the trainer that sends these arrays, for `dtrans status`.

        For example, "sending: 1 of 3 gradients have arrived". The text is "computing" until the
        first byte arrives.
        """
        if not self.begun:
            return "computing"
        due = len(self.memory)
        return f"sending: {due - len(self.missing())} of {due} gradients have arrived"
