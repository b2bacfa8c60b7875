"""Placement of a plan on devices: the devices that store each array of the state, and its sharding.

A job may store several copies of an array of the state. A *place* is an index that identifies one
copy. For a parameter, it is the index of a device within each replica, since all stages on a device
share its copy. For optimizer state, it is the index of a stage. State that every stage stores, such
as a step count, has one copy for each stage.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from dtrans.ir.pytree import is_under
from dtrans.pipeline_parallel.options import SPLIT
from dtrans.pipeline_parallel.plan import PipelinePlan
from dtrans.pipeline_parallel.results import is_replicated
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.pipeline_parallel.instructions import Transfer
from dtrans.run.pipeline_parallel.stage_devices import (
    EACH,
    FIRST,
    ROWS,
    SAME,
    Host,
    StageBackend,
)


@dataclasses.dataclass(frozen=True, eq=False)
class StagePlacement:
    """Devices of a plan's stages, and the sharding of each array on them.

    Attributes:
      plan: the plan of the job.
      backend: the devices of the stages.
      mine: the indices of the stages that this process runs. They are also the indices of the
        copies of state arrays that it stores.
      donate: True if a step may reuse the memory of the state that is passed to it.
    """

    plan: PipelinePlan
    backend: StageBackend
    mine: frozenset[int]
    donate: bool

    @cached_property
    def host(self) -> Host | None:
        """Backend for the host's memory; None if `offload` is not set."""
        if not self.plan.options.memory.offload:
            return None
        return Host(self.backend.replicas, self.plan.model.device_counts)

    @property
    def state_backend(self) -> StageBackend:
        """Backend that stores the state between steps."""
        return self.host or self.backend

    def put(self, move: Transfer, x: Any) -> Any:
        """Put a transferred value on the receiving devices, or into the host's memory."""
        backend = self.state_backend if move.to_host else self.backend
        return backend.put(x, move.stage, move.kind)

    # -- state -----------------------------------------------------------------------------------

    def place(self, name: str, stage: int) -> int:
        """Return the index of the copy of a state array that a stage uses (its *place*).

        Each device has one copy of a parameter, so the result is the index of the device. Each
        stage has a copy of other state, so the result is the index of the stage.
        """
        return self.plan.device_of(stage) if name in self.plan.model.homes else stage

    def first_place(self, name: str) -> int:
        """Return the index of the first stored copy of a state array (its *place*)."""
        home = self.plan.home(name)
        if home is None:
            return 0
        return self.place(name, home)

    def state_kind(self, name: str) -> AxisSharding:
        """Return the sharding of an array of the state over replicas and shards of a stage."""
        slices_by_axis = self.plan.slices_by_axis.get(name, {})
        return AxisSharding.from_dims(
            {mesh_axis: s.axis for mesh_axis, s in slices_by_axis.items()}
        )

    # -- values of a step ------------------------------------------------------------------------

    @property
    def per_replica(self) -> AxisSharding:
        """Sharding of a value that each replica computes separately."""
        return EACH if self.plan.options.replicas > 1 else SAME

    def sum_kind(self, leaf: str) -> AxisSharding:
        """Return the sharding of a leaf's summed gradients."""
        return self.per_replica.sharded_along(self.plan.model.sharding.state.get(leaf), SPLIT)

    def update_kind(self, name: str) -> AxisSharding:
        """Return the sharding of an input of the update."""
        if name in self.plan.update.sums:
            leaf, _, _ = self.plan.update.sums[name]
            return self.sum_kind(leaf)
        return self.state_kind(name)

    def result_kind(self, name: str) -> AxisSharding:
        """Return the sharding of a result that is merged over micro-batches."""
        if is_replicated(self.plan.model.merges[name]) or self.plan.options.replicas == 1:
            return SAME
        # All replicas compute the same new state.
        return FIRST if name in self.plan.model.homes else EACH

    # -- batches ---------------------------------------------------------------------------------

    def is_split(self, name: str, x: Any) -> bool:
        """Return True if an array of the batch is cut into micro-batches."""
        return bool(x.shape) and not is_under(name, self.plan.options.batch.unsplit_inputs)

    def is_key(self, name: str, x: Any) -> bool:
        """Return True if a batch array is a PRNG key that differs between micro-batches.

        The job then folds the index of the micro-batch into the key.
        """
        is_one = not x.shape and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return is_one and not is_under(name, self.plan.options.batch.unsplit_inputs)

    def batch_kind(self, name: str, x: Any) -> AxisSharding:
        """Return the sharding of an array of the batch over replicas."""
        return ROWS if self.is_split(name, x) and self.plan.options.replicas > 1 else SAME
