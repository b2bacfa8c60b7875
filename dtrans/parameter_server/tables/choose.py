"""Choice of a plan's tables, and of the way in which servers update each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.ops.exact_sum import MOST
from dtrans.parameter_server.tables.lookups import TableLookups, find_lookups
from dtrans.parameter_server.tables.options import Rows
from dtrans.parameter_server.tables.zero_gradient import (
    ZeroGradient,
    at_zero_gradient,
    find_waiting,
    numbers_of,
)
from dtrans.rows.analysis import RowAnalysis
from dtrans.step.cut import Cut


ID = 4  # bytes of the number of a row, as it is sent
AUTO = 4  # "auto" takes a leaf of which a step looks up at most one row in so many


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Leaf whose rows trainers look up.

    Attributes:
      lookups: the lookups of a step.
      zero: the effect of the update on rows whose gradient is zero.
      whole: whether each update touches all rows.
      catches_up: whether rows that no trainer looked up change too, and catch up before they are
        read.
      limit: the greatest number of rows that servers may create.
      why: a description of the update for users.
      buckets: the number of buckets of its rows; 0 if servers have runs of rows.
      kept: whether trainers store the rows that they have looked up (GEO-SGD).
      staleness: the greatest number of updates that prefetched rows may lack.
    """

    lookups: TableLookups
    zero: ZeroGradient
    whole: bool
    catches_up: bool
    limit: int | None = dataclasses.field(default=None, kw_only=True)
    why: str
    buckets: int = 0
    kept: bool = False
    staleness: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """The tables of a plan.

    Attributes:
      of: name to table.
      others: leaves whose rows are looked up and that are not tables, with the reason.
    """

    of: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tables."""
        return tuple(self.of)

    @property
    def buckets(self) -> dict[str, int]:
        """Return the number of buckets of each table that has buckets."""
        return {n: t.buckets for n, t in self.of.items() if t.buckets}


def choose_tables(
    step: Cut,
    analysis: RowAnalysis,
    startup: Program,
    sparse: Mapping[str, Rows] | str | None,
    beside: Sequence[str] = (),
    otherwise: str = "Say dtrans.Rows(update='dense')",
) -> Tables:
    """Choose the tables of a plan.

    Args:
      analysis: of the update.
      startup: the init, with names as in the step.
      sparse: as in `dtrans.pserver`.
      beside: what servers keep beside each table that moves with a gradient of zero: what follows
        its name.
      otherwise: the remedy where an update has no lazy form.

    Raises:
      ConfigError: a leaf that is named, and is no table, or whose update has to be said.
    """
    if sparse is None:
        return Tables()
    is_auto = isinstance(sparse, str)
    options: Mapping[str, Rows] = {} if isinstance(sparse, str) else sparse
    for n in options:
        if n not in step.optimized:
            raise ConfigError(
                f"sparse names {n}; the parameters that servers update are "
                f"{', '.join(step.optimized)}"
            )
    found = find_lookups(step, None if is_auto else list(options))
    others = dict(found.refused)
    if others and not is_auto:
        name, why = next(iter(others.items()))
        raise ConfigError(
            f"sparse: trainers cannot look up rows of {name} alone: {why}. Leave it out"
        )
    of: dict[str, Table] = {}
    for n, lookups in found.tables.items():
        if is_auto and lookups.size * AUTO > lookups.rows:
            others[n] = f"a step looks up as many as {lookups.size} of its {lookups.rows} rows"
            continue
        if n in analysis.groups:
            why = (
                f"its update cannot be cut: {analysis.groups[n].reason or 'it needs another leaf'}"
            )
            if not is_auto:
                raise ConfigError(
                    f"sparse: {n} cannot be a table: {why}. Leave it out, or give it another "
                    "optimizer"
                )
            others[n] = why
            continue
        zero = at_zero_gradient(analysis, n, numbers_of(startup))
        if beside:
            zero = dataclasses.replace(zero, moves=(*zero.moves, *(n + x for x in beside)))
        option = options.get(n, Rows("dense"))
        if option.update == "lazy":
            why = _rows_alone(zero) or (find_waiting(analysis, n) if zero.moves else "")
            if why:
                raise ConfigError(f"sparse: {n} cannot have update='lazy': {why}. {otherwise}")
        table = _limited(n, _table(n, lookups, zero, option), option.limit)
        buckets = min(option.buckets, lookups.rows) * (option.place == "bucket")
        of[n] = dataclasses.replace(table, buckets=buckets, staleness=option.staleness)
    return Tables(of, others)


def added_exactly(step: Cut, tables: Tables, trainers: int) -> frozenset[str]:
    """Leaves whose rows are added up exactly, so that bits do not depend on where rows are: all of
    a plan with tables.

    But for those of more rows than an exact sum can have.
    """

    def numbers(name: str) -> int:
        table = tables.of.get(name)
        shape = step.program.inputs[name].shape
        return (
            table.lookups.size * trainers if table and not table.whole else shape[0] if shape else 1
        )

    return frozenset(n for n in step.optimized if tables.of and numbers(n) <= MOST)


def _table(name: str, lookups: TableLookups, zero: ZeroGradient, option: Rows) -> Table:
    alone = _rows_alone(zero)
    if option.update == "lazy":
        return Table(
            lookups, zero, False, False, "lazy: rows that nobody looks up stay as they are"
        )
    if not zero.moves and not alone:
        return Table(lookups, zero, False, False, "dense: rows that nobody looks up would not move")
    why = (
        f"{', '.join(zero.moves)} move{'s' * (len(zero.moves) == 1)} with a gradient of zero"
        if zero.moves
        else alone
    )
    if option.update is None:
        raise ConfigError(
            f"sparse: say how rows of {name} are updated that nobody looks up, since {why}: "
            "dtrans.Rows(update='dense') moves all rows, as one device does; "
            "dtrans.Rows(update='lazy') leaves them as they are"
        )
    if alone:
        return Table(
            lookups, zero, True, False, f"dense: servers update all rows in each step, since {why}"
        )
    return Table(
        lookups, zero, False, True, f"dense: rows catch up when they are looked up, since {why}"
    )


def _limited(name: str, table: Table, limit: int | None) -> Table:
    if limit is None:
        return table
    if table.whole or (table.catches_up and table.zero.rests is None):
        raise ConfigError(
            f"sparse: {name} cannot have a limit of rows: its update moves those too that nobody "
            "has looked up yet "
            f"({table.why}). Leave the limit out, or say dtrans.Rows(update='lazy', limit={limit})"
        )
    return dataclasses.replace(table, limit=limit)


def _rows_alone(zero: ZeroGradient) -> str:
    """Why some rows cannot be updated without the others; empty where they can."""
    if zero.counts:
        return f"{zero.counts} reduces over all rows"
    if zero.positions:
        return f"{zero.positions} makes of each row's number what enters it"
    if zero.unlike:
        return f"{zero.unlike[0]} has the rows along another dimension"
    return ""


def notes_of(tables: Tables, moved: Mapping[str, int], often: str = "") -> Sequence[str]:
    """Return a plan's remarks on its tables.

    Args:
      moved: the most bytes of each table that a trainer sends and receives.
      often: the interval of these transfers, if it is not each step: " in 10 steps".
    """
    notes = []
    for n, t in tables.of.items():
        size, rows, keeps = t.lookups.size, t.lookups.rows, ", which keeps them" * t.kept
        notes.append(
            f"table {n}: {rows:,} rows{f' in {t.buckets} buckets' * bool(t.buckets)}, at most "
            f"{size:,} looked up by a "
            f"trainer in a step{keeps}, at most {moved[n]:,} bytes{often}; {t.why}"
            + f"; rows asked for ahead may lack {t.staleness} updates"
            * bool(t.staleness)
        )
    return [*notes, *(f"no table: {n}: {why}" for n, why in tables.others.items())]
