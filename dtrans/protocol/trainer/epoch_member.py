"""A trainer's part in the recovery of a job from failures.

After each failure, a new *epoch* of the job begins (`dtrans.protocol.epochs`), and the trainer
connects to the servers again.
"""

from __future__ import annotations

from dtrans.errors import LostPeerError
from dtrans.protocol.epochs import Epoch, Epochs, NewEpoch


class EpochMember:
    """Participation of one trainer in one epoch: the time between two failures of the job.

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
        """Number of the epoch in which this trainer's process was started; 0 for its first process.

        An epoch is the time between two failures. Servers use the number to refuse a process that
        was replaced.
        """
        return 0 if self._epochs is None else self._epochs.incarnation

    def enter(self, epoch: Epoch | None) -> None:
        """Take part in the epoch of a server to which this trainer has connected.

        An epoch is the time between two failures of the job. All servers must be in the same epoch.

        Args:
          epoch: the server's epoch; None if the server writes no cuts (snapshots).

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
        """Tell the launcher that a server is lost; return the exception for the trainer to raise.

        In a job with cuts (snapshots), the trainer raises NewEpoch, and waits until the launcher
        has started the server again. In other jobs, it raises the error itself.

        Args:
          e: the error of the connection to the server.
        """
        if self._epochs is None or self.epoch is None:
            return e
        self._epochs.report_lost(self.epoch.number, e.role, str(e))
        return NewEpoch(self.epoch.number + 1)

    def rejoin(self) -> EpochMember:
        """Return a new object for the next epoch, after a failure. The trainer then enters it.

        An epoch is the time between two failures of the job.

        Raises:
          ReplacedError: the launcher has started another process of this trainer.
        """
        if self._epochs is not None:
            self._epochs.current()
        return EpochMember(self._epochs)

    def leave(self) -> None:
        """Tell the launcher that this trainer has finished all its steps.

        Such a trainer cannot go back to a cut (snapshot) after a later failure.
        """
        if self._epochs is not None and self.epoch is not None:
            self._epochs.leave()
