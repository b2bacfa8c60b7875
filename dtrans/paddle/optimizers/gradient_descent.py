"""Paddle's SGD, Momentum, LarsMomentum and Dpsgd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dtrans.errors import ConfigError
from dtrans.paddle.optimizers.clips import gradient_clip_by_global_norm, gradient_clip_by_norm
from dtrans.paddle.optimizers.leafwise import (
    LeafStep,
    LearningRate,
    Scalar,
    cast_scalar,
    leafwise_optimizer,
    norm,
)


class LarsMomentumState(NamedTuple):
    """State of `lars_momentum`.

    Attributes:
      count: number of updates so far, int32, if the learning rate is a schedule; else None.
      velocity: per leaf, the amount that the last update subtracted from the parameter.
    """

    count: Any
    velocity: Any


class NoiseState(NamedTuple):
    """State of the noise in `dpsgd`.

    Attributes:
      key: the random key for the next update.
    """

    key: jax.Array


def sgd(learning_rate: LearningRate) -> optax.GradientTransformation:
    """Return stochastic gradient descent, `param - learning_rate · g`: `optax.sgd`.

    Args:
      learning_rate: a number or a schedule.

    Returns:
      A transformation. Its `update` does not need the parameters.

    Source: `SGDOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/sgd_op.h.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> tx = dtrans.paddle.optimizers.sgd(0.5)
      >>> tx.update(jnp.array([1.0, -2.0]), tx.init(jnp.zeros(2)))[0].tolist()
      [-0.5, 1.0]
    """
    return optax.sgd(learning_rate)


def momentum(
    learning_rate: LearningRate, momentum: Scalar, use_nesterov: bool = False
) -> optax.GradientTransformation:
    """Return gradient descent with momentum: `optax.sgd` with momentum.

        velocity = momentum·velocity + g
        param    = param - learning_rate · velocity
        param    = param - learning_rate · (g + momentum·velocity)     with `use_nesterov`

    Args:
      learning_rate: a number or a schedule.
      momentum: decay rate of the velocity. Paddle has no default.
      use_nesterov: True for Nesterov's momentum, the last line of the formula.

    Returns:
      A transformation. Its `update` does not need the parameters.

    Source: `MomentumOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/momentum_op.h.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> tx = dtrans.paddle.optimizers.momentum(1.0, 0.5, use_nesterov=True)
      >>> tx.update(jnp.array([1.0, -2.0]), tx.init(jnp.zeros(2)))[0].tolist()
      [-1.5, 3.0]
    """
    return optax.sgd(learning_rate, momentum=momentum, nesterov=use_nesterov)


def lars_momentum(
    learning_rate: LearningRate,
    momentum: Scalar,
    lars_coeff: Scalar = 0.001,
    lars_weight_decay: Scalar = 0.0005,
    exclude_from_weight_decay: Sequence[str] | None = None,
    epsilon: Scalar = 0.0,
    rescale_grad: Scalar = 1.0,
) -> optax.GradientTransformation:
    """Return momentum with a learning rate for each leaf, computed from the leaf's norms (LARS).

        g        = rescale_grad · g
        norms    = ‖g‖ + lars_weight_decay·‖param‖ + epsilon
        local_lr = learning_rate · lars_coeff · ‖param‖ / norms
        velocity = momentum·velocity + local_lr · (g + lars_weight_decay·param)
        param    = param - velocity

    where `local_lr` is `learning_rate` if ‖g‖ or ‖param‖ is 0. This is also the paper's rule.

    `optax.lars` divides by ‖g + weight_decay·param‖ (+ eps). This norm is smaller, unless g and
    param have the same direction.

    The last three arguments come from Paddle 2; their defaults give the rule of Paddle 1.8. (Paddle
    2 scales only leaves with a weight decay above 0. Other leaves have the plain learning rate, as
    excluded leaves have here.)

    Args:
      learning_rate: a number or a schedule.
      momentum: decay rate of the velocity. Paddle has no default.
      lars_coeff: the trust coefficient: the size of a step relative to the norm of the leaf.
      lars_weight_decay: weight decay; do not add another L2 regularization.
      exclude_from_weight_decay: substrings of paths, such as `bias` in `dense/bias`. A leaf whose
        path contains one of them has no weight decay, and the plain learning rate.
      epsilon: added to the denominator.
      rescale_grad: a factor of the gradient, often 1 / batch size.

    Returns:
      A transformation with state `LarsMomentumState`, whose velocity has the shapes and dtypes of
      the parameters. Its `update` needs the parameters. Norms of half-precision leaves are computed
      in float32.

    Raises:
      ConfigError: `exclude_from_weight_decay` is a string, or `update` is called without
        parameters.

    Source: `LarsMomentumOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/lars_momentum_op.h. Paper: You et al., Large Batch Training of
    Convolutional Networks, 2017.

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> lars = dtrans.paddle.optimizers.lars_momentum
      >>> tx = lars(1.0, 0.9, lars_coeff=0.5, lars_weight_decay=1.0)
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([3.0, -4.0]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist()
      [1.5, 4.0]
    """
    if isinstance(exclude_from_weight_decay, str):
        raise ConfigError(
            "exclude_from_weight_decay is a string; expected a list of names: pass "
            f"[{exclude_from_weight_decay!r}]"
        )
    excluded = tuple(exclude_from_weight_decay or ())

    def rule(leaf: LeafStep, g: Any, p: Any, velocity: Any) -> tuple[Any, ...]:
        g = cast_scalar(rescale_grad, p) * g
        decay, local_lr = 0.0, leaf.lr
        if not any(name in leaf.path for name in excluded):
            decay, p_norm, g_norm = cast_scalar(lars_weight_decay, p), norm(p), norm(g)
            scales = (p_norm > 0) & (g_norm > 0)
            norms = jnp.where(scales, g_norm + decay * p_norm + cast_scalar(epsilon, p_norm), 1)
            ratio = jnp.where(scales, cast_scalar(lars_coeff, p_norm) * p_norm / norms, 1)
            local_lr = leaf.lr * ratio.astype(p.dtype)
        velocity = cast_scalar(momentum, p) * velocity + local_lr * (g + decay * p)
        return -velocity, velocity

    return leafwise_optimizer("lars_momentum", learning_rate, LarsMomentumState, rule)


def dpsgd(
    learning_rate: LearningRate = 0.001,
    clip: Scalar = 0.9,
    batch_size: Scalar = 0.999,
    sigma: Scalar = 1e-8,
    seed: int = 0,
    key: jax.Array | int = 0,
    fix: bool = False,
) -> optax.GradientTransformation:
    """Return gradient descent with a clipped gradient and noise (differentially private SGD).

        g     = g · min(1, clip / ‖g‖)
        param = param - learning_rate · (g + noise / batch_size)

    Training with Paddle's kernel is not private, since the kernel has defects:

    - It draws one number, sigma · N(0, 1), and adds it to every element of the parameter.
    - It seeds its generator with the clock in seconds, so all parameters, and all steps within a
      second, get the same number. With a `seed`, all steps get the same number.
    - The noise is not proportional to `clip`, and each parameter is clipped separately.
    - It clips the gradient of the batch instead of the gradient of each example.

    Args:
      learning_rate: a number or a schedule.
      clip: the maximum norm of a gradient.
      batch_size: divides the noise. (The default is Paddle's.)
      sigma: scale of the noise.
      seed: the seed of the kernel's generator (Paddle's `_seed`, "for debugging"), a Python number.
        With 0, the noise is drawn from `key` instead of the clock: a new number in each step, equal
        for all leaves.
      key: a random key, or the seed of one; unused with a `seed`.
      fix: True for the paper's rule: noise sigma · clip · N(0, 1), drawn from `key` for each
        element and step, and clipping by one norm over all leaves. Privacy also requires that each
        example is clipped: clip and average the examples' gradients in the training step, and pass
        the number of examples as `batch_size`.

    Returns:
      A transformation. Its `update` does not need the parameters. Norms of half-precision leaves
      are computed in float32.

    Raises:
      ConfigError: `clip` is not above 0.

    Source: `DpsgdOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/dpsgd_op.h. Paper: Abadi et al., Deep Learning with
    Differential Privacy, 2016.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> tx = dtrans.paddle.optimizers.dpsgd(1.0, clip=2.5, batch_size=4.0, sigma=0.0)
      >>> tx.update(jnp.array([3.0, -4.0]), tx.init(jnp.zeros(2)))[0].tolist()
      [-1.5, 2.0]
    """
    scale = lambda g: cast_scalar(sigma, g) / cast_scalar(batch_size, g)
    if fix:
        return optax.chain(
            gradient_clip_by_global_norm(clip),
            _add_noise(lambda g: scale(g) * cast_scalar(clip, g), key, by_element=True),
            optax.sgd(learning_rate),
        )
    if seed:
        drawn = _draw_kernel_noise(seed)
        noise: Any = optax.stateless(
            lambda grads, params: jax.tree.map(lambda g: g + drawn * scale(g), grads)
        )
    else:
        noise = _add_noise(scale, key, by_element=False)
    return optax.chain(gradient_clip_by_norm(clip), noise, optax.sgd(learning_rate))


def _add_noise(
    scale: Any, key: jax.Array | int, *, by_element: bool
) -> optax.GradientTransformation:
    """Return a transformation that adds `scale(g)` · N(0, 1) to gradients.

    Args:
      scale: a function of a gradient.
      key: a random key, or the seed of one.
      by_element: True draws a number for each element; False one number for all leaves.
    """

    def init(params: Any) -> NoiseState:
        if isinstance(key, jax.Array) and (
            key.ndim > 0 or jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        ):
            return NoiseState(key)
        return NoiseState(jax.random.key(key))

    def update(updates: Any, state: NoiseState, params: Any = None) -> tuple[Any, NoiseState]:
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        after, now = jax.random.split(state.key)
        if by_element:
            keys = jax.random.split(now, max(len(leaves), 1))
            drawn = [
                jax.random.normal(k, g.shape, g.dtype) for k, g in zip(keys, leaves, strict=False)
            ]
        else:
            shared = jax.random.normal(now)
            drawn = [shared.astype(g.dtype) for g in leaves]
        noisy = [g + scale(g) * x for g, x in zip(leaves, drawn, strict=True)]
        return treedef.unflatten(noisy), NoiseState(after)

    return optax.GradientTransformation(init, update)


def _draw_kernel_noise(seed: int) -> float:
    """Return the number that Paddle's kernel draws with a seed.

    It applies Marsaglia's polar method to C++'s `minstd_rand`, in float32.
    """
    modulus = 2**31 - 1
    state = seed % modulus or 1
    while True:
        pair = []
        for _ in range(2):
            state = state * 48271 % modulus
            pair.append(
                np.float32(2) * (np.float32(state - 1) / np.float32(modulus - 1)) - np.float32(1)
            )
        s = pair[0] * pair[0] + pair[1] * pair[1]
        if 0 < s < 1:
            return float(np.float32(float(pair[0]) * math.sqrt(-2 * math.log(s) / float(s))))
