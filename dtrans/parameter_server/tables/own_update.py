"""GEO-SGD's tables: a trainer updates the rows that it looks up by itself, with an optimizer of its
own.

It keeps the rows that it has looked up, and their state (`dtrans.protocol.tables.kept_rows`); a
step is given those of its batch. The update is that of a server which has these rows of tables, and
all of the other leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, ShapedArray
from dtrans.errors import ConfigError
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import Program
from dtrans.ops import RowsProgram
from dtrans.parameter_server.options import BlockPlacement
from dtrans.parameter_server.placement import place
from dtrans.parameter_server.tables.choose import Table, Tables, choose_tables
from dtrans.parameter_server.tables.options import Rows
from dtrans.parameter_server.tables.touched_rows import mark_tables, resized
from dtrans.parameter_server.tables.zero_gradient import at_zero_gradient, find_waiting
from dtrans.rows.analysis import RowAnalysis, analyse
from dtrans.slicing.partial_init import makes_rows, write_rows
from dtrans.slicing.server_spec import analyse_update
from dtrans.slicing.server_update import inline_update, write_server
from dtrans.step.cut import Cut


HERE = "trainer:0"  # where the update of a trainer is
INSTEAD = "Leave it out, or give it another optimizer"
KEEPS = "with dtrans.Geo trainers update the rows that they look up by themselves"


def choose_kept_tables(
    step: Cut, startup: Program, sparse: Mapping[str, Rows] | str | None
) -> Tables:
    """Choose the tables whose rows trainers store and update.

    Args:
      startup: the init, with names as in the step.
      sparse: as in `dtrans.pserver`.

    Raises:
      ConfigError: a named leaf is not a table, or its rows change without a gradient.
    """
    if sparse is None:
        return Tables()
    analysis = analyse(step.optimize, step.optimized)
    found = choose_tables(step, analysis, startup, sparse, otherwise=INSTEAD)
    refused = {
        n: f"{KEEPS}, and {why}"
        for n, t in found.of.items()
        if (why := _why_not_kept(t, analysis, startup))
    }
    for n, why in refused.items():
        if not isinstance(sparse, str):
            raise ConfigError(f"sparse: {n} cannot be a table: {why}")
    of = {
        n: dataclasses.replace(t, on_trainers=True) for n, t in found.of.items() if n not in refused
    }
    return Tables(of, {**found.others, **refused})


def _why_not_kept(table: Table, analysis: RowAnalysis, startup: Program) -> str:
    """Why a trainer cannot update the rows of a table that it looks up, without the others; empty
    where it can."""
    lazy = f"sparse={{{table.lookups.leaf!r}: dtrans.Rows(update='lazy')}}"
    if table.catches_up:
        if waits := find_waiting(analysis, table.lookups.leaf):
            return f"other rows move, too ({table.why}), for which {waits}. {INSTEAD}"
        return f"other rows move, too ({table.why}): say {lazy}"
    if table.updates_all:
        return f"an update is of all rows ({table.why}): leave it out, or give it another optimizer"
    made = startup.outvars
    whole = next((n for n in table.zero.state if not makes_rows(startup.jaxpr, made[n], 0)), None)
    return "" if whole is None else f"the init makes {whole} whole, not row by row: leave it out"


def on_servers(table: Table, analysis: RowAnalysis) -> Table:
    """Return the table on servers, which add the trainers' changes to its rows."""
    zero = at_zero_gradient(analysis, table.lookups.leaf, {})
    return dataclasses.replace(table, zero=zero)


def write_update(
    b: Builder,
    step: Cut,
    sizes: Mapping[str, int],
    read: Mapping[str, Atom],
    gradients: Mapping[str, Atom],
) -> dict[str, Atom]:
    """Write what a step updates.

    Args:
      sizes: how many rows of each table there are.
      read: parameters and the optimizer's state, by name: of tables, and of state that has a row
        for each of theirs, so many rows.
      gradients: by leaf.

    Returns:
      New parameters and state, by name.
    """
    analysis = analyse(step.optimize, step.optimized)
    types = {n: step.program.inputs[n] for n in step.optimized}
    placed = mark_tables(place(analysis, types, (HERE,), BlockPlacement()), sizes)
    work = write_server(analyse_update(analysis, resized(placed, sizes)), HERE)
    return inline_update(
        b, work, {**read, **{g.name: gradients[g.leaf] for x in work.blocks for g in x.grads}}
    )


def state_of_rows(startup: Program, state: Sequence[str]) -> RowsProgram:
    """Return the program of the initial state of rows, from their numbers and init's arguments.

    Args:
      startup: the init, with names as in the step.
      state: arrays that have a row for each of the table's, by name.
    """
    return RowsProgram(functools.partial(_state_rows, startup, tuple(state)))


def _state_rows(startup: Program, state: Sequence[str], count: int) -> ClosedJaxpr:
    made = startup.outvars
    b = Builder(startup.jaxpr)
    numbers = b.input(ShapedArray((count,), jnp.int32))
    b.invars += startup.inner.invars
    return eliminate_dead(
        b.build(write_rows(b, startup.jaxpr, [(made[n], 0) for n in state], numbers))
    )


def no_rows_of(tables: Tables, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of empty tables, and of their state by rows, of a trainer."""
    names = [m for n, t in tables.of.items() for m in (n, *t.zero.state)]
    return {n: ShapedArray((0, *types[n].shape[1:]), types[n].dtype) for n in names}
