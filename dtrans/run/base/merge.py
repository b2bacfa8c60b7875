"""Merge of a result that several trainers have each computed from their part of the batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dtrans.ir.array_fns import in_one


@dataclasses.dataclass(frozen=True)
class Merge:
    """Way in which the results of all trainers become one.

    Attributes:
      way: "mean" or "sum"; "same" for a value that all trainers have; "concat" for rows of the
        batch, trainer after trainer; "each" for values stacked on a leading dimension; "joined" for
        rows that are concatenated already.
      axis: Dimension of the rows.
      rows: Number of rows that are not padding; None where there is no padding.

    Example:

    >>> Merge("concat", rows=3)(jnp.array([[1, 2], [3, 0]]))
    Array([1, 2, 3], dtype=int32)
    """

    way: str
    axis: int = 0
    rows: int | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Merge the results of all trainers, which are stacked on a leading dimension unless they
        are joined."""
        if self.way in ("concat", "joined"):
            joined = in_one(x, self.axis) if self.way == "concat" else x
            return (
                joined
                if self.rows is None
                else jax.lax.slice_in_dim(joined, 0, self.rows, axis=self.axis)
            )
        if self.way == "each":
            return x
        if self.way == "same":
            return x[0]
        return jnp.mean(x, 0) if self.way == "mean" else jnp.sum(x, 0, dtype=x.dtype)
