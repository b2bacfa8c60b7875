"""Leaf that one simulated trainer computes itself: the running mean of its gradients.

No server stores it, so the trainer writes it at snapshots, as `dtrans.run.role_jobs.leaf_snapshots`
does.
"""

from __future__ import annotations

import numpy as np

from dtrans.protocol.generations import Generation
from tools.simulate.launcher import SimulatedLauncher
from tools.simulate.process import Process
from tools.simulate.updates import SimulatedSnapshot, initial_mean, running_mean


MEAN = "mean"


class TrainerMean:
    """Running mean of one trainer's gradients.

    Args:
      process: the trainer's process.
      k: id of the trainer.
      launcher: launcher of the job.

    Attributes:
      values: number of steps and the mean, at the beginning of each generation and after each step.
    """

    def __init__(self, process: Process, k: int, launcher: SimulatedLauncher) -> None:
        self.values: list[tuple[int, np.ndarray]] = [(0, initial_mean())]
        self._process, self._k, self._launcher = process, k, launcher
        self._generation, self._first = Generation(), 0

    def begin(self, generation: Generation | None, first: int) -> None:
        """Begin a generation; load the mean if the generation begins at a snapshot.

        Args:
          generation: the generation.
          first: number of steps before the generation.
        """
        assert generation is not None
        self._generation, self._first = generation, first
        mean = initial_mean() if generation.snapshot is None else self._load(generation.snapshot)
        self.values.append((first, mean))

    def _load(self, snapshot: int) -> np.ndarray:
        return self._launcher.snapshot(self._process.name, snapshot).state[MEAN]

    def write_if_due(self, step: int, every: int) -> float:
        """Write the mean if servers write a snapshot after this step; return the seconds.

        Args:
          step: number of steps so far.
          every: number of steps between two snapshots.
        """
        if not self._generation.is_snapshot_due(step, self._first, every):
            return 0.0
        process, snapshot = self._process, SimulatedSnapshot({MEAN: self.values[-1][1]}, {})
        end = self._launcher.write_snapshot(
            process, self._generation.number, process.name, step, snapshot
        )
        return end - process.now

    def add(self, step: int) -> None:
        """Add the gradient of a step."""
        self.values.append((step + 1, running_mean(self.values[-1][1], self._k, step)))
