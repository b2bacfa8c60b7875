"""A step while it is written: its slots, and the instructions so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrans.pipeline_parallel.staged_model import StepPrograms
from dtrans.pipeline_parallel.task import Task
from dtrans.run.pipeline_parallel.deployment import Deployment
from dtrans.run.pipeline_parallel.instructions import Instruction, RunStage
from dtrans.run.pipeline_parallel.slots import Slots
from dtrans.run.pipeline_parallel.stage_devices import Places


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """A step while it is written.

    Attributes:
      at: where it runs.
      programs: of its micro-batches.
      batch: name to type of the arrays of the whole batch.
      slots, instructions: what there is of it.
    """

    at: Deployment
    programs: StepPrograms
    batch: Mapping[str, Any]
    slots: Slots
    instructions: list[Instruction] = dataclasses.field(default_factory=list)

    def run(
        self,
        of: Any,
        fn: Callable[[], Callable[..., Sequence[Any]]],
        stage: int,
        reads: Sequence[int],
        makes: Sequence[int],
        what: str,
        *,
        task: Task | None = None,
        donated: Sequence[int] = (),
        on: Places | None = None,
    ) -> None:
        """Write a run of what `fn` gives, compiled; once for each `of`, however many schedules it
        is in."""
        places, kinds = self.at.places, self.slots.kinds
        ins, outs = tuple(kinds[i] for i in reads), tuple(kinds[i] for i in makes)
        key = (of, ins, outs, tuple(donated))
        if key not in places.known:
            places.known[key] = (on or places).compiled(fn(), stage, ins, outs, donated)
        self.instructions.append(
            RunStage(stage, places.known[key], tuple(reads), tuple(makes), what, task)
        )
