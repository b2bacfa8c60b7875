"""Gathers whose indices count rows become batched gathers.

Gathers that only look similar stay unchanged.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrans._jax import equations, jaxpr_as_fun, lowered_jaxpr
from dtrans.ir.batched_gathers import batched_gathers


B, C, T = 4, 5, 3
X = np.random.default_rng(0).normal(size=(B, C)).astype("float32")
Z = np.random.default_rng(1).normal(size=(B, T, C)).astype("float32")
Y = np.array([3, -1, 0, 4])
TOKENS = np.random.default_rng(2).integers(-C, C, size=(B, T))


def in_scan(x: Any, y: Any) -> Any:
    rows = jnp.arange(B)
    return jax.lax.scan(lambda c, k: (c + x[rows, k], x[rows, k]), jnp.zeros(B), jnp.stack([y, y]))


def in_while(x: Any, y: Any) -> Any:
    rows = jnp.arange(B)
    return jax.lax.while_loop(
        lambda c: c[1] < 3, lambda c: (c[0] + x[rows, y], c[1] + 1), (jnp.zeros(B), 0)
    )


def in_turns(x: Any, y: Any) -> Any:
    """Return a stack of row numbers. Each iteration reads one of them along the rows."""
    rows = jnp.broadcast_to(jnp.arange(B), (2, B))
    return jax.lax.scan(lambda c, i: (c, x[i, y]), 0.0, rows)


PICKED = {
    "plain": lambda x, y: x[jnp.arange(len(y)), y],
    "numpy": lambda x, y: x[np.arange(len(y)), y],
    "small numbers": lambda x, y: x[jnp.arange(B, dtype=jnp.uint8), y.astype(jnp.int8)],
    "clipped": lambda x, y: x.at[jnp.clip(jnp.arange(B), 0, B - 1), y].get(mode="clip"),
    "filled": lambda x, y: x.at[jnp.arange(B), y + 1].get(mode="fill", fill_value=7.0),
    "bounded": lambda x, y: x[jnp.minimum(jnp.maximum(jnp.arange(B), 0), B - 1), y],
    "vmapped": lambda x, y: jax.vmap(lambda i, k: x[i, k])(jnp.arange(B), y),
    "vmapped slice": lambda x, y: jax.vmap(lambda i: x[i])(jnp.arange(B)),
    "jitted": lambda x, y: jax.jit(lambda x, i, y: x[i, y])(x, jnp.arange(B), y),
    "made in a call": lambda x, y: x[jax.jit(lambda: jnp.arange(B))(), y],
    "transposed": lambda x, y: x.T[y, jnp.arange(B)],
    "all pairs": lambda x, y: x[jnp.arange(B)[:, None], y[None]],
    "all pairs, turned": lambda x, y: x[jnp.arange(B)[None], y[:, None]],
    "slices": lambda x, y: jnp.asarray(Z)[jnp.arange(B), :, y] * x[:, None, 0],
    "of two dimensions": lambda x, y: jnp.asarray(Z)[
        jnp.arange(B)[:, None], jnp.arange(T)[None], TOKENS
    ],
    "of two, by ix_": lambda x, y: jnp.asarray(Z)[
        jnp.ix_(jnp.arange(B), jnp.arange(T), jnp.abs(y) % C)
    ],
    "by what was picked": lambda x, y: x[:, :, None][
        jnp.arange(B), jnp.stack([y, -y], 1)[jnp.arange(B), y % 2]
    ],
    "diagonal": lambda x, y: x[jnp.arange(B), jnp.arange(B)],
    "columns": lambda x, y: x[jnp.arange(B)[:, None], jnp.stack([y, y], 1)],
    "reshaped": lambda x, y: x[jnp.arange(B).reshape(B, 1), y.reshape(B, 1)],
    "written": lambda x, y: x.at[jnp.arange(B), y].set(2.0),
    "added": lambda x, y: x.at[jnp.arange(B), y].add(y * 1.0),
    "largest": lambda x, y: x.at[jnp.arange(B), y].max(0.5),
    "vmapped gradient": lambda x, y: jax.grad(
        lambda x: (jax.vmap(lambda i, k: x[i, k])(jnp.arange(B), y) ** 2).sum()
    )(x),
    "gradient": lambda x, y: jax.grad(lambda x: (x[jnp.arange(B), y] ** 2).sum())(x),
    "second gradient": lambda x, y: jax.hessian(lambda x: (x[jnp.arange(B), y] ** 3).sum())(x),
    "checkpoint": lambda x, y: jax.grad(
        jax.checkpoint(lambda x: jnp.sin(x[jnp.arange(B), y]).sum())
    )(x),
    "branch": lambda x, y: jax.lax.cond(y[0] > 0, lambda: x[jnp.arange(B), y], lambda: x[:, 0]),
    "branch, from outside": lambda x, y: jax.lax.cond(
        y[0] > 0, lambda i: x[i, y], lambda i: x[:, 0], jnp.arange(B)
    ),
    "scan": in_scan,
    "while": in_while,
    "turns": in_turns,
}


def stacked_turns(x: Any, y: Any) -> Any:
    """An inner loop stacks the number of each iteration of the outer loop.

    This stack is not an index of the outer stack.
    """
    rows = np.stack([np.arange(B), np.arange(B)], 1)
    one = jax.lax.GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)
    )

    def turn(carry: Any, i: Any) -> Any:
        _, twice = jax.lax.scan(lambda c, _: (c, i), 0.0, None, length=2)
        at = rows + jax.lax.broadcast_in_dim(twice, (B, 2), (1,))
        return carry, jax.lax.gather(x, at, one, (1, 1), mode=jax.lax.GatherScatterMode.CLIP)

    return jax.lax.scan(turn, 0.0, np.array([0, 1]))[1]


LEFT = {
    "stacked turns": stacked_turns,
    "offset": lambda x, y: x[jnp.arange(B) + 1, y],
    "begins elsewhere": lambda x, y: x[jnp.arange(1, B), y[1:]],
    "begins before": lambda x, y: x[jnp.arange(-1, B - 1), y],
    "reversed": lambda x, y: x[jnp.arange(B)[::-1], y],
    "counted down": lambda x, y: x[jnp.arange(B - 1, -1, -1), y],
    "subtracted": lambda x, y: x[B - 1 - jnp.arange(B), y],
    "steps": lambda x, y: x[jnp.arange(0, B, 2), y[:2]],
    "permuted": lambda x, y: x[np.array([0, 2, 1, 3]), y],
    "permuted by a key": lambda x, y: x[jax.random.permutation(jax.random.key(0), B), y],
    "rolled": lambda x, y: x[jnp.roll(jnp.arange(B), 1), y],
    "modulo": lambda x, y: x[jnp.arange(B) % 2, y],
    "doubled": lambda x, y: x[jnp.arange(B) * 2, y],
    "shorter": lambda x, y: x[jnp.arange(B - 1), y[1:]],
    "longer": lambda x, y: jnp.tile(x, (2, 1))[jnp.arange(B), y],
    "other dimension": lambda x, y: x[y, jnp.arange(B)],  # C columns
    "clamped": lambda x, y: x[jnp.minimum(jnp.arange(B), 2), y],
    "clamped below": lambda x, y: x[jnp.clip(jnp.arange(B), 1, B - 1), y],
    "selected": lambda x, y: x[jnp.where(y > 0, jnp.arange(B), 0), y],
    "of the data": lambda x, y: x[jnp.argsort(y), y],
    "counted in the loop": lambda x, y: jax.lax.fori_loop(
        0, B, lambda i, s: s + x[jnp.arange(B) + i, y], jnp.zeros(B)
    ),
    "turned around": lambda x, y: x[jnp.flip(jnp.arange(B)), y],
}


def batching(jaxpr: Any) -> list[tuple[int, ...]]:
    """Return the dimensions that each gather or scatter batches."""
    picks = [
        e
        for e in equations(jaxpr)
        if e.primitive.name == "gather" or e.primitive.name.startswith("scatter")
    ]
    return [e.params["dimension_numbers"].operand_batching_dims for e in picks]


def both(fn: Any, *args: Any) -> tuple[Any, Any]:
    """Return a function before and after the rewrite. Check that both compute the same bits."""
    args = tuple(map(jnp.asarray, args))
    old = lowered_jaxpr(lambda *a: jax.tree.leaves(fn(*a)), *args)
    new = batched_gathers(old)
    for a, b in zip(jaxpr_as_fun(old)(*args), jax.jit(jaxpr_as_fun(new))(*args), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    return old, new


@pytest.mark.sampled(8)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", PICKED)
def test_a_gather_of_each_row_from_itself_is_batched(name: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        old, new = both(PICKED[name], X, Y)
        assert not any(batching(old)) and batching(old)
        assert all(dims for dims in batching(new)), new
        assert len(batching(old)) == len(batching(new))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", LEFT)
def test_what_looks_like_row_numbers_is_left_as_it_is(name: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        old, new = both(LEFT[name], X, Y)
        assert new is old and not any(batching(old))
