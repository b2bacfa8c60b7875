"""Random updates, on servers and on full arrays: elementwise equations, reductions, shape changes,
products, branches and loops over several leaves.

All values are multiples of 1/8 between -4 and 4, and the result of each operation is rounded to
such a number. So sums are exact in any order. Servers that reduce block by block must compute the
same numbers as full arrays. Operations include comparisons, signs and `argmax` (with ties). An
operand is a number modulo the number of values. So any list of instructions is a program, and a
failure shrinks to a short list.

Each example runs two steps by hand (`helpers.serve`). The test also checks its structure. No array
has the full shape of a sliced leaf if this can be avoided. No value is read before it is computed.
Every leaf that no instruction binds is sliced. `DTRANS_EXAMPLES=2000` sets the number of examples
(`make fuzz`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_numpy import interpret
from helpers import (
    as_numpy,
    assemble,
    no_full_shapes,
    plan_of,
    reads_only_what_was_there_or_made_before,
    serve,
    start_servers,
)
from hypothesis import example, given, note, settings, strategies as st
from jax import lax

from dtrans.ir.inline import inline_calls


# with these sizes, a value from a block's rows never has the leaf's full shape by coincidence
SHAPES = {
    "a": (14, 3),
    "bias": (5,),
    "few": (2, 3),
    "half": (9, 2),
    "kernel": (5, 2, 3),
    "one": (1, 3),
    "scalar": (),
    "wide": (4, 1, 2, 3),
}
DTYPES = {"half": jnp.bfloat16}
F = jnp.float64


def q(x: jax.Array) -> jax.Array:
    """Return the nearest multiple of 1/8 between -4 and 4."""
    return lax.round(lax.clamp(-4.0, x.astype(F), 4.0) * 8.0) / 8.0


@dataclasses.dataclass(frozen=True)
class Value:
    """Value of one leaf.

    Attributes:
      x: the array.
      view: derivation of the shape from the leaf's shape; values with equal views can be added.
      back: converts the array to the leaf's shape.
      rows: the axis of the rows; None after a reduction over rows.
      runs: True if several entries along this axis belong to one row.
    """

    x: jax.Array
    view: str
    back: Callable[[jax.Array], jax.Array]
    rows: int | None
    runs: bool = False

    def new(self, x: jax.Array) -> Value:
        """Return another array with the same view."""
        assert x.shape == self.x.shape, (x.shape, self.x.shape)
        return dataclasses.replace(self, x=x)

    def viewed(
        self, how: str, to: Any, back: Any, rows: int | None, runs: bool | None = None
    ) -> Value:
        """Return a value with another view."""
        runs = self.runs if runs is None else runs
        return Value(to(self.x), f"{self.view} {how}", lambda z: self.back(back(z)), rows, runs)


def unit(x: jax.Array, name: str) -> Value:
    """Return a value with the leaf's shape."""
    return Value(x, "", lambda z: z, 0 if x.ndim else None)


class Writer:
    """Runs instructions on arrays or tracers.

    Attributes:
      values: the values of each leaf.
      scalars: numbers that every leaf may read.
      vectors: shared vectors of length 3.
      bound: the leaves with an operation that servers cannot run on slices.
    """

    def __init__(self, values: dict[str, list[Value]], count: jax.Array, key: jax.Array) -> None:
        self.values = values
        self.count = count
        self.key = key
        self.scalars: list[jax.Array] = [count.astype(F), jnp.asarray(0.5, F)]
        self.vectors: list[jax.Array] = [jnp.arange(3, dtype=F)]
        self.matrices: list[jax.Array] = [jnp.ones((3, 3), F)]
        self.bound: set[str] = set()
        self.leaf = ""

    def run(self, op: str, leaf: int, i: int, j: int) -> None:
        self.leaf = list(self.values)[leaf % len(self.values)]
        pool = self.values[self.leaf]
        v = pool[-1 - i % len(pool)]
        made = OPS[op](self, v, j)
        if made is not None:
            pool.append(made)

    def other(self, v: Value, j: int) -> Value:
        """Return another value of the same view."""
        same = [w for w in self.values[self.leaf] if w.view == v.view and w.x.shape == v.x.shape]
        return same[j % len(same)]

    def scalar(self, j: int) -> jax.Array:
        return self.scalars[-1 - j % len(self.scalars)]

    def binds(self, *leaves: str) -> None:
        self.bound.update(leaves or [self.leaf])

    def full(self, leaf: str) -> jax.Array:
        """Return the last value of a leaf, in the leaf's shape."""
        v = self.values[leaf][-1]
        return v.back(v.x)


Op = Callable[[Writer, Value, int], Value | None]
OPS: dict[str, Op] = {}


def op(fn: Op) -> Op:
    OPS[fn.__name__] = fn
    return fn


# -- elementwise -----------------------------------------------------------------------------------

UNARY = [
    lambda x: q(2 * jnp.sin(x)),
    jnp.negative,
    jnp.abs,
    jnp.sign,
    lambda x: q(x * x),
    lambda x: jnp.where(x > 0, x, 0.5),
    lambda x: (jnp.floor(x).astype(jnp.int32) & 3).astype(F),
    lambda x: q(jnp.tanh(x) * 3),
    lambda x: x.astype(jnp.bfloat16).astype(F),
]
BINARY = [
    lambda x, y: q(x + y),
    lambda x, y: q(x * y),
    jnp.maximum,
    lambda x, y: jnp.where(x > y, x, -y),
    lambda x, y: ((x > 0) & ~(y > 1) | (x == y)).astype(F),
    lambda x, y: q(x / (1 + y * y)),
]


@op
def unary(w: Writer, v: Value, j: int) -> Value:
    return v.new(UNARY[j % len(UNARY)](v.x))


@op
def binary(w: Writer, v: Value, j: int) -> Value:
    return v.new(BINARY[j % len(BINARY)](v.x, w.other(v, j // len(BINARY)).x))


@op
def with_scalar(w: Writer, v: Value, j: int) -> Value:
    s = w.scalar(j // 2)
    return v.new(q(v.x * s) if j % 2 else jnp.where(s > 0.25, v.x, -v.x))


@op
def with_vector(w: Writer, v: Value, j: int) -> Value | None:
    if v.x.ndim and v.x.shape[-1] == 3 and v.rows != v.x.ndim - 1:
        return v.new(q(v.x * w.vectors[-1 - j % len(w.vectors)]))
    return None


@op
def with_shared_array(w: Writer, v: Value, j: int) -> Value | None:
    """Combine a value with a table, a count of entries, or a broadcast: arrays that depend on no
    row."""
    shape = v.x.shape
    if not shape:
        return None
    n = len(shape)
    table = np.round(np.random.default_rng(j).normal(size=shape) * 8).clip(-32, 32) / 8
    shared = [
        lambda: jnp.asarray(table),
        lambda: lax.broadcasted_iota(F, shape, j // 8 % n) / 4,
        lambda: jnp.cumsum(jnp.full(shape, w.count, F), j // 8 % n) / 8,
        lambda: jnp.broadcast_to(w.scalar(j // 8) * jnp.arange(shape[-1], dtype=F), shape),
        lambda: jnp.broadcast_to(
            jnp.arange(shape[0], dtype=F).reshape((-1,) + (1,) * (n - 1)), shape
        ),
        lambda: jnp.arange(v.x.size, dtype=F).reshape(shape) / 8,
        lambda: jnp.where(lax.broadcasted_iota(jnp.int32, shape, 0) > w.count, 1.0, table),
        lambda: jnp.flip(jnp.asarray(table) * w.count, j // 8 % n),
    ]
    a = q(shared[j % 8]())
    return v.new(q(v.x * a + a))


@op
def noise(w: Writer, v: Value, j: int) -> Value | None:
    key = jax.random.fold_in(w.key, j)
    made = (
        jax.random.bernoulli(key, 0.5, v.x.shape) if j % 2 else jax.random.normal(key, v.x.shape, F)
    )
    return v.new(q(v.x + q(made)))


# -- reductions ------------------------------------------------------------------------------------


def exact_product(x: jax.Array, axis: Any, keepdims: bool = False) -> jax.Array:
    return jnp.prod(jnp.where(x > 0, 2.0, 0.5), axis=axis, keepdims=keepdims)


REDUCE = [
    lambda x, **k: q(jnp.sum(x, **k)),
    lambda x, **k: jnp.max(x, **k),
    lambda x, **k: jnp.min(x, **k),
    lambda x, **k: q(exact_product(x, **k)),
    lambda x, **k: jnp.any(x > 1, **k).astype(F),
    lambda x, **k: jnp.all(x < 1, **k).astype(F),
    lambda x, **k: q(jnp.sqrt(jnp.sum(x * x, **k))),
    lambda x, **k: q(jnp.mean(x, **k)),
    lambda x, **k: q(jnp.sum(x > 0, **k) / 2),
    lambda x, **k: q(jnp.linalg.norm(jnp.stack([x, x]), axis=0).sum(**k) / 8),
]
ARG = [jnp.argmax, jnp.argmin]


def some_axes(v: Value, j: int) -> tuple[int, ...]:
    """Return the axis of rows, all other axes, all axes, or one axis."""
    n = v.x.ndim
    rest = tuple(d for d in range(n) if d != v.rows)
    return [() if v.rows is None else (v.rows,), rest, tuple(range(n)), (j // 4 % n,) if n else ()][
        j % 4
    ]


def reduced(v: Value, fn: Any, axes: tuple[int, ...], keep: bool) -> Value:
    shape = v.x.shape
    grow = (lambda z: z) if keep else (lambda z: jnp.expand_dims(z, axes))
    if v.rows is None or v.rows in axes:
        rows = None
    else:
        rows = v.rows - (0 if keep else sum(d < v.rows for d in axes))
    return v.viewed(
        f"{axes}{keep}",
        lambda x: fn(x, axis=axes, keepdims=keep),
        lambda z: jnp.broadcast_to(grow(z), shape),
        rows,
    )


@op
def reduce(w: Writer, v: Value, j: int) -> Value | None:
    axes = some_axes(v, j // 2 // len(REDUCE))
    return reduced(v, REDUCE[j // 2 % len(REDUCE)], axes, bool(j % 2)) if axes else None


@op
def arg_reduce(w: Writer, v: Value, j: int) -> Value | None:
    if not v.x.ndim:
        return None
    axis = j // 4 % v.x.ndim
    if axis == v.rows and v.runs:
        w.binds()
    fn = lambda x, axis, keepdims: q(
        ARG[j // 2 % 2](x, axis=axis[0], keepdims=keepdims).astype(F) / 2
    )
    return reduced(v, fn, (axis,), bool(j % 2))


@op
def publish(w: Writer, v: Value, j: int) -> None:
    """Reduce a leaf to a number that all other leaves may read."""
    w.scalars.append(REDUCE[j % len(REDUCE)](v.x, axis=tuple(range(v.x.ndim))) if v.x.ndim else v.x)


@op
def publish_vector(w: Writer, v: Value, j: int) -> None:
    if v.x.ndim > 1 and v.x.shape[-1] == 3 and v.rows not in (None, v.x.ndim - 1):
        w.vectors.append(REDUCE[j % len(REDUCE)](v.x, axis=tuple(range(v.x.ndim - 1))))
    elif v.x.shape == (3,) and v.rows is None:
        w.vectors.append(v.x)


@op
def global_norm(w: Writer, v: Value, j: int) -> None:
    total = [jnp.sum(w.full(n) ** 2) if j % 2 else jnp.max(jnp.abs(w.full(n))) for n in w.values]
    w.scalars.append(q(jnp.sqrt(sum(total[1:], start=total[0]))))


@op
def normalised(w: Writer, v: Value, j: int) -> Value:
    """Normalize a value, and subtract its maximum: at least two levels of reductions."""
    x = q(v.x / (1 + jnp.sum(v.x * v.x)))
    return v.new(q(x - jnp.max(x)))


# -- shapes ----------------------------------------------------------------------------------------


@op
def transposed(w: Writer, v: Value, j: int) -> Value:
    rows = None if v.rows is None else v.x.ndim - 1 - v.rows
    return v.viewed("T", jnp.transpose, jnp.transpose, rows)


@op
def ravelled(w: Writer, v: Value, j: int) -> Value | None:
    """Merge all axes from one axis on."""
    n, shape = v.x.ndim, v.x.shape
    if n < 2:
        return None
    start = j % (n - 1)
    rows, runs = v.rows, v.runs
    if rows is not None and rows > start and np.prod(shape[start:rows]) != 1:
        w.binds()
    if rows is not None and rows >= start:
        rows, runs = start, runs or bool(np.prod(shape[start:]) != shape[v.rows])
    return v.viewed(
        f"ravel{start}",
        lambda x: jnp.reshape(x, (*shape[:start], -1)),
        lambda z: jnp.reshape(z, shape),
        rows,
        runs,
    )


@op
def expanded(w: Writer, v: Value, j: int) -> Value | None:
    axis = j % (v.x.ndim + 1)
    if v.x.ndim > 4:
        return None
    rows = None if v.rows is None else v.rows + (axis <= v.rows)
    return v.viewed(
        f"expand{axis}", lambda x: jnp.expand_dims(x, axis), lambda z: jnp.squeeze(z, axis), rows
    )


@op
def repeated(w: Writer, v: Value, j: int) -> Value | None:
    """Broadcast along a new axis. The way back takes the first entry."""
    if v.x.ndim > 3:
        return None
    axis = j % (v.x.ndim + 1)
    shape = list(v.x.shape)
    shape.insert(axis, 11)
    rows = None if v.rows is None else v.rows + (axis <= v.rows)
    return v.viewed(
        f"repeat{axis}",
        lambda x: jnp.broadcast_to(jnp.expand_dims(x, axis), shape),
        lambda z: q(jnp.sum(z, axis)) if j // 8 % 2 else lax.index_in_dim(z, 0, axis, False),
        rows,
    )


@op
def there_and_back(w: Writer, v: Value, j: int) -> Value:
    return Value(v.back(v.x), "", lambda z: z, 0 if w.values[w.leaf][0].x.ndim else None)


@op
def beside(w: Writer, v: Value, j: int) -> Value | None:
    """Concatenate or stack with another value along any axis, and reduce along this axis."""
    if not v.x.ndim:
        return None
    axis = j % v.x.ndim
    y = w.other(v, j // 4).x
    if axis == v.rows:
        w.binds()
    both = jnp.concatenate([v.x, y, y, v.x, -y, y], axis)
    return v.new(
        lax.slice_in_dim(
            jnp.sort(both, axis) if j // 2 % 2 else both, 1, 1 + v.x.shape[axis], axis=axis
        )
    )


@op
def padded(w: Writer, v: Value, j: int) -> Value | None:
    """Shift along an axis, with padding."""
    if not v.x.ndim:
        return None
    axis = j % v.x.ndim
    if axis == v.rows:
        w.binds()
    config = [(9, 0, 0) if d == axis else (0, 0, 0) for d in range(v.x.ndim)]
    return v.new(
        lax.slice_in_dim(
            lax.pad(v.x, jnp.asarray(0.5, F), config), 8, 8 + v.x.shape[axis], axis=axis
        )
    )


@op
def columns_replaced(w: Writer, v: Value, j: int) -> Value | None:
    """Apply `dynamic_slice` and `dynamic_update_slice` at a shared index."""
    if not v.x.ndim:
        return None
    axis = j % v.x.ndim
    if axis == v.rows:
        w.binds()
    one = lax.dynamic_slice_in_dim(v.x, w.count % v.x.shape[axis], 1, axis)
    return v.new(lax.dynamic_update_slice_in_dim(v.x, -one, 0, axis))


@op
def along(w: Writer, v: Value, j: int) -> Value | None:
    """Apply an operation along one axis."""
    if not v.x.ndim:
        return None
    axis = j % v.x.ndim
    k = j // 4 % 10
    if axis == v.rows and k != 6:
        w.binds()
    fns = [
        lambda x: q(jnp.cumsum(x, axis)),
        lambda x: jnp.sort(x, axis),
        lambda x: jnp.flip(x, axis),
        lambda x: jnp.roll(x, 1, axis),
        lambda x: lax.cummax(x, axis),
        lambda x: jnp.argsort(x, axis).astype(F) / 2,
        lambda x: q(jax.nn.softmax(x, axis)),
        lambda x: (
            lax.top_k(jnp.moveaxis(x, axis, -1), 1)[0].reshape(
                jnp.max(x, axis, keepdims=True).shape
            )
            + 0 * x
        ),
        lambda x: q(sum(jnp.split(x, x.shape[axis], axis)) + 0 * x),
        lambda x: jnp.take_along_axis(x, jnp.argsort(-x, axis), axis),
    ]
    if k == 7 and (v.rows is not None and v.x.ndim > 1):
        w.binds()  # a reshape that may move rows, so the leaf may be sliced or not
    if k == 9:
        w.binds()  # gather
    return v.new(fns[k](v.x))


# -- products --------------------------------------------------------------------------------------


def as_matrix(w: Writer, v: Value) -> jax.Array | None:
    """Return a matrix with rows on the first dimension."""
    return None if v.rows != 0 or v.runs else v.x.reshape(v.x.shape[0], -1)


@op
def dot(w: Writer, v: Value, j: int) -> Value | None:
    x = as_matrix(w, v)
    if x is None:
        return None
    y = w.other(v, j // 16).x.reshape(x.shape)
    k = j % 8
    if k == 0:
        w.scalars.append(q(jnp.vdot(x, y)))
        return None
    if k == 1:
        w.binds()
        return v.new(q(q(x @ y.T) @ x).reshape(v.x.shape))
    if k == 2:
        return v.new(q(x @ q(y.T @ x)).reshape(v.x.shape))
    if k == 3:
        return v.new(q(x + (x @ jnp.arange(x.shape[1], dtype=F))[:, None]).reshape(v.x.shape))
    if k == 4:  # contraction of a column of rows with rows
        return v.new(q(x + q(y[:, 0] @ x)).reshape(v.x.shape))
    if k == 5:  # shared numbers, one for each row
        return v.new(q(x + jnp.arange(x.shape[0], dtype=F) @ y).reshape(v.x.shape))
    if k == 6:
        return v.new(
            q(jnp.einsum("ij,kj->ik", x, jnp.ones((x.shape[1], x.shape[1])) * w.scalar(j))).reshape(
                v.x.shape
            )
        )
    return v.new(q(jnp.einsum("ij,ij->i", x, y)[:, None] * x).reshape(v.x.shape))


@op
def publish_matrix(w: Writer, v: Value, j: int) -> None:
    x = as_matrix(w, v)
    if x is not None and x.shape[1] == 3:
        w.matrices.append(q(x.T @ x))


@op
def with_matrix(w: Writer, v: Value, j: int) -> Value | None:
    if v.x.ndim < 2 or v.x.shape[-1] != 3 or v.rows == v.x.ndim - 1:
        return None
    return v.new(q(v.x @ w.matrices[-1 - j % len(w.matrices)]))


@op
def linalg(w: Writer, v: Value, j: int) -> Value | None:
    if v.x.ndim < 3 or v.rows is None:
        return None
    if v.rows >= v.x.ndim - 2 or j % 5 > 2:
        w.binds()
    x = v.x
    square = x @ jnp.swapaxes(x, -1, -2) + jnp.eye(x.shape[-2])
    made = [
        lambda: jnp.linalg.cholesky(square),
        lambda: lax.linalg.triangular_solve(
            jnp.linalg.cholesky(square), square, left_side=True, lower=True
        ),
        lambda: square + jnp.linalg.eigvalsh(square)[..., None],
        lambda: jnp.linalg.solve(square, square + 1),
        lambda: jnp.linalg.inv(square),
    ][j % 5]()
    return v.new(q(x + q(made.sum((-1, -2), keepdims=True) * 0.625)))


# -- branches and loops ----------------------------------------------------------------------------

INSIDE = [
    lambda x, s: q(jnp.sin(x) * 2),
    lambda x, s: -x,
    lambda x, s: q(x + s),
    lambda x, s: q(x - jnp.mean(x)),
    lambda x, s: q(x * jnp.max(jnp.abs(x))),
    lambda x, s: jnp.zeros_like(x) + s,
    lambda x, s: jnp.where(jnp.all(x < 3), x, 0.25),
    lambda x, s: q(x + lax.broadcasted_iota(F, x.shape, 0)) if x.ndim else x,
    lambda x, s: q(x - jnp.sum(x, -1, keepdims=True)) if x.ndim else x,
    lambda x, s: x,
]


@op
def branch(w: Writer, v: Value, j: int) -> Value:
    """Add a branch of one leaf. The predicate depends on a shared count, or on a reduction."""
    s, other = w.scalar(j // 7), w.other(v, j // 3).x
    f, g, h = (INSIDE[j // d % len(INSIDE)] for d in (2, 11, 5))
    if j % 2:
        return v.new(
            lax.cond(s > 0.25, lambda x, y: f(x, s), lambda x, y: q(g(y, s) + x), v.x, other)
        )
    case = (w.count + j) % 3
    nested = lambda x: lax.cond(jnp.sum(x) > 0, lambda x: h(x, s), lambda x: -x, x)
    return v.new(lax.switch(case, [lambda x: f(x, s), lambda x: g(x, s), nested], v.x))


@op
def branch_of_all(w: Writer, v: Value, j: int) -> None:
    """Add a branch whose operand is the full tree. The branch also returns a number."""
    tree = {n: w.full(n) for n in w.values}
    f, g = (INSIDE[j // d % len(INSIDE)] for d in (4, 13))

    def first(t: Any) -> Any:
        total = [jnp.sum(x * x) for x in t.values()] if j // 2 % 2 else [w.count.astype(F)]
        s = q(jnp.sqrt(sum(total)))
        return {n: f(x, s) for n, x in t.items()}, s

    def second(t: Any) -> Any:
        return {
            n: g(x, jnp.asarray(0.5, F)) if i % 2 else x for i, (n, x) in enumerate(t.items())
        }, w.scalar(j)

    test = w.scalar(j // 3) > 0.25 if j % 2 else w.count % 2 == 0
    if j // 5 % 3 == 0:
        inner = first
        first = lambda t: lax.cond(  # type: ignore[assignment]
            w.scalar(j // 2) > 0, inner, second, t
        )
    made, s = lax.cond(test, first, second, tree)
    w.scalars.append(s)
    for n, x in made.items():
        w.values[n].append(Value(x, "", lambda z: z, 0 if x.ndim else None))


@op
def loop(w: Writer, v: Value, j: int) -> Value:
    f = INSIDE[j // 5 % len(INSIDE)]
    s, turns = w.scalar(j // 9), 4 + 2 * (j % 2)
    kind = j % 5
    crosses = INSIDE.index(f) in (3, 4, 6) or (INSIDE.index(f) == 8 and v.rows == v.x.ndim - 1)
    if v.x.ndim and ((crosses and kind != 4) or kind == 3):
        w.binds()
    if kind == 0:
        return v.new(lax.fori_loop(0, turns, lambda i, x: q(f(x, s) + i), v.x))
    if kind == 1:
        return v.new(
            lax.while_loop(lambda c: c[0] < turns, lambda c: (c[0] + 1, f(c[1], s)), (0, v.x))[1]
        )
    if kind == 2:
        keys = jnp.arange(turns, dtype=F)
        made, each = lax.scan(lambda x, k: (q(f(x, s) + k), x), v.x, keys)
        return v.new(q(made + each[0]))
    if kind == 3:
        stop = lambda c: (c[0] < turns) & (jnp.max(c[1]) < 3)
        return v.new(lax.while_loop(stop, lambda c: (c[0] + 1, f(c[1], s)), (0, v.x))[1])
    add = lax.broadcasted_iota(F, v.x.shape, 0) * s if v.x.ndim else s
    return v.new(lax.fori_loop(0, turns, lambda i, x: q(x + add), v.x))


@op
def scanned(w: Writer, v: Value, j: int) -> Value | None:
    """Add a scan over an axis, with a carry."""
    if v.x.ndim < 1:
        return None
    axis = j % v.x.ndim
    if axis == v.rows or j // 8 % 3 == 1:
        w.binds()
    x = jnp.moveaxis(v.x, axis, 0)

    def body(carry: Any, row: Any) -> Any:
        carry = q(carry + row) if j // 8 % 3 != 1 else q(carry + jnp.sum(row))
        return carry, q(carry * 0.5)

    start = jnp.zeros_like(x[0]) if j // 4 % 2 else jnp.zeros(x.shape[1:], F)
    last, rows = lax.scan(body, start, x, reverse=bool(j // 2 % 2))
    return v.new(jnp.moveaxis(q(rows + last), 0, axis))


@op
def loop_of_all(w: Writer, v: Value, j: int) -> None:
    if j % 4:
        return
    tree = {n: w.full(n) for n in w.values}
    f = INSIDE[j // 4 % len(INSIDE)]
    w.binds(*w.values)
    made = lax.fori_loop(0, 2, lambda i, t: {n: f(x, 0.5) for n, x in t.items()}, tree)
    for n, x in made.items():
        w.values[n].append(Value(x, "", lambda z: z, 0 if x.ndim else None))


@op
def first_entry(w: Writer, v: Value, j: int) -> None:
    """Publish one entry for the other leaves."""
    if v.x.ndim and v.rows is not None:
        w.binds()
    w.scalars.append(v.x[(0,) * v.x.ndim])


@op
def mixed(w: Writer, v: Value, j: int) -> Value | None:
    """Combine with another leaf, entry by entry."""
    other = list(w.values)[j % len(w.values)]
    x = w.full(other)
    if j % 3 or other == w.leaf or x.size != v.x.size:
        return None
    w.binds(w.leaf, other)
    return v.new(q(v.x + x.reshape(v.x.shape)))


# operations that keep rows are drawn more often; otherwise no leaf would be sliced
RARE = [
    "first_entry",
    "mixed",
    "loop_of_all",
    "along",
    "beside",
    "padded",
    "columns_replaced",
    "scanned",
    "loop",
]
OFTEN = [n for n in OPS if n not in RARE]
INSTRUCTION = st.tuples(
    st.one_of(*[st.sampled_from(OFTEN)] * 4, st.sampled_from(RARE)),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 255),
)
KINDS = ["moment", "transposed", "column", "row", "scalar", "seen", "fixed", "swapped", "constant"]
PROGRAMS = st.fixed_dictionaries(
    {
        "leaves": st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, max_size=3, unique=True),
        "kinds": st.lists(st.sampled_from(KINDS), max_size=3, unique=True),
        "instructions": st.lists(INSTRUCTION, min_size=1, max_size=10),
        "choice": st.integers(0, 63),
        "servers": st.integers(1, 4),
    }
)


def initial(kind: str, x: jax.Array, name: str) -> Any:
    """Return the state of one kind for one leaf."""
    x = x.astype(F)
    if kind == "transposed":
        return jnp.transpose(x) * 0.5
    if kind == "column":
        return jnp.max(x, tuple(range(1, x.ndim))) if x.ndim else x
    if kind == "row":
        return jnp.min(x, 0) if x.ndim else x
    if kind == "scalar":
        return jnp.max(x)
    if kind == "seen":
        return jnp.zeros(x.shape[:1], jnp.int32)
    if kind == "swapped":
        return {"x": x, "y": -x}
    return -x


class Update:
    """Random program in the form of an optimizer."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.program = program
        self.bound: set[str] = set()

    def init(self, params: Any) -> Any:
        state: dict[str, Any] = {
            k: {n: initial(k, p, n) for n, p in params.items()} for k in self.program["kinds"]
        }
        return {**state, "count": jnp.zeros((), jnp.int32), "key": jax.random.key(3)}

    def update(self, grads: Any, state: Any, params: Any) -> Any:
        kinds, choice = self.program["kinds"], self.program["choice"]
        key, count = state["key"], state["count"]
        values: dict[str, list[Value]] = {}
        for n, g in grads.items():
            x = g.astype(F)
            pool = [unit(params[n].astype(F), n), unit(x, n)]
            for kind in kinds:
                s = state[kind][n]
                if kind == "swapped":
                    pool.append(unit(q(s["x"]), n))
                elif kind == "transposed":
                    pool.append(transposed_state(s))
                elif kind == "column" and x.ndim:
                    pool.append(reduced_state(s, x, tuple(range(1, x.ndim)), 0))
                elif kind == "row" and x.ndim:
                    pool.append(reduced_state(s, x, (0,), None))
                elif kind == "scalar":
                    pool.append(reduced_state(s, x, tuple(range(x.ndim)), None))
                elif kind == "seen" and x.ndim:
                    pool.append(reduced_state(s.astype(F), x, tuple(range(1, x.ndim)), 0))
                elif kind in ("moment", "fixed", "constant"):
                    pool.append(unit(s, n))
            pool.append(pool.pop(1))
            values[n] = pool
        w = Writer(values, count, key)
        for instruction in self.program["instructions"]:
            w.run(*instruction)
        self.bound = w.bound

        updates = {n: w.full(n).astype(g.dtype) for n, g in grads.items()}
        new: dict[str, Any] = {}
        for kind in kinds:
            new[kind] = {}
            for i, n in enumerate(grads):
                pool = w.values[n]
                v = pool[(choice + i) % len(pool)]
                x = q(v.back(v.x))
                old = state[kind][n]
                if kind == "fixed":
                    new[kind][n] = old
                elif kind == "constant":
                    new[kind][n] = jnp.full_like(old, 0.5)
                elif kind == "swapped":
                    new[kind][n] = {"x": old["y"], "y": x}
                elif kind == "seen":
                    hit = jnp.any(x > 0, tuple(range(1, x.ndim))) if x.ndim else jnp.ones((), bool)
                    new[kind][n] = old + hit.astype(jnp.int32)
                else:
                    new[kind][n] = initial(kind, x, n)
        return updates, {**new, "count": count + 1, "key": jax.random.split(key)[0]}


def transposed_state(s: jax.Array) -> Value:
    return Value(s, " T", jnp.transpose, s.ndim - 1 if s.ndim else None)


def reduced_state(s: jax.Array, x: jax.Array, axes: tuple[int, ...], rows: int | None) -> Value:
    back = lambda z: jnp.broadcast_to(jnp.expand_dims(z, axes), x.shape)
    return Value(s, f" {axes}False" if axes else "", back, rows)


def eighths(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray(np.round(rng.normal(size=shape) * 8).clip(-16, 16) / 8, dtype)


def check(program: dict[str, Any]) -> None:
    """Check the numbers and the structure of one program."""
    rng = np.random.default_rng(0)
    params = {n: eighths(rng, SHAPES[n], DTYPES.get(n, F)) for n in sorted(program["leaves"])}
    written = Update(program)
    tx = optax.GradientTransformation(written.init, written.update)
    loss = lambda p, g: sum(jnp.vdot(p[n], g[n]).astype(F) for n in p)
    plan = plan_of(loss, tx, params, params, servers=program["servers"])
    names = [n for n in plan.main.in_names if n.startswith(("params/", "opt_state/"))]
    state = tx.init(params)
    whole = inline_calls(jax.make_jaxpr(tx.update)(params, state, params))
    of_state = jax.tree.structure(state)

    held = start_servers(plan, params, evaluate=interpret)
    for step in range(2):
        grads = {n: eighths(rng, p.shape, p.dtype) for n, p in params.items()}
        held = serve(plan, held, [{f"params/{n}": g for n, g in grads.items()}], evaluate=interpret)
        made = interpret(whole, *jax.tree.leaves((grads, state, params)))
        params = {n: p + u for (n, p), u in zip(params.items(), made[: len(params)], strict=True)}
        state = jax.tree.unflatten(of_state, made[len(params) :])
        expected = dict(
            zip(plan.main.in_names, plan.main.flatten(params, state, grads), strict=True)
        )
        got = assemble(plan, held, names)
        assert set(got) == set(names)
        for name, value in got.items():
            a, b = as_numpy(value), as_numpy(expected[name])
            assert a.shape == b.shape and a.dtype == b.dtype, (
                name,
                a.shape,
                b.shape,
                a.dtype,
                b.dtype,
            )
            a, b = a.astype(np.float64), b.astype(np.float64)
            assert np.isfinite(b).all(), name
            assert np.abs(a - b).max(initial=0) <= 1e-12, f"step {step}: {name}: {a} is not {b}"
    reads_only_what_was_there_or_made_before(plan)
    no_full_shapes(plan)
    for leaf, reason in plan.placement.reasons_unsliced.items():
        if plan.placement.blocks[leaf][0].rows == 1:
            continue  # no two leaves that could be bound
        assert leaf.removeprefix("params/") in written.bound, f"{leaf} is whole: {reason}"


EXAMPLES = os.environ.get("DTRANS_EXAMPLES")


# leaves that a loop combines, and one of them alone after both are known to be unsliced
TIED = {
    "leaves": ["a", "bias"],
    "kinds": ["moment", "fixed", "transposed"],
    "instructions": [
        ("unary", 0, 2, 0),
        ("loop_of_all", 0, 0, 252),
        ("unary", 0, 0, 0),
        ("beside", 0, 3, 20),
    ],
    "choice": 0,
    "servers": 1,
}


@pytest.mark.timeout(0 if EXAMPLES else 300)
@example(TIED)
@given(PROGRAMS)
@settings(max_examples=int(EXAMPLES) if EXAMPLES else settings().max_examples)
def test_any_update_gives_the_same_on_servers(program: dict[str, Any]) -> None:
    note(repr(program))
    with jax.enable_x64(True):
        check(program)
