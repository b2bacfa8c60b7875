"""Merging of independent all-reduces into one, because each collective has a fixed latency."""

from __future__ import annotations

from typing import Any

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Var, opened
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import all_operands, variables
from dtrans.ir.selection import values_at
from dtrans.ops import all_reduce_p


def merge_reductions(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Merge all-reduces that have equal parameters and do not depend on each other.

    The *level* of an equation is the largest number of all-reduces on a path from an input to this
    equation. Equations are sorted by level, and the all-reduces of a level are merged. Bodies of
    loops and branches stay unchanged.
    """
    inner = opened(jaxpr)
    levels = _levels(inner.eqns)
    if sum(map(_is_reduction, inner.eqns)) < 2:
        return jaxpr
    b = Builder(jaxpr)
    b.invars += inner.invars
    found: dict[Var, Atom] = {}
    for level in levels:
        waiting: dict[Any, list[JaxprEqn]] = {}
        for i in level:
            eqn = inner.eqns[i]
            if _is_reduction(eqn):
                waiting.setdefault(tuple(eqn.params.items()), []).append(eqn)
            else:
                b.keep(eqn, read_from(found, eqn.invars))
        for params, eqns in waiting.items():
            terms = read_from(found, all_operands(eqns))
            reduced = iter(b.bind(all_reduce_p, *terms, **dict(params)))
            for eqn in eqns:
                for v in eqn.outvars:
                    found[v] = next(reduced)
    return b.build(read_from(found, inner.outvars))


def _is_reduction(eqn: JaxprEqn) -> bool:
    return eqn.primitive is all_reduce_p


def _levels(eqns: list[JaxprEqn]) -> list[list[int]]:
    """Group indices of equations by level: the number of all-reduces that must run earlier."""
    known: dict[Var, int] = {}
    found: dict[int, list[int]] = {}
    for i, eqn in enumerate(eqns):
        level = max((known.get(v, 0) for v in variables(eqn.invars)), default=0)
        found.setdefault(level, []).append(i)
        known.update(dict.fromkeys(eqn.outvars, level + _is_reduction(eqn)))
    return values_at(found, sorted(found))
