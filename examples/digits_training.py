"""Settings of the digits job, which all roles share, and the result of a trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dtrans
from examples import digits
from examples.optimizer_choice import make_optimizer
from examples.settings import as_arguments, from_arguments


@dataclasses.dataclass(frozen=True)
class DigitsSettings:
    """Settings of a job, which the launcher passes to roles as arguments of a command.

    Attributes:
      optimizer: a name in `optimizer_choice`.
      epochs: number of passes over the images.
      batch_size: images in a global batch.
      seed: seed of the test set, the initial parameters and the batches.
      min_block_size: with parameter servers, the minimum number of elements in a block.
      sharding_stage: 1, 2 or 3 in sharding mode; 0 in other modes.
      deadline: seconds that a role may wait for another role.
      stages: number of pipeline stages, one on each trainer; 0 for no pipeline.

    Example:
      >>> from examples.digits_training import DigitsSettings
      >>> settings = DigitsSettings(optimizer="adam", epochs=3)
      >>> settings.arguments()[:4]
      ['--optimizer', 'adam', '--epochs', '3']
      >>> DigitsSettings.parse(settings.arguments()) == settings
      True
    """

    optimizer: str = "momentum"
    epochs: int = 20
    batch_size: int = 64
    seed: int = 0
    min_block_size: int = 8192
    sharding_stage: int = 0
    deadline: float = 60.0
    stages: int = 0

    def arguments(self) -> list[str]:
        """Return the settings as command-line arguments."""
        return as_arguments(self)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> DigitsSettings:
        """Parse the result of `arguments`."""
        return from_arguments(cls, arguments)

    @property
    def key(self) -> jax.Array:
        """Return the random key of the initial parameters."""
        return jax.random.key(self.seed)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of complete batches in an epoch."""
        return digits.TRAIN_IMAGES // self.batch_size


def training(settings: DigitsSettings) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the training step for one device, and the init.

    Raises:
      ConfigError: the optimizer's name is unknown.
    """
    tx = make_optimizer(settings.optimizer)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = digits.init(key)
        return params, tx.init(params)

    return dtrans.make_train_step(digits.loss_fn, tx), init


def train(
    job: Any,
    settings: DigitsSettings,
    batches: Callable[[int], Iterable[tuple[np.ndarray, np.ndarray]]],
    advance: Callable[[int, float], None],
) -> Outcome:
    """Train with a job.

    Args:
      job: the job.
      settings: the settings.
      batches: returns the batches of an epoch, or this process's parts of them.
      advance: called after each step, with the epoch and the loss.
    """
    state = job.init(settings.key)
    losses: list[float] = []
    for epoch in range(settings.epochs):
        for x, y in batches(epoch):
            state, loss = job.step(state, x, y)
            losses.append(float(loss))
            advance(epoch, losses[-1])
    return Outcome(np.array(losses), job.params(state))


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """Result of training on digits.

    Attributes:
      losses: the loss of each step, of one trainer or of the global batch.
      params: the parameters after the last step.
    """

    losses: np.ndarray
    params: digits.Params

    def save(self, path: Path) -> None:
        """Write the result to an npz file, without pickled objects."""
        leaves = {
            f"{layer}/{name}": np.asarray(x)
            for layer, of in self.params.items()
            for name, x in of.items()
        }
        np.savez(path, allow_pickle=False, losses=self.losses, **leaves)

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """Read a file that `save` wrote."""
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
        losses = found.pop("losses")
        params: digits.Params = {}
        for name, x in found.items():
            layer, leaf = name.split("/")
            params.setdefault(layer, {})[leaf] = jax.numpy.asarray(x)
        return cls(losses, params)
