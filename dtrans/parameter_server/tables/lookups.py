"""Search for the leaves that a step reads by rows only.

A leaf is a *table* of a step if forward and backward only pick single rows of it by number
(`emb[ids]`, `jnp.take`, an embedding layer). No row of a table may enter these numbers. The
gradient must be zeros to which rows are added by number.

Row analysis (`dtrans.rows`) finds tables. An operation on all rows alike (a cast, a factor) keeps
the rows. A pick of rows yields a value without rows of the table, and a scatter-add keeps them. Any
other operation, such as a matrix product with the leaf, binds the leaf and is the reason why it is
no table.

The gradient begins with zeros of the leaf's shape that no equation connects with the leaf: a
backward search from the gradient finds them.

Rows may be picked in loops, in branches, and in the recomputation of `jax.checkpoint`. Their
numbers are needed before the pick. Those of a `scan` are a stack: an input, an output, or the
output of a `scan` that computes the numbers alone. Those of a `cond` are the numbers of all
branches. A `while` is refused, since its number of iterations is unknown.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    closed,
    closed_with,
    facts_of,
    has_bodies,
    line_of,
    live_part,
    opened,
    rebuilt,
    scan_length,
    wiring,
)
from dtrans.ir.dataflow import backward_slice, free_variables
from dtrans.ir.display import short_type
from dtrans.ir.interpret import BackwardAnalysis, ForwardAnalysis, backward, forward
from dtrans.rows.flow import Flow, FlowPass
from dtrans.rows.layout import SHARED, Colocated, Layout, RowAxis
from dtrans.rows.normalize import inline_inside
from dtrans.rows.rules import Step
from dtrans.step.cut import Cut
from dtrans.step.forward_backward import half_equations


_WITH_BODIES = frozenset({SCAN, COND, WHILE, *REMAT})


@dataclasses.dataclass(frozen=True)
class RowPick(Step):
    """An equation that reads rows, or adds to rows, by number.

    Attributes:
      numbers: the operand that has the numbers.
      component: which entry along its last dimension is the number of a row; None where it is a
        number itself.
    """

    numbers: int = 1
    component: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TableLookups:
    """Lookups of a table in a step.

    Attributes:
      leaf: its name.
      rows: the number of its rows.
      ids: the values that contain row numbers, each with the component that does.
      size: the most rows that a step can look up.
    """

    leaf: str
    rows: int
    ids: tuple[tuple[Atom, int | None], ...]
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """The tables of a step.

    Attributes:
      tables: name to lookups.
      refused: leaves whose rows are picked and that are not tables, with the reason.
      eqns: forward and backward.
      plain: the same, with the calls in bodies inlined.
      flow: the effect of each of these equations on rows of tables.
      numbering: further equations, which compute the row numbers that loops and branches pick.
    """

    tables: Mapping[str, TableLookups]
    refused: Mapping[str, str]
    eqns: Sequence[JaxprEqn]
    plain: Sequence[JaxprEqn]
    flow: Flow
    numbering: Sequence[JaxprEqn]


@dataclasses.dataclass(frozen=True, eq=False)
class _Lookup:
    """Pick of rows, in a step or in the body of one of its equations.

    Attributes:
      eqn: the equation that picks.
      leaf: the table.
      numbers: the row numbers, as a value outside of all loops and branches.
      component: as in `RowPick`.
    """

    eqn: JaxprEqn
    leaf: str
    numbers: Atom
    component: int | None


@dataclasses.dataclass(eq=False)
class _Zeros:
    """Zeros to which the gradients of tables are added.

    Attributes:
      of: zeros of a leaf's shape, also in bodies, with the leaf's layout.
      inside: the equations, by id, whose bodies contain such zeros.
    """

    of: dict[Var, Layout] = dataclasses.field(default_factory=dict)
    inside: set[int] = dataclasses.field(default_factory=set)


class _LookupPass(FlowPass):
    """One pass forward that knows what picks rows; in loops, branches and what is computed again
    too.

    Args:
      zeros: what gradients of tables begin with.
      within: as in `FlowPass`.
    """

    several = True

    def __init__(self, zeros: _Zeros, within: JaxprEqn | None = None) -> None:
        super().__init__((), within=within)
        self.zeros = zeros

    def over(self, eqns: Iterable[JaxprEqn], start: Mapping[Var, Layout]) -> Flow:
        return super().over(eqns, {**self.zeros.of, **start})

    def _begins(self, eqn: JaxprEqn) -> bool:
        return id(eqn) in self.zeros.inside

    def _inside(self, eqn: JaxprEqn) -> _LookupPass:
        return _LookupPass(self.zeros, self.within or eqn)

    def _step(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        name = eqn.primitive.name
        rule = _PICKS.get(name)
        if rule is not None and isinstance(ins[0], RowAxis) and all(x is SHARED for x in ins[1:]):
            pick = rule(eqn, ins[0])
            if pick is not None:
                return pick
        if name in REMAT and all(x is SHARED or isinstance(x, RowAxis) for x in ins):
            return self._control(flow, eqn, ins)
        return super()._step(flow, eqn, ins)


def find_lookups(step: Cut, leaves: Iterable[str] | None = None) -> Lookups:
    """Find the tables of a step among some leaves, by default among all whose rows are picked.

    Args:
      step: the step, with its calls inlined.
    """
    half = half_equations(step, step.results)[0]
    eqns = [inline_inside(e) for e in half]
    vars_of = step.program.invars
    chosen = (
        [n for n in step.optimized if _is_picked(eqns, vars_of[n])]
        if leaves is None
        else list(leaves)
    )
    refused: dict[str, str] = {}
    while True:
        start: dict[Var, Layout] = {vars_of[n]: RowAxis(n, 0) for n in chosen}
        zeros = _Zeros()
        for n in chosen:
            _find_zeros(eqns, step.gradients.get(n), vars_of[n].aval.shape, RowAxis(n, 0), zeros)
        flow = _LookupPass(zeros).over(eqns, start)
        picks, numbering = _lookups_in(eqns, flow)
        found = {n: _refusal(step, eqns, flow, n, picks) for n in chosen}
        found |= _refused_numbers(
            [*eqns, *numbering], picks, {vars_of[n] for n in chosen}, step.program.jaxpr
        )
        refused |= {n: why for n, why in found.items() if why}
        if not any(found.values()):
            break
        chosen = [n for n in chosen if not found[n]]
    rows = {n: step.program.inputs[n].shape[0] for n in chosen}
    return Lookups(
        {n: _table(n, rows[n], picks) for n in chosen}, refused, half, eqns, flow, numbering
    )


def numbers_first(eqns: Sequence[JaxprEqn], numbers: Iterable[Atom], like: Any) -> list[JaxprEqn]:
    """Return the equations that compute row numbers, without other outputs of the loops among them.

    Args:
      eqns: the equations in order.
      numbers: the wanted values.
      like: the jaxpr that contains the equations.
    """
    wanted = [a for a in dict.fromkeys(numbers) if isinstance(a, Var)]
    kept = [eqns[i] for i in backward_slice(eqns, wanted)[0]]
    if not any(e.primitive.name in _WITH_BODIES for e in kept):
        return kept
    made = {v for e in kept for v in e.outvars}
    free = free_variables(kept)
    whole = closed((), (), free, [a for a in wanted if a in made], kept, like)
    live, _ = live_part(opened(whole), [True] * len(opened(whole).outvars), [False] * len(free))
    return list(live.eqns)


def _is_picked(eqns: Sequence[JaxprEqn], var: Var) -> bool:
    """Return True if rows of a value, or of a row-wise function of it, are picked."""
    picks: list[JaxprEqn] = []

    def rule(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
        if has_bodies(eqn):
            return None
        read = [a.aval.shape for a, has_rows in zip(eqn.invars, ins, strict=True) if has_rows]
        if read and ins[0] and eqn.primitive.name in ("gather", "dynamic_slice"):
            picks.append(eqn)
        keeps = facts_of(eqn).elementwise
        return [keeps and v.aval.shape in read for v in eqn.outvars]

    forward(
        ForwardAnalysis[bool](operator.or_, rule, lambda aval, value: False),
        eqns,
        {var: bool(var.aval.ndim)},
    )
    return bool(picks)


def _find_zeros(
    eqns: Sequence[JaxprEqn],
    gradient: Atom | None,
    shape: tuple[int, ...],
    row: RowAxis,
    found: _Zeros,
) -> None:
    """Find the arrays of one number that a gradient of some shape is accumulated into."""

    def rule(eqn: JaxprEqn, outs: Sequence[bool]) -> list[bool] | None:
        name = eqn.primitive.name
        enters = [v for v, x in zip(eqn.outvars, outs, strict=True) if x and v.aval.shape == shape]
        if enters and name in _WITH_BODIES and name != WHILE:
            found.inside.add(id(eqn))
            return None
        if name == "broadcast_in_dim":
            found.of.update({v: found.of.get(v, row) for v in enters})
        adds = name in ("scatter-add", "dynamic_update_slice")
        follows = bool(enters) and (adds or facts_of(eqn).elementwise)
        return [follows and (k == 0 or not adds) for k in range(len(eqn.invars))]

    if gradient is not None:
        backward(
            BackwardAnalysis[bool](operator.or_, rule, default=False), eqns, [(gradient, True)]
        )


# -- which rows ------------------------------------------------------------------------------------


def _lookups_in(eqns: Sequence[JaxprEqn], flow: Flow) -> tuple[list[_Lookup], list[JaxprEqn]]:
    """Find all picks of rows, and equations outside of bodies that compute their numbers."""
    found: list[_Lookup] = []
    extra: list[JaxprEqn] = []
    made_by: dict[Any, Sequence[Var]] = {}  # the numbers of forward are those of backward
    for i, done in flow.steps.items():
        eqn = eqns[i]
        if isinstance(done, RowPick):
            row = done.operands[0]
            assert row is not None
            found.append(_Lookup(eqn, row.leaf, eqn.invars[done.numbers], done.component))
        elif eqn.primitive.name == SCAN:
            inside, made = (
                _in_scan(eqn, bodies(eqn)[0], done.bodies[0], made_by) if done.bodies else ([], [])
            )
            found += inside
            extra += made
        elif done.bodies and eqn.primitive.name != WHILE:
            for e in eqns[:i] if not made_by else ():
                if all(not jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in e.outvars):
                    made_by.setdefault(_same(e, e.invars), e.outvars)
            for body, read, inner in zip(
                map(opened, bodies(eqn)), wiring(eqn).ins, done.bodies, strict=True
            ):
                env: dict[Var, Atom] = dict(
                    zip(body.invars, [eqn.invars[i] for i in read], strict=True)
                )
                inside, made = _lookups_in(body.eqns, inner)
                wanted = backward_slice([*body.eqns, *made], [x.numbers for x in inside])[0]
                for j in wanted:  # a row that another branch would pick is looked up too
                    extra += _outside([*body.eqns, *made][j], env, made_by)
                found += [dataclasses.replace(x, numbers=_outer(x.numbers, env)) for x in inside]
    return found, extra


def _in_scan(
    eqn: JaxprEqn, jaxpr: Any, flow: Flow, made_by: dict[Any, Sequence[Var]]
) -> tuple[list[_Lookup], list[JaxprEqn]]:
    """Return the picks of a `scan`, and the equations that stack their numbers."""
    body, wires = opened(jaxpr), wiring(eqn)
    inside, made = _lookups_in(body.eqns, flow)
    carried = len(wires.carried)
    env: dict[Var, Atom] = {
        v: eqn.invars[i] for i, v in enumerate(body.invars) if i not in wires.carried
    }
    env |= {v: eqn.outvars[j] for j in wires.stacks if isinstance(v := body.outvars[j], Var)}
    wanted = [
        a
        for a in dict.fromkeys(x.numbers for x in inside if isinstance(x.numbers, Var))
        if a not in env
    ]
    extra = []
    if wanted:
        new = closed_with(
            jaxpr, outvars=[*body.outvars[:carried], *wanted], eqns=[*body.eqns, *made]
        )
        stacks = [Var(a.aval.update(shape=(scan_length(eqn), *a.aval.shape))) for a in wanted]
        turns = rebuilt(
            eqn, [new], eqn.invars, [*(Var(v.aval) for v in eqn.outvars[:carried]), *stacks]
        )
        (turns,) = numbers_first([turns], stacks, jaxpr)
        if wiring(turns).carried:  # forward and backward carry other values, and share no loop
            extra.append(turns)
            env |= dict(zip(wanted, stacks, strict=True))
        else:
            key = (*map(id, turns.invars), str(bodies(turns)[0]))
            extra += [turns] if key not in made_by else []
            env |= dict(zip(wanted, made_by.setdefault(key, stacks), strict=True))
    return [dataclasses.replace(x, numbers=_outer(x.numbers, env)) for x in inside], extra


def _outer(atom: Atom, env: Mapping[Var, Atom]) -> Atom:
    return atom if isinstance(atom, Literal) else env[atom]


def _outside(
    eqn: JaxprEqn, env: dict[Var, Atom], made_by: dict[Any, Sequence[Var]]
) -> list[JaxprEqn]:
    """Copy an equation of a body to the outside, unless it is there; add its outputs to `env`."""
    atoms = [_outer(a, env) for a in eqn.invars]
    key = _same(eqn, atoms)
    made = (
        []
        if key in made_by
        else [eqn.replace(invars=atoms, outvars=[Var(v.aval) for v in eqn.outvars])]
    )
    env.update(
        zip(eqn.outvars, made_by.setdefault(key, made[0].outvars if made else ()), strict=True)
    )
    return made


def _same(eqn: JaxprEqn, atoms: Sequence[Atom]) -> Any:
    """Return a key that is equal for two equations that compute the same value."""
    return (
        eqn.primitive.name,
        str(eqn.params),
        *(str(a) if isinstance(a, Literal) else id(a) for a in atoms),
    )


def _table(leaf: str, rows: int, picks: Sequence[_Lookup]) -> TableLookups:
    mine = [x for x in picks if x.leaf == leaf]
    read = dict.fromkeys((x.numbers, x.component) for x in mine if not _adds(x.eqn))
    values = {a for a, _ in read}
    ids = [
        *read,
        *(x for x in dict.fromkeys((x.numbers, x.component) for x in mine) if x[0] not in values),
    ]
    size = sum(a.aval.size // (1 if c is None else max(1, int(a.aval.shape[-1]))) for a, c in read)
    return TableLookups(leaf, rows, tuple(ids), max(1, min(rows, size)))


# -- what is no table ------------------------------------------------------------------------------


def _refusal(
    step: Cut, eqns: Sequence[JaxprEqn], flow: Flow, leaf: str, picks: Sequence[_Lookup]
) -> str:
    """Why a leaf is no table; empty where it is one."""
    for i, done in flow.steps.items():
        rows = [
            x for a in eqns[i].invars if isinstance(x := flow.layout(a), RowAxis) and x.leaf == leaf
        ]
        bound = [x for x in done.outs if isinstance(x, Colocated) and leaf in x.leaves]
        if rows and bound:
            return bound[0].reason or f"{_said(eqns[i])} mixes its rows"
        if rows and done.reduce:
            return f"{_said(eqns[i])} reads all of its rows"
        if rows and eqns[i].primitive.name == WHILE:
            return (
                f"{_said(eqns[i])} reads it in each of turns that nothing counts: look its "
                "rows up before"
            )
    if not any(x.leaf == leaf and not _adds(x.eqn) for x in picks):
        return "no equation of the step picks rows of it"
    gradient = step.gradients.get(leaf)
    if gradient is None or flow.layout(gradient) != RowAxis(leaf, 0):
        return "its gradient is not made by adding to rows of it"
    if not step.program.inputs[leaf].shape[0]:
        return "it has no rows"
    outs = step.program.outvars
    for n in (*step.results, *step.frozen):
        if n != leaf and isinstance(flow.layout(outs[n]), RowAxis):
            return f"the step returns its rows in {n}"
    return ""


def _refused_numbers(
    eqns: Sequence[JaxprEqn], picks: Sequence[_Lookup], tables: Collection[Var], like: Any
) -> dict[str, str]:
    """Return the tables whose row numbers depend on rows of tables."""
    read = lambda numbers: {
        a for e in numbers_first(eqns, numbers, like) for a in e.invars if isinstance(a, Var)
    }
    reads = lambda numbers: not read(numbers).isdisjoint(tables)
    if not reads([x.numbers for x in picks]):
        return {}
    return {
        x.leaf: f"the rows that {_said(x.eqn)} picks depend on rows of a table"
        for x in picks
        if reads([x.numbers])
    }


def _adds(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("scatter-add", "dynamic_update_slice")


def _said(eqn: JaxprEqn) -> str:
    line = line_of(eqn)
    operand = next((a for a in eqn.invars if not isinstance(a, Literal)), None)
    of = f" of {short_type(operand.aval)}" if operand is not None else ""
    return eqn.primitive.name + of + (f" ({line})" if line else "")


# -- what picks rows -------------------------------------------------------------------------------


def _gather(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    numbers = eqn.params["dimension_numbers"]
    if (
        row.axis not in numbers.start_index_map
        or eqn.params["slice_sizes"][row.axis] != 1
        or row.width != 1
    ):
        return None
    return RowPick((row, None), (SHARED,), component=numbers.start_index_map.index(row.axis))


def _scatter_add(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    numbers = eqn.params["dimension_numbers"]
    at = numbers.scatter_dims_to_operand_dims
    if row.axis not in at or row.width != 1:
        return None
    if row.axis not in numbers.inserted_window_dims:
        left_out = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = [d for d in range(eqn.invars[0].aval.ndim) if d not in left_out]
        if eqn.invars[2].aval.shape[numbers.update_window_dims[window.index(row.axis)]] != 1:
            return None
    return RowPick((row, None, None), (row,), component=at.index(row.axis))


def _dynamic_slice(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    if (
        eqn.params["slice_sizes"][row.axis] != 1
        or eqn.invars[0].aval.shape[row.axis] == 1
        or row.width != 1
    ):
        return None
    return RowPick((row, *(None,) * (len(eqn.invars) - 1)), (SHARED,), numbers=1 + row.axis)


def _dynamic_update_slice(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    whole, part = (a.aval.shape[row.axis] for a in eqn.invars[:2])
    if part != 1 or whole == 1 or row.width != 1:
        return None
    return RowPick((row, *(None,) * (len(eqn.invars) - 1)), (row,), numbers=2 + row.axis)


_PICKS: Mapping[str, Callable[[JaxprEqn, RowAxis], RowPick | None]] = {
    "gather": _gather,
    "scatter-add": _scatter_add,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
