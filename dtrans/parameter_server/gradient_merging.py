"""Analysis of an update: may a trainer merge gradients of several steps before it sends them?

A background thread of an asynchronous trainer (the communicator) sends gradients. If steps are
faster than sends, the thread merges waiting gradients by one of these rules:

sum    if one update with the sum equals the separate updates. Each update must be linear in the
       gradients, and may otherwise read only values that no update changes: plain SGD with a
       constant learning rate, without momentum, weight decay or clipping
none   if the number of updates matters: a counter decides which steps apply gradients
       (`optax.MultiSteps`), or a parameter changes without a gradient. Every gradient is sent
mean   for all other updates: one update with the mean replaces the separate updates
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from dtrans._jax import COND, LOOPS, JaxprEqn, has_bodies, linear_group, same_operand, zeros_by
from dtrans.ir.dataflow import bits_of, propagate
from dtrans.ir.interpret import ForwardAnalysis, forward_jaxpr
from dtrans.step.halves import DividedStep, Gradient


def merging(step: DividedStep) -> Literal["sum", "mean", "none"]:
    """Return the rule by which a trainer may merge gradients of several steps into one update.

    A background thread merges gradients that it has not sent yet. For plain SGD the rule is "sum",
    for Adam "mean", and for `optax.MultiSteps` "none".
    """
    half = step.optimize
    of_gradient, of_state = 1, 2
    seeds = {}
    for n, v in half.invars.items():
        if isinstance(n, Gradient):
            seeds[v] = of_gradient
        elif n in step.opt_state:
            seeds[v] = of_state
    enters = propagate(half.inner.eqns, seeds, {})
    for eqn in half.inner.eqns:
        if bits_of(enters, *eqn.outvars) & of_gradient:
            # A counter decides whether this step applies gradients, as in `optax.MultiSteps`.
            which = bits_of(enters, eqn.invars[0])
            selects_by_state = eqn.primitive.name == "select_n" and which == of_state
            if selects_by_state or eqn.primitive.name in (COND, *LOOPS):
                return "none"

    terms = _terms(step)
    for n in step.optimized:
        if not bits_of(enters, half.outvars[n]) & of_gradient and terms[n] != _Term("old", n):
            return "none"
    # "sum" is right under two conditions. The change of a parameter is linear in the gradients, and
    # reads no parameter. The optimizer state does not depend on gradients.
    for n, x in terms.items():
        is_param = n in step.params
        if is_param and x not in (_Term("old", n), _Term("new", n)):
            return "mean"
        if not is_param and x.kind in _GRADIENT_KINDS:
            return "mean"
    return "sum"


class _Term(NamedTuple):
    """Dependence of a value on the gradients and parameters of an update.

    Attributes:
      kind: "zero": the value is zero. "fixed": it depends neither on gradients nor on parameters.
        "moving": it depends on parameters only. "linear": it is linear in the gradients. "old": it
        is a parameter. "new": it is a parameter plus a linear function of the gradients. "other":
        it is any other function of gradients.
      leaf: the parameter, for the kinds "old" and "new".
    """

    kind: str
    leaf: str = ""


_GRADIENT_KINDS = ("linear", "new", "other")


def _terms(step: DividedStep) -> dict[str, _Term]:
    """Return the dependence of each output of an update on gradients and parameters."""
    half = step.optimize
    starts = []
    for n in half.in_names:
        if isinstance(n, Gradient):
            starts.append(_Term("linear"))
        elif n in step.params:
            starts.append(_Term("old", n))
        else:
            starts.append(_Term("fixed"))
    facts = forward_jaxpr(_LINEAR, half.jaxpr, starts)
    return {n: facts.of(a) for n, a in half.outvars.items()}


def _rule(eqn: JaxprEqn, ins: Sequence[_Term]) -> list[_Term] | None:
    if has_bodies(eqn):
        return None
    return [_term(eqn, ins)] * len(eqn.outvars)


def _term(eqn: JaxprEqn, ins: Sequence[_Term]) -> _Term:
    """Return the dependence of an equation's outputs on gradients and parameters.

    Args:
      eqn: the equation.
      ins: the dependence of each operand.
    """
    name, kinds = eqn.primitive.name, [x.kind for x in ins]
    zeros: list[int] = []
    linear: list[int] = []
    for i, kind in enumerate(kinds):
        if kind == "zero":
            zeros.append(i)
        elif kind == "linear":
            linear.append(i)
    if zeros and zeros_by(eqn, zeros) == ():
        return _Term("zero")

    # casts and copies of a parameter
    if (name == "convert_element_type" or same_operand(eqn) == 0) and kinds[0] in ("old", "new"):
        if _is_inexact(eqn):
            return ins[0]
        return _any_function_of(ins[0])

    # a sum that may add an update to its parameter
    if name in ("add", "add_any", "sub"):
        first, second = ins
        if name != "sub" and kinds[0] != "old":
            first, second = second, first
        if first.kind == "old" and second.kind == "zero":
            return first
        if first.kind == "old" and second.kind == "linear":
            return _Term("new", first.leaf)

    if linear and not {"old", "moving", "new", "other"}.intersection(kinds):
        # The other operands of the group must be zero: x + 1 is not linear in x.
        group = linear_group(eqn, set(linear))
        if group and {*linear, *zeros} >= set(group):
            return _Term("linear")
        return _Term("other")
    return functools.reduce(_join, map(_any_function_of, ins), _Term("fixed"))


def _any_function_of(x: _Term) -> _Term:
    """Return the dependence of f(x) on gradients and parameters, for an arbitrary function f.

    For example, if x is linear in the gradients, f(x) need not be linear, so the result is "other".
    """
    if x.kind in _GRADIENT_KINDS:
        return _Term("other")
    if x.leaf:
        return _Term("moving")
    return x


def _join(one: _Term, other: _Term) -> _Term:
    if one == other:
        return one
    kinds = {_any_function_of(one).kind, _any_function_of(other).kind}
    for kind in ("other", "moving"):
        if kind in kinds:
            return _Term(kind)
    return _Term("fixed")


def _is_inexact(eqn: JaxprEqn) -> bool:
    return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))


def _classify_constant(aval: Any, value: Any) -> _Term:
    is_scalar = value is not None and not aval.ndim and isinstance(aval.dtype, np.dtype)
    return _Term("zero" if is_scalar and bool(value == 0) else "fixed")


def _add_condition(condition: _Term, x: _Term) -> _Term:
    """Return the dependence of a value that a condition selects, as `jnp.where` does.

    The value is linear in the gradients only if the condition does not depend on them.

    Args:
      condition: the dependence of the condition on gradients and parameters.
      x: the dependence of the selected value.
    """
    if condition.kind in ("zero", "fixed"):
        return x
    return _join(_any_function_of(condition), _any_function_of(x))


_LINEAR = ForwardAnalysis[_Term](_join, _rule, _classify_constant, decide=_add_condition)
