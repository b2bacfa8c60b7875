"""What a user says of tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dtrans.checks import check_one_of, check_type
from dtrans.errors import ConfigError
from dtrans.parameter_server.options import Geo


@dataclasses.dataclass(frozen=True)
class Rows:
    """How servers update a leaf of which trainers look up rows.

    Attributes:
      update: "dense": every row moves as on one device, those too that no trainer has looked up: momentum goes on, and
        so does the decay of weights. "lazy": rows that nobody has looked up stay as they are, and so does their part of
        the optimizer's state; counts of steps are the optimizer's own, and go on. None: whichever it is, where both are
        the same (plain SGD, Adagrad); elsewhere it has to be said.

    Raises:
      ConfigError: another update.

    Example:
      >>> import dtrans
      >>> dtrans.Rows(update="lazy").update
      'lazy'
    """

    update: Literal["dense", "lazy"] | None = None

    def __post_init__(self) -> None:
        check_one_of("update", self.update, (None, "dense", "lazy"))


def check_sparse(sparse: Any) -> Mapping[str, Rows] | Literal["auto"] | None:
    """The option, as it is kept. Raises ConfigError for what is none."""
    if sparse is None:
        return None
    if sparse == "auto":
        return "auto"
    if not isinstance(sparse, Mapping):
        raise ConfigError(f"sparse={sparse!r} must be None, 'auto', or {{'params/emb': dtrans.Rows(...)}}")
    for name, rows in sparse.items():
        check_type(f"sparse[{name!r}]", rows, Rows, "a dtrans.Rows")
    return dict(sparse)


def check_tables_mode(sparse: Any, mode: Any) -> None:
    """Raise ConfigError for tables in a mode that has none."""
    if sparse is not None and isinstance(mode, Geo):
        raise ConfigError(
            f"sparse={sparse!r} and mode={mode!r}: with GEO-SGD each trainer updates all parameters, with an optimizer "
            "of its own, and so has all rows: mode=dtrans.Sync(), dtrans.Async() or dtrans.HalfAsync()"
        )
