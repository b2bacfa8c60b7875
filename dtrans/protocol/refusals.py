"""What is refused: counted, and written to the log as long as it is little."""

from __future__ import annotations

import logging
from typing import Any


EACH = 100  # refusals that have a line each; of later ones the 128th, the 256th, the 512th, ...


class Refusals:
    """Counts refusals, however many they are, with few lines of a log.

    Example:
      >>> import logging
      >>> from dtrans.protocol.refusals import Refusals
      >>> refusals = Refusals(logging.getLogger("dtrans.example"))
      >>> refusals.note("refused %s", "noise")
      >>> refusals.count
      1
    """

    def __init__(self, log: logging.Logger) -> None:
        self.count = 0
        self._log = log

    def note(self, message: str, *args: Any) -> None:
        """Count one more, and say so where that is worth a line."""
        self.count += 1
        if self.count <= EACH:
            self._log.warning(message, *args)
        elif self.count & (self.count - 1) == 0:
            self._log.warning(f"{message} (%d so far; most have no line)", *args, self.count)
