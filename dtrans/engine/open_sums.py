"""Partial sums that stay open: equations that are linear in them run on the shards' terms.

A sum with one reader is reduced after the reader, if that is linear and its output is not larger.
So gradients of one input through several products are added up, then reduced once.
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
from dtrans.ir.cost import nbytes
from dtrans.ir.dataflow import variables
from dtrans.rows.layout import RowAxis


# Sums are reduced before these if their outputs are larger. `pad` is left out: gradients of several
# slices of one parameter are padded, added up, and reduced once.
_GROWS: Mapping[str, int] = {"broadcast_in_dim": 0, "scatter-add": 2}


def open_operands(
    values: ShardValues, eqn: JaxprEqn, ins: Sequence[ShardLayout], terms: Collection[Var]
) -> Collection[int] | None:
    """Return the operands to read as terms if the sum may be reduced later, else None.

    A sum with one reader stays open through rearrangements and further sums. A value that ends
    as a partial sum anyway (`terms`) stays open wherever it is linear; replicated operands then
    become terms on the first shard.

    Args:
      values: values of the shard.
      eqn: the equation.
      ins: layouts of its operands.
      terms: sums that stay open wherever possible.
    """
    opens = [i for i, x in enumerate(ins) if isinstance(x, Partial)]
    if not opens or not eqn.outvars or any(isinstance(x, RowAxis) for x in ins):
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
    # by a finite literal only: the zero terms of other shards times infinity would be NaN
    factor = next((a.val for a in eqn.invars if isinstance(a, Literal) and not a.aval.ndim), np.nan)
    if name not in ("mul", "div") or not np.isfinite(factor):
        return None
    inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    divides = isinstance(ins[0], Partial) and inexact and factor != 0
    return opens if name == "mul" or divides else None


def linear_terms(inner: Jaxpr, outs: Collection[Var], summed: Collection[Var] = ()) -> set[Var]:
    """Return the values that may be partial sums if `outs` are: those that `outs` are linear in.

    Values before a broadcast are reduced first, since they are smaller. Exception: the broadcast
    becomes, entry by entry, one of the values that are `summed` anyway. A cast rounds: where
    another equation needs its sum, partial sums are reduced before it.
    """
    found, anyway = set(outs), set(summed)
    needed: set[Var] = set()  # as sums
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
    """Return True if an equation casts numbers to a type of fewer bits."""
    if eqn.primitive.name != "convert_element_type":
        return False
    return nbytes(eqn.outvars[0].aval) < nbytes(eqn.invars[0].aval)


def _grows(eqn: JaxprEqn) -> bool:
    return eqn.outvars[0].aval.size > eqn.invars[_GROWS[eqn.primitive.name]].aval.size


def _adds_terms(eqn: JaxprEqn, opens: Sequence[int]) -> bool:
    """Return True if a sum may be reduced after an equation as well, and is not larger there.

    Casts round, so sums are reduced before them. Operands that are not sums must be indices or
    conditions: zero terms times an infinite number would be NaN.
    """
    others = [a for i, a in enumerate(eqn.invars) if i not in opens]
    if (
        eqn.primitive.name == "convert_element_type"
        or len(eqn.outvars) != 1
        or any(map(_is_inexact, others))
    ):
        return False
    size = sum(nbytes(eqn.invars[i].aval) for i in opens)
    return tuple(opens) in linear_operands(eqn) and nbytes(eqn.outvars[0].aval) <= size


def _is_inexact(atom: Atom) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))
