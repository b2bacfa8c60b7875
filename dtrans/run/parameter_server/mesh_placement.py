"""Devices of a job in one process: trainers on one mesh, each server on one device of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding

from dtrans._jax import is_traced
from dtrans.ir.array_fns import parts_of
from dtrans.run.base.batch import Share, even_rows
from dtrans.run.parameter_server.mesh_trainers import AXIS


class MeshPlacement:
    """Placement of trainers and servers on devices.

    Trainers take the first devices, servers those after them, round-robin if devices are fewer
    than roles. The number of trainer devices divides the number of trainers.

    Args:
      devices: at least one.
      trainers: the number of trainers.
      servers: their endpoints.

    Attributes:
      mesh: the trainers' devices, on one axis.
      servers: the device of each server, as a sharding.
      replicated: the sharding of a value that every trainer device has.
      split: the sharding of a value with one row per trainer.
    """

    def __init__(
        self, devices: Sequence[jax.Device], trainers: int, servers: Sequence[str]
    ) -> None:
        self.trainers = trainers
        divisors = [d for d in range(1, min(len(devices), trainers) + 1) if trainers % d == 0]
        count = divisors[-1]
        self.mesh = Mesh(np.array(devices[:count]), (AXIS,))
        self.servers: dict[str, Sharding] = {
            ep: SingleDeviceSharding(devices[(trainers + i) % len(devices)])
            for i, ep in enumerate(servers)
        }
        one = SingleDeviceSharding(devices[0])
        self.replicated: Sharding = NamedSharding(self.mesh, P()) if count > 1 else one
        self.split: Sharding = NamedSharding(self.mesh, P(AXIS)) if count > 1 else one

    def put_batch(self, x: Any, share: Share) -> Any:
        """Put one array of a global batch on the trainers' devices."""
        if share == "key":
            x = jax.vmap(jax.random.fold_in, (None, 0))(x, jnp.arange(self.trainers))
        if isinstance(share, int):
            x = even_rows(x, share, self.trainers)
            x = x if share == 0 else parts_of(x, share, self.trainers)
        return put(x, self.replicated if share == "replicated" else self.split)

    def broadcast(self, x: jax.Array) -> jax.Array:
        """Copy a server's block to every trainer device."""
        if self.mesh.size == 1:
            return put(x, self.replicated)
        devices = list(self.mesh.devices.flat)
        copies = jax.device_put([x] * len(devices), devices)
        return jax.make_array_from_single_device_arrays(x.shape, self.replicated, copies)

    def stack(self, x: jax.Array) -> jax.Array:
        """Give every trainer a copy of a replicated value; the result has one row per trainer."""
        return jax.device_put(jnp.broadcast_to(x, (self.trainers, *x.shape)), self.split)


def put(x: Any, where: Sharding) -> Any:
    """Put an array on devices; return it unchanged if it is there, or traced."""
    if isinstance(x, list):
        return jax.device_put(x, where)
    if is_traced(x):
        return x
    # `device_put` costs some microseconds even where there is nothing to do
    return x if isinstance(x, jax.Array) and x.sharding == where else jax.device_put(x, where)


def shards_of(x: Any) -> list[jax.Array]:
    """Return the parts of a stacked array in the order of the trainers; a traced one has one."""
    if is_traced(x):
        return [x]
    return [s.data for s in sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)]
