"""State of a collective job: names, types and slices of its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.ir.selection import subset
from dtrans.run.base.state import missing_array


class StateArrays:
    """Names and slices of the arrays in a plan's state.

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
        main, program, slices = self._plan.main.inputs, self._plan.program.inputs, self._plan.sliced
        types = {}
        for n in self.names:
            types[n] = main.get(n, program[n])
            if n in slices:
                types[n] = slices[n].padded_type(types[n])
        return types

    def slice_axis(self, name: str) -> int | None:
        """Return the dimension along which an array is sliced; None for a replicated array."""
        sliced = self._plan.sliced.get(name)
        return None if sliced is None else sliced.axis

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
        """Return a state of these arrays."""
        parts = []
        for names in self._parts:
            parts.append(subset(arrays, names))
        return CollectiveState(*parts)

    def unpad(self, name: str, x: Any) -> Any:
        """Remove the padding of a global array; call it inside jit."""
        sliced = self._plan.sliced.get(name)
        if sliced is None or x.shape[sliced.axis] == sliced.size:
            return x
        return jax.lax.slice_in_dim(x, 0, sliced.size, axis=sliced.axis)
