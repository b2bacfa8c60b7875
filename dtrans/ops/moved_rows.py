"""Rows that the host moves by their ids, as an equation of a step traced for verification.

    numbers..., X... = move_rows numbers..., X...    [fn, count, types]

`fn` is called with a list of the first `count` operands, integer arrays, and a list of the other
operands. It only moves entries: each entry of an output is an entry of an operand, or zero. The
equation never runs: verification calls `fn` with the positions of entries instead of entries.
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
    """Bind `move_rows`.

    Args:
      fn: function of (integer arrays, arrays) that returns the outputs.
      numbers: the integer arrays.
      rows: the arrays.
      types: shape and dtype of each output.
    """
    outs = [ShapedArray(shape, dtype) for shape, dtype in types]
    return move_rows_p.bind(*numbers, *rows, fn=fn, count=len(numbers), types=tuple(outs))
