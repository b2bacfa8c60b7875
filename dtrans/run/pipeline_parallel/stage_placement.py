"""Placement of a plan on devices: the places of its state and batches, and their shardings.

State is in *places*. The place of a parameter is a device, since the stages of one device share it.
The place of all other state is a stage. State that every stage has (a count of steps) is in each
place.
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
    cut_along,
)


@dataclasses.dataclass(frozen=True, eq=False)
class StagePlacement:
    """A plan on its devices.

    Attributes:
      plan: the plan.
      backend: the devices of stages.
      mine: the stages, and so the places, of this process.
      donate: True if a step may reuse the memory of the state that it takes.
    """

    plan: PipelinePlan
    backend: StageBackend
    mine: frozenset[int]
    donate: bool

    @cached_property
    def host(self) -> Host | None:
        """The host's memory, if parameters are there between uses."""
        return Host(self.backend.replicas) if self.plan.options.memory.offload else None

    @property
    def state_backend(self) -> StageBackend:
        """The backend that stores state between steps."""
        return self.host or self.backend

    def put(self, move: Transfer, x: Any) -> Any:
        """Return a value on the receiver of a transfer."""
        backend = self.state_backend if move.to_host else self.backend
        return backend.put(x, move.stage, move.kind)

    # -- state -----------------------------------------------------------------------------------

    def place(self, name: str, stage: int) -> int:
        """Return the place of an array of the state of a stage."""
        return self.plan.device_of(stage) if name in self.plan.model.homes else stage

    def first_place(self, name: str) -> int:
        """Return the place of an array of the state; the first, if every stage has it."""
        home = self.plan.home(name)
        return 0 if home is None else self.place(name, home)

    def state_kind(self, name: str) -> AxisSharding:
        """Return the sharding of an array of the state over replicas and shards."""
        axis = self.plan.update.slice_axis(name) if self.plan.options.replicas > 1 else None
        over_replicas = SAME if axis is None else cut_along(axis)
        return over_replicas.cut_along(self.plan.model.cuts.state.get(name), SPLIT)

    # -- values of a step ------------------------------------------------------------------------

    @property
    def per_replica(self) -> AxisSharding:
        """The sharding of values that differ between replicas."""
        return EACH if self.plan.options.replicas > 1 else SAME

    def sum_kind(self, leaf: str) -> AxisSharding:
        """Return the sharding of the sum of a leaf's gradients."""
        return self.per_replica.cut_along(self.plan.model.cuts.state.get(leaf), SPLIT)

    def update_kind(self, name: str) -> AxisSharding:
        """Return the sharding of an input of the update."""
        found = self.plan.update.sums.get(name)
        return self.state_kind(name) if found is None else self.sum_kind(found[0])

    def result_kind(self, name: str) -> AxisSharding:
        """Return the sharding of a result that is merged over micro-batches."""
        if is_replicated(self.plan.model.merges[name]) or self.plan.options.replicas == 1:
            return SAME
        # all replicas compute the same state
        return FIRST if name in self.plan.model.homes else EACH

    # -- batches ---------------------------------------------------------------------------------

    def is_split(self, name: str, x: Any) -> bool:
        """Return True if micro-batches read rows of an array of the batch."""
        return bool(x.shape) and not is_under(name, self.plan.options.batch.unsplit_inputs)

    def is_key(self, name: str, x: Any) -> bool:
        """Return True for a PRNG key that is folded with the number of each micro-batch."""
        is_one = not x.shape and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return is_one and not is_under(name, self.plan.options.batch.unsplit_inputs)

    def batch_kind(self, name: str, x: Any) -> AxisSharding:
        """Return the sharding of an array of the batch over replicas."""
        return ROWS if self.is_split(name, x) and self.plan.options.replicas > 1 else SAME
