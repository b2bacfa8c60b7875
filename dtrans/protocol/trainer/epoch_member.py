"""A trainer's part in the epochs of its job (`dtrans.protocol.epochs`)."""

from __future__ import annotations

from dtrans.errors import LostPeerError
from dtrans.protocol.epochs import Epoch, Epochs, NewEpoch


class EpochMember:
    """Membership of one trainer in one epoch.

    Args:
      epochs: epochs of the job; None without a launcher that restarts roles.

    Attributes:
      number: number of the servers' epoch; None before the first welcome, and if they write no
        cuts.
    """

    def __init__(self, epochs: Epochs | None) -> None:
        self.number: int | None = None
        self._epochs = epochs

    def enter(self, number: int | None) -> None:
        """Take part in the epoch of a server that has welcomed this trainer.

        Raises:
          NewEpoch: another server is in another epoch.
        """
        if number is None or self._epochs is None:
            return
        if self.number is not None and number != self.number:
            raise NewEpoch(max(number, self.number))
        if self.number is None:
            self._epochs.enter(Epoch(number))
        self.number = number

    def lost(self, e: LostPeerError) -> BaseException:
        """Report a lost server; return the exception to raise.

        The launcher ends the server, and starts it again in the next epoch.

        Args:
          e: the error of the lost server. It is returned in a job without cuts.
        """
        if self._epochs is None or self.number is None:
            return e
        self._epochs.report_lost(self.number, e.role, str(e))
        return NewEpoch(self.number + 1)

    def leave(self) -> None:
        """Tell the launcher that this trainer leaves, and can no longer go back."""
        if self._epochs is not None and self.number is not None:
            self._epochs.leave()
