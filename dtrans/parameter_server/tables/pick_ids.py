"""Row ids of the lookups in a step, computed before the loops and branches of the lookups.

A trainer requests all rows of a step at once, before the first lookup. So it needs all row ids at
this time, even if a lookup is inside of a loop, a branch or a `jax.checkpoint`.

For a `scan`, the trainer needs the ids of all iterations. If they are an input or output of the
`scan`, no equation is needed. Otherwise this module writes another `scan`, which computes only ids.
For a `cond`, the trainer needs the ids of all branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import (
    COND,
    REMAT,
    SCAN,
    WHILE,
    Atom,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    body_indices,
    closed,
    closed_with,
    live_part,
    opened,
    rebuilt,
    scan_length,
)
from dtrans.ir.dataflow import backward_slice, free_variables, needed_equations, variables
from dtrans.ir.selection import values_at
from dtrans.parameter_server.tables.row_picks import RowPick
from dtrans.rows.flow import Flow
from dtrans.rows.rules import Step


_WITH_BODIES = frozenset({SCAN, COND, WHILE, *REMAT})


@dataclasses.dataclass(frozen=True, eq=False)
class RowLookup:
    """Read of some rows of a table by id, at the top level of a step or inside a loop or branch.

    Attributes:
      eqn: the equation that reads the rows.
      leaf: name of the table.
      row_ids: the row ids, as a value that is computed outside of all loops and branches.
      component, outside, count: as in `RowPick`.
    """

    eqn: JaxprEqn
    leaf: str
    row_ids: Atom
    component: int | None
    outside: str
    count: int


def numbers_first(eqns: Sequence[JaxprEqn], numbers: Iterable[Atom], like: Any) -> list[JaxprEqn]:
    """Select the equations that compute row ids; drop all other equations.

    A selected loop is rewritten to compute only those outputs that row ids depend on.

    Args:
      eqns: the equations to select from, in order.
      numbers: the row ids.
      like: the jaxpr that contains the equations.
    """
    wanted = list(dict.fromkeys(variables(numbers)))
    positions, inputs = backward_slice(eqns, wanted)
    needed = values_at(eqns, positions)
    if not any(e.primitive.name in _WITH_BODIES for e in needed):
        return needed
    free = free_variables(needed)
    outvars = [v for v in wanted if v not in inputs]
    jaxpr = opened(closed((), (), free, outvars, needed, like))
    live, _ = live_part(jaxpr, [True] * len(outvars), [False] * len(free))
    return list(live.eqns)


def lookups_in(eqns: Sequence[JaxprEqn], flow: Flow) -> tuple[list[RowLookup], list[JaxprEqn]]:
    """Return all reads of rows by id, and the equations to add for their ids.

    The added equations compute the ids of lookups inside loops and branches. They run before these
    loops and branches.
    """
    found: list[RowLookup] = []
    extra: list[JaxprEqn] = []
    # Outputs of the additional equations, by `_key`. Forward and backward contain equal equations,
    # which share one copy.
    known: dict[Any, Sequence[Var]] = {}
    for i, step in flow.steps.items():
        eqn = eqns[i]
        if isinstance(step, RowPick):
            row = step.operands[0]
            assert row is not None
            numbers = eqn.invars[step.numbers]
            found.append(
                RowLookup(eqn, row.leaf, numbers, step.component, step.out_of_range, step.count)
            )
        elif eqn.primitive.name == SCAN and step.bodies:
            inside, new = _in_scan(eqn, bodies(eqn)[0], step.bodies[0], known)
            found += inside
            extra += new
        elif step.bodies and eqn.primitive.name not in (SCAN, WHILE):
            if not known:
                _note_integers(eqns[:i], known)
            inside, new = _in_branches(eqn, step, known)
            found += inside
            extra += new
    return found, extra


def _note_integers(eqns: Iterable[JaxprEqn], known: dict[Any, Sequence[Var]]) -> None:
    """Add the equations that compute integers to the dict `known`, to reuse their results.

    Bodies of branches often compute the same row ids as equations before the branches.
    """
    for eqn in eqns:
        if not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
            known.setdefault(_key(eqn, eqn.invars), eqn.outvars)


def _in_branches(
    eqn: JaxprEqn, step: Step, known: dict[Any, Sequence[Var]]
) -> tuple[list[RowLookup], list[JaxprEqn]]:
    """Return the reads of rows in the bodies of a `cond` or `jax.checkpoint`, and added equations.

    The added equations are copies of equations of the bodies, and compute the row ids before `eqn`.
    They do so for every branch, since the trainer needs the ids before it knows the branch that
    runs.
    """
    found: list[RowLookup] = []
    extra: list[JaxprEqn] = []
    branches = zip(map(opened, bodies(eqn)), body_indices(eqn).ins, step.bodies, strict=True)
    for body, read, flow in branches:
        env: dict[Var, Atom] = dict(zip(body.invars, values_at(eqn.invars, read), strict=True))
        inside, new = lookups_in(body.eqns, flow)
        numbers = [x.row_ids for x in inside]
        for inner in needed_equations([*body.eqns, *new], numbers):
            extra += _copy_outside(inner, env, known)
        found += _with_outer_numbers(inside, env)
    return found, extra


def _in_scan(
    eqn: JaxprEqn, jaxpr: Any, flow: Flow, known: dict[Any, Sequence[Var]]
) -> tuple[list[RowLookup], list[JaxprEqn]]:
    """Return the reads of rows in a scan's body, and added equations that compute all their ids."""
    body, indices = opened(jaxpr), body_indices(eqn)
    inside, new = lookups_in(body.eqns, flow)
    count = len(indices.carried)

    # Inputs and stacked outputs of the body also exist outside of the body.
    env: dict[Var, Atom] = {}
    for i, v in enumerate(body.invars):
        if i not in indices.carried:
            env[v] = eqn.invars[i]
    for j in indices.stacks:
        stacked = body.outvars[j]
        if isinstance(stacked, Var):
            env[stacked] = eqn.outvars[j]
    ids = dict.fromkeys(variables(x.row_ids for x in inside))
    wanted = [v for v in ids if v not in env]
    extra = []
    if wanted:
        # Write another scan, which stacks the ids that exist only inside.
        outvars = [*body.outvars[:count], *wanted]
        ids_body = closed_with(jaxpr, outvars=outvars, eqns=[*body.eqns, *new])
        outputs = [Var(v.aval) for v in eqn.outvars[:count]]
        for v in wanted:
            outputs.append(Var(v.aval.update(shape=(scan_length(eqn), *v.aval.shape))))
        stacks = outputs[count:]
        scan = rebuilt(eqn, [ids_body], eqn.invars, outputs)
        (scan,) = numbers_first([scan], stacks, jaxpr)
        if body_indices(scan).carried:
            # The scans of forward and backward have different carries, so neither can be reused.
            extra.append(scan)
        else:
            key = (*map(id, scan.invars), str(bodies(scan)[0]))
            if key in known:
                stacks = list(known[key])
            else:
                extra.append(scan)
                known[key] = stacks
        env |= zip(wanted, stacks, strict=True)
    return _with_outer_numbers(inside, env), extra


def _with_outer_numbers(picks: Iterable[RowLookup], env: Mapping[Var, Atom]) -> list[RowLookup]:
    """Return a body's lookups, with row ids replaced by equal values outside of the body.

    Args:
      picks: the lookups of the body.
      env: for variables of the body, the equal values outside.
    """
    found = []
    for x in picks:
        found.append(dataclasses.replace(x, row_ids=_outer(x.row_ids, env)))
    return found


def _outer(atom: Atom, env: Mapping[Var, Atom]) -> Atom:
    return atom if isinstance(atom, Literal) else env[atom]


def _copy_outside(
    eqn: JaxprEqn, env: dict[Var, Atom], known: dict[Any, Sequence[Var]]
) -> list[JaxprEqn]:
    """Copy an equation of a body to the outside, unless an equal equation exists there.

    Args:
      eqn: the equation.
      env: for variables of the body, the values outside; this function adds the outputs of `eqn`.
      known: outputs of the equations that exist outside, by the equation's `_key`.

    Returns:
      The copy; an empty list if there is an equal equation.
    """
    atoms = [_outer(a, env) for a in eqn.invars]
    key = _key(eqn, atoms)
    copies = []
    if key not in known:
        known[key] = [Var(v.aval) for v in eqn.outvars]
        copies.append(eqn.replace(invars=atoms, outvars=list(known[key])))
    env.update(zip(eqn.outvars, known[key], strict=True))
    return copies


def _key(eqn: JaxprEqn, atoms: Sequence[Atom]) -> Any:
    """Return a key that is equal for two equations that compute the same value."""
    return (eqn.primitive.name, str(eqn.params), *map(atom_key, atoms))


def atom_key(atom: Atom) -> Hashable:
    """Return a key that is equal for equal literals; a literal itself is not hashable."""
    if isinstance(atom, Literal):
        return str(atom.val), atom.aval.dtype
    return atom
