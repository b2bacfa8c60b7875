"""Trainers that leave a synchronous server before other trainers: option `on_trainer_exit`."""

from __future__ import annotations

from collections.abc import Collection

from dtrans.errors import PeerError
from dtrans.protocol.server.trainer_registry import TrainerRegistry


class TrainerExits:
    """Treatment of trainers that leave a synchronous server while other trainers continue.

    Args:
      on_trainer_exit: "error": the job ends with an error. "drop": later updates use only the
        gradients of the remaining trainers. "paddle": the next update uses the last gradients of
        the trainer a second time, and later updates use zeros instead.
      trainers: the server's trainers.
    """

    def __init__(self, on_trainer_exit: str, trainers: TrainerRegistry) -> None:
        self._policy, self._trainers = on_trainer_exit, trainers
        self._spent: set[int] = set()  # ids of the trainers whose gradients were set to zero

    def counted(self) -> list[int]:
        """Return the ids of the trainers that contribute gradients to the current update."""
        if self._policy == "paddle":
            return list(self._trainers.known)
        return self._trainers.present

    def spend(self, trainers: Collection[int]) -> set[int]:
        """Return the trainers that from now on contribute zeros instead of gradients.

        This happens only with the option "paddle".

        Args:
          trainers: ids of trainers that have left. The last update used their last gradients a
            second time.
        """
        if self._policy != "paddle":
            return set()
        spent = set(trainers) - self._spent
        self._spent |= spent
        return spent

    def check(self, gone: Collection[int], going_on: Collection[int], step: int) -> None:
        """Raise PeerError if the option is "error", and some trainers have left and some continue.

        Args:
          gone: ids of the trainers that have left.
          going_on: ids of the trainers that continue.
          step: number of complete updates.
        """
        if gone and going_on and self._policy == "error":
            raise PeerError(
                f"trainer {min(gone)} closed after step {step} while trainer {min(going_on)} sends "
                f"step {step + 1}; make the same number of steps in all trainers, or pass "
                "dtrans.pserver(on_trainer_exit='drop')"
            )
