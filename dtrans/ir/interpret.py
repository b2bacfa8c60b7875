"""Drivers of dataflow analyses: one forward, one backward.

An analysis attaches a *fact* to each value, such as its sharding. The analysis is a tuple of pure
functions. `rule` computes the facts of one equation's outputs. `join` merges the facts that a value
has in several branches or iterations. `forward` and `backward` apply these functions to all
equations, also inside `scan`, `while`, `cond`, remat, calls and custom derivative rules. They
evaluate the body of a loop repeatedly, until a further iteration leaves the facts of the carried
values unchanged.

Facts form a lattice. `join(a, b)` is at or above `a` and `b`, and every chain of facts is finite,
so each of these iterations ends.

Passes that rewrite bodies call `enter` and `enter_backward`, which evaluate the bodies of one
equation. Properties of primitives are in `dtrans._jax.primitives`.
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
    body_indices,
    constants,
    has_bodies,
    opened,
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
    """Dataflow analysis from inputs to outputs, which computes a fact (e.g. a bool) for each value.

    Attributes:
      join: (fact, fact) -> fact of a value that has the first or the second fact.
      rule: (equation, facts of its operands) -> facts of its outputs. If it returns None, the
        driver enters the equation's bodies; outputs of an equation without bodies get the default.
      default: (type, value) -> fact of a literal or constant; the value is None if unknown.
      slice_fact: fact of a scanned array -> fact of the slice that one iteration reads.
      stack: fact of one iteration's output -> fact of the stacked outputs.
      fit: (result of `slice_fact`, type of the slice) -> the fact without entries that a value of
        this type cannot have.
      decide: (fact of a condition, fact of a value) -> new fact of the value. The condition selects
        the branch that computes the value, or the number of iterations.
      branch: fact of the index of a `cond` -> index of the branch; None if unknown.
    """

    join: Callable[[Fact, Fact], Fact]
    rule: Callable[[JaxprEqn, Sequence[Fact]], Sequence[Fact] | None]
    default: Callable[[Any, Any], Fact]
    slice_fact: Callable[[Fact], Fact] = _same
    stack: Callable[[Fact], Fact] = _same
    fit: Callable[[Fact, Any], Fact] = _of_any_type
    decide: Callable[[Fact, Fact], Fact] = _undecided
    branch: Callable[[Fact], int | None] = _any_branch


class BackwardAnalysis(NamedTuple, Generic[Fact]):
    """Dataflow analysis from outputs to inputs, which computes a fact (e.g. a bool) for each value.

    Attributes:
      join: (fact, fact) -> fact of a value that two equations read.
      rule: (equation, facts of its outputs) -> facts of its operands. If it returns None, the
        driver enters the equation's bodies; operands of an equation without bodies get the default.
        An equation is skipped if all its outputs have the default.
      default: fact of a value that nothing reads; the lowest fact.
      slice_fact: fact of the stacked outputs of a scan -> fact of one iteration's output.
      stack: fact of the slice that one iteration reads -> fact of the scanned array.
      decide: joined facts of the outputs -> fact of the condition, which selects the branch or the
        number of iterations.
    """

    join: Callable[[Fact, Fact], Fact]
    rule: Callable[[JaxprEqn, Sequence[Fact]], Sequence[Fact] | None]
    default: Fact
    slice_fact: Callable[[Fact], Fact] = _same
    stack: Callable[[Fact], Fact] = _same
    decide: Callable[[Fact], Fact] = _same


# -- one equation ----------------------------------------------------------------------------------


class Entered(NamedTuple, Generic[Fact, Result]):
    """Result of an analysis for a loop, branch or call: a fact for each operand and output.

    A fact is a property of a value, such as its sharding. Facts are joined over iterations and
    branches.

    Attributes:
      operands: fact of each operand; facts of carried operands are joined over the iterations.
      outs: fact of each output.
      bodies: index of a body in `bodies(eqn)` -> result of `run` for the body. Branches that are
        never taken are absent.
      decision: fact of the condition of a `while`, or of the index of a `cond`.
      body_outs: index of a body -> facts of its outputs, joined over iterations and branches; only
        `enter` sets it.
    """

    operands: list[Fact]
    outs: list[Fact]
    bodies: dict[int, Result]
    decision: Fact | None = None
    body_outs: Mapping[int, Sequence[Fact]] = MappingProxyType({})


# forward:  (index of a body, body, facts of its inputs) -> (result, facts of its outputs)
# backward: (index of a body, body, facts of its outputs) -> (result, facts of its inputs)
Run = Callable[[int, Any, list[Fact]], tuple[Result, Sequence[Fact]]]


def enter(
    analysis: ForwardAnalysis[Fact], eqn: JaxprEqn, ins: Sequence[Fact], run: Run[Fact, Result]
) -> Entered[Fact, Result]:
    """Run a forward analysis of the bodies of a loop, branch or call.

    The analysis finds a fact (such as a sharding) for each value. The body of a loop is analysed
    repeatedly, until the facts of the carried values stop changing.

    Args:
      analysis: functions that join and convert facts; its `rule` is not called here.
      eqn: the equation.
      ins: facts of its operands.
      run: analyzes one body. `Entered.bodies` has the result of the last call for each body.
    """
    indices, inner = body_indices(eqn), bodies(eqn)
    found: dict[int, Result] = {}
    decision: list[Fact] = []
    chosen = None
    if eqn.primitive.name == COND:
        decision = [ins[0]]
        chosen = analysis.branch(ins[0])
    numbers: Sequence[int] = range(len(inner))
    if chosen is not None:
        numbers = [min(max(chosen, 0), len(inner) - 1)]

    def turn(operands: Sequence[Fact]) -> list[Fact]:
        each: list[Sequence[Fact]] = []
        for k in numbers:
            found[k], facts = run(k, inner[k], values_at(operands, indices.ins[k]))
            if indices.outs[k] is None:
                decision[:] = facts
            else:
                each.append(facts)
        outs = _joined(analysis.join, each)
        if not decision or chosen is not None:
            return outs
        return [analysis.decide(decision[0], x) for x in outs]

    operands = list(ins)
    for i in indices.slices:
        operands[i] = analysis.fit(analysis.slice_fact(ins[i]), opened(inner[0]).invars[i].aval)
    operands, outs = _settle(analysis.join, operands, indices.carried, turn)
    for i, j in indices.carried.items():
        outs[j] = operands[i]
    ends = {k: decision if indices.outs[k] is None else list(outs) for k in found}
    operands = _stacked(analysis, operands, indices.slices)
    outs = _stacked(analysis, outs, indices.stacks)
    return Entered(operands, outs, found, decision[0] if decision else None, ends)


def enter_backward(
    analysis: BackwardAnalysis[Fact], eqn: JaxprEqn, outs: Sequence[Fact], run: Run[Fact, Result]
) -> Entered[Fact, Result]:
    """Run a backward analysis of the bodies of a loop, branch or call.

    The analysis finds a fact (such as a sharding) for each value. The body of a loop is analysed
    repeatedly, until the facts of the carried values stop changing.

    Args:
      analysis: functions that join and convert facts; its `rule` is not called here.
      eqn: the equation.
      outs: facts of its outputs.
      run: analyzes one body backward. `Entered.bodies` has the result of the last call.
    """
    indices, inner = body_indices(eqn), bodies(eqn)
    found: dict[int, Result] = {}
    decision: list[Fact] = []

    def turn(ends: Sequence[Fact]) -> list[Fact]:
        if eqn.primitive.name in (COND, WHILE):
            decision[:] = [analysis.decide(functools.reduce(analysis.join, ends))]
        operands: dict[int, Fact] = {}
        if eqn.primitive.name == COND:
            operands[0] = decision[0]
        for k, (read, body_outs) in enumerate(zip(indices.ins, indices.outs, strict=True)):
            out_facts = decision if body_outs is None else values_at(ends, body_outs)
            found[k], facts = run(k, inner[k], out_facts)
            for i, x in zip(read, facts, strict=True):
                if i in operands:
                    x = analysis.join(operands[i], x)
                operands[i] = x
        return values_at(operands, range(len(eqn.invars)))

    ends = list(outs)
    for j in indices.stacks:
        ends[j] = analysis.slice_fact(outs[j])
    ends, operands = _settle(analysis.join, ends, invert(indices.carried), turn)
    for i, j in indices.carried.items():
        operands[i] = ends[j]
    for j in indices.stacks:
        ends[j] = outs[j]
    operands = _stacked(analysis, operands, indices.slices)
    return Entered(operands, ends, found, decision[0] if decision else None)


def _settle(
    join: Callable[[Fact, Fact], Fact],
    start: list[Fact],
    carried: Mapping[int, int],
    turn: Callable[[Sequence[Fact]], list[Fact]],
) -> tuple[list[Fact], list[Fact]]:
    """Iterate until the facts of carried values stop changing.

    Args:
      join: joins two facts.
      start: facts before the first iteration.
      carried: for each carried value: index in `start` -> index in the results of `turn`.
      turn: analyzes one iteration.

    Returns:
      The facts before and after the last iteration.
    """
    while True:
        results = turn(start)
        joined = list(start)
        for i, j in carried.items():
            joined[i] = join(start[i], results[j])
        if joined == start:
            return start, results
        start = joined


def _stacked(
    analysis: ForwardAnalysis[Fact] | BackwardAnalysis[Fact],
    facts: Sequence[Fact],
    numbers: Sequence[int],
) -> list[Fact]:
    found = list(facts)
    for i in numbers:
        found[i] = analysis.stack(found[i])
    return found


def _joined(join: Callable[[Fact, Fact], Fact], each: Sequence[Sequence[Fact]]) -> list[Fact]:
    return [functools.reduce(join, facts) for facts in zip(*each, strict=True)]


# -- lists of equations ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Facts(Generic[Fact]):
    """Result of an analysis: a fact (such as a sharding) for each value of some equations.

    Attributes:
      values: fact of each variable that the analysis reached.
      default: returns the fact of any other value, such as a literal.
      entered: an `Entered` for each equation with bodies, by the equation's index. Its attribute
        `bodies` contains the `Facts` of each body, by index.
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
    """Run a forward analysis: find the fact (such as a sharding) of each computed value.

    Args:
      analysis: the analysis.
      eqns: equations in order.
      start: facts of variables that the equations read, but do not compute.
    """

    def of_free(atom: Atom) -> Fact:
        return analysis.default(atom.aval, atom.val if isinstance(atom, Literal) else None)

    def run(number: int, body: Any, ins: list[Fact]) -> tuple[Facts[Fact], list[Fact]]:
        inside = forward_jaxpr(analysis, body, ins)
        return inside, list(map(inside.of, opened(body).outvars))

    facts = Facts(dict(start), of_free)
    known = facts.values
    for i, eqn in enumerate(eqns):
        # `facts.of` is inlined here, because this loop runs for thousands of operands
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
    """Run a forward analysis of an open or closed jaxpr.

    Args:
      analysis: the analysis, which finds a fact (such as a sharding) for each value.
      jaxpr: the jaxpr.
      ins: the fact of each input.
    """
    inner = opened(jaxpr)
    start = dict(zip(inner.invars, ins, strict=True))
    for v, value in zip(inner.constvars, constants(jaxpr), strict=False):
        start[v] = analysis.default(v.aval, value)
    return forward(analysis, inner.eqns, start)


def backward(
    analysis: BackwardAnalysis[Fact], eqns: Sequence[JaxprEqn], end: Iterable[tuple[Atom, Fact]]
) -> Facts[Fact]:
    """Run a backward analysis: find the fact (such as a sharding) of each value.

    Args:
      analysis: the analysis.
      eqns: equations in order.
      end: (value, fact) for each value that is an output, or that is read outside of `eqns`.
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
