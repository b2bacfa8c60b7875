"""Choice of the leaves that trainers request by rows, and of the rows that each update changes.

A leaf is an array of the parameter pytree. If trainers request it by rows, it is a *table*, for
example an embedding matrix. In each step, a trainer requests only the rows that its batch looks up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dtrans.errors import ConfigError
from dtrans.ir.program import Program
from dtrans.ops.exact_sum import MOST
from dtrans.parameter_server.tables.lookups import TableLookups, find_lookups
from dtrans.parameter_server.tables.options import RowFilter, Rows
from dtrans.parameter_server.tables.refused_leaves import stacked_remedy
from dtrans.parameter_server.tables.zero_gradient import (
    ZeroGradient,
    at_zero_gradient,
    constant_outputs,
    find_accumulation,
)
from dtrans.rows.analysis import RowAnalysis
from dtrans.step.halves import DividedStep


ID = 4  # number of bytes of a row id in a message
AUTO = 4  # sparse="auto" chooses a leaf if a step looks up at most 1/AUTO of the leaf's rows


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Leaf, such as an embedding matrix, from which trainers request single rows.

    Attributes:
      lookups: the row ids that a step looks up, as values of the step.
      zero: the effect of the update on rows that have a gradient of zero.
      updates_all: True if each update runs on all rows that a server stores, even if few were
        looked up.
      changes_unread_rows: True if an update also changes rows that no trainer looked up, for
        example by weight decay. Servers apply these changes later, before a trainer reads the row.
      limit: the maximum number of rows that all servers together may create; None for no limit.
      why: for the printed plan, a description of the rows that an update changes.
      buckets: the number of buckets (row n is in bucket n % buckets); 0 if each server stores a
        contiguous range of rows.
      on_trainers: True if trainers store the rows that they looked up (GEO-SGD).
      staleness: the maximum number of updates that rows from `job.prefetch` may miss.
      row_filter: the condition under which servers begin to store a row; None if the first lookup
        creates the row.
    """

    lookups: TableLookups
    zero: ZeroGradient
    updates_all: bool
    changes_unread_rows: bool
    limit: int | None = dataclasses.field(default=None, kw_only=True)
    why: str
    buckets: int = 0
    on_trainers: bool = False
    staleness: int = 0
    row_filter: RowFilter | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """Tables of a plan.

    Attributes:
      of: tables by leaf name.
      others: leaves that are no tables, although a step looks up rows of them; a dict from name to
        the reason.
    """

    of: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(self.of)

    @property
    def buckets(self) -> dict[str, int]:
        """The number of buckets of each table that has buckets."""
        return {n: t.buckets for n, t in self.of.items() if t.buckets}


def choose_tables(
    step: DividedStep,
    analysis: RowAnalysis,
    startup: Program,
    sparse: Mapping[str, Rows] | str | None,
    beside: Sequence[str] = (),
    otherwise: str = "Say dtrans.Rows(update='dense')",
) -> Tables:
    """Return the tables of a plan: the leaves from which trainers request single rows.

    Args:
      step: the training step, divided into forward and backward, and the update.
      analysis: the analysis that tells which leaves the update changes row by row.
      startup: the user's init. Its outputs have the names of the step's parameters and state.
      sparse: the option of `dtrans.pserver`: None, "auto", or a mapping from leaf names to
        `dtrans.Rows`.
      beside: name suffixes of arrays that servers add for each table, and that change even if a
        gradient is zero.
      otherwise: advice for error messages, if the user wants an update to skip rows without a
        gradient, but it cannot.

    Raises:
      ConfigError: a leaf in `sparse` cannot be a table. Or its `dtrans.Rows` does not set `update`,
        although "dense" and "lazy" give different results.
    """
    if sparse is None:
        return Tables()
    is_auto = isinstance(sparse, str)
    options: Mapping[str, Rows] = {} if isinstance(sparse, str) else sparse
    for n in options:
        if n not in step.optimized:
            raise ConfigError(
                f"sparse contains {n!r}; expected parameters that servers update: "
                f"{', '.join(step.optimized)}"
            )
    leaves = None if is_auto else list(options)
    found = find_lookups(step, leaves)
    others = dict(found.refused)
    if others and not is_auto:
        name, why = next(iter(others.items()))
        raise ConfigError(
            f"sparse contains {name}, which cannot be a table: {why}; leave it out of sparse"
        )
    of: dict[str, Table] = {}
    for n, lookups in found.tables.items():
        if is_auto and lookups.size * AUTO > lookups.rows:
            remedy = stacked_remedy(n, step.program.inputs[n].shape)
            others[n] = f"a step looks up as many as {lookups.size} of its {lookups.rows} rows"
            others[n] += remedy
        elif n in analysis.groups:
            reason = analysis.groups[n].reason or "the update reads another leaf"
            others[n] = f"its update cannot be cut: {reason}"
            if not is_auto:
                raise ConfigError(
                    f"sparse: {n} cannot be a table: {others[n]}; leave it out of sparse, or use "
                    "another optimizer for it"
                )
        else:
            option = options.get(n, Rows("dense"))
            of[n] = _choose_update(n, lookups, analysis, startup, option, beside, otherwise)
    return Tables(of, others)


def _choose_update(
    name: str,
    lookups: TableLookups,
    analysis: RowAnalysis,
    startup: Program,
    option: Rows,
    beside: Sequence[str],
    otherwise: str,
) -> Table:
    """Return the `Table` of one leaf; raise ConfigError if the leaf cannot have this option."""
    zero = at_zero_gradient(analysis, name, constant_outputs(startup))
    if beside:
        moves = (*zero.changes, *(name + suffix for suffix in beside))
        zero = dataclasses.replace(zero, changes=moves)
    if option.update == "lazy":
        why = _why_all_rows(zero)
        if zero.changes and not why:
            why = find_accumulation(analysis, name)
        if why:
            raise ConfigError(f"sparse: {name} cannot have update='lazy': {why}. {otherwise}")
    table = _table(name, lookups, zero, option)
    if option.limit is not None:
        _check_creation(name, table, f"limit={option.limit}")
    if option.row_filter is not None:
        _check_creation(name, table, str(option.row_filter))
    buckets = min(option.buckets, lookups.rows) * (option.place == "bucket")
    return dataclasses.replace(
        table,
        limit=option.limit,
        buckets=buckets,
        staleness=option.staleness,
        row_filter=option.row_filter,
    )


def exactly_summed_leaves(step: DividedStep, tables: Tables, trainers: int) -> frozenset[str]:
    """Return the names of the leaves for which servers add gradients without rounding errors.

    A floating-point sum depends on the order of its terms, and the assignment of rows to servers
    changes this order. With exact sums, a job with tables returns the same bits for every
    assignment. An exact sum has a maximum number of terms; a leaf with more rows is not in the
    result.
    """
    if not tables.of:
        return frozenset()
    found = set()
    for n in step.optimized:
        table, shape = tables.of.get(n), step.program.inputs[n].shape
        rows = shape[0] if shape else 1
        if table is not None and not table.updates_all:
            rows = table.lookups.size * trainers
        if rows <= MOST:
            found.add(n)
    return frozenset(found)


def _table(name: str, lookups: TableLookups, zero: ZeroGradient, option: Rows) -> Table:
    all_rows = _why_all_rows(zero)
    if option.update == "lazy":
        return Table(
            lookups, zero, False, False, "lazy: rows that no trainer looks up stay unchanged"
        )
    if not zero.changes and not all_rows:
        why = "dense: rows that no trainer looks up would not change"
        return Table(lookups, zero, False, False, why)
    why = all_rows
    if zero.changes:
        verb = "change" if len(zero.changes) > 1 else "changes"
        why = f"{', '.join(zero.changes)} {verb} even if the gradient is zero"
    if option.update is None:
        raise ConfigError(
            f"sparse: dtrans.Rows for {name} needs update='dense' or update='lazy', since {why}. "
            "'dense' changes all rows, as one device does; with 'lazy', rows that no trainer looks "
            "up stay unchanged"
        )
    if all_rows:
        return Table(
            lookups, zero, True, False, f"dense: servers update all rows in each step, since {why}"
        )
    return Table(
        lookups, zero, False, True, f"dense: rows catch up when they are looked up, since {why}"
    )


def _check_creation(name: str, table: Table, option: str) -> None:
    """Raise ConfigError if an option limits the rows of a table, but servers need all rows.

    Args:
      name: name of the table.
      table: the table.
      option: text of the option, such as "limit=9".
    """
    if table.updates_all or (table.changes_unread_rows and table.zero.initial_values is None):
        raise ConfigError(
            f"sparse: {name} cannot have {option}, since its update also changes rows that no "
            f"trainer has looked up ({table.why}); leave {option.partition('=')[0]} out, or pass "
            f"dtrans.Rows(update='lazy', {option})"
        )


def _why_all_rows(zero: ZeroGradient) -> str:
    """Return the reason why an update must run on all rows; empty if it can skip rows.

    Args:
      zero: the effect of the update on rows that have a gradient of zero.
    """
    if zero.reduction_over_rows:
        return f"{zero.reduction_over_rows} reduces over all rows"
    if zero.index_dependence:
        return f"{zero.index_dependence} computes a row from its row id"
    if zero.state_on_other_axis:
        return f"{zero.state_on_other_axis[0]} has the rows along another dimension than 0"
    return ""


def table_notes(tables: Tables, row_bytes: Mapping[str, int], often: str = "") -> list[str]:
    """Return the remarks on tables for a printed plan.

    Args:
      tables: the tables of the plan.
      row_bytes: for each table, the maximum number of bytes that a trainer sends and receives.
      often: the interval of these transfers, such as " in 10 steps"; empty for each step.
    """
    notes = []
    for n, t in tables.of.items():
        buckets = keeps = stale = ""
        if t.buckets:
            buckets = f" in {t.buckets} buckets"
        if t.on_trainers:
            keeps = ", and kept by the trainer"
        if t.staleness:
            stale = f"; prefetched rows may miss {t.staleness} updates"
        notes.append(
            f"table {n}: {t.lookups.rows:,} rows{buckets}, at most {t.lookups.size:,} looked up by "
            f"a trainer in a step{keeps}, at most {row_bytes[n]:,} bytes{often}; {t.why}{stale}"
        )
    for n, t in tables.of.items():
        if t.row_filter is not None:
            notes.append(
                f"row filter of {n}: {t.row_filter}; servers drop the gradients of a row before "
                "its admission, so results differ from one device"
            )
    for n, why in tables.others.items():
        notes.append(f"no table: {n}: {why}")
    return notes
