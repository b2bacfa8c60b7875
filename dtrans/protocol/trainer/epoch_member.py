"""A trainer's part in the epochs of its job (`dtrans.protocol.epochs`)."""

from __future__ import annotations

from dtrans.errors import LostPeerError
from dtrans.protocol.epochs import Epoch, Epochs, NewEpoch


class EpochMember:
    """Membership of one trainer in one epoch (part of a job between failures).

    Args:
      epochs: epochs of the job; None without a launcher that restarts roles.

    Attributes:
      epoch: the servers' epoch; None before the first welcome, and if servers write no cuts
        (snapshots).
    """

    def __init__(self, epochs: Epochs | None) -> None:
        self.epoch: Epoch | None = None
        self._epochs = epochs

    @property
    def incarnation(self) -> int:
        """Number of the epoch (part of a job) in which the trainer's process was started."""
        return 0 if self._epochs is None else self._epochs.incarnation

    def enter(self, epoch: Epoch | None) -> None:
        """Take part in the epoch of a server that has welcomed this trainer.

        Raises:
          NewEpoch: another server is in another epoch.
        """
        if epoch is None or self._epochs is None:
            return
        if self.epoch is not None and epoch.number != self.epoch.number:
            raise NewEpoch(max(epoch.number, self.epoch.number))
        if self.epoch is None:
            self._epochs.enter(epoch)
        self.epoch = epoch

    def lost(self, e: LostPeerError) -> BaseException:
        """Report a lost server; return the exception to raise.

        The launcher ends the server, and starts it again in the next epoch.

        Args:
          e: the error of the lost server. It is returned in a job without cuts (snapshots).
        """
        if self._epochs is None or self.epoch is None:
            return e
        self._epochs.report_lost(self.epoch.number, e.role, str(e))
        return NewEpoch(self.epoch.number + 1)

    def rejoin(self) -> EpochMember:
        """Return the membership in a later epoch (part of a job), before the trainer enters it.

        Raises:
          ReplacedError: the launcher has started another process of this trainer.
        """
        if self._epochs is not None:
            self._epochs.current()
        return EpochMember(self._epochs)

    def leave(self) -> None:
        """Tell the launcher that this trainer leaves, and can no longer go back to a cut."""
        if self._epochs is not None and self.epoch is not None:
            self._epochs.leave()
