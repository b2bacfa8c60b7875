"""Index of all values of a one-device step, which finds the value that contains an array.

A failed verification uses this index to relate the values of the job to values of the step. The
step was evaluated for random inputs in a finite field. So a single element identifies the value in
which it occurs, and its position in this value. Small integers and other constants are not random:
they occur in many values, and are ignored.

    StepValue   value of the step, or a partial sum of a value over some rows
    Match       slice of a step value, in row-major order, that equals an array
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import JaxprEqn
from dtrans.ir.selection import values_at
from dtrans.verification.field import Array, P
from dtrans.verification.field_values import Real, take
from dtrans.verification.rank_collectives import summed
from dtrans.verification.rules import REAL
from dtrans.verification.value_log import Computation, ValueLog, elements_of_value


SMALL = 1 << 20  # elements below SMALL, and their negatives, are treated as integers
MOST_SUM_TERMS = 40  # largest number of terms of a sum; a term of a longer sum adds up several rows
MOST_TERMS = 1 << 22  # largest total of numbers in all partial sums
CANDIDATES = 24  # largest number of step values that are compared with one array

# Primitives that are linear in each of two operands if the other operand is constant.
_BILINEAR = ("mul", "dot_general")
# Primitives that are linear in all operands together.
_LINEAR = (
    "add", "add_any", "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims",
    "gradient", "neg", "reduce_sum", "reshape", "rev", "slice", "squeeze", "sub", "transpose",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class StepValue:
    """Value that the one-device step computes, or a partial sum of one over rows of the batch.

    Attributes:
      title: name of an input; or the primitive that computes the value, and the user's line.
      elements: finite-field elements of the value. A dimension along which all entries are equal
        has size 1.
      number: index of the value in the order of the step; a partial sum has the index of its value.
      rows: for a partial sum, the range of summed rows (first, last + 1); else None.
      ends: True for a partial sum that includes the last row.
    """

    title: str
    elements: Array
    number: int
    rows: tuple[int, int] | None = None
    ends: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
    """Terms of a value of the step that is a sum over rows of the batch, such as a gradient.

    A rank of the job may compute some of these terms.

    Attributes:
      parts: the terms; each is the sum over some rows.
      bounds: the first row of each term, then the total number of rows.
    """

    parts: list[Real]
    bounds: list[int]

    def ranges(self) -> Iterator[tuple[int, int, Real]]:
        """Yield each sum of consecutive terms, but not the sum of all terms.

        Yields:
          First row, last row + 1, and the sum.
        """
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
    """Slice of a step value that equals an array.

    Before the comparison, the dimensions of the value and of the array may be permuted, and both
    are flattened in row-major order.

    Attributes:
      value: the step's value.
      start: flat index in the value at which the array starts.
      size: number of entries of the array; entries beyond the end of the value are padding.
      order: index of the permutation, among the permutations that are tried.
      is_copy: True if the array contains the full value.
    """

    value: StepValue
    start: int
    size: int
    order: int
    is_copy: bool

    @property
    def ends(self) -> bool:
        """True if the array reaches the end of the value."""
        return self.start + self.size >= self.value.elements.size


def compressed(x: Array) -> Array:
    """Return an array with size 1 for each dimension along which all entries are equal."""
    for d in range(x.ndim):
        if x.shape[d] > 1 and (x == x.take([0], d)).all():
            x = x.take([0], d)
    return x


def is_random(x: Array) -> Array:
    """Return a mask: False for field elements that are small integers, or negatives of them."""
    return (x >= SMALL) & (x < P - SMALL)


class StepValues:
    """Index of the values of the one-device step, which finds the values that contain an array.

    Args:
      inputs: values of the step's inputs, by name.
      log: log of the step's evaluation.
    """

    def __init__(self, inputs: Mapping[str, Any], log: ValueLog) -> None:
        self.values: list[StepValue] = []
        self._known: set[tuple[Any, ...]] = set()
        self._terms: dict[int, Terms] = {}
        self._size = 0
        for name, x in inputs.items():
            self._add(f"input {name}", elements_of_value(x))
        for computation in log.computations:
            self._add_computation(computation)
        self._make_table()

    def matches(self, x: Array, *, partial: bool) -> list[Match]:
        """Return the slices of step values that equal an array, at most one for each value.

        Args:
          x: the array.
          partial: True for slices of partial sums, False for slices of full values.
        """
        x = compressed(x)
        found = []
        for value in self._candidates(x):
            if (value.rows is not None) == partial:
                match = _match(x, value)
                if match is not None:
                    found.append(match)
        return found

    def value_with_rows(self, x: Array) -> StepValue | None:
        """Return the value of the step that has all rows of an array, in any order; else None.

        Rows of constants are unused entries of a buffer, and are not compared. A row that equals
        the last row and repeats one number may also be unused: a second search ignores such rows.
        """
        rows = x.reshape(len(x), -1)
        is_slot = (rows == rows[-1]).all(1) & (rows == rows[:, :1]).all(1)
        there = is_random(rows).any(1)
        for used in (rows[there], rows[there & ~is_slot]):
            for value in self._candidates(used[:1]):
                if value.rows is not None or value.elements.ndim != x.ndim:
                    continue
                if value.elements.shape[1:] != x.shape[1:]:
                    continue
                known = {row.tobytes() for row in value.elements}
                if all(row.tobytes() in known for row in used):
                    return value
        return None

    def contains(self, elements: Array) -> Array:
        """Return a mask of the finite-field elements that occur in any value of the step."""
        places = np.searchsorted(self._elements, elements, "left")
        there = places < self._elements.size
        found: Array = there & (self._elements[np.where(there, places, 0)] == elements)
        return found

    def _candidates(self, x: Array) -> Iterator[StepValue]:
        """Yield the values of the step that may contain an array.

        These values contain the first random element of the array. Values of the array's size come
        first. If no value contains this element, it may be padding, and the next random element is
        tried.
        """
        flat = x.ravel()
        for k in np.flatnonzero(is_random(flat))[:MOST_SUM_TERMS]:
            low = np.searchsorted(self._elements, flat[k], "left")
            high = np.searchsorted(self._elements, flat[k], "right")
            if low == high:
                continue
            numbers = dict.fromkeys(int(n) for n in self._owners[low:high])
            holders = values_at(self.values, numbers)
            holders.sort(key=lambda v: v.elements.size != x.size)
            yield from holders[:CANDIDATES]
            return

    def _make_table(self) -> None:
        """Sort the random elements of all values in a table, each with the index of its value."""
        flat = [v.elements.ravel() for v in self.values]
        elements = np.concatenate([np.zeros(0, np.uint64), *flat])
        owners = np.repeat(np.arange(len(flat)), [x.size for x in flat])
        random = is_random(elements)
        order = np.argsort(elements[random], kind="stable")
        self._elements, self._owners = elements[random][order], owners[random][order]

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
        if key not in self._known and is_random(elements).any():
            self._known.add(key)
            number = len(self.values) if number < 0 else number
            self.values.append(StepValue(title, elements, number, rows, ends))

    def _add_computation(self, computation: Computation) -> None:
        """Insert the outputs of a computation into the index.

        If the only output is a sum over rows of the batch, also insert its partial sums.
        """
        title = str(computation)
        for (x,) in computation.outputs:
            self._add(title, elements_of_value(x))
        if len(computation.outputs) != 1 or computation.name not in REAL:
            return
        ((total,),) = computation.outputs
        terms = self._propagated(computation) or _terms(computation)
        if terms is None or not isinstance(total, Real):
            return
        self._size += len(terms.parts) ** 2 // 2 * total.approx.size
        if self._size > MOST_TERMS:
            return
        self._terms[id(total)] = terms
        number = len(self.values)
        for first, end, x in terms.ranges():
            self._add(title, x.elements, (first, end), number, ends=end == terms.bounds[-1])

    def _propagated(self, computation: Computation) -> Terms | None:
        """Compute the partial sums of an output from the partial sums of its operands.

        If an operand is a sum over rows of the batch, and the equation is linear in it, the output
        is such a sum, too. Otherwise return None.
        """
        operands = [x for (x,) in computation.operands]
        carriers = [k for k, x in enumerate(operands) if id(x) in self._terms]
        if not _is_linear(computation, carriers):
            return None
        of_operands = [self._terms[id(operands[k])] for k in carriers]
        bounds = of_operands[0].bounds
        if any(terms.bounds != bounds for terms in of_operands):
            return None
        parts = []
        for row in zip(*(terms.parts for terms in of_operands), strict=True):
            replaced = list(operands)
            for k, x in zip(carriers, row, strict=True):
                replaced[k] = x
            parts += REAL[computation.name](computation.eqn, replaced)
        return Terms(parts, bounds)


def _is_linear(computation: Computation, carriers: Sequence[int]) -> bool:
    """Return True if an output is linear in some operands together, with other operands fixed."""
    if not carriers:
        return False
    if computation.name in _BILINEAR:
        return len(carriers) == 1
    if computation.name == "div":
        return [*carriers] == [0]
    reals = [k for k, (x,) in enumerate(computation.operands) if isinstance(x, Real)]
    return computation.name in _LINEAR and [*carriers] == reals


def _terms(computation: Computation) -> Terms | None:
    """Return the terms (sums over some rows) of an output that is a sum over a dimension.

    Return None if the output is no such sum.
    """
    operands = [x for (x,) in computation.operands]
    along = _summed_along(computation.eqn)
    if not along or not all(isinstance(x, Real) for x in operands):
        return None
    (size,) = {operands[k].shape[d] for k, d in along.items()}
    bounds = _term_bounds(size)
    parts = []
    for first, end in itertools.pairwise(bounds):
        part = list(operands)
        for k, d in along.items():
            part[k] = take(part[k], (slice(None),) * d + (slice(first, end),))
        parts += REAL[computation.name](computation.eqn, part)
    return Terms(parts, bounds)


def _summed_along(eqn: JaxprEqn) -> dict[int, int]:
    """Return, for each summed operand, its first summed dimension that is longer than 1.

    The dict is empty if all summed dimensions have size 1, or if the equation is no sum.
    """
    name = eqn.primitive.name
    shape = eqn.invars[0].aval.shape
    if name == "reduce_sum":
        for axis in eqn.params["axes"]:
            if shape[axis] > 1:
                return {0: int(axis)}
    if name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        for i, j in zip(left, right, strict=True):
            if shape[i] > 1:
                return {0: int(i), 1: int(j)}
    return {}


def _term_bounds(size: int) -> list[int]:
    """Divide `size` rows into ranges; return the first row of each range, then `size`."""
    if size <= MOST_SUM_TERMS:
        return list(range(size + 1))
    width = -(-size // MOST_SUM_TERMS)
    return [*range(0, size, width), size]


# -- slices ----------------------------------------------------------------------------------------


def _match(x: Array, value: StepValue) -> Match | None:
    """Return the slice of a value that equals an array; None if there is none."""
    for number, (one, other) in enumerate(_orders(x, value.elements)):
        row = other.size // max(len(other), 1) if other.ndim else 1
        mine, right = one.ravel(), other.ravel()
        # A partial sum has no rows of the batch, and so no padding in place of rows.
        start = _start(mine, right, 0 if value.rows else row)
        if start is not None:
            is_copy = start <= 0 and np.array_equal(mine[-start : right.size - start], right)
            return Match(value, start, x.size, number, is_copy)
    return None


def _orders(x: Array, y: Array) -> Iterator[tuple[Array, Array]]:
    """Yield x and y with permuted dimensions, once for each permutation that can match."""
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
    """Return True if one shape only splits dimensions of the other, e.g. (6, 4) and (6, 2, 2).

    All row-major strides of one shape are then also strides of the other. The result is False for
    (6, 4) and (4, 6).
    """
    mine, theirs = _strides(one), _strides(other)
    return mine <= theirs or theirs <= mine


def _strides(shape: Sequence[int]) -> set[int]:
    """Return the row-major strides of a shape that are larger than 1."""
    return {*itertools.accumulate(reversed(shape[1:]), operator.mul)} - {1}


def _start(x: Array, y: Array, row: int) -> int | None:
    """Return the flat index in y at which the slice x starts; None if x is not a slice of y.

    Zeros at both ends of x, and rows beyond the end of y, are padding.

    Args:
      x: the possible slice, flat.
      y: the value, flat.
      row: size of a row of y; 0 if y has no rows of a batch.
    """
    for k in np.flatnonzero(is_random(x))[:1]:
        for at in np.flatnonzero(y == x[k]):
            start = int(at - k)
            tail = x[max(y.size - start, 0) :]
            if _equals_from(x, y, start) and _is_padding(tail, y, start % x.size, row):
                return start
    return None


def _is_padding(tail: Array, y: Array, offset: int, row: int) -> bool:
    """Return True if entries beyond the end of a value are padding.

    Zeros are padding. Other numbers are padding if they do not occur before the last row of the
    value: some batches are padded with copies of the last row.

    Args:
      tail: the entries beyond the end.
      y: the value.
      offset: start of the array in the value, modulo the array's size. 0 if the array is one of
        several pieces of equal size.
      row: size of a row of y; 0 if y has no rows of a batch.
    """
    if not tail.any():
        return True
    if row == 0 or offset != 0 or tail.size >= y.size:
        return False
    return not np.isin(tail[is_random(tail)], y[:-row]).any()


def _equals_from(x: Array, y: Array, start: int) -> bool:
    """Return True if x equals y from the index `start` on; zeros at both ends of x may differ."""
    low, high = max(0, -start), min(x.size, y.size - start)
    inner, there = x[low:high], y[start + low : start + high]
    if x[:low].any():
        return False
    if np.array_equal(inner, there):
        return True
    nonzero = np.flatnonzero(inner)
    first, end = int(nonzero[0]), int(nonzero[-1]) + 1
    return np.array_equal(inner[first:end], there[first:end])
