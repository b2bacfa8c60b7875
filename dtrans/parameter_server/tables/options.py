"""What a user says of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dtrans.checks import check_int, check_number, check_one_of, check_type, is_int
from dtrans.errors import ConfigError
from dtrans.parameter_server.options import Sync


@dataclasses.dataclass(frozen=True)
class Rows:
    """How servers update a leaf of which trainers look up rows.

    Attributes:
      update: "dense": every row moves as on one device, those too that no trainer has looked up:
        momentum goes on, and so does the decay of weights. Such rows catch up before they are read.
        "lazy": rows that nobody has looked up stay as they are, and so does their part of the
        optimizer's state; counts of steps are the optimizer's own, and go on. It is refused where
        gradients of a row wait in the state for a later step (`optax.MultiSteps`). None: whichever
        it is, where both are the same (plain SGD, Adagrad); elsewhere it has to be said.
      place: which rows a server has. "range": a run of rows, as of any other leaf; how many servers
        have some, and which, is as `dtrans.BlockPlacement` says. "bucket": row n is in bucket n %
        buckets, and each server has a run of buckets, so that rows which are next to each other are
        on different servers.
      buckets: how many, with "bucket"; a table of fewer rows has one for each.
      limit: how many rows of the table servers may make at most, each its part of it. A step that
        looks up more ends with an error that names the table. None: as many as there are.
      staleness: how many updates the rows of a step may lack that were asked for ahead
        (`job.prefetch`): a trainer that announces as many batches ahead, or more, has rows as they
        were exactly so many updates before. 0: those that an update has changed since are sent
        again, and numbers are those of a job that asks for nothing ahead.

    Raises:
      ConfigError: another update or place; fewer than one bucket; a limit that is no number of
        rows; a staleness that is no number of steps.

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
            check_number(
                "limit",
                self.limit,
                "None or a positive number of rows",
                lambda x: is_int(x) and x > 0,
            )
        check_int("staleness", self.staleness, "a number of steps", least=0)


def check_sparse(sparse: Any) -> Mapping[str, Rows] | Literal["auto"] | None:
    """The option, as it is kept. Raises ConfigError for what is none."""
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
    """Raise ConfigError for tables whose rows may be stale in a mode in which none are asked for
    ahead."""
    for name, rows in sparse.items() if isinstance(sparse, Mapping) else ():
        if rows.staleness and not isinstance(mode, Sync):
            raise ConfigError(
                f"sparse[{name!r}].staleness={rows.staleness} and mode={mode!r}: rows of "
                "asynchronous steps are as "
                "they are when a step begins, and lack what other trainers have not sent: leave "
                "staleness out, or say "
                "mode=dtrans.Sync()"
            )
