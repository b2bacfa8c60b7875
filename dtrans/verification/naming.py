"""Search for the cause of a wrong output: the first wrong value on the way to it.

The step and the job are evaluated for one random input, and all values are logged. A value of the
job is *known* if it is a copy, piece or partial sum of a step value (`meanings`). From a wrong
output, the search follows unknown values backwards. It ends at equations with known operands and
unknown outputs. The first of these equations, in the order of the job, is the cause.

    causes = find_causes((step_jaxpr, step_inputs), (job_jaxpr, job_arguments), [0, 3])
    causes[0]   # a `Cause`, or None if the programs are too large for logs

Some correct values are unknown: a sum over the first micro-batches of all ranks, for example, is
not a sum of consecutive rows. An unknown value *recovers* if the job computes a known value from
it, and is then probably correct. The search prefers equations with values that do not recover.

A multiple of a step value, such as the sum of three means, is correct if the job divides it later.
If the search ends at an equation that reads a multiple, the cause is the equation that created the
multiple. If there is no such equation, a division is missing after a reduction. The cause is then
the first equation with an output that is a full step value times a number.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dtrans._jax import axes_of
from dtrans.verification.evaluate import Evaluator
from dtrans.verification.meanings import NOTHING, Kind, Meaning, Meanings
from dtrans.verification.movement_rules import MOVES
from dtrans.verification.outcome import Cause
from dtrans.verification.rank_collectives import GROUPS
from dtrans.verification.step_values import StepValues
from dtrans.verification.value_log import Computation, ValueLog


# Homogeneous primitives: if an operand is multiplied by a constant, then the output is multiplied
# by a power of the constant. The log contains `shard_map` and `scan` only where they move pieces
# or rows, so they belong here, too.
HOMOGENEOUS = (
    "abs", "conv_general_dilated", "cumsum", "div", "dot_general", "integer_pow", "mul", "neg",
    "reduce_sum", "rsqrt", "scan", "shard_map", "sqrt", "square",
)  # fmt: skip
ADDS = ("add", "add_any", "sub", "max", "min", "select_n")


def find_causes(
    step: tuple[Any, Mapping[str, Any]], job: tuple[Any, Sequence[Any]], outputs: Sequence[int]
) -> dict[int, Cause | None]:
    """Find the cause (first wrong equation) of each wrong output of a job.

    Args:
      step: the jaxpr of one device, and the values of its inputs by name, in order.
      job: the jaxpr of the job, and its arguments at the same point.
      outputs: positions of the job's outputs that differ.

    Returns:
      The cause for each position. All causes are None if the programs are too large for logs.
    """
    step_log, job_log = ValueLog(), ValueLog()
    step_jaxpr, inputs = step
    job_jaxpr, arguments = job
    with np.errstate(all="ignore"):
        Evaluator(log=step_log).run(step_jaxpr, [(x,) for x in inputs.values()])
        values = Evaluator(log=job_log).run(job_jaxpr, [(x,) for x in arguments])
        if step_log.overflows or job_log.overflows:
            return dict.fromkeys(outputs)
        moves_rows = any(x.name == "move_rows" for x in job_log.computations)
        walk = _Walk(job_log, Meanings(StepValues(inputs, step_log), moves_rows=moves_rows))
        return {k: walk.cause(values[k]) for k in outputs}


class _Walk:
    """Search from wrong outputs of a job back to the computation at fault.

    The log of a job has an entry for each computation: an equation with its operands and outputs.
    Methods identify a computation by its index in the log, the argument `number`.

    Args:
      log: log of the job.
      meanings: search for the relation of a job's value to the values of the one-device step.
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
        """Return the cause (first wrong equation) of an output that differs."""
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
        """Return a wrong computation, and all earlier wrong computations that led to it.

        Here, a computation is wrong if an output is no copy, piece or partial sum of any value of
        the one-device step.
        """
        found = {last}
        waiting = self._sources(last)
        while waiting:
            number = waiting.pop()
            if number not in found and not self._has_meaning(number):
                found.add(number)
                waiting += self._sources(number)
        return found

    def _recovers(self, number: int) -> bool:
        """Return True if a later value that is computed from this computation is known.

        Then this computation was probably not at fault. A value is known if it is a copy, piece or
        partial sum of a value of the one-device step.
        """
        waiting, seen = [number], set()
        while waiting:
            one = waiting.pop()
            for user in self._users.get(one, []):
                if user in seen:
                    continue
                seen.add(user)
                if not self._has_meaning(user):
                    waiting.append(user)
                elif self._relations_of(user):
                    return True
        return False

    # -- multiples -------------------------------------------------------------------------------

    def _before_use(self, number: int) -> int:
        """Return the computation at fault, given the first one with a wrong output.

        All operands of computation `number` are related to values of the one-device step. But an
        operand may be a multiple of a step value, although the computation needs the value itself.
        Then the computation that created the multiple is at fault. Otherwise `number` itself is at
        fault.
        """
        name = self._log.computations[number].name
        if name in HOMOGENEOUS or name in MOVES or name in GROUPS:
            return number
        factors: list[Fraction] = []
        multiples: list[int] = []
        for source in self._sources(number):
            for meaning in self._relations_of(source):
                factors.append(meaning.factor)
                if meaning.kind is Kind.EXACT and meaning.factor != 1:
                    multiples.append(source)
        # A sum of multiples with one factor must be the same multiple, so no operand is at fault.
        if name in ADDS and len(set(factors)) == 1 and len(factors) > 1:
            return number
        cause = self._cause_of_multiple(multiples[0]) if multiples else None
        return number if cause is None else cause

    def _is_multiple(self, number: int, kinds: Sequence[Kind] = (Kind.EXACT,)) -> bool:
        """Return True if an output is a step value, or a part or partial sum, times a factor.

        Args:
          number: the computation with this output.
          kinds: the relations that count. The factor must not be 1.
        """
        return any(m.kind in kinds and m.factor != 1 for m in self._meanings_of(number))

    def _cause_of_multiple(self, number: int) -> int | None:
        """Return the computation that multiplied an output by a wrong factor.

        The output is a value of the step times a factor. So is one of its operands, and one of the
        operand's operands. The method follows this chain back. Each computation of the chain may
        change the factor. A change that a later computation reverts does not count, e.g. a sum over
        ranks that is divided later.

        The first computation with a remaining change is at fault. If this change is an integer, a
        reduction after the computation may have summed means that should be averaged. Then the
        reduction is at fault.

        Args:
          number: the last computation of the chain.

        Returns:
          The computation at fault. None if the first change of the factor is a mean, and no later
          reduction sums this mean.
        """
        chain = [number]
        both = (Kind.EXACT, Kind.PARTIAL)
        while before := [s for s in self._sources(chain[0]) if self._is_multiple(s, both)]:
            chain.insert(0, before[0])

        # Collect the factors that no later factor cancels, in the order of the chain.
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
        return self._kinds(source) == {Kind.PARTIAL} and self._kinds(number) == {Kind.EXACT}

    def _kinds(self, number: int) -> set[Kind]:
        return {m.kind for m in self._meanings_of(number)}

    def _is_copy(self, number: int) -> bool:
        """Return True if every rank has a full value of the one-device step as its output."""
        return any(m.is_copy for m in self._meanings_of(number))

    def _factor(self, number: int, of: int, last: Fraction) -> tuple[int, Fraction]:
        """Return (k, factor): a computation's output is value k of the step, times the factor.

        Several pairs may be possible, because values of the step may be multiples of each other.
        The method then prefers a pair with the factor of the operand: such an equation also occurs
        in the step. The next choices are a value that the same primitive computes, then k of the
        operand, then any pair.

        Args:
          number: the computation.
          of, last: k and factor of its operand; -1 and 1 for the first computation of a chain.
        """
        computation = self._log.computations[number]
        same_factor, same_primitive, same_value = [], [], []
        for value, factor in self._meanings.factors_of(computation.outputs[0]):
            if of >= 0 and factor == last:
                same_factor.append((value.number, factor))
            if value.title.partition(" ")[0] == computation.name:
                same_primitive.append((value.number, factor))
            if value.number == of:
                same_value.append((value.number, factor))
        choices = [*same_factor, *same_primitive, *same_value]
        for meaning in self._relations_of(number):
            assert meaning.of is not None
            choices.append((meaning.of.number, meaning.factor))
        return choices[0] if choices else (of, last)

    # -- computations ----------------------------------------------------------------------------

    def _sources(self, number: int) -> list[int]:
        """Return the computations that computed the operands of a computation."""
        found: set[int] = set()
        for operand in self._log.computations[number].operands:
            found.update(self._log.sources(operand))
        return sorted(found)

    def _meanings_of(self, number: int) -> list[Meaning]:
        """Return the relations of a computation's outputs to values of the one-device step."""
        if number not in self._found:
            computation = self._log.computations[number]
            found = [self._meanings.of(x, computation.axes) for x in computation.outputs]
            if found == [NOTHING]:
                found = [self._term_of(number) or NOTHING]
            self._found[number] = found
        return self._found[number]

    def _term_of(self, number: int) -> Meaning | None:
        """Return the relation of an output that is one row of a stack of partial sums, else None.

        `Meanings` finds only partial sums over consecutive rows of the batch. One trainer's sum may
        be over other rows. But `Meanings` finds the stack of all trainers' sums, and this method
        finds a row of this stack. On a mesh, return None: all ranks have the same row, and no
        reduction can add the other rows.
        """
        computation = self._log.computations[number]
        if computation.name not in (*MOVES, "scan", "shard_map") or computation.axes:
            return None
        found: list[Meaning] = []
        for source in self._sources(number):
            found += self._relations_of(source)
        if len(found) != 1 or found[0].kind is not Kind.PARTIAL:
            return None
        (stack,) = found
        if stack.of is None or stack.of.rows is not None:
            return None  # `Meanings` finds partial sums over rows
        if stack.text.startswith("a term"):
            return stack
        return dataclasses.replace(stack, text=f"a term of {stack.text}")

    def _relations_of(self, number: int) -> list[Meaning]:
        """Return the relations of a computation's outputs, without outputs that have none."""
        return [m for m in self._meanings_of(number) if m.of is not None]

    def _has_meaning(self, number: int) -> bool:
        return all(m.kind is not Kind.NONE for m in self._meanings_of(number))

    # -- words -----------------------------------------------------------------------------------

    def _describe(self, number: int) -> Cause:
        """Describe a computation for the report, as the cause of a wrong output."""
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
        """Return the relation of an operand of a computation to a value of the one-device step."""
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
