"""Merge of the results that trainers compute from their parts of the batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dtrans.ir.array_fns import in_one


@dataclasses.dataclass(frozen=True)
class Merge:
    """Rule that merges one result, such as the loss, over all trainers.

    Attributes:
      way: the rule: "mean", "sum", "same" (all results are equal), "each" (a stack of all results),
        "concat" (concatenate rows) or "joined" (rows are concatenated already).
      axis: dimension of the rows.
      rows: for "concat" and "joined", the number of rows without padding; None if there is no
        padding.

    Example:
      >>> Merge("concat", rows=3)(jnp.array([[1, 2], [3, 0]]))
      Array([1, 2, 3], dtype=int32)
    """

    way: str
    axis: int = 0
    rows: int | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Merge the results of all trainers.

        Args:
          x: the results, stacked on a leading dimension; for "joined", one array with all rows.
        """
        if self.way in ("concat", "joined"):
            if self.way == "concat":
                x = in_one(x, self.axis)
            if self.rows is None:
                return x
            return jax.lax.slice_in_dim(x, 0, self.rows, axis=self.axis)
        if self.way == "each":
            return x
        if self.way == "same":
            return x[0]
        if self.way == "mean":
            return jnp.mean(x, 0)
        return jnp.sum(x, 0, dtype=x.dtype)
