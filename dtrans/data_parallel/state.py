"""State of a data-parallel job between steps: parameters and optimizer state."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax

from dtrans.ir.pytree import short_repr, state_html


@partial(
    jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "extra"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class CollectiveState:
    """State of a data-parallel job: parameters and optimizer state as arrays by name.

    Every trainer has the same state, or slices of it in sharding.

    Attributes:
      params: the parameters.
      opt_state: the optimizer's state.
      extra: state of the plan, such as a loss scale.
    """

    params: dict[str, jax.Array]
    opt_state: dict[str, jax.Array]
    extra: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    __repr__ = short_repr
    _repr_html_ = state_html
