"""Rows that the host moves by their numbers, as an equation of a step that is traced to be
verified.

    numbers..., X... = move_rows numbers..., X...    [fn, count, types]

`fn` is the function that the host calls, of `count` arrays of integers and of the remaining arrays.
It computes nothing of these: each entry of an output is an entry of one of them, or zero. Whoever
evaluates the equation may call it with the places of entries. Nothing runs it.
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
    """Trace a movement of rows.

    Args:
      fn: takes numbers and arrays, and returns outputs.
      types: the shape and dtype of each output.
    """
    outs = [ShapedArray(shape, dtype) for shape, dtype in types]
    return move_rows_p.bind(*numbers, *rows, fn=fn, count=len(numbers), types=tuple(outs))
