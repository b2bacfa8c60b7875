"""Builder of a step: its slots, and the instructions so far."""

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
    """A step while it is written.

    Attributes:
      at: the placement of the plan.
      programs: the programs of a micro-batch.
      batch: name to type of the arrays of the global batch, and of precomputed values.
      slots: the slots so far.
      instructions: the instructions so far.
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
        """Write a run of a function, compiled once for all schedules.

        Args:
          key: the identity of the function among those of a plan.
          fn: returns the function of one replica; called if it is not compiled yet.
          stage: the stage that runs it.
          reads, makes: slots of its operands and outputs.
          what: its name, for display.
          task: its task in the schedule, if it is one.
          donated: positions of operands with memory that it may reuse.
          on: the backend that runs it, if not the placement's.
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
        """Write a transfer between slots; `stages` are the sender and the receiver."""
        self.instructions.append(Transfer(source, target, *stages, kind, what, to_host=to_host))
