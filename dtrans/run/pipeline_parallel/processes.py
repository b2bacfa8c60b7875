"""The processes that the stages of a pipeline are in: what a job asks of them, and how it is with
one process.

`dtrans.run.pipeline_parallel.cluster` has those of a job of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dtrans.checkpoint.runs import THIS_PROCESS
from dtrans.run.base.lowered import call_recorded
from dtrans.run.pipeline_parallel.deployment import Deployment
from dtrans.run.pipeline_parallel.instructions import StepProgram, Transfer
from dtrans.run.pipeline_parallel.stage_devices import SAME


class OneProcess:
    """All stages are in this process, which is given whole batches.

    Args:
      at: what runs, and where.
    """

    part = (0, 1)  # which part of a batch is given here, and how many parts there are
    # which run of the job it is, and whether this process saves what all have
    run_id, saves = (
        THIS_PROCESS,
        True,
    )

    def __init__(self, at: Deployment) -> None:
        self.at = at

    def whole_types(self, arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """The types of the global batch, of which this process gives these arrays."""
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays.items()}

    def check_tape(self, tape: StepProgram, types: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Check that all processes are about to go through the same instructions.

        Args:
          types: of the arrays of the state and of the whole batch.
        """

    def whole_batch(
        self, tape: StepProgram, arrays: Mapping[str, Any], held: Mapping[tuple[int, str], Any]
    ) -> Mapping[str, Any]:
        """The arrays of the global batch that stages of this process read, with what is made of it
        first.

        Of arrays that they do not read, it is this process's part.

        Args:
          arrays: what this process gives.
          held: arrays of the state that it has, by (place, name).
        """
        return {**arrays, **self.made_first(tape, arrays, held)}

    def made_first(
        self, tape: StepProgram, arrays: Mapping[str, Any], held: Mapping[tuple[int, str], Any]
    ) -> dict[str, Any]:
        """Values of the whole batch that no parameter enters, made where stage 0 is."""
        values = tape.values
        if values is None:
            return {}
        state = [held[self.at.first_place(n), n] for n in values.args[-1].names]
        given = [
            self.at.places.put(x, 0, SAME)
            for x in (*(arrays[n] for n in self.at.plan.batch), *state)
        ]
        made = call_recorded(lambda: "values of the whole batch", values.compiled, *given)
        return dict(zip(values.out_names, made, strict=True))

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
