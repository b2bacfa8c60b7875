"""A transformation that applies one rule to each leaf, as Paddle has one optimizer op for each
parameter.

A rule sees one leaf at a time and is elementwise, but for norms of the whole leaf; nothing is
reshaped, so that row analysis (`dtrans.rows.analysis`) can follow it.
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
"""A hyperparameter: a number, or a 0-d array (as `optax.inject_hyperparams` makes them)."""

LearningRate = Scalar | Callable[[Any], Any]
"""A number, or a schedule: a function of the number of updates before this one."""


class LeafStep(NamedTuple):
    """What a rule knows of its leaf and step.

    Attributes:
      path: the leaf's path, e.g. `dense/bias`.
      lr: the learning rate of this step, such that it does not change the leaf's dtype.
      powers: the powers of the transformation's betas, beta^t in update number t.
    """

    path: str
    lr: Any
    powers: Sequence[jax.Array]


def transformation(
    name: str,
    learning_rate: LearningRate,
    state_type: Any,
    rule: Callable[..., tuple[Any, ...]],
    *,
    betas: Sequence[Scalar] = (),
    initial: Scalar = 0.0,
) -> optax.GradientTransformation:
    """Make the transformation that applies `rule(leaf, grad, param, *accumulators)` to each leaf.

    The rule returns the update and the new accumulators. A leaf whose gradient is None has the
    update None, and keeps its accumulators.

    Args:
      name: the optimizer's name, for errors.
      learning_rate: a number or a schedule.
      state_type: a NamedTuple of the count of updates, the accumulators and the powers of the
        betas. The count is None where the learning rate is no schedule.
      rule: the update rule.
      betas: numbers of whose powers the rule reads. They are multiplied step by step, as Paddle's
        are: 1 - beta^t of a beta near 1 tells in float32 how the power was computed, by 1e-5 of it.
      initial: what accumulators start with.

    Returns:
      A transformation whose `update` needs the parameters. Accumulators have the shapes and dtypes
      of the parameters.

    Raises:
      ConfigError: from `update` without parameters.
    """
    end = len(state_type._fields) - len(betas)

    def init(params: Any) -> Any:
        count = jnp.zeros([], jnp.int32) if callable(learning_rate) else None
        start = lambda p: jnp.full_like(p, initial)
        accumulators = [jax.tree.map(start, params) for _ in state_type._fields[1:end]]
        return state_type(count, *accumulators, *map(_real, betas))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ConfigError(f"{name} needs the parameters: update(grads, state, params)")
        count, accumulators, powers = state[0], list(state[1:end]), state[end:]
        lr = learning_rate(count) if callable(learning_rate) else learning_rate
        treedef: Any
        grads, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=lambda x: x is None)
        others = [treedef.flatten_up_to(tree) for tree in (params, *accumulators)]

        def one(path: Any, g: Any, p: Any, *accs: Any) -> tuple[Any, ...]:
            if g is None:
                return (None, *accs)
            return rule(LeafStep(path_name(path), of(lr, p), powers), g.astype(p.dtype), p, *accs)

        rows = [one(path, g, *rest) for (path, g), *rest in zip(grads, *others, strict=True)]
        new, *accumulators = ([row[i] for row in rows] for i in range(1 + len(accumulators)))
        count = None if count is None else optax.safe_increment(count)
        powers = [power * _real(beta) for power, beta in zip(powers, betas, strict=True)]
        return treedef.unflatten(new), state_type(
            count, *map(treedef.unflatten, accumulators), *powers
        )

    return optax.GradientTransformation(init, update)


def path_name(path: Any) -> str:
    """The path of a leaf as text: `dense/bias`."""
    return keystr(path, simple=True, separator="/")


def is_number(x: Any) -> bool:
    """Whether `x` is known now: a Python number rather than an array or a schedule."""
    return isinstance(x, (int, float))


def of(x: Any, leaf: jax.Array) -> Any:
    """`x` such that it does not change the dtype of what it meets: a Python number, or of the
    leaf's dtype."""
    return float(x) if is_number(x) else jnp.asarray(x, leaf.dtype)


def complement(x: Any, leaf: jax.Array) -> Any:
    """1 - x as the kernel has it: of the rounded x. In float32 that of 0.999 differs from 0.001 by
    5e-5 of it."""
    if is_number(x):
        real = jnp.result_type(float).type
        return float(real(1) - real(x))
    return (1 - _real(x)).astype(leaf.dtype)


def _real(x: Any) -> jax.Array:
    """A hyperparameter whose rounding matters, in float32, or float64 where JAX has 64 bits
    enabled."""
    return jnp.asarray(x, jnp.result_type(float))


def norm(x: jax.Array) -> jax.Array:
    """The Euclidean norm of a whole leaf, in float32 at least."""
    return jnp.sqrt(squared_norm(x))


def squared_norm(x: jax.Array) -> jax.Array:
    """The sum of squares of a whole leaf, in float32 at least."""
    return jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
