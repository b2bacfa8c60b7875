"""Options of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dtrans.checks import check_int, check_number, check_one_of, check_type, is_int
from dtrans.errors import ConfigError
from dtrans.parameter_server.options import Sync


@dataclasses.dataclass(frozen=True)
class Rows:
    """Options of a table: a leaf that trainers request by rows instead of in full.

    Attributes:
      update: the rows that an update changes.

        - "dense": all rows, as on one device. Momentum and weight decay also apply to rows that no
          trainer looked up; servers apply them before a trainer reads the row.
        - "lazy": the rows that a trainer looked up. Other rows, and the optimizer state of these
          rows, stay unchanged; step counts still advance. An optimizer that accumulates gradients
          for a later step (`optax.MultiSteps`) has no lazy form.
        - None: allowed if "dense" and "lazy" are equal (plain SGD, Adagrad).
      place: assignment of rows to servers. "range": each server has a contiguous range of rows, as
        for all other leaves (`dtrans.BlockPlacement`). "bucket": row n is in bucket n % buckets,
        and each server has a contiguous range of buckets. So a server has rows from all parts of
        the table.
      buckets: the number of buckets; a table with fewer rows has one bucket for each row.
      limit: the maximum number of rows that all servers together may create. The limit of one
        server is proportional to the rows that are assigned to it. A step that looks up more rows
        raises an error that names the table. None: no limit.
      staleness: the number of updates that prefetched rows (`job.prefetch`) may miss. If a trainer
        calls `job.prefetch` at least this many steps ahead, its rows miss exactly this many
        updates. 0: a server sends a row again if the row changed since the prefetch, so results are
        the same as without prefetch.

    Raises:
      ConfigError: a value is out of range.

    Example:
      >>> import dtrans
      >>> dtrans.Rows(update="lazy", place="bucket").update
      'lazy'
    """

    update: Literal["dense", "lazy"] | None = None
    place: Literal["range", "bucket"] = "range"
    buckets: int = 256
    limit: int | None = None
    staleness: int = 0

    def __post_init__(self) -> None:
        check_one_of("update", self.update, (None, "dense", "lazy"))
        check_one_of("place", self.place, ("range", "bucket"))
        check_int("buckets", self.buckets, "a number of buckets", least=1)
        if self.limit is not None:
            wanted = "None or a positive number of rows"
            check_number("limit", self.limit, wanted, lambda x: is_int(x) and x > 0)
        check_int("staleness", self.staleness, "a number of steps", least=0)


def check_sparse(sparse: Any) -> Mapping[str, Rows] | Literal["auto"] | None:
    """Check the type of the argument `sparse`, and return it; a mapping is copied.

    Raises:
      ConfigError: `sparse` is not None, "auto", or a mapping to `dtrans.Rows`.
    """
    if sparse is None:
        return None
    if sparse == "auto":
        return "auto"
    if not isinstance(sparse, Mapping):
        raise ConfigError(
            f"sparse is {sparse!r}; expected None, 'auto', or {{'params/emb': dtrans.Rows(...)}}"
        )
    for name, rows in sparse.items():
        check_type(f"sparse[{name!r}]", rows, Rows, "a dtrans.Rows")
    return dict(sparse)


def check_staleness(sparse: Any, mode: Any) -> None:
    """Raise ConfigError if a table has `staleness` and the mode is not synchronous."""
    if not isinstance(sparse, Mapping) or isinstance(mode, Sync):
        return
    for name, rows in sparse.items():
        if rows.staleness:
            raise ConfigError(
                f"sparse[{name!r}].staleness is {rows.staleness}, but only synchronous trainers "
                f"prefetch rows, and mode is {mode!r}; leave staleness out, or pass "
                "mode=dtrans.Sync()"
            )
