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
      table: of shape (rows, d).
      ids: the rows to look up, of shape (n,).
      segment_ids: the bag of each, of shape (n,), from 0 to num_segments - 1; others are dropped.
      num_segments: how many bags there are.
      weights: of each row in its bag, of shape (n,); 1 by default.
      mode: "sum" of weight times row; "mean": that over the sum of weights; "sqrtn": that over the
        root of the sum of squared weights.
      padding_idx: a row that enters no bag, and whose gradient is zero.

    Returns:
      An array of shape (num_segments, d); zeros for a bag that is empty.

    Raises:
      ConfigError: another mode, or arrays that do not fit.

    Source: `tf.nn.embedding_lookup_sparse`, whose modes these are; `padding_idx` is
      torch.nn.EmbeddingBag's.

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
            f"ids, segment_ids and weights are of one shape (n,); they are of {shapes}"
        )
    w = jnp.ones(ids.shape, table.dtype) if weights is None else weights.astype(table.dtype)
    if padding_idx is not None:
        padding = padding_idx + table.shape[0] * (padding_idx < 0)
        w = jnp.where(ids == padding, jnp.zeros_like(w), w)
    total = jax.ops.segment_sum(table[ids] * w[:, None], segment_ids, num_segments)
    if mode == "sum":
        return total
    of = jax.ops.segment_sum(w if mode == "mean" else w * w, segment_ids, num_segments)
    by = jnp.where(of == 0, jnp.ones_like(of), of)
    return total / (by if mode == "mean" else jnp.sqrt(by))[:, None]
