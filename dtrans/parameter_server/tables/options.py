"""Options of a table: a leaf from which trainers request single rows instead of the full leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dtrans.checks import check_int, check_number, check_one_of, check_type, is_int
from dtrans.errors import ConfigError
from dtrans.parameter_server.options import Async, Geo, HalfAsync, Sync


MOST_UPDATES = 1 << 20  # maximum value of `Rows.admit_count`


@dataclasses.dataclass(frozen=True)
class RowFilter:
    """Condition under which a server begins to store a row of a table.

    Some ids occur only once or twice in the data. Without a filter, servers store a row for each of
    them. With a filter, servers drop the first gradients of a row, and lookups return the row's
    initial value. Then an update *admits* the row: servers store it from then on.

    Attributes:
      count: the number of updates with a gradient of the row until the row is admitted. With 3, the
        third of these updates admits the row, and is the first that changes it.
      probability: the probability with which each of these updates admits the row.
    """

    count: int = 1
    probability: float = 1.0

    def __str__(self) -> str:
        value = self.count if self.count > 1 else self.probability
        return f"{self.option}={value}"

    @property
    def option(self) -> str:
        """Name of the option of `dtrans.Rows` that sets this condition."""
        return "admit_count" if self.count > 1 else "admit_probability"


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
        server is proportional to the rows that are assigned to it. A step that needs more rows
        raises an error that names the table. None: no limit.
      staleness: the number of updates that prefetched rows (`job.prefetch`) may miss. If a trainer
        calls `job.prefetch` at least this many steps ahead, its rows miss exactly this many
        updates. 0: a server sends a row again if the row changed since the prefetch, so results are
        the same as without prefetch.
      admit_count: the number of updates with a gradient of a row until the server stores the row.
        With 3, the third of these updates *admits* the row, and is the first that changes it. The
        first two drop the row's gradient, and lookups return the row's initial value. None: the
        first lookup of a row creates the row.
      admit_probability: the probability with which an update that has a gradient of a row admits
        the row. A draw depends on the arguments of `init`, the row's id and the number of the
        update, so a repeated step has the same draws. Earlier updates and lookups are treated as
        with `admit_count`.

    Raises:
      ConfigError: a value is out of range, or both `admit_count` and `admit_probability` are set.

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
    admit_count: int | None = None
    admit_probability: float | None = None

    def __post_init__(self) -> None:
        check_one_of("update", self.update, (None, "dense", "lazy"))
        check_one_of("place", self.place, ("range", "bucket"))
        check_int("buckets", self.buckets, "a number of buckets", least=1)
        if self.limit is not None:
            wanted = "None or a positive number of rows"
            check_number("limit", self.limit, wanted, lambda x: is_int(x) and x > 0)
        check_int("staleness", self.staleness, "a number of steps", least=0)
        check_int(
            "admit_count",
            self.admit_count,
            f"a number of updates from 1 to {MOST_UPDATES:,}",
            most=MOST_UPDATES,
            or_none=True,
        )
        check_number(
            "admit_probability",
            self.admit_probability,
            "a number between 0 and 1",
            lambda x: 0 < x < 1,
            or_none=True,
        )
        if self.admit_count is not None and self.admit_probability is not None:
            raise ConfigError(
                f"admit_count is {self.admit_count} and admit_probability is "
                f"{self.admit_probability}; leave out one of the two options"
            )

    @property
    def row_filter(self) -> RowFilter | None:
        """Condition under which servers begin to store a row; None: its first lookup creates it."""
        if self.admit_probability is not None:
            return RowFilter(probability=self.admit_probability)
        if self.admit_count is None or self.admit_count == 1:
            return None
        return RowFilter(self.admit_count)


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
    """Raise ConfigError if a table has the option `staleness` and the mode is not synchronous."""
    if not isinstance(sparse, Mapping) or isinstance(mode, Sync):
        return
    for name, rows in sparse.items():
        if rows.staleness:
            raise ConfigError(
                f"sparse[{name!r}].staleness is {rows.staleness}, but only synchronous trainers "
                f"prefetch rows, and mode is {mode!r}; leave staleness out, or pass "
                "mode=dtrans.Sync()"
            )


def check_row_filters(sparse: Any, mode: Any) -> None:
    """Raise ConfigError if the mode forbids the options `admit_count` and `admit_probability`."""
    if isinstance(mode, Geo):
        why = "with dtrans.Geo trainers update the rows that they look up, so servers get no "
        why += "gradients to filter"
    elif isinstance(mode, Async | HalfAsync) and mode.delay and mode.delay.decay is not None:
        option = f"dtrans.DelayCompensation(decay={mode.delay.decay})"
        why = f"with {option} servers store a mean square of each row from the start"
    else:
        return
    if not isinstance(sparse, Mapping):
        return
    for name, rows in sparse.items():
        if rows.row_filter is not None:
            raise ConfigError(
                f"sparse[{name!r}] has {rows.row_filter}, but {why}; leave "
                f"{rows.row_filter.option} out, or pass mode=dtrans.Async()"
            )
