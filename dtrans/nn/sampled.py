"""Noise-contrastive estimation: a loss over some sampled classes instead of a full softmax.

    loss = -log s(l - log(k q(l)))  -  sum over noise n of log(1 - s(n - log(k q(n))))

where l and n are the logits of the label and of a noise class, and s is the sigmoid. k is the
number of noise classes for each row, and q(c) the probability of class c in the distribution of
noise.

Source: Gutmann and Hyvaerinen, 2010; Mnih and Teh, 2012. Paddle's `nce` has the same samplers
(paddle/fluid/operators/math/sampler.cc).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans.checks import check_int
from dtrans.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Distribution over classes, from which noise classes are drawn.

    Attributes:
      draw: (key, shape) -> an array of random classes with this shape.
      log_probability: array of classes -> array of the logarithms of their probabilities.
    """

    draw: Callable[[jax.Array, Sequence[int]], jax.Array]
    log_probability: Callable[[jax.Array], jax.Array]


def uniform_sampler(classes: int) -> Sampler:
    """Return a sampler that draws every class with the same probability.

    Example:
      >>> import jax, dtrans.nn
      >>> dtrans.nn.uniform_sampler(4).draw(jax.random.key(0), (3,)).shape
      (3,)
    """
    check_int("classes", classes, "a positive number of classes")
    return Sampler(
        lambda key, shape: jax.random.randint(key, tuple(shape), 0, classes),
        lambda ids: jnp.full(ids.shape, -np.log(classes)),
    )


def log_uniform_sampler(classes: int) -> Sampler:
    """Return a log-uniform sampler, for classes that are sorted by descending frequency.

    Class i has the probability log((i + 2) / (i + 1)) / log(classes + 1).

    Example:
      >>> import jax.numpy as jnp, dtrans.nn
      >>> logs = dtrans.nn.log_uniform_sampler(9).log_probability(jnp.arange(9))
      >>> jnp.exp(logs).sum().round(5).item()
      1.0
    """
    check_int("classes", classes, "a positive number of classes")

    def draw(key: jax.Array, shape: Sequence[int]) -> jax.Array:
        uniform = jax.random.uniform(key, tuple(shape))
        drawn = jnp.exp(uniform * np.log(classes + 1)).astype(jnp.int32) - 1
        return jnp.clip(drawn, 0, classes - 1)

    return Sampler(
        draw, lambda ids: jnp.log(jnp.log1p(1 / (ids + 1.0))) - np.log(np.log(classes + 1))
    )


def custom_sampler(probabilities: Any) -> Sampler:
    """Return a sampler that draws class i with a probability proportional to `probabilities[i]`.

    Raises:
      ConfigError: an entry is negative, no entry is positive, or the array is not 1-d.

    Example:
      >>> import jax, dtrans.nn
      >>> dtrans.nn.custom_sampler([0.0, 2.0, 0.0]).draw(jax.random.key(0), (2,)).tolist()
      [1, 1]
    """
    weights = np.asarray(probabilities, np.float64)
    total = weights.sum()
    if weights.ndim != 1 or not np.all(weights >= 0) or not 0 < total < np.inf:
        raise ConfigError(
            "probabilities is invalid; expected a 1-d array of numbers that are 0 or more, "
            "with at least one positive number"
        )
    share = weights / total
    ends = np.cumsum(share)
    last = int(np.flatnonzero(share)[-1])
    logs = np.log(share, out=np.full(share.shape, -np.inf), where=share > 0)

    def draw(key: jax.Array, shape: Sequence[int]) -> jax.Array:
        uniform = jax.random.uniform(key, tuple(shape))
        drawn = jnp.searchsorted(jnp.asarray(ends, jnp.float32), uniform, side="right")
        # rounding may leave the last entry of `ends` below 1
        return jnp.minimum(drawn, last)

    return Sampler(draw, lambda ids: jnp.asarray(logs)[ids])


def nce_loss(
    weight: jax.Array,
    bias: jax.Array | None,
    x: jax.Array,
    labels: jax.Array,
    noise: jax.Array,
    sampler: Sampler,
) -> jax.Array:
    """Return the noise-contrastive loss of each row.

    Args:
      weight: the weights of each class, of shape (classes, d).
      bias: the bias of each class, of shape (classes,) or (classes, 1), or None.
      x: the inputs, of shape (rows, d).
      labels: the class of each row, of shape (rows,).
      noise: classes drawn from `sampler`: of shape (k,) for one draw that all rows use, or of
        shape (rows, k).
      sampler: the distribution from which `noise` was drawn.

    Returns:
      An array of shape (rows,).

    Raises:
      ConfigError: shapes do not match.

    Example:
      >>> import jax, jax.numpy as jnp, dtrans.nn
      >>> sampler = dtrans.nn.uniform_sampler(10)
      >>> noise = sampler.draw(jax.random.key(0), (5,))
      >>> weight, x, labels = jnp.zeros((10, 3)), jnp.ones((2, 3)), jnp.array([1, 4])
      >>> loss = dtrans.nn.nce_loss(weight, None, x, labels, noise, sampler)
      >>> [round(v, 3) for v in loss.tolist()]
      [5.899, 5.899]
    """
    if x.ndim != 2 or labels.shape != x.shape[:1] or weight.shape[1:] != x.shape[1:]:
        raise ConfigError(
            f"weight, x and labels have the shapes {weight.shape}, {x.shape} and {labels.shape}; "
            "expected (classes, d), (rows, d) and (rows,)"
        )
    if noise.ndim not in (1, 2) or (noise.ndim == 2 and noise.shape[0] != x.shape[0]):
        raise ConfigError(
            f"noise has the shape {noise.shape}; expected (k,) or ({x.shape[0]}, k), because x has "
            f"{x.shape[0]} rows"
        )
    label_logits = jnp.sum(weight[labels] * x, -1)
    if noise.ndim == 1:
        noise_logits = x @ weight[noise].T
    else:
        noise_logits = jnp.einsum("bd,bkd->bk", x, weight[noise])
    if bias is not None:
        flat = bias if bias.ndim == 1 else bias[:, 0]
        label_logits, noise_logits = label_logits + flat[labels], noise_logits + flat[noise]
    expected = lambda ids: (sampler.log_probability(ids) + np.log(noise.shape[-1])).astype(x.dtype)
    label_loss = jax.nn.softplus(expected(labels) - label_logits)
    return label_loss + jnp.sum(jax.nn.softplus(noise_logits - expected(noise)), -1)
