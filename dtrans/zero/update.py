"""The optimize half on a rank's slices: one program for all ranks, which know only when they run where their rows are.

It is the update of `dtrans.rows.writer` with a start that is computed, `trainer_index * rows`:

    equations on rows        on the rank's rows, as they are
    shared values            the rank's rows of them are made where they meet rows
    reductions over rows     of the rank's rows that are no padding, then `all_reduce` over the axis; all reductions
                             that wait for the same others are one equation
    everything else          the same on every rank, with leaves that stay whole

Padding may hold anything after an update (0/0 is not a number): it never meets other rows, because nothing but a
reduction mixes rows, and reductions do not see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.engine.layout import Shards
from dtrans.engine.pieces import Pieces
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import DIST, OPTIMIZE
from dtrans.ops import all_reduce_p
from dtrans.rows.flow import Flow
from dtrans.rows.layout import RowAxis
from dtrans.rows.rules import Step
from dtrans.rows.slices import Slice
from dtrans.rows.writer import RowWriter
from dtrans.step.cut import OptimizeHalf
from dtrans.zero.choose_slices import Sliced, Slices


class RankRows:
    """A rank's rows of one leaf (`dtrans.rows.writer.BlockRows`).

    Args:
      b: writes the program, or the body, in which they are wanted.
      sliced: how the leaf is cut.
      axis_name: the axis that the ranks are on.
    """

    def __init__(self, b: Builder, sliced: Sliced, axis_name: str) -> None:
        self.sliced = sliced
        self.axis_name = axis_name
        self._pieces = Pieces(b, Shards(sliced.degree, (axis_name,)))

    def of(self, row: RowAxis) -> Slice:
        return self._pieces.of(self.sliced.size * row.width, row)

    def inside(self, b: Builder) -> RankRows:
        return RankRows(b, self.sliced, self.axis_name)

    def without_padding(self, atoms: Sequence[Atom], step: Step) -> list[Atom]:
        """The operands of a reduction, with what changes nothing in the place of padding."""
        op = step.reduce or ""
        return [a if row is None else self._pieces.without_padding(a, self.sliced.size * row.width, row, op)
                for a, row in zip(atoms, step.operands, strict=True)]  # fmt: skip


def sliced_half(slices: Slices, axis_name: str) -> OptimizeHalf:
    """The optimize half of a rank: gradients, parameters and state of the leaves that are cut are slices.

    Args:
      slices: what is cut.
      axis_name: of the axis that the ranks are on.
    """
    half, flow = slices.analysis.half, slices.analysis.flow
    eqns = half.eqns
    made_by = {v: e for e in eqns for v in e.outvars}
    b = Builder(half.jaxpr)
    writers: dict[str, RowWriter] = {}
    rows = {leaf: RankRows(b, sliced, axis_name) for leaf, sliced in slices.leaves.items()}
    wholes: dict[Var, Atom] = {}
    for leaf in slices.leaves:
        w = writers[leaf] = RowWriter(half.jaxpr, flow, rows[leaf], made_by)
        w.b, w.wholes = b, wholes  # all write one program, and share what is no leaf's
    b.role = OPTIMIZE
    layouts = {n: flow.layout(v) for n, v in slices.analysis.inputs.items()}
    for n, var in slices.analysis.inputs.items():
        row = layouts[n]
        if isinstance(row, RowAxis) and row.leaf in writers:
            writers[row.leaf].env[var] = b.input(writers[row.leaf].cut(var.aval, row))
        else:
            wholes[var] = b.input(var.aval)

    for level in _levels(eqns, flow, slices.leaves):
        waiting: dict[str, list[tuple[Var, Atom]]] = {}
        for i in level:
            eqn, step = eqns[i], flow.steps.get(i)
            home = _leaf_of(step, slices.leaves)
            if home is None or step is None:
                atoms = [_whole(a, wholes) for a in eqn.invars]
                wholes.update(zip(eqn.outvars, b.copy(eqn, atoms, [v.aval for v in eqn.outvars]), strict=True))
            elif step.reduce:
                w = writers[home]
                atoms = [w.read(a, row) for a, row in zip(eqn.invars, step.operands, strict=True)]
                (part,) = b.copy(eqn, rows[home].without_padding(atoms, step), [v.aval for v in eqn.outvars])
                waiting.setdefault(step.reduce, []).append((eqn.outvars[0], part))
            else:
                w = writers[home]
                w.env.update(zip(eqn.outvars, w.emit(eqn, step), strict=True))
        b.role = DIST
        for op, parts in waiting.items():
            made = b.bind(all_reduce_p, *(p for _, p in parts), op=op, name="optimizer", owners=(), over=(axis_name,))
            wholes.update((v, x) for (v, _), x in zip(parts, made, strict=True))
        b.role = OPTIMIZE

    outs: list[Atom] = []
    for n, out in slices.analysis.outputs.items():
        row = layouts[n] if n in layouts else RowAxis(n, slices.analysis.axes.get(n, 0))
        if isinstance(row, RowAxis) and row.leaf in writers:
            outs.append(writers[row.leaf].read(out, row))
        else:
            outs.append(_whole(out, wholes))
    return OptimizeHalf(eliminate_dead(b.build(outs)), half.in_names, half.out_names)


def _whole(atom: Atom, wholes: Mapping[Var, Atom]) -> Atom:
    return atom if isinstance(atom, Literal) else wholes.get(atom, atom)  # constants are themselves


def _leaf_of(step: Step | None, leaves: Mapping[str, Sliced]) -> str | None:
    """The leaf on whose slices an equation is carried out."""
    if step is None:
        return None
    found = {x.leaf for x in (*step.operands, *step.outs) if isinstance(x, RowAxis) and x.leaf in leaves}
    assert len(found) <= 1, found
    return found.pop() if found else None


def _levels(eqns: list[JaxprEqn], flow: Flow, leaves: Mapping[str, Sliced]) -> list[list[int]]:
    """Positions of equations, by how many reductions are between them and what is given."""
    at: dict[Var, int] = {}
    found: dict[int, list[int]] = {}
    for i, eqn in enumerate(eqns):
        level = max((at.get(a, 0) for a in eqn.invars if isinstance(a, Var)), default=0)
        found.setdefault(level, []).append(i)
        step = flow.steps.get(i)
        reduces = step is not None and step.reduce and _leaf_of(step, leaves) is not None
        at.update(dict.fromkeys(eqn.outvars, level + bool(reduces)))
    return [found[level] for level in sorted(found)]
