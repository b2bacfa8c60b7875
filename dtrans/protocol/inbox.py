"""Blocks that arrive: named memory, and how much of each block is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from dtrans.errors import WireError
from dtrans.protocol import wire


class Inbox:
    """Memory that the blocks of several messages are received into.

    Args:
      memory: of each block, contiguous, by name.
      refusal: what is wrong with a block that has no memory here, by its name.
    """

    def __init__(self, memory: Mapping[str, np.ndarray], refusal: Callable[[str], str]) -> None:
        self.memory = memory
        self._arrived: dict[str, int] = {}
        self._refusal = refusal

    def take(self, message: wire.Message) -> None:
        """Copy what a message has to where it belongs. Raises WireError, and copies nothing, for
        what is not due."""
        wire.unpack(message, self._target, self._arrived)

    def _target(self, name: str) -> np.ndarray:
        if name not in self.memory:
            raise WireError(self._refusal(name))
        # made when it is needed: a copy of this inbox writes to the copy of its memory
        return self.memory[name].reshape(-1).view(np.uint8)

    @property
    def begun(self) -> bool:
        """Whether any block has come."""
        return bool(self._arrived)

    def missing(self) -> list[str]:
        """The blocks that are not whole."""
        return [n for n, x in self.memory.items() if self._arrived.get(n) != x.nbytes]

    def has_begun(self, name: str) -> bool:
        """Whether anything of a block has come."""
        return name in self._arrived

    def progress(self, name: str) -> str:
        """How much of a block is here: `8 of 32 bytes`."""
        return f"{self._arrived.get(name, 0)} of {self.memory[name].nbytes} bytes"

    def renew(self, name: str, memory: np.ndarray) -> None:
        """Receive a block, of which nothing has come, into other memory."""
        self.memory = {**self.memory, name: memory}

    def clear(self) -> None:
        """Begin anew: nothing has come."""
        self._arrived.clear()

    def phase(self) -> str:
        """Return how far a trainer is whose gradients come here: it computes, or sends."""
        if not self.begun:
            return "computing"
        due = len(self.memory)
        return f"sending: {due - len(self.missing())} of {due} gradients are here"
