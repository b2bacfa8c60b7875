"""A step that adds up once its parts are given values of the whole batch: who is given what, and the proof.

Micro-batches of a pipeline, and micro-steps of trainers, exchange nothing. What no parameter enters is made of the
whole batch before they go (`dtrans.batch.given_values`): in a pipeline by a program of its own, on trainers in front of
the micro-steps, where each has its rows of the batch and what crosses it communicates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax

from dtrans._jax import ClosedJaxpr, closed
from dtrans.batch.given_values import GivenValues, given_values
from dtrans.batch.shared import SharedStep, grown, share
from dtrans.engine.layout import Shards, cut_along
from dtrans.engine.writer import SplitWriter, written
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.ir.program import FORWARD, Program
from dtrans.rows.layout import SHARED
from dtrans.step.batch_sharing import Batch
from dtrans.step.capture import differentiated
from dtrans.step.cut import Cut, cut


@dataclasses.dataclass(frozen=True, eq=False)
class GivenMicroSteps:
    """Micro-steps that are given values of the whole batch.

    Attributes:
      captured: the step with its loss as one equation, of any batch.
      values: what they are given.
      axes: the dimension along which each array of the batch is cut.
      trainers, over: how many there are, and the named axes that they are on.
    """

    captured: Program
    values: GivenValues
    axes: Mapping[str, int]
    trainers: int
    over: tuple[str, ...]

    def micro_step(self, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        """The step of one of them, from the types of the step's inputs; what it is given are its last arguments."""
        return differentiated(self.values.taken_by(self.captured.specialize_flat(types)))

    def of_trainer(self, types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        """What makes a trainer's rows of what they are given, or all of it, from its part of the batch.

        Args:
          types: of the step's inputs, with a trainer's part of the batch.
        """
        whole = [grown(t, self.axes.get(n), self.trainers) for n, t in zip(self.captured.in_names, types, strict=True)]
        made = self.values.made_by(self.captured.specialize_flat(whole))
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


def share_given(
    step: Cut,
    part: Program,
    types: Sequence[jax.ShapeDtypeStruct],
    held: Callable[[], Sequence[str]],
    batch: Batch,
    parts: int,
    over: Sequence[str],
    noun: str,
) -> tuple[SharedStep, GivenValues | None]:
    """How parts share a step that exchange nothing, and what they are given for that.

    Args:
      step: of a part, which tells nothing (`silent`).
      part: the same, captured.
      types: of the step's inputs, with the whole batch.
      held: names the state that all parts have, and that values may be made of; it is called where they are sought.
      batch: which arrays are cut, on dim 0.
      parts: how many there are.
      over: the named axes that they would be on.
      noun: what one of those that share the batch is called in errors.

    Returns:
      How they share it, and values that prove it; without a proof, what is in the way.
    """
    shared = share(step, batch, parts, over, open_state=True, noun=noun)
    if shared.proven:
        return shared, None
    whole = part.specialize_flat(types)
    given = given_values(whole, part, parts, held())
    if not given.spots:
        return shared, None
    for way in given.by_portions(whole):
        taken = cut(silent(differentiated(way.taken_by(part)))).with_reported()
        given_to_all = dataclasses.replace(batch, unsplit_inputs=(*batch.unsplit_inputs, *way.whole))
        again = share(taken, given_to_all, parts, over, open_state=True, portions=way.portions, noun=noun)
        if again.proven:
            return again, way
    return again if again.part.exchanged else shared, None


def silent(program: Program) -> Program:
    """Return a step without what it prints or shows: a part shows its own values, which are not added up."""
    return program.rewritten(_without_effects)


def _without_effects(program: Program) -> Program:
    inner = program.inner
    eqns = [e for e in inner.eqns if e.outvars or not e.effects]
    if len(eqns) == len(inner.eqns):
        return program
    jaxpr = closed(inner.constvars, program.jaxpr.consts, inner.invars, inner.outvars, eqns, inner)
    return dataclasses.replace(program, jaxpr=jaxpr, roles=("",) * len(eqns), labels={})
