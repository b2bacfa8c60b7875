"""Leaves that a step holds still, although it writes an update for them: found by folding the
update.

    optax.set_to_zero, optax.masked, optax.multi_transform     an update of zeros is added
    jax.lax.stop_gradient                                      the gradient is zeros, and so the moments stay zeros

A value is folded where it is one number everywhere, and where it is another value plus nothing.
What the optimizer's state begins with is read off the startup program: arrays of zeros that a step
makes zeros of again stay it, by induction. A leaf whose new value folds to the old one is handed
on, and the rest of the package treats it as it does every frozen leaf: trainers hold it, and no
program of a server has it.

A leaf whose gradient still makes moments (zeros are put in place of Adam's update, and not in front
of it) stays where it is updated, since the moments do.

Zeros stay zeros under any factor without dimensions, as a learning rate or the factor of a clip is:
a job in which that is no number goes on with what is frozen, where one device loses it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Var, has_bodies, moved_operands, opened
from dtrans.errors import StateError
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.folding import Alias, are_equal, fold, is_number, number_by_numpy
from dtrans.ir.inline import inline_calls
from dtrans.ir.interpret import Facts, ForwardAnalysis, forward_jaxpr
from dtrans.ir.program import Program
from dtrans.step.cut import cut
from dtrans.step.marks import mark_p
from dtrans.step.trace import guess_roles


def hands_on_what_is_still(main: Program, startup: Program) -> Program:
    """A step that hands on the leaves which it holds still, and the state that stays what it began
    as.

    Args:
      main: of two parts.
      startup: makes both; what the state begins with is known where it makes them in the order of
        the step's leaves.
    """
    params, opt_state = (spec.names for spec in main.args[:2])
    kind = lambda t: (t.shape, t.dtype)
    in_order = [kind(t) for t in startup.outputs.values()] == [
        kind(main.inputs[n]) for n in (*params, *opt_state)
    ]
    begin = dict(zip((*params, *opt_state), _numbers_of(startup), strict=True)) if in_order else {}
    still, zeros = still_leaves(main, {n: begin[n] for n in opt_state if begin.get(n) is not None})
    if set(still).isdisjoint(params):
        return main
    made = main.rewritten(lambda other: _handing_on(other, still, zeros))
    graded = cut(made).optimize.graded & still.keys()
    if not graded:
        return made
    kept = {n: x for n, x in still.items() if n not in graded}
    return (
        main
        if set(kept).isdisjoint(params)
        else main.rewritten(lambda other: _handing_on(other, kept, zeros))
    )


def check_still(main: Program, name: str, x: Any) -> None:
    """Raise StateError for an array of the state that a step does not take: what it hands on has to
    be as it began.

    The state may come from a job in which the leaf was trained: then its moments go on moving it on
    one device.
    """
    if name in main.still and not bool(np.all(np.asarray(x) == main.still[name])):
        raise StateError(
            f"{name} is not {main.still[name]} everywhere, as init makes it, so that on one device "
            "its leaf would go "
            f"on moving; {main.name} gives the leaf no gradient, and jobs hold it still. Start the "
            "optimizer's state "
            "anew, or freeze the leaf with optax.set_to_zero, which moves nothing"
        )


def still_leaves(main: Program, begin: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The leaves of a step that never change, and of the optimizer's the number that they are
    everywhere.

    And the leaves whose marked gradient is zeros.

    Args:
      begin: the arrays of the optimizer's state that begin as one number everywhere, and that
        number.
    """
    jaxpr = inline_calls(main.jaxpr)
    invars = dict(zip(main.in_names, opened(jaxpr).invars, strict=True))
    outs = dict(zip(main.out_names, opened(jaxpr).outvars, strict=True))
    params, opt_state = (spec.names for spec in main.args[:2])
    if not {*params, *opt_state} <= outs.keys():
        return {}, frozenset()
    held = {
        n: x
        for n, x in begin.items()
        if invars[n].aval.ndim and jnp.issubdtype(invars[n].aval.dtype, jnp.inexact)
    }
    while True:
        folded = _folded(jaxpr, {invars[n]: x for n, x in held.items()})
        stays = {n: x for n, x in held.items() if _number(folded, outs[n]) == x}
        if len(stays) == len(held):
            break
        held = stays
    moving = [n for n in (*params, *opt_state) if outs[n] is not invars[n]]
    still = {
        n: held.get(n) for n in moving if n in held or folded.of(outs[n]).value == Alias(invars[n])
    }
    leaf_of = {invars[n]: n for n in params}
    marked = [e.invars for e in opened(jaxpr).eqns if e.primitive is mark_p]
    others = {
        v for g, v in marked if isinstance(v, Var) and _number(folded, g) != 0
    }  # one of several may be zeros
    zeros = [
        leaf_of[v] for _, v in marked if isinstance(v, Var) and v in leaf_of and v not in others
    ]
    return still, frozenset(zeros)


class _Fact(NamedTuple):
    """What is known of a value.

    Attributes:
      value: a number, an `Alias`, or None.
      is_uniform: it is one number everywhere, known or not.
    """

    value: Any
    is_uniform: bool


def _folded(jaxpr: ClosedJaxpr, known: Mapping[Var, Any]) -> Facts[_Fact]:
    """Return the values of a jaxpr that are one number everywhere, or an input.

    Args:
      known: inputs that are one number.
    """
    ins = [np.asarray(known[v]) if v in known else Alias(v) for v in opened(jaxpr).invars]
    start = [_Fact(x, not v.aval.ndim) for x, v in zip(ins, opened(jaxpr).invars, strict=True)]
    return forward_jaxpr(_FOLDED, jaxpr, start)


def _rule(eqn: JaxprEqn, ins: Sequence[_Fact]) -> list[_Fact] | None:
    if has_bodies(eqn):
        return None

    def is_factor(i: int) -> bool:
        x = ins[i].value
        return bool(np.isfinite(x)) and not is_number(x, 0) if is_number(x) else ins[i].is_uniform

    outs = []
    for k, v in enumerate(eqn.outvars):
        value = fold(eqn, k, [x.value for x in ins], is_factor, number_by_numpy)
        spreads = moved_operands(eqn, k) == (0,) or eqn.primitive.name == "convert_element_type"
        outs.append(_Fact(value, not v.aval.ndim or (spreads and ins[0].is_uniform)))
    return outs


def _of_constant(aval: Any, value: Any) -> _Fact:
    is_array = isinstance(aval.dtype, np.dtype) and value is not None and np.size(value) == 1
    return _Fact(np.asarray(value, aval.dtype).reshape(()) if is_array else None, not aval.ndim)


def _join(one: _Fact, other: _Fact) -> _Fact:
    value = one.value if are_equal(one.value, other.value) else None
    return _Fact(value, one.is_uniform and other.is_uniform)


def _of_turn(fact: _Fact) -> _Fact:
    return fact._replace(value=fact.value if is_number(fact.value) else None)


_FOLDED = ForwardAnalysis[_Fact](
    _join,
    _rule,
    _of_constant,
    turn=_of_turn,
    stack=lambda fact: _of_turn(fact)._replace(is_uniform=False),  # turns differ
    branch=lambda index: int(index.value) if is_number(index.value) else None,
)


def _numbers_of(startup: Program) -> list[Any]:
    """Return the number that each output of a startup program is everywhere; None if it is none."""
    jaxpr = inline_calls(startup.jaxpr)
    folded = _folded(jaxpr, {})
    return [_number(folded, a) for a in opened(jaxpr).outvars]


def _number(folded: Facts[_Fact], atom: Atom) -> Any:
    value = folded.of(atom).value
    return value[()] if is_number(value) else None


def _handing_on(main: Program, still: Mapping[str, Any], zeros: Collection[str]) -> Program:
    """The step that hands on what is still. Gradients that are `zeros` are so in its text: nobody
    has to send them."""
    jaxpr = inline_calls(main.jaxpr)
    inner = opened(jaxpr)
    invars = dict(zip(main.in_names, inner.invars, strict=True))
    leaf_of = {invars[n]: n for n in still if n in zeros}
    b = Builder(jaxpr)
    b.invars += inner.invars
    instead: dict[Var, Atom] = {}
    for eqn in inner.eqns:
        if eqn.primitive is mark_p and eqn.invars[1] in leaf_of:
            (instead[eqn.outvars[0]],) = b.call(jnp.zeros_like, eqn.invars[1])
        else:
            b.keep(eqn, read_from(instead, eqn.invars) if instead else None)
    outs = zip(main.out_names, read_from(instead, inner.outvars), strict=True)
    made = b.build([invars[n] if n in still else a for n, a in outs])
    return dataclasses.replace(
        main,
        jaxpr=made,
        roles=guess_roles(made),
        labels={},
        still={n: x for n, x in still.items() if x is not None},
    )
