"""Interface of the backends of collective jobs, and the layout of arrays over trainers."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from dtrans._jax import ClosedJaxpr
from dtrans.ir.program import Program
from dtrans.ops import OVER_AXIS
from dtrans.run.base.segments import Rules
from dtrans.run.base.spmd import AxisSharding, Function


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Distribution of a step's inputs and outputs over trainers, and the rules that merge outputs.

    A backend reads this description to run the program of one trainer on all trainers.

    Attributes:
      axes: all axes of the devices, as pairs (name, size).
      over: the axes that split the batch. Devices along other axes have the same rows.
      state: the sharding of each array of the state.
      batch: the sharding of each array of the batch.
      ways: for each output, a pair (merge rule, dimension or sharding). "same": all trainers have
        one value. "first": take the value of the first trainer. "concat": concatenate rows along
        the dimension. "each": stack the values of all trainers. "state": the output is an array of
        the state with the sharding.
      rules: returns the implementation of each communication primitive, for one trace.
    """

    axes: tuple[tuple[str, int], ...]
    over: tuple[str, ...]
    state: tuple[AxisSharding, ...]
    batch: tuple[AxisSharding, ...]
    ways: tuple[tuple[str, Any], ...]
    rules: Callable[[], Rules] = lambda: OVER_AXIS

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def ins(self) -> list[AxisSharding]:
        """Shardings of the inputs: arrays of the state, then of the batch."""
        return [*self.state, *self.batch]

    @property
    def outs(self) -> list[AxisSharding]:
        """Shardings of the outputs."""
        return [self._out(way, how) for way, how in self.ways]

    def _out(self, way: str, how: Any) -> AxisSharding:
        if way == "state":
            sharding: AxisSharding = how
            return sharding
        if way == "concat":
            return AxisSharding().sharded_along(how or 0, *self.over)
        if way == "each":
            return AxisSharding(stacked=self.over)
        return AxisSharding(first=self.names if way == "first" else ())


def without_padding(x: Any, shape: tuple[int, ...]) -> Any:
    """Remove the padding at the end of each dimension, so that the array has the shape `shape`."""
    return x if x.shape == shape else jax.lax.slice(x, (0,) * x.ndim, shape)


class Trainers(abc.ABC):
    """Backend of a collective job: decides where trainers run, and runs one program on all of them.

    Attributes:
      mesh: the devices of the trainers; None if one device simulates all.
      run_id: identifier of this run, which its checkpoints record.
      here: number of trainers whose rows of the batch this process passes.
      part: (index of this process's part of the batch, number of parts).
      who: name of this process's trainers in errors; "" for the default, "N trainers".
    """

    mesh: Mesh | None
    run_id: str
    here: int
    part = (0, 1)
    who = ""

    def state_sharding(self, sharding: AxisSharding) -> NamedSharding | None:
        """Return the sharding of an array of the state over the mesh."""
        return None

    @abc.abstractmethod
    def replicate(self, xs: Sequence[Any]) -> list[Any]:
        """Put a copy of each array on every trainer.

        In a job of several processes, all copies have the values of trainer 0.
        """

    @abc.abstractmethod
    def place_state(self, x: Any, sharding: AxisSharding) -> Any:
        """Put an array of a state on the trainers' devices, for example after a restore."""

    def place_batch(
        self, arrays: Sequence[Any], shardings: Sequence[AxisSharding]
    ) -> Sequence[Any]:
        """Put this process's part of a batch on the trainers' devices."""
        return arrays

    def check_start(self, startup: ClosedJaxpr) -> None:  # noqa: B027
        """Check that all processes have the same startup program, before they compute the state.

        The job calls this only if each process computes its own slices of the first state. If the
        state is replicated, trainer 0 broadcasts it, and no check is needed.
        """

    def check_step(  # noqa: B027
        self, program: Program, split: Sequence[str], merges: Mapping[str, str]
    ) -> None:
        """Check that all processes will run the same program, because their collectives could hang.

        Args:
          program: the program of one trainer.
          split: names of the batch arrays that are split over trainers.
          merges: the rule that merges each output, by name.
        """

    def unshard(self, x: Any, shape: tuple[int, ...] | None) -> Any:
        """Return the complete value of an array of the state in this process, without padding.

        If the array is divided among devices, its slices are gathered first.

        Args:
          x: the global array.
          shape: its shape without padding; None for a replicated array.
        """
        return x if shape is None else without_padding(x, shape)

    def to_local(self, tree: Any) -> Any:
        """Convert the results of a step to arrays that this process can read without the others."""
        return tree

    def step_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager around each step, for example to convert errors."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def map_program(self, program: Program, layout: StepLayout) -> Function:
        """Return a function that runs the program of one trainer on all trainers.

        Args:
          program: the program of one trainer.
          layout: the distribution of inputs and outputs over trainers.

        Returns:
          A function of the arrays of state and batch that returns merged outputs.
        """
