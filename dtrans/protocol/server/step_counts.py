"""Counts of the steps that an asynchronous server's trainers have made since the job's start."""

from __future__ import annotations

from collections.abc import Mapping

from dtrans.errors import WireError
from dtrans.protocol.server.trainer_registry import log


# maximum number of steps of one trainer, so that sums over trainers fit into 64 bits
MAX_STEPS = 2**48


class StepCounts:
    """Counts of the steps of one server's trainers. Merged gradients count several steps.

    Args:
      endpoint: the server's endpoint, for log lines.
      before: number of each trainer's steps before this generation (part of the job), by id.

    Attributes:
      total: total number of steps of all trainers.

    Example:
      >>> from dtrans.protocol.server.step_counts import StepCounts
      >>> counts = StepCounts("127.0.0.1:6174", {0: 5, 1: 3})
      >>> counts.add(1, 2)
      >>> print(counts.by_trainer, counts.total, counts.of_others(1))
      {0: 5, 1: 5} 10 5
    """

    def __init__(self, endpoint: str, before: Mapping[int, int] = {}) -> None:
        self._endpoint, self._counts = endpoint, dict(before)
        self.total = sum(self._counts.values())

    @property
    def by_trainer(self) -> dict[int, int]:
        """Dict from the id of each counted trainer to the number of its steps."""
        return dict(self._counts)

    @property
    def largest(self) -> int:
        """Largest number of steps of a trainer."""
        return max(self._counts.values(), default=0)

    def of_trainer(self, k: int) -> int:
        """Return the number of trainer k's steps."""
        return self._counts.get(k, 0)

    def of_others(self, k: int) -> int:
        """Return the number of steps of all trainers except trainer k."""
        return self.total - self.of_trainer(k)

    def add(self, k: int, steps: int) -> None:
        """Count steps of trainer k."""
        self._counts[k] = self.of_trainer(k) + steps
        self.total += steps

    def check(self, k: int, count: int) -> None:
        """Raise WireError if a count that trainer k has sent is out of range."""
        if not 0 <= count <= MAX_STEPS:
            raise WireError(
                f"trainer {k} sent a `recv` message with count={count}, expected 0 to {MAX_STEPS}"
            )

    def adopt(self, k: int, count: int) -> bool:
        """Increase trainer k's count to the count of another server.

        Return True if this server's count was lower.

        A lower count has one of two causes. Either this server has lost steps, or the trainer did
        not repeat steps after the failure of a process.

        Args:
          k: id of the trainer.
          count: the largest number of trainer k's steps that any server has received.
        """
        missing = count - self.of_trainer(k)
        if missing <= 0:
            return False
        log.warning(
            "pserver %s lacks %d steps of trainer %d, which continues after step %d",
            self._endpoint,
            missing,
            k,
            count,
        )
        self.add(k, missing)
        return True
