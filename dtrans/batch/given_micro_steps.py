"""A step that adds up once its parts are given values of the whole batch: who is given what, and the proof.

Micro-batches of a pipeline, and micro-steps of trainers, exchange nothing. What no parameter enters is made of the
whole batch before they go (`dtrans.batch.given_values`): in a pipeline by a program of its own, on trainers in front of
the micro-steps, where each has its rows of the batch and what crosses it communicates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax

from dtrans._jax import ClosedJaxpr
from dtrans.batch.given_values import ROOT, GivenValues, given_values
from dtrans.batch.shared import SharedStep, grown, share
from dtrans.batch.written_parts import WrittenParts, silent, written_parts
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
    values: GivenValues | WrittenParts
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
) -> tuple[SharedStep, GivenValues | WrittenParts | None]:
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
    whole, still = part.specialize_flat(types), held()
    given = given_values(whole, part, parts, still)
    again = shared
    rows = {part.inputs[n].shape[0] for n in shared.axes} if given.spots and not any(shared.axes.values()) else set()
    for way in given.by_portions(whole) if given.spots else ():
        of_part = way.taken_by(part)
        with_rows = [n for n in of_part.in_names if n.startswith(ROOT) and n not in way.whole]
        if not {of_part.inputs[n].shape[0] for n in with_rows} <= rows:
            break  # rows of something else, whose parts are not those of the batch
        taken = cut(silent(differentiated(of_part))).with_reported()
        given_to_all = dataclasses.replace(batch, unsplit_inputs=(*batch.unsplit_inputs, *way.whole))
        again = share(taken, given_to_all, parts, over, open_state=True, portions=way.portions, noun=noun)
        if again.proven:
            return again, way
    by_terms, found = _share_written(shared, whole, part, still, parts, over, noun)
    if by_terms.proven:
        return by_terms, found
    return next((x for x in (again, shared) if x.part.exchanged), by_terms), None


def _share_written(
    shared: SharedStep,
    whole: Program,
    part: Program,
    held: Sequence[str],
    parts: int,
    over: Sequence[str],
    noun: str,
) -> tuple[SharedStep, WrittenParts | None]:
    """Return how parts share a step that take the loss that the engine writes for them, and what they are given.

    If they exchange more, that is in the step of a part, which proves nothing.
    """
    if any(shared.axes.values()) or not shared.axes:
        return shared, None
    found, step = written_parts(whole, shared.axes, parts, held, over, noun)
    if step.exchanged or step.gathers or step.local:
        return dataclasses.replace(shared, part=step), None
    program = found.taken_by(part)
    known = {n: "concat" if isinstance(way, int) else way for n, way in step.merges.items()}
    joined = {n: way for n, way in step.merges.items() if isinstance(way, int)}
    rows = {n: 0 for n in program.in_names if n.startswith(ROOT) and n not in found.whole}
    taken = dataclasses.replace(
        shared,
        step=cut(program).with_reported(),
        reduce="sum",
        merges=known,
        joined=joined,
        axes={**shared.axes, **rows},
        part=step,
        proven=True,
    )
    return taken, found
