"""Base of optimizers that apply one rule to each leaf, as Paddle's optimizer ops do.

A rule is elementwise, and may also compute norms of the leaf. A rule must not reshape the leaf,
because row analysis (`dtrans.rows.analysis`) could not divide such an update into rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from dtrans.errors import ConfigError


Scalar = float | jax.Array
"""Hyperparameter: a number, or a 0-d array, such as `optax.inject_hyperparams` passes."""

LearningRate = Scalar | Callable[[Any], Any]
"""A number, or a schedule: a function of the number of previous updates."""


class LeafStep(NamedTuple):
    """First argument of a rule: the leaf's path, and numbers of this step.

    Attributes:
      path: the leaf's path, e.g. `dense/bias`.
      lr: the learning rate of this step, a Python number or an array of the leaf's dtype.
      powers: beta^t for each beta of the transformation, in update number t.
    """

    path: str
    lr: Any
    powers: Sequence[jax.Array]


def leafwise_optimizer(
    name: str,
    learning_rate: LearningRate,
    state_type: Any,
    rule: Callable[..., tuple[Any, ...]],
    *,
    betas: Sequence[Scalar] = (),
    initial: Scalar = 0.0,
) -> optax.GradientTransformation:
    """Return an optimizer that applies `rule(leaf, grad, param, *accumulators)` to each leaf.

    The rule returns the update and the new accumulators. If the gradient of a leaf is None, its
    update is None, and its accumulators stay unchanged.

    Args:
      name: the optimizer's name, for errors.
      learning_rate: a number or a schedule.
      state_type: a NamedTuple whose fields are the count of updates, the accumulators, and a power
        of each beta. The count is None if the learning rate is a number.
      rule: the update rule.
      betas: numbers whose powers the rule reads. Each update multiplies a power by its beta, as in
        Paddle. In float32, 1 minus this power differs from `1 - beta**t` by a relative 1e-5.
      initial: the initial value of accumulators.

    Returns:
      A transformation whose `update` needs the parameters. Accumulators have the shapes and dtypes
      of the parameters.

    Raises:
      ConfigError: `update` is called without parameters.
    """
    end = len(state_type._fields) - len(betas)

    def init(params: Any) -> Any:
        count = jnp.zeros([], jnp.int32) if callable(learning_rate) else None
        start = lambda p: jnp.full_like(p, initial)
        accumulators = [jax.tree.map(start, params) for _ in state_type._fields[1:end]]
        return state_type(count, *accumulators, *map(_as_real, betas))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ConfigError(f"{name} needs the parameters: update(grads, state, params)")
        count, accumulators, powers = state[0], list(state[1:end]), state[end:]
        lr = learning_rate(count) if callable(learning_rate) else learning_rate
        treedef: Any
        grads, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=lambda x: x is None)
        others = [treedef.flatten_up_to(tree) for tree in (params, *accumulators)]

        def step_leaf(path: Any, g: Any, p: Any, *accs: Any) -> tuple[Any, ...]:
            if g is None:
                return (None, *accs)
            step = LeafStep(path_name(path), cast_scalar(lr, p), powers)
            return rule(step, g.astype(p.dtype), p, *accs)

        # one list for the updates, and one for each accumulator
        columns: list[list[Any]] = [[] for _ in range(1 + len(accumulators))]
        for (path, g), *rest in zip(grads, *others, strict=True):
            for column, x in zip(columns, step_leaf(path, g, *rest), strict=True):
                column.append(x)
        new, *accumulators = map(treedef.unflatten, columns)
        if count is not None:
            count = optax.safe_increment(count)
        powers = [power * _as_real(beta) for power, beta in zip(powers, betas, strict=True)]
        return new, state_type(count, *accumulators, *powers)

    return optax.GradientTransformation(init, update)


def path_name(path: Any) -> str:
    """Return the path of a leaf as text: `dense/bias`."""
    return keystr(path, simple=True, separator="/")


def is_number(x: Any) -> bool:
    """Return True if `x` is a Python number, rather than an array or a schedule."""
    return isinstance(x, (int, float))


def cast_scalar(x: Any, leaf: jax.Array) -> Any:
    """Return `x` as a Python number, or as an array of the leaf's dtype.

    Arithmetic between the leaf and the result keeps the leaf's dtype.
    """
    return float(x) if is_number(x) else jnp.asarray(x, leaf.dtype)


def complement(x: Any, leaf: jax.Array) -> Any:
    """Return 1 - x as Paddle's kernels compute it: x is rounded to float32 first.

    For x = 0.999 the result differs from 0.001 by a relative 5e-5.
    """
    if is_number(x):
        real = jnp.result_type(float).type
        return float(real(1) - real(x))
    return (1 - _as_real(x)).astype(leaf.dtype)


def _as_real(x: Any) -> jax.Array:
    """Return a hyperparameter as an array of JAX's default real type, float32 or float64."""
    return jnp.asarray(x, jnp.result_type(float))


def norm(x: jax.Array) -> jax.Array:
    """Return the Euclidean norm of a leaf, computed in float32 or a wider type."""
    return jnp.sqrt(squared_norm(x))


def squared_norm(x: jax.Array) -> jax.Array:
    """Return the sum of squares of a leaf, computed in float32 or a wider type."""
    return jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
