"""A count of refused messages; the log has the first ones and some later ones."""

from __future__ import annotations

import logging
from typing import Any


EACH = 100  # logged refusals; later the 128th, the 256th, the 512th and so on


class Refusals:
    """Count of refusals with few lines in the log, however many there are.

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
        """Count a refusal, and log it if it is among the first or due."""
        self.count += 1
        if self.count <= EACH:
            self._log.warning(message, *args)
        elif self.count & (self.count - 1) == 0:
            self._log.warning(f"{message} (%d so far; most have no line)", *args, self.count)
