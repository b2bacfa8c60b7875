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
    """Options of a leaf whose rows trainers look up.

    Attributes:
      update: "dense": every row changes as on one device. Momentum and weight decay also apply to
        rows that no trainer looked up; such rows catch up before a trainer reads them. "lazy": rows
        that no trainer looked up stay unchanged, with their part of the optimizer state, whose
        counts of steps still advance. An optimizer that accumulates a row's gradients for a later
        step (`optax.MultiSteps`) has no lazy form. None: allowed if both are equal (plain SGD,
        Adagrad).
      place: assignment of rows to servers. "range": runs of rows, as for any other leaf;
        `dtrans.BlockPlacement` chooses them. "bucket": row n is in bucket n % buckets, and each
        server has a run of buckets, so that adjacent rows are on different servers.
      buckets: the number of buckets; a table with fewer rows has one bucket for each row.
      limit: the most rows of the table that servers may create; each server may create its share. A
        step that looks up more rows raises an error that names the table. None: no limit.
      staleness: the number of updates that prefetched rows (`job.prefetch`) may lack. A trainer
        that announces at least so many batches ahead has rows that lack exactly so many updates. 0:
        servers send rows again that changed since, and numbers equal those without prefetch.

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
    """Return the option `sparse` as stored in a plan; raise ConfigError for an invalid one."""
    if sparse is None:
        return None
    if sparse == "auto":
        return "auto"
    if not isinstance(sparse, Mapping):
        raise ConfigError(
            f"sparse={sparse!r} must be None, 'auto', or {{'params/emb': dtrans.Rows(...)}}"
        )
    for name, rows in sparse.items():
        check_type(f"sparse[{name!r}]", rows, Rows, "a dtrans.Rows")
    return dict(sparse)


def check_staleness(sparse: Any, mode: Any) -> None:
    """Raise ConfigError for tables with stale rows in a mode without prefetch."""
    for name, rows in sparse.items() if isinstance(sparse, Mapping) else ():
        if rows.staleness and not isinstance(mode, Sync):
            raise ConfigError(
                f"sparse[{name!r}].staleness={rows.staleness} and mode={mode!r}: asynchronous "
                "steps read rows when they begin, without the updates that other trainers have not "
                "sent; leave staleness out, or say mode=dtrans.Sync()"
            )
