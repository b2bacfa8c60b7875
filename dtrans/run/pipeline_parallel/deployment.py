"""A plan on its devices: where the arrays of its state and its batches are, and how the replicas of
a stage have them.

State is in *places*. The place of a parameter is a device, since the stages of one device share it;
that of all other state is a stage. What every stage has (a count of steps) is in each of them.
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
from dtrans.pipeline_parallel.results import is_whole
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.pipeline_parallel.instructions import Transfer
from dtrans.run.pipeline_parallel.stage_devices import (
    EACH,
    FIRST,
    ROWS,
    SAME,
    Host,
    Places,
    cut_along,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Deployment:
    """A plan on its devices.

    Attributes:
      plan: what runs.
      places: where stages are.
      mine: the stages, and so the places, of this process.
      donate: whether a step may reuse the memory of the state that it is given.
    """

    plan: PipelinePlan
    places: Places
    mine: frozenset[int]
    donate: bool

    @cached_property
    def host(self) -> Host | None:
        """Where parameters are between uses, if not where stages are."""
        return Host(self.places.replicas) if self.plan.options.memory.offload else None

    @property
    def at_rest(self) -> Places:
        """Where state is between steps."""
        return self.host or self.places

    def put(self, move: Transfer, x: Any) -> Any:
        """A value where it is moved to."""
        return (self.at_rest if move.to_host else self.places).put(x, move.stage, move.kind)

    # -- state -----------------------------------------------------------------------------------

    def place(self, name: str, stage: int) -> int:
        """The place of an array of the state of a stage."""
        return self.plan.device_of(stage) if name in self.plan.model.homes else stage

    def first_place(self, name: str) -> int:
        """The place that holds an array of the state; the first of them, where every stage has
        it."""
        home = self.plan.home(name)
        return 0 if home is None else self.place(name, home)

    def state_kind(self, name: str) -> AxisSharding:
        """How the replicas and shards of a stage have an array of its state."""
        axis = self.plan.update.slice_axis(name) if self.plan.options.replicas > 1 else None
        return (SAME if axis is None else cut_along(axis)).cut_along(
            self.plan.model.cuts.state.get(name), SPLIT
        )

    # -- what a step makes -----------------------------------------------------------------------

    @property
    def own(self) -> AxisSharding:
        """The kind of what each replica has for itself."""
        return EACH if self.plan.options.replicas > 1 else SAME

    def sum_kind(self, leaf: str) -> AxisSharding:
        """How replicas have the sum of a leaf's gradients."""
        return self.own.cut_along(self.plan.model.cuts.state.get(leaf), SPLIT)

    def update_kind(self, name: str) -> AxisSharding:
        """How replicas have an input of the update."""
        found = self.plan.update.sums.get(name)
        return self.state_kind(name) if found is None else self.sum_kind(found[0])

    def result_kind(self, name: str) -> AxisSharding:
        """How replicas have a result, merged over micro-batches."""
        if is_whole(self.plan.model.merges[name]) or self.plan.options.replicas == 1:
            return SAME
        # all replicas make the same of state
        return FIRST if name in self.plan.model.homes else EACH

    # -- batches ---------------------------------------------------------------------------------

    def is_split(self, name: str, x: Any) -> bool:
        """Whether micro-batches have parts of an array of the batch."""
        return bool(x.shape) and not is_under(name, self.plan.options.batch.unsplit_inputs)

    def is_key(self, name: str, x: Any) -> bool:
        """Whether each micro-batch gets a key of its own."""
        is_one = not x.shape and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return is_one and not is_under(name, self.plan.options.batch.unsplit_inputs)

    def batch_kind(self, name: str, x: Any) -> AxisSharding:
        """How replicas have an array of the batch."""
        return ROWS if self.is_split(name, x) and self.plan.options.replicas > 1 else SAME
