"""Count of refused messages. Only some of them are logged."""

from __future__ import annotations

import logging
from typing import Any


EACH = 100  # the first refusals are all logged, then only the 128th, the 256th, the 512th, ...


class Refusals:
    """Count of refusals. The number of log lines grows only with its logarithm.

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
        """Count a refusal, and log it if it is one of the first `EACH` or its number is 2**n."""
        self.count += 1
        if self.count <= EACH:
            self._log.warning(message, *args)
        elif self.count & (self.count - 1) == 0:
            self._log.warning(f"{message} (%d so far; most have no line)", *args, self.count)
