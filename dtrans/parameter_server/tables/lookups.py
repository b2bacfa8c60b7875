"""Search for the leaves that a step reads by rows only.

A trainer then requests only the rows that its batch looks up, instead of the full leaf. A leaf of
this kind is a *table*. It must satisfy three conditions:

- Forward and backward read only selected rows of the leaf (*picks*): single rows by id (`emb[ids]`,
  `jnp.take`, an embedding layer), or consecutive rows (`jax.lax.dynamic_slice`).
- The ids do not depend on rows of a table.
- The leaf's gradient consists of zeros to which rows are added by id (a scatter-add).

Picks may also overwrite rows by id, such as a row for padding: `emb.at[0].set(0)`. Or they may add
to rows: `emb.at[0].add(1)`.

Row analysis (`dtrans.rows`) follows the leaf's rows through the equations. Before a pick, an
elementwise operation (a cast, a factor) or a transpose of the leaf is allowed. Any other operation,
such as a matrix product with the leaf, needs all rows, so the leaf is no table. A sum over rows of
the gradient, such as a norm, is allowed, because it needs only the picked rows: all other rows of
the gradient are zero.

The gradient begins as an array of zeros. JAX creates the array by a broadcast, which does not read
the leaf. A backward search from the gradient finds this broadcast.

Loops, branches and `jax.checkpoint` may contain picks (`pick_ids`). A leaf that a `while` reads is
no table, since the number of iterations is unknown.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import numpy as np

from dtrans._jax import (
    COND,
    REMAT,
    SCAN,
    Atom,
    JaxprEqn,
    Literal,
    Var,
    facts_of,
    has_bodies,
    is_rearrangement,
    zeros_by,
)
from dtrans.ir.dataflow import producers_of
from dtrans.ir.interpret import BackwardAnalysis, ForwardAnalysis, backward, forward
from dtrans.ir.selection import exclude, select, subset
from dtrans.parameter_server.tables.pick_ids import RowLookup, atom_key, lookups_in
from dtrans.parameter_server.tables.refused_leaves import find_refusal, find_refused_ids
from dtrans.parameter_server.tables.row_picks import RowPick, adds_rows, find_pick
from dtrans.rows.flow import Flow, FlowPass
from dtrans.rows.layout import SHARED, Layout, RowAxis
from dtrans.rows.normalize import inline_inside
from dtrans.rows.rules import Step, rows_of_operands
from dtrans.step.forward_backward import half_equations
from dtrans.step.halves import DividedStep
from dtrans.step.marks import mark_p


RowIds = tuple[Atom, int | None, str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class TableLookups:
    """All reads of one table by row ids in a step.

    Attributes:
      leaf: name of the table.
      rows: the number of the table's rows.
      ids: the values of the step that contain row ids. Each entry is a tuple (value, `component`,
        `outside`, `count`); see `RowPick` for the last three.
      size: the maximum number of rows that a step can look up.
    """

    leaf: str
    rows: int
    ids: tuple[RowIds, ...]
    size: int

    @property
    def starts(self) -> int:
        """The number of ids at which a lookup can start without leaving the table.

        For a table of 10 rows and lookups of 3 consecutive rows, this is 8: the ids 0 to 7.
        """
        return self.rows - max(count for *_, count in self.ids) + 1


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """Tables of a step (leaves that it reads by row ids), and their lookups.

    Attributes:
      tables: lookups of each table, by leaf name.
      refused: leaves that cannot be tables, although the step reads rows of them; a dict from name
        to the reason.
      eqns: the equations of forward and backward.
      inlined_eqns: the same equations. In the bodies of loops and branches, calls are inlined.
      flow: the result of row analysis (`dtrans.rows`) of `inlined_eqns`.
      id_eqns: added equations that compute the row ids of lookups in loops and branches. They run
        before these loops and branches.
    """

    tables: Mapping[str, TableLookups]
    refused: Mapping[str, str]
    eqns: Sequence[JaxprEqn]
    inlined_eqns: Sequence[JaxprEqn]
    flow: Flow
    id_eqns: Sequence[JaxprEqn]


@dataclasses.dataclass(eq=False)
class _Zeros:
    """Arrays of zeros to which the backward pass adds the gradients of looked-up rows.

    The gradient of `emb[ids]` begins as an array of zeros with the shape of `emb`.

    Attributes:
      of: for each array of zeros, the layout of its table. Arrays in bodies of loops and branches
        are included.
      inside: `id` of each equation with arrays of zeros in its body.
    """

    of: dict[Var, Layout] = dataclasses.field(default_factory=dict)
    inside: set[int] = dataclasses.field(default_factory=set)


class _LookupPass(FlowPass):
    """Row analysis (`dtrans.rows`) that also finds equations which read rows by id (`w[ids]`).

    Args:
      zeros: the result of `_find_zeros` for all tables.
      within: as in `FlowPass`.
    """

    several = True

    def __init__(self, zeros: _Zeros, within: JaxprEqn | None = None) -> None:
        super().__init__((), within=within)
        self.zeros = zeros
        self._producers: Mapping[Var, JaxprEqn] = {}

    def over(self, eqns: Iterable[JaxprEqn], start: Mapping[Var, Layout]) -> Flow:
        eqns = list(eqns)
        self._producers = producers_of(eqns)
        return super().over(eqns, {**self.zeros.of, **start})

    def _begins(self, eqn: JaxprEqn) -> bool:
        return id(eqn) in self.zeros.inside

    def _inside(self, eqn: JaxprEqn) -> _LookupPass:
        return _LookupPass(self.zeros, self.within or eqn)

    def _step(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        name = eqn.primitive.name
        if isinstance(ins[0], RowAxis) and all(x is SHARED for x in ins[1:]):
            pick = find_pick(eqn, ins[0], self._producers)
            if pick is not None:
                return pick
        if name in REMAT and all(x is SHARED or isinstance(x, RowAxis) for x in ins):
            return self._control(flow, eqn, ins)
        return super()._step(flow, eqn, ins)


def find_lookups(step: DividedStep, leaves: Iterable[str] | None = None) -> Lookups:
    """Find the leaves that a step reads only by row ids, such as embedding tables.

    Args:
      step: the step, with its calls inlined.
      leaves: names of the candidates; None for all trained leaves.
    """
    half = half_equations(step, step.results)[0]
    eqns = list(map(inline_inside, half))
    vars_of = step.program.invars
    if leaves is not None:
        return _search(step, half, eqns, leaves)
    picked = [n for n in step.optimized if _is_picked(eqns, vars_of[n])]
    refused: dict[str, str] = {}
    for n in exclude(step.optimized, picked):
        if _is_picked(eqns, vars_of[n], _CONTAINS_ROWS):
            alone = _search(step, half, eqns, [n])
            refused |= alone.refused
            if alone.tables:  # the leaf is read by rows of its transpose, say
                picked.append(n)
    found = _search(step, half, eqns, select(step.optimized, picked))
    return dataclasses.replace(found, refused={**found.refused, **refused})


def _search(
    step: DividedStep, half: Sequence[JaxprEqn], eqns: Sequence[JaxprEqn], leaves: Iterable[str]
) -> Lookups:
    """Find the tables among some leaves, and their lookups.

    Args:
      step: the step, with its calls inlined.
      half: the equations of forward and backward.
      eqns: the same equations; calls in their bodies are inlined too.
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
            _find_zeros(eqns, step.gradients.get(n), row, zeros)
        flow = _LookupPass(zeros).over(eqns, start)
        picks, numbering = lookups_in(eqns, flow)
        zero_elsewhere = _zero_elsewhere(eqns, flow, zeros)
        reasons = {}
        for n in chosen:
            if why := find_refusal(step, eqns, flow, n, picks, zero_elsewhere):
                reasons[n] = why
        reasons |= find_refused_ids([*eqns, *numbering], picks, set(start), step.program.jaxpr)
        if not reasons:
            break
        refused |= subset(reasons, select(chosen, reasons))
        chosen = exclude(chosen, reasons)
    tables = {}
    updates = _find_updates(eqns, [vars_of[n] for n in chosen])
    for n in chosen:
        tables[n] = _table(n, step.program.inputs[n].shape[0], picks, updates)
    return Lookups(tables, refused, half, eqns, flow, numbering)


# primitives whose result contains rows of their operands, possibly as parts of other rows
_CONTAINS_ROWS = frozenset(
    {
        *("concatenate", "dynamic_update_slice", "pad", "reshape", "slice", "transpose"),
        *("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
        "squeeze",
    }
)


def _is_picked(eqns: Sequence[JaxprEqn], var: Var, through: Collection[str] = frozenset()) -> bool:
    """Return True if an equation reads `var[ids]`, or f(`var`)[ids] for an elementwise f.

    Args:
      eqns: the equations of forward and backward.
      var: the variable of the leaf.
      through: names of further primitives that f may contain. If f contains one of them, the leaf
        cannot be a table, and the plan tells the user the reason.
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
    eqns: Sequence[JaxprEqn], gradient: Atom | None, row: RowAxis, found: _Zeros
) -> None:
    """Find the arrays of zeros to which a step adds the gradients of looked-up rows.

    Args:
      eqns: the equations of forward and backward.
      gradient: the gradient of a leaf; None if the leaf has no gradient.
      row: layout of the gradient: the dimension along which its rows are.
      found: a record, to which this function adds the arrays.
    """

    def rule(eqn: JaxprEqn, outs: Sequence[RowAxis | None]) -> list[RowAxis | None] | None:
        name, ins = eqn.primitive.name, list[RowAxis | None]([None] * len(eqn.invars))
        if all(x is None for x in outs):
            return ins
        if name in (SCAN, COND, *REMAT):
            found.inside.add(id(eqn))
            return None
        for k, (v, x) in enumerate(zip(eqn.outvars, outs, strict=True)):
            if x is None:
                continue
            if name == "broadcast_in_dim":
                found.of.setdefault(v, x)
            elif adds_rows(eqn) or name == "scatter":
                ins[0] = x
            elif facts_of(eqn).elementwise or is_rearrangement(eqn):
                step = rows_of_operands(eqn, x, k)
                if step is not None:
                    ins = [_first(a, b) for a, b in zip(ins, step.operands, strict=True)]
        return ins

    if gradient is not None:
        # Rows of the gradient are not followed through stacked outputs of a scan, or through the
        # predicate of a cond.
        analysis = BackwardAnalysis[RowAxis | None](
            _first, rule, None, slice_fact=_none, stack=_none, decide=_none
        )
        ends: list[tuple[Atom, RowAxis | None]] = [(gradient, row)]
        backward(analysis, eqns, ends)


def _zero_elsewhere(eqns: Sequence[JaxprEqn], flow: Flow, zeros: _Zeros) -> set[Var]:
    """Return the values that are zero in all rows that a step does not look up.

    These are gradients of tables, and values computed from them. A sum over their rows, such as a
    norm, needs only the looked-up rows.

    Args:
      eqns: the equations of forward and backward.
      flow: the result of row analysis (`dtrans.rows`) of the equations.
      zeros: the arrays of zeros to which the equations add gradients of rows.
    """
    found = set(zeros.of)
    for number, eqn in enumerate(eqns):
        if has_bodies(eqn):
            continue
        at = []
        for i, a in enumerate(eqn.invars):
            if not a.val if isinstance(a, Literal) else a in found:
                at.append(i)
        is_zero = 0 in at and isinstance(flow.steps.get(number), RowPick) and adds_rows(eqn)
        is_zero |= 0 in at and eqn.primitive is mark_p
        if at and not is_zero:
            factors = zeros_by(eqn, at)
            is_zero = factors is not None
            for k in factors or ():
                is_zero &= k in at or _is_finite(eqn.invars[k])
        if is_zero:
            found.update(eqn.outvars)
    return found


def _is_finite(atom: Atom) -> bool:
    """Return True if an operand is a finite number, and not zero."""
    return isinstance(atom, Literal) and bool(np.isfinite(atom.val) and atom.val)


def _find_updates(eqns: Sequence[JaxprEqn], leaves: Iterable[Var]) -> set[int]:
    """Return the `id` of each equation that adds to rows of a leaf, as `emb.at[ids].add(1)` does.

    All other scatter-adds create gradients: they add rows to an array of zeros.
    """
    found: set[int] = set()

    def rule(eqn: JaxprEqn, ins: Sequence[bool]) -> list[bool] | None:
        if has_bodies(eqn):
            return None
        if adds_rows(eqn) and ins[0]:
            found.add(id(eqn))
        depends = any(ins) and eqn.primitive.name not in ("gather", "dynamic_slice")
        return [depends] * len(eqn.outvars)

    analysis = ForwardAnalysis[bool](operator.or_, rule, lambda aval, value: False)
    forward(analysis, eqns, dict.fromkeys(leaves, True))
    return found


def _first(one: RowAxis | None, other: RowAxis | None) -> RowAxis | None:
    return other if one is None else one


def _none(row: RowAxis | None) -> None:
    return None


def _table(
    leaf: str, rows: int, picks: Sequence[RowLookup], updates: Collection[int]
) -> TableLookups:
    """Return the lookups of one table. Ids of rows to read precede ids of gradients of rows.

    Args:
      leaf: name of the table.
      rows: the number of the table's rows.
      picks: the lookups of all tables.
      updates: the result of `_find_updates`. An equation that adds to a row also reads the row.
    """
    reads: dict[Hashable, RowIds] = {}
    adds: dict[Hashable, RowIds] = {}
    for x in picks:
        if x.leaf == leaf:
            found = adds if adds_rows(x.eqn) and id(x.eqn) not in updates else reads
            key = atom_key(x.row_ids), x.component, x.outside, x.count
            found[key] = x.row_ids, x.component, x.outside, x.count
    ids = list(reads.values())
    read_values = set()
    size = 0
    for numbers, component, _, count in ids:
        read_values.add((atom_key(numbers), count))
        vector_size = 1
        if component is not None:
            vector_size = max(1, int(numbers.aval.shape[-1]))
        size += numbers.aval.size // vector_size * count
    ids += [x for x in adds.values() if (atom_key(x[0]), x[3]) not in read_values]
    return TableLookups(leaf, rows, tuple(ids), max(1, min(rows, size)))
