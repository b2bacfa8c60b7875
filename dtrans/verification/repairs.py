"""Repairs: which change of one collective makes the outputs of a wrong program right?

A fault is named by its remedy. The program is evaluated again with a mean in place of one sum, a
sum over other axes, or a reduction of copies that differ. Outputs that become the step's name the
fault. Equations of one line, over the same axes, are changed together: a gradient has many leaves.
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
from dtrans.verification.evaluate import MOST_EQUATIONS, Ranked, World
from dtrans.verification.field_values import NearTie, Real, Replicas, Unknown, same
from dtrans.verification.rank_collectives import groups_of, summed
from dtrans.verification.relations import axes_in_words, scaled, subsets, varying_axes


SUMS = ("psum", "psum_invariant", "reduce_scatter")
Outputs = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Repair:
    """One change of a program.

    Attributes:
      words: the fault and its remedy.
      equations: the collectives that are changed, by `id`.
      axes: those over which they communicate instead; None for their own.
      inverted: a permutation is turned round.
      factor: by which their results are multiplied.
      copies: reduces copies of an output that must agree.
    """

    words: str
    equations: frozenset[int] = frozenset()
    axes: tuple[str, ...] | None = None
    inverted: bool = False
    factor: Fraction = Fraction(1)
    copies: Callable[[Replicas], Any] | None = None


@dataclasses.dataclass
class CollectiveGroup:
    """Collectives of one line, and what was seen of them.

    Attributes:
      name: of the primitive.
      line: the line of the user, as `train.py:12`.
      over: name to size of the axes that they join.
      mesh: name to size of all axes.
      equations: by `id`.
      transposed: `jax.grad` made them, of what stands in the line.
      alike: ranks had equal values in every one of them.
    """

    name: str
    line: str
    over: Mapping[str, int]
    mesh: Mapping[str, int]
    transposed: bool
    equations: dict[int, None] = dataclasses.field(default_factory=dict)
    alike: bool = True

    def __str__(self) -> str:
        text = f"{self.name} over {axes_in_words(self.over)}" + (
            f" at {self.line}" if self.line else ""
        )
        return text + (", in the gradient," if self.transposed else "")


class ObservedWorld(World):
    """Ranks whose collectives, and copies that differ, are recorded.

    Args:
      axes, unknown: as those of `World`.
      groups: gets the collectives.
      copies: gets the values that ranks hold where they must agree.
    """

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        unknown: dict[str, None] | None = None,
        *,
        groups: dict[Any, CollectiveGroup] | None = None,
        copies: list[Replicas] | None = None,
    ) -> None:
        super().__init__(axes, unknown)
        self.groups: dict[Any, CollectiveGroup] = {} if groups is None else groups
        self.copies: list[Replicas] = [] if copies is None else copies

    def inner(self, axes: Mapping[str, int]) -> World:
        """Return the world of the ranks of a mesh."""
        return ObservedWorld(axes, self.unknown, groups=self.groups, copies=self.copies)

    def put_together(self, x: Ranked, spec: Any) -> Any:
        """Return an array from the pieces of ranks, and record copies that differ."""
        made = super().put_together(x, spec)
        if isinstance(made, Replicas) and made.axes:
            self.copies.append(made)
        return made

    def _collective(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        name, over = eqn.primitive.name, {a: self.axes[a] for a in self._over(eqn)}
        transposed, line = "transpose(" in scope_of(eqn), line_of(eqn)
        group = CollectiveGroup(name, line, over, self.axes, transposed)
        group = self.groups.setdefault((name, line, tuple(over), transposed), group)
        group.equations[id(eqn)] = None
        for x in operands:
            for ranks in groups_of(self.axes, [*over]):
                group.alike &= all(x[r] is x[ranks[0]] or same(x[r], x[ranks[0]]) for r in ranks)
        return super()._collective(eqn, operands)


class RepairedWorld(World):
    """Ranks that carry out a changed program.

    Args:
      axes, unknown: as those of `World`.
      repair: the change.
    """

    def __init__(
        self, axes: Mapping[str, int] | None, unknown: dict[str, None] | None, repair: Repair
    ) -> None:
        super().__init__(axes, unknown)
        self.repair = repair

    def inner(self, axes: Mapping[str, int]) -> World:
        """Return the world of the ranks of a mesh."""
        return RepairedWorld(axes, self.unknown, self.repair)

    def put_together(self, x: Ranked, spec: Any) -> Any:
        """Return an array from the pieces of ranks; copies that differ are reduced."""
        made = super().put_together(x, spec)
        if self.repair.copies is None or not isinstance(made, Replicas) or not made.axes:
            return made
        return self.repair.copies(made)

    def _collective(self, eqn: JaxprEqn, operands: list[Ranked]) -> list[Ranked]:
        if id(eqn) not in self.repair.equations:
            return super()._collective(eqn, operands)
        made = super()._collective(self._changed(eqn), operands)
        factor = self.repair.factor
        if factor == 1:
            return made
        new = {id(v): _multiple(v, factor) for x in made for v in x}
        return [tuple(new[id(v)] for v in x) for x in made]

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
    # integers that ranks have counted; those that cannot be divided are not what the step has
    return x * factor.numerator // factor.denominator if isinstance(x, np.ndarray) else x


# -- candidates ------------------------------------------------------------------------------------


def _candidates(groups: Sequence[CollectiveGroup], copies: Sequence[Replicas]) -> Iterator[Repair]:
    """Yield repairs, those of common faults first."""
    yield from _reductions(copies)
    for group in groups:
        if group.name in SUMS:
            yield from _scales(group)
        elif group.name == "ppermute":
            words = f"{group} sends the wrong way; swap source and destination in its permutation"
            yield Repair(words, frozenset(group.equations), inverted=True)
    # of one line some may be right: the loss, where gradients are not
    for group in groups:
        if group.name in SUMS and len(group.equations) > 1:
            for one in group.equations:
                yield from _scales(dataclasses.replace(group, equations={one: None}))
    for group in groups:
        if group.name in SUMS and group.name != "reduce_scatter":
            yield from _other_axes(group)


def _reductions(copies: Sequence[Replicas]) -> Iterator[Repair]:
    """Yield reductions of outputs that are said to be replicated, and are not."""
    if not copies:
        return
    axes: dict[str, int] = {}
    for x in copies:
        axes |= varying_axes(x)
    for name, mean in (("pmean", True), ("psum", False)):
        words = (
            f"a reduction is missing: ranks hold parts that differ along {axes_in_words(axes)}, "
            f"where out_specs has one value; use jax.lax.{name} over {_as_written(axes)}"
        )
        yield Repair(words, copies=functools.partial(_reduced, mean=mean))


def _reduced(x: Replicas, *, mean: bool) -> Any:
    """Return the sum or mean of copies over the axes along which they differ."""
    over = varying_axes(x)
    first = groups_of(x.axes, [*over])[0]
    total = summed([x.copies[r] for r in first])
    return _multiple(total, Fraction(1, len(first))) if mean else total


def _scales(group: CollectiveGroup) -> Iterator[Repair]:
    """Yield the mean in place of the sum, and the sum in place of the mean."""
    size, ids = math.prod(group.over.values()), frozenset(group.equations)
    if size == 1:
        return
    if group.alike:
        fault, remedy = (
            f"adds {size} equal values, which scales by the number of devices",
            "leave it out",
        )
    else:
        fault, remedy = "sums what should be averaged", f"use jax.lax.pmean, or divide by {size}"
    if group.transposed:
        remedy = f"divide the gradient by {size}, or scale the loss that a rank differentiates"
    yield Repair(f"{group} {fault}; {remedy}", ids, factor=Fraction(1, size))
    words = (
        f"{group} is divided by {size}, and should be a sum; use jax.lax.psum, without the division"
    )
    yield Repair(words, ids, factor=Fraction(size))


def _other_axes(group: CollectiveGroup) -> Iterator[Repair]:
    """Yield sums and means over other axes of the mesh."""
    size, ids = math.prod(group.over.values()), frozenset(group.equations)
    for other in subsets(group.mesh):
        if {*other} == {*group.over}:
            continue
        count = math.prod(other.values())
        # what the user divides by stays behind the sum: the old number for a mean
        for name, factor in (("psum", Fraction(1)), ("pmean", Fraction(1, count))):
            words = f"{group} joins the wrong ranks; use jax.lax.{name} over {_as_written(other)}"
            yield Repair(words, ids, axes=tuple(other), factor=factor)
            yield Repair(words, ids, axes=tuple(other), factor=factor * size)


def _as_written(axes: Mapping[str, int]) -> str:
    """Return axes as an argument of a collective."""
    return repr(next(iter(axes))) if len(axes) == 1 else repr(tuple(axes))


# -- search ----------------------------------------------------------------------------------------


def find_faults(
    jaxpr: Any, args: Sequence[Any], wanted: Outputs, names: Sequence[str]
) -> tuple[tuple[str, ...], set[int]]:
    """Return the faults of a program in words, and the outputs that no change makes right.

    Args:
      jaxpr: the program, of one device outside of its `shard_map`.
      args: a value for each input.
      wanted: the right value of each output.
      names: of the outputs.
    """
    ranked = [(x,) for x in args]
    seen = ObservedWorld()
    before = [x for (x,) in seen.run(jaxpr, ranked)]
    wrong = {k for k, (x, y) in enumerate(zip(before, wanted, strict=True)) if _differs(x, y)}
    left, spent = set(wrong), seen.evaluated
    faults: dict[str, set[int]] = {}
    for repair in _candidates([*seen.groups.values()], seen.copies):
        if not left or spent > MOST_EQUATIONS:
            break
        world = RepairedWorld(None, None, repair)
        try:
            made = [x for (x,) in world.run(jaxpr, ranked)]
        except NearTie:
            continue
        finally:
            spent += world.evaluated
        right = {k for k in wrong if not _differs(made[k], wanted[k])}
        # a change that mends nothing new, or breaks what was right, is no remedy
        broken = any(
            _differs(x, y)
            for k, (x, y) in enumerate(zip(made, wanted, strict=True))
            if k not in wrong
        )
        if right & left and not broken:
            faults.setdefault(repair.words, set()).update(right & left)
            left -= right
    return tuple(
        f"{words} (mends {_named(mended, names)})" for words, mended in faults.items()
    ), left


def _differs(x: Any, y: Any) -> bool:
    if isinstance(y, Unknown) or (isinstance(x, Unknown) and not isinstance(x, Replicas)):
        return False
    return not same(x, y)


def _named(places: set[int], names: Sequence[str]) -> str:
    """Name outputs, the first three of many."""
    found = [names[k] for k in sorted(places)]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} others" if len(found) > 3 else "")
