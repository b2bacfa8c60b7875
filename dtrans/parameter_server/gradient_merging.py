"""What may be made of the gradients of several steps, when one update stands for all of them.

sum    where the update is linear in its gradients, and in nothing that updates change: one by the sum is what all of
       them would have done. So it is for plain SGD at one rate; not with momentum, weight decay or a clip
mean   otherwise: one step, as large as any of them
none   where a count decides how a gradient is used (`optax.MultiSteps`), or a parameter changes without one:
       how often that is done matters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import jax.numpy as jnp

from dtrans._jax import COND, LOOPS, JaxprEqn, Var, is_rearrangement, linear_operands, same_operand
from dtrans.ir.dataflow import is_zero_array, propagate
from dtrans.step.cut import Cut, Gradient, OptimizeHalf


def merging(step: Cut) -> Literal["sum", "mean", "none"]:
    """What may be made of gradients of several steps."""
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
    outs = half.outvars
    old = _unchanged(half, step.params)
    if any(
        not bits(a := outs[n]) & of_gradient and not (isinstance(a, Var) and old.get(a) == n) for n in step.optimized
    ):
        return "none"
    return "sum" if is_linear(half, step.params) else "mean"


def is_linear(half: OptimizeHalf, params: Sequence[str]) -> bool:
    """Whether new parameters are old ones plus something linear in the gradients that no parameter enters.

    No state may be made of gradients either.
    """
    inner = half.inner
    ins = half.invars
    moving = propagate(inner.eqns, {v: 1 for n, v in ins.items() if n in params}, {})  # what updates change
    linear = {v for n, v in ins.items() if isinstance(n, Gradient)}
    old = _unchanged(half, params)
    new: dict[Var, str] = {}  # what is one plus something linear
    made_by = {v: e for e in inner.eqns for v in e.outvars}
    for eqn in inner.eqns:
        values = [a for a in eqn.invars if isinstance(a, Var)]
        first = eqn.outvars[0]
        if values and values[0] in new and _keeps_value(eqn) and _inexact(eqn):
            new[first] = new[values[0]]
        elif any(v in new for v in values):
            return False
        elif any(v in linear for v in values):
            shifted = _shifted(eqn, linear, old)
            if shifted is not None:
                new[first] = shifted
            elif _is_linear_in(eqn, linear, moving, made_by):
                linear.update(eqn.outvars)
            else:
                return False
    kept = lambda n, a: isinstance(a, Var) and n in (old.get(a), new.get(a))
    made_of = propagate(inner.eqns, {v: 1 for n, v in ins.items() if isinstance(n, Gradient)}, {})
    return all(
        kept(n, a) if n in params else not (isinstance(a, Var) and made_of.get(a)) for n, a in half.outvars.items()
    )


def _unchanged(half: OptimizeHalf, params: Sequence[str]) -> dict[Var, str]:
    """The values that still are a parameter: of another type, or with nothing added (`optax.set_to_zero`)."""
    inner = half.inner
    old = {v: n for n, v in half.invars.items() if isinstance(n, str) and n in params}
    zeros: set[Var] = set()
    is_zero = lambda a: a in zeros if isinstance(a, Var) else not a.aval.shape and bool(a.val == 0)
    for eqn in inner.eqns:
        name, operands = eqn.primitive.name, eqn.invars
        kept = [a for a in operands if isinstance(a, Var) and a in old]
        if (_keeps_value(eqn) or is_rearrangement(eqn)) and is_zero(operands[0]):
            zeros.update(eqn.outvars)
        elif len(kept) == 1 and (_keeps_value(eqn) or (name in ("add", "add_any") and any(map(is_zero, operands)))):
            old[eqn.outvars[0]] = old[kept[0]]
    return old


def _shifted(eqn: JaxprEqn, linear: set[Var], old: dict[Var, str]) -> str | None:
    """The parameter that something linear is added to, or subtracted from."""
    if eqn.primitive.name not in ("add", "add_any", "sub"):
        return None
    a, b = eqn.invars
    is_linear = lambda x: isinstance(x, Var) and x in linear
    leaf = lambda x: old.get(x) if isinstance(x, Var) else None
    if is_linear(b) and leaf(a) is not None:
        return leaf(a)
    return leaf(b) if is_linear(a) and eqn.primitive.name != "sub" else None


def _is_linear_in(eqn: JaxprEqn, linear: set[Var], moving: Mapping[Var, int], made_by: Mapping[Var, JaxprEqn]) -> bool:
    """Return True if an equation is linear in its operands that are, whatever parameters do.

    The other operands of a group have to be zeros: x + 1 is not linear in x.
    """
    ours = {i for i, a in enumerate(eqn.invars) if isinstance(a, Var) and a in linear}
    zeros = {i for i, a in enumerate(eqn.invars) if i not in ours and is_zero_array(a, made_by)}
    others = [a for i, a in enumerate(eqn.invars) if i not in ours | zeros]
    if any(isinstance(a, Var) and moving.get(a) for a in others):
        return False
    return any(ours <= set(group) <= ours | zeros for group in linear_operands(eqn))


def _keeps_value(eqn: JaxprEqn) -> bool:
    """Return True if the output is operand 0, in another type perhaps."""
    return eqn.primitive.name == "convert_element_type" or same_operand(eqn) == 0


def _inexact(eqn: JaxprEqn) -> bool:
    return bool(jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))
