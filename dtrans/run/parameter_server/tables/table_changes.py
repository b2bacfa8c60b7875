"""Tables that live long, as a trainer sees them: what servers have, which rows have changed, and
rows given up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dtrans.checks import check_int
from dtrans.errors import ConfigError
from dtrans.ir.display import plan_text
from dtrans.parameter_server.plan import PServerPlan
from dtrans.parameter_server.tables.choose import Table
from dtrans.protocol.tables.held_tables import TableReport


CHUNK = 1 << 16  # rows that are asked for at once
NUMBERS = ("rows", "made", "bytes", "limit", "evicted", "step")  # of a block, in a report

# of a block: its step, the rows that have changed, and those that were given up, by their numbers
# in the block
BlockChanges = tuple[int, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TablesReport:
    """What the servers of a job have of its tables; it prints as a table.

    Attributes:
      blocks: one `TableReport` for each block, in the order of servers.

    Example:
      >>> import dtrans
      >>> from dtrans.protocol.tables.held_tables import TableReport
      >>> print(dtrans.TablesReport((TableReport("params/emb", "127.0.0.1:6174", 1000, 2, 48, None, 3, 9),)))
      tables
        block       endpoint         rows  made  bytes  limit  evicted  step
        params/emb  127.0.0.1:6174  1,000     2     48   none        3     9
    """

    blocks: tuple[TableReport, ...]

    def __iter__(self) -> Iterator[TableReport]:
        return iter(self.blocks)

    def __str__(self) -> str:
        rows = []
        for x in self.blocks:
            numbers = (x.rows, x.made, x.bytes, x.limit, x.evicted, x.step)
            rows.append((x.name, x.endpoint, *("none" if n is None else f"{n:,}" for n in numbers)))
        return plan_text("tables", ("block", "endpoint", *NUMBERS), rows, (), right=range(2, 8))


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a table that have changed since some step: what a copy of the table lacks.

    Attributes:
      step: that they are of; the `since` of the next call.
      ids: the numbers of rows, increasing.
      rows: the row of each, of shape (len(ids), *row).
      gone: the numbers of rows that were given up since, increasing: they are as the init makes
        them again.

    Example:
      >>> import numpy as np, dtrans
      >>> copy = np.zeros((4, 2))
      >>> changes = dtrans.ChangedRows(7, np.array([1, 3]), np.ones((2, 2)), np.array([0]))
      >>> copy[changes.ids] = changes.rows
      >>> copy[:, 0].tolist()
      [0.0, 1.0, 0.0, 1.0]
    """

    step: int
    ids: np.ndarray
    rows: np.ndarray
    gone: np.ndarray


def table_of(plan: PServerPlan, name: str) -> Table:
    """A table of a plan. Raises ConfigError where there is none of this name."""
    if name not in plan.tables.of:
        tables = ", ".join(plan.tables.of) or "none"
        raise ConfigError(
            f"{name} is no table of this plan; they are: {tables}. job.params(state) has the others"
        )
    return plan.tables.of[name]


def table_servers(plan: PServerPlan) -> list[str]:
    """The servers that have rows of tables."""
    return list(dict.fromkeys(b.endpoint for b in plan.placement.table if b.leaf in plan.tables.of))


def blocks_of_table(plan: PServerPlan, name: str) -> list[tuple[str, str]]:
    """The server and the name of each block of a table."""
    return [(b.endpoint, b.name) for b in plan.placement.blocks[name]]


def check_eviction_of(plan: PServerPlan, name: str, unused_for: int) -> None:
    """Raise ConfigError where rows of a table cannot be given up."""
    table = table_of(plan, name)
    check_int("unused_for", unused_for, "a number of steps", least=1)
    if table.kept:
        raise ConfigError(
            f"rows of {name} cannot be given up: with GEO-SGD trainers keep the rows that they "
            "have looked up, and "
            "what they push is added to these. mode=dtrans.Async() has tables whose rows can be "
            "given up"
        )
    if table.whole or (table.catches_up and table.zero.rests is None):
        raise ConfigError(
            f"rows of {name} cannot be given up: its update moves those too that nobody has looked "
            "up yet "
            f"({table.why}). dtrans.Rows(update='lazy') leaves them as the init makes them"
        )


def changed_rows(
    plan: PServerPlan,
    name: str,
    since: int,
    ask: Callable[[Sequence[tuple[str, str]]], Sequence[BlockChanges]],
    read: Callable[[np.ndarray], np.ndarray],
) -> ChangedRows:
    """The rows of a table that have changed.

    Args:
      ask: gives what has changed of each block.
      read: gives rows by numbers that increase; there is at least one.
    """
    table_of(plan, name)
    check_int("since", since, "a step", least=0)
    found, t = ask(blocks_of_table(plan, name)), plan.main.inputs[name]
    ids, gone = (
        _numbers(plan, name, places) for places in ([x[1] for x in found], [x[2] for x in found])
    )
    rows = np.empty((len(ids), *t.shape[1:]), t.dtype)
    for at in range(0, len(ids), CHUNK):
        rows[at : at + CHUNK] = read(ids[at : at + CHUNK])
    return ChangedRows(min(x[0] for x in found), ids, rows, gone)


def _numbers(plan: PServerPlan, name: str, places: Sequence[np.ndarray]) -> np.ndarray:
    """The numbers in the table of rows at places in its blocks, increasing."""
    blocks = [(b.span, x) for b, x in zip(plan.placement.blocks[name], places, strict=True)]
    return np.sort(np.concatenate([span.in_leaf(x) for span, x in blocks if span is not None]))
