"""All-reduce: reduction of the arrays of all trainers, or of all servers; each gets the result.

    x... = all_reduce x...   [op, name, owners, over]

Among servers, `over` lists their endpoints. Each server runs this equation with one operand and the
same `name`. `owners` lists the servers that have operands to reduce. The result is the reduction of
these operands, in the order of `owners`. The operands of all other servers are ignored. With a
single owner this is a broadcast.

Among trainers, `over` lists the names of their mesh axes. `owners` is empty, because every trainer
has an operand.

Source: the all-reduce of MPI; in Paddle, `c_allreduce_{sum,prod,max,min}`
(paddle/fluid/operators/collective).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.ops.collective import new_collective
from dtrans.ops.exact_sum import joined


LAYERS = "layers"  # the parameter `name` of gradient reductions inside a loop over layers

# For each reduction, the name of the function of `jnp` and `np` that combines two parts.
COMBINE: Mapping[str, str] = {
    "sum": "add",
    "prod": "multiply",
    "max": "maximum",
    "min": "minimum",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
EXACT = "exact_sum"  # the reduction that adds parts of `dtrans.ops.exact_sum`


def combine(op: str, parts: Sequence[Any], xp: Any = jnp) -> Any:
    """Reduce arrays in order; `xp` is the module of the arrays, `jnp` or `np`."""
    if op == EXACT:
        return functools.reduce(joined, parts)
    return functools.reduce(getattr(xp, COMBINE[op]), parts)


@functools.cache
def identity_of(op: str, shape: tuple[int, ...], dtype: Any) -> Callable[[], jax.Array]:
    """Return a function that returns an array filled with a reduction's identity element."""
    kind = np.dtype(dtype)
    if op in ("max", "min"):
        low, high = _bounds(kind)
        value: Any = low if op == "max" else high
    elif op == "and":
        value = np.invert(np.zeros((), kind))  # all bits set
    else:
        value = 1 if op == "prod" else 0

    def fn() -> jax.Array:
        return jnp.full(shape, value, dtype)

    return fn


def _bounds(dtype: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest number of a dtype."""
    if jnp.issubdtype(dtype, np.inexact):
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max


_REDUCE: dict[str, Callable[..., Any]] = {
    "sum": jax.lax.psum,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
}


def _type_of(x: Any, size: int, op: str) -> Any:
    assert op in COMBINE or op == EXACT, op
    return x


def _check(*xs: Any, op: str, name: str, owners: Sequence[str], over: Sequence[str]) -> None:
    assert not owners or (len(xs) == 1 and set(owners) <= set(over)), (name, owners, over)


def _fits(shape: Sequence[int], trainers: int, op: Any) -> bool:
    return isinstance(op, str) and op in COMBINE


def _over_axis(*xs: Any, op: str, over: tuple[str, ...], **_: Any) -> Sequence[Any]:
    if op in _REDUCE:
        reduced: Sequence[Any] = _REDUCE[op](xs, over)
        return reduced
    # Not every backend of XLA has a collective for products and bitwise reductions. So the arrays
    # of all trainers are gathered and reduced locally, which is cheap for small arrays. Each axis
    # is gathered separately, because vmap does not support a gather over several axes.
    parts: Sequence[Any] = xs
    for name in reversed(over):
        parts = [combine(op, list(jax.lax.all_gather(x, name))) for x in parts]
    return parts


all_reduce_p = new_collective(
    "all_reduce",
    params=("op",),
    type_of=_type_of,
    fits=_fits,
    result=lambda parts, mine, xp, op: combine(op, parts, xp),
    over_axis=_over_axis,
    check=_check,
    same_for_all=True,
    reduces=True,
)
