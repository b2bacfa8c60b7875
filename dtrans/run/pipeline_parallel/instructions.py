"""Instructions of a pipelined step, on values in numbered slots.

RunStage    runs a compiled program of a stage
Transfer    moves a value from one stage to another
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
    """Run of a compiled program.

    Attributes:
      stage: the stage that runs it.
      fn: the program, on the values of `reads`; its outputs go to `makes`.
      reads, makes: slots.
      what: its name, for display.
      task: its task in the schedule, if it is one.
    """

    stage: int
    fn: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    what: str
    task: Task | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """Transfer of a value to another slot, and to another stage.

    Attributes:
      source, target: the slots.
      origin, stage: the stages that send and receive it.
      kind: its sharding over the replicas of a stage.
      what: its name, for display.
      to_host: True if it goes to the memory of the host, not to the devices of the stage.
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
    """Step of a pipeline as instructions.

    Attributes:
      instructions: in order, each with the slots to empty after it.
      size: the number of slots.
      inputs: (place, name) of each array of the state and of the batch, to its slot.
      fixed: slots with constants: indices of micro-batches, constant outputs of the update.
      state: (place, name) of each array of the new state, to its slot.
      results: name of each result, to its slot, its sharding, and the stage that computes it.
      saved: (stage, micro-batch) to the slots of values saved from forward to backward.
      in_flight: each slot of a value of one micro-batch, to its stage.
      values: the program of precomputed values of the batch, if micro-batches read any.
    """

    instructions: tuple[tuple[Instruction, tuple[int, ...]], ...]
    size: int
    inputs: dict[tuple[int, str], int]
    fixed: dict[int, Any]
    state: dict[tuple[int, str], int]
    results: dict[str, tuple[int, AxisSharding, int]]
    saved: dict[tuple[int, int], tuple[int, ...]]
    in_flight: dict[int, int]
    values: Program | None = None

    @property
    def lines(self) -> list[str]:
        """A line for each instruction, the same in all processes of a job."""
        return [f"{type(ins).__name__} {ins.stage} {ins.what}" for ins, _ in self.instructions]
