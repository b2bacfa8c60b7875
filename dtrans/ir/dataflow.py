"""Dependencies between values of a list of equations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dtrans._jax import Atom, JaxprEqn, Var, zeros_by
from dtrans.ir.selection import values_at


def backward_slice(
    eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], stop: Iterable[Var] = ()
) -> tuple[list[int], set[Var]]:
    """Find the equations that compute `outputs`, and the variables that these equations need.

    Args:
      eqns: equations in order.
      outputs: the values.
      stop: variables to treat as inputs: the search does not enter the equations that compute them.

    Returns:
      The indices of the needed equations, in order; and the needed variables that no needed
      equation computes.
    """
    stops = set(stop)
    wanted = set(variables(outputs))
    positions: list[int] = []
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        computed = [v for v in eqn.outvars if v in wanted and v not in stops]
        if computed:
            positions.append(i)
            wanted.difference_update(computed)
            wanted.update(variables(eqn.invars))
    return positions[::-1], wanted


def needed_equations(
    eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], stop: Iterable[Var] = ()
) -> list[JaxprEqn]:
    """Return the equations that `outputs` depend on, in order; see `backward_slice`."""
    positions, _ = backward_slice(eqns, outputs, stop)
    return values_at(eqns, positions)


def live_equations(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom]) -> list[JaxprEqn]:
    """Return the equations on which `outputs` or a side effect depends, in order."""
    wanted = list(outputs)
    with_effects = [i for i, eqn in enumerate(eqns) if eqn.effects]
    for i in with_effects:
        wanted += eqns[i].invars
    needed, _ = backward_slice(eqns, wanted)
    return values_at(eqns, sorted({*needed, *with_effects}))


def avals(atoms: Iterable[Atom]) -> list[Any]:
    """Return the type of each value."""
    return [a.aval for a in atoms]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the atoms that are variables, not literals."""
    return [a for a in atoms if isinstance(a, Var)]


def all_operands(eqns: Iterable[JaxprEqn]) -> list[Atom]:
    """Return the operands of all equations in one list, in order."""
    return [a for e in eqns for a in e.invars]


def outputs_of(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """Return all output variables of the equations in one list, in order."""
    return [v for e in eqns for v in e.outvars]


def producers_of(eqns: Iterable[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """Return the equation that computes each variable."""
    return {v: e for e in eqns for v in e.outvars}


def producer_positions(eqns: Iterable[JaxprEqn]) -> dict[Var, int]:
    """Return the position of the equation that computes each variable."""
    return {v: i for i, e in enumerate(eqns) for v in e.outvars}


def variables_read(eqns: Iterable[JaxprEqn], outputs: Iterable[Atom] = ()) -> list[Var]:
    """Return the distinct variables in `outputs` and among the operands of equations, in order."""
    return list(dict.fromkeys(variables([*all_operands(eqns), *outputs])))


def free_variables(eqns: Sequence[JaxprEqn]) -> list[Var]:
    """Return the variables that equations read but do not compute, in the order of their reads."""
    computed = set(outputs_of(eqns))
    return [v for v in variables_read(eqns) if v not in computed]


def bits_of(bits: Mapping[Var, int], *atoms: Atom) -> int:
    """Return the bitwise OR of the bits of some values; values that are not in `bits` have 0."""
    union = 0
    for a in atoms:
        if isinstance(a, Var):
            union |= bits.get(a, 0)
    return union


def propagate(
    eqns: Sequence[JaxprEqn], seeds: Mapping[Var, int], fixed: Mapping[Var, int]
) -> dict[Var, int]:
    """Find the seeds that each value depends on: propagate bit masks from inputs to outputs.

    Each output of an equation gets the bitwise OR of its operands' bits. If, for example, each
    parameter has one bit in `seeds`, the result states the parameters that a value depends on.

    Args:
      eqns: equations in order.
      seeds: bits of some inputs: variable -> int.
      fixed: bits of other variables, which do not change even if an equation computes the variable.

    Returns:
      A dict: variable -> int. Variables with bits 0 may be absent.
    """
    bits = {**seeds, **fixed}
    for eqn in eqns:
        entering = bits_of(bits, *eqn.invars)
        if entering:
            for v in eqn.outvars:
                bits.setdefault(v, entering)
    return bits


def is_zero_array(atom: Atom, producers: Mapping[Var, JaxprEqn]) -> bool:
    """Return True if a value is provably zero; `producers` maps a variable to its equation."""
    while isinstance(atom, Var):
        eqn = producers.get(atom)
        if eqn is None or len(eqn.invars) != 1 or zeros_by(eqn, (0,)) != ():
            return False
        atom = eqn.invars[0]
    return bool(np.all(np.asarray(atom.val) == 0))
