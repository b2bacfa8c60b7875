"""What a value is made of, and what it reaches: questions about a row of equations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dtrans._jax import Atom, JaxprEqn, Var, zeros_by


def backward_slice(
    eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], stop: Iterable[Var] = ()
) -> tuple[list[int], set[Var]]:
    """What `outputs` are made of.

    Returns the positions of the equations they need, in order, and the variables those read that
    none of them makes. Nothing is followed beyond the variables in `stop`.
    """
    stops = set(stop)
    wanted = {a for a in outputs if isinstance(a, Var)}
    kept: list[int] = []
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        made = [v for v in eqn.outvars if v in wanted and v not in stops]
        if made:
            kept.append(i)
            wanted.difference_update(made)
            wanted.update(a for a in eqn.invars if isinstance(a, Var))
    return kept[::-1], wanted


def free_variables(eqns: Sequence[JaxprEqn]) -> list[Var]:
    """Return the variables that equations read and none of them makes, in the order in which they
    are read."""
    made = {v for e in eqns for v in e.outvars}
    return list(
        dict.fromkeys(a for e in eqns for a in e.invars if isinstance(a, Var) and a not in made)
    )


def propagate(
    eqns: Sequence[JaxprEqn], seeds: Mapping[Var, int], fixed: Mapping[Var, int]
) -> dict[Var, int]:
    """Which seeds enter each value, as bits: the union over what it is made of; `fixed` values are
    as given.

    One pass forward; values that nothing enters may be absent.
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


def is_zero_array(atom: Atom, made_by: Mapping[Var, JaxprEqn]) -> bool:
    """Return True if all entries of a value are known to be zero: a literal, or what keeps the
    zeros of one."""
    while isinstance(atom, Var):
        eqn = made_by.get(atom)
        if eqn is None or len(eqn.invars) != 1 or zeros_by(eqn, (0,)) != ():
            return False
        atom = eqn.invars[0]
    return bool(np.all(np.asarray(atom.val) == 0))
