"""Search for the leaves that a step reads by rows only.

A leaf is a *table* of a step if three conditions hold:

- Forward and backward read the leaf only by *picks* of single rows by id: `emb[ids]`, `jnp.take`,
  an embedding layer.
- The ids do not depend on rows of a table.
- The leaf's gradient consists of zeros to which rows are added by id (a scatter-add).

Row analysis (`dtrans.rows`) finds the operations that read the leaf. Picks may also read the result
of an elementwise operation on all rows (a cast, a factor). Any other operation, such as a matrix
product with the leaf, needs all rows, so the leaf is no table.

Autodiff creates these zeros by a broadcast, which does not read the leaf. A backward search from
the gradient finds them.

Loops, branches and `jax.checkpoint` may contain picks, but a trainer needs all ids before the first
pick. For a `scan`, the trainer needs the ids of all iterations: they are an input or output of the
`scan`, or the output of another `scan` that computes only ids. For a `cond`, it needs the ids of
all branches. A leaf that a `while` reads is no table, since the number of iterations is unknown.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.lax import GatherScatterMode

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
from dtrans.ir.dataflow import (
    backward_slice,
    free_variables,
    needed_equations,
    variables,
    variables_read,
)
from dtrans.ir.display import short_type
from dtrans.ir.interpret import BackwardAnalysis, ForwardAnalysis, backward, forward
from dtrans.ir.selection import exclude, select, subset, values_at
from dtrans.rows.flow import Flow, FlowPass
from dtrans.rows.layout import SHARED, Colocated, Layout, RowAxis
from dtrans.rows.normalize import inline_inside
from dtrans.rows.rules import Step
from dtrans.step.forward_backward import half_equations
from dtrans.step.halves import DividedStep


_WITH_BODIES = frozenset({SCAN, COND, WHILE, *REMAT})


@dataclasses.dataclass(frozen=True)
class RowPick(Step):
    """Equation that reads rows of a leaf by id, as `w[ids]` does, or adds to such rows.

    Attributes:
      numbers: index of the operand that contains the row ids.
      component: position of the row id in the index vectors along the operand's last dimension;
        None if the operand is a single id.
      outside: treatment of ids that are outside the table. "error": the trainer raises an error;
        "clip": the nearest row is read; "drop": no row is read, and the result is a fill value.
    """

    numbers: int = 1
    component: int | None = None
    outside: str = "error"


@dataclasses.dataclass(frozen=True, eq=False)
class TableLookups:
    """Lookups of a table in a step.

    Attributes:
      leaf: name of the table.
      rows: the number of the table's rows.
      ids: the values that contain row ids, each with `component` and `outside` of `RowPick`.
      size: the maximum number of rows that a step can look up.
    """

    leaf: str
    rows: int
    ids: tuple[tuple[Atom, int | None, str], ...]
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """Tables of a step, and their lookups.

    Attributes:
      tables: lookups of each table, by leaf name.
      refused: for other leaves whose rows are picked, the reason why the leaf is no table.
      eqns: the equations of forward and backward.
      plain: the same equations, with calls inside their bodies inlined.
      flow: row analysis of `plain`.
      numbering: additional equations, outside of loops and branches, that compute the ids of picks
        inside.
    """

    tables: Mapping[str, TableLookups]
    refused: Mapping[str, str]
    eqns: Sequence[JaxprEqn]
    plain: Sequence[JaxprEqn]
    flow: Flow
    numbering: Sequence[JaxprEqn]


@dataclasses.dataclass(frozen=True, eq=False)
class _Lookup:
    """One read of rows by id (a *pick*), at the top level of a step or inside a loop or branch.

    Attributes:
      eqn: the equation that picks.
      leaf: name of the table.
      numbers: the row ids, as a value outside of all loops and branches.
      component, outside: as in `RowPick`.
    """

    eqn: JaxprEqn
    leaf: str
    numbers: Atom
    component: int | None
    outside: str


@dataclasses.dataclass(eq=False)
class _Zeros:
    """Arrays of zeros to which the backward pass adds the rows of a table's gradient.

    Attributes:
      of: for each array of zeros, also inside bodies, the layout of its table.
      inside: `id` of each equation whose body contains such zeros.
    """

    of: dict[Var, Layout] = dataclasses.field(default_factory=dict)
    inside: set[int] = dataclasses.field(default_factory=set)


class _LookupPass(FlowPass):
    """Row analysis that also finds equations that read rows by id, as `w[ids]` does.

    Args:
      zeros: the result of `_find_zeros` for all tables.
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


def find_lookups(step: DividedStep, leaves: Iterable[str] | None = None) -> Lookups:
    """Find the leaves that a step reads only by row ids, such as embedding tables.

    Args:
      step: the step, with its calls inlined.
      leaves: names of the candidates; None for all leaves whose rows are picked.
    """
    half = half_equations(step, step.results)[0]
    eqns = list(map(inline_inside, half))
    vars_of = step.program.invars
    if leaves is not None:
        return _search(step, half, eqns, leaves)
    picked = [n for n in step.optimized if _is_picked(eqns, vars_of[n])]
    found, refused = _search(step, half, eqns, picked), dict[str, str]()
    for n in exclude(step.optimized, picked):
        if _is_picked(eqns, vars_of[n], _CONTAINS_ROWS):
            refused |= _search(step, half, eqns, [n]).refused
    return dataclasses.replace(found, refused={**found.refused, **refused})


def _search(
    step: DividedStep, half: Sequence[JaxprEqn], eqns: Sequence[JaxprEqn], leaves: Iterable[str]
) -> Lookups:
    """Search for the tables among some leaves.

    Args:
      step: the step, with its calls inlined.
      half: the equations of forward and backward.
      eqns: the same equations, with calls inside their bodies inlined.
      leaves: names of the candidates.
    """
    vars_of = step.program.invars
    chosen = list(leaves)
    refused: dict[str, str] = {}
    # Row analysis treats all chosen leaves together, so its result for the remaining leaves can
    # change when a leaf is refused. The search is repeated until none is refused.
    while True:
        start: dict[Var, Layout] = {}
        zeros = _Zeros()
        for n in chosen:
            start[vars_of[n]] = row = RowAxis(n, 0)
            _find_zeros(eqns, step.gradients.get(n), vars_of[n].aval.shape, row, zeros)
        flow = _LookupPass(zeros).over(eqns, start)
        picks, numbering = _lookups_in(eqns, flow)
        reasons = {}
        for n in chosen:
            if why := _refusal(step, eqns, flow, n, picks):
                reasons[n] = why
        reasons |= _refused_numbers([*eqns, *numbering], picks, set(start), step.program.jaxpr)
        if not reasons:
            break
        refused |= subset(reasons, select(chosen, reasons))
        chosen = exclude(chosen, reasons)
    tables = {}
    for n in chosen:
        tables[n] = _table(n, step.program.inputs[n].shape[0], picks)
    return Lookups(tables, refused, half, eqns, flow, numbering)


def numbers_first(eqns: Sequence[JaxprEqn], numbers: Iterable[Atom], like: Any) -> list[JaxprEqn]:
    """Select the equations that compute row ids; drop all other equations.

    Loops among them are rewritten to compute only the outputs that ids depend on.

    Args:
      eqns: candidates, in order.
      numbers: the row ids.
      like: the jaxpr that contains the equations.
    """
    wanted = variables(dict.fromkeys(numbers))
    positions, inputs = backward_slice(eqns, wanted)
    needed = values_at(eqns, positions)
    if not any(e.primitive.name in _WITH_BODIES for e in needed):
        return needed
    free = free_variables(needed)
    outvars = [v for v in wanted if v not in inputs]
    jaxpr = opened(closed((), (), free, outvars, needed, like))
    live, _ = live_part(jaxpr, [True] * len(outvars), [False] * len(free))
    return list(live.eqns)


# primitives whose result contains rows of their operands, possibly as parts of other rows
_CONTAINS_ROWS = frozenset({"concatenate", "pad", "reshape", "scatter", "slice", "transpose"})
_PADDING = (
    " (for a row of zeros, give padding an id outside the table, and read "
    "jnp.take(table, ids, axis=0, mode='fill', fill_value=0))"
)


def _is_picked(eqns: Sequence[JaxprEqn], var: Var, through: Collection[str] = frozenset()) -> bool:
    """Return True if an equation reads `var[ids]`, or f(`var`)[ids] for an elementwise f.

    With `through`, f may also contain these primitives. Such a leaf is no table, but the plan
    states the reason.
    """
    picks: list[JaxprEqn] = []

    def rule(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
        if has_bodies(eqn):
            return None
        read = [a.aval.shape for a, has_rows in zip(eqn.invars, ins, strict=True) if has_rows]
        if read and ins[0] and eqn.primitive.name in ("gather", "dynamic_slice"):
            picks.append(eqn)
        if eqn.primitive.name in through:
            return [ins[0] or (eqn.primitive.name == "concatenate" and any(ins))]
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
    """Find the arrays of zeros to which a step adds the rows of a leaf's gradient.

    Args:
      eqns: the equations of forward and backward.
      gradient: the gradient; None if the leaf has no gradient.
      shape: shape of the gradient.
      row: layout of the gradient.
      found: a record, to which this function adds the zeros.
    """

    def rule(eqn: JaxprEqn, outs: Sequence[bool]) -> list[bool] | None:
        name = eqn.primitive.name
        enters = []  # outputs of the equation that are parts of the gradient
        for v, is_part in zip(eqn.outvars, outs, strict=True):
            if is_part and v.aval.shape == shape:
                enters.append(v)
        if enters and name in _WITH_BODIES and name != WHILE:
            found.inside.add(id(eqn))
            return None
        if name == "broadcast_in_dim":
            for v in enters:
                found.of.setdefault(v, row)
        operands = len(eqn.invars)
        if enters and _adds(eqn):
            return [True] + [False] * (operands - 1)
        return [bool(enters) and facts_of(eqn).elementwise] * operands

    if gradient is not None:
        analysis = BackwardAnalysis[bool](operator.or_, rule, default=False)
        backward(analysis, eqns, [(gradient, True)])


# -- row ids ---------------------------------------------------------------------------------------


def _lookups_in(eqns: Sequence[JaxprEqn], flow: Flow) -> tuple[list[_Lookup], list[JaxprEqn]]:
    """Return all reads of rows by id, and the equations that compute ids for loops and branches."""
    found: list[_Lookup] = []
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
            found.append(_Lookup(eqn, row.leaf, numbers, step.component, step.outside))
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
    """Record in `known` the equations that compute integers, so that bodies reuse their results."""
    for eqn in eqns:
        if not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
            known.setdefault(_key(eqn, eqn.invars), eqn.outvars)


def _in_branches(
    eqn: JaxprEqn, step: Step, known: dict[Any, Sequence[Var]]
) -> tuple[list[_Lookup], list[JaxprEqn]]:
    """Return the row reads of a `cond` or remat, and copies of equations that compute their ids.

    The copies run before `eqn`. They compute the ids of every branch, since the trainer needs ids
    before it knows which branch runs.
    """
    found: list[_Lookup] = []
    extra: list[JaxprEqn] = []
    branches = zip(map(opened, bodies(eqn)), wiring(eqn).ins, step.bodies, strict=True)
    for body, read, flow in branches:
        env: dict[Var, Atom] = dict(zip(body.invars, values_at(eqn.invars, read), strict=True))
        inside, new = _lookups_in(body.eqns, flow)
        numbers = [x.numbers for x in inside]
        for inner in needed_equations([*body.eqns, *new], numbers):
            extra += _copy_outside(inner, env, known)
        found += _with_outer_numbers(inside, env)
    return found, extra


def _in_scan(
    eqn: JaxprEqn, jaxpr: Any, flow: Flow, known: dict[Any, Sequence[Var]]
) -> tuple[list[_Lookup], list[JaxprEqn]]:
    """Return the row reads in a scan's body, and a second scan that computes the row ids."""
    body, wires = opened(jaxpr), wiring(eqn)
    inside, new = _lookups_in(body.eqns, flow)
    count = len(wires.carried)

    # Inputs and stacked outputs of the body also exist outside of the body.
    env: dict[Var, Atom] = {}
    for i, v in enumerate(body.invars):
        if i not in wires.carried:
            env[v] = eqn.invars[i]
    for j in wires.stacks:
        stacked = body.outvars[j]
        if isinstance(stacked, Var):
            env[stacked] = eqn.outvars[j]
    ids = dict.fromkeys(variables(x.numbers for x in inside))
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
        if wiring(scan).carried:
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


def _with_outer_numbers(picks: Iterable[_Lookup], env: Mapping[Var, Atom]) -> list[_Lookup]:
    """Return the row reads of a body; replace their ids by the equal values outside of the body.

    Args:
      env: for variables of the body, the values outside.
    """
    found = []
    for x in picks:
        found.append(dataclasses.replace(x, numbers=_outer(x.numbers, env)))
    return found


def _outer(atom: Atom, env: Mapping[Var, Atom]) -> Atom:
    return atom if isinstance(atom, Literal) else env[atom]


def _copy_outside(
    eqn: JaxprEqn, env: dict[Var, Atom], known: dict[Any, Sequence[Var]]
) -> list[JaxprEqn]:
    """Copy an equation of a body to the outside, unless `known` has an equal equation.

    Args:
      eqn: the equation.
      env: for variables of the body, the values outside; this function adds the outputs of `eqn`.
      known: outputs of the equations outside, by `_key`.

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
    operands = [str(a) if isinstance(a, Literal) else id(a) for a in atoms]
    return (eqn.primitive.name, str(eqn.params), *operands)


def _table(leaf: str, rows: int, picks: Sequence[_Lookup]) -> TableLookups:
    """Return the lookups of a table: first ids of rows to read, then ids of gradient rows."""
    reads: dict[tuple[Atom, int | None, str], None] = {}
    adds: dict[tuple[Atom, int | None, str], None] = {}
    for x in picks:
        if x.leaf == leaf and _adds(x.eqn):
            adds[x.numbers, x.component, x.outside] = None
        elif x.leaf == leaf:
            reads[x.numbers, x.component, x.outside] = None
    ids = list(reads)
    read_values = set()
    size = 0
    for numbers, component, _ in ids:
        read_values.add(numbers)
        vector_size = 1
        if component is not None:
            vector_size = max(1, int(numbers.aval.shape[-1]))
        size += numbers.aval.size // vector_size
    ids += [x for x in adds if x[0] not in read_values]
    return TableLookups(leaf, rows, tuple(ids), max(1, min(rows, size)))


# -- refusals --------------------------------------------------------------------------------------


def _refusal(
    step: DividedStep, eqns: Sequence[JaxprEqn], flow: Flow, leaf: str, picks: Sequence[_Lookup]
) -> str:
    """Return the reason why a leaf is no table; empty if it is a table."""
    for i, done in flow.steps.items():
        layouts = [flow.layout(a) for a in eqns[i].invars]
        if not any(isinstance(x, RowAxis) and x.leaf == leaf for x in layouts):
            continue
        for layout in done.outs:
            if isinstance(layout, Colocated) and leaf in layout.leaves:
                has_padding = eqns[i].primitive.name in ("concatenate", "scatter")
                why = layout.reason or f"{_text(eqns[i])} mixes its rows"
                return why + _PADDING * has_padding
        if done.reduce:
            return f"{_text(eqns[i])} reads all of its rows"
        if eqns[i].primitive.name == WHILE:
            return (
                f"{_text(eqns[i])} looks rows up in an unknown number of iterations (look them up "
                "before the loop)"
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
    eqns: Sequence[JaxprEqn], picks: Sequence[_Lookup], tables: set[Var], like: Any
) -> dict[str, str]:
    """Return a message for each table whose row ids depend on rows of a table, by leaf."""

    def depend(numbers: Sequence[Atom]) -> bool:
        return not tables.isdisjoint(variables_read(numbers_first(eqns, numbers, like)))

    found: dict[str, str] = {}
    if depend([x.numbers for x in picks]):
        for x in picks:
            if depend([x.numbers]):
                found[x.leaf] = f"the rows that {_text(x.eqn)} picks depend on rows of a table"
    return found


def _adds(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("scatter-add", "dynamic_update_slice")


def _text(eqn: JaxprEqn) -> str:
    """Return a description of an equation for users: name, type of its first variable, line."""
    text = eqn.primitive.name
    read = variables(eqn.invars)
    if read:
        text += f" of {short_type(read[0].aval)}"
    line = line_of(eqn)
    if line:
        text += f" ({line})"
    return text


# -- rules: equations that pick rows ---------------------------------------------------------------


def _gather(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    numbers = eqn.params["dimension_numbers"]
    size = eqn.params["slice_sizes"][row.axis]
    if row.axis not in numbers.start_index_map or size != 1 or row.width != 1:
        return None
    component = numbers.start_index_map.index(row.axis)
    outside = _outside(eqn, numbers.collapsed_slice_dims, row)
    return RowPick((row, None), (SHARED,), component=component, outside=outside)


def _scatter_add(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    numbers = eqn.params["dimension_numbers"]
    at = numbers.scatter_dims_to_operand_dims
    if row.axis not in at or row.width != 1:
        return None
    if row.axis not in numbers.inserted_window_dims:
        # Each window that is added must cover exactly one row of the table.
        without = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = [d for d in range(eqn.invars[0].aval.ndim) if d not in without]
        dim = numbers.update_window_dims[window.index(row.axis)]
        if eqn.invars[2].aval.shape[dim] != 1:
            return None
    component = at.index(row.axis)
    outside = _outside(eqn, numbers.inserted_window_dims, row)
    return RowPick((row, None, None), (row,), component=component, outside=outside)


def _outside(eqn: JaxprEqn, removed: Sequence[int], row: RowAxis) -> str:
    """Return `RowPick.outside` of a gather or scatter.

    Args:
      removed: dimensions of the table that a picked row does not have.
    """
    mode, fill = eqn.params["mode"], eqn.params.get("fill_value", 0)
    # `vmap` of `emb[i]` also clips, but a picked row then has the table's dimension. JAX fills with
    # NaN by default, also in `jnp.take`. In both cases, an id outside the table is a mistake.
    if mode == GatherScatterMode.CLIP and row.axis in removed:
        return "clip"
    if mode == GatherScatterMode.FILL_OR_DROP and fill is not None and fill == fill:
        return "drop"
    return "error"


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
