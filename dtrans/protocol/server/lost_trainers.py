"""Failures of one server's trainers: connections or processes that ended before `goodbye`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dtrans.protocol.server.trainer_state import Trainer


# Seconds to wait after the end of a process or of a Unix socket's connection: the last messages may
# be unread, or the trainer may move to a new connection.
GRACE = 0.5


class LostTrainers:
    """Record of one server's lost trainers.

    Args:
      endpoint: the server's endpoint, for error texts.
      known: state of each trainer that has greeted the server, by trainer id. If a trainer's
        process ends before its first greeting, this object adds the trainer.
      expected: ids of the trainers that take part in this generation.
      retry: seconds for which the server waits for a reconnection.
    """

    def __init__(
        self, endpoint: str, known: dict[int, Trainer], expected: Collection[int], retry: float
    ) -> None:
        self._endpoint, self._known = endpoint, known
        self._expected, self._retry = frozenset(expected), retry
        # id of a trainer whose process has ended -> (time, exit status)
        self._dead: dict[int, tuple[float, str]] = {}

    def died(self, k: int, how: str, now: float) -> None:
        """Handle the end of trainer k's process. Its last messages may be unread."""
        self._dead.setdefault(k, (now, how))

    def is_gone(self, k: int, now: float) -> bool:
        """Return True if trainer k's process has ended, or trainer k did not reconnect in time."""
        return self._has_ended(k, now) or self._is_lost(k, now)

    def reasons(self, now: float, patience: float, refused: Mapping[int, str]) -> dict[int, str]:
        """Return the reason of each failure, by trainer id.

        If a process ended before it connected, also register its trainer as failed.

        Args:
          now: the time.
          patience: additional seconds for which the server waits for a reconnection.
          refused: reason why the server refused a trainer's greeting, by trainer id.
        """
        found: dict[int, str] = {}
        for k, t in self._known.items():
            if not t.done and self._is_lost(k, now - patience):
                found[k] = (
                    f"the connection of trainer {k} to pserver {self._endpoint} ended without a "
                    "goodbye"
                )
        for k, (_, how) in self._dead.items():
            if not self._has_ended(k, now) or k not in self._expected:
                continue
            if k in self._known and self._known[k].done:
                continue
            when = ", without a goodbye"
            if k not in self._known:
                self._known[k] = Trainer("", b"", done=True, failed=True)
                when = " before it said hello"
            why = f"; {refused[k]}" if k in refused else ""
            found[k] = f"trainer {k} ended with {how}{when} to pserver {self._endpoint}{why}"
        return found

    def _has_ended(self, k: int, now: float) -> bool:
        return k in self._dead and now - self._dead[k][0] > GRACE

    def _is_lost(self, k: int, now: float) -> bool:
        t = self._known[k]
        return t.lost is not None and now - t.lost > (GRACE if t.local else self._retry)
