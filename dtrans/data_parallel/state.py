"""State of a data-parallel job."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax


@partial(
    jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "extra"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class CollectiveState:
    """State of a job: a pytree of arrays, by name. Every trainer has the same."""

    params: dict[str, jax.Array]
    opt_state: dict[str, jax.Array]
    # what a plan keeps beside: a loss scale
    extra: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
