"""Reductions.

    x... = all_reduce x...       [op, name, owners, over]
    x... = reduce_scatter x...   [name, over, size]
    x... = all_gather x...       [name, over, size]
    i    = trainer_index         [over]

Among servers `over` is their endpoints: each of them has this equation, with one operand, under the same `name`, and
gets the same result: the operands of `owners`, combined by `op` in the order of `owners`. A server that is not an
owner has no rows of what is reduced; its operand is the identity of `op` (or anything: it is not looked at). A single
owner makes it a broadcast.

Among trainers `over` is the names of the axes that they are on, and there are no `owners`: all have parts. Several
operands are reduced together, each by itself. `reduce_scatter` adds vectors, and leaves each of the `size` trainers of
an axis its part of the sum; `all_gather` puts the parts of all together again. `trainer_index` is the number of a
trainer on those axes.

Source: the all-reduce of MPI; in Paddle, `c_allreduce_{sum,prod,max,min}` (paddle/fluid/operators/collective).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import ShapedArray
from dtrans.ops.primitive import communication


# how two parts are made one, by the name of the operation
COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "prod": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def combine(op: str, parts: Sequence[Any]) -> Any:
    """The parts of a reduction, made one in their order."""
    return functools.reduce(COMBINE[op], parts)


def _all_reduce(*xs: Any, op: str, name: str, owners: Sequence[str], over: Sequence[str]) -> list[Any]:
    assert op in COMBINE, (op, name)
    assert not owners or (len(xs) == 1 and set(owners) <= set(over)), (name, owners, over)
    return list(xs)


def _reduce_scatter(*xs: Any, name: str, over: Sequence[str], size: int) -> list[Any]:
    assert all(x.ndim == 1 and x.shape[0] % size == 0 for x in xs), (name, xs)
    return [x.update(shape=(x.shape[0] // size,)) for x in xs]


def _all_gather(*xs: Any, name: str, over: Sequence[str], size: int) -> list[Any]:
    assert all(x.ndim == 1 for x in xs), (name, xs)
    return [x.update(shape=(x.shape[0] * size,)) for x in xs]


all_reduce_p = communication("all_reduce", _all_reduce)
reduce_scatter_p = communication("reduce_scatter", _reduce_scatter)
all_gather_p = communication("all_gather", _all_gather)
trainer_index_p = communication("trainer_index", lambda *, over: [ShapedArray((), jnp.int32)])
