"""Builder that collects the slots and instructions of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrans.pipeline_parallel.staged_model import StepPrograms
from dtrans.pipeline_parallel.task import Task
from dtrans.run.base.spmd import AxisSharding
from dtrans.run.pipeline_parallel.instructions import Instruction, RunStage, Transfer
from dtrans.run.pipeline_parallel.slots import Slots
from dtrans.run.pipeline_parallel.stage_devices import StageBackend
from dtrans.run.pipeline_parallel.stage_placement import StagePlacement


@dataclasses.dataclass(frozen=True, eq=False)
class StepBuilder:
    """Builder of a pipelined step, which collects its instructions and numbers their values.

    Attributes:
      at: the devices of the plan's stages.
      programs: the programs of a micro-batch.
      batch: shapes and dtypes, by name: arrays of the global batch, and values that the job
        computes from the global batch before the micro-batches.
      slots: the slots (numbers of values) that were requested so far.
      instructions: the instructions that were written so far.
    """

    at: StagePlacement
    programs: StepPrograms
    batch: Mapping[str, Any]
    slots: Slots
    instructions: list[Instruction] = dataclasses.field(default_factory=list)

    def run(
        self,
        key: Any,
        fn: Callable[[], Callable[..., Sequence[Any]]],
        stage: int,
        reads: Sequence[int],
        makes: Sequence[int],
        what: str,
        *,
        task: Task | None = None,
        donated: Sequence[int] = (),
        on: StageBackend | None = None,
    ) -> None:
        """Write an instruction that runs a function. Each backend compiles the function once.

        Args:
          key: a key that identifies the function in the plan.
          fn: returns the function for one replica. It is called only before the first compilation.
          stage: the stage that runs the function.
          reads, makes: the slots of the function's operands, and of its outputs.
          what: a name for display.
          task: the task of the schedule that the function runs; None for other functions.
          donated: the positions of operands with memory that the function may reuse.
          on: the backend that runs the function; by default the devices of the stages.
        """
        backend, kinds = self.at.backend, self.slots.kinds
        ins, outs = tuple(map(kinds.__getitem__, reads)), tuple(map(kinds.__getitem__, makes))
        full_key = (key, ins, outs, tuple(donated))
        if full_key not in backend.known:
            backend.known[full_key] = (on or backend).compiled(fn(), stage, ins, outs, donated)
        compiled = backend.known[full_key]
        self.instructions.append(RunStage(stage, compiled, tuple(reads), tuple(makes), what, task))

    def move(
        self,
        source: int,
        target: int,
        stages: tuple[int, int],
        kind: AxisSharding,
        what: str,
        *,
        to_host: bool = False,
    ) -> None:
        """Write an instruction that moves a value to another slot.

        Args:
          source, target: the slots from which, and to which, the value is copied.
          stages: the pair (sending stage, receiving stage).
          kind: the sharding of the value on the receiving stage.
          what: a name for display.
          to_host: True if the value goes to the memory of the receiving host.
        """
        self.instructions.append(Transfer(source, target, *stages, kind, what, to_host=to_host))
