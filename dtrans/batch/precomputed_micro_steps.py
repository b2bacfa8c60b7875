"""Division of a batch into micro-batches of a pipeline, or micro-steps (gradient accumulation).

These parts of the batch are computed one after the other, so they cannot communicate. The engine
writes the step of one part (`dtrans.batch.written_parts`). If this step contains no communication,
the sum of the parts' results is the result of the step on the full batch. Parts may need values of
the full batch, such as a count of tokens. A pipeline has a separate program, which computes these
values first. In other jobs, each trainer computes them from its part of the batch, before its
micro-steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from dtrans._jax import ClosedJaxpr
from dtrans.batch.exact_step import ExactStep, full_type, rows_of, split_merges
from dtrans.batch.trainer_step import TrainerStep
from dtrans.batch.written_parts import WrittenParts, adds_up, written_parts
from dtrans.engine.layout import Shards, sharded_along
from dtrans.engine.writer import SplitWriter, written
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import Program
from dtrans.rows.layout import SHARED
from dtrans.step.capture import differentiated
from dtrans.step.halves import divide_step


@dataclasses.dataclass(frozen=True, eq=False)
class PrecomputedMicroSteps:
    """Two programs of a trainer: one precomputes values of its batch, the other is a micro-step.

    Attributes:
      full_step: step on the full batch; the loss is one equation if possible
        (`dtrans.step.capture`).
      values: the writer of the parts, with the precomputed values that parts read.
      part: the step on one part of the batch, derived from `full_step`.
      axes: divided dimension of each batch array.
      trainers: number of trainers.
      over: mesh axes of the trainers.
    """

    full_step: Program
    values: WrittenParts
    part: TrainerStep
    axes: Mapping[str, int]
    trainers: int
    over: tuple[str, ...]

    def micro_step(self, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        """Return the program of one micro-step; its last arguments are precomputed values.

        Args:
          types: types of the step's inputs, with the batch of one micro-step.
        """
        full_step = self._of(types, self.values.parts)
        part = self.part if full_step is self.full_step else None
        return differentiated(self.values.part_of(full_step, part))

    def of_trainer(self, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        """Return the program that a trainer runs before its micro-steps, to precompute values.

        The program may communicate with other trainers.

        Args:
          types: types of the step's inputs, with the batch of one trainer.
        """
        program = self.values.precompute_program(self._of(types, self.trainers))
        if self.trainers == 1:
            return program
        flat = inline_calls(program.jaxpr)
        names = dict(zip(flat.jaxpr.invars, program.in_names, strict=True))

        def write(w: SplitWriter) -> ClosedJaxpr:
            for v, n in names.items():
                w.take(v, sharded_along(self.axes[n]) if n in self.axes else SHARED, is_input=True)
            wanted = [
                SHARED if n in self.values.full else sharded_along(0) for n in program.out_names
            ]
            return eliminate_dead(w.b.build(w.write(flat.jaxpr, lambda i, _: wanted[i])[0]))

        jaxpr = written(flat, Shards(self.trainers, self.over), write)
        return program.with_jaxpr(jaxpr, labels={})

    def _of(self, types: Sequence[jax.ShapeDtypeStruct], parts: int) -> Program:
        """Return the step on a batch that consists of several parts.

        Args:
          types: types of the step's inputs for one part.
          parts: number of parts.
        """
        full_types = []
        for name, t in zip(self.full_step.in_names, types, strict=True):
            full_types.append(full_type(t, self.axes.get(name), parts))
        return self.full_step.specialize_flat(full_types)


def shard_by_parts(
    full_step: Program,
    axes: Mapping[str, int],
    fixed: Sequence[str],
    parts: int,
    over: Sequence[str],
    noun: str,
    part: Program | None = None,
) -> tuple[ExactStep, WrittenParts]:
    """Divide the batch of a step into parts that cannot communicate, such as micro-batches.

    Args:
      full_step: step on the full batch; the loss is one equation if possible
        (`dtrans.step.capture`).
      axes: divided dimension of each batch array.
      fixed: untrained state on which precomputed values may depend.
      parts: number of parts.
      over: mesh axes of the parts.
      noun: word for a part in errors, such as "micro-batch".
      part: the user's step, traced on a part; None if the update may depend on the batch size.

    Returns:
      The step of a part, and the writer of all parts. If the parts would need communication, the
      step is not `proven`, and its attribute `part` contains the communication.
    """
    return full_step.once(
        _Sharing(tuple(axes.items()), tuple(fixed), parts, tuple(over), noun, part)
    )


@dataclasses.dataclass(frozen=True)
class _Sharing:
    """Arguments of `shard_by_parts` as a hashable object, for the cache of `Program.once`."""

    axes: tuple[tuple[str, int], ...]
    fixed: tuple[str, ...]
    parts: int
    over: tuple[str, ...]
    noun: str
    part: Program | None

    def __call__(self, full_step: Program) -> tuple[ExactStep, WrittenParts]:
        axes = dict(self.axes)
        rows = rows_of(full_step, axes, self.noun)
        found, part = written_parts(
            full_step, axes, self.parts, self.fixed, self.over, self.noun, self.part
        )
        proven = adds_up(part)
        program = found.part_of(full_step, part) if proven else part.program
        merges, joined = split_merges(part.merges)
        step = divide_step(program).with_reported()
        again = lambda types: self(full_step.specialize_flat(types))[0]
        return ExactStep(
            step, "sum", merges, joined, {**axes, **found.rows}, rows, part, proven, again
        ), found
