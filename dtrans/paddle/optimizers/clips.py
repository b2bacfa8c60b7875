"""Paddle's three gradient clips. Chain a clip before an optimizer (`optax.chain`)."""

from __future__ import annotations

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
"""Function of a leaf's path, e.g. `dense/bias`: True for leaves to clip. None clips all leaves."""


def gradient_clip_by_value(
    max: Scalar, min: Scalar | None = None, need_clip: NeedClip = None
) -> optax.GradientTransformation:
    """Clip each element of the gradients to [min, max].

    Args:
      max: the upper bound.
      min: the lower bound; by default `-max`.
      need_clip: a function of a leaf's path: True for leaves to clip. None clips all.

    Returns:
      A transformation. Its `update` does not need the parameters.

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
        raise ConfigError(f"max is {max}, so min would be {-max}; pass min too, or a max above 0")
    low = -max if min is None else min
    return _clip(
        need_clip,
        lambda grads: [jnp.clip(g, cast_scalar(low, g), cast_scalar(max, g)) for g in grads],
    )


def gradient_clip_by_norm(
    clip_norm: Scalar, need_clip: NeedClip = None
) -> optax.GradientTransformation:
    """Clip the gradient of each leaf to a maximum norm: `g · min(1, clip_norm / ‖g‖)`.

    Args:
      clip_norm: the maximum norm of a leaf's gradient.
      need_clip: a function of a leaf's path: True for leaves to clip. None clips all.

    Returns:
      A transformation. Its `update` does not need the parameters. Norms of half-precision leaves
      are computed in float32.

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

    The norm covers all selected gradients in one `update`. Paddle's `group_name` has no
    counterpart.

    Args:
      clip_norm: the maximum norm of all gradients together.
      need_clip: a function of a leaf's path: True for leaves to clip. None clips all.

    Returns:
      A transformation. Its `update` does not need the parameters. Norms of half-precision leaves
      are computed in float32.

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
            f"clip_norm is {clip_norm}; expected the maximum norm of a gradient, a number above 0"
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
        values = [g for _, g in leaves]
        selected = []
        for i, (path, _) in enumerate(leaves):
            if need_clip is None or need_clip(path_name(path)):
                selected.append(i)
        clipped = clip([values[i] for i in selected])
        for i, g in zip(selected, clipped, strict=True):
            values[i] = g
        return treedef.unflatten(values)

    return optax.stateless(update)
