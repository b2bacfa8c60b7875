"""State of a collective job: its arrays by name, which of them are sliced, and their types."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax

from dtrans.data_parallel.plan import CollectivePlan
from dtrans.data_parallel.state import CollectiveState
from dtrans.errors import StateError


class StateArrays:
    """Names and slices of the arrays in a plan's state.

    Args:
      plan: the plan.

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
        """Name to type of each array, all slices and their padding included."""
        main, program, cuts = self._plan.main.inputs, self._plan.program.inputs, self._plan.cuts
        whole = {n: main.get(n, program[n]) for n in self.names}
        return {n: cuts[n].of_all(t) if n in cuts else t for n, t in whole.items()}

    def slice_axis(self, name: str) -> int | None:
        """Return the dimension along which an array is sliced over the last axis; None if it is
        replicated."""
        cut = self._plan.cuts.get(name)
        return None if cut is None else cut.axis

    def arrays(self, state: CollectiveState) -> dict[str, Any]:
        """Return the arrays of a state by name. Raises StateError for a state of another job."""
        parts = zip((state.params, state.opt_state, state.extra), self._parts, strict=True)
        try:
            return {n: part[n] for part, names in parts for n in names}
        except KeyError as e:
            raise StateError(f"this is not a state of this job: it has no {e.args[0]}") from e

    def state(self, arrays: Mapping[str, Any]) -> CollectiveState:
        """Return the state that has these arrays."""
        return CollectiveState(*({n: arrays[n] for n in names} for names in self._parts))

    def unpad(self, name: str, x: Any) -> Any:
        """Return all slices of an array without their padding; traced."""
        cut = self._plan.cuts.get(name)
        if cut is None or x.shape[cut.axis] == cut.size:
            return x
        return jax.lax.slice_in_dim(x, 0, cut.size, axis=cut.axis)
