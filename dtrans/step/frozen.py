"""Removal of updates that never change their parameter, such as those of frozen layers.

A frozen parameter still has an update in the trace of a step:

    optax.set_to_zero, optax.masked, optax.multi_transform     the update adds zeros
    jax.lax.stop_gradient                                      the gradient and the moments are zero

Without this module, servers would store the parameter, and trainers would send zeros. By constant
folding, this module finds that the update changes nothing, and drops the update. Strategies then
treat the parameter like one that the step returns unchanged: trainers store it, and servers do not.

The analysis knows a value if all its entries are one number, or if it equals an input plus zeros.
The startup program provides the initial values of optimizer state. If a step maps an array of zeros
to zeros, the array is zeros after every step, by induction. If a parameter's new value is known to
equal its old value, the update is dropped.

A parameter with changing moments keeps its update. For example, optax.set_to_zero after Adam
replaces Adam's update by zeros, but the moments change.

The analysis assumes that zeros times a scalar, such as a learning rate or a clip's scale, are
zeros. If the scalar becomes NaN, one device overwrites the frozen parameter with NaN; a job does
not change it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Var, has_bodies, moved_operands, opened
from dtrans.errors import GradientError, StateError
from dtrans.ir.builder import Builder, read_from
from dtrans.ir.folding import Alias, are_equal, fold, is_number, number_by_numpy
from dtrans.ir.inline import inline_calls
from dtrans.ir.interpret import Facts, ForwardAnalysis, forward_jaxpr
from dtrans.ir.program import Program
from dtrans.step.gradients import InlinedStep
from dtrans.step.halves import divide_step
from dtrans.step.marks import mark_p
from dtrans.step.trace import guess_roles


def drop_frozen_updates(main: Program, startup: Program) -> Program:
    """Return a step without the updates that never change their parameter.

    Optimizer state that stays constant also loses its update.

    Args:
      main: step of (params, opt_state, *batch).
      startup: the startup program. Initial values are known if it returns params and opt_state in
        the order of the step's leaves.
    """
    params, opt_state = (spec.names for spec in main.args[:2])
    names = (*params, *opt_state)
    of_state = set(opt_state)
    begin: dict[str, Any] = {}
    if _kinds(main.inputs[n] for n in names) == _kinds(startup.outputs.values()):
        for name, number in zip(names, _numbers_of(startup), strict=True):
            if name in of_state and number is not None:
                begin[name] = number
    constants, zeros = frozen_leaves(main, begin)
    if set(constants).isdisjoint(params):
        return main
    program = main.rewritten(lambda other: _without_updates(other, constants, zeros))
    # If the update of another leaf reads the gradient of a frozen leaf, the frozen leaf is treated
    # as trained.
    try:
        graded = divide_step(program).optimize.graded & constants.keys()
    # the strategy divides the user's step later, and raises this error if it needs gradients
    except GradientError:
        return main
    if not graded:
        return program
    without_gradient = {n: x for n, x in constants.items() if n not in graded}
    if set(without_gradient).isdisjoint(params):
        return main
    return main.rewritten(lambda other: _without_updates(other, without_gradient, zeros))


def unchanged_leaves(step: InlinedStep) -> set[str]:
    """Return the leaves of the first argument that a step returns unchanged, or plus zeros."""
    folded = _folded(step.jaxpr, {})
    return {n for n in step.params if folded.of(step.outs[n]).value == Alias(step.vars[n])}


def changed_leaves(program: Program, leaves: Iterable[str]) -> list[str]:
    """Return the names among `leaves` for which the program returns a new value."""
    before, after = program.invars, program.outvars
    return [n for n in leaves if after[n] is not before[n]]


def _kinds(types: Iterable[Any]) -> list[Any]:
    return [(t.shape, t.dtype) for t in types]


def check_frozen(main: Program, name: str, x: Any) -> None:
    """Raise StateError if a state array of a frozen parameter does not have its initial value.

    Restoring a checkpoint calls this check. The state may come from a job that trained the
    parameter, so that its moments are not zero. On one device these moments would still change the
    parameter, but this job has no update for it.

    Args:
      main: the step, as `drop_frozen_updates` returns it.
      name: name of the state array.
      x: its value in the checkpoint.
    """
    constant = main.frozen_constants.get(name)
    if constant is not None and not bool(np.all(np.asarray(x) == constant)):
        raise StateError(
            f"the state {name} has other entries than its initial value {constant}, and belongs to "
            f"a parameter that has no gradient in {main.name}. One device would change this "
            "parameter, but a job would not. Start with a new optimizer state, or freeze the leaf "
            "with optax.set_to_zero"
        )


def frozen_leaves(main: Program, begin: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Find the parameters and state arrays that a step never changes, by constant folding.

    An example is a parameter with an update of zeros (`optax.set_to_zero`).

    Args:
      main: the traced training step of one device.
      begin: state arrays that init fills with one number, such as moments of zeros: name -> this
        number.

    Returns:
      A pair (unchanged, zeros). `unchanged` maps the name of an unchanged array to the number in
      all its entries, or to None if this number is unknown. `zeros` has the names of the parameters
      with a marked gradient of zeros.
    """
    jaxpr = inline_calls(main.jaxpr)
    invars = dict(zip(main.in_names, opened(jaxpr).invars, strict=True))
    outs = dict(zip(main.out_names, opened(jaxpr).outvars, strict=True))
    params, opt_state = (spec.names for spec in main.args[:2])
    if not {*params, *opt_state} <= outs.keys():
        return {}, frozenset()
    candidates = {}
    for name, number in begin.items():
        aval = invars[name].aval
        if aval.ndim and jnp.issubdtype(aval.dtype, jnp.inexact):
            candidates[name] = number
    while True:
        folded = _folded(jaxpr, {invars[n]: x for n, x in candidates.items()})
        stays = {n: x for n, x in candidates.items() if _number(folded, outs[n]) == x}
        if len(stays) == len(candidates):
            break
        candidates = stays
    constants = {}
    for name in (*params, *opt_state):
        before, after = invars[name], outs[name]
        is_constant = name in candidates or folded.of(after).value == Alias(before)
        if after is not before and is_constant:
            constants[name] = candidates.get(name)

    # A leaf may have several marked gradients, which must all be zeros.
    leaf_of = {invars[n]: n for n in params}
    zeros: set[str] = set()
    nonzeros: set[str] = set()
    for eqn in opened(jaxpr).eqns:
        if eqn.primitive is mark_p:
            gradient, leaf = eqn.invars
            if isinstance(leaf, Var) and leaf in leaf_of:
                found = zeros if _number(folded, gradient) == 0 else nonzeros
                found.add(leaf_of[leaf])
    return constants, frozenset(zeros - nonzeros)


class _Fact(NamedTuple):
    """Result of the constant folding for one value.

    Attributes:
      value: the number in all entries, or an `Alias` that names an equal input; None if unknown.
      is_uniform: True if all entries are one number, even if the number is unknown.
    """

    value: Any
    is_uniform: bool


def _folded(jaxpr: ClosedJaxpr, known: Mapping[Var, Any]) -> Facts[_Fact]:
    """Fold constants in a jaxpr: find values that are one number in all entries, or equal an input.

    Args:
      jaxpr: the jaxpr.
      known: maps an input to the number in all its entries; other inputs are absent.
    """
    start = []
    for v in opened(jaxpr).invars:
        value = np.asarray(known[v]) if v in known else Alias(v)
        start.append(_Fact(value, not v.aval.ndim))
    return forward_jaxpr(_FOLDED, jaxpr, start)


def _rule(eqn: JaxprEqn, ins: Sequence[_Fact]) -> list[_Fact] | None:
    if has_bodies(eqn):
        return None

    # The product of zeros and a factor is zeros. A factor is a finite nonzero number, or an
    # unknown scalar.
    def is_factor(i: int) -> bool:
        x = ins[i].value
        if is_number(x):
            return bool(np.isfinite(x)) and not is_number(x, 0)
        return ins[i].is_uniform

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
    return fact if is_number(fact.value) else fact._replace(value=None)


def _branch(index: _Fact) -> int | None:
    return int(index.value) if is_number(index.value) else None


_FOLDED = ForwardAnalysis[_Fact](
    _join,
    _rule,
    _of_constant,
    slice_fact=_of_turn,
    # A scan stacks one output per iteration. These may be different numbers, so the entries of the
    # stack are not uniform.
    stack=lambda fact: _of_turn(fact)._replace(is_uniform=False),
    branch=_branch,
)


def _numbers_of(startup: Program) -> list[Any]:
    """Return the number that fills each output of a startup program; None for other outputs."""
    jaxpr = inline_calls(startup.jaxpr)
    folded = _folded(jaxpr, {})
    return [_number(folded, a) for a in opened(jaxpr).outvars]


def _number(folded: Facts[_Fact], atom: Atom) -> Any:
    value = folded.of(atom).value
    return value[()] if is_number(value) else None


def _without_updates(
    main: Program, constants: Mapping[str, Any], zeros: Collection[str]
) -> Program:
    """Write the step again so that it returns frozen parameters and state arrays unchanged.

    Args:
      main: the traced training step of one device.
      constants: the frozen parameters and state arrays, as from `frozen_leaves`.
      zeros: parameters with marked gradients that are replaced by zeros.
    """
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
            b.keep(eqn, read_from(instead, eqn.invars))
    outs = read_from(instead, inner.outvars)
    for i, name in enumerate(main.out_names):
        if name in constants:
            outs[i] = invars[name]
    jaxpr_out = b.build(outs)
    return dataclasses.replace(
        main,
        jaxpr=jaxpr_out,
        roles=guess_roles(jaxpr_out),
        labels={},
        frozen_constants={n: x for n, x in constants.items() if x is not None},
    )
