"""Hyperparameters in optimizer state (`optax.inject_hyperparams`): find and replace them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.errors import ConfigError


def hyperparameter_leaf(leaves: Iterable[str], name: str) -> str:
    """Return the full name of the state array that contains a hyperparameter.

    For `learning_rate`, this may be "opt_state/hyperparams/learning_rate".

    Args:
      leaves: names of the step's leaves.
      name: the hyperparameter's name, e.g. `learning_rate`, or the full name of its array.

    Raises:
      ConfigError: no array has this name, or several do.
    """
    by_name: dict[str, list[str]] = {}
    for leaf in leaves:
        _, separator, short = leaf.rpartition("hyperparams/")
        if separator:
            # nnx wraps each array in a variable; the path of the array then ends in `value`.
            by_name.setdefault(short.removesuffix("/value"), []).append(leaf)
    if any(name in same for same in by_name.values()):
        return name
    if name not in by_name:
        known = ", ".join(by_name) or "no hyperparameters"
        raise ConfigError(
            f"{name!r} is not a hyperparameter in the optimizer state, which has {known}; wrap the "
            "optimizer in optax.inject_hyperparams, or pass the value as an argument of the step"
        )
    if len(by_name[name]) > 1:
        first, *_ = by_name[name]
        raise ConfigError(
            f"{name!r} is a hyperparameter of several optimizers: {', '.join(by_name[name])}; "
            f"use the full name, such as **{{{first!r}: ...}}"
        )
    return by_name[name][0]


def replace_hyperparameters(leaves: Iterable[str], state: Any, values: Mapping[str, float]) -> Any:
    """Return a job's state in which some hyperparameters have new values, on the same devices.

    Args:
      leaves: names of the step's leaves.
      state: a pytree of dicts. The key of each array is its name, or a tuple that ends in its name.
      values: the new values, by name, as for `hyperparameter_leaf`.

    Raises:
      ConfigError: as `hyperparameter_leaf`; or the array is not in the state of this process.
    """
    leaves = list(leaves)
    wanted = {hyperparameter_leaf(leaves, name): x for name, x in values.items()}
    missing = dict(wanted)

    def replace(path: Any, x: Any) -> Any:
        key = getattr(path[-1], "key", None)
        name = key[-1] if isinstance(key, tuple) else key
        if name not in wanted:
            return x
        missing.pop(name, None)
        new = jnp.full(x.shape, wanted[name], x.dtype)
        if isinstance(x, jax.Array):
            new = jax.device_put(new, x.sharding)
        return new

    new_state = jax.tree_util.tree_map_with_path(replace, state)
    for name in missing:
        raise ConfigError(
            f"{name} is not in the state of this process; pass the value as an argument of the "
            "step, such as step(params, opt_state, learning_rate, *batch) (docs/between_steps.md)"
        )
    return new_state
