"""Paddle's Adam, AdamW, Adamax and Lamb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dtrans.paddle.optimizers.leafwise import (
    LeafStep,
    LearningRate,
    Scalar,
    cast_scalar,
    complement,
    leafwise_optimizer,
    norm,
    path_name,
)


class AdamState(NamedTuple):
    """State of `adam`.

    Attributes:
      count: number of updates so far, int32, if the learning rate is a schedule; else None.
      moment1: per leaf, the moving average of gradients.
      moment2: per leaf, the moving average of squared gradients.
      beta1_pow: beta1^t, where t is the number of the next update; one scalar for all leaves.
      beta2_pow: beta2^t; one scalar for all leaves.
    """

    count: Any
    moment1: Any
    moment2: Any
    beta1_pow: Any
    beta2_pow: Any


class LambState(NamedTuple):
    """State of `lamb`.

    Attributes:
      count: number of updates so far, int32, if the learning rate is a schedule; else None.
      moment1: per leaf, the moving average of gradients.
      moment2: per leaf, the moving average of squared gradients.
    """

    count: Any
    moment1: Any
    moment2: Any


class AdamaxState(NamedTuple):
    """State of `adamax`.

    Attributes:
      count: number of updates so far, int32, if the learning rate is a schedule; else None.
      moment: per leaf, the moving average of gradients.
      inf_norm: per leaf, the decayed maximum of absolute gradients.
      beta1_pow: beta1^t, where t is the number of the next update; one scalar for all leaves.
    """

    count: Any
    moment: Any
    inf_norm: Any
    beta1_pow: Any


def adam(
    learning_rate: LearningRate = 0.001,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
    fix: bool = False,
) -> optax.GradientTransformation:
    """Return Adam, with epsilon added to the root before the bias correction.

        moment1 = beta1·moment1 + (1 - beta1)·g
        moment2 = beta2·moment2 + (1 - beta2)·g²
        lr      = learning_rate · sqrt(1 - beta2^t) / (1 - beta1^t)
        param   = param - lr · moment1 / (sqrt(moment2) + epsilon)

    in update number t. Defect: the paper adds epsilon to the corrected root,
    sqrt(moment2 / (1 - beta2^t)). With the default beta2, epsilon is effectively 32 times larger in
    the first update; the factor falls to 1 later. (The paper also has Paddle's form, but with an
    epsilon that changes with t. Paddle 2 uses the paper's rule.)

    Paddle's `lazy_mode` has no counterpart here: it is for sparse gradients. See
    `dtrans.paddle.Embedding`.

    Args:
      learning_rate: a number or a schedule.
      beta1: decay rate of the first moment.
      beta2: decay rate of the second moment.
      epsilon: added to the root.
      fix: True for the paper's rule: `optax.adam(learning_rate, beta1, beta2, epsilon)`.

    Returns:
      A transformation with state `AdamState`, whose moments have the shapes and dtypes of the
      parameters. (With `fix` it has optax's state.) Its `update` needs the parameters.

    Raises:
      ConfigError: `update` is called without parameters.

    Source: `AdamOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/adam_op.h. Paper: Kingma and Ba, Adam, 2015.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> params, g = jnp.zeros(1), jnp.ones(1)
      >>> for fix in (False, True):
      ...     tx = dtrans.paddle.optimizers.adam(1.0, beta1=0.0, beta2=0.75, epsilon=0.5, fix=fix)
      ...     print(f"{tx.update(g, tx.init(params), params)[0][0]:.4f}")
      -0.5000
      -0.6667
    """
    if fix:
        return optax.adam(learning_rate, beta1, beta2, epsilon)

    def rule(leaf: LeafStep, g: Any, p: Any, moment1: Any, moment2: Any) -> tuple[Any, ...]:
        moment1, moment2 = _moments(g, p, moment1, moment2, beta1, beta2)
        beta1_pow, beta2_pow = leaf.powers
        lr = leaf.lr * (jnp.sqrt(1 - beta2_pow) / (1 - beta1_pow)).astype(p.dtype)
        return -(lr * (moment1 / (jnp.sqrt(moment2) + cast_scalar(epsilon, p)))), moment1, moment2

    return leafwise_optimizer("adam", learning_rate, AdamState, rule, betas=(beta1, beta2))


def adamw(
    learning_rate: LearningRate = 0.001,
    weight_decay: Scalar = 0.01,
    apply_decay_param_fun: Callable[[str], bool] | None = None,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
    fix: bool = False,
) -> optax.GradientTransformation:
    """Return Adam with decoupled weight decay, as Paddle 1.8 computes it.

        param = param - weight_decay·param - (the step of `adam`)

    Defects: the decay is not multiplied by the learning rate, so a schedule does not reduce it.
    Epsilon is added as in `adam`.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: the fraction of a parameter that each step subtracts, independent of the
        learning rate. (Paddle 1.8 has no default, and fails with 0.)
      apply_decay_param_fun: a function of a leaf's path, e.g. `dense/bias`: True for leaves that
        decay. None: all leaves decay.
      beta1: decay rate of the first moment.
      beta2: decay rate of the second moment.
      epsilon: added to the root.
      fix: True for `optax.adamw`: decay times the learning rate, and the paper's Adam.

    Returns:
      A transformation. Its `update` needs the parameters.

    Raises:
      ConfigError: `update` is called without parameters. (With `fix`, optax raises ValueError.)

    Source: `extend_with_decoupled_weight_decay(AdamOptimizer)` of Paddle's
    python/paddle/fluid/contrib/extend_optimizer/extend_optimizer_with_weight_decay.py. Paper:
    Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> params, g = jnp.ones(1), jnp.zeros(1)
      >>> for fix in (False, True):
      ...     tx = dtrans.paddle.optimizers.adamw(0.5, weight_decay=0.25, fix=fix)
      ...     print(tx.update(g, tx.init(params), params)[0].tolist())
      [-0.25]
      [-0.125]
    """

    def decay_mask(params: Any) -> Any:
        fun = apply_decay_param_fun or (lambda path: True)
        return jax.tree_util.tree_map_with_path(lambda path, p: fun(path_name(path)), params)

    if fix:
        return optax.adamw(
            learning_rate, beta1, beta2, epsilon, weight_decay=weight_decay, mask=decay_mask
        )

    # In this order the decay is not an input of Adam, which reads gradients only.
    return optax.chain(
        adam(learning_rate, beta1, beta2, epsilon),
        optax.add_decayed_weights(-weight_decay, mask=decay_mask),
    )


def adamax(
    learning_rate: LearningRate = 0.001,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
    fix: bool = False,
) -> optax.GradientTransformation:
    """Return Adamax, with epsilon added to the decayed maximum.

        moment   = beta1·moment + (1 - beta1)·g
        inf_norm = max(|g|, beta2·inf_norm + epsilon)
        param    = param - learning_rate / (1 - beta1^t) · moment / inf_norm

    in update number t. Defect: as long as |g| is below the maximum, each update adds epsilon to
    it. The sum approaches epsilon / (1 - beta2), which is 1000 · epsilon with the default beta2.
    The paper has no epsilon.

    Args:
      learning_rate: a number or a schedule.
      beta1: decay rate of the moment.
      beta2: decay rate of the maximum.
      epsilon: keeps the maximum above 0.
      fix: True for `optax.adamax`: the paper's rule, with epsilon added to |g|.

    Returns:
      A transformation with state `AdamaxState`, whose accumulators have the shapes and dtypes of
      the parameters. (With `fix` it has optax's state.) Its `update` needs the parameters.

    Raises:
      ConfigError: `update` is called without parameters.

    Source: `AdamaxOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/adamax_op.h. Paper: Kingma and Ba, Adam, 2015, section 7.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> params, g = jnp.zeros(1), jnp.ones(1)
      >>> for fix in (False, True):
      ...     tx = dtrans.paddle.optimizers.adamax(1.0, beta1=0.0, beta2=0.5, epsilon=1.0, fix=fix)
      ...     print(tx.update(g, tx.init(params), params)[0].tolist())
      [-1.0]
      [-0.5]
    """
    if fix:
        return optax.adamax(learning_rate, beta1, beta2, epsilon)

    def rule(leaf: LeafStep, g: Any, p: Any, moment: Any, inf_norm: Any) -> tuple[Any, ...]:
        moment = cast_scalar(beta1, p) * moment + complement(beta1, p) * g
        inf_norm = jnp.maximum(
            jnp.abs(g), cast_scalar(beta2, p) * inf_norm + cast_scalar(epsilon, p)
        )
        lr = leaf.lr / (1 - leaf.powers[0]).astype(p.dtype)
        return -(lr * (moment / inf_norm)), moment, inf_norm

    return leafwise_optimizer("adamax", learning_rate, AdamaxState, rule, betas=(beta1,))


def lamb(
    learning_rate: LearningRate = 0.001,
    lamb_weight_decay: Scalar = 0.01,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-6,
    exclude_from_weight_decay_fn: Callable[[str], bool] | None = None,
    fix: bool = False,
) -> optax.GradientTransformation:
    """Return LAMB without bias correction: Adam's step, scaled to the norm of the leaf.

        moment1 = beta1·moment1 + (1 - beta1)·g
        moment2 = beta2·moment2 + (1 - beta2)·g²
        step    = moment1 / (sqrt(moment2) + epsilon) + weight_decay·param
        param   = param - learning_rate · ‖param‖ / ‖step‖ · step

    where ‖param‖ / ‖step‖ is replaced by 1 if a norm is 0. Defect: the moments are not corrected
    for bias. With the default betas, the first step is 3 times too large relative to weight decay
    and epsilon.

    Args:
      learning_rate: a number or a schedule.
      lamb_weight_decay: weight decay.
      beta1: decay rate of the first moment.
      beta2: decay rate of the second moment.
      epsilon: added to the root.
      exclude_from_weight_decay_fn: a function of a leaf's path, e.g. `dense/bias`: True for leaves
        without weight decay, whose steps are also scaled. None: all leaves decay.
      fix: True for `optax.lamb`: the paper's rule, with corrected moments.

    Returns:
      A transformation with state `LambState`, whose moments have the shapes and dtypes of the
      parameters. (With `fix` it has optax's state.) Its `update` needs the parameters. Norms of
      half-precision leaves are computed in float32.

    Raises:
      ConfigError: `update` is called without parameters. (With `fix`, optax raises ValueError.)

    Source: `LambOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/lamb_op.h. Paper: You et al., Large Batch Optimization for
    Deep Learning, 2020.

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> lamb = dtrans.paddle.optimizers.lamb
      >>> tx = lamb(0.5, lamb_weight_decay=0.0, beta1=0.0, beta2=0.75, epsilon=0.0)
      >>> params = jnp.array([3.0, 4.0, 0.0, 0.0])
      >>> updates, _ = tx.update(jnp.array([1.0, 1.0, -1.0, 1.0]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist()
      [1.75, 2.75, 1.25, -1.25]
    """
    excluded = exclude_from_weight_decay_fn or (lambda path: False)
    if fix:
        is_decayed = lambda path, p: not excluded(path_name(path))
        mask = lambda params: jax.tree_util.tree_map_with_path(is_decayed, params)
        return optax.lamb(
            learning_rate, beta1, beta2, epsilon, weight_decay=lamb_weight_decay, mask=mask
        )

    def rule(leaf: LeafStep, g: Any, p: Any, moment1: Any, moment2: Any) -> tuple[Any, ...]:
        moment1, moment2 = _moments(g, p, moment1, moment2, beta1, beta2)
        step = moment1 / (jnp.sqrt(moment2) + cast_scalar(epsilon, p))
        if not excluded(leaf.path):
            step = step + cast_scalar(lamb_weight_decay, p) * p
        p_norm, step_norm = norm(p), norm(step)
        scales = (p_norm > 0) & (step_norm > 0)
        ratio = jnp.where(scales, p_norm / jnp.where(scales, step_norm, 1), 1).astype(p.dtype)
        return -(leaf.lr * ratio * step), moment1, moment2

    return leafwise_optimizer("lamb", learning_rate, LambState, rule)


def _moments(
    g: Any, p: Any, moment1: Any, moment2: Any, beta1: Scalar, beta2: Scalar
) -> tuple[Any, Any]:
    """Return the new moving averages of gradients and of their squares."""
    moment1 = cast_scalar(beta1, p) * moment1 + complement(beta1, p) * g
    return moment1, cast_scalar(beta2, p) * moment2 + complement(beta2, p) * g * g
