"""Embedding bags: sums or means of the rows that each bag looks up in a table."""

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
    """Return the weighted sum or mean of the rows in each bag.

    Args:
      table: an array of shape (rows, d).
      ids: the rows to look up, of shape (n,).
      segment_ids: the bag of each id, of shape (n,). Ids with a bag outside 0 to num_segments - 1
        are ignored.
      num_segments: the number of bags.
      weights: the weight of each id in its bag, of shape (n,); 1 by default.
      mode: "sum" adds weight times row. "mean" divides this sum by the sum of the weights, "sqrtn"
        by the square root of the sum of the squared weights.
      padding_idx: an id that is ignored, so that its row has a zero gradient.

    Returns:
      An array of shape (num_segments, d), with zeros for an empty bag.

    Raises:
      ConfigError: the mode is unknown, or shapes do not match.

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
            f"ids, segment_ids and weights have the shapes {shapes}; expected the same shape (n,)"
        )
    if weights is None:
        weights = jnp.ones(ids.shape, table.dtype)
    factors = weights.astype(table.dtype)
    if padding_idx is not None:
        padding = padding_idx + table.shape[0] * (padding_idx < 0)
        factors = jnp.where(ids == padding, jnp.zeros_like(factors), factors)
    total = jax.ops.segment_sum(table[ids] * factors[:, None], segment_ids, num_segments)
    if mode == "sum":
        return total
    addends = factors if mode == "mean" else factors * factors
    weight = jax.ops.segment_sum(addends, segment_ids, num_segments)
    # divide by 1 instead of 0, so that an empty bag gives 0
    divisor = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    if mode == "sqrtn":
        divisor = jnp.sqrt(divisor)
    return total / divisor[:, None]
