"""Optimizers by name, with learning rates for batches of 64 digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from dtrans.checks import did_you_mean
from dtrans.errors import ConfigError


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.5),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(0.03),
    "adadelta": lambda: optax.adadelta(1.0),
    "adam": lambda: optax.adam(1e-3),
    "adamax": lambda: optax.adamax(2e-3),
    "adamw": lambda: optax.adamw(1e-3),
    "amsgrad": lambda: optax.amsgrad(1e-3),
    "lion": lambda: optax.lion(5e-4),
    "nadam": lambda: optax.nadam(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "yogi": lambda: optax.yogi(3e-3),
}


def make_optimizer(name: str) -> Any:
    """Return the optax optimizer with this name.

    Raises:
      ConfigError: the name is unknown.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"there is no optimizer {name!r}; {did_you_mean(name, OPTIMIZERS, 'there are')}"
        )
    return OPTIMIZERS[name]()
