"""All-gather: the arrays of all trainers, concatenated along dimension `axis`.

    x... = all_gather x...   [name, over, size, axis]

`over` lists mesh axes, and `size` is the number of trainers along these axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from dtrans._jax import resized
from dtrans.ops.collective import are_dimensions, new_collective


def _over_axis(*xs: Any, over: tuple[str, ...], axis: int, **_: Any) -> Sequence[Any]:
    return [jax.lax.all_gather(x, over, axis=axis, tiled=True) for x in xs]


def _under_vmap(*xs: Any, over: tuple[str, ...], axis: int, **_: Any) -> Sequence[Any]:
    """Gather over one axis after the other, innermost first: vmap does not support several axes."""
    parts = list(xs)
    for name in reversed(over):
        parts = [jax.lax.all_gather(x, name, axis=axis, tiled=True) for x in parts]
    return parts


all_gather_p = new_collective(
    "all_gather",
    params=("axis",),
    type_of=lambda x, size, axis: resized(x, axis, x.shape[axis] * size),
    fits=lambda shape, trainers, axis: are_dimensions(shape, axis),
    result=lambda parts, mine, xp, axis: xp.concatenate(parts, axis),
    over_axis=_over_axis,
    under_vmap=_under_vmap,
    same_for_all=True,
    counts_results=True,
)
