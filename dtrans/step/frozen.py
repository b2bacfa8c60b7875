"""Leaves that a step holds still, although it writes an update for them: found by folding the update.

    optax.set_to_zero, optax.masked, optax.multi_transform     an update of zeros is added
    jax.lax.stop_gradient                                      the gradient is zeros, and so the moments stay zeros

A value is folded where it is one number everywhere, and where it is another value plus nothing. What the optimizer's
state begins with is read off the startup program: arrays of zeros that a step makes zeros of again stay it, by
induction. A leaf whose new value folds to the old one is handed on, and the rest of the package treats it as it does
every frozen leaf: trainers hold it, and no program of a server has it.

A leaf whose gradient still makes moments (zeros are put in place of Adam's update, and not in front of it) stays where
it is updated, since the moments do.

Zeros stay zeros under any factor without dimensions, as a learning rate or the factor of a clip is: a job in which that
is no number goes on with what is frozen, where one device loses it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    constants,
    moved_operands,
    opened,
    same_operand,
    zeros_by,
)
from dtrans.errors import StateError
from dtrans.ir.builder import Builder
from dtrans.ir.inline import inline_calls
from dtrans.ir.program import Program
from dtrans.step.cut import cut
from dtrans.step.marks import mark_p
from dtrans.step.trace import guess_roles


# To compute a number, JAX would start its devices: but a process plans before it connects to others.
_IN_NUMPY: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def hands_on_what_is_still(main: Program, startup: Program) -> Program:
    """A step that hands on the leaves which it holds still, and the state that stays what it began as.

    Args:
      main: of two parts.
      startup: makes both; what the state begins with is known where it makes them in the order of the step's leaves.
    """
    params, opt_state = (spec.names for spec in main.args[:2])
    kind = lambda t: (t.shape, t.dtype)
    in_order = [kind(t) for t in startup.outputs.values()] == [kind(main.inputs[n]) for n in (*params, *opt_state)]
    begin = dict(zip((*params, *opt_state), _numbers_of(startup), strict=True)) if in_order else {}
    still, zeros = still_leaves(main, {n: begin[n] for n in opt_state if begin.get(n) is not None})
    if set(still).isdisjoint(params):
        return main
    made = _handing_on(main, still, zeros)
    graded = cut(made).optimize.graded & still.keys()
    if not graded:
        return made
    kept = {n: x for n, x in still.items() if n not in graded}
    return main if set(kept).isdisjoint(params) else _handing_on(main, kept, zeros)


def check_still(main: Program, name: str, x: Any) -> None:
    """Raise StateError for an array of the state that a step does not take: what it hands on has to be as it began.

    The state may come from a job in which the leaf was trained: then its moments go on moving it on one device.
    """
    if name in main.still and not bool(np.all(np.asarray(x) == main.still[name])):
        raise StateError(
            f"{name} is not {main.still[name]} everywhere, as init makes it, so that on one device its leaf would go "
            f"on moving; {main.name} gives the leaf no gradient, and jobs hold it still. Start the optimizer's state "
            "anew, or freeze the leaf with optax.set_to_zero, which moves nothing"
        )


def still_leaves(main: Program, begin: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The leaves of a step that never change, and of the optimizer's the number that they are everywhere.

    And the leaves whose marked gradient is zeros.

    Args:
      begin: the arrays of the optimizer's state that begin as one number everywhere, and that number.
    """
    jaxpr = inline_calls(main.jaxpr)
    invars = dict(zip(main.in_names, opened(jaxpr).invars, strict=True))
    outs = dict(zip(main.out_names, opened(jaxpr).outvars, strict=True))
    params, opt_state = (spec.names for spec in main.args[:2])
    if not {*params, *opt_state} <= outs.keys():
        return {}, frozenset()
    held = {n: x for n, x in begin.items() if invars[n].aval.ndim and jnp.issubdtype(invars[n].aval.dtype, jnp.inexact)}
    while True:
        folded = _Folded(jaxpr, {invars[n]: x for n, x in held.items()})
        stays = {n: x for n, x in held.items() if folded.number(outs[n]) == x}
        if len(stays) == len(held):
            break
        held = stays
    moving = [n for n in (*params, *opt_state) if outs[n] is not invars[n]]
    still = {n: held.get(n) for n in moving if n in held or folded.behind(outs[n]) is invars[n]}
    leaf_of = {invars[n]: n for n in params}
    marked = [e.invars for e in opened(jaxpr).eqns if e.primitive is mark_p]
    others = {v for g, v in marked if isinstance(v, Var) and folded.number(g) != 0}  # one of several may be zeros
    zeros = [leaf_of[v] for _, v in marked if isinstance(v, Var) and v in leaf_of and v not in others]
    return still, frozenset(zeros)


class _Folded:
    """The values of a jaxpr that are one number everywhere, or another value.

    Args:
      known: inputs that are one number.
    """

    def __init__(self, jaxpr: ClosedJaxpr, known: Mapping[Var, Any]) -> None:
        self._numbers: dict[Var, Any] = dict(known)
        self._behind: dict[Var, Atom] = {}
        self._scalars: dict[Var, Atom] = {}  # what was broadcast
        inner = opened(jaxpr)
        for v, x in zip(inner.constvars, constants(jaxpr), strict=True):
            if (
                isinstance(x, (np.ndarray, np.generic, jax.Array))
                and jnp.issubdtype(x.dtype, jnp.inexact)
                and x.size == 1
            ):
                self._numbers[v] = np.asarray(x).reshape(())[()]
        for eqn in inner.eqns:
            if len(eqn.outvars) == 1:
                self._fold(eqn, eqn.outvars[0])

    def number(self, atom: Atom) -> Any:
        """The number that a value is everywhere; None where it is not known."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val, atom.aval.dtype)[()] if np.ndim(atom.val) == 0 else None
        return self._numbers.get(atom)

    def behind(self, atom: Atom) -> Atom:
        """The value that a value is."""
        while isinstance(atom, Var) and atom in self._behind:
            atom = self._behind[atom]
        return atom

    def _fold(self, eqn: JaxprEqn, out: Var) -> None:
        name, ins = eqn.primitive.name, eqn.invars
        numbers = [self.number(a) for a in ins]
        zeros = [i for i, x in enumerate(numbers) if x is not None and not np.any(x)]
        moved, same = moved_operands(eqn), same_operand(eqn)
        if name == "select_n" and numbers[0] is not None:
            same = 1 + int(numbers[0])
            moved = (same,)
        if name == "convert_element_type" and ins[0].aval == out.aval:
            same = 0
        if moved and self._is_one([numbers[i] for i in moved]):
            self._numbers[out] = np.asarray(numbers[moved[0]]).astype(out.aval.dtype)[()]
        elif same is not None:
            self._behind[out] = ins[same]
        elif self._are_zeros(eqn, zeros, numbers):
            self._numbers[out] = np.zeros((), out.aval.dtype)[()]
        elif name in _IN_NUMPY and all(x is not None for x in numbers):
            with np.errstate(all="ignore"):
                self._numbers[out] = _IN_NUMPY[name](*numbers)
        elif name in ("add", "add_any", "sub") and (1 in zeros or (0 in zeros and name != "sub")):
            kept = ins[0] if 1 in zeros else ins[1]
            if kept.aval.shape == out.aval.shape:
                self._behind[out] = kept
        elif (moved == (0,) or name == "convert_element_type") and isinstance(ins[0], Var):
            self._scalars[out] = self._scalars.get(ins[0], ins[0])

    def _is_one(self, numbers: Sequence[Any]) -> bool:
        """Return True if values are the same number everywhere."""
        first, *others = numbers
        return first is not None and all(x is not None and x == first for x in others)

    def _are_zeros(self, eqn: JaxprEqn, zeros: Sequence[int], numbers: Sequence[Any]) -> bool:
        """Return True if the output is zeros, since these operands are."""
        factors = zeros_by(eqn, zeros)
        return factors is not None and all(self._is_factor(eqn.invars[i], numbers[i]) for i in factors)

    def _is_factor(self, atom: Atom, number: Any) -> bool:
        """Whether zeros stay zeros under it: one number, or no dimensions behind its broadcasts."""
        if number is not None:
            return bool(np.isfinite(number)) and bool(number)
        return not self._scalars.get(atom, atom).aval.ndim if isinstance(atom, Var) else not atom.aval.ndim


def _numbers_of(startup: Program) -> list[Any]:
    """The number that each output of a startup program is everywhere; None where it is none."""
    jaxpr = inline_calls(startup.jaxpr)
    folded = _Folded(jaxpr, {})
    return [folded.number(a) for a in opened(jaxpr).outvars]


def _handing_on(main: Program, still: Mapping[str, Any], zeros: Collection[str]) -> Program:
    """The step that hands on what is still. Gradients that are `zeros` are so in its text: nobody has to send them."""
    jaxpr = inline_calls(main.jaxpr)
    inner = opened(jaxpr)
    invars = dict(zip(main.in_names, inner.invars, strict=True))
    leaf_of = {invars[n]: n for n in still if n in zeros}
    b = Builder(jaxpr)
    b.invars += inner.invars
    instead: dict[Atom, Atom] = {}
    for eqn in inner.eqns:
        if eqn.primitive is mark_p and eqn.invars[1] in leaf_of:
            (instead[eqn.outvars[0]],) = b.call(jnp.zeros_like, eqn.invars[1])
        else:
            taken = [instead.get(a, a) if isinstance(a, Var) else a for a in eqn.invars]
            b.keep(eqn.replace(invars=taken) if instead else eqn)
    outs = zip(main.out_names, inner.outvars, strict=True)
    made = b.build([invars[n] if n in still else instead.get(a, a) if isinstance(a, Var) else a for n, a in outs])
    again = main.specializer

    def specializer(types: Sequence[jax.ShapeDtypeStruct]) -> Program:
        assert again is not None
        return _handing_on(again(types), still, zeros)

    return dataclasses.replace(
        main,
        jaxpr=made,
        roles=guess_roles(made),
        labels={},
        still={n: x for n, x in still.items() if x is not None},
        specializer=None if again is None else specializer,
    )
