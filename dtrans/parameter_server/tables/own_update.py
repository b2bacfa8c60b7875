"""Tables of GEO-SGD: a trainer updates the rows that it looks up, with its own optimizer state.

The trainer stores all rows that it has looked up, and their optimizer state
(`dtrans.protocol.tables.cached_rows`). A step reads and updates the rows of its batch. The update
has the equations that a server would run if it stored only these rows.
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
from dtrans.ir.selection import subset
from dtrans.ops import RowsProgram
from dtrans.parameter_server.options import BlockPlacement
from dtrans.parameter_server.placement import place
from dtrans.parameter_server.tables.choose import Table, Tables, choose_tables
from dtrans.parameter_server.tables.options import Rows
from dtrans.parameter_server.tables.touched_rows import mark_tables, resized
from dtrans.parameter_server.tables.zero_gradient import at_zero_gradient, find_accumulation
from dtrans.rows.analysis import RowAnalysis, analyse
from dtrans.slicing.partial_init import makes_rows, write_rows
from dtrans.slicing.server_spec import analyse_update
from dtrans.slicing.server_update import inline_update, write_server
from dtrans.step.halves import DividedStep


TRAINER = "trainer:0"  # placeholder for a server's endpoint in the update of a trainer
REMEDY = "Leave it out of sparse, or use another optimizer for it"
OTHER_ROWS = "with dtrans.Geo trainers update only the rows that they look up"


def choose_trainer_tables(
    step: DividedStep, startup: Program, sparse: Mapping[str, Rows] | str | None
) -> Tables:
    """Return the tables for which trainers store and update rows.

    Args:
      step: the training step, divided into forward and backward, and the update.
      startup: the user's init. Its outputs have the names of the step's parameters and state.
      sparse: as in `dtrans.pserver`.

    Raises:
      ConfigError: a leaf in `sparse` cannot be a table, or its rows change without a gradient.
    """
    if sparse is None:
        return Tables()
    analysis = analyse(step.optimize, step.optimized)
    found = choose_tables(step, analysis, startup, sparse, otherwise=REMEDY)
    of, others = {}, dict(found.others)
    for n, table in found.of.items():
        why = _why_refused(table, analysis, startup)
        if why and not isinstance(sparse, str):
            raise ConfigError(f"sparse: {n} cannot be a table: {OTHER_ROWS}, but {why}")
        if why:
            others[n] = f"{OTHER_ROWS}, but {why}"
        else:
            of[n] = dataclasses.replace(table, on_trainers=True)
    return Tables(of, others)


def _why_refused(table: Table, analysis: RowAnalysis, startup: Program) -> str:
    """Return the reason why a trainer cannot update single rows of a table; empty if it can."""
    leaf = table.lookups.leaf
    if table.changes_unread_rows:
        if waits := find_accumulation(analysis, leaf):
            return f"other rows change too ({table.why}), and {waits}. {REMEDY}"
        lazy = f"sparse={{{leaf!r}: dtrans.Rows(update='lazy')}}"
        return f"other rows change too ({table.why}); pass {lazy}"
    if table.updates_all:
        return f"the update changes all rows ({table.why}). {REMEDY}"
    for n in table.zero.state:
        if not makes_rows(startup.jaxpr, startup.outvars[n], 0):
            return f"the init computes {n} as one array, not row by row; leave it out of sparse"
    return ""


def on_servers(table: Table, analysis: RowAnalysis) -> Table:
    """Return a copy of a table's record that describes the update of GEO-SGD's servers.

    The optimizer runs on trainers; servers only add the trainers' changes to rows.

    Args:
      table: the record that describes the optimizer's update, which trainers run.
      analysis: the analysis of rows (`dtrans.rows`) of the servers' update, parameter + change.
    """
    zero = at_zero_gradient(analysis, table.lookups.leaf, {})
    return dataclasses.replace(table, zero=zero)


def write_update(
    b: Builder,
    step: DividedStep,
    sizes: Mapping[str, int],
    read: Mapping[str, Atom],
    gradients: Mapping[str, Atom],
) -> dict[str, Atom]:
    """Write the equations that update the looked-up rows of a trainer's tables (GEO-SGD).

    The equations are those of the optimizer in the user's step. They run on the rows that this step
    has looked up, not on complete tables.

    Args:
      b: builder of the trainer's program.
      step: the training step, divided into forward and backward, and the update.
      sizes: number of looked-up rows of each table, by name.
      gradients: the gradient of each leaf, by name; for a table, of the looked-up rows only.
      read: values of parameters and optimizer state, by name. For a table, and for state with one
        row for each row of the table, the value contains only the `sizes[table]` looked-up rows.

    Returns:
      The new parameters and optimizer state, by name.
    """
    analysis = analyse(step.optimize, step.optimized)
    types = subset(step.program.inputs, step.optimized)
    placed = mark_tables(place(analysis, types, (TRAINER,), BlockPlacement()), sizes)
    work = write_server(analyse_update(analysis, resized(placed, sizes)), TRAINER)
    inputs = dict(read)
    for update in work.blocks:
        inputs |= {g.name: gradients[g.leaf] for g in update.grads}
    return inline_update(b, work, inputs)


def initial_state_rows(startup: Program, state: Sequence[str]) -> RowsProgram:
    """Return a program that computes the initial optimizer state of table rows from their ids.

    In GEO-SGD, a trainer runs this program at the first lookup of a row.

    Args:
      startup: the user's init. Its outputs have the names of the step's parameters and state.
      state: names of the arrays of the optimizer state that have a row for each row of the table.
    """
    return RowsProgram(functools.partial(_state_rows, startup, tuple(state)))


def _state_rows(startup: Program, state: Sequence[str], count: int) -> ClosedJaxpr:
    b = Builder(startup.jaxpr)
    ids = b.input(ShapedArray((count,), jnp.int32))
    b.invars += startup.inner.invars
    wanted = [(startup.outvars[n], 0) for n in state]
    return eliminate_dead(b.build(write_rows(b, startup.jaxpr, wanted, ids)))


def empty_types(tables: Tables, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of tables, and of the optimizer state of their rows, without any rows.

    A trainer's program has these types, because the trainer stores rows outside of the program's
    arrays.

    Args:
      tables: the tables of the plan.
      types: types of the full arrays, by name.
    """
    found = {}
    for n, table in tables.of.items():
        for name in (n, *table.zero.state):
            found[name] = ShapedArray((0, *types[name].shape[1:]), types[name].dtype)
    return found
