"""Merging of the gradients of several steps, when one update stands for all of them.

sum    where the update is linear in its gradients, and in nothing that updates change: one by the sum is what all of
       them would have done. So it is for plain SGD at one rate; not with momentum, weight decay or
       a clip
mean   otherwise: one step, as large as any of them
none   where a count decides how a gradient is used (`optax.MultiSteps`), or a parameter changes without one:
       how often that is done matters
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from dtrans._jax import COND, LOOPS, JaxprEqn, Var, has_bodies, linear_group, same_operand, zeros_by
from dtrans.ir.dataflow import propagate
from dtrans.ir.interpret import ForwardAnalysis, forward_jaxpr
from dtrans.step.cut import Cut, Gradient


def merging(step: Cut) -> Literal["sum", "mean", "none"]:
    """Return how gradients of several steps are merged into one update."""
    half = step.optimize
    inner = half.inner
    of_gradient, of_state = 1, 2
    seeds = {
        v: of_gradient if isinstance(n, Gradient) else of_state
        for n, v in half.invars.items()
        if isinstance(n, Gradient) or n in step.opt_state
    }
    enters = propagate(inner.eqns, seeds, {})
    bits = lambda a: enters.get(a, 0) if isinstance(a, Var) else 0
    for eqn in inner.eqns:
        if any(bits(v) & of_gradient for v in eqn.outvars):
            decides = bits(eqn.invars[0]) if eqn.primitive.name == "select_n" else 0
            if decides == of_state or eqn.primitive.name in (COND, *LOOPS):
                return "none"
    terms = _terms(step)
    if any(
        not bits(half.outvars[n]) & of_gradient and terms[n] != _Term("old", n)
        for n in step.optimized
    ):
        return "none"
    # new parameters are old ones plus something linear in the gradients, which no parameter enters;
    # and no state is made of gradients
    fits = lambda n, x: (
        x in (_Term("old", n), _Term("new", n)) if n in step.params else x.kind not in _OF_GRADIENTS
    )
    return "sum" if all(fits(n, x) for n, x in terms.items()) else "mean"


class _Term(NamedTuple):
    """Dependence of a value on the gradients and parameters of an update.

    Attributes:
      kind: "zero" everywhere, "fixed", "moving" (a parameter enters it), "linear" in the gradients,
        an "old" parameter, a "new" one (an old one plus something linear), or another function of
        gradients ("other").
      leaf: the parameter that it is.
    """

    kind: str
    leaf: str = ""


_OF_GRADIENTS = ("linear", "new", "other")


def _terms(step: Cut) -> dict[str, _Term]:
    """Return what each output of an update is."""
    half = step.optimize
    starts = [_Term("linear") if isinstance(n, Gradient) else _Term("fixed") for n in half.in_names]
    starts = [
        _Term("old", n) if n in step.params else x
        for n, x in zip(half.in_names, starts, strict=True)
    ]
    facts = forward_jaxpr(_LINEAR, half.jaxpr, starts)
    return {n: facts.of(a) for n, a in half.outvars.items()}


def _rule(eqn: JaxprEqn, ins: Sequence[_Term]) -> list[_Term] | None:
    return None if has_bodies(eqn) else [_term(eqn, ins)] * len(eqn.outvars)


def _term(eqn: JaxprEqn, ins: Sequence[_Term]) -> _Term:
    name, kinds = eqn.primitive.name, [x.kind for x in ins]
    has = lambda kind: [i for i, x in enumerate(kinds) if x == kind]
    if has("zero") and zeros_by(eqn, has("zero")) == ():
        return _Term("zero")
    if (name == "convert_element_type" or same_operand(eqn) == 0) and kinds[0] in ("old", "new"):
        return ins[0] if _is_inexact(eqn) else _without_leaf(ins[0])
    if name in ("add", "add_any", "sub"):
        first, second = ins if kinds[0] == "old" or name == "sub" else reversed(ins)
        if first.kind == "old" and second.kind in ("zero", "linear"):
            return first if second.kind == "zero" else _Term("new", first.leaf)
    if has("linear") and not (has("old") or has("moving") or has("new") or has("other")):
        # the other operands of a group have to be zeros: x + 1 is not linear in x
        ours, zeros = set(has("linear")), set(has("zero"))
        group = linear_group(eqn, ours)
        return _Term("linear" if group and ours | zeros >= set(group) else "other")
    return functools.reduce(_join, map(_without_leaf, ins), _Term("fixed"))


def _without_leaf(x: _Term) -> _Term:
    """Return what is made of a value in any way."""
    return _Term("other" if x.kind in _OF_GRADIENTS else "moving" if x.leaf else x.kind)


def _join(one: _Term, other: _Term) -> _Term:
    if one == other:
        return one
    kinds = {_without_leaf(x).kind for x in (one, other)}
    return _Term(next((k for k in ("other", "moving") if k in kinds), "fixed"))


def _is_inexact(eqn: JaxprEqn) -> bool:
    return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))


def _of_constant(aval: Any, value: Any) -> _Term:
    is_scalar = value is not None and not aval.ndim and isinstance(aval.dtype, np.dtype)
    return _Term("zero" if is_scalar and bool(value == 0) else "fixed")


def _decided(condition: _Term, x: _Term) -> _Term:
    return (
        x
        if condition.kind in ("zero", "fixed")
        else _join(_without_leaf(condition), _without_leaf(x))
    )


_LINEAR = ForwardAnalysis[_Term](_join, _rule, _of_constant, decide=_decided)
