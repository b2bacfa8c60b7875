"""Writer of equations for a block of rows.

An equation on full leaves becomes the same equation on a block: operands with rows are the block's
rows. If a shared operand meets rows, only these rows of it are computed (`dtrans.rows.parts`). The
request moves up through the producers until it reaches scalars, counters and keys, so that no array
of the full shape is computed. Values that need full operands are computed in full, then sliced.
Bodies of loops and branches are written in the same way.

One object names the rows of a block: `RowRange` for a known range, and others for rows of several
leaves by their ids (`dtrans.parameter_server.tables.trainer_rows`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrans._jax import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    opened,
)
from dtrans.ir.builder import Builder
from dtrans.rows.flow import Flow
from dtrans.rows.layout import SHARED, Layout, RowAxis
from dtrans.rows.parts import recipe_of
from dtrans.rows.row_buckets import RowBuckets
from dtrans.rows.rules import Step
from dtrans.rows.slices import Slice


class BlockRows(Protocol):
    """Rows of a block."""

    def of(self, row: RowAxis) -> Slice:
        """Return the slice of these rows along a value's axis; equal for equal arguments."""

    def inside(self, b: Builder) -> BlockRows:
        """Return the same rows for a body that `b` writes; its first inputs are `operands`."""

    def operands(self) -> Sequence[Atom]:
        """Return the values that a body needs to locate the rows."""


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of a leaf."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def of(self, row: RowAxis) -> Slice:
        """Return the slice of these rows along the axis of a value."""
        return Slice(row.axis, self.start * row.width, self.rows * row.width)

    def inside(self, b: Builder) -> RowRange:
        """Return the same rows."""
        return self

    def operands(self) -> Sequence[Atom]:
        """Return no values: the rows are known when programs are written."""
        return ()

    def numbers(self) -> np.ndarray:
        """Return the ids of these rows, increasing."""
        return np.arange(self.start, self.stop)

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """Return the ids of rows, from their positions in this range."""
        return places + self.start

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions in this range of rows, from their ids."""
        return ids - self.start

    def among(self, ids: np.ndarray) -> slice:
        """Return the slice of sorted ids that are in this range."""
        return slice(*np.searchsorted(ids, (self.start, self.stop)).tolist())

    @property
    def index(self) -> slice:
        """NumPy index that selects these rows of an array."""
        return slice(self.start, self.stop)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


RowSet = RowRange | RowBuckets  # rows of a part of a leaf


class RowWriter:
    """Writer of equations for one block of rows.

    Args:
      b: builder of the program.
      flow: result of the row analysis of the equations.
      rows: rows of the block; None if it has full leaves.
      producers: equation of each value, except shared values that only `outside` returns.
      read_block: returns a value of the block that this writer has not computed; None for a shared
        value.
      outside: returns a shared value from elsewhere; None for one to compute here.
      special: writes certain equations, here or in a body; returns None for all others.

    Attributes:
      env: values of the block.
      shared: shared values.
    """

    def __init__(
        self,
        b: Builder,
        flow: Flow,
        rows: BlockRows | None,
        producers: Mapping[Var, JaxprEqn],
        read_block: Callable[[Var], Atom | None] = lambda var: None,
        outside: Callable[[Var], Atom | None] = lambda var: None,
        special: Callable[[RowWriter, JaxprEqn, Step], list[Var] | None] = lambda w, eqn, step: (
            None
        ),
    ) -> None:
        self.b = b
        self.flow = flow
        self.rows = rows
        self.producers = producers
        self._read_block, self._outside, self._special = read_block, outside, special
        self.env: dict[Var, Atom] = {}
        self.shared: dict[Var, Atom] = {}
        self._parts: dict[tuple[Var, Slice], Atom] = {}  # rows of shared values
        self._types: dict[Any, Any] = {}

    def place(self, layout: Layout) -> dict[Var, Atom]:
        """Return the table of values in which a body stores a value with this layout."""
        if isinstance(layout, RowAxis) or (self.rows is None and layout is not SHARED):
            return self.env
        return self.shared

    # -- operands --------------------------------------------------------------------------------

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        """Return an operand, as rows or in full."""
        if isinstance(atom, Literal):
            return atom
        value = self.env.get(atom)
        value = self._read_block(atom) if value is None else value
        if value is not None:
            return value
        return self.part_of(atom, None if row is None or self.rows is None else self.rows.of(row))

    def part_of(self, atom: Atom, part: Slice | None) -> Atom:
        """Return a slice of a shared value, computed from as little as possible; None is the
        full one."""
        if isinstance(atom, Literal) or part is None or part.is_all(atom.aval):
            return self.read_full(atom)
        if (atom, part) not in self._parts:
            eqn = self.producers.get(atom)
            is_shared = eqn is not None and all(self.flow.layout(a) is SHARED for a in eqn.invars)
            recipe = None
            if eqn is not None and is_shared:
                recipe = recipe_of(eqn, eqn.outvars.index(atom), part)
            if recipe is None:
                self._parts[atom, part] = part.cut(self.b, self.read_full(atom))
            else:
                self._parts[atom, part] = recipe.write(
                    self.b, [self.part_of(a, p) for a, p in recipe.needs]
                )
        return self._parts[atom, part]

    def read_full(self, atom: Atom) -> Atom:
        """Return a full shared value: a constant, computed here, or from elsewhere."""
        if isinstance(atom, Literal) or self.b.is_constant(atom):
            return atom
        if atom not in self.shared:
            outer = self._outside(atom)
            if outer is not None:
                self.shared[atom] = outer
            else:
                eqn = self.producers[atom]
                outputs = self.b.copy(eqn, [self.read_full(a) for a in eqn.invars])
                self.shared.update(zip(eqn.outvars, outputs, strict=True))
        return self.shared[atom]

    # -- equations -------------------------------------------------------------------------------

    def cut(self, aval: Any, layout: Layout) -> Any:
        """Return the type of a value in this block."""
        if self.rows is None or not isinstance(layout, RowAxis):
            return aval
        key = (aval.shape, aval.dtype, aval.weak_type, layout)
        if key not in self._types:
            self._types[key] = self.rows.of(layout).of(aval)
        return self._types[key]

    def emit(self, eqn: JaxprEqn, step: Step) -> list[Var]:
        """Write an equation on this block."""
        if (outputs := self._special(self, eqn, step)) is not None:
            return outputs
        atoms = [self.read(a, row) for a, row in zip(eqn.invars, step.operands, strict=True)]
        types = [self.cut(v.aval, x) for v, x in zip(eqn.outvars, step.outs, strict=True)]
        if self.rows is None:
            return self.b.copy(eqn, atoms, types)
        if step.bodies:
            new = list(map(self._body, bodies(eqn), step.bodies, step.ends))
            return self.b.copy_with_bodies(eqn, new, atoms, types, self.rows.operands())
        return self.b.copy(eqn, atoms, types, **(step.params(types) if step.params else {}))

    def _body(self, jaxpr: ClosedJaxpr, flow: Flow, outs: Sequence[Layout]) -> ClosedJaxpr:
        """Return a body on this block, with these layouts of its outputs."""
        inner = opened(jaxpr)
        b = Builder(jaxpr)
        rows = None if self.rows is None else self.rows.inside(b)
        w = RowWriter(
            b, flow, rows, {v: e for e in inner.eqns for v in e.outvars}, special=self._special
        )
        for v in inner.invars:
            layout = flow.layout(v)
            w.place(layout)[v] = w.b.input(self.cut(v.aval, layout))
        for i, eqn in enumerate(inner.eqns):
            step = flow.steps.get(i)
            if step is not None:
                for v, value in zip(eqn.outvars, w.emit(eqn, step), strict=True):
                    w.place(flow.layout(v))[v] = value
            elif eqn.effects:  # a print; others are computed once they are read
                w.shared.update(
                    zip(
                        eqn.outvars,
                        w.b.copy(eqn, [w.read_full(a) for a in eqn.invars]),
                        strict=True,
                    )
                )
        return w.b.build(
            [
                w.read(a, x if isinstance(x, RowAxis) else None)
                for a, x in zip(inner.outvars, outs, strict=True)
            ]
        )
