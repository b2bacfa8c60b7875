"""Stage 3 of ZeRO: ranks store slices of parameters, and gather a parameter when they need it.

    x = after w.slice, h        delays the gather until h is computed
    w = all_gather x
    y = dot_general h w         the first equation that reads the gathered w

A gathered parameter needs memory, so a rank keeps it only for a *live range*: the equations from
its first reader to its last (`dtrans.zero.live_ranges`). A parameter has two live ranges, in the
forward and in the backward pass. So the rank gathers it twice. Without `after`, XLA would merge the
two gathers, or start all gathers at once. With `prefetch=k`, a rank gathers a parameter k live
ranges before it is needed.

Some values need no gather, because ranks can compute them on slices (`dtrans.zero.slice_analysis`).
A penalty such as sum(w ** 2) is computed on slices, and then summed over ranks. A loop over layers
takes slices of the stacked layers, and gathers one layer in each iteration. A backward loop also
reduce-scatters the gradients of each layer (`dtrans.zero.scattered_values`). So no rank stores all
gathered layers, or all full gradients. With a prefetch, the loop gathers the first parameter of the
next layer while it computes the current layer (`dtrans.zero.prefetch`).

Source: stage 3 of ZeRO (arXiv 1910.02054). In Paddle, `_shard_parameter` of
auto_parallel_sharding.py broadcasts a full variable to each operator that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import (
    Atom,
    BodyIndices,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    body_indices,
)
from dtrans.ir.array_fns import converted
from dtrans.ir.dataflow import avals
from dtrans.ir.selection import values_at
from dtrans.ops import after_p, all_gather_p
from dtrans.rows.layout import RowAxis
from dtrans.zero.live_ranges import LiveRange, LiveRanges, is_cast
from dtrans.zero.prefetch import prefetch_layers
from dtrans.zero.slice_writer import SliceWriter


# (function that gathers one layer, index of the stack of layers among the scanned operands)
Prefetch = tuple[Callable[[Any], Any], int]


class Gatherer(SliceWriter):
    """Writer of a rank's forward and backward pass, which adds all-gathers of sliced parameters.

    The writer copies equations, and puts the all-gather of a parameter before the first equation
    that reads the full parameter. Call `begin` once, then `emit` with each equation in order, then
    `result` for each output. The *live range* of a parameter is the range of equations for which
    the parameter stays gathered.

    Attributes:
      slice_results: the results to return as slices.
      live_ranges: the live ranges of all parameters.
    """

    slice_results: Collection[Var]
    live_ranges: LiveRanges

    def begin(self, ends: Sequence[tuple[int, Atom]], slice_results: Collection[Var]) -> None:
        """Choose the equations during which each parameter stays gathered; call this before `emit`.

        Args:
          ends: the outputs of the program, as pairs (index of the equation that computes the
            output, variable).
          slice_results: the outputs that ranks return as slices, not in full.
        """
        self.slice_results = slice_results
        full_ends = []
        for i, a in ends:
            if not isinstance(a, Var) or a not in slice_results:
                full_ends.append((i, a))
        self.read_full(a for _, a in full_ends)
        self.live_ranges = LiveRanges(
            self.eqns, self.roots, self.reads, self.roles, full_ends, once=self.how.once
        )
        self._gathered_leaves: dict[int, Atom] = {}  # id of a live range -> gathered leaf
        # values that are already written. The keys are (value, ids of live ranges) for full values,
        # and (slice, dtype) for cast slices.
        self._derived: dict[tuple[Any, ...], Atom] = {}
        self._emitted = 0  # number of equations passed to `emit` so far
        self._at = 0  # index of the equation that is being written
        self._next = 0  # index of the next live range whose leaf will be gathered
        self._begun = 0  # number of live ranges that have begun
        # for each live range that has begun, a value that is computed just before it
        self._anchors: list[Atom | None] = []
        self._last: Atom | None = None  # latest value that a gather may wait for

    # -- equations ---------------------------------------------------------------------------------

    def emit(self, eqn: JaxprEqn) -> None:
        """Write the all-gathers that the next equation needs, then the equation itself.

        If ranks can compute an equation from their slices, the method does not write it yet:
        `slice_of` writes it when another equation reads its result.

        Args:
          eqn: the next equation of the step; its calls are not inlined yet.
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
        """Write an equation that needs full operands, after the all-gathers of these operands.

        For a loop or branch with a body that reads slices, the body is rewritten, too.
        """
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
        """Return the new value of an output: in full, or as this rank's slice.

        `slice_results` lists the outputs to return as slices.

        Args:
          atom: the result, one of the values in `ends`.
          maker: the index of the equation that computes the result. The caller has already passed
            this equation to `emit`.
        """
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
        windows = [id(self.live_ranges.window(leaf, self._at)) for leaf in leaves]
        key = (atom, *windows)
        if key not in self._derived:
            self._derived[key] = self._write_full(atom)
        return self._derived[key]

    def _write_full(self, atom: Var) -> Atom:
        """Return a gathered parameter, or the result of a cheap function of gathered parameters.

        The result of a cheap function, such as a cast, is not stored: its equations are written
        again for each reader.
        """
        if atom not in self.live_ranges.derived:
            return self._gathered_leaves[id(self.live_ranges.window(atom, self._at))]
        eqn = self.live_ranges.derived[atom]
        operand = eqn.invars[0]
        if is_cast(eqn) and isinstance(operand, Var) and operand not in self.live_ranges.derived:
            window = self.live_ranges.window(operand, self._at)
            if window.dtype == atom.aval.dtype:
                return self._gathered_leaves[id(window)]
        return self.b.copy(eqn, [self.read(a, None) for a in eqn.invars], [atom.aval])[0]

    # -- gathers -----------------------------------------------------------------------------------

    def _gather_for(self, i: int, eqn: JaxprEqn | None) -> None:
        """Write the all-gathers that must come before equation `i`.

        The gathered parameters are those that equation `i` is the first to read, and those to
        prefetch.

        Args:
          i: the index of the equation.
          eqn: the equation; None for an output of the program.
        """
        self._at = i
        windows = self.live_ranges.windows
        while self._begun < len(windows) and windows[self._begun].first <= i:
            self._anchors.append(self._anchor(eqn))
            self._begun += 1
        end = self._begun
        if self._begun:  # a prefetch waits for the same value as an earlier gather
            end += self.how.prefetch
        while self._next < min(len(windows), end):
            is_available = lambda window: self.is_available(window.leaf, i)
            group = _segment(windows[self._next :], self.how.segment, is_available)
            if not group:
                break
            before = self._next - self.how.prefetch
            anchor = self._anchors[max(0, before)] if self._anchors else self._last
            # prefetch=0 saves memory: wait until the last full gradient is scattered, and so freed
            if self.how.prefetch == 0 and self.last_scattered is not None:
                anchor, self.last_scattered = self.last_scattered, None
            with self.communicating():
                self._gather(group, anchor)
            self._next += len(group)

    def _anchor(self, eqn: JaxprEqn | None) -> Atom | None:
        """Return the value that the next all-gather waits for.

        Without such a value, XLA could start all gathers at the beginning, and use much memory. The
        value is the last full float operand of `eqn`. If `eqn` has none, it is the latest full
        float value that was computed.
        """
        for a in reversed(eqn.invars if eqn else ()):
            if isinstance(a, Var) and a not in self.roots and self._can_be_waited_for(a):
                return a
        return self._last

    def _can_be_waited_for(self, v: Var) -> bool:
        """Return True if `v` is a full float array, so that a gather can wait for it."""
        exists = v not in self.env and v not in self.rows and not self.b.is_constant(v)
        return exists and bool(v.aval.size) and bool(jnp.issubdtype(v.aval.dtype, jnp.floating))

    def _gather(self, windows: Sequence[LiveRange], anchor: Atom | None) -> None:
        """Write all-gathers of several parameters: one for each type and sliced dimension.

        Args:
          windows: for each parameter, the equations for which it stays gathered (its live range).
          anchor: the value that the gathers wait for; None for no delay.
        """
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
            over, size = self.shards.over, self.shards.count
            gathered = b.bind(all_gather_p, *sent, name=names[0], over=over, size=size, axis=axis)
            for window, name, x in zip(group, names, gathered, strict=True):
                b.labels[x] = f"{name}.gathered"
                rows = window.leaf.aval.shape[axis]
                self._gathered_leaves[id(window)] = b.trim(x, axis, rows)

    def _cast(self, x: Atom, dtype: Any) -> Atom:
        """Return a slice cast to `dtype`; later calls reuse the cast."""
        key = (x, jnp.dtype(dtype))
        if key not in self._derived:
            self._derived[key] = self.b.call(converted(jnp.dtype(dtype)), x)[0]
        return self._derived[key]

    # -- loops -------------------------------------------------------------------------------------

    def _write_bodies(self, i: int) -> None:
        """Write a loop, a branch or `jax.checkpoint` with bodies that read or return slices."""
        eqn, entered = self.eqns[i], self.entered[i]
        indices, wanted = body_indices(eqn), entered.wanted
        atoms: list[Atom] = []
        for k, a in enumerate(eqn.invars):
            if k in entered.passed:
                atoms.append(self.read(a, entered.passed[k]))
            elif indices.carried.get(k) in wanted:
                atoms.append(self.wanted_slice(a, wanted[indices.carried[k]]))
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

        written = [body.write_body(sliced, indices) for body in entered.bodies]
        (body, prefetch), *_ = written
        if prefetch is None:
            loop = self.b.with_bodies(eqn, [body for body, _ in written], atoms, outvars)
            self.b.keep(loop, loop.invars)
        else:
            gather, stack = prefetch
            types = avals(atoms)
            self.b.keep(prefetch_layers(eqn, body, gather, stack, types, outvars), atoms)

    def write_body(
        self, sliced: Collection[int], indices: BodyIndices
    ) -> tuple[ClosedJaxpr, Prefetch | None]:
        """Write the body of the loop for which this writer was created.

        Args:
          sliced: indices of the outputs to return as slices.
          indices: maps inputs and outputs of the body to operands and outputs of its equation.

        Returns:
          A pair (new body, prefetch). `prefetch` has the function that gathers a layer, and the
          position of the stack of layers. It is None if the loop prefetches no layer.
        """
        outvars = self.inner.outvars
        # a body may return one variable twice: as a slice and as a full value
        full_ends = []
        for k, a in enumerate(outvars):
            if k not in sliced or not isinstance(a, Var):
                full_ends.append((self.position_of(a), a))
        self.begin(full_ends, ())
        prefetch = None
        if self.how.prefetch and not self.how.once:
            prefetch = self._prefetch_first(values_at(self.inner.invars, indices.slices))
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
        """Replace the first gather of a layer in a loop's body by an input, the gathered layer.

        The loop then gathers this layer one iteration earlier, while it computes the previous
        layer.

        Args:
          layers: the body's inputs that are one layer of a stack.

        Returns:
          The function that gathers the layer, and the position of its stack. None if the first
          parameter that the body gathers is not in `layers`; the body is then unchanged.
        """
        windows, shards = self.live_ranges.windows, self.shards
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


def _segment(
    windows: Sequence[LiveRange], largest: float, is_available: Callable[[LiveRange], bool]
) -> list[LiveRange]:
    """Return the next parameters to gather together, in one all-gather of limited size.

    The live range of a parameter is the range of equations for which it stays gathered. All
    returned live ranges are in the same pass, forward or backward. The result is empty if the slice
    of the first parameter cannot be computed yet.

    Args:
      windows: the live ranges of parameters that are not gathered yet.
      largest: the limit in bytes for the total size of the parameters in one all-gather. A larger
        parameter is gathered alone.
      is_available: function that returns True if the slice of a live range's parameter can be
        computed.
    """
    total = 0
    found: list[LiveRange] = []
    for window in windows:
        total += window.leaf.aval.size * jnp.dtype(window.dtype).itemsize
        if found and (total > largest or window.role != found[0].role):
            break
        if not is_available(window):
            break
        found.append(window)
    return found
