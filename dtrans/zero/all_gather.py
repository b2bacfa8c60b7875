"""Stage 3: parameters are slices, gathered where they are read.

    x = after w.slice, h        once the values before it are there
    w = all_gather x
    y = dot_general h w         the first use of a window (`dtrans.zero.live_ranges`)

The gathered leaf is read in its window and nowhere else; the backward pass gathers again. Gradients
were taken before this rewrite, so that only the equations themselves keep a gathered leaf as a
residual. `after` keeps XLA from merging two gathers of one slice, and from beginning all of them at
once. With a prefetch of k, a leaf is gathered while the equations k windows before it are computed.

Values that can be computed as slices are (`dtrans.zero.slice_writer`): a loop over layers scans
over slices of their stack, or picks one, gathers it in its body, and hands on its results as
slices; a penalty is a sum over slices. Gradients of layers are scattered in the loop that computes
them (`dtrans.zero.scatter_flow`): neither the stack of gathered layers, nor that of whole
gradients, ever exists. With a prefetch, the first leaf of the next layer is gathered while one is
computed (`dtrans.zero.prefetch`).

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
from dtrans.ops import after_p, all_gather_p
from dtrans.rows.layout import RowAxis
from dtrans.zero.live_ranges import LiveRange, LiveRanges, is_cast
from dtrans.zero.prefetch import prefetched
from dtrans.zero.slice_writer import SliceWriter


# how a layer is gathered, and the scanned operand that it is a slice of
Ahead = tuple[Callable[[Any], Any], int]


class Gatherer(SliceWriter):
    """Writes equations that read leaves, and the gathers of these.

    `begin` comes first, then `emit` with each equation in order.

    Attributes:
      taken: results that are read as slices.
      uses: windows in which leaves are gathered.
    """

    taken: Collection[Var]
    uses: LiveRanges

    def begin(self, ends: Sequence[tuple[int, Atom]], taken: Collection[Var]) -> None:
        """Plan the windows.

        Args:
          ends: values that are read beside those that equations read, each with the position of its
            equation.
          taken: those of them that are read as slices.
        """
        self.taken = taken
        ends = [(i, a) for i, a in ends if not (isinstance(a, Var) and a in taken)]
        self.read_whole(a for _, a in ends)
        self.uses = LiveRanges(
            self.eqns, self.roots, self.reads, self.roles, ends, once=self.how.once
        )
        self._wide: dict[int, Atom] = {}  # by the identity of windows
        self._wholes: dict[tuple[Any, ...], Atom] = {}
        self._emitted = 0  # how many equations have come
        self._at = 0  # position of the equation that reads values
        self._next = 0  # the window that is gathered next
        self._begun = 0  # how many windows have begun
        self._anchors: list[Atom | None] = []
        self._last: Atom | None = None  # the last value that a gather may wait for

    # -- equations ---------------------------------------------------------------------------------

    def emit(self, eqn: JaxprEqn) -> None:
        """Write the next equation; values with slices are written where they are read.

        Args:
          eqn: the equation as the program has it, calls in its bodies included.
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
        """Write an equation that reads whole values."""
        self._gather_for(i, eqn)
        if i in self.entered:
            self._write_bodies(i)
        else:
            self.b.keep(eqn, [self.read(a, None) for a in eqn.invars])
        for v in eqn.outvars:
            if v in self.scattering.rows and v not in self.env:
                self.env[v] = self.scattered(v, self.scattering.rows[v])
            if self._can_be_waited_for(v):
                self._last = v

    def result(self, atom: Atom, maker: int) -> Atom:
        """Return a value that is wanted, once the equation at `maker` is written."""
        if isinstance(atom, Var) and atom in self.taken:
            return self.slice_of(atom)
        if isinstance(atom, Var) and atom in self.roots:
            self._gather_for(maker, None)
        self._at = maker
        return self.read(atom, None)

    # -- whole values ------------------------------------------------------------------------------

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        if row is not None or isinstance(atom, Literal) or atom not in self.roots:
            return super().read(atom, row)
        windows = (
            id(self.uses.window(leaf, self._at)) for leaf in sorted(self.roots[atom], key=id)
        )
        key = (atom, *windows)
        if key not in self._wholes:
            self._wholes[key] = self._whole(atom)
        return self._wholes[key]

    def _whole(self, atom: Var) -> Atom:
        """Return a value computed from leaves that are gathered."""
        if atom not in self.uses.derived:
            return self._wide[id(self.uses.window(atom, self._at))]
        eqn = self.uses.derived[atom]
        operand = eqn.invars[0]
        if is_cast(eqn) and isinstance(operand, Var) and operand not in self.uses.derived:
            window = self.uses.window(operand, self._at)
            if window.dtype == atom.aval.dtype:
                return self._wide[id(window)]
        return self.b.copy(eqn, [self.read(a, None) for a in eqn.invars], [atom.aval])[0]

    def _gather_for(self, i: int, eqn: JaxprEqn | None) -> None:
        """Gather the leaves whose windows begin at a position, and those that are to be there ahead
        of time."""
        self._at = i
        windows = self.uses.windows
        while self._begun < len(windows) and windows[self._begun].first <= i:
            self._anchors.append(self._anchor(eqn))
            self._begun += 1
        while self._next < min(
            len(windows), self._begun + (self.how.prefetch if self._begun else 0)
        ):
            together = self._segment(self._next, i)
            if not together:
                break
            before = self._next - self.how.prefetch
            anchor = self._anchors[max(0, before)] if self._anchors else self._last
            if self.how.prefetch == 0 and self.late is not None:
                anchor, self.late = self.late, None
            with self.communicating():
                self._gather(together, anchor)
            self._next += len(together)

    def _anchor(self, eqn: JaxprEqn | None) -> Atom | None:
        """Return an operand of an equation, no leaf, that is there just before it."""
        for a in reversed(eqn.invars if eqn else ()):
            if isinstance(a, Var) and a not in self.roots and self._can_be_waited_for(a):
                return a
        return self._last

    def _can_be_waited_for(self, v: Var) -> bool:
        """Return True if a value of the step is there under its name, and is a number."""
        exists = v not in self.env and v not in self.rows and not self.b.is_constant(v)
        return exists and bool(v.aval.size) and bool(jnp.issubdtype(v.aval.dtype, jnp.floating))

    def _segment(self, start: int, i: int) -> list[LiveRange]:
        """Return a window, and those gathered with it, before equation `i`; none if it is too
        early."""
        total = 0
        found: list[LiveRange] = []
        for window in self.uses.windows[start:]:
            total += window.leaf.aval.size * jnp.dtype(window.dtype).itemsize
            if found and (total > self.how.segment or window.role != found[0].role):
                break
            if not self.is_there(window.leaf, i):
                break
            found.append(window)
        return found

    def _gather(self, windows: Sequence[LiveRange], anchor: Atom | None) -> None:
        """Write the gathers of windows, one for each type and dimension."""
        b = self.b
        kinds: dict[tuple[Any, int], list[LiveRange]] = {}
        for window in windows:
            kinds.setdefault((window.dtype, self.rows[window.leaf].axis), []).append(window)
        for (dtype, axis), group in kinds.items():
            sent: list[Atom] = []
            for window in group:
                x = self.slice_of(window.leaf)
                if dtype != window.leaf.aval.dtype:
                    x = self._cast(x, dtype)
                if anchor is not None:
                    (x,) = b.bind(after_p, x, anchor)
                sent.append(x)
            names = [self.rows[window.leaf].leaf for window in group]
            wide = b.bind(all_gather_p, *sent, name=names[0], **self._among(), axis=axis)
            for window, name, x in zip(group, names, wide, strict=True):
                b.labels[x] = f"{name}.gathered"
                self._wide[id(window)] = self._without_end(x, axis, window.leaf.aval.shape[axis])

    def _cast(self, x: Atom, dtype: Any) -> Atom:
        """Return a slice in another type, cast once."""
        key = (x, jnp.dtype(dtype))
        if key not in self._wholes:
            self._wholes[key] = self.b.call(converted(jnp.dtype(dtype)), x)[0]
        return self._wholes[key]

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
        for k, v in enumerate(eqn.outvars):
            row = self.scattering.rows[v] if k in wanted else self.rows.get(v)
            outvars.append(v if row is None else Var(self._of_rank(v, row)))
            if k in wanted:
                self.env[v] = self.late = outvars[-1]
            elif row is not None:
                self._values[v, self.layouts[v]] = outvars[-1]

        handed_on = {k for k, v in enumerate(eqn.outvars) if k not in wanted and v in self.rows}
        written = [body.written(handed_on, wires) for body in entered.bodies]
        (body, ahead), *_ = written
        if ahead is None:
            loop = self.b.with_bodies(eqn, [body for body, _ in written], atoms, outvars)
            self.b.keep(loop, loop.invars)
        else:
            gather, stack = ahead
            self.b.keep(
                prefetched(eqn, body, gather, stack, [a.aval for a in atoms], outvars), atoms
            )

    def written(
        self, handed_on: Collection[int], wires: Wiring
    ) -> tuple[ClosedJaxpr, Ahead | None]:
        """Write all equations of a body.

        Args:
          handed_on: outputs that are slices.
          wires: of the equation of the body.

        Returns:
          The body, and how its first layer is gathered ahead of time.
        """
        ends = [(self.position_of(a), a) for a in self.inner.outvars]
        # one value may be handed on as a slice in one output, and whole in another
        slices = {k: a for k in handed_on if isinstance(a := self.inner.outvars[k], Var)}
        self.begin([end for k, end in enumerate(ends) if k not in slices], ())
        ahead = None
        if self.how.prefetch and not self.how.once:
            ahead = self._first_ahead([self.inner.invars[k] for k in wires.slices])
        for eqn in self.eqns:
            self.emit(eqn)
        outs = [
            self.slice_of(slices[k]) if k in slices else self.result(a, place)
            for k, (place, a) in enumerate(ends)
        ]
        return self.b.build(outs), ahead

    def _first_ahead(self, parts: Sequence[Var]) -> Ahead | None:
        """Pass the value of the first window into the body as an input, if that is one of the
        scanned layers."""
        windows, shards = self.uses.windows, self.shards
        if not windows or windows[0].leaf not in self.given.slices or windows[0].leaf not in parts:
            return None
        leaf, dtype, row = windows[0].leaf, windows[0].dtype, self.rows[windows[0].leaf]
        self._wide[id(windows[0])] = self.b.input(leaf.aval.update(dtype=jnp.dtype(dtype)))
        self._next = 1

        def gather(x: Any) -> Any:
            (whole,) = all_gather_p.bind(
                x.astype(dtype), name=row.leaf, over=shards.over, size=shards.count, axis=row.axis
            )
            return jax.lax.slice_in_dim(whole, 0, leaf.aval.shape[row.axis], axis=row.axis)

        return gather, parts.index(leaf)
