"""Interface of the backends of collective jobs, and the layout of arrays over trainers."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from dtrans._jax import ClosedJaxpr
from dtrans.ir.program import Program
from dtrans.ops import OVER_AXIS
from dtrans.run.base.batch import Share
from dtrans.run.base.segments import Rules
from dtrans.run.base.spmd import AxisSharding, Function


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Layout of a step's inputs and outputs over trainers.

    Attributes:
      axes: the axes of the trainers, as pairs (name, size).
      sliced: for each array of the state, the sliced dimension; None if it is replicated.
      shares: for each array of the batch, the split dimension, "replicated" or "key".
      ways: for each output, a pair (merge rule, dimension or None). "same": all trainers have one
        value. "first": take the value of the first trainer. "concat": concatenate rows along the
        dimension. "each": stack the values of all trainers. "slice": the output is sliced state.
      rules: returns the implementation of each communication primitive, for one trace.
    """

    axes: tuple[tuple[str, int], ...]
    sliced: tuple[int | None, ...]
    shares: tuple[Share, ...]
    ways: tuple[tuple[str, int | None], ...]
    rules: Callable[[], Rules] = lambda: OVER_AXIS

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def ins(self) -> list[AxisSharding]:
        """Shardings of the inputs: arrays of the state, then of the batch."""
        state = [slice_sharding(axis, self.names) for axis in self.sliced]
        return [*state, *(part_sharding(share, self.names) for share in self.shares)]

    @property
    def outs(self) -> list[AxisSharding]:
        """Shardings of the outputs."""
        return [self._out(way, axis) for way, axis in self.ways]

    def _out(self, way: str, axis: int | None) -> AxisSharding:
        if way == "slice":
            return slice_sharding(axis, self.names)
        if way == "concat":
            return part_sharding(axis or 0, self.names)
        if way == "each":
            return AxisSharding(stacked=self.names)
        return AxisSharding(first=self.names if way == "first" else ())


@functools.cache
def slice_sharding(axis: int | None, names: tuple[str, ...]) -> AxisSharding:
    """Return the sharding of an array of the state: sliced over the last axis, or replicated."""
    return AxisSharding().sharded_along(axis, names[-1])


@functools.cache
def part_sharding(share: Share, names: tuple[str, ...]) -> AxisSharding:
    """Return the sharding of an array of the batch: split over all trainers, or replicated."""
    if isinstance(share, str):
        return AxisSharding()
    return AxisSharding().sharded_along(share, *names)


class Trainers(abc.ABC):
    """Backend of a collective job: places arrays, and maps a trainer's program over all trainers.

    Attributes:
      mesh: the devices of the trainers; None if one device simulates all.
      run_id: the default tag of the run's checkpoints.
      here: number of trainers whose rows of the batch this process passes.
      part: (index of this process's part of the batch, number of parts).
      who: name of this process's trainers in errors; "" for the default, "N trainers".
    """

    mesh: Mesh | None
    run_id: str
    here: int
    part = (0, 1)
    who = ""

    def state_sharding(self, axis: int | None) -> NamedSharding | None:
        """Return the sharding of an array of the state, sliced along a dimension or replicated."""
        return None

    @abc.abstractmethod
    def replicate(self, xs: Sequence[Any]) -> list[Any]:
        """Replicate arrays of this process over all trainers."""

    @abc.abstractmethod
    def place_state(self, x: Any, axis: int | None) -> Any:
        """Put an array of a state on the trainers' devices, for example after a restore."""

    def place_batch(self, arrays: Sequence[Any], shares: Sequence[Share]) -> Sequence[Any]:
        """Put this process's part of a batch on the trainers' devices."""
        return arrays

    def check_start(self, startup: ClosedJaxpr) -> None:  # noqa: B027
        """Check that all processes have the same startup program.

        The job calls this only if each process computes slices of the first state. If the state is
        replicated, trainer 0 broadcasts it, and no check is needed.
        """

    def check_step(  # noqa: B027
        self, program: Program, split: Sequence[str], merges: Mapping[str, str]
    ) -> None:
        """Check that all processes are about to run the same program."""

    def unshard(self, x: Any, axis: int | None, size: int) -> Any:
        """Gather a global array; return it in this process, without padding.

        Args:
          x: the global array.
          axis: the dimension of slices; None for a replicated array.
          size: the length of this dimension without padding.
        """
        if axis is None or x.shape[axis] == size:
            return x
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)

    def to_local(self, tree: Any) -> Any:
        """Return the results as arrays of this process."""
        return tree

    def step_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which to run a step."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def map_program(self, program: Program, layout: StepLayout) -> Function:
        """Map a trainer's program over all trainers.

        Returns:
          A function of the arrays of state and batch that returns merged outputs.
        """
