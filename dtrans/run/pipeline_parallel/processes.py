"""The processes that the stages of a pipeline are in: what a job asks of them, and how it is with one process.

`dtrans.run.pipeline_parallel.cluster` has those of a job of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.run.pipeline_parallel.deployment import Deployment
from dtrans.run.pipeline_parallel.instructions import StepProgram, Transfer


class OneProcess:
    """All stages are in this process, which is given whole batches.

    Args:
      at: what runs, and where.
    """

    run_id, saves = THIS_PROCESS, True  # which run of the job it is, and whether this process saves what all have

    def __init__(self, at: Deployment) -> None:
        self.at = at

    def whole_types(self, arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """The types of the global batch, of which this process gives these arrays."""
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays.items()}

    def check_tape(self, tape: StepProgram) -> None:
        """Check that all processes are about to go through the same instructions."""

    def whole_batch(self, tape: StepProgram, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arrays of the global batch that stages of this process read; of others, this process's part."""
        return arrays

    def move(self, number: int, ins: Transfer, env: list[Any]) -> None:
        """Carry out a transfer, as far as it is this process's."""
        env[ins.target] = self.at.put(ins, env[ins.source])

    def share_results(self, tape: StepProgram, env: list[Any]) -> None:
        """Let every process have all results."""

    def collected(self, names: Sequence[str], held: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arrays of the state, of all processes."""
        return held

    def check_reorder(self, name: str) -> None:
        """Check that the job can go on with another schedule."""

    def close(self) -> None:
        """End the lines to other processes."""
