"""Search for the wrong collective in a program, by trial changes (*repairs*) of one collective.

The search evaluates the program again with one change: a mean instead of a sum, a sum over other
axes, or a reduction of copies that differ. If this corrects wrong outputs, the change shows the
fault and the remedy. A source line such as `psum(grads)` writes one collective for each leaf. So a
change applies to all collectives that one line writes over the same axes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn, line_of, scope_of
from dtrans.ir.selection import subset, values_at
from dtrans.verification.evaluate import MOST_EQUATIONS, Evaluator, mesh_axes
from dtrans.verification.field_values import NearTie, Real, Replicas, Unknown, same
from dtrans.verification.rank_collectives import Ranked, groups_of, summed
from dtrans.verification.relations import axes_in_words, scaled, subsets, varying_axes


SUMS = ("psum", "psum_invariant", "reduce_scatter")
Outputs = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Repair:
    """Change of a program's collectives that might correct it, such as a mean in place of a sum.

    Attributes:
      words: text that states the fault and the remedy.
      equations: ids of the changed collectives.
      axes: new axes of the collectives; None for no change.
      inverted: True to swap sources and destinations of a permutation.
      factor: factor by which the results of the collectives are multiplied.
      copies: function that reduces differing copies of an output to one value; None for no change.
    """

    words: str
    equations: frozenset[int] = frozenset()
    axes: tuple[str, ...] | None = None
    inverted: bool = False
    factor: Fraction = Fraction(1)
    copies: Callable[[Replicas], Any] | None = None


@dataclasses.dataclass
class CollectiveGroup:
    """Collectives that one source line writes; a repair changes all of them.

    Attributes:
      name: name of the primitive.
      line: the user's line, `train.py:12`.
      over: size of each axis over which the collectives communicate, by name.
      mesh: size of each axis of the mesh, by name.
      transposed: True if `jax.grad` wrote the collectives as transposes of equations of the line.
      equations: ids of the collectives, as an ordered set.
      has_equal_operands: True if all ranks that a collective connects have equal operands.
    """

    name: str
    line: str
    over: Mapping[str, int]
    mesh: Mapping[str, int]
    transposed: bool
    equations: dict[int, None] = dataclasses.field(default_factory=dict)
    has_equal_operands: bool = True

    def __str__(self) -> str:
        place = f" at {self.line}" if self.line else ""
        where = ", in the gradient," if self.transposed else ""
        return f"{self.name} over {axes_in_words(self.over)}{place}{where}"


class ObservedWorld(Evaluator):
    """Evaluator that records the program's collectives, and outputs that differ between ranks.

    Args:
      axes, unknown: as in `Evaluator`.
      groups: dict to which the evaluator adds collectives.
      copies: list to which it adds outputs whose copies on ranks should be equal, but differ.
    """

    def __init__(
        self,
        axes: Mapping[str, int] | None,
        unknown: dict[str, None] | None,
        *,
        groups: dict[Any, CollectiveGroup],
        copies: list[Replicas],
    ) -> None:
        super().__init__(axes, unknown)
        self.groups = groups
        self.copies = copies

    def inner(self, axes: Mapping[str, int]) -> Evaluator:
        """Return the evaluator of a `shard_map` body, for the ranks of its mesh."""
        return ObservedWorld(axes, self.unknown, groups=self.groups, copies=self.copies)

    def assemble(self, pieces: Ranked, spec: Any) -> Any:
        """Assemble an array from the ranks' pieces, and record it if its copies differ."""
        found = super().assemble(pieces, spec)
        if isinstance(found, Replicas) and found.axes:
            self.copies.append(found)
        return found

    def _collective(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        name, over = eqn.primitive.name, subset(self.axes, mesh_axes(eqn))
        transposed, line = "transpose(" in scope_of(eqn), line_of(eqn)
        group = CollectiveGroup(name, line, over, self.axes, transposed)
        group = self.groups.setdefault((name, line, tuple(over), transposed), group)
        group.equations[id(eqn)] = None
        for x in operands:
            for ranks in groups_of(self.axes, [*over]):
                first = x[ranks[0]]
                group.has_equal_operands &= all(x[r] is first or same(x[r], first) for r in ranks)
        return super()._collective(eqn, operands)


class RepairedWorld(Evaluator):
    """Evaluator of a program with one change (a repair) of its collectives.

    Args:
      axes, unknown: as in `Evaluator`.
      repair: the change.
    """

    def __init__(
        self, axes: Mapping[str, int] | None, unknown: dict[str, None] | None, repair: Repair
    ) -> None:
        super().__init__(axes, unknown)
        self.repair = repair

    def inner(self, axes: Mapping[str, int]) -> Evaluator:
        """Return the evaluator of a `shard_map` body, for the ranks of its mesh."""
        return RepairedWorld(axes, self.unknown, self.repair)

    def assemble(self, pieces: Ranked, spec: Any) -> Any:
        """Assemble an array from the ranks' pieces; if copies differ, the repair reduces them."""
        found = super().assemble(pieces, spec)
        if self.repair.copies is None or not isinstance(found, Replicas) or not found.axes:
            return found
        return self.repair.copies(found)

    def _collective(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        if id(eqn) not in self.repair.equations:
            return super()._collective(eqn, operands)
        outputs = super()._collective(self._changed(eqn), operands)
        factor = self.repair.factor
        if factor == 1:
            return outputs
        # Ranks that share an object must also share its multiple: then later equations are
        # evaluated once for them.
        found = []
        for x in outputs:
            multiples = {id(v): _multiple(v, factor) for v in x}
            found.append(tuple(multiples[id(v)] for v in x))
        return found

    def _changed(self, eqn: JaxprEqn) -> JaxprEqn:
        params = dict(eqn.params)
        if self.repair.axes is not None:
            params["axes"] = self.repair.axes
        if self.repair.inverted:
            params["perm"] = tuple((b, a) for a, b in params["perm"])
        return eqn.replace(params=params)


def _multiple(x: Any, factor: Fraction) -> Any:
    if isinstance(x, Real):
        return scaled(x, factor)
    if isinstance(x, np.ndarray):
        # Dropping the remainder of the division is harmless: if there is one, no repair makes the
        # integer right.
        return x * factor.numerator // factor.denominator
    return x


# -- candidates ------------------------------------------------------------------------------------


def _candidates(groups: Sequence[CollectiveGroup], copies: Sequence[Replicas]) -> Iterator[Repair]:
    """Yield the changes to try; changes that correct common faults come first."""
    yield from _reductions(copies)
    for group in groups:
        if group.name in SUMS:
            yield from _scales(group)
        elif group.name == "ppermute":
            words = f"{group} sends the wrong way; swap source and destination in its permutation"
            yield Repair(words, frozenset(group.equations), inverted=True)
    # One line may have right and wrong collectives: psum((loss, grads)) may be right for the loss
    # only.
    for group in groups:
        if group.name in SUMS and len(group.equations) > 1:
            for one in group.equations:
                yield from _scales(dataclasses.replace(group, equations={one: None}))
    for group in groups:
        if group.name in SUMS and group.name != "reduce_scatter":
            yield from _other_axes(group)


def _reductions(copies: Sequence[Replicas]) -> Iterator[Repair]:
    """Yield reductions of outputs that differ between ranks, although out_specs replicates them."""
    if not copies:
        return
    axes: dict[str, int] = {}
    for x in copies:
        axes |= varying_axes(x)
    for name, mean in (("pmean", True), ("psum", False)):
        words = (
            f"a reduction is missing: the values on the ranks differ along {axes_in_words(axes)}, "
            f"but out_specs says they are equal; use jax.lax.{name} over {_as_written(axes)}"
        )
        yield Repair(words, copies=functools.partial(_reduced, mean=mean))


def _reduced(x: Replicas, *, mean: bool) -> Any:
    """Reduce copies to their sum or mean, over the axes along which they differ."""
    over = varying_axes(x)
    first = groups_of(x.axes, [*over])[0]
    total = summed(values_at(x.copies, first))
    if mean:
        return _multiple(total, Fraction(1, len(first)))
    return total


def _scales(group: CollectiveGroup) -> Iterator[Repair]:
    """Yield the repairs that replace a sum by a mean, or a mean by a sum."""
    size, ids = math.prod(group.over.values()), frozenset(group.equations)
    if size == 1:
        return
    fault, remedy = "sums, expected a mean", f"use jax.lax.pmean, or divide by {size}"
    if group.has_equal_operands:
        fault = f"adds {size} equal values, which multiplies the value by the number of devices"
        remedy = "remove it"
    if group.transposed:
        remedy = f"divide the gradient by {size}, or scale the loss that a rank differentiates"
    yield Repair(f"{group} {fault}; {remedy}", ids, factor=Fraction(1, size))
    words = f"{group} is divided by {size}, expected a sum; use jax.lax.psum without the division"
    yield Repair(words, ids, factor=Fraction(size))


def _other_axes(group: CollectiveGroup) -> Iterator[Repair]:
    """Yield the repairs that sum or average over other axes of the mesh."""
    size, ids = math.prod(group.over.values()), frozenset(group.equations)
    for other in subsets(group.mesh):
        if {*other} == {*group.over}:
            continue
        count = math.prod(other.values())
        # If the user wrote a mean, a division by the size of the old axes follows the sum. The
        # second repair cancels this division.
        for name, factor in (("psum", Fraction(1)), ("pmean", Fraction(1, count))):
            words = f"{group} is over the wrong axes; use jax.lax.{name} over {_as_written(other)}"
            yield Repair(words, ids, axes=tuple(other), factor=factor)
            yield Repair(words, ids, axes=tuple(other), factor=factor * size)


def _as_written(axes: Mapping[str, int]) -> str:
    """Return axes as the Python code of a collective's argument, for the report."""
    names = tuple(axes)
    return repr(names[0]) if len(names) == 1 else repr(names)


# -- search ----------------------------------------------------------------------------------------


def find_faults(
    jaxpr: Any, args: Sequence[Any], wanted: Outputs, names: Sequence[str]
) -> tuple[tuple[str, ...], set[int]]:
    """Find the wrong collectives of a program.

    Args:
      jaxpr: the distributed program, with its `shard_map`.
      args: value of each input.
      wanted: right value of each output.
      names: names of the outputs.

    Returns:
      A description of each fault, and the positions of the wrong outputs that no repair explains.
    """
    ranked = [(x,) for x in args]
    observed = ObservedWorld(None, None, groups={}, copies=[])
    wrong = _differing(observed.run(jaxpr, ranked), wanted)
    unexplained, spent = set(wrong), observed.evaluated
    mended: dict[str, set[int]] = {}
    for repair in _candidates([*observed.groups.values()], observed.copies):
        if not unexplained or spent > MOST_EQUATIONS:
            break
        evaluator = RepairedWorld(None, None, repair)
        try:
            still_wrong = _differing(evaluator.run(jaxpr, ranked), wanted)
        except NearTie:
            continue
        finally:
            spent += evaluator.evaluated
        # A repair must correct at least one more output, and must not break a right output.
        new = unexplained - still_wrong
        if new and still_wrong <= wrong:
            mended.setdefault(repair.words, set()).update(new)
            unexplained -= new
    faults = [f"{words} (corrects {_listed(places, names)})" for words, places in mended.items()]
    return tuple(faults), unexplained


def _differing(outputs: Sequence[Ranked], wanted: Outputs) -> set[int]:
    """Return the positions of outputs that differ from the right values."""
    found = set()
    for k, ((x,), y) in enumerate(zip(outputs, wanted, strict=True)):
        if _differs(x, y):
            found.add(k)
    return found


def _differs(x: Any, y: Any) -> bool:
    if isinstance(y, Unknown) or (isinstance(x, Unknown) and not isinstance(x, Replicas)):
        return False
    return not same(x, y)


def _listed(places: set[int], names: Sequence[str]) -> str:
    """Return a text with the names of at most three outputs, and the number of further outputs."""
    found = values_at(names, sorted(places))
    if len(found) <= 3:
        return ", ".join(found)
    count = len(found) - 3
    return f"{', '.join(found[:3])} and {count} other{'s' * (count > 1)}"
