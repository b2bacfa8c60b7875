"""Search for the leaves that a step reads by rows only.

A leaf is a *table* of a step if forward and backward only pick single rows of it by id (`emb[ids]`,
`jnp.take`, an embedding layer). No row of a table may enter the ids. The gradient must be zeros to
which rows are added by id.

Row analysis (`dtrans.rows`) finds tables. An elementwise operation on all rows (a cast, a factor)
keeps the rows. A pick of rows yields a value without rows of the table, and a scatter-add keeps
them. Any other operation, such as a matrix product with the leaf, binds the leaf, and is the reason
why it is no table.

The gradient begins with zeros of the leaf's shape that no equation connects with the leaf: a
backward search from the gradient finds them.

Loops, branches and the recomputation of `jax.checkpoint` may pick rows. Their ids are needed before
the pick. The ids of a `scan` are a stack: an input, an output, or the output of a `scan` that
computes only the ids. The ids of a `cond` are those of all branches. A `while` is refused, since
its number of iterations is unknown.
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
from dtrans.ir.dataflow import backward_slice, free_variables, variables
from dtrans.ir.display import short_type
from dtrans.ir.interpret import BackwardAnalysis, ForwardAnalysis, backward, forward
from dtrans.ir.selection import values_at
from dtrans.rows.flow import Flow, FlowPass
from dtrans.rows.layout import SHARED, Colocated, Layout, RowAxis
from dtrans.rows.normalize import inline_inside
from dtrans.rows.rules import Step
from dtrans.step.cut import Cut
from dtrans.step.forward_backward import half_equations


_WITH_BODIES = frozenset({SCAN, COND, WHILE, *REMAT})


@dataclasses.dataclass(frozen=True)
class RowPick(Step):
    """Equation that reads rows, or adds to rows, by id.

    Attributes:
      numbers: index of the operand with the ids.
      component: index of the row id along its last dimension; None if the operand is an id.
    """

    numbers: int = 1
    component: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TableLookups:
    """Lookups of a table in a step.

    Attributes:
      leaf: name of the table.
      rows: the number of its rows.
      ids: the values that contain row ids, each with the component of the id.
      size: the most rows that a step can look up.
    """

    leaf: str
    rows: int
    ids: tuple[tuple[Atom, int | None], ...]
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """Tables of a step.

    Attributes:
      tables: name to lookups.
      refused: other leaves whose rows are picked, with the reason why they are no tables.
      eqns: the equations of forward and backward.
      plain: the same equations, with the calls in bodies inlined.
      flow: the effect of each of these equations on rows of tables.
      numbering: further equations, which compute the row ids of loops and branches.
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
      numbers: the row ids, as a value outside of all loops and branches.
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
      inside: equations, by `id`, whose bodies contain such zeros.
    """

    of: dict[Var, Layout] = dataclasses.field(default_factory=dict)
    inside: set[int] = dataclasses.field(default_factory=set)


class _LookupPass(FlowPass):
    """Forward pass that finds picks of rows, also in loops, branches and remat.

    Args:
      zeros: the zeros with which gradients of tables begin.
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
      leaves: names of leaves.
    """
    half = half_equations(step, step.results)[0]
    eqns = [inline_inside(e) for e in half]
    vars_of = step.program.invars
    if leaves is None:
        leaves = (n for n in step.optimized if _is_picked(eqns, vars_of[n]))
    chosen = list(leaves)
    refused: dict[str, str] = {}
    # without a refused leaf, rows of others may follow other equations: search again
    while True:
        start: dict[Var, Layout] = {vars_of[n]: RowAxis(n, 0) for n in chosen}
        zeros = _Zeros()
        for n in chosen:
            _find_zeros(eqns, step.gradients.get(n), vars_of[n].aval.shape, RowAxis(n, 0), zeros)
        flow = _LookupPass(zeros).over(eqns, start)
        picks, numbering = _lookups_in(eqns, flow)
        reasons = {n: _refusal(step, eqns, flow, n, picks) for n in chosen}
        tables = set(values_at(vars_of, chosen))
        reasons |= _refused_numbers([*eqns, *numbering], picks, tables, step.program.jaxpr)
        if not any(reasons.values()):
            break
        refused |= {n: why for n, why in reasons.items() if why}
        chosen = [n for n in chosen if not reasons[n]]
    found = {n: _table(n, step.program.inputs[n].shape[0], picks) for n in chosen}
    return Lookups(found, refused, half, eqns, flow, numbering)


def numbers_first(eqns: Sequence[JaxprEqn], numbers: Iterable[Atom], like: Any) -> list[JaxprEqn]:
    """Return the equations that compute row ids; loops among them keep only these outputs.

    Args:
      eqns: the equations in order.
      numbers: the wanted values.
      like: the jaxpr that contains the equations.
    """
    wanted = variables(dict.fromkeys(numbers))
    needed = values_at(eqns, backward_slice(eqns, wanted)[0])
    if not any(e.primitive.name in _WITH_BODIES for e in needed):
        return needed
    computed = {v for e in needed for v in e.outvars}
    free = free_variables(needed)
    jaxpr = opened(closed((), (), free, [a for a in wanted if a in computed], needed, like))
    live, _ = live_part(jaxpr, [True] * len(jaxpr.outvars), [False] * len(free))
    return list(live.eqns)


def _is_picked(eqns: Sequence[JaxprEqn], var: Var) -> bool:
    """Return True if an equation picks rows of a value, or of an elementwise function of it."""
    picks: list[JaxprEqn] = []

    def rule(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
        if has_bodies(eqn):
            return None
        read = [a.aval.shape for a, has_rows in zip(eqn.invars, ins, strict=True) if has_rows]
        if read and ins[0] and eqn.primitive.name in ("gather", "dynamic_slice"):
            picks.append(eqn)
        keeps = facts_of(eqn).elementwise
        return [keeps and v.aval.shape in read for v in eqn.outvars]

    analysis = ForwardAnalysis[bool](operator.or_, rule, lambda aval, value: False)
    forward(analysis, eqns, {var: bool(var.aval.ndim)})
    return bool(picks)


def _find_zeros(
    eqns: Sequence[JaxprEqn],
    gradient: Atom | None,
    shape: tuple[int, ...],
    row: RowAxis,
    found: _Zeros,
) -> None:
    """Find the zeros of a shape to which the parts of a gradient are added.

    Args:
      row: the layout of the gradient.
      found: receives the zeros.
    """

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
        analysis = BackwardAnalysis[bool](operator.or_, rule, default=False)
        backward(analysis, eqns, [(gradient, True)])


# -- row ids ---------------------------------------------------------------------------------------


def _lookups_in(eqns: Sequence[JaxprEqn], flow: Flow) -> tuple[list[_Lookup], list[JaxprEqn]]:
    """Find all picks of rows, and equations outside of bodies that compute their ids."""
    found: list[_Lookup] = []
    extra: list[JaxprEqn] = []
    # equal equations of forward and backward share their ids
    known: dict[Any, Sequence[Var]] = {}
    for i, step in flow.steps.items():
        eqn = eqns[i]
        if isinstance(step, RowPick):
            row = step.operands[0]
            assert row is not None
            found.append(_Lookup(eqn, row.leaf, eqn.invars[step.numbers], step.component))
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
    """Note equations outside that compute integers, which bodies may repeat."""
    for eqn in eqns:
        if not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
            known.setdefault(_key(eqn, eqn.invars), eqn.outvars)


def _in_branches(
    eqn: JaxprEqn, step: Step, known: dict[Any, Sequence[Var]]
) -> tuple[list[_Lookup], list[JaxprEqn]]:
    """Return the picks of a `cond` or remat, and the equations that compute their ids outside."""
    found: list[_Lookup] = []
    extra: list[JaxprEqn] = []
    branches = zip(map(opened, bodies(eqn)), wiring(eqn).ins, step.bodies, strict=True)
    for body, read, flow in branches:
        env: dict[Var, Atom] = dict(zip(body.invars, values_at(eqn.invars, read), strict=True))
        inside, new = _lookups_in(body.eqns, flow)
        candidates = [*body.eqns, *new]
        # ids of every branch are needed, whichever branch runs
        for j in backward_slice(candidates, [x.numbers for x in inside])[0]:
            extra += _copy_outside(candidates[j], env, known)
        found += [dataclasses.replace(x, numbers=_outer(x.numbers, env)) for x in inside]
    return found, extra


def _in_scan(
    eqn: JaxprEqn, jaxpr: Any, flow: Flow, known: dict[Any, Sequence[Var]]
) -> tuple[list[_Lookup], list[JaxprEqn]]:
    """Return the picks of a `scan`, and the equations that stack their ids."""
    body, wires = opened(jaxpr), wiring(eqn)
    inside, new = _lookups_in(body.eqns, flow)
    count = len(wires.carried)

    # ids that are inputs or stacked outputs exist outside
    env: dict[Var, Atom] = {}
    for i, v in enumerate(body.invars):
        if i not in wires.carried:
            env[v] = eqn.invars[i]
    for j in wires.stacks:
        stacked = body.outvars[j]
        if isinstance(stacked, Var):
            env[stacked] = eqn.outvars[j]
    ids = dict.fromkeys(x.numbers for x in inside if isinstance(x.numbers, Var))
    wanted = [a for a in ids if a not in env]
    extra = []
    if wanted:
        # another scan, which stacks the other ids
        outvars = [*body.outvars[:count], *wanted]
        ids_body = closed_with(jaxpr, outvars=outvars, eqns=[*body.eqns, *new])
        stacks = [Var(a.aval.update(shape=(scan_length(eqn), *a.aval.shape))) for a in wanted]
        carries = [Var(v.aval) for v in eqn.outvars[:count]]
        scan = rebuilt(eqn, [ids_body], eqn.invars, [*carries, *stacks])
        (scan,) = numbers_first([scan], stacks, jaxpr)
        if wiring(scan).carried:
            # forward and backward carry different values, so they cannot share a scan
            extra.append(scan)
        else:
            key = (*map(id, scan.invars), str(bodies(scan)[0]))
            if key in known:
                stacks = list(known[key])
            else:
                extra.append(scan)
                known[key] = stacks
        env |= dict(zip(wanted, stacks, strict=True))
    return [dataclasses.replace(x, numbers=_outer(x.numbers, env)) for x in inside], extra


def _outer(atom: Atom, env: Mapping[Var, Atom]) -> Atom:
    return atom if isinstance(atom, Literal) else env[atom]


def _copy_outside(
    eqn: JaxprEqn, env: dict[Var, Atom], known: dict[Any, Sequence[Var]]
) -> list[JaxprEqn]:
    """Copy an equation of a body to the outside, unless it is there; add its outputs to `env`."""
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
    operands = [str(a) if isinstance(a, Literal) else id(a) for a in atoms]
    return (eqn.primitive.name, str(eqn.params), *operands)


def _table(leaf: str, rows: int, picks: Sequence[_Lookup]) -> TableLookups:
    """Return the lookups of a table: ids of reads first, then ids to which gradients are added."""
    reads: list[tuple[Atom, int | None]] = []
    adds: list[tuple[Atom, int | None]] = []
    for x in picks:
        if x.leaf == leaf:
            (adds if _adds(x.eqn) else reads).append((x.numbers, x.component))
    ids = list(dict.fromkeys(reads))
    read_values = {a for a, _ in ids}
    size = 0
    for numbers, component in ids:
        per_vector = 1 if component is None else max(1, int(numbers.aval.shape[-1]))
        size += numbers.aval.size // per_vector
    ids += [x for x in dict.fromkeys(adds) if x[0] not in read_values]
    return TableLookups(leaf, rows, tuple(ids), max(1, min(rows, size)))


# -- refusals --------------------------------------------------------------------------------------


def _refusal(
    step: Cut, eqns: Sequence[JaxprEqn], flow: Flow, leaf: str, picks: Sequence[_Lookup]
) -> str:
    """Return the reason why a leaf is no table; empty if it is one."""
    for i, done in flow.steps.items():
        layouts = [flow.layout(a) for a in eqns[i].invars]
        if not any(isinstance(x, RowAxis) and x.leaf == leaf for x in layouts):
            continue
        bound = [x for x in done.outs if isinstance(x, Colocated) and leaf in x.leaves]
        if bound:
            return bound[0].reason or f"{_text(eqns[i])} mixes its rows"
        if done.reduce:
            return f"{_text(eqns[i])} reads all of its rows"
        if eqns[i].primitive.name == WHILE:
            return (
                f"{_text(eqns[i])} reads it in an unknown number of iterations: look its rows up "
                "before"
            )
    if not any(x.leaf == leaf and not _adds(x.eqn) for x in picks):
        return "no equation of the step picks rows of it"
    gradient = step.gradients.get(leaf)
    if gradient is None or flow.layout(gradient) != RowAxis(leaf, 0):
        return "its gradient is not a sum of rows"
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
    """Return the tables whose row ids depend on rows of tables, with the reason."""

    def depend(numbers: Sequence[Atom]) -> bool:
        for eqn in numbers_first(eqns, numbers, like):
            if any(isinstance(a, Var) and a in tables for a in eqn.invars):
                return True
        return False

    found: dict[str, str] = {}
    if depend([x.numbers for x in picks]):
        for x in picks:
            if depend([x.numbers]):
                found[x.leaf] = f"the rows that {_text(x.eqn)} picks depend on rows of a table"
    return found


def _adds(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("scatter-add", "dynamic_update_slice")


def _text(eqn: JaxprEqn) -> str:
    """Return the name, the operand's type and the line of an equation, for users."""
    line = line_of(eqn)
    operand = next((a for a in eqn.invars if not isinstance(a, Literal)), None)
    of = f" of {short_type(operand.aval)}" if operand is not None else ""
    return eqn.primitive.name + of + (f" ({line})" if line else "")


# -- rules: equations that pick rows ---------------------------------------------------------------


def _gather(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    numbers = eqn.params["dimension_numbers"]
    size = eqn.params["slice_sizes"][row.axis]
    if row.axis not in numbers.start_index_map or size != 1 or row.width != 1:
        return None
    return RowPick((row, None), (SHARED,), component=numbers.start_index_map.index(row.axis))


def _scatter_add(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    numbers = eqn.params["dimension_numbers"]
    at = numbers.scatter_dims_to_operand_dims
    if row.axis not in at or row.width != 1:
        return None
    if row.axis not in numbers.inserted_window_dims:
        # the window must have one row
        without = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = [d for d in range(eqn.invars[0].aval.ndim) if d not in without]
        dim = numbers.update_window_dims[window.index(row.axis)]
        if eqn.invars[2].aval.shape[dim] != 1:
            return None
    return RowPick((row, None, None), (row,), component=at.index(row.axis))


def _dynamic_slice(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    size, rows = eqn.params["slice_sizes"][row.axis], eqn.invars[0].aval.shape[row.axis]
    if size != 1 or rows == 1 or row.width != 1:
        return None
    return RowPick((row, *(None,) * (len(eqn.invars) - 1)), (SHARED,), numbers=1 + row.axis)


def _dynamic_update_slice(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    rows, updated = (a.aval.shape[row.axis] for a in eqn.invars[:2])
    if updated != 1 or rows == 1 or row.width != 1:
        return None
    return RowPick((row, *(None,) * (len(eqn.invars) - 1)), (row,), numbers=2 + row.axis)


_PICKS: Mapping[str, Callable[[JaxprEqn, RowAxis], RowPick | None]] = {
    "gather": _gather,
    "scatter-add": _scatter_add,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
