"""Counter of refused messages, which logs only some of them."""

from __future__ import annotations

import logging
from typing import Any


# The first `EACH` refusals are logged, and later only refusals whose number is a power of two.
EACH = 100


class Refusals:
    """Counter of refusals. The number of log lines grows with the logarithm of the count.

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
            self._log.warning(f"{message} (%d so far; most are not logged)", *args, self.count)
