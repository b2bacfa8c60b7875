"""Causes of faults: the first wrong value of a job on the way to a wrong output.

A step and a job are evaluated at one point, with logs. Each value of the job gets its meaning in
terms of the step. The walk goes back from an output that differs, through values without a meaning.
It ends at equations whose operands all have one. The first of these, in the order of the job, is
the cause.

    causes = find_causes((step_jaxpr, step_inputs), (job_jaxpr, job_arguments), [0, 3])
    causes[0]   # a `Cause`, or None if the programs are too large for logs

Some values of a right job have no meaning: a sum over the first micro-batch of all ranks is no sum
of consecutive rows. Such a value recovers: a value with a meaning is computed from it. The walk
prefers causes that do not recover.

A multiple of a step value, such as the sum of three means, is right if it is divided later. If the
walk ends at an equation that reads a multiple, the equation that multiplies by this factor is the
cause. Without one, it is the first copy that is a multiple: a reduction without its division.
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


# a multiple of an operand gives a multiple of the output; `shard_map` and `scan` move pieces and
# rows
HOMOGENEOUS = (
    "abs", "conv_general_dilated", "cumsum", "div", "dot_general", "integer_pow", "mul", "neg",
    "reduce_sum", "rsqrt", "scan", "shard_map", "sqrt", "square",
)  # fmt: skip
ADDS = ("add", "add_any", "sub", "max", "min", "select_n")


def find_causes(
    step: tuple[Any, Mapping[str, Any]], job: tuple[Any, Sequence[Any]], outputs: Sequence[int]
) -> dict[int, Cause | None]:
    """Name the cause of each output of a job that differs.

    Args:
      step: the jaxpr of one device, and the values of its inputs by name, in their order.
      job: the jaxpr of the job, and its arguments at the same point.
      outputs: positions of the job's outputs that differ.

    Returns:
      The cause for each position; None if the programs are too large for logs.
    """
    step_log, job_log = ValueLog(), ValueLog()
    step_jaxpr, inputs = step
    job_jaxpr, arguments = job
    with np.errstate(all="ignore"):
        World(log=step_log).run(step_jaxpr, [(x,) for x in inputs.values()])
        values = World(log=job_log).run(job_jaxpr, [(x,) for x in arguments])
        if step_log.overflows or job_log.overflows:
            return dict.fromkeys(outputs)
        moves_rows = any(x.name == "move_rows" for x in job_log.computations)
        walk = _Walk(job_log, Meanings(StepValues(inputs, step_log), moves_rows=moves_rows))
        return {k: walk.cause(values[k]) for k in outputs}


class _Walk:
    """Walk from wrong outputs back to their causes.

    Args:
      log: log of the job.
      meanings: meanings of its values in terms of the step.
    """

    def __init__(self, log: ValueLog, meanings: Meanings) -> None:
        self._log = log
        self._meanings = meanings
        self._found: dict[int, list[Meaning]] = {}
        self._users: dict[int, list[int]] = {}
        for number in range(len(log.computations)):
            for source in self._sources(number):
                self._users.setdefault(source, []).append(number)

    def cause(self, output: Sequence[Any]) -> Cause:
        """Return the cause of an output that differs."""
        sources = self._log.sources(output)
        if not sources:
            return Cause("", "", "", f"{self._meanings.of(output, {}).text} is returned unchanged")
        last = sources[-1]
        if self._is_multiple(last):
            cause = self._cause_of_multiple(last)
            return self._describe(last if cause is None else cause)
        region = self._region(last)
        ends = [n for n in region if region.isdisjoint(self._sources(n))]
        found = [n for n in ends if not self._recovers(n)] or ends
        return self._describe(self._before_use(min(found)))

    # -- the region of values without a meaning --------------------------------------------------

    def _region(self, last: int) -> set[int]:
        """Return a computation and its connected predecessors without a meaning."""
        found = {last}
        waiting = self._sources(last)
        while waiting:
            number = waiting.pop()
            if number not in found and not self._has_meaning(number):
                found.add(number)
                waiting += self._sources(number)
        return found

    def _recovers(self, number: int) -> bool:
        """Return True if a value with a meaning is computed from a value without one."""
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
        """Return the cause of the multiple that an equation reads; the equation itself if none."""
        name = self._log.computations[number].name
        if name in HOMOGENEOUS or name in MOVES or name in GROUPS:
            return number
        meanings = []
        for source in self._sources(number):
            meanings += [(source, m) for m in self._meanings_of(source) if m.of is not None]
        # a sum of equal multiples is a multiple as well
        if name in ADDS and len({m.factor for _, m in meanings}) == 1 and len(meanings) > 1:
            return number
        multiples = [s for s, m in meanings if m.kind is Kind.EXACT and m.factor != 1]
        cause = self._cause_of_multiple(multiples[0]) if multiples else None
        return number if cause is None else cause

    def _is_multiple(self, number: int, kinds: Sequence[Kind] = (Kind.EXACT,)) -> bool:
        """Return True if a value of one of some kinds is a step value times a number."""
        return any(m.kind in kinds and m.factor != 1 for m in self._meanings_of(number))

    def _cause_of_multiple(self, number: int) -> int | None:
        """Return the computation whose factor makes a value a multiple; None if parts begin so.

        Factors that undo each other, such as a sum of means and its division, cancel out. The first
        other factor is the cause. If it is an integer, parts may be means that nothing averages:
        the cause is then the reduction of partial sums.
        """
        chain = [number]
        both = (Kind.EXACT, Kind.PARTIAL)
        while before := [s for s in self._sources(chain[0]) if self._is_multiple(s, both)]:
            chain.insert(0, before[0])

        # factors without a later inverse, in the order of the chain
        remaining: list[tuple[int, Fraction]] = []
        of, last = -1, Fraction(1)
        for one in chain:
            of, factor = self._factor(one, of, last)
            ratio, last = factor / last, factor
            inverse = next((pair for pair in remaining if pair[1] * ratio == 1), None)
            if inverse is not None:
                remaining.remove(inverse)
            elif ratio != 1:
                remaining.append((one, ratio))
        first, ratio = remaining[0] if remaining else (chain[0], Fraction(1))

        if ratio.denominator == 1:
            for source, reduction in itertools.pairwise(chain):
                if reduction >= first and self._is_reduction(source, reduction):
                    return reduction
        is_mean = ratio.denominator == 1 and first == chain[0] and not self._is_copy(first)
        return None if is_mean else first

    def _is_reduction(self, source: int, number: int) -> bool:
        """Return True if a computation reduces partial sums to an exact value."""
        kinds = lambda n: {m.kind for m in self._meanings_of(n)}
        return kinds(source) == {Kind.PARTIAL} and kinds(number) == {Kind.EXACT}

    def _is_copy(self, number: int) -> bool:
        """Return True if all ranks hold a full value."""
        return any(m.is_copy for m in self._meanings_of(number))

    def _factor(self, number: int, of: int, last: Fraction) -> tuple[int, Fraction]:
        """Return the step value whose multiple an output is, and the factor.

        Several step values may be multiples of each other. A value with the last factor comes
        first: the equation then belongs to the step. A value of the same primitive is next, then
        the last step value, then any.

        Args:
          number: index of the computation.
          of, last: step value and factor of its operand; -1 for the first computation.
        """
        computation = self._log.computations[number]
        factors = self._meanings.factors_of(computation.outputs[0])
        primitive = lambda value: value.title.partition(" ")[0]
        choices = []
        if of >= 0:
            choices += [pair for pair in factors if pair[1] == last]
        choices += [pair for pair in factors if primitive(pair[0]) == computation.name]
        choices += [pair for pair in factors if pair[0].number == of]
        choices += [(m.of, m.factor) for m in self._meanings_of(number) if m.of is not None]
        return (choices[0][0].number, choices[0][1]) if choices else (of, last)

    # -- computations ----------------------------------------------------------------------------

    def _sources(self, number: int) -> list[int]:
        """Return the computations whose outputs a computation reads."""
        operands = self._log.computations[number].operands
        return sorted({s for x in operands for s in self._log.sources(x)})

    def _meanings_of(self, number: int) -> list[Meaning]:
        """Return the meanings of a computation's outputs."""
        if number not in self._found:
            computation = self._log.computations[number]
            found = [self._meanings.of(x, computation.axes) for x in computation.outputs]
            if found == [NOTHING]:
                found = [self._term_of(number) or NOTHING]
            self._found[number] = found
        return self._found[number]

    def _term_of(self, number: int) -> Meaning | None:
        """Return the meaning of one term from a stack of terms; None if an output is no term.

        The step has no value for terms of sums over other things than rows: only for their sum. If
        all ranks hold one term it has no meaning, since the other terms are lost.
        """
        computation = self._log.computations[number]
        if computation.name not in (*MOVES, "scan", "shard_map") or computation.axes:
            return None
        found: list[Meaning] = []
        for source in self._sources(number):
            found += [m for m in self._meanings_of(source) if m.of is not None]
        if len(found) != 1 or found[0].kind is not Kind.PARTIAL:
            return None
        (stack,) = found
        if stack.of is None or stack.of.rows is not None:
            return None  # `Meanings` knows each sum over rows
        text = stack.text if stack.text.startswith("a term") else f"a term of {stack.text}"
        return dataclasses.replace(stack, text=text)

    def _has_meaning(self, number: int) -> bool:
        return all(m.kind is not Kind.NONE for m in self._meanings_of(number))

    # -- words -----------------------------------------------------------------------------------

    def _describe(self, number: int) -> Cause:
        """Return a computation as the cause of a fault, in words."""
        computation = self._log.computations[number]
        meanings = self._meanings_of(number)
        value = next((m for m in meanings if m.kind is Kind.NONE), meanings[0]).text
        of_operands = [self._meaning_of(x, computation.axes) for x in computation.operands]
        operands = dict.fromkeys(m.text for m in of_operands if m.of is not None)
        collective = self._next_collective(number)
        behind = "" if collective is None else str(collective)
        line, origin = computation.line, computation.origin
        return Cause(computation.name, line, origin, value, tuple(operands), behind)

    def _meaning_of(self, operand: Sequence[Any], axes: Mapping[str, int]) -> Meaning:
        """Return the meaning that an operand has as an output of its own computation."""
        for source in self._log.sources(operand):
            outputs = self._log.computations[source].outputs
            for output, meaning in zip(outputs, self._meanings_of(source), strict=True):
                if [*map(id, output)] == [*map(id, operand)]:
                    return meaning
        return self._meanings.of(operand, axes)

    def _next_collective(self, number: int) -> Computation | None:
        """Return the first collective, in the order of the job, that depends on a computation."""
        reached = {number}
        for later in range(number + 1, len(self._log.computations)):
            if reached.isdisjoint(self._sources(later)):
                continue
            reached.add(later)
            found = self._log.computations[later]
            if found.name in GROUPS and any(isinstance(a, str) for a in axes_of(found.eqn)):
                return found
        return None
