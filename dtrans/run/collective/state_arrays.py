"""Names, shapes and shardings of the arrays in the state of a collective job."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.ir.selection import subset
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.base.state import missing_array
from dtrans.run.collective.trainers import without_padding


class StateArrays:
    """Description of a job's state: the name, type and sharding of each of its arrays.

    With `dtrans.sharding`, an array may be divided into slices, one per device. It is then padded
    so that the slices have equal size.

    Args:
      plan: the plan of the job.

    Attributes:
      names: the names of all arrays, in the order of the program's inputs.
    """

    def __init__(self, plan: CollectivePlan) -> None:
        params, opt_state = plan.program.args[:2]
        self._plan = plan
        self._parts = params.names, opt_state.names, tuple(plan.extra_state)
        self.names = [n for part in self._parts for n in part]

    @cached_property
    def types(self) -> dict[str, Any]:
        """Type of each global array, including padding, by name."""
        main, program, slices_by_axis = (
            self._plan.main.inputs,
            self._plan.program.inputs,
            self._plan.slices_by_axis,
        )
        types = {}
        for n in self.names:
            types[n] = main.get(n, program[n])
            for sliced in slices_by_axis.get(n, {}).values():
                types[n] = sliced.padded_type(types[n])
        return types

    def sharding(self, name: str) -> AxisSharding:
        """Return the sharding of an array over the axes of the plan."""
        return state_sharding(self._plan, name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a sliced array without padding; None for a replicated array."""
        slices_by_axis = self._plan.slices_by_axis.get(name)
        if slices_by_axis is None:
            return None
        shape = list(self.types[name].shape)
        for sliced in slices_by_axis.values():
            shape[sliced.axis] = sliced.size
        return tuple(shape)

    def arrays(self, state: CollectiveState) -> dict[str, Any]:
        """Return the arrays of a state by name.

        Raises:
          StateError: the state belongs to another job.
        """
        parts = (state.params, state.opt_state, state.extra)
        arrays: dict[str, Any] = {}
        try:
            for part, names in zip(parts, self._parts, strict=True):
                arrays.update((n, part[n]) for n in names)
            return arrays
        except KeyError as e:
            raise missing_array(e.args[0]) from e

    def state(self, arrays: Mapping[str, Any]) -> CollectiveState:
        """Build a state from its arrays, by name. Other entries of `arrays` are ignored."""
        parts = []
        for names in self._parts:
            parts.append(subset(arrays, names))
        return CollectiveState(*parts)

    def unpad(self, name: str, x: Any) -> Any:
        """Remove the padding from an array that was padded to equal slices; call this in a jit."""
        shape = self.shape(name)
        return x if shape is None else without_padding(x, shape)


def state_sharding(plan: CollectivePlan, name: str) -> AxisSharding:
    """Return the sharding of an array of a plan's state."""
    slices_by_axis = plan.slices_by_axis.get(name, {})
    return AxisSharding.from_dims(
        {mesh_axis: sliced.axis for mesh_axis, sliced in slices_by_axis.items()}
    )
