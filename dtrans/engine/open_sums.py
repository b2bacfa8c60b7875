"""Open sums: partial sums that are all-reduced later, because a linear equation reads them.

Suppose that only one equation reads a partial sum. If this equation is linear, and its output is
not larger than the sum, each shard runs the equation on its term. The output is then a partial sum,
too. For example, if several products read a parameter, each shard adds its terms of the gradients,
and the total is reduced once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from dtrans._jax import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    facts_of,
    is_rearrangement,
    linear_group,
    linear_operands,
)
from dtrans.engine.layout import Partial, ShardLayout
from dtrans.engine.values import ShardValues
from dtrans.ir.cost import nbytes, total_bytes
from dtrans.ir.dataflow import variables
from dtrans.ir.selection import values_at
from dtrans.rows.layout import row_axes


# Name -> operand with which the output is compared. If the output is larger, the sum is reduced
# before the equation. `pad` is not listed, because the gradients of several slices of a parameter
# are padded, added, and then reduced once.
_GROWS: Mapping[str, int] = {"broadcast_in_dim": 0, "scatter-add": 2}


def open_operands(
    values: ShardValues, eqn: JaxprEqn, ins: Sequence[ShardLayout], terms: Collection[Var]
) -> Collection[int] | None:
    """Return the operands that an equation reads as terms, which delays the sum over shards.

    A *term* is the array that one shard adds to a partial sum. For example, in `3 * x` with a
    partial sum x, each shard multiplies its term, and the sum over shards is delayed.

    Args:
      values: values of the shard.
      eqn: the equation.
      ins: layout of each operand.
      terms: values to leave as partial sums (`linear_terms`). A linear equation that computes one
        of these values runs on terms. A replicated operand then counts as a term of the first
        shard.

    Returns:
      The indices of these operands; None if partial sums must be reduced before this equation.
    """
    opens = [i for i, x in enumerate(ins) if isinstance(x, Partial)]
    if not opens or not eqn.outvars or row_axes(ins):
        return None
    is_mixed = len({eqn.invars[i] in values.local_terms for i in opens}) > 1
    if is_mixed and eqn.outvars[0] not in terms:
        return None
    if eqn.outvars[0] in terms:
        added = eqn.invars[2] if eqn.primitive.name == "scatter-add" else eqn.outvars[0]
        if not isinstance(added, Var) or added not in terms:
            return None
        return linear_group(eqn, opens) or None
    name = eqn.primitive.name
    if any(values.reads_of(a) != 1 for i in opens if isinstance(a := eqn.invars[i], Var)):
        return None
    if _adds_terms(eqn, opens):
        return opens
    # the factor must be a finite literal, because 0 times infinity is NaN, and a term may be 0
    factor = next((a.val for a in eqn.invars if isinstance(a, Literal) and not a.aval.ndim), np.nan)
    if name not in ("mul", "div") or not np.isfinite(factor):
        return None
    inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    divides = isinstance(ins[0], Partial) and inexact and factor != 0
    if name == "mul" or divides:
        return opens
    return None


def linear_terms(inner: Jaxpr, outs: Collection[Var], summed: Collection[Var] = ()) -> set[Var]:
    """Return the values that may stay partial sums, because `outs` depend on them linearly.

    A sum is normally reduced before it is broadcast, because the result of the broadcast is larger.
    There is an exception: elementwise equations may turn the broadcast into one of the `summed`
    values, which is reduced anyway. Casts round, so a sum is reduced before a cast if an equation
    needs the full result of the cast.

    Args:
      inner: the jaxpr.
      outs: values that may be partial sums.
      summed: values that are all-reduced in any case.
    """
    found, anyway = set(outs), set(summed)
    needed: set[Var] = set()  # values that an equation reads in full
    for eqn in reversed(inner.eqns):
        operands = variables(eqn.invars)
        is_summed = anyway.issuperset(eqn.outvars)
        if _rounds(eqn) and needed.issuperset(eqn.outvars) and not is_summed:
            found.difference_update(eqn.outvars)
        terms: set[Var] = set()
        if not eqn.outvars or not found.issuperset(eqn.outvars):
            pass
        elif eqn.primitive.name in _GROWS and _grows(eqn) and not is_summed:
            if eqn.primitive.name == "broadcast_in_dim":
                found.difference_update(eqn.outvars)
        else:
            if is_summed and (facts_of(eqn).elementwise or is_rearrangement(eqn)):
                anyway.update(operands)
            linear = {i for together in linear_operands(eqn) for i in together}
            terms = {a for i, a in enumerate(eqn.invars) if i in linear and isinstance(a, Var)}
        found |= terms
        needed.update(a for a in operands if a not in terms)
    return found


def _rounds(eqn: JaxprEqn) -> bool:
    """Return True if an equation casts its operand to a smaller type."""
    if eqn.primitive.name != "convert_element_type":
        return False
    return nbytes(eqn.outvars[0].aval) < nbytes(eqn.invars[0].aval)


def _grows(eqn: JaxprEqn) -> bool:
    return eqn.outvars[0].aval.size > eqn.invars[_GROWS[eqn.primitive.name]].aval.size


def _adds_terms(eqn: JaxprEqn, opens: Sequence[int]) -> bool:
    """Return True if an equation is linear in the operands `opens`, and does not enlarge them.

    Return False for casts, which round. All other operands must be integers, such as indices: a
    term may be 0, and 0 times an infinite float would be NaN.
    """
    others = [a for i, a in enumerate(eqn.invars) if i not in opens]
    if (
        eqn.primitive.name == "convert_element_type"
        or len(eqn.outvars) != 1
        or any(map(_is_inexact, others))
    ):
        return False
    size = total_bytes(values_at(eqn.invars, opens))
    return tuple(opens) in linear_operands(eqn) and nbytes(eqn.outvars[0].aval) <= size


def _is_inexact(atom: Atom) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))
