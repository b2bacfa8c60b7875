"""Plan of `dtrans.sharding`: the program of all ranks, and the bytes that they store and send."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.errors import ConfigError
from dtrans.ir.cost import nbytes
from dtrans.ir.selection import values_at
from dtrans.zero.mixed_precision import scale_types


if TYPE_CHECKING:
    from dtrans.engine.layout import Gathered, Sliced
    from dtrans.zero.by_leaf.layout import LeafOwners
    from dtrans.zero.choose_slices import Slices
    from dtrans.zero.options import ShardingOptions


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardingPlan(CollectivePlan):
    """Plan of sharded data-parallel training (ZeRO), which `dtrans.sharding` returns.

    It also has the attributes of `CollectivePlan`.

    Attributes:
      slices: the sliced parameters; and for each other parameter, the reason why it is not sliced.
      gathers: the values that the update must gather because slices do not suffice, with reasons.
      owned: the owner of each parameter, if each rank updates complete parameters. None if
        parameters are sliced.
    """

    options: ShardingOptions
    slices: Slices = dataclasses.field(compare=False)
    gathers: tuple[Gathered, ...] = ()
    owned: LeafOwners | None = None
    strategy = "sharding"

    @cached_property
    def sliced(self) -> dict[str, Sliced]:
        """Parameters and state that ranks store as slices between steps, by name."""
        params = self.slices.leaves if self.options.slices_params else {}
        bins = self.owned.sliced if self.owned else {}
        return {**params, **self.slices.state, **bins}

    @property
    def extra_state(self) -> Mapping[str, Any]:
        return scale_types(self.options.precision.scaling)

    def for_trainers(self, trainers: int) -> ShardingPlan:
        """Return the plan of the same step for another number of ranks.

        The number of ranks in a group stays the same, and the number of groups changes. For
        degree=4, 12 ranks form 3 groups.

        Raises:
          ConfigError: the number is not a multiple of the degree.
        """
        if trainers == self.trainers:
            return self
        degree = self.options.degree
        if trainers % degree:
            raise ConfigError(
                f"the number of ranks is {trainers}, expected a multiple of degree={degree}; "
                f"start {degree * max(1, trainers // degree)} ranks"
            )
        options = dataclasses.replace(self.options, trainers=trainers, replicas=trainers // degree)
        replanned: ShardingPlan = self.replan(options)
        return replanned

    # -- cost ------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Return the bytes that a rank stores between steps.

        Returns:
          A dict with three sizes: "params" and "opt_state" include padding, and "padding" is the
          padding in both together.
        """
        padding = 0
        for name, slices_by_axis in self.slices_by_axis.items():
            if name in self.main.inputs:
                t, count = (
                    self.main.inputs[name],
                    math.prod(s.degree for s in slices_by_axis.values()),
                )
                excess = self.program.inputs[name].size * count - t.size
                padding += excess * t.dtype.itemsize // count
        if self.owned is not None:
            padding += self.owned.state.padding // self.options.degree
        params, opt_state = self.program.args[:2]
        found = {}
        for kind, spec in (("params", params), ("opt_state", opt_state)):
            found[kind] = sum(map(nbytes, values_at(self.program.inputs, spec.names)))
        return {**found, "padding": padding}

    # -- showing ---------------------------------------------------------------------------------

    @cached_property
    def notes(self) -> list[str]:
        """Sentences for the user about this plan, which are printed below its table."""
        notes = [] if self.shared is None else list(self.shared.notes)
        stored = ", ".join(f"{count:,} bytes of {kind}" for kind, count in self.memory().items())
        notes.append(f"each rank holds {stored}")
        for (kind, axis), count in self.traffic().items():
            notes.append(f"{kind} over {axis}: {count:,} bytes per step")
        notes += self.device_notes
        for x in self.gathers:
            array = f"{x.dtype}{list(x.shape)}"
            notes.append(f"the update gathers {array}, {x.nbytes:,} bytes, for {x.reason}")
        if self.owned:
            notes += self.owned.notes
        for leaf, why in self.slices.unsliced.items():
            notes.append(f"{leaf} is complete on every rank: {why}")
        computed = () if self.shared is None else self.shared.undivided_state
        notes += [f"{n}: {way}" for n, way in self.merges.items() if n not in computed]
        return notes + list(self.callback_notes)

    @property
    def _title(self) -> str:
        options = self.options
        groups = f"{options.replicas} groups of " if options.replicas > 1 else ""
        ranks = f"{groups}{options.degree} ranks"
        if self.has_mesh:
            ranks = self.mesh_text
        return f"sharding plan of {self.main.name}: stage {options.stage}, {ranks}"
