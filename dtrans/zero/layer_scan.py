"""Loops over layers, and what is computed twice, on slices.

A loop is given slices where it takes layers apart, or picks one; its body gathers what it reads whole. What it makes of
layers alone it hands on as slices; a gradient of layers it makes as slices, layer by layer, or carries as slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    REMAT,
    SCAN,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Var,
    bodies,
    closed,
    constants,
    opened,
    scan_counts,
    scan_with,
    with_bodies,
)
from dtrans.ir.builder import Builder
from dtrans.ops import all_gather_p
from dtrans.rows.layout import RowAxis
from dtrans.step.weight_gradients import straightened
from dtrans.zero.gathering import Gathering, Given
from dtrans.zero.prefetch import prefetched
from dtrans.zero.slice_flow import SliceFlow, local_inside, operands_inside


Gatherer = Any  # of `dtrans.zero.all_gather`, which stands above


Ahead = tuple[Callable[[Any], Any], int]


@dataclasses.dataclass(frozen=True)
class _Written:
    """A body on slices.

    Attributes:
      jaxpr: the body.
      ahead: where the first layer that a turn reads is gathered in the turn before: how it is gathered, and which of
        the operands that are taken apart it is a slice of. The body is then given it, behind everything else.
    """

    jaxpr: ClosedJaxpr
    ahead: Ahead | None


def written_loop(g: Gatherer, i: int) -> tuple[JaxprEqn, list[Atom]]:
    """A loop over slices, and its operands; `g` writes the equations around it, and is told what it makes.

    Args:
      g: writes the equations that the loop is among.
      i: the position of the loop.
    """
    eqn: JaxprEqn = g.eqns[i]
    passed = g.flow.passed.get(i, {})
    wanted = g.scattering.loops.get(i, {})
    consts, carried = scan_counts(eqn) if eqn.primitive.name == SCAN else (0, 0)
    atoms: list[Atom] = []
    for k, a in enumerate(eqn.invars):
        if k in passed and isinstance(a, Var):
            atoms.append(g.slice_of(a))
        elif consts <= k < consts + carried and k - consts in wanted:
            atoms.append(g.wanted_slice(a, wanted[k - consts]))
        else:
            atoms.append(g.read(a, i))
    outvars: list[Var] = []
    for k, v in enumerate(eqn.outvars):
        row = g.flow.rows.get(v) if k not in wanted else g.scattering.rows[v]
        outvars.append(v if row is None else Var(g.how.cut(row).of_rank(v.aval)))
        if k in wanted:
            g.env[v] = g.late = outvars[-1]
        elif row is not None:
            g.handed_on(v, outvars[-1])
    made = [_body(g, i, eqn, body, k, passed, wanted) for k, body in enumerate(bodies(eqn))]
    if eqn.primitive.name == SCAN:
        (body,) = made
        if body.ahead is not None:
            return prefetched(eqn, body.jaxpr, *body.ahead, [a.aval for a in atoms], outvars), atoms
        return scan_with(eqn, body.jaxpr, atoms, outvars), atoms
    new: list[Any] = [m.jaxpr for m in made]
    if eqn.primitive.name in REMAT:  # its body has no constants of its own
        (whole,) = new
        inner = opened(whole)
        atoms = [*map(g.b.constant, constants(whole)), *atoms]
        invars = [*inner.constvars, *inner.invars]
        new = [opened(closed([], [], invars, inner.outvars, inner.eqns, whole))]
    return eqn.replace(invars=atoms, outvars=outvars, params={**eqn.params, **with_bodies(eqn, new)}), atoms


def _body(
    g: Gatherer,
    i: int,
    eqn: JaxprEqn,
    old: Any,
    number: int,
    passed: Mapping[int, RowAxis],
    wanted: Mapping[int, RowAxis],
) -> _Written:
    """A body, on slices."""
    inner = opened(old)
    eqns, roles = straightened(inner.eqns, [g.b.role] * len(inner.eqns), inner.outvars)
    like = closed(inner.constvars, constants(old), inner.invars, inner.outvars, eqns, inner)
    b = Builder(like)
    b.role = g.b.role
    consts, carried = scan_counts(eqn) if eqn.primitive.name == SCAN else (0, 0)
    how: Gathering = dataclasses.replace(g.how, prefetch=g.how.prefetch_in_loops)
    slices: dict[Var, Atom] = {}
    rows: dict[Var, RowAxis] = {}
    summed: dict[Var, Atom] = {}
    for k in range(len(eqn.invars)):
        at, _ = operands_inside(eqn, k)
        if at < 0:
            continue
        v = inner.invars[at]
        if k in passed:
            rows[v] = passed[k]
            slices[v] = b.input(how.cut(passed[k]).of_rank(v.aval))
        elif consts <= k < consts + carried and k - consts in wanted:
            summed[v] = b.input(how.cut(wanted[k - consts]).of_rank(v.aval))
        else:
            b.invars.append(v)
    local = local_inside(eqn, g.flow.local)[number]
    targets = {a: row for k, row in wanted.items() if isinstance(a := inner.outvars[k], Var)}
    inside: SliceFlow = g.flow.inside[i][number] if i in g.flow.inside else SliceFlow((), {}, ())
    taken = {a: inside.rows[a] for k, (v, a) in enumerate(zip(eqn.outvars, inner.outvars, strict=True))
             if k not in wanted and v in g.flow.rows and isinstance(a, Var)}  # fmt: skip
    at_ = {v: n for n, e in enumerate(eqns) for v in e.outvars}
    places = [at_.get(a, len(eqns)) if isinstance(a, Var) else len(eqns) for a in inner.outvars]
    ends = list(zip(places, inner.outvars, strict=True))
    given = Given(slices, rows, local, targets, summed, taken)
    body = type(g)(b, like, eqns, roles, given, how, ends)
    ahead = None
    if eqn.primitive.name == SCAN and how.prefetch and not how.once:
        ahead = _first_ahead(body, slices, inner.invars[consts + carried :])
    for e in eqns:
        body.emit(e)
    return _Written(b.build([body.result(a, place) for place, a in ends]), ahead)


def _first_ahead(body: Gatherer, slices: Mapping[Var, Atom], parts: Sequence[Var]) -> Ahead | None:
    """Let the body be given what its first window gathers, where that is a layer that is taken apart."""
    windows = body.uses.windows
    if not windows or windows[0].leaf not in slices or windows[0].leaf not in parts:
        return None
    window, how = windows[0], body.how
    row = body.flow.rows[window.leaf]
    s = how.cut(row)
    body.given_already(body.b.input(window.leaf.aval.update(dtype=jnp.dtype(window.dtype))))

    def gather(x: Any) -> Any:
        (made,) = all_gather_p.bind(
            x.astype(window.dtype), name=row.leaf, over=(how.axis_name,), size=how.degree, axis=s.axis
        )
        return jax.lax.slice_in_dim(made, 0, s.size, axis=s.axis)

    return gather, list(parts).index(window.leaf)
