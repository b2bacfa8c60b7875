"""Stage 3: parameters are slices, gathered where they are read.

    x = after w.slice, h        once what is computed before is there
    w = all_gather x
    y = dot_general h w         the first use of a window (`dtrans.zero.live_ranges`)

The gathered leaf is read in its window and nowhere else; the backward pass gathers again. Gradients were taken before
this rewrite, so nothing keeps a gathered leaf as a residual but the equations themselves; `after` keeps XLA from
making two gathers of one slice one, and from beginning all of them at once. With a prefetch of k, a leaf is gathered
while what is k windows before it is computed.

What can be had as slices is made of slices (`dtrans.zero.slice_flow`): a loop over layers takes a stack of them apart,
or picks one, gathers it in its body, and hands on what it makes of it as a slice; a penalty is a sum over slices.
Gradients of layers are scattered in the loop that makes them (`dtrans.zero.scatter_flow`): neither the stack of
gathered layers, nor that of whole gradients, is ever made. With a prefetch, the first leaf of the next layer is
gathered while one is computed (`dtrans.zero.prefetch`).

Source: stage 3 of ZeRO (arXiv 1910.02054); in Paddle, `_shard_parameter` of auto_parallel_sharding.py, which broadcasts
whole variables for each operator that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, linear_operands
from dtrans.ir.array_fns import converted, padded, times
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import is_zero_array
from dtrans.ir.program import DIST
from dtrans.ops import LAYERS, after_p, all_gather_p, all_reduce_p, reduce_scatter_p
from dtrans.rows.flow import Flow
from dtrans.rows.layout import RowAxis
from dtrans.rows.writer import RowWriter
from dtrans.zero.gathering import Gathering, Given
from dtrans.zero.layer_scan import written_loop
from dtrans.zero.live_ranges import LiveRange, LiveRanges, is_cast
from dtrans.zero.scatter_flow import scatter_flow
from dtrans.zero.slice_flow import flat_bodies, slice_flow
from dtrans.zero.update import RankRows


class Gatherer:
    """Writes equations that read leaves, where there are slices of them.

    Args:
      b: that they are written with.
      like: the jaxpr that they are of.
      eqns: in order.
      roles: of each.
      given: what is there, and wanted, as slices.
      ends: values that are wanted beside those that equations read, with the position of what makes each.
    """

    def __init__(
        self,
        b: Builder,
        like: ClosedJaxpr,
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        given: Given,
        how: Gathering,
        ends: Sequence[tuple[int, Atom]] = (),
    ) -> None:
        self.b = b
        self.like = like
        self.eqns = flat_bodies(eqns)
        self.roles = roles
        self.given = given
        self.how = how
        self.env: dict[Var, Atom] = dict(given.summed)  # what stands for values of the step that are made otherwise
        wanted = [a for _, a in ends]
        self.scattering = s = scatter_flow(self.eqns, given.wanted, given.local, wanted, given.summed)
        self.flow = slice_flow(self.eqns, given.rows, given.local, (), s.operands(self.eqns), in_loops=not how.once)
        self._taken = {v for v, row in given.taken.items() if self.flow.rows.get(v) == row}
        ends = [(i, a) for i, a in ends if not (isinstance(a, Var) and a in self._taken)]
        self.flow.read_whole(a for _, a in ends)
        self.uses = LiveRanges(self.flow, roles, ends, once=how.once)
        self._position = {id(e): i for i, e in enumerate(eqns)}
        self._maker = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
        self.same_on_all = {v: self.eqns[i] for v, i in self._maker.items() if v not in given.local}
        self._slices: dict[Var, Atom] = dict(given.slices)
        self._writers: dict[str, RowWriter] = {}
        self._gathered: dict[int, Atom] = {}  # by the identity of windows
        self._made: dict[tuple[Any, ...], Atom] = {}
        self._next = 0  # the window that is gathered next
        self._begun = 0  # how many windows have begun
        self._anchors: list[Var | None] = []
        self._last: Var | None = None  # what was made last that may be waited for
        self.late: Var | None = None  # a scattered gradient, if one was made since

    # -- what the writer of a half calls -----------------------------------------------------------

    def emit(self, eqn: JaxprEqn) -> None:
        """Write one equation; what has slices is written where it is read."""
        i = self._position[id(eqn)]
        if i in self.flow.steps and not self.flow.steps[i].reduce:
            return
        if i in self.scattering.steps:
            self._emit_on_rows(i)
            return
        if i in self.flow.reductions:
            self._emit_reduction(i)
            return
        self._gather_for(i, eqn)
        if i in self.flow.passed or i in self.scattering.loops:
            self._emit_loop(i)
        else:
            self.b.keep(eqn, [self.read(a, i) for a in eqn.invars])
        for v in eqn.outvars:
            if v in self.scattering.rows and v not in self.env:
                self.env[v] = self.scattered(v, self.scattering.rows[v])
            if self._can_be_waited_for(v):
                self._last = v

    def read(self, atom: Atom, at: int) -> Atom:
        """A value, for the equation at a position; what is made of leaves is made of the gathered ones."""
        if isinstance(atom, Literal) or atom not in self.uses.roots:
            return self.env.get(atom, atom) if isinstance(atom, Var) else atom
        windows = tuple(id(self.uses.window(leaf, at)) for leaf in sorted(self.uses.roots[atom], key=id))
        key = (atom, *windows)
        if key not in self._made:
            self._made[key] = self._read(atom, at)
        return self._made[key]

    def given_already(self, whole: Atom) -> None:
        """Take what the first window needs as gathered."""
        self._gathered[id(self.uses.windows[0])] = whole
        self._next = 1

    def result(self, atom: Atom, maker: int) -> Atom:
        """A value that is wanted, once the equation at `maker` is written."""
        if isinstance(atom, Var) and atom in self._taken:
            return self.slice_of(atom)
        if isinstance(atom, Var) and atom in self.uses.roots:
            self._gather_for(maker, None)
        return self.read(atom, maker)

    # -- slices ------------------------------------------------------------------------------------

    def slice_of(self, var: Var) -> Atom:
        """The slice of a value that has one."""
        if var not in self._slices:
            i = self._maker[var]
            (self._slices[var],) = self._on(self.flow.rows[var]).emit(self.eqns[i], self.flow.steps[i])
        return self._slices[var]

    def _is_there(self, var: Var, i: int) -> bool:
        """Whether a slice can be made before equation `i`."""
        if var in self._slices or var not in self._maker:
            return True
        at = self._maker[var]
        if at not in self.flow.steps:
            return var not in self.flow.rows and at < i
        return all(self._is_there(a, i) for a in self.eqns[at].invars if isinstance(a, Var))

    def handed_on(self, var: Var, made: Atom) -> None:
        """A loop made the slice of a value."""
        self._slices[var] = made

    def _on(self, row: RowAxis) -> RowWriter:
        """Return the writer of equations on slices of a leaf."""
        if row.leaf not in self._writers:
            rank = RankRows(self.b, self.how.leaves[row.leaf], self.how.axis_name)
            own: Callable[[Var], Atom | None] = lambda v: self.slice_of(v) if v in self.flow.rows else None
            outside: Callable[[Var], Atom] = lambda v: self.env.get(v, v)
            writer = RowWriter(self.b, Flow({**self.flow.rows}), rank, self.same_on_all, own, outside)
            self._writers[row.leaf] = writer
        return self._writers[row.leaf]

    def _emit_reduction(self, i: int) -> None:
        """A reduction over slices, and over ranks."""
        eqn, step, b = self.eqns[i], self.flow.steps[i], self.b
        assert step.reduce is not None
        w = self._on(next(row for row in step.operands if row is not None))
        atoms = [w.read(a, row) for a, row in zip(eqn.invars, step.operands, strict=True)]
        assert isinstance(w.rows, RankRows)
        (part,) = b.copy(eqn, w.rows.without_padding(atoms, step), [eqn.outvars[0].aval])
        role, b.role = b.role, DIST
        (self.env[eqn.outvars[0]],) = b.bind(
            all_reduce_p, part, op=step.reduce, name="slices", owners=(), over=(self.how.axis_name,)
        )
        b.role = role

    # -- gradients ---------------------------------------------------------------------------------

    def scattered(self, var: Var, row: RowAxis) -> Atom:
        """A rank's slice of the sum of what all ranks have of a gradient."""
        b, s, grad, own = self.b, self.how.cut(row), self.env.get(var, var), var.aval.dtype
        dtype = self.how.dtypes.get(row.leaf, own)
        role, b.role = b.role, DIST
        if own != dtype:
            (grad,) = b.call(converted(jnp.dtype(dtype)), grad)
        (whole,) = b.call(padded(s.axis, s.padded), grad)
        (made,) = b.bind(reduce_scatter_p, whole, name=LAYERS, over=(self.how.axis_name,), size=s.degree, axis=s.axis)
        b.role = role
        self.late = made
        return made if own == dtype else b.call(converted(jnp.dtype(own)), made)[0]

    def wanted_slice(self, atom: Atom, row: RowAxis) -> Atom:
        """The slice of what is a term of a gradient: of what all ranks have, as often as there are ranks."""
        if isinstance(atom, Var) and atom in self.scattering.rows:
            return self.env[atom]
        if isinstance(atom, Var) and atom in self.flow.local:
            return self.scattered(atom, row)
        slice_ = self._on(row).read(atom, row)
        return slice_ if is_zero_array(atom, self.same_on_all) else self.b.call(times(self.how.degree), slice_)[0]

    def _emit_on_rows(self, i: int) -> None:
        """An equation that is linear in gradients, on slices of these."""
        eqn, step = self.eqns[i], self.scattering.steps[i]
        (row,) = step.outs
        assert isinstance(row, RowAxis)
        terms = {k for k, a in enumerate(eqn.invars) if isinstance(a, Var) and a in self.flow.local}
        together = next(ks for ks in linear_operands(eqn) if terms <= set(ks))
        w = self._on(row)
        atoms = [
            self.wanted_slice(a, r) if r is not None and k in together else w.read(a, r)
            for k, (a, r) in enumerate(zip(eqn.invars, step.operands, strict=True))
        ]
        types = [w.cut(v.aval, row) for v in eqn.outvars]
        (self.env[eqn.outvars[0]],) = self.b.copy(eqn, atoms, types, **(step.params(types) if step.params else {}))

    # -- gathers -----------------------------------------------------------------------------------

    def _read(self, atom: Var, at: int) -> Atom:
        if atom not in self.uses.derived:
            return self._gathered[id(self.uses.window(atom, at))]
        eqn = self.uses.derived[atom]
        operand = eqn.invars[0]
        if is_cast(eqn) and operand not in self.uses.derived:
            window = self.uses.window(operand, at)  # type: ignore[arg-type]
            if window.dtype == atom.aval.dtype:
                return self._gathered[id(window)]
        return self.b.copy(eqn, [self.read(a, at) for a in eqn.invars], [atom.aval])[0]

    def _gather_for(self, i: int, eqn: JaxprEqn | None) -> None:
        """Gather the leaves whose windows begin at a position, and those that are to be there ahead of time."""
        windows = self.uses.windows
        while self._begun < len(windows) and windows[self._begun].first <= i:
            self._anchors.append(self._anchor(eqn))
            self._begun += 1
        while self._next < min(len(windows), self._begun + (self.how.prefetch if self._begun else 0)):
            together = self._segment(self._next, i)
            if not together:
                break
            before = self._next - self.how.prefetch
            anchor = self._anchors[max(0, before)] if self._anchors else self._last
            if self.how.prefetch == 0 and self.late is not None:
                anchor, self.late = self.late, None
            self._gather(together, anchor)
            self._next += len(together)

    def _anchor(self, eqn: JaxprEqn | None) -> Var | None:
        """What an equation reads beside leaves, and is there just before it."""
        for a in reversed(eqn.invars if eqn else ()):
            if isinstance(a, Var) and a not in self.uses.roots and self._can_be_waited_for(a):
                return a
        return self._last

    def _can_be_waited_for(self, v: Var) -> bool:
        """Whether a value of the step is there under its name, and is a number."""
        is_made = v not in self.env and v not in self.flow.rows and not self.b.is_constant(v)
        return is_made and bool(v.aval.size) and bool(jnp.issubdtype(v.aval.dtype, jnp.floating))

    def _segment(self, start: int, i: int) -> list[LiveRange]:
        """A window, and those behind it that are gathered with it, before equation `i`: none, where it is too early."""
        windows, total = self.uses.windows, 0
        found: list[LiveRange] = []
        for w in windows[start:]:
            total += w.leaf.aval.size * jnp.dtype(w.dtype).itemsize
            if found and (total > self.how.segment or w.role != found[0].role):
                break
            if not self._is_there(w.leaf, i):
                break
            found.append(w)
        return found

    def _gather(self, windows: Sequence[LiveRange], anchor: Var | None) -> None:
        b, role = self.b, self.b.role
        b.role = DIST
        kinds: dict[tuple[Any, int], list[LiveRange]] = {}
        for w in windows:
            kinds.setdefault((w.dtype, self.flow.rows[w.leaf].axis), []).append(w)
        for (dtype, axis), group in kinds.items():
            sent: list[Atom] = []
            for w in group:
                x = self.slice_of(w.leaf)
                if dtype != w.leaf.aval.dtype:
                    x = self._cast(x, dtype)
                if anchor is not None:
                    (x,) = b.bind(after_p, x, anchor)
                sent.append(x)
            names = [self.flow.rows[w.leaf].leaf for w in group]
            made = b.bind(
                all_gather_p, *sent, name=names[0], over=(self.how.axis_name,), size=self.how.degree, axis=axis
            )
            for w, name, x in zip(group, names, made, strict=True):
                s = self.how.cut(self.flow.rows[w.leaf])
                b.labels[x] = f"{name}.gathered"
                self._gathered[id(w)] = x if s.padded == s.size else b.part(x, s.axis, 0, s.size)
        b.role = role

    def _cast(self, x: Atom, dtype: Any) -> Atom:
        """A slice in another type, made once."""
        key = (x, jnp.dtype(dtype))
        if key not in self._made:
            self._made[key] = self.b.call(converted(jnp.dtype(dtype)), x)[0]
        return self._made[key]

    # -- loops -------------------------------------------------------------------------------------

    def _emit_loop(self, i: int) -> None:
        """Write a loop that is given slices, or makes some."""
        self.b.keep(*written_loop(self, i))
