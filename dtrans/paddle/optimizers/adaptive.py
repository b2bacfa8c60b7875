"""Paddle's optimizers that scale by squared gradients: Adagrad, Adadelta, RMSProp and others."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from dtrans.errors import ConfigError
from dtrans.paddle.optimizers.leafwise import (
    LeafStep,
    LearningRate,
    Scalar,
    cast_scalar,
    complement,
    is_number,
    leafwise_optimizer,
)


class AdagradState(NamedTuple):
    """State of `adagrad`.

    Attributes:
      count: number of updates so far, int32, if the learning rate is a schedule; else None.
      moment: per leaf, the sum of squared gradients.
    """

    count: Any
    moment: Any


class DecayedAdagradState(NamedTuple):
    """State of `decayed_adagrad`.

    Attributes:
      count: number of updates so far, int32, if the learning rate is a schedule; else None.
      moment: per leaf, the moving average of squared gradients.
    """

    count: Any
    moment: Any


class AdadeltaState(NamedTuple):
    """State of `adadelta`.

    Attributes:
      count: number of updates so far, int32, if the learning rate is a schedule; else None.
      avg_squared_grad: per leaf, the moving average of squared gradients.
      avg_squared_update: per leaf, the moving average of squares of `first` (see `adadelta`).
    """

    count: Any
    avg_squared_grad: Any
    avg_squared_update: Any


class FtrlState(NamedTuple):
    """State of `ftrl`.

    Attributes:
      count: number of updates so far, int32, if the learning rate is a schedule; else None.
      squared_accum: per leaf, the sum of squared gradients.
      linear_accum: per leaf, `linear` in the formula of `ftrl`.
    """

    count: Any
    squared_accum: Any
    linear_accum: Any


def adagrad(
    learning_rate: LearningRate, epsilon: Scalar = 1e-6, initial_accumulator_value: Scalar = 0.0
) -> optax.GradientTransformation:
    """Return Adagrad, with epsilon added outside the root.

        moment = moment + g²
        param  = param - learning_rate · g / (sqrt(moment) + epsilon)

    This is the paper's rule too. `optax.adagrad` has epsilon inside the root, and starts the moment
    at 0.1.

    Args:
      learning_rate: a number or a schedule.
      epsilon: added to the root; with 0, an element whose gradients have all been zero becomes NaN.
      initial_accumulator_value: the initial moment.

    Returns:
      A transformation with state `AdagradState`, whose moment has the shapes and dtypes of the
      parameters. Its `update` needs the parameters.

    Raises:
      ConfigError: `update` is called without parameters.

    Source: `AdagradOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/adagrad_op.h. Paper: Duchi et al., Adaptive Subgradient
    Methods, 2011.

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> tx = dtrans.paddle.optimizers.adagrad(1.0, epsilon=1.0)
      >>> params = jnp.array([1.0, 1.0])
      >>> updates, _ = tx.update(jnp.array([1.0, -3.0]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist()
      [0.5, 1.75]
    """

    def rule(leaf: LeafStep, g: Any, p: Any, moment: Any) -> tuple[Any, ...]:
        moment = moment + g * g
        return -(leaf.lr * g / (jnp.sqrt(moment) + cast_scalar(epsilon, p))), moment

    return leafwise_optimizer(
        "adagrad", learning_rate, AdagradState, rule, initial=initial_accumulator_value
    )


def decayed_adagrad(
    learning_rate: LearningRate, decay: Scalar = 0.95, epsilon: Scalar = 1e-6
) -> optax.GradientTransformation:
    """Return Adagrad with a moving average of squared gradients instead of their sum.

        moment = decay·moment + (1 - decay)·g²
        param  = param - learning_rate · g / (sqrt(moment) + epsilon)

    Up to rounding, it is `optax.rmsprop(learning_rate, decay, epsilon, eps_in_sqrt=False)`.

    Args:
      learning_rate: a number or a schedule.
      decay: decay rate of the average.
      epsilon: added to the root; with 0, an element whose gradients have all been zero becomes NaN.

    Returns:
      A transformation with state `DecayedAdagradState`, whose moment has the shapes and dtypes of
      the parameters. Its `update` needs the parameters.

    Raises:
      ConfigError: `update` is called without parameters.

    Source: `DecayedAdagradOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/decayed_adagrad_op.h.

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> tx = dtrans.paddle.optimizers.decayed_adagrad(1.0, decay=0.75, epsilon=0.5)
      >>> params = jnp.array([1.0, 1.0])
      >>> updates, state = tx.update(jnp.array([1.0, 0.0]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist(), state.moment.tolist()
      ([0.0, 1.0], [0.25, 0.0])
    """

    def rule(leaf: LeafStep, g: Any, p: Any, moment: Any) -> tuple[Any, ...]:
        moment = cast_scalar(decay, p) * moment + complement(decay, p) * g * g
        return -(leaf.lr * g / (jnp.sqrt(moment) + cast_scalar(epsilon, p))), moment

    return leafwise_optimizer("decayed_adagrad", learning_rate, DecayedAdagradState, rule)


def adadelta(
    learning_rate: LearningRate, epsilon: Scalar = 1e-6, rho: Scalar = 0.95, fix: bool = False
) -> optax.GradientTransformation:
    """Return Adadelta as Paddle's kernel computes it, which deviates from the paper.

        avg_squared_grad   = rho·avg_squared_grad + (1 - rho)·g²
        ratio              = (avg_squared_update + epsilon) / (avg_squared_grad + epsilon)
        first              = -sqrt(ratio) · g
        avg_squared_update = rho·avg_squared_update + (1 - rho)·first²
        new_ratio          = (avg_squared_update + epsilon) / (avg_squared_grad + epsilon)
        param              = param - sqrt(new_ratio) · g

    Defects of the kernel:

    - The paper adds `first` to the parameter. The kernel computes another update, from the new
      average of squared updates.
    - The kernel ignores the learning rate.

    Args:
      learning_rate: a number or a schedule; used with `fix` only. Paddle has no default; the
        paper's value is 1.
      epsilon: added to both averages.
      rho: decay rate of the averages.
      fix: True for the paper's rule, times the learning rate: `optax.adadelta(learning_rate, rho,
        epsilon)`.

    Returns:
      A transformation with state `AdadeltaState`, whose averages have the shapes and dtypes of the
      parameters. (With `fix` it has optax's state.) Its `update` needs the parameters.

    Raises:
      ConfigError: `update` is called without parameters.

    Source: `AdadeltaOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/adadelta_op.h. Paper: Zeiler, ADADELTA, 2012.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> params, g = jnp.zeros(1), jnp.ones(1)
      >>> for fix in (False, True):
      ...     tx = dtrans.paddle.optimizers.adadelta(1.0, epsilon=1.0, rho=0.0, fix=fix)
      ...     print(f"{tx.update(g, tx.init(params), params)[0][0]:.4f}")
      -0.8660
      -0.7071
    """
    if fix:
        return optax.adadelta(learning_rate, rho, epsilon)

    def rule(leaf: LeafStep, g: Any, p: Any, grads: Any, updates: Any) -> tuple[Any, ...]:
        eps, stays, enters = cast_scalar(epsilon, p), cast_scalar(rho, p), complement(rho, p)
        grads = stays * grads + enters * g * g
        step = lambda updates: -(jnp.sqrt((updates + eps) / (grads + eps)) * g)
        updates = stays * updates + enters * jnp.square(step(updates))
        return step(updates), grads, updates

    return leafwise_optimizer("adadelta", learning_rate, AdadeltaState, rule)


def rmsprop(
    learning_rate: LearningRate,
    rho: Scalar = 0.95,
    epsilon: Scalar = 1e-6,
    momentum: Scalar = 0.0,
    centered: bool = False,
) -> optax.GradientTransformation:
    """Return RMSProp, with epsilon inside the root: `optax.rmsprop` with Paddle's defaults.

        mean_square = rho·mean_square + (1 - rho)·g²
        mean_grad   = rho·mean_grad + (1 - rho)·g                       with `centered`, else 0
        variance    = mean_square - mean_grad²
        velocity    = momentum·velocity + learning_rate · g / sqrt(variance + epsilon)
        param       = param - velocity

    Args:
      learning_rate: a number or a schedule.
      rho: decay rate of the averages.
      epsilon: added under the root.
      momentum: decay rate of the velocity.
      centered: True divides by the root of the variance; False by the root of the mean square.

    Returns:
      A transformation. Its `update` does not need the parameters.

    Source: `RMSPropOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/rmsprop_op.h. Centred: Graves, Generating Sequences, 2013.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> tx = dtrans.paddle.optimizers.rmsprop(1.0, rho=0.75, epsilon=0.0)
      >>> tx.update(jnp.array([3.0, -4.0]), tx.init(jnp.zeros(2)))[0].tolist()
      [-2.0, 2.0]
    """
    trace = None if is_number(momentum) and momentum == 0 else momentum
    return optax.rmsprop(learning_rate, rho, epsilon, centered=centered, momentum=trace)


def ftrl(
    learning_rate: LearningRate,
    l1: Scalar = 0.0,
    l2: Scalar = 0.0,
    lr_power: Scalar = -0.5,
    fix: bool = False,
) -> optax.GradientTransformation:
    """Return FTRL-Proximal (Follow The Regularized Leader): `l1` sets small parameters to zero.

        new    = squared + g²
        linear = linear + g - (new^-lr_power - squared^-lr_power) / learning_rate · param
        scale  = new^-lr_power / learning_rate + 2·l2
        param  = (l1·sign(linear) - linear) / scale    if |linear| > l1, else 0

    with 1e-10 added to `l1` and to `l2`. The new parameter does not depend on the old one. In
    particular, an element becomes 0 if all its gradients have been zero. Since optax adds an update
    to the old parameter, the result has the rounding error of this sum; zeros are exact.

    Defect: Paddle passes `l1` to the kernel in place of `l2`, so the user's `l2` has no effect.

    Args:
      learning_rate: a number or a schedule. The formula divides by it, so it must never be 0, not
        even in a warm-up.
      l1: strength of the L1 regularization.
      l2: strength of the L2 regularization; used with `fix` only.
      lr_power: the step is multiplied by the sum of squared gradients to this power. -0.5 divides
        by the sum's square root, and 0 does not scale the step.
      fix: True for the formula with the user's `l2`. It is the paper's rule with lambda2 = 2·l2 and
        beta = 0.

    Returns:
      A transformation with state `FtrlState`, whose accumulators have the shapes and dtypes of the
      parameters. Its `update` needs the parameters.

    Raises:
      ConfigError: the learning rate is 0 or `lr_power` is above 0, which would yield NaN. Also
        raised if `update` is called without parameters.

    Source: `FtrlOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and the dense branch of
    paddle/fluid/operators/optimizers/ftrl_op.h. (The docstring of `FtrlOptimizer` divides by
    learning_rate · param; the kernel does not.) Paper: McMahan et al., Ad Click Prediction, 2013.

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> params, g = jnp.array([2.0, 1.0]), jnp.array([1.0, 0.25])
      >>> for fix in (False, True):
      ...     tx = dtrans.paddle.optimizers.ftrl(0.5, l1=1.0, l2=0.0, fix=fix)
      ...     updates, _ = tx.update(g, tx.init(params), params)
      ...     print(optax.apply_updates(params, updates).tolist())
      [0.5, 0.0]
      [1.0, 0.0]
    """
    if is_number(learning_rate) and learning_rate == 0:
        raise ConfigError(
            "the learning rate of ftrl is 0; pass a positive one, since ftrl divides by it"
        )
    if is_number(lr_power) and lr_power > 0:
        raise ConfigError(f"lr_power is {lr_power}; pass 0 or less, otherwise ftrl yields NaN")
    by_sqrt = is_number(lr_power) and lr_power == -0.5
    strength2 = l2 if fix else l1

    def rule(leaf: LeafStep, g: Any, p: Any, squared: Any, linear: Any) -> tuple[Any, ...]:
        lambda1, lambda2 = cast_scalar(l1, p) + 1e-10, cast_scalar(strength2, p) + 1e-10
        power = jnp.sqrt if by_sqrt else lambda x: jnp.power(x, -cast_scalar(lr_power, p))
        new = squared + g * g
        linear = linear + g - (power(new) - power(squared)) / leaf.lr * p
        shrunk = lambda1 * jnp.sign(linear) - linear
        scale = power(new) / leaf.lr + 2 * lambda2
        return jnp.where(jnp.abs(linear) > lambda1, shrunk / scale, 0) - p, new, linear

    return leafwise_optimizer("ftrl", learning_rate, FtrlState, rule)
