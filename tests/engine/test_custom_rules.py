"""Custom derivative rules on pieces: gradients of terms add up to the gradient of the full
function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shard_programs import AXIS, floats, pieces_of, quick

from dtrans._jax import equations, evaluate, opened
from dtrans.engine.layout import PARTIAL, Shards, sharded_along
from dtrans.engine.open_sums import linear_terms
from dtrans.engine.writer import SplitWriter, written
from dtrans.ir.inline import eliminate_dead, inline_calls
from dtrans.rows.layout import SHARED


@jax.custom_vjp
def reverse_gradient(x):
    return x


reverse_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.3 * g,))


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvps(lambda t, out, x: t * 0.5)


@jax.custom_vjp
def scaled(w, x):
    """Return a product with a rule that differs from its derivative, and with sums over rows."""
    return x @ w


scaled.defvjp(
    lambda w, x: (scaled(w, x), (w, x)), lambda kept, g: (2.0 * kept[1].T @ g, 3.0 * g @ kept[0].T)
)


@jax.custom_vjp
def normed(x):
    """Return a function whose rule mixes rows."""
    return x * 2.0


normed.defvjp(lambda x: (normed(x), None), lambda _, g: (g / jnp.linalg.norm(g),))

LOSSES = {
    "relu at 0": lambda w, x: jax.nn.relu(jnp.round(x) @ jnp.round(w)).mean(),
    "gradient reversal": lambda w, x: jnp.square(reverse_gradient(x @ w) + x @ w).mean(),
    "straight through": lambda w, x: jnp.square(straight_through(x @ w)).mean(),
    "a product with a rule": lambda w, x: jnp.tanh(scaled(w, x)).mean(),
    "in a scan": lambda w, x: jax.lax.scan(
        lambda c, _: (straight_through(c @ w @ w.T), None), x, None, length=2
    )[0].mean(),
    "under checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jax.nn.relu(scaled(w, x)))(
        w, x
    ).mean(),
    "a branch on the number of rows": lambda w, x: jax.lax.cond(
        w[0, 0] > 0, lambda: straight_through(x @ w).sum(), lambda: jnp.square(w).sum()
    ),
    "a loop with a condition": lambda w, x: jax.lax.stop_gradient(
        jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + straight_through(x @ w).sum()), (0, 0.0)
        )[1]
    ),
    "over rows": lambda w, x: jax.lax.map(lambda r: reverse_gradient(r @ w).sum(), x).mean(),
    "relu6 and logsumexp": lambda w, x: (
        jax.nn.relu6(x @ w) + jax.nn.logsumexp(x @ w, 1, keepdims=True)
    ).mean(),
}


def term_of(loss, w, x, shards):
    """Return a shard's term of a loss with sharded rows; calls with custom rules stay calls."""
    flat = inline_calls(jax.make_jaxpr(loss)(w, x), rules=True)
    inner = opened(flat)

    def write(writer: SplitWriter) -> Any:
        writer.keeps_rules, writer.terms = True, linear_terms(inner, inner.outvars)
        writer.pieces.takes_index = True
        for v, layout in zip(inner.invars, (SHARED, sharded_along(0)), strict=True):
            writer.take(v, layout, is_input=True)
        return eliminate_dead(writer.b.build(writer.write(inner, lambda i, _: PARTIAL)[0]))

    return written(flat, Shards(shards, (AXIS,)), write)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("rows", "shards"), [(12, 2), (10, 3)])
def test_gradients_of_terms_add_up(x64, name, rows, shards):
    loss, w, x = LOSSES[name], floats(4, 3), floats(rows, 4, seed=1)
    term = term_of(loss, w, x, shards)
    assert {e.primitive.name for e in equations(term)}.isdisjoint({"all_reduce", "all_gather"})

    def value(w, piece, index):
        indices = [index] * (len(term.in_avals) - 2)
        return evaluate(term, *indices, w, piece)[0]

    both = jax.vmap(jax.value_and_grad(value, (0, 1)), in_axes=(None, 0, 0))
    found, (of_w, of_x) = quick(both)(w, pieces_of(x, 0, shards), jnp.arange(shards, dtype="int32"))
    wanted, grads = quick(jax.value_and_grad(loss, (0, 1)))(w, x)
    np.testing.assert_allclose(found.sum(), wanted, rtol=1e-12)
    np.testing.assert_allclose(of_w.sum(0), grads[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(of_x.reshape(-1, 4)[:rows], grads[1], rtol=1e-12, atol=1e-14)


def test_a_rule_that_mixes_rows_has_whole_values(x64):
    term = term_of(lambda w, x: normed(x @ w).mean(), floats(4, 3), floats(12, 4), 2)
    assert "all_gather" in {e.primitive.name for e in equations(term)}
