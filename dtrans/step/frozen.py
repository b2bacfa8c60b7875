"""Leaves that a step never changes although it computes an update: found by constant folding.

    optax.set_to_zero, optax.masked, optax.multi_transform     adds an update of zeros
    jax.lax.stop_gradient                                      the gradient and moments are zeros

A value is folded if all its entries are one number, or if it is another value plus zeros. Initial
values of optimizer state come from the startup program: arrays of zeros that a step maps to zeros
stay zeros, by induction. If a leaf's new value folds to the old one, the update is dropped. The
rest of the package treats it like any frozen leaf: trainers store it, and no server program has it.

A leaf with moments (zeros replace Adam's update instead of its gradient) keeps its update, since
the moments change.

Zeros stay zeros under any scalar factor, such as a learning rate or a clip's scale. If that factor
becomes NaN, one device loses a frozen leaf too; a job keeps it.
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


def drop_frozen_updates(main: Program, startup: Program) -> Program:
    """Return a step without updates of frozen leaves and of state that stays constant.

    Args:
      main: step of (params, opt_state, *batch).
      startup: its init. Initial values are known if it returns both in the order of the step's
        leaves.
    """
    params, opt_state = (spec.names for spec in main.args[:2])
    kind = lambda t: (t.shape, t.dtype)
    kinds = [kind(main.inputs[n]) for n in (*params, *opt_state)]
    in_order = kinds == [kind(t) for t in startup.outputs.values()]
    begin = dict(zip((*params, *opt_state), _numbers_of(startup), strict=True)) if in_order else {}
    constants, zeros = frozen_leaves(
        main, {n: begin[n] for n in opt_state if begin.get(n) is not None}
    )
    if set(constants).isdisjoint(params):
        return main
    program = main.rewritten(lambda other: _without_updates(other, constants, zeros))
    graded = cut(program).optimize.graded & constants.keys()
    if not graded:
        return program
    without_gradient = {n: x for n, x in constants.items() if n not in graded}
    if set(without_gradient).isdisjoint(params):
        return main
    return main.rewritten(lambda other: _without_updates(other, without_gradient, zeros))


def check_frozen(main: Program, name: str, x: Any) -> None:
    """Raise StateError for state that a step cannot take: constants must have their initial value.

    The state may come from a job in which the leaf was trained: one device would then still move
    it by its moments.
    """
    constant = main.frozen_constants.get(name)
    if constant is not None and not bool(np.all(np.asarray(x) == constant)):
        raise StateError(
            f"{name} is not {constant} everywhere, as init makes it, so that one device "
            f"would go on moving its leaf; {main.name} gives the leaf no gradient, and jobs freeze "
            "it. Start with a new optimizer state, or freeze the leaf with optax.set_to_zero"
        )


def frozen_leaves(main: Program, begin: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the leaves that never change, with the constant of each state array.

    The second value has the leaves whose marked gradient is zeros.

    Args:
      main: the step.
      begin: optimizer state with one initial number in all entries, and that number.
    """
    jaxpr = inline_calls(main.jaxpr)
    invars = dict(zip(main.in_names, opened(jaxpr).invars, strict=True))
    outs = dict(zip(main.out_names, opened(jaxpr).outvars, strict=True))
    params, opt_state = (spec.names for spec in main.args[:2])
    if not {*params, *opt_state} <= outs.keys():
        return {}, frozenset()
    candidates = {
        n: x
        for n, x in begin.items()
        if invars[n].aval.ndim and jnp.issubdtype(invars[n].aval.dtype, jnp.inexact)
    }
    while True:
        folded = _folded(jaxpr, {invars[n]: x for n, x in candidates.items()})
        stays = {n: x for n, x in candidates.items() if _number(folded, outs[n]) == x}
        if len(stays) == len(candidates):
            break
        candidates = stays
    moving = [n for n in (*params, *opt_state) if outs[n] is not invars[n]]
    constants = {
        n: candidates.get(n)
        for n in moving
        if n in candidates or folded.of(outs[n]).value == Alias(invars[n])
    }
    leaf_of = {invars[n]: n for n in params}
    marked = [e.invars for e in opened(jaxpr).eqns if e.primitive is mark_p]
    # a leaf may have several marks
    others = {v for g, v in marked if isinstance(v, Var) and _number(folded, g) != 0}
    zeros = [
        leaf_of[v] for _, v in marked if isinstance(v, Var) and v in leaf_of and v not in others
    ]
    return constants, frozenset(zeros)


class _Fact(NamedTuple):
    """Facts about a value.

    Attributes:
      value: a number, an `Alias`, or None.
      is_uniform: True if all entries are one number, known or not.
    """

    value: Any
    is_uniform: bool


def _folded(jaxpr: ClosedJaxpr, known: Mapping[Var, Any]) -> Facts[_Fact]:
    """Return the values of a jaxpr that are one number, or an input.

    Args:
      jaxpr: the jaxpr.
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
    stack=lambda fact: _of_turn(fact)._replace(is_uniform=False),  # iterations differ
    branch=lambda index: int(index.value) if is_number(index.value) else None,
)


def _numbers_of(startup: Program) -> list[Any]:
    """Return the number in all entries of each output of a startup program; None if they differ."""
    jaxpr = inline_calls(startup.jaxpr)
    folded = _folded(jaxpr, {})
    return [_number(folded, a) for a in opened(jaxpr).outvars]


def _number(folded: Facts[_Fact], atom: Atom) -> Any:
    value = folded.of(atom).value
    return value[()] if is_number(value) else None


def _without_updates(
    main: Program, constants: Mapping[str, Any], zeros: Collection[str]
) -> Program:
    """Return the step without updates of frozen leaves; gradients in `zeros` become zeros."""
    jaxpr = inline_calls(main.jaxpr)
    inner = opened(jaxpr)
    invars = dict(zip(main.in_names, inner.invars, strict=True))
    leaf_of = {invars[n]: n for n in constants if n in zeros}
    b = Builder(jaxpr)
    b.invars += inner.invars
    instead: dict[Var, Atom] = {}
    for eqn in inner.eqns:
        if eqn.primitive is mark_p and eqn.invars[1] in leaf_of:
            (instead[eqn.outvars[0]],) = b.call(jnp.zeros_like, eqn.invars[1])
        else:
            b.keep(eqn, read_from(instead, eqn.invars) if instead else None)
    outs = zip(main.out_names, read_from(instead, inner.outvars), strict=True)
    jaxpr_out = b.build([invars[n] if n in constants else a for n, a in outs])
    return dataclasses.replace(
        main,
        jaxpr=jaxpr_out,
        roles=guess_roles(jaxpr_out),
        labels={},
        frozen_constants={n: x for n, x in constants.items() if x is not None},
    )
