"""States of parameter-server jobs: of a job in one process, and of a trainer's process."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax

from dtrans.ir.pytree import short_repr, state_html


@partial(jax.tree_util.register_dataclass, data_fields=["params", "servers"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class MeshState:
    """State of a parameter-server job that runs in one process: a pytree of arrays.

    Attributes:
      params: the trainers' parameters and rounding errors, by name. Parameters are replicated over
        the trainers' devices. Rounding errors (`dtrans.parameter_server.compression`) have a row
        for each trainer.
      servers: a dict for each server, by endpoint; it contains the server's arrays, by name
        (`params/w.block0`, `opt_state/0/mu/w.block0`).
    """

    params: dict[str, jax.Array]
    servers: dict[str, dict[str, jax.Array]]

    __repr__ = short_repr
    _repr_html_ = state_html


class TrainerState(tuple[Any, ...]):
    """State of a trainer's process: a tuple of pytrees, such as (params,).

    The class differs from a tuple only in its `repr` and its HTML, which omit the entries of
    arrays.
    """

    __slots__ = ()

    __repr__ = short_repr
    _repr_html_ = state_html


# JAX treats a subclass of `tuple` as a leaf unless it is registered.
jax.tree_util.register_pytree_with_keys(
    TrainerState,
    lambda state: ([(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(state)], None),
    lambda _, parts: TrainerState(parts),
)
