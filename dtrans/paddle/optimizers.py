"""Optimizers of Paddle that optax lacks: FTRL, decayed Adagrad, and LARS with Paddle's rule.

Each is an ordinary `optax.GradientTransformation` with the update rule, names and defaults of Paddle fluid
(python/paddle/fluid/optimizer.py, and the CPU kernels under paddle/fluid/operators/optimizers/). A rule sees one
leaf at a time and is elementwise, but for two sums over the whole leaf in LARS; nothing is reshaped, so that row
analysis (`dtrans.rows.analysis`) can follow it.

For the rest of Paddle's list use optax: `sgd` (SGD, Momentum), `adam`, `adamax`, `adagrad`, `adadelta`, `rmsprop`,
`lamb`, `lookahead`, `contrib.dpsgd`, `incremental_update` (ExponentialMovingAverage); learning rates by parameter
are `partition`, L2Decay is `chain(add_decayed_weights(c), tx)`, L1Decay a `stateless` that adds c·sign(param) in the
same place. DGC and ModelAverage have no counterpart. Many defaults differ, and in these the rule does too:

                fluid                                      optax
    Adagrad     sqrt(m) + eps, m from 0                    sqrt(m + eps), m from 0.1
    Adamax      max(|g|, beta2·u + eps)                    max(|g| + eps, beta2·u)
    Adam        older kernels: sqrt(v) + eps,              as the newer
                newer: sqrt(v) + eps·sqrt(1 - beta2^t)
    Lamb        older kernels: no bias correction          as the newer, which correct it
    Adadelta    takes no notice of its learning rate       takes it; fluid's is adadelta(1.0, rho=0.95)
    Dpsgd       clips the gradient of the batch            clips those of each example
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
"""A number, or an optax schedule: a function of the number of updates before this one."""


class FtrlState(NamedTuple):
    """State of `ftrl`.

    Attributes:
      count: updates so far, int32; None where the learning rate is no schedule.
      squared_accum: per leaf, the sum of squared gradients.
      linear_accum: per leaf, the sum of gradients, less what the parameters have followed of it.
    """

    count: Any
    squared_accum: Any
    linear_accum: Any


class DecayedAdagradState(NamedTuple):
    """State of `decayed_adagrad`.

    Attributes:
      count: updates so far, int32; None where the learning rate is no schedule.
      moment: per leaf, the moving average of squared gradients.
    """

    count: Any
    moment: Any


class LarsMomentumState(NamedTuple):
    """State of `lars_momentum`.

    Attributes:
      count: updates so far, int32; None where the learning rate is no schedule.
      velocity: per leaf, what the last update took off the parameter.
    """

    count: Any
    velocity: Any


def ftrl(
    learning_rate: LearningRate, l1: Scalar = 0.0, l2: Scalar = 0.0, lr_power: Scalar = -0.5
) -> optax.GradientTransformation:
    """Follow The Regularized Leader (FTRL-Proximal), which drives parameters to exactly zero with `l1`.

        new    = squared + g²
        linear = linear + g - (new^-lr_power - squared^-lr_power) / learning_rate · param
        param  = (l1·sign(linear) - linear) / (new^-lr_power / learning_rate + 2·l2)   where |linear| > l1, else 0

    with 1e-10 added to `l1` and to `l2`. The parameter is set, not moved: an element whose gradient has been zero
    from the start becomes 0, whatever it was. (The update is the difference, so that in floating point what was
    set is met to within a rounding of the old parameter; zeros are met exactly.)

    Args:
      learning_rate: a number or an optax schedule. It divides, so it may not be 0, not even in a warm-up.
      l1: strength of the L1 regularization.
      l2: strength of the L2 regularization.
      lr_power: how the step shrinks as squared gradients add up; -0.5 is the square root, 0 no shrinking.

    Returns:
      A transformation with state `FtrlState`, its accumulators of the shapes and dtypes of the parameters. Its
      `update` needs the parameters.

    Raises:
      ConfigError: a learning rate of 0 or an `lr_power` above 0, with which all becomes NaN; and from `update`
        without parameters.

    Source: `FtrlOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and the dense branch of
    paddle/fluid/operators/optimizers/ftrl_op.h. (The formula in the docstring of the former divides by
    learning_rate · param; the kernel does not.)

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> tx = dtrans.paddle.optimizers.ftrl(0.5, l1=0.25)
      >>> params = jnp.array([1.0, 1.0])
      >>> updates, _ = tx.update(jnp.array([2.0, 0.25]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist()
      [0.4375, 0.0]
    """
    if _is_number(learning_rate) and learning_rate == 0:
        raise ConfigError("ftrl divides by its learning rate: it may not be 0")
    if _is_number(lr_power) and lr_power > 0:
        raise ConfigError(f"lr_power is {lr_power}; above 0 the first step of ftrl is not a number")
    by_sqrt = _is_number(lr_power) and lr_power == -0.5

    def rule(path: str, lr: Any, g: Any, p: Any, squared: Any, linear: Any) -> tuple[Any, ...]:
        lambda1, lambda2 = _of(l1, p) + 1e-10, _of(l2, p) + 1e-10
        power = jnp.sqrt if by_sqrt else lambda x: jnp.power(x, -_of(lr_power, p))
        new = squared + g * g
        linear = linear + g - (power(new) - power(squared)) / lr * p
        x = lambda1 * jnp.sign(linear) - linear
        y = power(new) / lr + 2 * lambda2
        return jnp.where(jnp.abs(linear) > lambda1, x / y, 0) - p, new, linear

    return _transformation("ftrl", learning_rate, FtrlState, rule)


def decayed_adagrad(
    learning_rate: LearningRate, decay: Scalar = 0.95, epsilon: Scalar = 1e-6
) -> optax.GradientTransformation:
    """Adagrad over a moving average of squared gradients.

        moment = decay·moment + (1 - decay)·g²
        param  = param - learning_rate · g / (sqrt(moment) + epsilon)

    To rounding it is `optax.rmsprop(learning_rate, decay, epsilon, eps_in_sqrt=False)`.

    Args:
      learning_rate: a number or an optax schedule.
      decay: how much of the average stays.
      epsilon: added to the root; with 0, an element whose gradients have all been zero becomes NaN.

    Returns:
      A transformation with state `DecayedAdagradState`, the moment of the shapes and dtypes of the parameters.
      Its `update` needs the parameters.

    Raises:
      ConfigError: from `update` without parameters.

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

    def rule(path: str, lr: Any, g: Any, p: Any, moment: Any) -> tuple[Any, ...]:
        rho = _of(decay, p)
        moment = rho * moment + (1 - rho) * g * g
        return -(lr * g / (jnp.sqrt(moment) + _of(epsilon, p))), moment

    return _transformation("decayed_adagrad", learning_rate, DecayedAdagradState, rule)


def lars_momentum(
    learning_rate: LearningRate,
    momentum: Scalar,
    lars_coeff: Scalar = 0.001,
    lars_weight_decay: Scalar = 0.0005,
    exclude_from_weight_decay: Sequence[str] | None = None,
    epsilon: Scalar = 0.0,
    rescale_grad: Scalar = 1.0,
) -> optax.GradientTransformation:
    """Momentum with a learning rate for each leaf, by the norms of the leaf and of its gradient (LARS).

        g        = rescale_grad · g
        local_lr = learning_rate · lars_coeff · ‖param‖ / (‖g‖ + lars_weight_decay·‖param‖ + epsilon)
        velocity = momentum·velocity + local_lr · (g + lars_weight_decay·param)
        param    = param - velocity

    where `local_lr` is `learning_rate` itself if the weight decay is not above 0, or a norm is 0.

    `optax.lars` divides by ‖g + weight_decay·param‖ (+ eps), which is less unless the two point the same way. It
    scales also without weight decay, which is its default, and has two masks where Paddle has one list: a leaf
    excluded here has no weight decay *and* the plain learning rate, that of momentum SGD.

    Args:
      learning_rate: a number or an optax schedule.
      momentum: how much of the velocity stays. Paddle has no default.
      lars_coeff: how far a leaf is trusted to move, as a part of its norm.
      lars_weight_decay: weight decay; instead of another L2 regularization, not with it.
      exclude_from_weight_decay: parts of names. A leaf is excluded if one of them is in its path, e.g. `bias` is in
        `dense/bias`. No norms are taken of excluded leaves.
      epsilon: added to the denominator.
      rescale_grad: multiplies the gradient, often 1 / batch size.

    Returns:
      A transformation with state `LarsMomentumState`, the velocity of the shapes and dtypes of the parameters. Its
      `update` needs the parameters. Norms of leaves of half precision are taken in float32.

    Raises:
      ConfigError: one string for `exclude_from_weight_decay`; and from `update` without parameters.

    Source: `LarsMomentumOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/lars_momentum_op.h. (The later kernels for CUDA do not look whether a norm is
    0, and never move a leaf of zeros; this is the kernel for CPU. The first kernels also scaled without decay.)

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> tx = dtrans.paddle.optimizers.lars_momentum(1.0, 0.9, lars_coeff=0.5, lars_weight_decay=1.0)
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([3.0, -4.0]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist()
      [1.5, 4.0]
    """
    if isinstance(exclude_from_weight_decay, str):
        raise ConfigError(f"exclude_from_weight_decay is a list of names: [{exclude_from_weight_decay!r}]")
    excluded = tuple(exclude_from_weight_decay or ())

    def rule(path: str, lr: Any, g: Any, p: Any, velocity: Any) -> tuple[Any, ...]:
        decay = 0.0 if any(name in path for name in excluded) else _of(lars_weight_decay, p)
        g = _of(rescale_grad, p) * g
        local_lr = lr
        if not _is_number(decay) or decay > 0:
            p_norm, g_norm = _norm(p), _norm(g)
            scales = (decay > 0) & (p_norm > 0) & (g_norm > 0)
            by = jnp.where(scales, g_norm + decay * p_norm + _of(epsilon, p_norm), 1)
            local_lr = lr * jnp.where(scales, _of(lars_coeff, p_norm) * p_norm / by, 1).astype(p.dtype)
        velocity = _of(momentum, p) * velocity + local_lr * (g + decay * p)
        return -velocity, velocity

    return _transformation("lars_momentum", learning_rate, LarsMomentumState, rule)


# -- what they share -------------------------------------------------------------------------------


def _transformation(
    name: str, learning_rate: LearningRate, state_type: Any, rule: Callable[..., tuple[Any, ...]]
) -> optax.GradientTransformation:
    """The transformation that applies `rule(path, lr, grad, param, *accumulators)` to each leaf.

    The rule returns the update and the new accumulators; `state_type` has the count and the accumulators. A leaf
    whose gradient is None has the update None, and keeps its accumulators.
    """

    def init(params: Any) -> Any:
        count = jnp.zeros([], jnp.int32) if callable(learning_rate) else None
        return state_type(count, *(jax.tree.map(jnp.zeros_like, params) for _ in state_type._fields[1:]))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ConfigError(f"{name} needs the parameters: update(grads, state, params)")
        count, *accumulators = state
        lr = learning_rate(count) if callable(learning_rate) else learning_rate
        treedef: Any
        grads, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=lambda x: x is None)
        others = [treedef.flatten_up_to(tree) for tree in (params, *accumulators)]

        def leaf(path: Any, g: Any, p: Any, *accs: Any) -> tuple[Any, ...]:
            if g is None:
                return (None, *accs)
            return rule(keystr(path, simple=True, separator="/"), _of(lr, p), g.astype(p.dtype), p, *accs)

        rows = [leaf(path, g, *rest) for (path, g), *rest in zip(grads, *others, strict=True)]
        new, *accumulators = ([row[i] for row in rows] for i in range(1 + len(accumulators)))
        count = None if count is None else optax.safe_increment(count)
        return treedef.unflatten(new), state_type(count, *(treedef.unflatten(a) for a in accumulators))

    return optax.GradientTransformation(init, update)


def _is_number(x: Any) -> bool:
    """Whether `x` is known now: a Python number rather than an array or a schedule."""
    return isinstance(x, (int, float))


def _of(x: Any, leaf: jax.Array) -> Any:
    """`x` such that it does not change the dtype of what it meets: a Python number, or of the leaf's dtype."""
    return float(x) if _is_number(x) else jnp.asarray(x, leaf.dtype)


def _norm(x: jax.Array) -> jax.Array:
    """The Euclidean norm of a whole leaf, in float32 at least."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))))
