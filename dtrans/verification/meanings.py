"""Search for the relation (*meaning*) of a job's value to the values of the one-device step.

If a verification fails, `naming` uses these relations to find the first wrong value of the job. The
kinds of relations:

    exact     a constant, a copy of a step value, or pieces of a step value on ranks or in rows
    partial   partial sums: the ranks' values add up to a step value, or a value is the sum over
              some rows of the batch
    multiple  an exact or partial value times a number, such as the sum of several means
    none      any other value

An exact value is right. The job must reduce a partial sum, and divide a multiple, before a
nonlinear equation reads the value.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dtrans.ir.selection import values_at
from dtrans.verification import field
from dtrans.verification.field import Array, P
from dtrans.verification.field_values import Real, Unknown
from dtrans.verification.rank_collectives import groups_of, summed
from dtrans.verification.step_values import Match, StepValue, StepValues, is_random
from dtrans.verification.value_log import elements_of_value


MOST_RATIONAL = 1 << 34  # bound of numerator times denominator of a constant, such as 1e-8
MOST_PARTS = 64  # largest number of rows of a stack that are compared one by one
# Factors between sums and means, and usual scales of losses.
_INTEGERS = (*range(1, 65), *(1 << k for k in range(7, 17)))
_FRACTIONS = {Fraction(n, d) for n in range(1, 17) for d in range(1, 17)}
_FRACTIONS |= {Fraction(n) for n in _INTEGERS}
_FRACTIONS |= {Fraction(1, n) for n in _INTEGERS}
# Factors with small numerators and denominators are tried first.
FACTORS = sorted(_FRACTIONS - {1}, key=lambda f: (f.numerator * f.denominator, f))
INVERSES = np.array([f.denominator * pow(f.numerator, -1, P) % P for f in FACTORS], np.uint64)


# Function of (starts of parts, size of a part) that returns True if the parts are in order.
InOrder = Callable[[Sequence[float], int], bool]


class Kind(enum.Enum):
    """Kind of a relation between a job's value and a step value: exact, partial sum, or none."""

    EXACT = "exact"
    PARTIAL = "partial"
    NONE = "none"


@dataclasses.dataclass(frozen=True)
class Meaning:
    """Relation between a value of the job and a value of the one-device step.

    Examples are "a copy of tanh (model.py:12)", a piece, and a partial sum.

    Attributes:
      kind: kind of the relation.
      text: noun phrase that describes the relation.
      of: the one-device value; None for a constant, or if there is no relation.
      factor: the job's value divided by the one-device value.
      is_copy: True if the job's value is a copy of the full one-device value.
    """

    kind: Kind
    text: str
    of: StepValue | None = None
    factor: Fraction = Fraction(1)
    is_copy: bool = False


NOTHING = Meaning(Kind.NONE, "no piece, partial sum or copy of a value of the step")
COPIES = Meaning(Kind.NONE, "copies on the ranks that differ")
CONSTANT = Meaning(Kind.EXACT, "a constant")
NOT_FOLLOWED = Meaning(Kind.EXACT, "a value that depends on an equation without a rule")
NO_FLOATS = Meaning(Kind.EXACT, "integers")


class Meanings:
    """Search that relates the values of a job to the values of the one-device step, with a cache.

    Args:
      values: values of the one-device step.
      moves_rows: True if the job sends embedding rows between ranks by their ids. Then an array may
        have the rows of a step value in any order.
    """

    def __init__(self, values: StepValues, *, moves_rows: bool = False) -> None:
        self._values, self._moves_rows = values, moves_rows
        self._found: dict[tuple[int, ...], Meaning] = {}
        # The keys of `_found` are ids of values, which are stored here so that ids stay unique.
        self._alive: list[Any] = []

    def of(self, value: Sequence[Any], axes: Mapping[str, int]) -> Meaning:
        """Return the relation of a job's value to the one-device step, such as "a copy of tanh".

        Args:
          value: the value on each rank.
          axes: size of each axis of the ranks' mesh, by name.
        """
        key = tuple(map(id, value))
        if key not in self._found:
            self._alive.append(value)
            self._found[key] = self._meaning(value, axes)
        return self._found[key]

    def factors_of(self, value: Sequence[Any]) -> list[tuple[StepValue, Fraction]]:
        """Return each one-device value that differs from a job's value by a rational factor only.

        Returns:
          Pairs (step value, factor), with simple factors first. The job's value is their product.
        """
        first = next((e for e in _elements_of_ranks(value) if is_random(e).any()), None)
        if first is None:
            return []
        found: dict[int, tuple[StepValue, Fraction]] = {}
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
        ranks = _elements_of_ranks(value)
        if len(ranks) != len(value):
            return NO_FLOATS
        if all(_is_constant(x) for x in ranks):
            return CONSTANT
        if len(set(map(id, value))) == 1:
            return self._of_one(ranks[0], alone=len(ranks) == 1)
        return self._of_ranks(ranks, axes)

    def _of_one(self, x: Array, *, alone: bool) -> Meaning:
        """Return the relation of an array, which is equal on all ranks, to a step value.

        Args:
          x: elements of the array.
          alone: True if there is only one rank.
        """
        found = self._of_value(x)
        # If several ranks have the same partial sum, no reduction can complete it.
        if found is None and alone:
            found = self._of_rows(x)
        if found is None:
            found = self._of_stack(x)
        if found is None and alone and self._moves_rows:
            found = self._of_moved_rows(x)
        return found or NOTHING

    def _of_moved_rows(self, x: Array) -> Meaning | None:
        """Return the relation of an array to a step value with the same rows in any order.

        Return None if there is no such step value.
        """
        if not x.ndim or not len(x):
            return None
        value = self._values.value_with_rows(x)
        if value is None:
            return None
        return _meaning(Kind.EXACT, f"rows of {value.title}", value, Fraction(1))

    def _of_value(self, x: Array, *, copies_only: bool = False) -> Meaning | None:
        """Return the relation of an array that is a copy or a piece of a step value; else None."""
        for factor in self._factors(x):
            found = self._values.matches(_divided(x, factor), partial=False)
            copies = [m for m in found if m.is_copy]
            if copies or (found and not copies_only):
                match = (copies or found)[0]
                form = "a copy" if match.is_copy else "a piece"
                text = f"{form} of {match.value.title}"
                meaning = _meaning(Kind.EXACT, text, match.value, factor)
                return dataclasses.replace(meaning, is_copy=match.is_copy)
        return None

    def _of_rows(self, x: Array) -> Meaning | None:
        """Return the relation of an array to a step value that is a sum over rows of the batch.

        Return None if the array is not the sum over some consecutive rows.
        """
        for factor in self._factors(x):
            for match in self._values.matches(_divided(x, factor), partial=True):
                assert match.value.rows is not None
                first, end = match.value.rows
                text = f"the partial sum of {match.value.title} over rows {first} to {end - 1}"
                return _meaning(Kind.PARTIAL, text, match.value, factor)
        return None

    def _of_stack(self, x: Array) -> Meaning | None:
        """Return the relation of an array to a step value, if each row is a partial sum of it.

        An example is an array with one row for each trainer. Return None in other cases.
        """
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
        """Return the relation of several arrays to one step value: pieces, or partial sums.

        Args:
          parts: the arrays, for example one for each rank.
          in_order: function that decides if parts are in order (`InOrder`).
          over: noun phrase for texts: the parts are on "ranks", or along a dimension.
          axes: size of each mesh axis, by name, if each part is the array of a rank; otherwise
            None.
          ways: the searches, in order: False for pieces, True for partial sums over rows.
        """
        first = next((x for x in parts if is_random(x).any()), parts[0])
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
            sum_ = self._of_value(sums, copies_only=True)
            if sum_ is not None and sum_.of is not None:
                text = f"partial sums of {sum_.of.title}, over {over}"
                return _meaning(Kind.PARTIAL, text, sum_.of, sum_.factor)
        return None

    def _pieces(
        self, parts: Sequence[Array], in_order: InOrder, *, partial: bool
    ) -> StepValue | None:
        """Return the value of the one-device step that has `parts` as its pieces or terms."""
        of_parts: list[dict[int, Match]] = []
        for x in parts:
            matches: dict[int, Match] = {}
            for match in self._values.matches(x, partial=partial):
                matches.setdefault(match.value.number, match)
            of_parts.append(matches)
        for number in dict.fromkeys(itertools.chain(*of_parts)):
            chosen = [matches.get(number) for matches in of_parts]
            starts, size = _starts(chosen)
            if starts and in_order(starts, size):
                return next(m.value for m in chosen if m is not None)
        return None

    def _factors(self, x: Array) -> list[Fraction]:
        """Return the numbers by which an array may differ from a value of the one-device step.

        The first factor is 1. Other factors are candidates that pass a quick test: one entry of the
        array, divided by the factor, occurs in the one-device step.
        """
        flat = x.ravel()
        places = np.flatnonzero(is_random(flat))
        if not places.size:
            return [Fraction(1)]
        found = self._values.contains(field.multiply(flat[places[0]], INVERSES))
        found |= self._values.contains(field.multiply(flat[places[-1]], INVERSES))
        return [Fraction(1), *values_at(FACTORS, np.flatnonzero(found))]


def _starts(matches: Sequence[Match | None]) -> tuple[list[float], int]:
    """Return the start of each rank's part in a step value, and the size of a part.

    For partial sums, starts and size count rows of the batch. The list of starts is empty if the
    parts do not fit together.

    Args:
      matches: each part as a slice of the step value. None stands for a part without a match, which
        may follow the last part as padding; its start is infinity.
    """
    known = [m for m in matches if m is not None]
    partial = known[0].value.rows is not None
    if len({m.order for m in known}) != 1:
        return [], 0
    if partial and len({m.start for m in known}) != 1:
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
    """Return True if parts are equally spaced and do not overlap; padding may follow them."""
    finite = [s for s in starts if np.isfinite(s)]
    distances = {b - a for a, b in itertools.pairwise(finite)}
    if finite != [*starts][: len(finite)] or len(distances) > 1:
        return False
    return all(d >= size for d in distances)


def _ordered_on_mesh(starts: Sequence[float], size: int, axes: Mapping[str, int]) -> bool:
    """Return True if parts are in order along some axes of a mesh, and equal along all others.

    Args:
      starts: start of each rank's part.
      size: size of a part.
      axes: size of each mesh axis, by name.
    """
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
    """Yield each sum of parts that a collective could compute.

    If `axes` is None, yield the sum of all parts. Otherwise part i belongs to rank i: for each set
    of mesh axes, sum over these axes. Yield the sum if all groups of ranks have the same sum.
    """
    if len({x.shape for x in parts}) != 1:
        return
    if axes is None or int(np.prod([*axes.values()])) != len(parts):
        yield _sum(parts)
        return
    for count in range(1, len(axes) + 1):
        for over in itertools.combinations(axes, count):
            sums = []
            for ranks in groups_of(axes, over):
                sums.append(_sum(values_at(parts, ranks)))
            if all(np.array_equal(x, sums[0]) for x in sums):
                yield sums[0]


def _sum(parts: Sequence[Array]) -> Array:
    found: Array = summed([Real(x, np.zeros(x.shape)) for x in parts]).elements
    return found


def _meaning(kind: Kind, text: str, of: StepValue, factor: Fraction) -> Meaning:
    if factor != 1:
        text = f"{factor} times {text}"
    return Meaning(kind, text, of, factor)


def _divided(x: Array, factor: Fraction) -> Array:
    """Return an array divided by a number."""
    if factor == 1:
        return x
    inverse = factor.denominator * pow(factor.numerator, -1, P) % P
    return field.multiply(x, np.uint64(inverse))


def _elements_of_ranks(value: Sequence[Any]) -> list[Array]:
    """Return the field elements of each rank's array; leave out arrays that are not floats."""
    found = []
    for x in value:
        elements = elements_of_value(x)
        if elements is not None:
            found.append(elements)
    return found


def _is_constant(x: Array) -> bool:
    """Return True if all elements are small integers, or at most 8 different simple fractions."""
    there = is_random(x)
    if not there.any():
        return True
    different = np.unique(x[there])
    return different.size <= 8 and all(_is_rational(int(e)) for e in different)


def _is_rational(element: int) -> bool:
    """Return True if a finite-field element is a quotient of small integers.

    A random element passes this test with a probability of 1 in 4 million.
    """
    # Euclid's algorithm on (P, element) yields all candidates: numerators fall while denominators
    # grow.
    numerators, denominators = (P, element), (0, 1)
    while numerators[1]:
        if numerators[1] * abs(denominators[1]) < MOST_RATIONAL:
            return True
        q = numerators[0] // numerators[1]
        numerators = numerators[1], numerators[0] - q * numerators[1]
        denominators = denominators[1], denominators[0] - q * denominators[1]
    return False
