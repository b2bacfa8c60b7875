"""Meanings of a job's values in terms of the step: copies, pieces, partial sums, multiples.

    exact     a constant; a copy of a step value; pieces of one, by ranks or by rows
    partial   partial sums: over ranks they add up to a step value, or they are sums over some rows
    multiple  exact or partial, times a number: means of parts before they are averaged
    none      anything else

An exact value is right wherever it stands. A partial sum or a multiple is right only if it is
reduced or divided before anything but linear equations uses it.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dtrans.verification import field
from dtrans.verification.field import Array, P
from dtrans.verification.field_values import Real, Unknown
from dtrans.verification.rank_collectives import groups_of, summed
from dtrans.verification.step_values import Match, StepValue, StepValues, telling
from dtrans.verification.value_log import elements_of_value


MOST_RATIONAL = 1 << 34  # numerator times denominator of a constant, such as 1e-8
MOST_PARTS = 64  # rows of a stack that are looked at one by one
# of means of parts, and of scaled losses
_WHOLE = (*range(1, 65), *(1 << k for k in range(7, 17)))
_FRACTIONS = {Fraction(n, d) for n in range(1, 17) for d in range(1, 17)}
_FRACTIONS |= {Fraction(n) for n in _WHOLE} | {Fraction(1, n) for n in _WHOLE}
# simple ones first
FACTORS = sorted(_FRACTIONS - {1}, key=lambda f: (f.numerator * f.denominator, f))
INVERSES = np.array([f.denominator * pow(f.numerator, -1, P) % P for f in FACTORS], np.uint64)


InOrder = Callable[[Sequence[float], int], bool]  # of the starts of parts, and the size of one


class Kind(enum.Enum):
    """Relation of a value to the step."""

    EXACT = "exact"
    PARTIAL = "partial"
    NONE = "none"


@dataclasses.dataclass(frozen=True)
class Meaning:
    """Relation of a value to a value of the step.

    Attributes:
      kind: see above.
      text: a noun phrase.
      of: the step's value; None of constants and of what has no meaning.
      factor: the value is so many times what it should be.
      whole: True for a copy, of all numbers.
    """

    kind: Kind
    text: str
    of: StepValue | None = None
    factor: Fraction = Fraction(1)
    whole: bool = False

    @property
    def is_exact(self) -> bool:
        """True if the value is right wherever it stands."""
        return self.kind is Kind.EXACT and self.factor == 1


NOTHING = Meaning(Kind.NONE, "no piece, partial sum or copy of a value of the step")
COPIES = Meaning(Kind.NONE, "copies that ranks hold, which differ")
CONSTANT = Meaning(Kind.EXACT, "a constant")
NOT_FOLLOWED = Meaning(Kind.EXACT, "a value that could not be followed")
NO_FLOATS = Meaning(Kind.EXACT, "integers")


class Meanings:
    """Finder of meanings.

    Args:
      values: of the step.
      moved: rows are moved by their numbers: arrays may have rows of a value in any order.
    """

    def __init__(self, values: StepValues, *, moved: bool = False) -> None:
        self._values, self._moved = values, moved
        self._found: dict[tuple[int, ...], Meaning] = {}
        self._kept: list[Any] = []  # whose identities are keys

    def of(self, value: Sequence[Any], axes: Mapping[str, int]) -> Meaning:
        """Return the meaning of a value.

        Args:
          value: that of each rank.
          axes: the mesh of the ranks.
        """
        key = tuple(map(id, value))
        if key not in self._found:
            self._kept.append(value)
            self._found[key] = self._meaning(value, axes)
        return self._found[key]

    def factors_of(self, value: Sequence[Any]) -> list[tuple[StepValue, Fraction]]:
        """Return each step value that a value is a multiple of, and the factor; simple factors come
        first."""
        ranks = [e for x in value if (e := elements_of_value(x)) is not None]
        telling_ones = [e for e in ranks if telling(e).any()]
        found: dict[int, tuple[StepValue, Fraction]] = {}
        for first in telling_ones[:1]:
            for factor in self._factors(first):
                scaled = _divided(first, factor)
                for partial in (False, True):
                    for match in self._values.matches(scaled, partial=partial):
                        found.setdefault(match.value.number, (match.value, factor))
        return [*found.values()]

    def _meaning(self, value: Sequence[Any], axes: Mapping[str, int]) -> Meaning:
        if any(type(x) is Unknown for x in value):
            return NOT_FOLLOWED
        if any(isinstance(x, Unknown) for x in value):
            return COPIES
        ranks = [e for x in value if (e := elements_of_value(x)) is not None]
        if len(ranks) != len(value):
            return NO_FLOATS
        if all(_is_constant(x) for x in ranks):
            return CONSTANT
        if len(set(map(id, value))) == 1:
            return self._of_one(ranks[0], alone=len(ranks) == 1)
        return self._of_ranks(ranks, axes)

    def _of_one(self, x: Array, *, alone: bool) -> Meaning:
        """Return the meaning of an array that all ranks have."""
        found = self._of_value(x)
        # a partial sum that all ranks have will never be reduced
        if found is None and alone:
            found = self._of_rows(x)
        return (
            found
            or self._of_stack(x)
            or (self._of_moved(x) if alone and self._moved else None)
            or NOTHING
        )

    def _of_moved(self, x: Array) -> Meaning | None:
        """Return the meaning of an array that has rows of one value."""
        if not x.ndim or not len(x):
            return None
        value = self._values.value_with_rows(x)
        return (
            None
            if value is None
            else _meaning(Kind.EXACT, f"rows of {value.title}", value, Fraction(1))
        )

    def _of_value(self, x: Array, *, whole: bool = False) -> Meaning | None:
        """Return the meaning of an array that is a copy or, unless all of it is asked for, a piece
        of a value."""
        for factor in self._factors(x):
            found = self._values.matches(_divided(x, factor), partial=False)
            copies = [m for m in found if m.whole]
            if copies or (found and not whole):
                match = (copies or found)[0]
                form = "a copy" if match.whole else "a piece"
                meaning = _meaning(
                    Kind.EXACT, f"{form} of {match.value.title}", match.value, factor
                )
                return dataclasses.replace(meaning, whole=match.whole)
        return None

    def _of_rows(self, x: Array) -> Meaning | None:
        """Return the meaning of an array that is a sum over some rows."""
        for factor in self._factors(x):
            for match in self._values.matches(_divided(x, factor), partial=True):
                assert match.value.rows is not None
                first, end = match.value.rows
                text = f"the partial sum of {match.value.title} over rows {first} to {end - 1}"
                return _meaning(Kind.PARTIAL, text, match.value, factor)
        return None

    def _of_stack(self, x: Array) -> Meaning | None:
        """Return the meaning of rows that are parts of one value each, as those of trainers are."""
        if not x.ndim or not 1 < len(x) <= MOST_PARTS:
            return None
        return self._of_parts([*x], _evenly, "the first dimension", ways=(True,))

    def _of_ranks(self, ranks: Sequence[Array], axes: Mapping[str, int]) -> Meaning:
        in_order = lambda starts, size: _ordered_on_mesh(starts, size, axes)
        return self._of_parts(ranks, in_order, "ranks", axes) or NOTHING

    def _of_parts(
        self,
        parts: Sequence[Array],
        in_order: InOrder,
        over: str,
        axes: Mapping[str, int] | None = None,
        ways: Sequence[bool] = (False, True),
    ) -> Meaning | None:
        """Return the meaning of parts of one value.

        Args:
          in_order: tells from their starts if parts follow each other.
          ways: False for pieces, True for partial sums.
        """
        first = next((x for x in parts if telling(x).any()), parts[0])
        for factor in self._factors(first):
            scaled = [_divided(x, factor) for x in parts]
            for partial in ways:
                found = self._pieces(scaled, in_order, partial=partial)
                if found is None:
                    continue
                if partial:
                    text = f"partial sums of {found.title}, over rows"
                    return _meaning(Kind.PARTIAL, text, found, factor)
                return _meaning(Kind.EXACT, f"pieces of {found.title}, along {over}", found, factor)
        for sums in _sums_over(parts, axes):
            sum_ = self._of_value(sums, whole=True)
            if sum_ is not None and sum_.of is not None:
                text = f"partial sums of {sum_.of.title}, over {over}"
                return _meaning(Kind.PARTIAL, text, sum_.of, sum_.factor)
        return None

    def _pieces(
        self, parts: Sequence[Array], in_order: InOrder, *, partial: bool
    ) -> StepValue | None:
        """Return the value that parts are pieces of, one behind the other, or partial sums of."""
        of_parts = [self._values.matches(x, partial=partial) for x in parts]
        seen = dict.fromkeys(m.value.number for found in of_parts for m in found)
        for number in seen:
            chosen = [
                next((m for m in found if m.value.number == number), None) for found in of_parts
            ]
            starts, size = _starts(chosen)
            if starts and in_order(starts, size):
                return next(m.value for m in chosen if m is not None)
        return None

    def _factors(self, x: Array) -> list[Fraction]:
        """Return 1, and other numbers by which a value of the step may have been multiplied."""
        flat = x.ravel()
        places = np.flatnonzero(telling(flat))
        if not places.size:
            return [Fraction(1)]
        found = self._values.have(field.multiply(flat[places[0]], INVERSES))
        found |= self._values.have(field.multiply(flat[places[-1]], INVERSES))
        return [Fraction(1), *(FACTORS[k] for k in np.flatnonzero(found))]


def _starts(matches: Sequence[Match | None]) -> tuple[list[float], int]:
    """Return the starts of parts of one value, and the size of a part.

    A part behind the end of the value starts at infinity. Parts of a sum start at rows, and have
    one place in the value. There are no starts if a match is not a part.
    """
    known = [m for m in matches if m is not None]
    partial = known[0].value.rows is not None
    if len({m.turned for m in known}) != 1 or (partial and len({m.start for m in known}) != 1):
        return [], 0
    starts: list[float] = []
    ended = False
    for match in matches:
        if match is None:
            if not ended:
                return [], 0
            starts.append(np.inf)
            continue
        starts.append(match.start if match.value.rows is None else match.value.rows[0])
        ended = match.value.ends if partial else match.ends
    rows = known[0].value.rows
    return starts, known[0].size if rows is None else rows[1] - rows[0]


def _evenly(starts: Sequence[float], size: int) -> bool:
    """Return True if parts do not overlap and have one distance, with padding behind them."""
    begun = [s for s in starts if np.isfinite(s)]
    distances = {b - a for a, b in itertools.pairwise(begun)}
    return (
        begun == [*starts][: len(begun)]
        and len(distances) <= 1
        and all(d >= size for d in distances)
    )


def _ordered_on_mesh(starts: Sequence[float], size: int, axes: Mapping[str, int]) -> bool:
    """Return True if along each axis of a mesh parts follow each other or are one part, and not all
    are one."""
    sizes = [*axes.values()]
    if int(np.prod(sizes)) != len(starts) or len({*starts}) == 1:
        return False
    on_mesh = np.asarray(starts).reshape(sizes)
    for d in range(on_mesh.ndim):
        for line in np.moveaxis(on_mesh, d, -1).reshape(-1, sizes[d]):
            if len({*line}) > 1 and not _evenly([*line], size):
                return False
    return True


def _sums_over(parts: Sequence[Array], axes: Mapping[str, int] | None) -> Iterator[Array]:
    """Return the sums of parts, over all of them or over some axes of a mesh, if they are equal for
    all groups."""
    if len({x.shape for x in parts}) != 1:
        return
    if axes is None or int(np.prod([*axes.values()])) != len(parts):
        yield _sum(parts)
        return
    for count in range(1, len(axes) + 1):
        for over in itertools.combinations(axes, count):
            sums = [_sum([parts[r] for r in ranks]) for ranks in groups_of(axes, over)]
            if all(np.array_equal(x, sums[0]) for x in sums):
                yield sums[0]


def _sum(parts: Sequence[Array]) -> Array:
    found: Array = summed([Real(x, np.zeros(x.shape)) for x in parts]).elements
    return found


def _meaning(kind: Kind, text: str, of: StepValue, factor: Fraction) -> Meaning:
    return Meaning(kind, text if factor == 1 else f"{factor} times {text}", of, factor)


def _divided(x: Array, factor: Fraction) -> Array:
    """Return an array divided by a number."""
    if factor == 1:
        return x
    inverse = factor.denominator * pow(factor.numerator, -1, P) % P
    return field.multiply(x, np.uint64(inverse))


def _is_constant(x: Array) -> bool:
    """Return True if all elements are integers, or a few rational numbers."""
    there = telling(x)
    if not there.any():
        return True
    different = np.unique(x[there])
    return different.size <= 8 and all(_is_rational(int(e)) for e in different)


def _is_rational(element: int) -> bool:
    """Return True if an element is a quotient of small integers, which one of 4 million random
    elements is."""
    # the convergents of element / P: numerators fall while denominators grow
    numerators, denominators = (P, element), (0, 1)
    while numerators[1]:
        if numerators[1] * abs(denominators[1]) < MOST_RATIONAL:
            return True
        q = numerators[0] // numerators[1]
        numerators = numerators[1], numerators[0] - q * numerators[1]
        denominators = denominators[1], denominators[0] - q * denominators[1]
    return False
