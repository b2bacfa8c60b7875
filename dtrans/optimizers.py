"""Optimizers for tables of embeddings, whose state has one number for each row.

A row of a table is looked up as a whole, so its entries have seen the same steps, and one second
moment serves them
all: a table of d columns needs 1/d of the memory for it. They are optax's gradient transformations,
and go wherever those go: into `optax.chain`, `optax.partition`, and any strategy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class RowwiseAdagradState(NamedTuple):
    """For each leaf, the sum of its rows' mean squared gradients, of shape (rows,)."""

    sum_of_squares: Any


class RowwiseAdamState(NamedTuple):
    """The number of updates; for each leaf, the first moment of its entries, and the second of its
    rows."""

    count: jax.Array  # type: ignore[assignment]  # as optax names it
    mu: Any
    nu: Any


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    *,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Adagrad with one accumulator for each row.

    Of a leaf of shape (rows, ...) the accumulator has the shape (rows,); of a leaf without
    dimensions, none.

    Args:
      learning_rate: a number, or a schedule.
      initial_accumulator_value: what accumulators begin with.
      eps: added to the root of the accumulator.

    Returns:
      The transformation. Rows whose gradient is zero stay as they are, and so servers update those
      that are looked up.

    Source: FBGEMM's `EXACT_ROWWISE_ADAGRAD`, which TorchRec's tables are trained with.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from dtrans.optimizers import rowwise_adagrad
      >>> tx = rowwise_adagrad(0.5)
      >>> table = jnp.zeros((2, 2))
      >>> updates, state = tx.update(jnp.array([[3.0, 1.0], [0.0, 0.0]]), tx.init(table))
      >>> state[0].sum_of_squares.tolist(), updates[1].tolist()
      ([5.0, 0.0], [-0.0, -0.0])
    """

    def init(params: optax.Params) -> RowwiseAdagradState:
        return RowwiseAdagradState(
            jax.tree.map(lambda p: _per_row(p, initial_accumulator_value), params)
        )

    def update(grads: optax.Updates, state: RowwiseAdagradState, params: Any = None) -> Any:
        total = jax.tree.map(lambda g, s: s + _mean_square(g), grads, state.sum_of_squares)
        scaled = jax.tree.map(lambda g, s: g / _along_rows(jnp.sqrt(s) + eps, g), grads, total)
        return scaled, RowwiseAdagradState(total)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate)
    )


def rowwise_adam(
    learning_rate: optax.ScalarOrSchedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Adam with one second moment for each row.

    Of a leaf of shape (rows, ...) the first moment has its shape, and the second the shape (rows,).

    Args:
      learning_rate: a number, or a schedule.
      b1, b2: how much of the moments is kept.
      eps: added to the root of the second.

    Returns:
      The transformation. Moments decay in every row, so a table has to say
      `dtrans.Rows(update=...)`.

    Source: FBGEMM's `PARTIAL_ROWWISE_ADAM`; Kingma and Ba, https://arxiv.org/abs/1412.6980.

    Example:
      >>> import jax.numpy as jnp
      >>> from dtrans.optimizers import rowwise_adam
      >>> tx = rowwise_adam(0.5, eps=0.0)
      >>> updates, state = tx.update(jnp.array([[3.0, 3.0]]), tx.init(jnp.zeros((1, 2))))
      >>> updates.round(5).tolist(), state[0].nu.shape
      ([[-0.5, -0.5]], (1,))
    """

    def init(params: optax.Params) -> RowwiseAdamState:
        nu = jax.tree.map(lambda p: _per_row(p, 0.0), params)
        return RowwiseAdamState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params), nu)

    def update(grads: optax.Updates, state: RowwiseAdamState, params: Any = None) -> Any:
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, grads, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * _mean_square(g), grads, state.nu)
        first, second = (optax.tree.bias_correction(x, b, count) for x, b in ((mu, b1), (nu, b2)))
        scaled = jax.tree.map(lambda m, v: m / _along_rows(jnp.sqrt(v) + eps, m), first, second)
        return scaled, RowwiseAdamState(count, mu, nu)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate)
    )


def _per_row(leaf: Any, value: float) -> jax.Array:
    return jnp.full(jnp.shape(leaf)[:1], value, leaf.dtype)


def _mean_square(gradient: jax.Array) -> jax.Array:
    """Of each row."""
    return jnp.mean(gradient**2, axis=tuple(range(1, gradient.ndim)))


def _along_rows(per_row: jax.Array, leaf: jax.Array) -> jax.Array:
    """A number for each row, as it is divided by."""
    return per_row.reshape(per_row.shape + (1,) * max(0, leaf.ndim - 1))
