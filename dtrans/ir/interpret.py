"""Drivers of dataflow analyses: one forward, one backward.

An analysis attaches a *fact* to each value, such as the dimension that it counts, or its sharding.
It is a record of pure functions. Its `rule` describes one equation; its `join` returns the fact of
a value that comes from several branches or iterations. The drivers enter the bodies of `scan`,
`while`, `cond`, remat, custom rules and calls. They evaluate the body of a loop until the facts of
carried values *settle*: each fact is then above the facts of all iterations.

Invariant: facts only go up. `join(a, b)` is above both, and no fact has an infinite chain above it,
so every loop settles.

`enter` opens a single equation, for passes that do more in a body than attach facts. Facts about
primitives are in `dtrans._jax.primitives`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from dtrans._jax import (
    COND,
    WHILE,
    Atom,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    constants,
    has_bodies,
    opened,
    wiring,
)
from dtrans.ir.selection import invert, values_at


Fact = TypeVar("Fact")
Result = TypeVar("Result")


def _same(fact: Any) -> Any:
    return fact


def _of_any_type(fact: Any, aval: Any) -> Any:
    return fact


def _undecided(decision: Any, fact: Any) -> Any:
    return fact


def _any_branch(decision: Any) -> int | None:
    return None


# -- analyses --------------------------------------------------------------------------------------


class ForwardAnalysis(NamedTuple, Generic[Fact]):
    """Analysis from inputs to outputs.

    Attributes:
      join: fact of a value that has one of two facts.
      rule: facts of an equation's outputs, from those of its operands. None to enter its bodies;
        without bodies, its outputs get the default.
      default: fact of a literal or constant, from its type and value (None if unknown).
      turn: fact of one iteration's slice, from that of the stack.
      stack: fact of the stack, from that of one iteration's output.
      fit: part of a fact of `turn` that a slice with this type can have.
      decide: fact of a value, from the fact of the condition that selects its branch or number of
        iterations.
      branch: index, which `cond` clamps, from its fact; None if unknown.
    """

    join: Callable[[Fact, Fact], Fact]
    rule: Callable[[JaxprEqn, Sequence[Fact]], Sequence[Fact] | None]
    default: Callable[[Any, Any], Fact]
    turn: Callable[[Fact], Fact] = _same
    stack: Callable[[Fact], Fact] = _same
    fit: Callable[[Fact, Any], Fact] = _of_any_type
    decide: Callable[[Fact, Fact], Fact] = _undecided
    branch: Callable[[Fact], int | None] = _any_branch


class BackwardAnalysis(NamedTuple, Generic[Fact]):
    """Analysis from outputs to inputs.

    Attributes:
      join: fact of a value with two readers.
      rule: facts of an equation's operands, from those of its outputs. None to enter its bodies;
        without bodies, its operands get the default. Equations whose outputs all have the default
        are skipped.
      default: fact of a value without readers; it is below all others.
      turn: fact of one iteration's output, from that of the stack.
      stack: fact of the stack, from that of one iteration's slice.
      decide: fact of the condition that decides on branches or iterations, from the joined facts of
        outputs.
    """

    join: Callable[[Fact, Fact], Fact]
    rule: Callable[[JaxprEqn, Sequence[Fact]], Sequence[Fact] | None]
    default: Fact
    turn: Callable[[Fact], Fact] = _same
    stack: Callable[[Fact], Fact] = _same
    decide: Callable[[Fact], Fact] = _same


# -- one equation ----------------------------------------------------------------------------------


class Entered(NamedTuple, Generic[Fact, Result]):
    """Facts of an equation with bodies, for all iterations and branches together.

    Attributes:
      operands: one for each operand; those of carried operands are joined over iterations.
      outs: one for each output.
      bodies: result of each body, by its position in `bodies(eqn)`. Branches that are never taken
        are absent.
      decision: fact of the condition of a `while`, or of the index of a `cond`.
      ends: forward: facts of each body's outputs. Carried ones and outputs of branches have the
        facts that they have outside.
    """

    operands: list[Fact]
    outs: list[Fact]
    bodies: dict[int, Result]
    decision: Fact | None = None
    ends: Mapping[int, Sequence[Fact]] = MappingProxyType({})


# (position of a body, body, facts of its inputs) -> (result, facts of its outputs); inputs and
# outputs are exchanged backward
Run = Callable[[int, Any, list[Fact]], tuple[Result, Sequence[Fact]]]


def enter(
    analysis: ForwardAnalysis[Fact], eqn: JaxprEqn, ins: Sequence[Fact], run: Run[Fact, Result]
) -> Entered[Fact, Result]:
    """Enter the bodies of an equation, from the facts of its operands.

    Args:
      analysis: joins facts; `run` applies its rule.
      eqn: the equation.
      ins: facts of its operands.
      run: evaluates a body. It is called again until carried facts settle; the last result stays.
    """
    wires, inner = wiring(eqn), bodies(eqn)
    found: dict[int, Result] = {}
    decision = [ins[0]] if eqn.primitive.name == COND else []
    chosen = analysis.branch(ins[0]) if decision else None
    numbers = range(len(inner)) if chosen is None else [min(max(chosen, 0), len(inner) - 1)]

    def turn(operands: Sequence[Fact]) -> list[Fact]:
        each: list[Sequence[Fact]] = []
        for k in numbers:
            found[k], facts = run(k, inner[k], values_at(operands, wires.ins[k]))
            if wires.outs[k] is None:
                decision[:] = facts
            else:
                each.append(facts)
        outs = _joined(analysis.join, each)
        return (
            [analysis.decide(decision[0], x) for x in outs] if decision and chosen is None else outs
        )

    operands = list(ins)
    for i in wires.slices:
        operands[i] = analysis.fit(analysis.turn(ins[i]), opened(inner[0]).invars[i].aval)
    operands, outs = _settle(analysis.join, operands, wires.carried, turn)
    for i, j in wires.carried.items():
        outs[j] = operands[i]
    ends = {k: decision if wires.outs[k] is None else list(outs) for k in found}
    operands, outs = (
        _stacked(analysis, operands, wires.slices),
        _stacked(analysis, outs, wires.stacks),
    )
    return Entered(operands, outs, found, decision[0] if decision else None, ends)


def enter_backward(
    analysis: BackwardAnalysis[Fact], eqn: JaxprEqn, outs: Sequence[Fact], run: Run[Fact, Result]
) -> Entered[Fact, Result]:
    """Enter the bodies of an equation, from the facts of its outputs.

    Args:
      analysis: joins facts; `run` applies its rule.
      eqn: the equation.
      outs: facts of its outputs.
      run: evaluates a body backward: from facts of its outputs to those of its inputs.
    """
    wires, inner = wiring(eqn), bodies(eqn)
    found: dict[int, Result] = {}
    decision: list[Fact] = []

    def turn(ends: Sequence[Fact]) -> list[Fact]:
        if eqn.primitive.name in (COND, WHILE):
            decision[:] = [analysis.decide(functools.reduce(analysis.join, ends))]
        operands = dict(zip([0], decision, strict=False)) if eqn.primitive.name == COND else {}
        for k, (read, body_outs) in enumerate(zip(wires.ins, wires.outs, strict=True)):
            found[k], facts = run(
                k, inner[k], decision if body_outs is None else values_at(ends, body_outs)
            )
            for i, x in zip(read, facts, strict=True):
                operands[i] = analysis.join(operands[i], x) if i in operands else x
        return values_at(operands, range(len(eqn.invars)))

    ends = [analysis.turn(x) if j in wires.stacks else x for j, x in enumerate(outs)]
    ends, operands = _settle(analysis.join, ends, invert(wires.carried), turn)
    for i, j in wires.carried.items():
        operands[i] = ends[j]
    outs = [
        x if j in wires.stacks else end for j, (x, end) in enumerate(zip(outs, ends, strict=True))
    ]
    return Entered(
        _stacked(analysis, operands, wires.slices), outs, found, decision[0] if decision else None
    )


def _settle(
    join: Callable[[Fact, Fact], Fact],
    start: list[Fact],
    carried: Mapping[int, int],
    turn: Callable[[Sequence[Fact]], list[Fact]],
) -> tuple[list[Fact], list[Fact]]:
    """Return facts that an iteration preserves, and the results of that iteration.

    Args:
      join: joins two facts.
      start: facts before the first iteration.
      carried: position in these to that in the results, for carried values.
      turn: evaluates one iteration.
    """
    while True:
        results = turn(start)
        joined = [join(x, results[carried[i]]) if i in carried else x for i, x in enumerate(start)]
        if joined == start:
            return start, results
        start = joined


def _stacked(
    analysis: ForwardAnalysis[Fact] | BackwardAnalysis[Fact],
    facts: Sequence[Fact],
    numbers: Sequence[int],
) -> list[Fact]:
    return [analysis.stack(x) if i in numbers else x for i, x in enumerate(facts)]


def _joined(join: Callable[[Fact, Fact], Fact], each: Sequence[Sequence[Fact]]) -> list[Fact]:
    return [functools.reduce(join, facts) for facts in zip(*each, strict=True)]


# -- lists of equations ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Facts(Generic[Fact]):
    """Facts that an analysis attached to the values of some equations.

    Attributes:
      values: one for each input and each output of an equation; backward, for each value with one.
      entered: by position, the facts of an equation with bodies, and those inside.
      default: fact of a literal, and of a value without a fact.
    """

    values: dict[Var, Fact]
    default: Callable[[Atom], Fact]
    entered: dict[int, Entered[Fact, Facts[Fact]]] = dataclasses.field(default_factory=dict)

    def of(self, atom: Atom) -> Fact:
        """Return the fact of a value."""
        if isinstance(atom, Literal) or atom not in self.values:
            return self.default(atom)
        return self.values[atom]


def forward(
    analysis: ForwardAnalysis[Fact], eqns: Sequence[JaxprEqn], start: Mapping[Var, Fact]
) -> Facts[Fact]:
    """Attach facts to the values of equations, from the first to the last.

    Args:
      analysis: the analysis.
      eqns: equations in order.
      start: facts of values that the equations read, but do not compute.
    """

    def of_free(atom: Atom) -> Fact:
        return analysis.default(atom.aval, atom.val if isinstance(atom, Literal) else None)

    def run(number: int, body: Any, ins: list[Fact]) -> tuple[Facts[Fact], list[Fact]]:
        inside = forward_jaxpr(analysis, body, ins)
        return inside, list(map(inside.of, opened(body).outvars))

    facts = Facts(dict(start), of_free)
    known = facts.values
    for i, eqn in enumerate(eqns):
        # `facts.of` inlined: planning follows thousands of operands
        ins = [
            known[a] if not isinstance(a, Literal) and a in known else of_free(a)
            for a in eqn.invars
        ]
        outs = analysis.rule(eqn, ins)
        if outs is None and has_bodies(eqn):
            facts.entered[i] = enter(analysis, eqn, ins, run)
            outs = facts.entered[i].outs
        elif outs is None:
            outs = [analysis.default(v.aval, None) for v in eqn.outvars]
        facts.values.update(zip(eqn.outvars, outs, strict=True))
    return facts


def forward_jaxpr(analysis: ForwardAnalysis[Fact], jaxpr: Any, ins: Sequence[Fact]) -> Facts[Fact]:
    """Attach facts to the values of a jaxpr, open or closed, from those of its inputs."""
    inner = opened(jaxpr)
    start = dict(zip(inner.invars, ins, strict=True))
    for v, value in zip(inner.constvars, constants(jaxpr), strict=False):
        start[v] = analysis.default(v.aval, value)
    return forward(analysis, inner.eqns, start)


def backward(
    analysis: BackwardAnalysis[Fact], eqns: Sequence[JaxprEqn], end: Iterable[tuple[Atom, Fact]]
) -> Facts[Fact]:
    """Attach facts to the values of equations, from the last to the first.

    Args:
      analysis: the analysis.
      eqns: equations in order.
      end: values that others read, with the facts of these readers.
    """
    facts = Facts(dict[Var, Fact](), lambda atom: analysis.default)

    def give(atoms: Iterable[tuple[Atom, Fact]]) -> None:
        for a, x in atoms:
            if not isinstance(a, Literal):
                facts.values[a] = analysis.join(facts.of(a), x)

    def run(number: int, body: Any, outs: list[Fact]) -> tuple[Facts[Fact], list[Fact]]:
        inner = opened(body)
        inside = backward(analysis, inner.eqns, zip(inner.outvars, outs, strict=True))
        return inside, list(map(inside.of, inner.invars))

    give(end)
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        outs = list(map(facts.of, eqn.outvars))
        if all(x == analysis.default for x in outs):
            continue
        ins = analysis.rule(eqn, outs)
        if ins is None and has_bodies(eqn):
            facts.entered[i] = enter_backward(analysis, eqn, outs, run)
            ins = facts.entered[i].operands
        if ins is not None:
            give(zip(eqn.invars, ins, strict=True))
    return facts
