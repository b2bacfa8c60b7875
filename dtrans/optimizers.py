"""Optimizers for embedding tables, with one second moment for each row.

All entries of a row are looked up in the same steps, so they can share a second moment. For a table
with d columns, second moments need 1/d of the memory. The optimizers are gradient transformations
of optax, and work in `optax.chain`, in `optax.partition`, and in all strategies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class RowwiseAdagradState(NamedTuple):
    """State of `rowwise_adagrad`.

    Attributes:
      sum_of_squares: for each leaf, an array of shape (rows,): the sum over all updates of the mean
        square of each row's gradient.
    """

    sum_of_squares: Any


class RowwiseAdamState(NamedTuple):
    """State of `rowwise_adam`.

    Attributes:
      count: number of updates.
      mu: for each leaf, the first moment, of the leaf's shape.
      nu: for each leaf, the second moment, of shape (rows,).
    """

    count: jax.Array  # type: ignore[assignment]  # as optax names it
    mu: Any
    nu: Any


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    *,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Return Adagrad with one accumulator for each row.

    For a leaf of shape (rows, ...), the accumulators have shape (rows,). For a scalar, the
    accumulator is a scalar.

    Args:
      learning_rate: a number or a schedule.
      initial_accumulator_value: initial value of the accumulators.
      eps: number that is added to the root of the accumulator.

    Returns:
      The transformation. It does not change rows with a zero gradient. So parameter servers need to
      update only the rows that a step looks up.

    Source: FBGEMM's `EXACT_ROWWISE_ADAGRAD`, the optimizer of TorchRec's tables.

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
        per_row = lambda p: _per_row(p, initial_accumulator_value)
        return RowwiseAdagradState(jax.tree.map(per_row, params))

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
    """Return Adam with one second moment for each row.

    For a leaf of shape (rows, ...), the first moment has the leaf's shape, and the second moment
    has shape (rows,).

    Args:
      learning_rate: a number or a schedule.
      b1, b2: decay rates of the moments.
      eps: number that is added to the root of the second moment.

    Returns:
      The transformation. The moments of all rows decay in each step, even of rows without a
      gradient. So for a table on parameter servers, choose `dtrans.Rows(update="dense")` or
      `"lazy"`.

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
        first = optax.tree.bias_correction(mu, b1, count)
        second = optax.tree.bias_correction(nu, b2, count)
        scaled = jax.tree.map(lambda m, v: m / _along_rows(jnp.sqrt(v) + eps, m), first, second)
        return scaled, RowwiseAdamState(count, mu, nu)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate)
    )


def _per_row(leaf: Any, value: float) -> jax.Array:
    return jnp.full(jnp.shape(leaf)[:1], value, leaf.dtype)


def _mean_square(gradient: jax.Array) -> jax.Array:
    """Return the mean square of each row."""
    return jnp.mean(gradient**2, axis=tuple(range(1, gradient.ndim)))


def _along_rows(per_row: jax.Array, leaf: jax.Array) -> jax.Array:
    """Reshape an array of shape (rows,) so that it broadcasts against the leaf."""
    return per_row.reshape(per_row.shape + (1,) * max(0, leaf.ndim - 1))
