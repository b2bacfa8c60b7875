"""Reductions.

    x... = all_reduce x...       [op, name, owners, over]
    x... = reduce_scatter x...   [name, over, size, axis]
    x... = all_gather x...       [name, over, size, axis]
    x    = after x, y            []
    i    = trainer_index         [over]

Among servers `over` is their endpoints: each of them has this equation, with one operand, under the same `name`, and
gets the same result: the operands of `owners`, combined by `op` in the order of `owners`. A server that is not an
owner has no rows of what is reduced; its operand is the identity of `op` (or anything: it is not looked at). A single
owner makes it a broadcast.

Among trainers `over` is the names of the axes that they are on, and there are no `owners`: all have parts. Several
operands are reduced together, each by itself. `reduce_scatter` adds arrays, and leaves each of the `size` trainers of
an axis its part of the sum along dimension `axis`; `all_gather` puts the parts of all together again.
`trainer_index` is the number of a trainer on those axes.

`after` is its first operand, once its second is there. What gathers the result can neither begin earlier, nor be made
one with what gathers the same elsewhere: that is what lets a gathered array go, and be gathered again.

Source: the all-reduce of MPI; in Paddle, `c_allreduce_{sum,prod,max,min}` (paddle/fluid/operators/collective).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import ShapedArray, resized
from dtrans.ops.exact_sum import joined
from dtrans.ops.primitive import communication


LAYERS = "layers"  # the name of reductions of gradients in a loop, layer by layer

# how two parts are made one, by the name of the operation: a function of `jnp` and of `np`
COMBINE: Mapping[str, str] = {
    "sum": "add",
    "prod": "multiply",
    "max": "maximum",
    "min": "minimum",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
EXACT = "exact_sum"  # of parts as `dtrans.ops.exact_sum` makes them


def combine(op: str, parts: Sequence[Any], xp: Any = jnp) -> Any:
    """The parts of a reduction, made one in their order; arrays of `xp`."""
    if op == EXACT:
        return functools.reduce(joined, parts)
    return functools.reduce(getattr(xp, COMBINE[op]), parts)


@functools.cache
def identity_of(op: str, shape: tuple[int, ...], dtype: Any) -> Callable[[], jax.Array]:
    """What changes nothing when it takes part in a reduction."""

    kind = np.dtype(dtype)
    if op in ("max", "min"):
        if jnp.issubdtype(kind, np.inexact):
            low, high = -np.inf, np.inf
        else:
            low, high = (False, True) if kind.kind == "b" else (jnp.iinfo(kind).min, jnp.iinfo(kind).max)
        value: Any = low if op == "max" else high
    elif op == "and":
        value = np.invert(np.zeros((), kind))  # all bits
    else:
        value = 1 if op == "prod" else 0

    def fn() -> jax.Array:
        return jnp.full(shape, value, dtype)

    return fn


def _all_reduce(*xs: Any, op: str, name: str, owners: Sequence[str], over: Sequence[str]) -> list[Any]:
    assert op in COMBINE or op == EXACT, (op, name)
    assert not owners or (len(xs) == 1 and set(owners) <= set(over)), (name, owners, over)
    return list(xs)


def _reduce_scatter(*xs: Any, name: str, over: Sequence[str], size: int, axis: int) -> list[Any]:
    assert all(x.shape[axis] % size == 0 for x in xs), (name, xs)
    return [resized(x, axis, x.shape[axis] // size) for x in xs]


def _all_gather(*xs: Any, name: str, over: Sequence[str], size: int, axis: int) -> list[Any]:
    return [resized(x, axis, x.shape[axis] * size) for x in xs]


all_reduce_p = communication("all_reduce", _all_reduce)
reduce_scatter_p = communication("reduce_scatter", _reduce_scatter)
all_gather_p = communication("all_gather", _all_gather)
after_p = communication("after", lambda x, y: [x])
trainer_index_p = communication("trainer_index", lambda *, over: [ShapedArray((), jnp.int32)])
