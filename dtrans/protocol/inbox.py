"""Blocks that arrive in pieces: their memory, and the bytes that are here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dtrans.errors import WireError
from dtrans.protocol import wire


class Inbox:
    """Memory of blocks that arrive in several messages.

    Args:
      memory: name to contiguous memory of each block.
      refusal: returns the error text for the name of a block without memory.
    """

    def __init__(self, memory: Mapping[str, np.ndarray], refusal: Callable[[str], str]) -> None:
        self.memory = memory
        self._arrived: dict[str, int] = {}
        self._refusal = refusal

    def take(self, message: wire.Message) -> None:
        """Copy a message's pieces to their memory. Raises WireError, and copies nothing, if one is
        not due."""
        wire.unpack(message, self._target, self._arrived)

    def _target(self, name: str) -> np.ndarray:
        if name not in self.memory:
            raise WireError(self._refusal(name))
        # a new view each time, so that a copy of this inbox writes to the copy of its memory
        return self.memory[name].reshape(-1).view(np.uint8)

    @property
    def begun(self) -> bool:
        """Return True if bytes of any block are here."""
        return bool(self._arrived)

    def missing(self) -> list[str]:
        """List the blocks that are not complete."""
        return [n for n, x in self.memory.items() if self._arrived.get(n) != x.nbytes]

    def has_begun(self, name: str) -> bool:
        """Return True if bytes of a block are here."""
        return name in self._arrived

    def progress(self, name: str) -> str:
        """Return the progress of a block: `8 of 32 bytes`."""
        return f"{self._arrived.get(name, 0)} of {self.memory[name].nbytes} bytes"

    def renew(self, name: str, memory: np.ndarray) -> None:
        """Receive a block into other memory, before its first byte."""
        self.memory = {**self.memory, name: memory}

    def clear(self) -> None:
        """Forget all bytes that are here."""
        self._arrived.clear()

    def phase(self) -> str:
        """Return the phase of the trainer that sends these gradients: it computes, or sends."""
        if not self.begun:
            return "computing"
        due = len(self.memory)
        return f"sending: {due - len(self.missing())} of {due} gradients are here"
