"""Names of faults: the first value of a job, on the way to a wrong output, that is wrong.

A step and a job are evaluated at one point, with logs. Each value of the job gets its meaning in
terms of the step. From an output that differs the walk goes back through values without a meaning.
It ends at equations all of whose operands have one. The first of them, in the order of the job, is
the cause.

    causes = find_causes((step_jaxpr, step_inputs), (job_jaxpr, job_arguments), [0, 3])
    causes[0]   # a `Cause`, or None where the programs are too large for logs

Not each value of a right job has a meaning: a sum over the first micro-batch of all ranks is no sum
of consecutive rows. Such a value recovers: something with a meaning is computed from it. It is
passed by, as far as another cause is found.

A multiple of a step value, such as the sum of three means, is right if it is divided later. Where
the walk ends at an equation that uses one, it goes on to the equation that multiplies by this
factor, or else to the first copy that is a multiple: the reduction behind which nothing divides.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dtrans._jax import axes_of
from dtrans.verification.evaluate import World
from dtrans.verification.meanings import NOTHING, Kind, Meaning, Meanings
from dtrans.verification.outcome import Cause
from dtrans.verification.rank_collectives import GROUPS
from dtrans.verification.rules import MOVES
from dtrans.verification.step_values import StepValues
from dtrans.verification.value_log import Computation, ValueLog


# equations that make a multiple of a multiple of one operand; `shard_map` and `scan` move pieces
# and rows
HOMOGENEOUS = (
    "shard_map", "scan", "mul", "div", "neg", "abs", "integer_pow", "sqrt", "rsqrt", "square", "reduce_sum",
    "cumsum", "dot_general", "conv_general_dilated",
)  # fmt: skip
ADDS = ("add", "add_any", "sub", "max", "min", "select_n")


def find_causes(
    step: tuple[Any, Mapping[str, Any]], job: tuple[Any, Sequence[Any]], outputs: Sequence[int]
) -> dict[int, Cause | None]:
    """Name the cause of each output of a job that differs.

    Args:
      step: the jaxpr of one device, and name to value of its inputs, in their order.
      job: the jaxpr of the job, and its arguments at the same point.
      outputs: numbers of the job's outputs that differ.

    Returns:
      For each number the cause; None if the programs are too large for logs.
    """
    step_log, job_log = ValueLog(), ValueLog()
    step_jaxpr, inputs = step
    job_jaxpr, arguments = job
    with np.errstate(all="ignore"):
        World(log=step_log).run(step_jaxpr, [(x,) for x in inputs.values()])
        made = World(log=job_log).run(job_jaxpr, [(x,) for x in arguments])
        if step_log.overflows or job_log.overflows:
            return dict.fromkeys(outputs)
        moved = any(x.name == "move_rows" for x in job_log.computations)
        walk = _Walk(job_log, Meanings(StepValues(inputs, step_log), moved=moved))
        return {k: walk.cause(made[k]) for k in outputs}


class _Walk:
    """Walk back from wrong outputs.

    Args:
      log: of the job.
      meanings: in terms of the step.
    """

    def __init__(self, log: ValueLog, meanings: Meanings) -> None:
        self._log = log
        self._meanings = meanings
        self._found: dict[int, list[Meaning]] = {}
        self._users: dict[int, list[int]] = {}
        for number, made in enumerate(log.computations):
            for source in {s for x in made.operands for s in log.sources(x)}:
                self._users.setdefault(source, []).append(number)

    def cause(self, output: Sequence[Any]) -> Cause:
        """Return the cause of an output that differs."""
        sources = self._log.sources(output)
        if not sources:
            return Cause("", "", "", f"{self._meaning(output, {}).text} is handed on unchanged")
        last = sources[-1]
        if self._is_multiple(last):
            cause = self._cause_of_multiple(last)
            return self._told(last if cause is None else cause)
        region = self._region(last)
        ends = [n for n in region if region.isdisjoint(self._sources(n))]
        found = [n for n in ends if not self._recovers(n)] or ends
        return self._told(self._before_use(min(found)))

    # -- the region of values without a meaning --------------------------------------------------

    def _region(self, last: int) -> set[int]:
        """Return a computation, and those without a meaning that lead to it through such ones
        only."""
        found = {last}
        waiting = self._sources(last)
        while waiting:
            number = waiting.pop()
            if number not in found and not self._has_meaning(number):
                found.add(number)
                waiting += self._sources(number)
        return found

    def _recovers(self, number: int) -> bool:
        """Return True if something with a meaning is computed from a value without one."""
        waiting, seen = [number], set()
        while waiting:
            one = waiting.pop()
            for user in self._users.get(one, []):
                if user in seen:
                    continue
                seen.add(user)
                if not self._has_meaning(user):
                    waiting.append(user)
                elif any(m.of is not None for m in self._meanings_of(user)):
                    return True
        return False

    # -- multiples -------------------------------------------------------------------------------

    def _before_use(self, number: int) -> int:
        """Return the cause of the multiple that an equation uses; the equation itself, if it uses
        none."""
        made = self._log.computations[number]
        if made.name in HOMOGENEOUS or made.name in MOVES or made.name in GROUPS:
            return number  # of a multiple, these make a multiple
        meanings = [
            (s, m) for s in self._sources(number) for m in self._meanings_of(s) if m.of is not None
        ]
        if made.name in ADDS and len({m.factor for _, m in meanings}) == 1 and len(meanings) > 1:
            return number
        multiples = [s for s, m in meanings if m.kind is Kind.EXACT and m.factor != 1]
        cause = self._cause_of_multiple(multiples[0]) if multiples else None
        return number if cause is None else cause

    def _is_multiple(self, number: int, kinds: Sequence[Kind] = (Kind.EXACT,)) -> bool:
        """Return True if a value is a step value, of one of some kinds, times a number."""
        return any(m.kind in kinds and m.factor != 1 for m in self._meanings_of(number))

    def _cause_of_multiple(self, number: int) -> int | None:
        """Return the computation that makes a value a multiple; None if parts are so from the
        beginning.

        Factors that undo each other, as those of a sum of means and its division, cancel out. The
        first that is left is the cause. If it is a whole number, parts may be means that nothing
        averages: the cause is then where partial sums are reduced.
        """
        chain = [number]
        anything = (Kind.EXACT, Kind.PARTIAL)
        while before := [s for s in self._sources(chain[0]) if self._is_multiple(s, anything)]:
            chain.insert(0, before[0])
        left: list[tuple[int, Fraction]] = []
        of, last = -1, Fraction(1)
        for one in chain:
            of, factor = self._factor(one, of, last)
            ratio, last = factor / last, factor
            undone = next((pair for pair in left if pair[1] * ratio == 1), None)
            if undone is not None:
                left.remove(undone)
            elif ratio != 1:
                left.append((one, ratio))
        first, ratio = left[0] if left else (chain[0], Fraction(1))
        reduced = [
            n
            for before, n in itertools.pairwise(chain)
            if self._is_reduced(before, n) and n >= first
        ]
        if ratio.denominator == 1 and reduced:
            return reduced[0]
        is_mean = ratio.denominator == 1 and first == chain[0] and not self._is_copy(first)
        return None if is_mean else first

    def _is_reduced(self, before: int, number: int) -> bool:
        """Return True if a computation makes an exact value of partial sums."""
        kinds = [{m.kind for m in self._meanings_of(n)} for n in (before, number)]
        return kinds == [{Kind.PARTIAL}, {Kind.EXACT}]

    def _is_copy(self, number: int) -> bool:
        """Return True if all ranks have all of a value."""
        return any(m.whole for m in self._meanings_of(number))

    def _factor(self, number: int, of: int, last: Fraction) -> tuple[int, Fraction]:
        """Return the step value that an output is a multiple of, and the factor.

        Several step values may be multiples of each other. They are tried in this order: one with
        the same factor as before, since the equation then belongs to the step; one that such an
        equation computes in the step; the same step value as before.
        """
        made = self._log.computations[number]
        factors = self._meanings.factors_of(made.outputs[0])
        told = [(m.of, m.factor) for m in self._meanings_of(number) if m.of is not None]
        choices = [
            *((x, f) for x, f in factors if f == last and of >= 0),
            *((x, f) for x, f in factors if x.title.partition(" ")[0] == made.name),
            *((x, f) for x, f in factors if x.number == of),
            *told,
        ]
        return (choices[0][0].number, choices[0][1]) if choices else (of, last)

    # -- computations ----------------------------------------------------------------------------

    def _sources(self, number: int) -> list[int]:
        operands = self._log.computations[number].operands
        return sorted({s for x in operands for s in self._log.sources(x)})

    def _meaning(self, value: Sequence[Any], axes: Mapping[str, int]) -> Meaning:
        return self._meanings.of(value, axes)

    def _meanings_of(self, number: int) -> list[Meaning]:
        if number not in self._found:
            made = self._log.computations[number]
            found = [self._meaning(x, made.axes) for x in made.outputs]
            self._found[number] = [self._term_of(made) or NOTHING] if found == [NOTHING] else found
        return self._found[number]

    def _term_of(self, made: Computation) -> Meaning | None:
        """Return the meaning of one term out of a stack of them; None if an output is none.

        Terms of other sums than those over rows are no values of the step: only their sum is one.
        What all ranks have of a term is none, since the others are lost.
        """
        if made.name not in (*MOVES, "scan", "shard_map") or made.axes:
            return None
        sources = sorted({s for x in made.operands for s in self._log.sources(x)})
        found = [m for s in sources for m in self._meanings_of(s) if m.of is not None]
        if len(found) != 1 or found[0].kind is not Kind.PARTIAL:
            return None
        (of,) = found
        if of.of is None or of.of.rows is not None:
            return None  # sums over rows are known each
        return dataclasses.replace(
            of, text=of.text if of.text.startswith("a term") else f"a term of {of.text}"
        )

    def _has_meaning(self, number: int) -> bool:
        return all(m.kind is not Kind.NONE for m in self._meanings_of(number))

    # -- words -----------------------------------------------------------------------------------

    def _told(self, number: int) -> Cause:
        made = self._log.computations[number]
        meanings = self._meanings_of(number)
        value = next((m for m in meanings if m.kind is Kind.NONE), meanings[0]).text
        meant = [self._meaning_of(x, made.axes) for x in made.operands]
        operands = [m.text for m in meant if m.of is not None]
        behind = self._next_collective(number)
        text = "" if behind is None else str(behind)
        return Cause(made.name, made.line, made.origin, value, tuple(dict.fromkeys(operands)), text)

    def _meaning_of(self, operand: Sequence[Any], axes: Mapping[str, int]) -> Meaning:
        """Return the meaning of an operand: what it has where it is made."""
        for source in self._log.sources(operand):
            made = self._log.computations[source]
            for output, meaning in zip(made.outputs, self._meanings_of(source), strict=True):
                if [*map(id, output)] == [*map(id, operand)]:
                    return meaning
        return self._meaning(operand, axes)

    def _next_collective(self, number: int) -> Computation | None:
        """Return the first collective, in the order of the job, that depends on a computation."""
        reached = {number}
        for later in range(number + 1, len(self._log.computations)):
            if reached.isdisjoint(self._sources(later)):
                continue
            reached.add(later)
            made = self._log.computations[later]
            if made.name in GROUPS and any(isinstance(a, str) for a in axes_of(made.eqn)):
                return made
        return None
