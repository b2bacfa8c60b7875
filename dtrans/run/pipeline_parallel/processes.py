"""Processes of a pipeline's stages: the methods that a job calls, with one process.

`dtrans.run.pipeline_parallel.cluster` has several processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.ir.array_fns import array_type
from dtrans.ir.selection import values_at
from dtrans.run.base.lowered import call_recorded
from dtrans.run.pipeline_parallel.instructions import StepProgram, Transfer
from dtrans.run.pipeline_parallel.stage_devices import SAME
from dtrans.run.pipeline_parallel.stage_placement import StagePlacement


class OneProcess:
    """All stages in this process, which takes global batches.

    Args:
      at: the placement of the plan.

    Attributes:
      part: the part of a batch that this process takes, and the number of parts.
      run_id: the run of the job.
      saves: True if this process saves the arrays that all processes have.
    """

    part = (0, 1)
    run_id = THIS_PROCESS
    saves = True

    def __init__(self, at: StagePlacement) -> None:
        self.at = at

    def global_types(self, arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the types of the global batch, from this process's part."""
        return {n: array_type(x) for n, x in arrays.items()}

    def check_program(
        self, program: StepProgram, types: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        """Check that all processes are about to run the same instructions.

        Args:
          program: the instructions here.
          types: the types of the arrays of the state and of the global batch.
        """

    def gather_batch(
        self, program: StepProgram, arrays: Mapping[str, Any], state: Mapping[tuple[int, str], Any]
    ) -> Mapping[str, Any]:
        """Return the global arrays that stages of this process read, and precomputed values.

        Arrays that they do not read are returned as this process's part.

        Args:
          program: the step.
          arrays: this process's part of the batch.
          state: the arrays of the state that this process stores, by (place, name).
        """
        return {**arrays, **self.precompute(program, arrays, state)}

    def precompute(
        self, program: StepProgram, arrays: Mapping[str, Any], state: Mapping[tuple[int, str], Any]
    ) -> dict[str, Any]:
        """Return the precomputed values of the global batch, computed on stage 0."""
        values = program.values
        if values is None:
            return {}
        reads = values_at(arrays, self.at.plan.batch)
        reads += [state[self.at.first_place(n), n] for n in values.args[-1].names]
        args = [self.at.backend.put(x, 0, SAME) for x in reads]
        outputs = call_recorded(lambda: "values of the whole batch", values.compiled, *args)
        return dict(zip(values.out_names, outputs, strict=True))

    def move(self, number: int, ins: Transfer, env: list[Any]) -> None:
        """Carry out this process's part of a transfer.

        Args:
          number: the index of the instruction.
          ins: the transfer.
          env: the values in slots.
        """
        env[ins.target] = self.at.put(ins, env[ins.source])

    def share_results(self, program: StepProgram, env: list[Any]) -> None:
        """Send all results to every process."""

    def gather_state(self, names: Sequence[str], arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arrays of the state from all processes.

        Args:
          names: the arrays.
          arrays: those of this process.
        """
        return arrays

    def check_reorder(self, name: str) -> None:
        """Check that the job can continue with another schedule."""

    def close(self) -> None:
        """Close the channels to other processes."""
