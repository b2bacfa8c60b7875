"""Parts of a batch that exchange nothing: micro-batches of a pipeline and micro-steps of trainers.

The engine writes the step of a part (`dtrans.batch.written_parts`), and that is the proof: it
communicates nothing. The values that it is given are computed first. A pipeline has a program for
them. Trainers compute them in front of the micro-steps, from their rows of the batch, and
communicate what crosses the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from dtrans._jax import ClosedJaxpr
from dtrans.batch.shared import SharedStep, grown, rows_of
from dtrans.batch.trainer_step import TrainerStep
from dtrans.batch.written_parts import WrittenParts, adds_up, written_parts
from dtrans.engine.layout import Shards, cut_along
from dtrans.engine.writer import SplitWriter, written
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import FORWARD, Program
from dtrans.rows.layout import SHARED
from dtrans.step.capture import differentiated
from dtrans.step.cut import cut


@dataclasses.dataclass(frozen=True, eq=False)
class GivenMicroSteps:
    """Micro-steps that the engine writes, and what they are given of the whole batch.

    Attributes:
      whole: the step of the whole batch, with its loss as one equation if it has one.
      values: what they are given.
      part: the step of one of them, as the engine wrote it for `whole`.
      axes: the dimension along which each array of the batch is cut.
      trainers, over: how many there are, and the named axes that they are on.
    """

    whole: Program
    values: WrittenParts
    part: TrainerStep
    axes: Mapping[str, int]
    trainers: int
    over: tuple[str, ...]

    def micro_step(self, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        """Return the step of one of them; what it is given are its last arguments.

        Args:
          types: of the step's inputs, with a micro-step's part of the batch.
        """
        whole = self._of(types, self.values.parts)
        part = self.part if whole is self.whole else None
        return differentiated(self.values.part_of(whole, part))

    def of_trainer(self, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        """Return what makes a trainer's rows of what they are given, or all of it, from its part of
        the batch.

        Args:
          types: of the step's inputs, with a trainer's part of the batch.
        """
        made = self.values.made_by(self._of(types, self.trainers))
        if self.trainers == 1:
            return made
        flat = inline_calls(made.jaxpr)
        names = dict(zip(flat.jaxpr.invars, made.in_names, strict=True))

        def write(w: SplitWriter) -> ClosedJaxpr:
            for v, n in names.items():
                w.take(v, cut_along(self.axes[n]) if n in self.axes else SHARED, is_input=True)
            wanted = [SHARED if n in self.values.whole else cut_along(0) for n in made.out_names]
            return eliminate_dead(w.b.build(w.write(flat.jaxpr, lambda i, _: wanted[i])[0]))

        jaxpr = written(flat, Shards(self.trainers, self.over), write)
        roles = (FORWARD,) * len(jaxpr.jaxpr.eqns)
        return dataclasses.replace(made, jaxpr=jaxpr, roles=roles, labels={}, specializer=None)

    def _of(self, types: Sequence[jax.ShapeDtypeStruct], parts: int) -> Program:
        """Return the step of the whole batch, from the number of parts and the input types of one
        part."""
        names = self.whole.in_names
        return self.whole.specialize_flat(
            [grown(t, self.axes.get(n), parts) for n, t in zip(names, types, strict=True)]
        )


def share_by_parts(
    whole: Program,
    axes: Mapping[str, int],
    held: Sequence[str],
    parts: int,
    over: Sequence[str],
    noun: str,
    part: Program | None = None,
) -> tuple[SharedStep, WrittenParts]:
    """Share a step by parts that exchange nothing.

    Args:
      whole: the step of the whole batch, with its loss as one equation if it has one.
      axes: the dimension along which each array of the batch is cut.
      held: the state that all parts have, and that values may be made of.
      parts: how many there are.
      over: the named axes that they would be on.
      noun: what one of those that share the batch is called in errors.
      part: the step of a part of the batch, as it was traced, if its update is to be the same for
        all sizes.

    Returns:
      The shared step, and what parts are given. Without a proof, the step of a part says what they
      would exchange.
    """
    return whole.once(_Sharing(tuple(axes.items()), tuple(held), parts, tuple(over), noun, part))


@dataclasses.dataclass(frozen=True)
class _Sharing:
    """A way to share a step, which the step keeps: other plans write nothing again."""

    axes: tuple[tuple[str, int], ...]
    held: tuple[str, ...]
    parts: int
    over: tuple[str, ...]
    noun: str
    part: Program | None

    def __call__(self, whole: Program) -> tuple[SharedStep, WrittenParts]:
        axes = dict(self.axes)
        rows = rows_of(whole, axes, self.noun)
        found, made = written_parts(
            whole, axes, self.parts, self.held, self.over, self.noun, self.part
        )
        proven = adds_up(made)
        program = found.part_of(whole, made) if proven else made.program
        merges = {n: "concat" if isinstance(way, int) else way for n, way in made.merges.items()}
        joined = {n: way for n, way in made.merges.items() if isinstance(way, int)}
        step = cut(program).with_reported()
        again = lambda types: self(whole.specialize_flat(types))[0]
        return SharedStep(
            step, "sum", merges, joined, {**axes, **found.rows}, rows, made, proven, again
        ), found
