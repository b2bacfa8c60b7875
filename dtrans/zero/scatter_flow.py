"""Search for the point at which gradients from loops become slices: layer by layer, in the loop.

Rows that are wanted of a gradient determine the rows that are wanted of its terms. The search goes
from the last equation to the first, while equations are linear and keep rows:

    g = add_any a b          rows of g are those of a and of b
    a = pad a'               (of layers 0 to 8)
    a' = scan ...            computed by a loop: each layer is scattered in its turn
    b = mul 2 w              depends on leaves alone: its rows, times the number of ranks

A gradient that a loop carries, adding one layer's part in each iteration, is carried as slices.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dtrans._jax import (
    REMAT,
    SCAN,
    Atom,
    Jaxpr,
    JaxprEqn,
    Var,
    Wiring,
    bodies,
    linear_group,
    opened,
    wiring,
)
from dtrans.rows.layout import RowAxis
from dtrans.rows.rules import Step, rows_of_operands
from dtrans.zero.rank_values import local_inside


@dataclasses.dataclass(eq=False)
class ScatterFlow:
    """Rows that are wanted of the outputs of equations.

    Attributes:
      rows: value to its wanted rows.
      steps: position of an equation to its step on rows.
      loops: position of a loop to the outputs that it computes as slices, with their rows in its
        body.
    """

    rows: dict[Var, RowAxis]
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    loops: dict[int, dict[int, RowAxis]] = dataclasses.field(default_factory=dict)

    def operands(self, eqns: Sequence[JaxprEqn]) -> dict[int, Collection[int]]:
        """By position, the operands of an equation that are read as slices."""
        return {i: self._operands(i, eqns[i]) for i in (*self.steps, *self.loops)}

    def _operands(self, i: int, eqn: JaxprEqn) -> Collection[int]:
        if i in self.steps:
            return [k for k, row in enumerate(self.steps[i].operands) if row is not None]
        return [k for k, out in wiring(eqn).carried.items() if out in self.loops[i]]

    def ends_of(self, v: Var, makers: Mapping[Var, tuple[int, JaxprEqn]]) -> tuple[int, bool]:
        """Return the elements of the largest scattered value behind a value, and whether loops
        compute some.

        Args:
          makers: the equation that makes a value, and its position.
        """
        ahead, whole, loops = [v], 0, False
        while ahead:
            v = ahead.pop()
            if v not in makers:  # an input
                continue
            i, e = makers[v]
            if i in self.steps:
                ahead += [a for a in e.invars if isinstance(a, Var) and a in self.rows]
            elif i in self.loops and e.outvars.index(v) in self.loops[i]:
                loops = True
            else:
                whole = max(whole, int(v.aval.size))
        return whole, loops


def makers_of(eqns: Sequence[JaxprEqn]) -> dict[Var, tuple[int, JaxprEqn]]:
    """Return the equation that computes each value, and its position."""
    return {v: (i, e) for i, e in enumerate(eqns) for v in e.outvars}


def scatter_flow(
    eqns: Sequence[JaxprEqn],
    wanted: Mapping[Var, RowAxis],
    local: Collection[Var],
    ends: Iterable[Atom] = (),
    inputs: Collection[Var] = (),
) -> ScatterFlow:
    """Propagate wanted rows from values to their operands.

    Args:
      wanted: value to its wanted rows.
      local: values that differ from rank to rank.
      ends: values that are read after the equations.
      inputs: inputs that may become slices, too.
    """
    flow = ScatterFlow(dict(wanted))
    made = {v for e in eqns for v in e.outvars} | set(inputs)
    reads: Counter[Any] = Counter(a for e in eqns for a in e.invars if isinstance(a, Var))
    reads.update(a for a in ends if isinstance(a, Var))

    def want(a: Atom, row: RowAxis | None) -> None:
        if (
            row is not None
            and isinstance(a, Var)
            and a in local
            and a in made
            and reads[a] == 1
            and a not in wanted
        ):
            flow.rows[a] = row

    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        found = {k: flow.rows[v] for k, v in enumerate(eqn.outvars) if v in flow.rows}
        if not found:
            continue
        if eqn.primitive.name == SCAN or eqn.primitive.name in REMAT:
            _into(flow, i, eqn, found, local, want)
        elif len(eqn.outvars) == 1 and (step := _on_rows(eqn, found[0], local)) is not None:
            flow.steps[i] = step
            for a, row in zip(eqn.invars, step.operands, strict=True):
                want(a, row)
    _prune(flow, eqns, wanted, local, inputs)
    return flow


def _prune(
    flow: ScatterFlow,
    eqns: Sequence[JaxprEqn],
    wanted: Mapping[Var, RowAxis],
    local: Collection[Var],
    inputs: Collection[Var],
) -> None:
    """Leave out what is no better scattered earlier: what no loop makes, and is as large as what is
    made of it."""
    # of what is whole for a value; of what loops make 0
    size: dict[Var, int] = dict.fromkeys(inputs, 0)
    for i in sorted({*flow.steps, *flow.loops}):
        eqn = eqns[i]
        if i in flow.loops:
            size |= {eqn.outvars[k]: 0 for k in flow.loops[i]}
            continue
        (out,), step = eqn.outvars, flow.steps[i]
        given = [
            a
            for a, row in zip(eqn.invars, step.operands, strict=True)
            if row is not None and isinstance(a, Var)
        ]
        whole = [size.get(a, int(a.aval.size)) for a in given if a in local]
        if len(whole) == len(given) and max(whole, default=0) >= out.aval.size:
            del flow.steps[i]
        else:
            size[out] = max(whole, default=0)
    kept = set(wanted)
    for i in sorted({*flow.steps, *flow.loops}, reverse=True):
        if not kept.intersection(eqns[i].outvars):
            flow.steps.pop(i, None)
            flow.loops.pop(i, None)
            continue
        kept.update(
            a for k in flow._operands(i, eqns[i]) if isinstance(a := eqns[i].invars[k], Var)
        )
    flow.rows = {v: row for v, row in flow.rows.items() if v in kept}


def _on_rows(eqn: JaxprEqn, row: RowAxis, local: Collection[Var]) -> Step | None:
    """Return the step on rows of an equation that is linear in its partial sums, or None."""
    summed = {k for k, a in enumerate(eqn.invars) if isinstance(a, Var) and a in local}
    if not linear_group(eqn, summed):
        return None
    step = rows_of_operands(eqn, row)
    return step if step is not None and all(step.operands[k] is not None for k in summed) else None


def _into(
    flow: ScatterFlow,
    i: int,
    eqn: JaxprEqn,
    found: Mapping[int, RowAxis],
    local: Collection[Var],
    want: Any,
) -> None:
    """Follow gradients into a loop, or into a body that is computed twice."""
    body, wires = opened(*bodies(eqn)), wiring(eqn)
    carried = {out: body.invars[k] for k, out in wires.carried.items()}
    inside = {
        k: dataclasses.replace(row, axis=row.axis - (k in wires.stacks))
        for k, row in found.items()
        if row.axis or k not in wires.stacks
    }
    (within,) = local_inside(eqn, local)
    while inside:
        targets = {a: row for k, row in inside.items() if isinstance(a := body.outvars[k], Var)}
        inputs = {carried[k] for k in inside if k in carried}
        inner = scatter_flow(body.eqns, targets, within, body.outvars, inputs)
        paid = {k: row for k, row in inside.items() if _pays(inner, body, k, wires, carried.get(k))}
        if paid == inside:
            flow.loops[i] = inside
            break
        inside = paid
    for k, out in wires.carried.items():
        want(eqn.invars[k], inside.get(out))


def _pays(inner: ScatterFlow, body: Jaxpr, k: int, wires: Wiring, carried: Var | None) -> bool:
    """Return True if a body gives one of its outputs as slices with less that is whole at a time.

    Args:
      carried: input of the body, for an output that goes from turn to turn.
    """
    out = body.outvars[k]
    if not isinstance(out, Var) or out in body.invars:
        return False
    if k in wires.stacks:
        return True
    whole, loops = inner.ends_of(out, makers_of(body.eqns))
    return loops if carried is None else carried in inner.rows and 2 * whole <= int(out.aval.size)
