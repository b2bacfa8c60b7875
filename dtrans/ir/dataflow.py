"""Dependencies between values of a list of equations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dtrans._jax import Atom, JaxprEqn, Var, zeros_by


def backward_slice(
    eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], stop: Iterable[Var] = ()
) -> tuple[list[int], set[Var]]:
    """Return the positions of the equations that `outputs` need, and their free variables.

    Positions are in order. Free variables are those that no needed equation computes. The walk ends
    at the variables in `stop`.
    """
    stops = set(stop)
    wanted = {a for a in outputs if isinstance(a, Var)}
    positions: list[int] = []
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        computed = [v for v in eqn.outvars if v in wanted and v not in stops]
        if computed:
            positions.append(i)
            wanted.difference_update(computed)
            wanted.update(a for a in eqn.invars if isinstance(a, Var))
    return positions[::-1], wanted


def needed_equations(
    eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], stop: Iterable[Var] = ()
) -> list[JaxprEqn]:
    """Return the equations that `outputs` need, in order; arguments as for `backward_slice`."""
    positions, _ = backward_slice(eqns, outputs, stop)
    return [eqns[i] for i in positions]


def live_equations(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom]) -> list[JaxprEqn]:
    """Return the equations with effects, and those that they or `outputs` need."""
    wanted = list(outputs)
    with_effects = [i for i, eqn in enumerate(eqns) if eqn.effects]
    for i in with_effects:
        wanted += eqns[i].invars
    needed, _ = backward_slice(eqns, wanted)
    return [eqns[i] for i in sorted({*needed, *with_effects})]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the variables among atoms."""
    return [a for a in atoms if isinstance(a, Var)]


def free_variables(eqns: Sequence[JaxprEqn]) -> list[Var]:
    """Return the variables that equations read and do not compute, in the order of reads."""
    computed = {v for e in eqns for v in e.outvars}
    return list(
        dict.fromkeys(a for e in eqns for a in e.invars if isinstance(a, Var) and a not in computed)
    )


def propagate(
    eqns: Sequence[JaxprEqn], seeds: Mapping[Var, int], fixed: Mapping[Var, int]
) -> dict[Var, int]:
    """Return the seeds that enter each value, as the union of bits; `fixed` values keep theirs.

    It is one forward pass; values that no seed enters may be absent.
    """
    bits = {**seeds, **fixed}
    for eqn in eqns:
        entering = 0
        for a in eqn.invars:
            if isinstance(a, Var):
                entering |= bits.get(a, 0)
        if entering:
            for v in eqn.outvars:
                bits.setdefault(v, entering)
    return bits


def is_zero_array(atom: Atom, producers: Mapping[Var, JaxprEqn]) -> bool:
    """Return True if all entries of a value are known to be zero."""
    while isinstance(atom, Var):
        eqn = producers.get(atom)
        if eqn is None or len(eqn.invars) != 1 or zeros_by(eqn, (0,)) != ():
            return False
        atom = eqn.invars[0]
    return bool(np.all(np.asarray(atom.val) == 0))
