"""Values of a step that can be computed as slices of its leaves, and leaves that it reads whole.

A leaf is cut along one dimension (`RowAxis`). What is made of leaves alone, row by row, has slices too: a stack in
another type, some layers of it, a layer that is picked by a number. So a loop can be given slices, however it comes to
its layers, and a layer is whole only where something mixes its rows:

    w: (16, D, D), cut along its second dimension
    stack = convert w          slices: the loop takes these apart
    layer = dynamic_slice w i  a *part*: gathered itself, where it is read whole, and never w
    sum(w ** 2)                of slices, and an all_reduce
    dot h layer                reads all of `layer`

Numbers of the batch differ from rank to rank (they are *local*); slices are made of what is the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dtrans._jax import (
    COND,
    REMAT,
    SCAN,
    Atom,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    bodies,
    closed,
    constants,
    equations,
    facts_of,
    has_bodies,
    is_rearrangement,
    jaxprs_in_params,
    opened,
    scan_counts,
    with_bodies,
)
from dtrans.ir.inline import inline_calls
from dtrans.ir.interpret import ForwardAnalysis, forward
from dtrans.ops import trainer_index_p
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.rows.rules import Step, step_of


GIVEN_SLICES = frozenset({SCAN, COND, *REMAT})


@dataclasses.dataclass(eq=False)
class SliceFlow:
    """What one pass over equations found.

    Attributes:
      eqns: that it went over.
      rows: the rows of each value that can be had as slices.
      steps: by position, how an equation is carried out on slices.
      parts: values that are gathered themselves, not what they are made of.
      roots: leaves and parts that a value is made of, by its variable.
      whole: leaves and parts that something reads whole.
      passed: by position of a loop, the operands that it is given as slices, and their rows inside.
      inside: by position of such a loop, the same of its bodies.
      reads: by position, what an equation reads whole of what has slices.
      reductions: positions of equations that reduce slices of leaves that nothing else needs whole.
      local: values that differ from rank to rank.
    """

    eqns: Sequence[JaxprEqn]
    rows: dict[Var, RowAxis]
    local: Collection[Var]
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)
    parts: set[Var] = dataclasses.field(default_factory=set)
    roots: dict[Var, frozenset[Var]] = dataclasses.field(default_factory=dict)
    whole: set[Var] = dataclasses.field(default_factory=set)
    passed: dict[int, dict[int, RowAxis]] = dataclasses.field(default_factory=dict)
    inside: dict[int, tuple[SliceFlow, ...]] = dataclasses.field(default_factory=dict)
    reads: dict[int, list[Atom]] = dataclasses.field(default_factory=dict)
    reductions: set[int] = dataclasses.field(default_factory=set)

    def row(self, atom: Atom) -> RowAxis | None:
        """The rows of a value, if it has slices."""
        return self.rows.get(atom) if isinstance(atom, Var) else None

    def is_same(self, atom: Atom) -> bool:
        """Whether a value is the same on all ranks, and whole."""
        return isinstance(atom, Literal) or (atom not in self.local and atom not in self.rows)

    def read_whole(self, atoms: Iterable[Atom]) -> None:
        """Note that values are read whole."""
        self.whole |= self.roots_of(atoms)

    def roots_of(self, atoms: Iterable[Atom]) -> frozenset[Var]:
        """The leaves and parts that values are made of."""
        return frozenset().union(*(self.roots.get(a, ()) for a in atoms if isinstance(a, Var)))

    def largest(self) -> dict[str, int]:
        """For each leaf, the elements of the largest piece of it that is whole at a time."""
        found: dict[str, int] = {}
        for v in self.whole:
            leaf = self.rows[v].leaf
            found[leaf] = max(found.get(leaf, 0), int(v.aval.size))
        for flow in (f for flows in self.inside.values() for f in flows):
            for leaf, size in flow.largest().items():
                found[leaf] = max(found.get(leaf, 0), size)
        return found


def local_values(eqns: Sequence[JaxprEqn], seeds: Iterable[Var], completed: Collection[Primitive] = ()) -> set[Var]:
    """Return the values that differ from rank to rank, where `seeds` do.

    Args:
      completed: collectives whose results are the same on every rank; by default nothing is known of them.
    """
    facts = forward(_differing(completed), eqns, dict.fromkeys(seeds, True))
    return {v for v, differs in facts.values.items() if differs}


def local_inside(eqn: JaxprEqn, local: Collection[Var]) -> list[set[Var]]:
    """Return the values that differ from rank to rank in each body of an equation.

    Args:
      local: values outside of it that differ.
    """
    start = {a: True for a in eqn.invars if isinstance(a, Var) and a in local}
    (entered,) = forward(_differing(()), [eqn], start).entered.values()
    return [{v for v, differs in facts.values.items() if differs} for facts in entered.bodies.values()]


def _differing(completed: Collection[Primitive]) -> ForwardAnalysis[bool]:
    """Return the analysis of values that differ from rank to rank."""

    def rule(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
        if eqn.primitive in completed:
            return [False] * len(eqn.outvars)
        if has_bodies(eqn):
            return None
        return [eqn.primitive is trainer_index_p or any(ins) or _asks_rank(eqn)] * len(eqn.outvars)

    return ForwardAnalysis(operator.or_, rule, default=lambda aval, value: False, decide=operator.or_)


def _asks_rank(eqn: JaxprEqn) -> bool:
    """Return True if a nested jaxpr asks for the rank, as where rows of random numbers are drawn."""
    return any(e.primitive is trainer_index_p for body in jaxprs_in_params(eqn.params) for e in equations(body))


def flat_bodies(eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    """Equations, calls in the bodies of their loops and branches inlined."""
    return [_flat(e) if e.primitive.name in GIVEN_SLICES else e for e in eqns]


def _flat(eqn: JaxprEqn) -> JaxprEqn:
    found: list[Any] = []
    for body in bodies(eqn):
        inner = opened(body)
        plain = inline_calls(closed(inner.constvars, constants(body), inner.invars, inner.outvars, inner.eqns, inner))
        flat = opened(plain)
        new = closed(flat.constvars, constants(plain), flat.invars, flat.outvars, flat_bodies(flat.eqns), flat)
        if eqn.primitive.name in REMAT and constants(new):  # its body can have none
            return eqn
        found.append(opened(new) if eqn.primitive.name in REMAT else new)
    return eqn.replace(params={**eqn.params, **with_bodies(eqn, found)})


def slice_flow(
    eqns: Sequence[JaxprEqn],
    rows: Mapping[Var, RowAxis],
    local: Collection[Var],
    ends: Iterable[Atom] = (),
    elsewhere: Mapping[int, Collection[int]] | None = None,
    *,
    in_loops: bool = True,
) -> SliceFlow:
    """Follow slices through equations.

    Args:
      rows: of what is there as slices.
      local: values that differ from rank to rank.
      ends: values that are wanted whole.
      elsewhere: by position, the operands that an equation does not read whole, whatever it is.
      in_loops: whether loops are given slices; else what they read is whole before them.
    """
    flow = SliceFlow(eqns, dict(rows), local, roots={v: frozenset([v]) for v in rows})
    skipped = elsewhere or {}
    for i, eqn in enumerate(eqns):
        ins = [flow.row(a) for a in eqn.invars]
        if not any(ins):
            continue
        if eqn.primitive.name in GIVEN_SLICES:
            read: Collection[int] = _into(flow, i, eqn) if in_loops else range(len(eqn.invars))
        else:
            read = _through(flow, i, eqn, ins)
        flow.reads[i] = [a for k, a in enumerate(eqn.invars) if k in read and k not in skipped.get(i, ())]
        flow.read_whole(flow.reads[i])
    flow.read_whole(ends)
    flow.reductions = {i for i, step in flow.steps.items() if step.reduce}
    while needed := {i for i in flow.reductions if flow.roots_of(eqns[i].invars) & flow.whole}:
        flow.reductions -= needed
        for i in needed:
            flow.reads[i] = list(eqns[i].invars)
            flow.read_whole(flow.reads[i])
    return flow


def _through(flow: SliceFlow, i: int, eqn: JaxprEqn, ins: Sequence[RowAxis | None]) -> Collection[int]:
    """One equation; the operands that it reads whole."""
    mixed = [a for a, row in zip(eqn.invars, ins, strict=True) if row is None and not flow.is_same(a)]
    step = None if mixed or eqn.effects else step_of(eqn, [row or SHARED for row in ins])
    rounded = step is not None and step.reduce and eqn.outvars[0].aval.dtype.itemsize == 2  # parts would be
    if step is None or len(eqn.outvars) != 1 or rounded:
        return range(len(eqn.invars))
    flow.steps[i] = step
    (out,) = eqn.outvars
    row = step.outs[0]
    if not isinstance(row, RowAxis):
        return ()
    flow.rows[out] = row
    first = next(a for a, x in zip(eqn.invars, ins, strict=True) if x is not None)
    picks = eqn.primitive.name == "slice" and any(
        n < m for n, m in zip(out.aval.shape[: row.axis], first.aval.shape, strict=False)
    )
    if picks or not is_cheap(eqn):
        flow.parts.add(out)
        flow.roots[out] = frozenset([out])
    else:
        flow.roots[out] = flow.roots_of(eqn.invars)
    return ()


def is_cheap(eqn: JaxprEqn) -> bool:
    """Return True if an equation costs so little that ranks may carry it out twice, and send its operand."""
    return facts_of(eqn).elementwise or is_rearrangement(eqn)


def operands_inside(eqn: JaxprEqn, k: int) -> tuple[int, int]:
    """Which input of the bodies operand `k` of a loop or branch is, and how many dimensions less that has."""
    if eqn.primitive.name == COND:
        return k - 1, 0
    taken = eqn.primitive.name == SCAN and k >= sum(scan_counts(eqn))
    return k, int(taken)


def _into(flow: SliceFlow, i: int, eqn: JaxprEqn) -> Collection[int]:
    """A loop or a branch: which operands it is given as slices; those that it reads whole."""
    inner = [opened(b) for b in bodies(eqn)]
    if eqn.primitive.name == COND and not flow.is_same(eqn.invars[0]):  # ranks are in different branches
        return range(len(eqn.invars))
    consts, carried = scan_counts(eqn) if eqn.primitive.name == SCAN else (len(eqn.invars), 0)
    passed: dict[int, RowAxis] = {}
    for k, a in enumerate(eqn.invars):
        row = flow.row(a)
        at, less = operands_inside(eqn, k)
        if row is None or at < 0 or consts <= k < consts + carried or row.axis < less:
            continue
        passed[k] = dataclasses.replace(row, axis=row.axis - less)
    taken_apart = {k for k in passed if operands_inside(eqn, k)[1]}
    local = local_inside(eqn, flow.local) if passed else []
    while passed:
        flows = tuple(_body_flow(eqn, b, of_body, passed) for b, of_body in zip(inner, local, strict=True))
        back = {k for k in passed if k not in taken_apart
                and any(_better_whole(eqn, k, b, f) for b, f in zip(inner, flows, strict=True))}  # fmt: skip
        if not back:
            break
        passed = {k: row for k, row in passed.items() if k not in back}
    if passed:
        flow.passed[i], flow.inside[i] = passed, flows
        for k, v in enumerate(eqn.outvars):
            if k < carried:
                continue
            found = {f.row(b.outvars[k]) for b, f in zip(inner, flows, strict=True)}
            row = found.pop() if len(found) == 1 else None
            if row is not None:
                flow.rows[v] = dataclasses.replace(row, axis=row.axis + (eqn.primitive.name == SCAN))
                flow.parts.add(v)
                flow.roots[v] = frozenset([v])
    return [k for k in range(len(eqn.invars)) if k not in passed]


def _better_whole(eqn: JaxprEqn, k: int, body: Any, inside: SliceFlow) -> bool:
    """Whether an operand is better gathered before a loop or a branch: it is read whole, and not handed on."""
    v = body.invars[operands_inside(eqn, k)[0]]
    hands_on = eqn.primitive.name == COND and v in inside.roots_of(body.outvars)
    return v in inside.whole and not hands_on


def _body_flow(eqn: JaxprEqn, body: Any, local: Collection[Var], passed: Mapping[int, RowAxis]) -> SliceFlow:
    """Follow slices through a body.

    Args:
      local: its values that differ from rank to rank.
      passed: the rows of operands that it is passed as slices.
    """
    rows = {body.invars[operands_inside(eqn, k)[0]]: row for k, row in passed.items()}
    carried = scan_counts(eqn)[1] if eqn.primitive.name == SCAN else 0
    return slice_flow(body.eqns, rows, local, body.outvars[:carried])
