"""Search for sums that a shard needs only as a piece, because they end in sharded outputs.

An example is a gradient that only the moments of a sharded optimizer state read. A shard then
receives its piece by a reduce-scatter, which moves half the bytes of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dtrans._jax import JaxprEqn, Var, facts_of
from dtrans.ir.dataflow import outputs_of, variables
from dtrans.rows.layout import SHARED, Layout, RowAxis
from dtrans.rows.rules import step_of


def row_demands(
    eqns: Sequence[JaxprEqn], outputs: Mapping[Var, RowAxis], full: Collection[Var]
) -> dict[Var, RowAxis]:
    """Return the values that a shard needs only as a piece, with the layouts of the pieces.

    Each of these values turns into a sharded output by elementwise equations alone. If such a value
    is a sum over shards, a reduce-scatter is enough.

    Args:
      eqns: the equations of a program.
      outputs: layouts of the sharded outputs.
      full: outputs that are returned in full.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dtrans.engine.layout import sharded_along
      >>> fn = lambda g, m: (0.9 * m + g * g, (g * g).sum())
      >>> jaxpr = jax.make_jaxpr(fn)(jnp.ones(4), jnp.ones(4)).jaxpr
      >>> found = row_demands(jaxpr.eqns, {jaxpr.outvars[0]: sharded_along(0)}, ())
      >>> [eqn.primitive.name for eqn in jaxpr.eqns if eqn.outvars[0] in found]
      ['mul', 'mul', 'add']
    """
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for v in dict.fromkeys(variables(eqn.invars)):
            readers.setdefault(v, []).append(eqn)
    found: dict[Var, RowAxis] = {}
    for v in reversed(outputs_of(eqns)):
        if v in full:
            continue
        rows = {outputs[v]} if v in outputs else set()
        for reader in readers.get(v, ()):
            rows.update(_rows_of_outputs(reader, v, found))
        if len(rows) == 1:
            (row,) = rows
            if all(_runs_on(reader, v, row) for reader in readers.get(v, ())):
                found[v] = row
    return found


def _rows_of_outputs(eqn: JaxprEqn, operand: Var, found: Mapping[Var, RowAxis]) -> list[RowAxis]:
    """Return the layouts of the outputs that have the operand's shape.

    The list is empty if the equation is not elementwise.
    """
    if not facts_of(eqn).elementwise:
        return []
    shape = operand.aval.shape
    return [found[v] for v in eqn.outvars if v in found and v.aval.shape == shape]


def _runs_on(eqn: JaxprEqn, operand: Var, row: RowAxis) -> bool:
    """Return True if an equation can read the operand as a piece."""
    ins: list[Layout] = [row if a is operand else SHARED for a in eqn.invars]
    return step_of(eqn, ins) is not None
