"""Texts that describe an error in a value: scaled, not updated, rows of another rank.

`relation` compares two arrays, and returns the first text that is true. `repairs` finds the
collective at fault.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dtrans.ir.selection import number_items, subset, values_at
from dtrans.verification import field
from dtrans.verification.field import Array, P
from dtrans.verification.field_values import Real, Replicas, Unknown, as_real, is_key, same


def relation(x: Any, y: Any, before: Any, axes: Mapping[str, int]) -> str:
    """Return a text that compares a wrong value with the right value; "" if no known text is true.

    Args:
      x: value of an output of the distributed step.
      y: value of the one-device step's output.
      before: the old value of the output; None if the output is not the new value of an input.
      axes: size of each mesh axis, by name.

    Example:
      >>> import numpy as np
      >>> from dtrans.verification.field_values import from_integers
      >>> from dtrans.verification.relations import relation
      >>> x, y = from_integers(np.array([4, 8])), from_integers(np.array([1, 2]))
      >>> relation(x, y, None, {"data": 4})
      "it is the step's value times 4, the size of axis 'data': summed where it should be averaged"
    """
    if isinstance(x, Replicas):
        where = axes_in_words(varying_axes(x))
        return f"its copies on the ranks differ along {where}, but out_specs says they are equal"
    if isinstance(x, Unknown) or isinstance(y, Unknown) or is_key(x) or is_key(y):
        return ""
    if np.shape(x) != np.shape(y):
        return f"its shape is {np.shape(x)}, the step's is {np.shape(y)}"
    if isinstance(x, Real) != isinstance(y, Real):
        return "only one of the two values is an array of floats"
    if not isinstance(x, (Real, np.ndarray)):
        return ""
    x, y = as_real(x), as_real(y)
    if found := _scaled(x, y, axes, "it is the step's value"):
        return found
    if before is not None and np.shape(before) == x.shape:
        found = _relation_of_changes(x, y, as_real(before), axes)
    return found or _moved(x, y, axes, "its", "the step's") or _partly_right(x, y, axes)


def _relation_of_changes(x: Real, y: Real, before: Real, axes: Mapping[str, int]) -> str:
    """Return a text that compares the wrong change of a parameter with the right change.

    Args:
      x: the new value.
      y: the right new value.
      before: the old value.
      axes: size of each mesh axis, by name.
    """
    if same(x, before):
        return "it is not updated"
    change, right = _minus(x, before), _minus(y, before)
    return (
        _scaled(change, right, axes, "it changes by the step's change")
        or _moved(change, right, axes, "its change's", "the step's change's")
        or _moved(
            _minus(x, right),
            before,
            axes,
            "the right change is added to its pieces: its",
            "the input's",
        )
    )


def _minus(x: Real, y: Real) -> Real:
    return Real(field.subtract(x.elements, y.elements), x.approx - y.approx)


def axes_in_words(axes: Mapping[str, int]) -> str:
    """Return axes and their sizes as text.

    Example:
      >>> from dtrans.verification.relations import axes_in_words
      >>> axes_in_words({"data": 4}), axes_in_words({"data": 4, "model": 2})
      ("axis 'data' (size 4)", "axes 'data' and 'model' (sizes 4 and 2)")
    """
    names = " and ".join(map(repr, axes))
    sizes = " and ".join(str(size) for size in axes.values())
    if len(axes) == 1:
        return f"axis {names} (size {sizes})"
    return f"axes {names} (sizes {sizes})"


def subsets(axes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the nonempty sets of axes, small ones first."""
    for count in range(1, len(axes) + 1):
        for names in itertools.combinations(axes, count):
            yield subset(axes, names)


def varying_axes(x: Replicas) -> dict[str, int]:
    """Return the axes along which copies differ."""
    copies: Array = np.empty(len(x.copies), object)
    copies[:] = x.copies
    grid = copies.reshape([*x.axes.values()])
    varying = [name for k, name in enumerate(x.axes) if _differs_along(grid, k)]
    return subset(x.axes, varying)


def _differs_along(grid: Array, dimension: int) -> bool:
    first, *others = np.moveaxis(grid, dimension, 0).reshape(grid.shape[dimension], -1)
    is_same = lambda other: all(same(x, y) for x, y in zip(first, other, strict=True))
    return not all(map(is_same, others))


# -- scaled ----------------------------------------------------------------------------------------


def scaled(x: Real, factor: Fraction) -> Real:
    """Multiply an array by a rational number."""
    element = factor.numerator * pow(factor.denominator, -1, P) % P
    return Real(field.multiply(x.elements, np.uint64(element)), x.approx * float(factor))


def _scaled(x: Real, y: Real, axes: Mapping[str, int], what: str) -> str:
    """Return a text if a value is the right value times a simple factor; otherwise "".

    The factors are numbers of ranks, their reciprocals, -1 and 0.

    Args:
      x: the value.
      y: the right value.
      axes: size of each mesh axis, by name.
      what: beginning of the text, such as "it is the step's value".
    """
    for over in subsets(axes):
        size = math.prod(over.values())
        if size == 1:
            continue
        sizes = " times ".join(f"the size of axis {name!r}" for name in over)
        if same(x, scaled(y, Fraction(size))):
            return f"{what} times {size}, {sizes}: summed where it should be averaged"
        if same(x, scaled(y, Fraction(1, size))):
            return f"{what} divided by {size}, {sizes}: averaged where it should be summed"
    if same(x, scaled(y, Fraction(-1))):
        return f"{what} with the other sign"
    if not x.elements.any():
        return f"{what} times zero"
    return ""


# -- moved -----------------------------------------------------------------------------------------


def _moved(x: Real, y: Real, axes: Mapping[str, int], mine: str, right: str) -> str:
    """Return a text if a value has the right rows in a wrong order; otherwise "".

    For example, a rank may have the rows of another rank.

    Args:
      x: the value.
      y: the right value.
      axes: size of each mesh axis, by name.
      mine, right: possessives for the two values in the text, such as "its" and "the step's".
    """
    for dimension in range(len(x.shape)):
        order = _order_of_rows(x, y, dimension)
        if order is None:
            continue
        for count in _block_counts(axes, len(order)):
            if blocks := _order_of_blocks(order, count):
                numbers = ", ".join(map(str, blocks))
                pieces = f"{mine} {count} blocks along dimension {dimension}"
                return f"{pieces} are {right} blocks {numbers}: other ranks'"
        return f"{mine} rows along dimension {dimension} are {right} in another order"
    return ""


def _order_of_rows(x: Real, y: Real, dimension: int) -> list[int] | None:
    """Return, for each row of x, the index of the equal row of y.

    Return None if x has a row that y does not have, or if two rows of y are equal.
    """
    wrong = [row.tobytes() for row in np.moveaxis(x.elements, dimension, 0)]
    right = [row.tobytes() for row in np.moveaxis(y.elements, dimension, 0)]
    index = number_items(right)
    if len(index) < len(right) or len(right) < 2 or not index.keys() >= set(wrong):
        return None
    return values_at(index, wrong)


def _order_of_blocks(order: Sequence[int], count: int) -> list[int]:
    """Return the order of `count` blocks, given the order of their rows.

    The result is empty if the order of rows within a block also differs.
    """
    size = len(order) // count
    starts = values_at(order, range(0, len(order), size))
    wanted = [start + k for start in starts for k in range(size)]
    if wanted != list(order) or any(s % size for s in starts):
        return []
    return [s // size for s in starts]


def _block_counts(axes: Mapping[str, int], length: int) -> list[int]:
    """Return the numbers of ranks over which a dimension can be sharded, in ascending order."""
    counts = {math.prod(over.values()) for over in subsets(axes)}
    return sorted(n for n in counts if n > 1 and length % n == 0)


def _partly_right(x: Real, y: Real, axes: Mapping[str, int]) -> str:
    """Return a text that lists the wrong blocks of rows, if other blocks are right; else "".

    Args:
      x: the value.
      y: the right value.
      axes: size of each mesh axis, by name; each rank has a block.
    """
    wrong = x.elements != y.elements
    for dimension, length in enumerate(x.shape):
        rows = np.moveaxis(wrong, dimension, 0).reshape(length, -1).any(1)
        for count in _block_counts(axes, length):
            blocks = np.flatnonzero(rows.reshape(count, -1).any(1))
            if len(blocks) < count:
                return (
                    f"only blocks {', '.join(map(str, blocks))} of {count} along dimension "
                    f"{dimension} differ"
                )
    return ""
