"""Noise-contrastive estimation: a softmax over many classes, learnt from the label and a few
classes drawn as noise.

    -log s(logit of the label - log(k q(label)))  -  sum over noise of log(1 - s(logit of noise -
    log(k q(noise))))

where s is the sigmoid, k the number of noise classes for each row, and q the distribution that they
are drawn from.

Source: Gutmann and Hyvaerinen, 2010; Mnih and Teh, 2012. The samplers are those of Paddle's `nce`
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
    """A distribution over classes.

    Attributes:
      draw: classes of a shape, from a key: `draw(key, shape)`.
      log_probability: the logarithm of the probability of classes, of their shape.
    """

    draw: Callable[[jax.Array, Sequence[int]], jax.Array]
    log_probability: Callable[[jax.Array], jax.Array]


def uniform_sampler(classes: int) -> Sampler:
    """Every class is as likely.

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
    """Class i with probability log((i + 2) / (i + 1)) / log(classes + 1): for classes sorted by
    falling frequency.

    Example:
      >>> import jax.numpy as jnp, dtrans.nn
      >>> jnp.exp(dtrans.nn.log_uniform_sampler(9).log_probability(jnp.arange(9))).sum().round(5).item()
      1.0
    """
    check_int("classes", classes, "a positive number of classes")

    def draw(key: jax.Array, shape: Sequence[int]) -> jax.Array:
        found = (
            jnp.exp(jax.random.uniform(key, tuple(shape)) * np.log(classes + 1)).astype(jnp.int32)
            - 1
        )
        return jnp.clip(found, 0, classes - 1)

    return Sampler(
        draw, lambda ids: jnp.log(jnp.log1p(1 / (ids + 1.0))) - np.log(np.log(classes + 1))
    )


def custom_sampler(probabilities: Any) -> Sampler:
    """Class i with probability proportional to probabilities[i].

    Raises:
      ConfigError: no probabilities: negative ones, or none that is positive.

    Example:
      >>> import jax, dtrans.nn
      >>> dtrans.nn.custom_sampler([0.0, 2.0, 0.0]).draw(jax.random.key(0), (2,)).tolist()
      [1, 1]
    """
    given = np.asarray(probabilities, np.float64)
    if (
        given.ndim != 1
        or not np.all(given >= 0)
        or not given.sum() > 0
        or not np.isfinite(given.sum())
    ):
        raise ConfigError(
            "probabilities must be a row of numbers, 0 or more, and some of them positive"
        )
    share = given / given.sum()
    ends = np.cumsum(share)
    last = int(np.flatnonzero(share)[-1])
    logs = np.log(share, out=np.full(share.shape, -np.inf), where=share > 0)

    def draw(key: jax.Array, shape: Sequence[int]) -> jax.Array:
        found = jnp.searchsorted(
            jnp.asarray(ends, jnp.float32), jax.random.uniform(key, tuple(shape)), side="right"
        )
        return jnp.minimum(found, last)

    return Sampler(draw, lambda ids: jnp.asarray(logs)[ids])


def nce_loss(
    weight: jax.Array,
    bias: jax.Array | None,
    x: jax.Array,
    labels: jax.Array,
    noise: jax.Array,
    sampler: Sampler,
) -> jax.Array:
    """The noise-contrastive loss of each row.

    Args:
      weight: of shape (classes, d): a row for each class.
      bias: of shape (classes,) or (classes, 1), or None.
      x: of shape (rows, d).
      labels: the class of each row, of shape (rows,).
      noise: classes drawn from `sampler`: of shape (k,), the same for all rows, or (rows, k).
      sampler: that noise is drawn from.

    Returns:
      An array of shape (rows,).

    Raises:
      ConfigError: arrays that do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, dtrans.nn
      >>> sampler = dtrans.nn.uniform_sampler(10)
      >>> noise = sampler.draw(jax.random.key(0), (5,))
      >>> loss = dtrans.nn.nce_loss(jnp.zeros((10, 3)), None, jnp.ones((2, 3)), jnp.array([1, 4]), noise, sampler)
      >>> [round(v, 3) for v in loss.tolist()]
      [5.899, 5.899]
    """
    if x.ndim != 2 or labels.shape != x.shape[:1] or weight.shape[1:] != x.shape[1:]:
        raise ConfigError(
            f"weight (classes, d), x (rows, d) and labels (rows,) do not fit: {weight.shape}, "
            f"{x.shape}, {labels.shape}"
        )
    if noise.ndim not in (1, 2) or (noise.ndim == 2 and noise.shape[0] != x.shape[0]):
        raise ConfigError(
            f"noise is of shape (k,) or (rows, k); it is of {noise.shape}, and x of {x.shape}"
        )
    of_label = jnp.sum(weight[labels] * x, -1)
    of_noise = (
        x @ weight[noise].T if noise.ndim == 1 else jnp.einsum("bd,bkd->bk", x, weight[noise])
    )
    if bias is not None:
        flat = bias if bias.ndim == 1 else bias[:, 0]
        of_label, of_noise = of_label + flat[labels], of_noise + flat[noise]
    expected = lambda ids: (sampler.log_probability(ids) + np.log(noise.shape[-1])).astype(x.dtype)
    return jax.nn.softplus(expected(labels) - of_label) + jnp.sum(
        jax.nn.softplus(of_noise - expected(noise)), -1
    )
