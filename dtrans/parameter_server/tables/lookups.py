"""Which leaves a step reads by rows alone, and how.

A leaf is a *table* of a step where forward and backward do nothing with it but pick single rows of it by number
(`emb[ids]`, `jnp.take`, an embedding layer), whose numbers no row of a table enters, and where its gradient is zeros to
which rows are added by number. Row analysis says so (`dtrans.rows`): the leaf has rows, and what is done to all of them
alike (a cast, a factor) keeps them; a pick of rows makes a value that everybody can have, and what adds to rows keeps
them. Anything else, as a matrix product with the leaf, is what binds it, and is the reason why it is no table.

The gradient begins with zeros of the leaf's shape, which nothing connects with the leaf: they are found backwards from
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from dtrans._jax import ELEMENTWISE, Atom, JaxprEqn, Literal, Var, line_of
from dtrans.ir.dataflow import backward_slice
from dtrans.ir.display import short_type
from dtrans.rows.flow import Flow, _Pass
from dtrans.rows.layout import SHARED, Layout, RowAxis, Whole
from dtrans.rows.rules import Step
from dtrans.step.cut import Cut
from dtrans.step.forward_backward import half_equations


@dataclasses.dataclass(frozen=True)
class RowPick(Step):
    """An equation that reads rows, or adds to rows, by number.

    Attributes:
      numbers: the operand that has the numbers.
      component: which entry along its last dimension is the number of a row; None where it is a number itself.
    """

    numbers: int = 1
    component: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TableLookups:
    """How a step reads a table.

    Attributes:
      leaf: its name.
      rows: how many it has.
      picks: the equations that do.
      ids: the operands that number its rows, with the component that does, in the order of equations.
      size: how many rows a step can look up at most.
    """

    leaf: str
    rows: int
    picks: tuple[tuple[JaxprEqn, RowPick], ...]
    ids: tuple[tuple[Atom, int | None], ...]
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """The tables of a step.

    Attributes:
      tables: by their names.
      refused: leaves of which rows are picked and that are no tables, and why.
      eqns: forward and backward.
      flow: what each of them does to rows of tables.
    """

    tables: Mapping[str, TableLookups]
    refused: Mapping[str, str]
    eqns: Sequence[JaxprEqn]
    flow: Flow


class _LookupPass(_Pass):
    """One pass forward that knows what picks rows."""

    def _step(self, flow: Flow, eqn: JaxprEqn, ins: Sequence[Layout]) -> Step:
        rule = _PICKS.get(eqn.primitive.name)
        if rule is not None and isinstance(ins[0], RowAxis) and all(x is SHARED for x in ins[1:]):
            pick = rule(eqn, ins[0])
            if pick is not None:
                return pick
        return super()._step(flow, eqn, ins)


def find_lookups(step: Cut, leaves: Iterable[str] | None = None) -> Lookups:
    """Find the tables of a step: among some leaves, or all of which rows are picked.

    Args:
      step: with the calls in it inlined.
    """
    eqns = half_equations(step, step.results)[0]
    vars_of = step.program.invars
    chosen = [n for n in step.optimized if _is_picked(eqns, vars_of[n])] if leaves is None else list(leaves)
    refused: dict[str, str] = {}
    while True:
        start: dict[Var, Layout] = {vars_of[n]: RowAxis(n, 0) for n in chosen}
        for n in chosen:
            zeros = _zeros_of(eqns, step.gradients.get(n), vars_of[n])
            start |= {v: RowAxis(n, 0) for v in zeros if v not in start}
        flow = _LookupPass(()).over(eqns, start)
        found = {n: _refusal(step, eqns, flow, n, chosen) for n in chosen}
        refused |= {n: why for n, why in found.items() if why}
        if not any(found.values()):
            break
        chosen = [n for n in chosen if not found[n]]
    return Lookups({n: _table(step, eqns, flow, n) for n in chosen}, refused, eqns, flow)


def _is_picked(eqns: Sequence[JaxprEqn], var: Var) -> bool:
    """Whether rows of a value are picked, or of what is made of each of them."""
    if not var.aval.ndim:
        return False
    same = {var}
    for e in eqns:
        read = [a for a in e.invars if isinstance(a, Var) and a in same]
        if read and e.primitive.name in ("gather", "dynamic_slice") and e.invars[0] in same:
            return True
        if read and e.primitive.name in ELEMENTWISE and e.outvars[0].aval.shape == var.aval.shape:
            same.update(e.outvars)
    return False


def _zeros_of(eqns: Sequence[JaxprEqn], gradient: Atom | None, leaf: Var) -> list[Var]:
    """The values of one number that a gradient begins with, of the shape of its leaf."""
    made_by = {v: e for e in eqns for v in e.outvars}
    found: list[Var] = []
    ahead, seen = [gradient], set[Var]()
    while ahead:
        v = ahead.pop()
        if not isinstance(v, Var) or v in seen or v not in made_by or v.aval.shape != leaf.aval.shape:
            continue
        seen.add(v)
        eqn = made_by[v]
        if eqn.primitive.name == "broadcast_in_dim":
            found.append(v)
        elif eqn.primitive.name in ("scatter-add", "dynamic_update_slice"):
            ahead.append(eqn.invars[0])
        elif eqn.primitive.name in ELEMENTWISE:
            ahead += eqn.invars
    return found


def _refusal(step: Cut, eqns: Sequence[JaxprEqn], flow: Flow, leaf: str, chosen: Collection[str]) -> str:
    """Why a leaf is no table; empty where it is one."""
    for i, done in flow.steps.items():
        rows = [x for a in eqns[i].invars if isinstance(x := flow.layout(a), RowAxis) and x.leaf == leaf]
        bound = [x for x in done.outs if isinstance(x, Whole) and leaf in x.leaves]
        if rows and bound:
            return bound[0].reason or f"{_said(eqns[i])} mixes its rows"
        if rows and done.reduce:
            return f"{_said(eqns[i])} reads all of its rows"
        if rows and done.bodies:
            return f"{_said(eqns[i])} reads it in each turn: look its rows up before"
    picks = [(eqns[i], s) for i, s in flow.steps.items() if _picks(s, leaf)]
    if not any(e.primitive.name in ("gather", "dynamic_slice") for e, _ in picks):
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
    others = {v for n, v in step.program.invars.items() if n in chosen}
    for e, s in picks:
        assert isinstance(s, RowPick)
        numbers = e.invars[s.numbers]
        seen = backward_slice(eqns, [numbers])[1]
        if seen & others:
            return f"the rows that {_said(e)} picks depend on rows of a table"
    return ""


def _picks(done: Step, leaf: str) -> bool:
    return isinstance(done, RowPick) and isinstance(done.operands[0], RowAxis) and done.operands[0].leaf == leaf


def _table(step: Cut, eqns: Sequence[JaxprEqn], flow: Flow, leaf: str) -> TableLookups:
    picks = [(eqns[i], s) for i, s in flow.steps.items() if isinstance(s, RowPick) and _picks(s, leaf)]
    ids = list(dict.fromkeys((e.invars[s.numbers], s.component) for e, s in picks if not _adds(e)))
    read = {a for a, _ in ids}
    ids += [x for x in dict.fromkeys((e.invars[s.numbers], s.component) for e, s in picks) if x[0] not in read]
    rows = step.program.inputs[leaf].shape[0]
    looked_up = [(e, s) for e, s in picks if not _adds(e)]
    size = sum(e.invars[s.numbers].aval.size // _entries(e.invars[s.numbers], s) for e, s in looked_up)
    return TableLookups(leaf, rows, tuple(picks), tuple(ids), max(1, min(rows, size)))


def _adds(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("scatter-add", "dynamic_update_slice")


def _entries(numbers: Atom, pick: RowPick) -> int:
    return 1 if pick.component is None else max(1, int(numbers.aval.shape[-1]))


def _said(eqn: JaxprEqn) -> str:
    line = line_of(eqn)
    operand = next((a for a in eqn.invars if not isinstance(a, Literal)), None)
    of = f" of {short_type(operand.aval)}" if operand is not None else ""
    return eqn.primitive.name + of + (f" ({line})" if line else "")


# -- what picks rows -------------------------------------------------------------------------------


def _gather(eqn: JaxprEqn, row: RowAxis) -> RowPick | None:
    numbers = eqn.params["dimension_numbers"]
    if row.axis not in numbers.start_index_map or eqn.params["slice_sizes"][row.axis] != 1 or row.width != 1:
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
    if eqn.params["slice_sizes"][row.axis] != 1 or eqn.invars[0].aval.shape[row.axis] == 1 or row.width != 1:
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
