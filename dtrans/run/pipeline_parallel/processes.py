"""Methods of a pipeline job that depend on the number of processes, for a job of one process.

The subclass in `dtrans.run.pipeline_parallel.cluster` overrides these methods for jobs of several
processes.
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
    """The only process of a pipeline job, which runs all stages.

    Args:
      at: the devices of the plan's stages.

    Attributes:
      part: the pair (index of this process's part of the batch, number of parts).
      run_id: the identifier of the job's run.
      saves: True if, in a checkpoint, this process saves the arrays that every process stores.
    """

    part = (0, 1)
    run_id = THIS_PROCESS
    saves = True

    def __init__(self, at: StagePlacement) -> None:
        self.at = at

    def global_types(self, arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each array of the global batch, by name.

        Args:
          arrays: the batch that the user passed to `step` in this process.
        """
        return {n: array_type(x) for n, x in arrays.items()}

    def check_program(
        self, program: StepProgram, types: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        """Check that all processes have the same list of instructions for a step.

        Args:
          program: the instructions of this process.
          types: shape and dtype of each array of the state and of the global batch, by name.
        """

    def gather_batch(
        self, program: StepProgram, arrays: Mapping[str, Any], state: Mapping[tuple[int, str], Any]
    ) -> Mapping[str, Any]:
        """Return arrays of the global batch, and values that the job computes from the batch.

        Only the arrays that this process reads are gathered; others are returned unchanged. The
        values are the outputs of the program that runs on the full batch before the micro-batches.

        Args:
          program: the instructions of the step.
          arrays: the batch that the user passed to `step` in this process.
          state: the parameters and optimizer state that this process stores. The key of an array is
            (index of the stored copy, name).
        """
        return {**arrays, **self.precompute(program, arrays, state)}

    def precompute(
        self, program: StepProgram, arrays: Mapping[str, Any], state: Mapping[tuple[int, str], Any]
    ) -> dict[str, Any]:
        """Compute values of the full batch that micro-batches read; return them by name.

        Their program runs on stage 0 before the micro-batches.

        Args:
          program: the instructions of the step.
          arrays: the arrays of the global batch.
          state: the parameters and optimizer state on which the values depend. The key of an array
            is (index of the stored copy, name).
        """
        values = program.values
        if values is None:
            return {}
        reads = values_at(arrays, self.at.plan.batch)
        reads += [state[self.at.first_place(n), n] for n in values.args[-1].names]
        args = [self.at.backend.put(x, 0, SAME) for x in reads]
        outputs = call_recorded(lambda: "precomputed values", values.compiled, *args)
        return dict(zip(values.out_names, outputs, strict=True))

    def move(self, number: int, ins: Transfer, env: list[Any]) -> None:
        """Execute this process's part of a transfer between stages.

        Args:
          number: the index of the instruction, which identifies the value in messages.
          ins: the transfer.
          env: the value in each slot of the step.
        """
        env[ins.target] = self.at.put(ins, env[ins.source])

    def share_results(self, program: StepProgram, env: list[Any]) -> None:
        """Send each result of the step to all processes, so that `step` returns it everywhere."""

    def gather_state(self, names: Sequence[str], arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Gather arrays of the state from all processes.

        Args:
          names: the names of the arrays.
          arrays: the arrays that this process stores, by name.
        """
        return arrays

    def check_reorder(self, name: str) -> None:
        """Raise ConfigError if the schedule of a running job cannot be changed."""

    def close(self) -> None:
        """Close the channels to other processes."""
