"""Merging of independent all-reduces: a round of communication costs more than its bytes."""

from __future__ import annotations

from typing import Any

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Var, opened
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.dataflow import all_operands
from dtrans.ir.selection import values_at
from dtrans.ops import all_reduce_p


def merge_reductions(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return the program with one all-reduce per level, operation and set of axes.

    The level of an equation is the largest number of all-reduces on a path from the inputs to it.
    Equations are ordered by level, since an all-reduce needs its operands at one place. Bodies of
    loops and branches stay as they are.
    """
    inner = opened(jaxpr)
    levels = _levels(inner.eqns)
    if len({i for level in levels for i in level if _is_reduction(inner.eqns[i])}) < 2:
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
            reduced = b.bind(all_reduce_p, *terms, **dict(params))
            found.update(zip((v for e in eqns for v in e.outvars), reduced, strict=True))
    return b.build(read_from(found, inner.outvars))


def _is_reduction(eqn: JaxprEqn) -> bool:
    return eqn.primitive is all_reduce_p


def _levels(eqns: list[JaxprEqn]) -> list[list[int]]:
    """Return positions of equations, by level."""
    known: dict[Var, int] = {}
    found: dict[int, list[int]] = {}
    for i, eqn in enumerate(eqns):
        level = max((known.get(a, 0) for a in eqn.invars if isinstance(a, Var)), default=0)
        found.setdefault(level, []).append(i)
        known.update(dict.fromkeys(eqn.outvars, level + _is_reduction(eqn)))
    return values_at(found, sorted(found))
