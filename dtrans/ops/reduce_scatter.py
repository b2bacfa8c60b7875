"""Reduce-scatter: sum of all trainers' arrays; each trainer gets a slice of the sum.

    x... = reduce_scatter x...   [name, over, size, axis]

`over` lists mesh axes, and `size` is the number of trainers along these axes. The arrays are sliced
along dimension `axis`, which is a multiple of `size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from dtrans._jax import gloo_scatters_wrongly, resized
from dtrans.ops.all_reduce import combine
from dtrans.ops.collective import are_dimensions, new_collective


def _type_of(x: Any, size: int, axis: int) -> Any:
    assert x.shape[axis] % size == 0, (x, axis, size)
    return resized(x, axis, x.shape[axis] // size)


def _over_axis(*xs: Any, over: tuple[str, ...], axis: int, **_: Any) -> Sequence[Any]:
    """Reduce and scatter; on CPUs before JAX 0.12, all-reduce and slice, because Gloo has a bug."""
    scatter = partial(jax.lax.psum_scatter, axis_name=over, scatter_dimension=axis, tiled=True)
    if not gloo_scatters_wrongly():
        return [scatter(x) for x in xs]
    reduce = partial(_reduce_and_slice, over=over, axis=axis)
    return [jax.lax.platform_dependent(x, cpu=reduce, default=scatter) for x in xs]


def _reduce_and_slice(x: jax.Array, *, over: tuple[str, ...], axis: int) -> jax.Array:
    """All-reduce; return this trainer's slice of the sum."""
    part = x.shape[axis] // jax.lax.axis_size(over)
    start = jax.lax.axis_index(over) * part
    piece: jax.Array = jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, over), start, part, axis)
    return piece


reduce_scatter_p = new_collective(
    "reduce_scatter",
    params=("axis",),
    type_of=_type_of,
    fits=lambda shape, trainers, axis: are_dimensions(shape, axis) and shape[axis] % trainers == 0,
    result=lambda parts, mine, xp, axis: combine("sum", [mine(x, axis) for x in parts], xp),
    over_axis=_over_axis,
    reduces=True,
)
