"""Backends of collective jobs: the interface to the trainers, and the layout of a step over them."""

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
      axes: the axes of the trainers, with their sizes.
      sliced: the dimension of slices of each array of the state; None if it is whole.
      shares: the share of each array of the batch that a trainer has
        (`dtrans.run.base.batch.Share`).
      ways: the way to merge each output. `same`: equal on all trainers. `first`: the first
        trainer's. `concat`: rows joined along a dimension. `each`: a row for each trainer. `slice`:
        a slice along a dimension.
      rules: makes the rules of communication of a trace.
    """

    axes: tuple[tuple[str, int], ...]
    sliced: tuple[int | None, ...]
    shares: tuple[Share, ...]
    ways: tuple[tuple[str, int | None], ...]
    rules: Callable[[], Rules] = lambda: OVER_AXIS

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def ins(self) -> list[AxisSharding]:
        """Return the shardings of the state's arrays and the batch's."""
        state = [slices_along(axis, self.names) for axis in self.sliced]
        return [*state, *(parts_along(share, self.names) for share in self.shares)]

    @property
    def outs(self) -> list[AxisSharding]:
        """Return the shardings of the outputs."""
        return [self._out(way, axis) for way, axis in self.ways]

    def _out(self, way: str, axis: int | None) -> AxisSharding:
        if way == "slice":
            return slices_along(axis, self.names)
        if way == "concat":
            return parts_along(axis or 0, self.names)
        if way == "each":
            return AxisSharding(stacked=self.names)
        return AxisSharding(first=self.names if way == "first" else ())


@functools.cache
def slices_along(axis: int | None, names: tuple[str, ...]) -> AxisSharding:
    """Return the sharding of an array of the state: slices over the last axis, the same in all
    groups."""
    return AxisSharding().cut_along(axis, names[-1])


@functools.cache
def parts_along(share: Share, names: tuple[str, ...]) -> AxisSharding:
    """Return the sharding of an array of the batch: parts for all trainers, or the whole for
    each."""
    return AxisSharding() if isinstance(share, str) else AxisSharding().cut_along(share, *names)


class Trainers(abc.ABC):
    """Backend of a collective job: places arrays, and maps a trainer's program over all trainers.

    Attributes:
      mesh: the devices of the trainers; None if one device simulates all.
      run_id: the default tag of the run's checkpoints.
      here: the number of trainers that take their part of the batch from this process.
      part: the number of this process's part of a batch, and the number of parts.
      who: the trainers of this process, in errors; empty for "N trainers".
    """

    mesh: Mesh | None
    run_id: str
    here: int
    part = (0, 1)
    who = ""

    def at(self, axis: int | None) -> NamedSharding | None:
        """Return the sharding of an array of the state: slices along a dimension, or replicas."""
        return None

    @abc.abstractmethod
    def everywhere(self, xs: Sequence[Any]) -> list[Any]:
        """Replicate arrays of this process over all trainers."""

    @abc.abstractmethod
    def state(self, x: Any, axis: int | None) -> Any:
        """Place an array of a state from elsewhere, such as a checkpoint, for steps."""

    def batch(self, arrays: Sequence[Any], shares: Sequence[Share]) -> Sequence[Any]:
        """Place this process's part of a batch for steps."""
        return arrays

    def check_start(self, startup: ClosedJaxpr) -> None:  # noqa: B027
        """Check that all processes have the same startup program, if each computes its slices."""

    def check_step(self, program: Program, split: Sequence[str], merges: Mapping[str, str]) -> None:  # noqa: B027
        """Check that all processes are about to run the same program."""

    def whole(self, x: Any, axis: int | None, size: int) -> Any:
        """Return an array of the state without its padding, in this process."""
        if axis is None or x.shape[axis] == size:
            return x
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)

    def results(self, tree: Any) -> Any:
        """Return results, in this process."""
        return tree

    def stepping(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that a step runs in."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def mapped(self, program: Program, layout: StepLayout) -> Function:
        """Map a trainer's program over all trainers.

        Returns:
          A function of the arrays of state and batch that returns merged outputs.
        """
