"""A pipelined step as a list of instructions, on values in numbered slots.

RunStage    a compiled program of a stage, on values that are there
Transfer    a value from one stage to another
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from dtrans.ir.program import Program
from dtrans.pipeline_parallel.task import Task
from dtrans.run.base.spmd import AxisSharding


@dataclasses.dataclass(frozen=True, eq=False)
class RunStage:
    """Run a program.

    Attributes:
      stage: whose.
      fn: on the values of `reads`; what it makes goes to `makes`.
      task: what it is in the schedule, if it is of that.
      what: for showing.
    """

    stage: int
    fn: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    what: str
    task: Task | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """Move a value from a slot to another, and from a stage to another.

    Attributes:
      source, target: the slots.
      origin, stage: from whose to whose.
      kind: how replicas have it.
      what: for showing.
      to_host: whether it goes to the host of the stage, not to its devices.
    """

    source: int
    target: int
    origin: int
    stage: int
    kind: AxisSharding
    what: str
    to_host: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source,)

    @property
    def makes(self) -> tuple[int, ...]:
        return (self.target,)


Instruction: TypeAlias = RunStage | Transfer


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """A step.

    Attributes:
      instructions: in order, each with the slots that are empty after it.
      size: how many slots there are.
      given: slot of each array of the state and of the batch, by (place, name).
      fixed: slots whose values are always the same: numbers of micro-batches, constants.
      state: slot of each array of the new state, by (place, name).
      results: slot of each result, the kind that it is of, and the stage that makes it.
      kept: by (stage, micro-batch), slots of what is kept from forward to backward.
      passing: the stage of each slot that is of one micro-batch.
      values: makes what micro-batches are given beside the batch, from the whole of it, if
        anything.
    """

    instructions: tuple[tuple[Instruction, tuple[int, ...]], ...]
    size: int
    given: dict[tuple[int, str], int]
    fixed: dict[int, Any]
    state: dict[tuple[int, str], int]
    results: dict[str, tuple[int, AxisSharding, int]]
    kept: dict[tuple[int, int], tuple[int, ...]]
    passing: dict[int, int]
    values: Program | None = None

    @property
    def lines(self) -> list[str]:
        """What each instruction is; the same in all processes of a job."""
        return [f"{type(ins).__name__} {ins.stage} {ins.what}" for ins, _ in self.instructions]
