"""Paddle's three clips of gradients, to be chained before an optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dtrans.errors import ConfigError
from dtrans.paddle.optimizers.leafwise import (
    Scalar,
    cast_scalar,
    is_number,
    norm,
    path_name,
    squared_norm,
)


NeedClip = Callable[[str], bool] | None
"""A predicate over a leaf's path, e.g. `dense/bias`: True for leaves to clip. None selects all."""


def gradient_clip_by_value(
    max: Scalar, min: Scalar | None = None, need_clip: NeedClip = None
) -> optax.GradientTransformation:
    """Clip each element of the gradients to [min, max].

    Args:
      max: the upper bound.
      min: the lower bound; by default `-max`.
      need_clip: a predicate over paths that selects the leaves to clip; by default all.

    Returns:
      A transformation. It needs no parameters.

    Raises:
      ConfigError: `max` is not above 0, and `min` is None.

    Source: `GradientClipByValue` of Paddle's python/paddle/fluid/clip.py, and
      paddle/fluid/operators/clip_op.h.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> clip = dtrans.paddle.optimizers.gradient_clip_by_value(0.5, min=-0.25)
      >>> clip.update(jnp.array([1.0, -1.0, 0.125]), clip.init(jnp.zeros(3)))[0].tolist()
      [0.5, -0.25, 0.125]
    """
    if min is None and is_number(max) and max <= 0:
        raise ConfigError(f"max is {max}, and min would be {-max}; pass min too, or a max above 0")
    low = -max if min is None else min
    return _clip(
        need_clip,
        lambda grads: [jnp.clip(g, cast_scalar(low, g), cast_scalar(max, g)) for g in grads],
    )


def gradient_clip_by_norm(
    clip_norm: Scalar, need_clip: NeedClip = None
) -> optax.GradientTransformation:
    """Clip the gradient of each leaf to the norm `clip_norm`: `g · clip_norm / ‖g‖` if larger.

    Args:
      clip_norm: the largest norm of a leaf's gradient.
      need_clip: a predicate over paths that selects the leaves to clip; by default all.

    Returns:
      A transformation. It needs no parameters. Norms of half precision are taken in float32.

    Raises:
      ConfigError: `clip_norm` is not above 0.

    Source: `GradientClipByNorm` of Paddle's python/paddle/fluid/clip.py, and
      paddle/fluid/operators/clip_by_norm_op.h.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> clip = dtrans.paddle.optimizers.gradient_clip_by_norm(2.5)
      >>> clip.update(jnp.array([3.0, -4.0]), clip.init(jnp.zeros(2)))[0].tolist()
      [1.5, -2.0]
    """
    _check_norm(clip_norm)

    def clip(grads: list[jax.Array]) -> list[jax.Array]:
        return [g * _factor(norm(g), clip_norm).astype(g.dtype) for g in grads]

    return _clip(need_clip, clip)


def gradient_clip_by_global_norm(
    clip_norm: Scalar, need_clip: NeedClip = None
) -> optax.GradientTransformation:
    """Scale all gradients by `clip_norm / max(clip_norm, ‖all gradients‖)`.

    Paddle's `group_name` has no counterpart: the norm covers the gradients in one `update`.

    Args:
      clip_norm: the largest norm of all gradients together.
      need_clip: a predicate over paths that selects the leaves to clip; by default all. The
        norm covers these.

    Returns:
      A transformation. It needs no parameters. Norms of half precision are taken in float32.

    Raises:
      ConfigError: `clip_norm` is not above 0.

    Source: `GradientClipByGlobalNorm` of Paddle's python/paddle/fluid/clip.py.

    Example:
      >>> import jax.numpy as jnp, dtrans
      >>> clip = dtrans.paddle.optimizers.gradient_clip_by_global_norm(2.5)
      >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([-4.0])}
      >>> clipped, _ = clip.update(grads, clip.init(grads))
      >>> clipped["a"].tolist(), clipped["b"].tolist()
      ([1.5], [-2.0])
    """
    _check_norm(clip_norm)

    def clip(grads: list[jax.Array]) -> list[jax.Array]:
        if not grads:
            return []
        factor = _factor(jnp.sqrt(sum(map(squared_norm, grads))), clip_norm)
        return [g * factor.astype(g.dtype) for g in grads]

    return _clip(need_clip, clip)


def _check_norm(clip_norm: Scalar) -> None:
    if is_number(clip_norm) and clip_norm <= 0:
        raise ConfigError(
            f"clip_norm is {clip_norm}; pass the largest norm of a gradient, a number above 0"
        )


def _factor(length: Any, clip_norm: Scalar) -> jax.Array:
    """Return the factor that scales a vector of this length to at most `clip_norm`."""
    return cast_scalar(clip_norm, length) / jnp.maximum(cast_scalar(clip_norm, length), length)


def _clip(
    need_clip: NeedClip, clip: Callable[[list[jax.Array]], list[jax.Array]]
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that applies `clip` to the gradients of selected leaves."""

    def update(grads: Any, params: Any = None) -> Any:
        treedef: Any
        leaves, treedef = jax.tree_util.tree_flatten_with_path(grads)
        needs = [need_clip is None or need_clip(path_name(path)) for path, _ in leaves]
        values = [g for _, g in leaves]
        clipped = iter(clip(list(itertools.compress(values, needs))))
        return treedef.unflatten(
            [next(clipped) if need else g for g, need in zip(values, needs, strict=True)]
        )

    return optax.stateless(update)
