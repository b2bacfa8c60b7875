"""Movement of rows by their ids, as an equation of steps that are traced for verification.

    numbers..., X... = move_rows numbers..., X...    [fn, count, types]

In a job, the host moves these rows, so the step's jaxpr does not contain the movement. For
verification, an equation with a function `fn` represents the movement. `fn` takes two lists: the
first `count` operands (integer arrays), and all other operands. `fn` only moves entries: each entry
of an output is an entry of an operand, or zero. The equation never runs. Verification calls `fn`
with positions of entries in place of entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dtrans._jax import ShapedArray, new_primitive


move_rows_p = new_primitive(
    "move_rows", types=lambda *args, types, **_: list(types), multiple_results=True
)


def trace_move(
    fn: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    numbers: Sequence[Any],
    rows: Sequence[Any],
    types: Sequence[tuple[tuple[int, ...], Any]],
) -> list[Any]:
    """Add a `move_rows` equation to the current trace; return its outputs.

    Args:
      fn: function of (integer arrays, arrays) that returns the outputs.
      numbers: the integer arrays.
      rows: the arrays.
      types: shape and dtype of each output.
    """
    outs = [ShapedArray(shape, dtype) for shape, dtype in types]
    return move_rows_p.bind(*numbers, *rows, fn=fn, count=len(numbers), types=tuple(outs))
