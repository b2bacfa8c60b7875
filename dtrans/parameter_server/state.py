"""State of a job of parameter servers in one process."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax


@partial(jax.tree_util.register_dataclass, data_fields=["params", "servers"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class MeshState:
    """State of a job in one process, as a pytree of arrays.

    Attributes:
      params: the trainers' parameters, by name; replicated over the trainers' devices.
      servers: endpoint -> name (`params/w.block0`, `opt_state/0/mu/w.block0`) -> array of the
        server.
    """

    params: dict[str, jax.Array]
    servers: dict[str, dict[str, jax.Array]]
