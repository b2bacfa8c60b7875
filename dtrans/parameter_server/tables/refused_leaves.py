"""Reasons why trainers cannot request single rows of a leaf.

Errors and printed plans contain them.

Some reasons also tell the user a way to change the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrans._jax import WHILE, Atom, JaxprEqn, Var, line_of
from dtrans.ir.dataflow import variables, variables_read
from dtrans.ir.display import short_type
from dtrans.parameter_server.tables.pick_ids import RowLookup, numbers_first
from dtrans.parameter_server.tables.row_picks import adds_rows
from dtrans.rows.flow import Flow
from dtrans.rows.layout import Colocated, RowAxis
from dtrans.step.halves import DividedStep


_REMEDIES = {
    "concatenate": " (for a row of zeros, give padding an id outside the table, and read "
    "jnp.take(table, ids, axis=0, mode='fill', fill_value=0))",
    "reshape": " (let init return the parameter in the shape whose rows the step looks up)",
}


def find_refusal(
    step: DividedStep,
    eqns: Sequence[JaxprEqn],
    flow: Flow,
    leaf: str,
    picks: Sequence[RowLookup],
    zeros: set[Var],
) -> str:
    """Return the reason why trainers cannot request single rows of a leaf; empty if they can.

    Args:
      step: the step, with its calls inlined.
      eqns: the equations of forward and backward, with calls inside their bodies inlined.
      flow: the result of row analysis (`dtrans.rows`) of the equations.
      leaf: name of the leaf.
      picks: the lookups of all tables.
      zeros: values that are zero in all rows that the step does not look up.
    """
    for i, done in flow.steps.items():
        read = [a for a in eqns[i].invars if isinstance(flow.layout(a), RowAxis)]
        layouts = [flow.layout(a) for a in read]
        if not any(isinstance(x, RowAxis) and x.leaf == leaf for x in layouts):
            continue
        for layout in done.outs:
            if isinstance(layout, Colocated) and leaf in layout.leaves:
                stacked = stacked_remedy(leaf, step.program.inputs[leaf].shape)
                remedy = _REMEDIES.get(eqns[i].primitive.name, stacked)
                why = layout.reason or f"{_text(eqns[i])} mixes its rows"
                return f"{why}{remedy}"
        if done.reduce and not (done.reduce == "sum" and zeros.issuperset(variables(read))):
            return f"{_text(eqns[i])} reads all of its rows"
        if eqns[i].primitive.name == WHILE:
            return (
                f"{_text(eqns[i])} looks rows up in an unknown number of iterations (look them up "
                "before the loop)"
            )
    if not any(x.leaf == leaf and not adds_rows(x.eqn) for x in picks):
        return "no equation of the step picks rows of it"
    gradient = step.gradients.get(leaf)
    if gradient is None or flow.layout(gradient) != RowAxis(leaf, 0):
        return "its gradient is not a sum of rows"
    if not step.program.inputs[leaf].shape[0]:
        return "it has no rows"
    outs = step.program.outvars
    for n in (*step.results, *step.frozen):
        if n != leaf and isinstance(flow.layout(outs[n]), RowAxis):
            return f"the step returns its rows in {n}"
    return ""


def stacked_remedy(leaf: str, shape: Sequence[int]) -> str:
    """Return advice for a leaf that consists of several stacked tables; empty for other leaves."""
    if len(shape) < 3:
        return ""
    count, rows, *row = shape
    flat = ", ".join(map(str, (count * rows, *row)))
    name = leaf.rpartition("/")[2]
    return (
        f" (if {name}[f] are separate tables, let init return one array of shape ({flat}), and "
        f"look up {name}[f * {rows} + ids])"
    )


def find_refused_ids(
    eqns: Sequence[JaxprEqn], picks: Sequence[RowLookup], tables: set[Var], like: Any
) -> dict[str, str]:
    """Return an error message, by leaf, for each table with row ids that depend on table rows.

    A trainer requests the rows of all tables at once. So it cannot use a received row to compute
    the id of another row.

    Args:
      eqns: the equations of forward and backward, and `Lookups.id_eqns`.
      picks: the lookups of all tables.
      tables: variables of the step that contain tables.
      like: the jaxpr of the step.
    """

    def depend(numbers: Sequence[Atom]) -> bool:
        return not tables.isdisjoint(variables_read(numbers_first(eqns, numbers, like)))

    found: dict[str, str] = {}
    if depend([x.row_ids for x in picks]):
        for x in picks:
            if depend([x.row_ids]):
                found[x.leaf] = f"the rows that {_text(x.eqn)} picks depend on rows of a table"
    return found


def _text(eqn: JaxprEqn) -> str:
    """Return a description of an equation for users: name, type of its first variable, line."""
    text = eqn.primitive.name
    read = variables(eqn.invars)
    if read:
        text += f" of {short_type(read[0].aval)}"
    line = line_of(eqn)
    if line:
        text += f" ({line})"
    return text
