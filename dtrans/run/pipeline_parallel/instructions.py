"""Instructions of a pipelined step. They read and write values in numbered slots.

RunStage    runs a compiled program on a stage
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
    """Run of a compiled program on a stage.

    Attributes:
      stage: the stage.
      fn: the compiled program.
      reads, makes: the slots of its operands, and of its outputs.
      what: a name for display.
      task: the task of the schedule that the program runs; None for other programs.
    """

    stage: int
    fn: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    what: str
    task: Task | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """Transfer of a value to another slot, on another stage or on the host.

    Attributes:
      source, target: the slots from which and to which the value is copied.
      origin, stage: the stages that send and receive the value.
      kind: the sharding of the value on the receiving stage.
      what: a name for display.
      to_host: True if the value goes to the memory of the receiving host, not to its devices.
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
    """Step of a pipeline as a list of instructions.

    Attributes:
      instructions: (instruction, slots to empty after it), in order.
      size: the number of slots.
      inputs: (place, name) -> slot, for the arrays of the state and of the batch.
      fixed: slot -> value, for constants: indices of micro-batches, constant outputs of the update.
      state: (place, name) -> slot, for the arrays of the new state.
      results: name of a result -> (slot, sharding, the stage that computes it).
      saved: (stage, micro-batch) -> the slots of values saved from forward to backward.
      in_flight: slot -> stage, for the slots that contain values of a single micro-batch.
      values: the program of precomputed values, if micro-batches read any.
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
        """A line of text for each instruction, equal in all processes of a job."""
        return [f"{type(ins).__name__} {ins.stage} {ins.what}" for ins, _ in self.instructions]
