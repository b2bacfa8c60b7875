"""Rows of a table, reduced by segment."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from dtrans.checks import check_int, check_one_of
from dtrans.errors import ConfigError


def embedding_bag(
    table: jax.Array,
    ids: jax.Array,
    segment_ids: jax.Array,
    num_segments: int,
    *,
    weights: jax.Array | None = None,
    mode: Literal["sum", "mean", "sqrtn"] = "sum",
    padding_idx: int | None = None,
) -> jax.Array:
    """Reduce the rows that each bag looks up.

    Args:
      table: an array of shape (rows, d).
      ids: the rows to look up, of shape (n,).
      segment_ids: the bag of each id, of shape (n,), from 0 to num_segments - 1. Others are
        dropped.
      num_segments: the number of bags.
      weights: the weight of each id in its bag, of shape (n,); by default 1.
      mode: "sum" adds weight times row. "mean" divides by the sum of weights, "sqrtn" by the root
        of the sum of squared weights.
      padding_idx: a row that no bag contains, so that its gradient is zero.

    Returns:
      An array of shape (num_segments, d); zeros for an empty bag.

    Raises:
      ConfigError: another mode, or shapes that do not match.

    Source: `tf.nn.embedding_lookup_sparse` has these modes; `padding_idx` comes from
      torch.nn.EmbeddingBag.

    Example:
      >>> import jax.numpy as jnp
      >>> from dtrans.nn import embedding_bag
      >>> table, ids = jnp.arange(8.0).reshape(4, 2), jnp.array([1, 3, 0])
      >>> embedding_bag(table, ids, jnp.array([0, 0, 2]), 3, mode="mean").tolist()
      [[4.0, 5.0], [0.0, 0.0], [0.0, 1.0]]
    """
    check_one_of("mode", mode, ("sum", "mean", "sqrtn"))
    check_int("num_segments", num_segments, "a positive number of bags")
    if (
        ids.ndim != 1
        or ids.shape != segment_ids.shape
        or (weights is not None and weights.shape != ids.shape)
    ):
        shapes = ", ".join(str(x.shape) for x in (ids, segment_ids, weights) if x is not None)
        raise ConfigError(
            f"ids, segment_ids and weights must have the same shape (n,), they have {shapes}"
        )
    factors = jnp.ones(ids.shape, table.dtype) if weights is None else weights.astype(table.dtype)
    if padding_idx is not None:
        padding = padding_idx + table.shape[0] * (padding_idx < 0)
        factors = jnp.where(ids == padding, jnp.zeros_like(factors), factors)
    total = jax.ops.segment_sum(table[ids] * factors[:, None], segment_ids, num_segments)
    if mode == "sum":
        return total
    addends = factors if mode == "mean" else factors * factors
    weight = jax.ops.segment_sum(addends, segment_ids, num_segments)
    # an empty bag has the sum 0 and divides by 1
    divisor = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    return total / (divisor if mode == "mean" else jnp.sqrt(divisor))[:, None]
