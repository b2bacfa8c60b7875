"""Writer of a server's program: an optimizer's equations, restricted to the rows of the server.

A *block* is the part of a parameter's rows that one server stores. An equation on full parameters
becomes the same equation on the rows of a block. If the equation combines rows with a shared
operand, the program computes only the same rows of that operand (`dtrans.rows.parts`). For this,
the equations that compute the operand are sliced too, up to scalars, counters and random keys. So
the program contains no array of the full shape. If this is impossible, the program computes the
full operand and slices it. Equations in the bodies of loops and branches are restricted as well.

A `BlockRows` object, such as `RowRange`, describes the rows of a block.
`dtrans.parameter_server.tables.trainer_rows` has another implementation, for rows of several
parameters with given ids.
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
from dtrans.ir.dataflow import producers_of
from dtrans.rows.flow import Flow
from dtrans.rows.layout import SHARED, Layout, RowAxis, all_shared, rows_or_none
from dtrans.rows.parts import recipe_of
from dtrans.rows.row_buckets import RowBuckets
from dtrans.rows.rules import Step
from dtrans.rows.slices import Slice


class BlockRows(Protocol):
    """Interface of a block (the rows of a server): selects its rows from each value."""

    def of(self, row: RowAxis) -> Slice:
        """Return the slice that selects these rows of a value with layout `row`."""

    def inside(self, b: Builder) -> BlockRows:
        """Return the same rows for use in the body of a loop or branch that `b` builds.

        If the start of the rows is a value of the program, this method adds an input to the body.
        """

    def operands(self) -> Sequence[Atom]:
        """Return operands of a loop or branch for the inputs that `inside` added to its body."""


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of a parameter, as the block of one server."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def of(self, row: RowAxis) -> Slice:
        """Return the slice that selects these rows of a value with layout `row`."""
        return Slice(row.axis, self.start * row.width, self.rows * row.width)

    def inside(self, b: Builder) -> RowRange:
        """Return this range: it needs no inputs in the body of a loop or branch."""
        return self

    def operands(self) -> Sequence[Atom]:
        """Return (): a body needs no additional operands, because the range is constant."""
        return ()

    def numbers(self) -> np.ndarray:
        """Return the ids of these rows in increasing order."""
        return np.arange(self.start, self.stop)

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """Convert indices in this range to ids of rows."""
        return places + self.start

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Convert ids of rows to indices in this range."""
        return ids - self.start

    def among(self, ids: np.ndarray) -> slice:
        """Return the slice of sorted `ids` that selects the ids in this range."""
        return slice(*np.searchsorted(ids, (self.start, self.stop)).tolist())

    def parts_of(self, ids: Sequence[np.ndarray]) -> list[tuple[slice, np.ndarray]]:
        """Select this range's rows from several arrays of sorted row ids.

        Returns:
          For each array: the slice of its ids in the range, and the indices of these rows in the
            range.
        """
        return [(at := self.among(x), x[at] - self.start) for x in ids]

    @property
    def index(self) -> slice:
        """NumPy index that selects these rows of an array."""
        return slice(self.start, self.stop)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


RowSet = RowRange | RowBuckets  # rows of a block


class RowWriter:
    """Writer of an update's equations for one block of rows, e.g. rows 2 to 5 of `params/w`.

    A *shared* value, such as a learning rate, does not belong to rows; every server can compute it.

    Args:
      b: builder of the program.
      flow: layouts of the values, and how each equation runs on a block of rows.
      rows: rows of the block; None if the block has full parameters.
      producers: maps each value to the equation that computes it.
      read_block: (value that this writer has not computed) -> the block's rows of the value, or
        None for a shared value.
      outside: (shared value) -> the program's input with this value, or None if the writer must
        compute the value.
      special: optional function that writes some equations in its own way. Takes the writer, an
        equation and its step; returns the outputs of the equation, or None to leave the equation to
        the writer. It is also called inside loops and branches.

    Attributes:
      env: value with rows -> the block's rows of this value, once they are written.
      shared: shared value -> the full value in the new program, once it is written.
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
        self._parts: dict[tuple[Var, Slice], Atom] = {}  # slices of shared values
        self._types: dict[Any, Any] = {}

    def place(self, layout: Layout) -> dict[Var, Atom]:
        """Return the dict that stores written values with this layout: `env` or `shared`."""
        if isinstance(layout, RowAxis) or (self.rows is None and layout is not SHARED):
            return self.env
        return self.shared

    # -- operands --------------------------------------------------------------------------------

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        """Return an operand for the new program: its rows in the block, or the full operand.

        Args:
          atom: the operand in the old program.
          row: layout of the rows to read; None for the full operand.
        """
        if isinstance(atom, Literal):
            return atom
        value = self.env.get(atom)
        if value is None:
            value = self._read_block(atom)
        if value is not None:
            return value
        if row is None or self.rows is None:
            return self.read_full(atom)
        return self.part_of(atom, self.rows.of(row))

    def part_of(self, atom: Atom, part: Slice | None) -> Atom:
        """Return a slice of a shared value, or the full value if `part` is None."""
        if isinstance(atom, Literal) or part is None or part.is_all(atom.aval):
            return self.read_full(atom)
        if (atom, part) not in self._parts:
            eqn = self.producers.get(atom)
            recipe = None
            if eqn is not None and all_shared(map(self.flow.layout, eqn.invars)):
                recipe = recipe_of(eqn, eqn.outvars.index(atom), part)
            if recipe is None:
                self._parts[atom, part] = part.take_from(self.b, self.read_full(atom))
            else:
                slices = [self.part_of(a, p) for a, p in recipe.needs]
                self._parts[atom, part] = recipe.write(self.b, slices)
        return self._parts[atom, part]

    def read_full(self, atom: Atom) -> Atom:
        """Return a full shared value; write its equation if it is neither constant nor input."""
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

    def block_type(self, aval: Any, layout: Layout) -> Any:
        """Return the type of the block's rows of a value; `aval` is the type of the full value."""
        if self.rows is None or not isinstance(layout, RowAxis):
            return aval
        key = (aval.shape, aval.dtype, aval.weak_type, layout)
        if key not in self._types:
            self._types[key] = self.rows.of(layout).type_in(aval)
        return self._types[key]

    def emit(self, eqn: JaxprEqn, step: Step) -> list[Var]:
        """Write an equation for the rows of the block, as `step` describes; return its outputs."""
        if (outputs := self._special(self, eqn, step)) is not None:
            return outputs
        atoms = [self.read(a, row) for a, row in zip(eqn.invars, step.operands, strict=True)]
        types = [self.block_type(v.aval, x) for v, x in zip(eqn.outvars, step.outs, strict=True)]
        if self.rows is None:
            return self.b.copy(eqn, atoms, types)
        if step.bodies:
            new = list(map(self.rewrite, bodies(eqn), step.bodies, step.ends))
            return self.b.copy_with_bodies(eqn, new, atoms, types, self.rows.operands())
        params = step.params(types) if step.params else {}
        return self.b.copy(eqn, atoms, types, **params)

    def rewrite(self, jaxpr: ClosedJaxpr, flow: Flow, outs: Sequence[Layout]) -> ClosedJaxpr:
        """Rewrite the body of a loop or branch, so that it computes only the rows of the block.

        Args:
          jaxpr: the body.
          flow: layouts of its values.
          outs: layouts of its outputs.
        """
        inner = opened(jaxpr)
        b = Builder(jaxpr)
        rows = None if self.rows is None else self.rows.inside(b)
        producers = producers_of(inner.eqns)
        w = RowWriter(b, flow, rows, producers, special=self._special)
        for v in inner.invars:
            layout = flow.layout(v)
            w.place(layout)[v] = w.b.input(self.block_type(v.aval, layout))
        for i, eqn in enumerate(inner.eqns):
            step = flow.steps.get(i)
            if step is not None:
                for v, value in zip(eqn.outvars, w.emit(eqn, step), strict=True):
                    w.place(flow.layout(v))[v] = value
            elif eqn.effects:
                # An equation with an effect, such as a print, must run even if nothing reads its
                # output. Equations without an effect are written when another equation reads their
                # outputs.
                outputs = w.b.copy(eqn, list(map(w.read_full, eqn.invars)))
                w.shared.update(zip(eqn.outvars, outputs, strict=True))
        results = []
        for out, layout in zip(inner.outvars, outs, strict=True):
            results.append(w.read(out, rows_or_none(layout)))
        return w.b.build(results)
