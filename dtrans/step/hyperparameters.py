"""Hyperparameters in the optimizer's state (`optax.inject_hyperparams`): search and replacement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.errors import ConfigError


def hyperparameter_leaf(leaves: Iterable[str], name: str) -> str:
    """Return the leaf that contains a hyperparameter.

    Args:
      leaves: names of the step's leaves.
      name: the short name, or a leaf's full name.

    Raises:
      ConfigError: no leaf contains it, or several do.
    """
    by_name: dict[str, list[str]] = {}
    for leaf in leaves:
        _, separator, short = leaf.rpartition("hyperparams/")
        if separator:
            # nnx wraps each array in a variable, whose one child is called `value`
            by_name.setdefault(short.removesuffix("/value"), []).append(leaf)
    if any(name in same for same in by_name.values()):
        return name
    if name not in by_name:
        known = ", ".join(by_name) or "nothing"
        raise ConfigError(
            f"the optimizer keeps no {name!r} in its state; it keeps {known} by name. "
            "Wrap it in optax.inject_hyperparams, or pass the value as an argument of the step"
        )
    if len(by_name[name]) > 1:
        first, *_ = by_name[name]
        raise ConfigError(
            f"{name!r} is kept by several optimizers: {', '.join(by_name[name])}; "
            f"write the full name, such as **{{{first!r}: ...}}"
        )
    return by_name[name][0]


def replace_hyperparameters(leaves: Iterable[str], state: Any, values: Mapping[str, float]) -> Any:
    """Return a job's state with different hyperparameters, on the devices of the replaced ones.

    Args:
      leaves: names of the step's leaves.
      state: a pytree whose arrays have keys that are, or end in, names of leaves.
      values: short or full name to value.

    Raises:
      ConfigError: see `hyperparameter_leaf`; or the state in this process lacks the leaf.
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
        return jax.device_put(new, x.sharding) if isinstance(x, jax.Array) else new

    new_state = jax.tree_util.tree_map_with_path(replace, state)
    for name in missing:
        raise ConfigError(
            f"{name} is in the state of another process; pass the value as an argument of the "
            "step, such as step(params, opt_state, learning_rate, *batch) (docs/between_steps.md)"
        )
    return new_state
