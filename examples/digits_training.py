"""Settings that every role of the digits job has to agree on, and the outcome of a trainer."""

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
    """The settings of a job. Written as arguments of a command, since roles are processes.

    Attributes:
      optimizer: a name of `optimizer_choice`.
      epochs: passes over the images.
      batch_size: images in a global batch.
      seed: of the split, the first parameters and the batches.
      min_block_size: the fewest elements worth a block, with parameter servers.
      sharding_stage: 1, 2 or 3 in sharding mode; 0 in the others.
      deadline: seconds that a role may wait for another.
      stages: of a pipeline, one on each trainer; 0 for no pipeline.

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
        """Parse the settings that `arguments` wrote."""
        return from_arguments(cls, arguments)

    @property
    def key(self) -> jax.Array:
        """Return the key of the first parameters."""
        return jax.random.key(self.seed)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of whole batches that the training images make."""
        return digits.TRAIN_IMAGES // self.batch_size


def training(settings: DigitsSettings) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return one training step for one device, and init.

    Raises:
      ConfigError: no optimizer has that name.
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
      batches: those of an epoch, or this process's parts of them.
      advance: is called after each step, with the epoch and the loss.
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
    """Outcome of training on digits.

    Attributes:
      losses: one per step; those of one trainer, or of all.
      params: the parameters after the last step.
    """

    losses: np.ndarray
    params: digits.Params

    def save(self, path: Path) -> None:
        """Write it as npz, parameters under their paths: numbers only, nothing to unpickle."""
        leaves = {
            f"{layer}/{name}": np.asarray(x)
            for layer, of in self.params.items()
            for name, x in of.items()
        }
        np.savez(path, allow_pickle=False, losses=self.losses, **leaves)

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """Read what `save` wrote."""
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
        losses = found.pop("losses")
        params: digits.Params = {}
        for name, x in found.items():
            layer, leaf = name.split("/")
            params.setdefault(layer, {})[leaf] = jax.numpy.asarray(x)
        return cls(losses, params)
