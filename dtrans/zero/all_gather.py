"""Stage 3: parameters are slices, and gathered where equations read them.

    x = after w.slice, h        waits for the values before it
    w = all_gather x
    y = dot_general h w         the first use of a window (`dtrans.zero.live_ranges`)

Equations read the gathered leaf in its window only; the backward pass gathers again. Gradients were
taken before this rewrite, so that only the equations themselves keep a gathered leaf as a residual.
`after` keeps XLA from merging two gathers of one slice, and from starting all of them at once. With
a prefetch of k, a leaf is gathered while the equations k windows before it are computed.

Values that can be computed as slices are (`dtrans.zero.slice_analysis`). A loop over layers scans
over slices of their stack, or indexes it, gathers each layer in its body, and returns its results
as slices. A penalty is a sum over slices. The loop that computes gradients of layers scatters them
(`dtrans.zero.scatter_flow`). So the stack of gathered layers never exists, nor that of full
gradients. With a prefetch, the loop gathers the first leaf of the next layer while it computes one
(`dtrans.zero.prefetch`).

Source: stage 3 of ZeRO (arXiv 1910.02054); in Paddle, `_shard_parameter` of
auto_parallel_sharding.py, which broadcasts whole variables for each operator that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    Wiring,
    wiring,
)
from dtrans.ir.array_fns import converted
from dtrans.ir.dataflow import avals
from dtrans.ir.selection import values_at
from dtrans.ops import after_p, all_gather_p
from dtrans.rows.layout import RowAxis
from dtrans.zero.live_ranges import LiveRange, LiveRanges, is_cast
from dtrans.zero.prefetch import prefetch_layers
from dtrans.zero.slice_writer import SliceWriter


# the gather of a layer, and the position of its stack among the scanned operands
Prefetch = tuple[Callable[[Any], Any], int]


class Gatherer(SliceWriter):
    """Writer of equations that read leaves, and of the gathers of leaves.

    `begin` comes first, then `emit` with each equation in order.

    Attributes:
      slice_results: results that are read as slices.
      uses: the windows in which leaves are gathered.
    """

    slice_results: Collection[Var]
    uses: LiveRanges

    def begin(self, ends: Sequence[tuple[int, Atom]], slice_results: Collection[Var]) -> None:
        """Plan the windows.

        Args:
          ends: values that are read after the equations, each with the position of its equation.
          slice_results: those of them that are read as slices.
        """
        self.slice_results = slice_results
        full_ends = []
        for i, a in ends:
            if not isinstance(a, Var) or a not in slice_results:
                full_ends.append((i, a))
        self.read_full(a for _, a in full_ends)
        self.uses = LiveRanges(
            self.eqns, self.roots, self.reads, self.roles, full_ends, once=self.how.once
        )
        self._gathered_leaves: dict[int, Atom] = {}  # by the identity of windows
        self._derived: dict[tuple[Any, ...], Atom] = {}  # by value and windows; casts by type
        self._emitted = 0  # the number of emitted equations
        self._at = 0  # the position of the equation that reads values
        self._next = 0  # the window that is gathered next
        self._begun = 0  # the number of windows that have begun
        self._anchors: list[Atom | None] = []  # for each begun window, a value just before it
        self._last: Atom | None = None  # the last value that a gather may wait for

    # -- equations ---------------------------------------------------------------------------------

    def emit(self, eqn: JaxprEqn) -> None:
        """Write the next equation; the first read of a value with slices writes it.

        Args:
          eqn: the equation of the program, with calls in its bodies.
        """
        i, self._emitted = self._emitted, self._emitted + 1
        if i in self.scattering.steps:
            if self.roots_of(self.reads.get(i, ())):
                self._gather_for(i, eqn)
            self.write_on_rows(i)
        elif i not in self.ways:
            self._write(i, eqn)
        elif self.ways[i].reduce:
            self.write_reduction(i)

    def _write(self, i: int, eqn: JaxprEqn) -> None:
        """Write an equation that reads full values."""
        self._gather_for(i, eqn)
        if i in self.entered:
            self._write_bodies(i)
        else:
            self.b.keep(eqn, [self.read(a, None) for a in eqn.invars])
        for v in eqn.outvars:
            if v in self.scattering.rows and v not in self.env:
                self.env[v] = self.scatter_sum(v, self.scattering.rows[v])
            if self._can_be_waited_for(v):
                self._last = v

    def result(self, atom: Atom, maker: int) -> Atom:
        """Return a result, after the equation at `maker` is written."""
        if isinstance(atom, Var) and atom in self.slice_results:
            return self.slice_of(atom)
        if isinstance(atom, Var) and atom in self.roots:
            self._gather_for(maker, None)
        self._at = maker
        return self.read(atom, None)

    # -- full values -------------------------------------------------------------------------------

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        if row is not None or isinstance(atom, Literal) or atom not in self.roots:
            return super().read(atom, row)
        leaves = sorted(self.roots[atom], key=id)
        windows = [id(self.uses.window(leaf, self._at)) for leaf in leaves]
        key = (atom, *windows)
        if key not in self._derived:
            self._derived[key] = self._write_full(atom)
        return self._derived[key]

    def _write_full(self, atom: Var) -> Atom:
        """Return a value computed from leaves that are gathered."""
        if atom not in self.uses.derived:
            return self._gathered_leaves[id(self.uses.window(atom, self._at))]
        eqn = self.uses.derived[atom]
        operand = eqn.invars[0]
        if is_cast(eqn) and isinstance(operand, Var) and operand not in self.uses.derived:
            window = self.uses.window(operand, self._at)
            if window.dtype == atom.aval.dtype:
                return self._gathered_leaves[id(window)]
        return self.b.copy(eqn, [self.read(a, None) for a in eqn.invars], [atom.aval])[0]

    # -- gathers -----------------------------------------------------------------------------------

    def _gather_for(self, i: int, eqn: JaxprEqn | None) -> None:
        """Gather the leaves whose windows begin at a position, and those to prefetch there."""
        self._at = i
        windows = self.uses.windows
        while self._begun < len(windows) and windows[self._begun].first <= i:
            self._anchors.append(self._anchor(eqn))
            self._begun += 1
        # prefetching starts with the first window, which has the first anchor
        end = self._begun + (self.how.prefetch if self._begun else 0)
        while self._next < min(len(windows), end):
            group = self._segment(self._next, i)
            if not group:
                break
            before = self._next - self.how.prefetch
            anchor = self._anchors[max(0, before)] if self._anchors else self._last
            # without prefetching, memory is scarce: the full gradient is freed before the gather
            if self.how.prefetch == 0 and self.last_scattered is not None:
                anchor, self.last_scattered = self.last_scattered, None
            with self.communicating():
                self._gather(group, anchor)
            self._next += len(group)

    def _anchor(self, eqn: JaxprEqn | None) -> Atom | None:
        """Return an operand of an equation, not a leaf, that is computed just before it."""
        for a in reversed(eqn.invars if eqn else ()):
            if isinstance(a, Var) and a not in self.roots and self._can_be_waited_for(a):
                return a
        return self._last

    def _can_be_waited_for(self, v: Var) -> bool:
        """Return True if a value of the step exists under its name, and has floats."""
        exists = v not in self.env and v not in self.rows and not self.b.is_constant(v)
        return exists and bool(v.aval.size) and bool(jnp.issubdtype(v.aval.dtype, jnp.floating))

    def _segment(self, start: int, i: int) -> list[LiveRange]:
        """Return a window and those gathered with it before equation `i`; none if it is too early.

        They have one role, and at most `how.segment` bytes.
        """
        total = 0
        found: list[LiveRange] = []
        for window in self.uses.windows[start:]:
            total += window.leaf.aval.size * jnp.dtype(window.dtype).itemsize
            if found and (total > self.how.segment or window.role != found[0].role):
                break
            if not self.is_available(window.leaf, i):
                break
            found.append(window)
        return found

    def _gather(self, windows: Sequence[LiveRange], anchor: Atom | None) -> None:
        """Write the gathers of windows, one for each type and dimension."""
        b = self.b
        groups: dict[tuple[Any, int], list[LiveRange]] = {}
        for window in windows:
            groups.setdefault((window.dtype, self.rows[window.leaf].axis), []).append(window)
        for (dtype, axis), group in groups.items():
            sent: list[Atom] = []
            for window in group:
                x = self.slice_of(window.leaf)
                if dtype != window.leaf.aval.dtype:
                    x = self._cast(x, dtype)
                if anchor is not None:
                    (x,) = b.bind(after_p, x, anchor)
                sent.append(x)
            names = [self.rows[window.leaf].leaf for window in group]
            gathered = b.bind(all_gather_p, *sent, name=names[0], **self._among(), axis=axis)
            for window, name, x in zip(group, names, gathered, strict=True):
                b.labels[x] = f"{name}.gathered"
                size = window.leaf.aval.shape[axis]
                self._gathered_leaves[id(window)] = self._without_end(x, axis, size)

    def _cast(self, x: Atom, dtype: Any) -> Atom:
        """Return a slice in another type, cast once."""
        key = (x, jnp.dtype(dtype))
        if key not in self._derived:
            self._derived[key] = self.b.call(converted(jnp.dtype(dtype)), x)[0]
        return self._derived[key]

    # -- loops -------------------------------------------------------------------------------------

    def _write_bodies(self, i: int) -> None:
        """Write a loop, or another equation with bodies, on slices."""
        eqn, entered = self.eqns[i], self.entered[i]
        wires, wanted = wiring(eqn), entered.wanted
        atoms: list[Atom] = []
        for k, a in enumerate(eqn.invars):
            if k in entered.passed:
                atoms.append(self.read(a, entered.passed[k]))
            elif wires.carried.get(k) in wanted:
                atoms.append(self.wanted_slice(a, wanted[wires.carried[k]]))
            else:
                atoms.append(self.read(a, None))

        outvars: list[Var] = []
        sliced: set[int] = set()
        for k, v in enumerate(eqn.outvars):
            row = self.scattering.rows[v] if k in wanted else self.rows.get(v)
            outvars.append(v if row is None else Var(self._rank_type(v, row)))
            if k in wanted:
                self.env[v] = self.last_scattered = outvars[-1]
            elif row is not None:
                self._values[v, self.layouts[v]] = outvars[-1]
                sliced.add(k)

        written = [body.write_body(sliced, wires) for body in entered.bodies]
        (body, prefetch), *_ = written
        if prefetch is None:
            loop = self.b.with_bodies(eqn, [body for body, _ in written], atoms, outvars)
            self.b.keep(loop, loop.invars)
        else:
            gather, stack = prefetch
            types = avals(atoms)
            self.b.keep(prefetch_layers(eqn, body, gather, stack, types, outvars), atoms)

    def write_body(
        self, sliced: Collection[int], wires: Wiring
    ) -> tuple[ClosedJaxpr, Prefetch | None]:
        """Write all equations of a body.

        Args:
          sliced: outputs that are slices.
          wires: the connections of the body with its equation.

        Returns:
          The body, and the gather of its first layer if that is prefetched.
        """
        outvars = self.inner.outvars
        # one value may be a slice in one output, and full in another
        full_ends = []
        for k, a in enumerate(outvars):
            if k not in sliced or not isinstance(a, Var):
                full_ends.append((self.position_of(a), a))
        self.begin(full_ends, ())
        prefetch = None
        if self.how.prefetch and not self.how.once:
            prefetch = self._prefetch_first(values_at(self.inner.invars, wires.slices))
        for eqn in self.eqns:
            self.emit(eqn)
        outs: list[Atom] = []
        for k, a in enumerate(outvars):
            if k in sliced and isinstance(a, Var):
                outs.append(self.slice_of(a))
            else:
                outs.append(self.result(a, self.position_of(a)))
        return self.b.build(outs), prefetch

    def _prefetch_first(self, layers: Sequence[Var]) -> Prefetch | None:
        """Add an input for the gathered leaf of the first window, if that is a scanned layer."""
        windows, shards = self.uses.windows, self.shards
        if not windows or windows[0].leaf not in self.slice_inputs.slices:
            return None
        leaf, dtype = windows[0].leaf, windows[0].dtype
        if leaf not in layers:
            return None
        row = self.rows[leaf]
        self._gathered_leaves[id(windows[0])] = self.b.input(
            leaf.aval.update(dtype=jnp.dtype(dtype))
        )
        self._next = 1

        def gather(x: Any) -> Any:
            (layer,) = all_gather_p.bind(
                x.astype(dtype), name=row.leaf, over=shards.over, size=shards.count, axis=row.axis
            )
            return jax.lax.slice_in_dim(layer, 0, leaf.aval.shape[row.axis], axis=row.axis)

        return gather, layers.index(leaf)
