"""Leaf that one simulated trainer computes itself: the running mean of its gradients.

No server stores it, so the trainer writes it at cuts, as `dtrans.run.role_jobs.leaf_cuts` does.
"""

from __future__ import annotations

import numpy as np

from dtrans.protocol.epochs import Epoch
from tools.simulate.launcher import SimulatedLauncher
from tools.simulate.process import Process
from tools.simulate.updates import SimulatedCut, initial_mean, running_mean


MEAN = "mean"


class TrainerMean:
    """Running mean of one trainer's gradients.

    Args:
      process: the trainer's process.
      k: id of the trainer.
      launcher: launcher of the job.

    Attributes:
      values: number of steps and the mean, at the beginning of each epoch and after each step.
    """

    def __init__(self, process: Process, k: int, launcher: SimulatedLauncher) -> None:
        self.values: list[tuple[int, np.ndarray]] = [(0, initial_mean())]
        self._process, self._k, self._launcher = process, k, launcher
        self._epoch, self._first = Epoch(), 0

    def begin(self, epoch: Epoch | None, first: int) -> None:
        """Begin an epoch; load the mean if the epoch begins at a cut.

        Args:
          epoch: the epoch.
          first: number of steps before the epoch.
        """
        assert epoch is not None
        self._epoch, self._first = epoch, first
        mean = initial_mean() if epoch.cut is None else self._load(epoch.cut)
        self.values.append((first, mean))

    def _load(self, cut: int) -> np.ndarray:
        return self._launcher.cut(self._process.name, cut).state[MEAN]

    def write_if_due(self, step: int, every: int) -> float:
        """Write the mean if servers write a cut after this step; return the seconds of the write.

        Args:
          step: number of steps so far.
          every: number of steps between two cuts.
        """
        if not self._epoch.is_cut_due(step, self._first, every):
            return 0.0
        process, cut = self._process, SimulatedCut({MEAN: self.values[-1][1]}, {})
        end = self._launcher.write_cut(process, self._epoch.number, process.name, step, cut)
        return end - process.now

    def add(self, step: int) -> None:
        """Add the gradient of a step."""
        self.values.append((step + 1, running_mean(self.values[-1][1], self._k, step)))
