"""Instructions of a pipelined step. Their operands and results are in numbered *slots*.

A slot is an entry of a list of values. It is emptied after its last reader, to free the memory.

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
    """Instruction that runs a compiled program on a stage.

    Attributes:
      stage: index of the stage.
      fn: the compiled program.
      reads, writes: the slots of the program's operands, and of its outputs.
      label: a name of the instruction, for display.
      task: the task of the schedule that the program runs; None for other programs.
    """

    stage: int
    fn: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    label: str
    task: Task | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """Instruction that copies a value to another slot, on another stage or on the host.

    Attributes:
      source, target: the slots from which, and to which, the value is copied.
      origin, stage: the sending and the receiving stage.
      kind: the sharding of the value on the receiving stage.
      label: a name of the value, for display.
      to_host: True if the value goes to the memory of the receiving host, not to its devices.
    """

    source: int
    target: int
    origin: int
    stage: int
    kind: AxisSharding
    label: str
    to_host: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.target,)


Instruction: TypeAlias = RunStage | Transfer


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """Step of a pipeline as a list of instructions.

    Attributes:
      instructions: pairs (instruction, slots to empty after it), in order.
      size: the number of slots.
      inputs: maps (stage or device, name) to the slot of an array of the state or of the batch.
      fixed: maps the slot of each constant to its value. Constants are indices of micro-batches,
        and constant outputs of the update.
      state: like `inputs`, for the arrays of the new state.
      results: maps each result's name to (slot, sharding, the stage that computes the result).
      saved: maps (stage, micro-batch) to the slots of the values that the backward pass reads.
      in_flight: maps each slot with a value of a single micro-batch to the value's stage.
      values: the program for values of the full batch that micro-batches read. It runs before them.
        None if they read no such values.
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
        """One line of text for each instruction. All processes of a job have the same lines."""
        return [f"{type(ins).__name__} {ins.stage} {ins.label}" for ins, _ in self.instructions]
