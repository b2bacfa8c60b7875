"""The optimize half on a rank's slices: one program for all ranks, which know only when they run where their rows are.

It is the update of `dtrans.rows.writer` with a start that is computed, `trainer_index * rows`:

    equations on rows        on the rank's rows, as they are
    shared values            the rank's rows of them are cut out where they meet rows, as late as possible
    reductions over rows     of the rank's rows that are no padding, then `all_reduce` over the axis; all reductions
                             that wait for the same others are one equation
    everything else          the same on every rank, with leaves that stay whole

Padding may hold anything after an update (0/0 is not a number): it never meets other rows, because nothing but a
reduction mixes rows, and reductions do not see it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from dtrans.ir.array_fns import rows_from, times
from dtrans.ir.builder import Builder
from dtrans.ir.inline import eliminate_dead
from dtrans.ir.program import DIST, OPTIMIZE
from dtrans.ops import all_reduce_p, identity_of, trainer_index_p
from dtrans.rows.flow import Flow
from dtrans.rows.layout import RowAxis
from dtrans.rows.rules import Step
from dtrans.rows.writer import RowRange, RowWriter
from dtrans.step.cut import OptimizeHalf
from dtrans.zero.choose_slices import Sliced, Slices


class SliceWriter(RowWriter):
    """Writes equations on a rank's rows of one leaf.

    Args:
      jaxpr: that they are of.
      flow: what the row analysis found in it.
      sliced: how the leaf is cut.
      axis_name: the axis that the ranks are on.
    """

    def __init__(
        self,
        jaxpr: ClosedJaxpr,
        flow: Flow,
        sliced: Sliced,
        axis_name: str,
        made_by: Mapping[Var, JaxprEqn] | None = None,
    ) -> None:
        super().__init__(jaxpr, flow, RowRange(0, sliced.part), made_by)
        self.sliced = sliced
        self.axis_name = axis_name
        self._start: dict[int, Atom] = {}

    def start(self, row: RowAxis) -> Atom:
        """Where the rank's rows begin, in a value that has them."""
        if row.width not in self._start:
            (index,) = self.b.bind(trainer_index_p, over=(self.axis_name,))
            self._start[row.width] = self.b.call(times(self.sliced.part * row.width), index)[0]
        return self._start[row.width]

    def rows_of_constant(self, var: Var, row: RowAxis) -> Atom:
        return self.rows_of_whole(self.b.constant(self.b.constant_value(var)), row)

    def counted(self, dtype: Any, shape: tuple[int, ...], row: RowAxis) -> Atom:
        return self.b.call(_counted(np.dtype(dtype), shape, row.axis), self.start(row))[0]

    def rows_of_whole(self, value: Atom, row: RowAxis) -> Atom:
        s = self.sliced
        return self.b.call(rows_from(row.axis, s.part * row.width, s.padded * row.width), value, self.start(row))[0]

    def inside(self, jaxpr: ClosedJaxpr, flow: Flow) -> RowWriter:
        return SliceWriter(jaxpr, flow, self.sliced, self.axis_name)

    def without_padding(self, atoms: list[Atom], step: Step) -> list[Atom]:
        """The operands of a reduction, with what changes nothing in the place of padding."""
        if self.sliced.padded == self.sliced.size:
            return atoms
        assert step.reduce is not None
        made: list[Atom] = []
        for a, row in zip(atoms, step.operands, strict=True):
            if row is None:
                made.append(a)
                continue
            (nothing,) = self.b.call(identity_of(step.reduce, a.aval.shape, a.aval.dtype))
            made += self.b.call(_kept(row.axis, self.sliced.size * row.width), a, self.start(row), nothing)
        return made


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
    writers: dict[str, SliceWriter] = {}
    wholes: dict[Var, Atom] = {}
    for leaf, sliced in slices.leaves.items():
        w = writers[leaf] = SliceWriter(half.jaxpr, flow, sliced, axis_name, made_by)
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
                (part,) = b.copy(eqn, w.without_padding(atoms, step), [v.aval for v in eqn.outvars])
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


# small functions, each traced once for a type


@functools.cache
def _counted(dtype: Any, shape: tuple[int, ...], axis: int) -> Callable[[jax.Array], jax.Array]:
    return lambda start: (jax.lax.broadcasted_iota(jnp.int32, shape, axis) + start).astype(dtype)


@functools.cache
def _kept(axis: int, size: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Entries before `size`, counted from a start; others as in `nothing`."""

    def fn(x: jax.Array, start: jax.Array, nothing: jax.Array) -> jax.Array:
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + start < size, x, nothing)

    return fn
