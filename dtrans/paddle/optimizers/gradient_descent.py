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
    norm,
    of,
    transformation,
)


class LarsMomentumState(NamedTuple):
    """State of `lars_momentum`.

    Attributes:
      count: updates so far, int32; None where the learning rate is no schedule.
      velocity: per leaf, what the last update took off the parameter.
    """

    count: Any
    velocity: Any


class NoiseState(NamedTuple):
    """State of the noise of `dpsgd`.

    Attributes:
      key: the random key from which the keys of the next update follow.
    """

    key: jax.Array


def sgd(learning_rate: LearningRate) -> optax.GradientTransformation:
    """Stochastic gradient descent: `param - learning_rate · g`. It is `optax.sgd`.

    Args:
      learning_rate: a number or a schedule.

    Returns:
      A transformation. It needs no parameters.

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
    """Gradient descent with momentum. It is `optax.sgd` with momentum.

        velocity = momentum·velocity + g
        param    = param - learning_rate · velocity                    or, with `use_nesterov`,
        param    = param - learning_rate · (g + momentum·velocity)

    Args:
      learning_rate: a number or a schedule.
      momentum: how much of the velocity stays. Paddle has no default.
      use_nesterov: whether the step looks ahead, along the velocity.

    Returns:
      A transformation. It needs no parameters.

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
    """Momentum with a learning rate for each leaf, by the norms of the leaf and of its gradient
    (LARS).

        g        = rescale_grad · g
        local_lr = learning_rate · lars_coeff · ‖param‖ / (‖g‖ + lars_weight_decay·‖param‖ +
        epsilon) velocity = momentum·velocity + local_lr · (g + lars_weight_decay·param)
        param    = param - velocity

    where `local_lr` is `learning_rate` itself if a norm is 0. This is the paper's rule too.

    `optax.lars` divides by ‖g + weight_decay·param‖ (+ eps), which is less unless the two point the
    same way.

    The last three arguments are of Paddle 2; with their defaults the rule is that of 1.8. (From 2.0
    on kernels scale only with a weight decay above 0: a leaf without one had the plain learning
    rate, as one that is excluded has here.)

    Args:
      learning_rate: a number or a schedule.
      momentum: how much of the velocity stays. Paddle has no default.
      lars_coeff: how far a leaf is trusted to move, as a part of its norm.
      lars_weight_decay: weight decay; instead of another L2 regularization, not with it.
      exclude_from_weight_decay: parts of names. A leaf is excluded if one of them is in its path,
        e.g. `bias` is in `dense/bias`. It has no weight decay, and the plain learning rate: that of
        momentum SGD. No norms are taken.
      epsilon: added to the denominator.
      rescale_grad: multiplies the gradient, often 1 / batch size.

    Returns:
      A transformation with state `LarsMomentumState`, the velocity of the shapes and dtypes of the
      parameters. Its `update` needs the parameters. Norms of leaves of half precision are taken in
      float32.

    Raises:
      ConfigError: one string for `exclude_from_weight_decay`; and from `update` without parameters.

    Source: `LarsMomentumOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/lars_momentum_op.h. Paper: You et al., Large Batch Training of
    Convolutional Networks, 2017.

    Example:
      >>> import jax.numpy as jnp, optax, dtrans
      >>> tx = dtrans.paddle.optimizers.lars_momentum(1.0, 0.9, lars_coeff=0.5, lars_weight_decay=1.0)
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([3.0, -4.0]), tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist()
      [1.5, 4.0]
    """
    if isinstance(exclude_from_weight_decay, str):
        raise ConfigError(
            f"exclude_from_weight_decay is a list of names: [{exclude_from_weight_decay!r}]"
        )
    excluded = tuple(exclude_from_weight_decay or ())

    def rule(leaf: LeafStep, g: Any, p: Any, velocity: Any) -> tuple[Any, ...]:
        g = of(rescale_grad, p) * g
        decay, local_lr = 0.0, leaf.lr
        if not any(name in leaf.path for name in excluded):
            decay, p_norm, g_norm = of(lars_weight_decay, p), norm(p), norm(g)
            scales = (p_norm > 0) & (g_norm > 0)
            by = jnp.where(scales, g_norm + decay * p_norm + of(epsilon, p_norm), 1)
            local_lr = leaf.lr * jnp.where(scales, of(lars_coeff, p_norm) * p_norm / by, 1).astype(
                p.dtype
            )
        velocity = of(momentum, p) * velocity + local_lr * (g + decay * p)
        return -velocity, velocity

    return transformation("lars_momentum", learning_rate, LarsMomentumState, rule)


def dpsgd(
    learning_rate: LearningRate = 0.001,
    clip: Scalar = 0.9,
    batch_size: Scalar = 0.999,
    sigma: Scalar = 1e-8,
    seed: int = 0,
    key: jax.Array | int = 0,
    fix: bool = False,
) -> optax.GradientTransformation:
    """Gradient descent with a clipped gradient and noise.

        g     = g · min(1, clip / ‖g‖)
        param = param - learning_rate · (g + noise / batch_size)

    Defects of the kernel. None of them makes training private:

    - It draws one number, sigma · N(0, 1), and adds it to every element of the parameter.
    - It seeds its generator with the clock's second, so that all parameters, and all steps of a
      second, have the same number; with a `seed`, all steps have it.
    - The noise is not in proportion to `clip`, and each parameter is clipped by its own norm.
    - It clips the gradient of the batch, not that of each example.

    Args:
      learning_rate: a number or a schedule.
      clip: the largest norm of a gradient.
      batch_size: divides the noise. (The default is Paddle's.)
      sigma: scale of the noise.
      seed: that of the kernel's generator (Paddle's `_seed`, "for debugging"), which gives its
        number; a Python number. With 0 there is no clock here: each step has a number of its own,
        from `key`, and all leaves the same.
      key: a random key, or the number of one: where noise comes from, unless there is a `seed`.
      fix: the paper's noise: sigma · clip · N(0, 1), another number for each element and step, from
        `key`; and one norm over all leaves. Examples are not seen here: for a guarantee of privacy
        clip the gradient of each, and average, in the training step; `batch_size` is then their
        number.

    Returns:
      A transformation. It needs no parameters. Norms of leaves of half precision are taken in
      float32.

    Raises:
      ConfigError: a `clip` that is not above 0.

    Source: `DpsgdOptimizer` of Paddle's python/paddle/fluid/optimizer.py, and
    paddle/fluid/operators/optimizers/dpsgd_op.h. Paper: Abadi et al., Deep Learning with
    Differential Privacy, 2016.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> tx = dtrans.paddle.optimizers.dpsgd(1.0, clip=2.5, batch_size=4.0, sigma=0.0)
      >>> tx.update(jnp.array([3.0, -4.0]), tx.init(jnp.zeros(2)))[0].tolist()
      [-1.5, 2.0]
    """
    if fix:
        return optax.chain(
            gradient_clip_by_global_norm(clip),
            _add_noise(
                lambda g: of(sigma, g) * of(clip, g) / of(batch_size, g), key, by_element=True
            ),
            optax.sgd(learning_rate),
        )
    scale = lambda g: of(sigma, g) / of(batch_size, g)
    if seed:
        drawn = _drawn_by_kernel(seed)
        noise: Any = optax.stateless(
            lambda grads, params: jax.tree.map(lambda g: g + drawn * scale(g), grads)
        )
    else:
        noise = _add_noise(scale, key, by_element=False)
    return optax.chain(gradient_clip_by_norm(clip), noise, optax.sgd(learning_rate))


def _add_noise(
    scale: Any, key: jax.Array | int, *, by_element: bool
) -> optax.GradientTransformation:
    """Add `scale(g)` · N(0, 1): a number for each element, or one for all leaves."""

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
            one = jax.random.normal(now)
            drawn = [one.astype(g.dtype) for g in leaves]
        noisy = [g + scale(g) * x for g, x in zip(leaves, drawn, strict=True)]
        return treedef.unflatten(noisy), NoiseState(after)

    return optax.GradientTransformation(init, update)


def _drawn_by_kernel(seed: int) -> float:
    """The number that the kernel draws with a seed: Marsaglia's polar method over C++'s
    `minstd_rand`, in float32."""
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
