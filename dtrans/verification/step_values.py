"""Index of the values of a step: copies, slices and partial sums of them are found by their
elements.

Elements of values that depend on a random point are random, so an element tells its value and its
place. Small integers and other constants tell nothing.

    StepValue   one value of the step, or a partial sum of one over some rows
    Match       a slice of a step value, in row-major order, which an array is
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.verification.field import Array, P
from dtrans.verification.field_values import Real, take
from dtrans.verification.rank_collectives import summed
from dtrans.verification.rules import REAL
from dtrans.verification.value_log import Computation, ValueLog, elements_of_value


SMALL = 1 << 20  # elements below it, and their negatives, are integers rather than random
MOST_CUTS = 40  # places at which a sum over rows is cut; more rows are cut at fewer places
MOST_TERMS = 1 << 22  # numbers of partial sums
CANDIDATES = 24  # values that are tried where several hold an element

# linear in each operand on its own
_BILINEAR = ("mul", "dot_general")
# linear in all operands together
_LINEAR = (
    "add", "add_any", "sub", "neg", "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim",
    "reduce_sum", "convert_element_type", "copy", "copy_p", "slice", "rev", "gradient",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class StepValue:
    """A value of the step, or a partial sum.

    Attributes:
      title: its name, or its primitive and the user's line.
      elements: without dimensions along which it repeats itself.
      rows: the rows (first, last + 1) that a partial sum has; None for a whole value.
      ends: True for a partial sum that has the last row.
      number: of the value in the order of the step; partial sums have that of the whole.
    """

    title: str
    elements: Array
    number: int
    rows: tuple[int, int] | None = None
    ends: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
    """Terms of a value that is a sum over rows.

    Attributes:
      parts: the terms, each the sum over some rows.
      bounds: the first row of each term, and the number of rows.
    """

    parts: list[Real]
    bounds: list[int]

    def ranges(self) -> Iterator[tuple[int, int, Real]]:
        """Return sums of consecutive terms but not all: the first row, the last + 1, and the
        sum."""
        count = len(self.parts)
        for first in range(count):
            sum_ = self.parts[first]
            for end in range(first + 1, count + 1):
                if end > first + 1:
                    sum_ = summed([sum_, self.parts[end - 1]])
                if end - first < count:
                    yield self.bounds[first], self.bounds[end], sum_


@dataclasses.dataclass(frozen=True)
class Match:
    """A slice of a value in row-major order, after some dimension of it is moved to the front.

    Attributes:
      value: the step's value.
      start: place of the first number.
      size: how many numbers an array has; those behind the end of the value are padding.
      turned: the order of dimensions, by its number.
      whole: True if the array has all numbers of the value.
    """

    value: StepValue
    start: int
    size: int
    turned: int
    whole: bool

    @property
    def ends(self) -> bool:
        """True if the array reaches the end of the value."""
        return self.start + self.size >= self.value.elements.size


def compressed(x: Array) -> Array:
    """Return an array without the dimensions along which it repeats itself."""
    for d in range(x.ndim):
        if x.shape[d] > 1 and (x == x.take([0], d)).all():
            x = x.take([0], d)
    return x


def telling(x: Array) -> Array:
    """Return where elements are random: neither small integers nor their negatives."""
    return (x >= SMALL) & (x < P - SMALL)


class StepValues:
    """Index of the values of a step.

    Args:
      inputs: name to value of what the step takes.
      log: of the step.
    """

    def __init__(self, inputs: Mapping[str, Any], log: ValueLog) -> None:
        self.values: list[StepValue] = []
        self._known: set[tuple[Any, ...]] = set()
        self._terms: dict[int, Terms] = {}
        self._size = 0
        for name, x in inputs.items():
            self._add(f"input {name}", elements_of_value(x))
        for made in log.computations:
            self._add_computation(made)
        self._make_table()

    def matches(self, x: Array, *, partial: bool) -> list[Match]:
        """Return the slices of values that an array is; each is one for a value.

        Args:
          partial: of partial sums, else of whole values.
        """
        x = compressed(x)
        found = []
        for value in self._candidates(x):
            if (value.rows is not None) == partial:
                match = _match(x, value)
                found += [] if match is None else [match]
        return found

    def value_with_rows(self, x: Array) -> StepValue | None:
        """Return the value that has all rows of an array, in any order; None if there is none.

        Rows of constants are room that an array has for more, and so are equal rows of one number
        at its end.
        """
        rows = x.reshape(len(x), -1)
        is_room = (rows == rows[-1]).all(1) & (rows == rows[:, :1]).all(1)
        there = telling(rows).any(1)
        for kept in (there, there & ~is_room):
            for value in self._candidates(rows[kept][:1]):
                if (
                    value.rows is None
                    and value.elements.shape[1:] == x.shape[1:]
                    and value.elements.ndim == x.ndim
                ):
                    known = {row.tobytes() for row in value.elements}
                    if all(row.tobytes() in known for row in rows[kept]):
                        return value
        return None

    def have(self, elements: Array) -> Array:
        """Return which elements some value has."""
        places = np.searchsorted(self._elements, elements, "left")
        there = places < self._elements.size
        found: Array = there & (self._elements[np.where(there, places, 0)] == elements)
        return found

    def _candidates(self, x: Array) -> Iterator[StepValue]:
        """Return values that hold the first telling element of an array, those of its size
        first."""
        flat = x.ravel()
        for k in np.flatnonzero(telling(flat))[:MOST_CUTS]:
            low = np.searchsorted(self._elements, flat[k], "left")
            high = np.searchsorted(self._elements, flat[k], "right")
            if low == high:
                continue  # padding, perhaps
            numbers = dict.fromkeys(int(n) for n in self._owners[low:high])
            holders = sorted(
                (self.values[n] for n in numbers), key=lambda v: v.elements.size != x.size
            )
            yield from holders[:CANDIDATES]
            return

    def _make_table(self) -> None:
        flat = [v.elements.ravel() for v in self.values]
        elements = np.concatenate([np.zeros(0, np.uint64), *flat])
        owners = np.repeat(np.arange(len(flat)), [x.size for x in flat])
        kept = telling(elements)
        order = np.argsort(elements[kept], kind="stable")
        self._elements, self._owners = elements[kept][order], owners[kept][order]

    # -- values and partial sums -----------------------------------------------------------------

    def _add(
        self,
        title: str,
        elements: Array | None,
        rows: tuple[int, int] | None = None,
        number: int = -1,
        *,
        ends: bool = False,
    ) -> None:
        if elements is None:
            return
        elements = compressed(elements)
        key = (elements.shape, elements.tobytes())
        if key not in self._known and telling(elements).any():
            self._known.add(key)
            number = len(self.values) if number < 0 else number
            self.values.append(StepValue(title, elements, number, rows, ends))

    def _add_computation(self, made: Computation) -> None:
        for (x,) in made.outputs:
            self._add(str(made), elements_of_value(x))
        if len(made.outputs) != 1 or made.name not in REAL:
            return
        ((whole,),) = made.outputs
        terms = self._propagated(made) or _terms(made)
        if terms is None or not isinstance(whole, Real):
            return
        self._size += len(terms.parts) ** 2 // 2 * whole.shadow.size
        if self._size > MOST_TERMS:
            return
        self._terms[id(whole)] = terms
        number = len(self.values)
        for first, end, x in terms.ranges():
            self._add(str(made), x.elements, (first, end), number, ends=end == terms.bounds[-1])

    def _propagated(self, made: Computation) -> Terms | None:
        """Return the terms of an output that is linear in operands with terms."""
        operands = [x for (x,) in made.operands]
        carriers = [k for k, x in enumerate(operands) if id(x) in self._terms]
        if not _is_linear(made, carriers):
            return None
        of_operands = [self._terms[id(operands[k])] for k in carriers]
        bounds = of_operands[0].bounds
        if any(terms.bounds != bounds for terms in of_operands):
            return None
        parts = []
        for row in zip(*(terms.parts for terms in of_operands), strict=True):
            given = list(operands)
            for k, x in zip(carriers, row, strict=True):
                given[k] = x
            parts += REAL[made.name](made.eqn, given)
        return Terms(parts, bounds)


def _is_linear(made: Computation, carriers: Sequence[int]) -> bool:
    """Return True if an output is linear in the operands that are sums, others fixed."""
    if not carriers:
        return False
    if made.name in _BILINEAR:
        return len(carriers) == 1
    if made.name == "div":
        return [*carriers] == [0]
    reals = [k for k, (x,) in enumerate(made.operands) if isinstance(x, Real)]
    return made.name in _LINEAR and [*carriers] == reals


def _terms(made: Computation) -> Terms | None:
    """Return the terms of a sum over a dimension."""
    operands = [x for (x,) in made.operands]
    along = _summed_along(made.eqn)
    if not along or not all(isinstance(x, Real) for x in operands):
        return None
    (size,) = {operands[k].shape[d] for k, d in along.items()}
    bounds = _cuts(size)
    parts = []
    for first, end in itertools.pairwise(bounds):
        given = list(operands)
        for k, d in along.items():
            given[k] = take(given[k], (slice(None),) * d + (slice(first, end),))
        parts += REAL[made.name](made.eqn, given)
    return Terms(parts, bounds)


def _summed_along(eqn: JaxprEqn) -> dict[int, int]:
    """Return for each operand the dimension that an equation sums over, the first and longest of
    them."""
    name = eqn.primitive.name
    shapes = [v.aval.shape for v in eqn.invars]
    if name == "reduce_sum":
        axes = [int(a) for a in eqn.params["axes"] if shapes[0][a] > 1]
        return {0: axes[0]} if axes else {}
    if name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        pairs = [(i, j) for i, j in zip(left, right, strict=True) if shapes[0][i] > 1]
        return {0: int(pairs[0][0]), 1: int(pairs[0][1])} if pairs else {}
    return {}


def _cuts(size: int) -> list[int]:
    """Return the places at which a sum over rows is cut, from 0 to the size."""
    if size <= MOST_CUTS:
        return list(range(size + 1))
    width = -(-size // MOST_CUTS)
    return [*range(0, size, width), size]


# -- slices ----------------------------------------------------------------------------------------


def _match(x: Array, value: StepValue) -> Match | None:
    """Return the slice of a value that an array is."""
    for turned, (one, other) in enumerate(_orders(x, value.elements)):
        row = other.size // max(len(other), 1) if other.ndim else 1
        # sums over rows have no rows of a batch, behind which there might be padding
        start = _start(one.ravel(), other.ravel(), 0 if value.rows else row)
        if start is not None:
            whole = start <= 0 and np.array_equal(
                one.ravel()[-start : other.size - start], other.ravel()
            )
            return Match(value, start, x.size, turned, whole)
    return None


def _orders(x: Array, y: Array) -> Iterator[tuple[Array, Array]]:
    """Return both arrays with their dimensions in the orders that are compared."""
    if _nested(x.shape, y.shape):
        yield x, y
    if x.ndim > 1 and _nested(x.T.shape, y.shape):
        yield x.T, y
    if y.ndim > 1 and _nested(x.shape, y.T.shape):
        yield x, y.T
    if x.ndim == y.ndim:
        for d in range(1, x.ndim):
            one, other = np.moveaxis(x, d, 0), np.moveaxis(y, d, 0)
            if one.shape[1:] == other.shape[1:]:
                yield one, other


def _nested(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if arrays of two shapes, one possibly cut, differ by split or merged dimensions
    only.

    Otherwise, as for (6, 4) and (4, 6), rows of one would be no rows of the other.
    """
    ends = [
        {*itertools.accumulate(reversed(shape[1:]), operator.mul)} - {1} for shape in (one, other)
    ]
    return ends[0] <= ends[1] or ends[1] <= ends[0]


def _start(x: Array, y: Array, row: int) -> int | None:
    """Return the place in y, whose rows have a size, from which x follows it.

    Zeros around a slice, and rows behind the end of y, are padding.
    """
    known = np.flatnonzero(telling(x))
    for k in known[:1]:
        for at in np.flatnonzero(y == x[k]):
            start = int(at - k)
            if _follows(x, y, start) and _is_padding(
                x[max(y.size - start, 0) :], y, start % x.size, row
            ):
                return start
    return None


def _is_padding(tail: Array, y: Array, offset: int, row: int) -> bool:
    """Return True if what is behind the end of y is padding.

    Pieces of one size begin at multiples of it. Padding is zeros, or anything but rows of y before
    the last, which a batch may be padded with.
    """
    if not tail.any():
        return True
    return (
        row > 0
        and offset == 0
        and tail.size < y.size
        and not np.isin(tail[telling(tail)], y[:-row]).any()
    )


def _follows(x: Array, y: Array, start: int) -> bool:
    low, high = max(0, -start), min(x.size, y.size - start)
    inner, there = x[low:high], y[start + low : start + high]
    if x[:low].any():
        return False
    if np.array_equal(inner, there):
        return True
    nonzero = np.flatnonzero(inner)
    first, end = int(nonzero[0]), int(nonzero[-1]) + 1
    return np.array_equal(inner[first:end], there[first:end])
