"""Writing equations for a block of rows.

An equation on whole leaves becomes the same equation on the rows of a block: operands with rows are
those of the block, and of a shared operand that meets rows these rows are made
(`dtrans.rows.parts`): what is wanted moves up through the equations that make it until it reaches
scalars, counters and keys, so that no array of the full shape is made where there are some of its
rows. Only what needs its whole operands is made whole and then sliced. Bodies of loops and branches
are written in the same way.

One value says which rows a block has: `RowRange` where that is known, and others where a block has
rows of several leaves by their numbers (`dtrans.parameter_server.tables.trainer_rows`).
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
    """Which rows a block has."""

    def of(self, row: RowAxis) -> Slice:
        """Where they are along the axis of a value that has them: the same answer to the same
        question."""

    def inside(self, b: Builder) -> BlockRows:
        """Return the same rows in a body, which `b` has begun to write; its first inputs are
        `operands`."""

    def operands(self) -> Sequence[Atom]:
        """Return the values that a body needs to find them."""


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of a leaf."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start

    def of(self, row: RowAxis) -> Slice:
        """Where these rows are along the axis of a value that has them."""
        return Slice(row.axis, self.start * row.width, self.rows * row.width)

    def inside(self, b: Builder) -> RowRange:
        """Return the same."""
        return self

    def operands(self) -> Sequence[Atom]:
        """Return nothing: they are known when programs are written."""
        return ()

    def numbers(self) -> np.ndarray:
        """The numbers of these rows in the leaf, increasing."""
        return np.arange(self.start, self.stop)

    def in_leaf(self, places: np.ndarray) -> np.ndarray:
        """The numbers in the leaf of rows at these places among them."""
        return places + self.start

    def local(self, ids: np.ndarray) -> np.ndarray:
        """Where rows of these are among them, by their numbers in the leaf."""
        return ids - self.start

    def among(self, ids: np.ndarray) -> slice:
        """Where in sorted numbers those of these rows are."""
        return slice(*np.searchsorted(ids, (self.start, self.stop)).tolist())

    @property
    def index(self) -> slice:
        """What picks these rows of an array."""
        return slice(self.start, self.stop)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


RowSet = RowRange | RowBuckets  # which rows of a leaf a part has


class RowWriter:
    """Writer of equations for one block of rows.

    Args:
      b: what it writes with.
      flow: result of the row analysis of the equations.
      rows: rows of the block; None where it has whole leaves.
      made_by: the equations, by what they make. Without those of shared values that come from
        `outside` alone.
      own: returns a value that the block has, and this writer has not made; None for a shared
        value.
      outside: returns a shared value that comes from elsewhere; None for one to be made here.
      special: writes certain equations, here or in a body; returns None for all others.

    Attributes:
      env: values of the block's own.
      wholes: shared values.
    """

    def __init__(
        self,
        b: Builder,
        flow: Flow,
        rows: BlockRows | None,
        made_by: Mapping[Var, JaxprEqn],
        own: Callable[[Var], Atom | None] = lambda var: None,
        outside: Callable[[Var], Atom | None] = lambda var: None,
        special: Callable[[RowWriter, JaxprEqn, Step], list[Var] | None] = lambda w, eqn, step: (
            None
        ),
    ) -> None:
        self.b = b
        self.flow = flow
        self.rows = rows
        self.made_by = made_by
        self._own, self._outside, self._special = own, outside, special
        self.env: dict[Var, Atom] = {}
        self.wholes: dict[Var, Atom] = {}
        self._parts: dict[tuple[Var, Slice], Atom] = {}  # rows of shared values
        self._types: dict[Any, Any] = {}

    def place(self, layout: Layout) -> dict[Var, Atom]:
        """Return where a value of a body is kept: beside rows of a block, everything without rows
        is shared."""
        return (
            self.env
            if isinstance(layout, RowAxis) or (self.rows is None and layout is not SHARED)
            else self.wholes
        )

    # -- operands --------------------------------------------------------------------------------

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        """An operand, as rows or whole."""
        if isinstance(atom, Literal):
            return atom
        own = self.env.get(atom)
        own = self._own(atom) if own is None else own
        if own is not None:
            return own
        return self.part_of(atom, None if row is None or self.rows is None else self.rows.of(row))

    def part_of(self, atom: Atom, part: Slice | None) -> Atom:
        """A part of a shared value, made with as little as possible of the rest; or the whole."""
        if isinstance(atom, Literal) or part is None or part.is_all(atom.aval):
            return self.whole(atom)
        if (atom, part) not in self._parts:
            eqn = self.made_by.get(atom)
            shared = eqn is not None and all(self.flow.layout(a) is SHARED for a in eqn.invars)
            recipe = (
                recipe_of(eqn, eqn.outvars.index(atom), part)
                if eqn is not None and shared
                else None
            )
            if recipe is None:
                self._parts[atom, part] = part.cut(self.b, self.whole(atom))
            else:
                self._parts[atom, part] = recipe.write(
                    self.b, [self.part_of(a, p) for a, p in recipe.needs]
                )
        return self._parts[atom, part]

    def whole(self, atom: Atom) -> Atom:
        """A shared value as it is: a constant of the program, made here, or from elsewhere."""
        if isinstance(atom, Literal) or self.b.is_constant(atom):
            return atom
        if atom not in self.wholes:
            given = self._outside(atom)
            if given is not None:
                self.wholes[atom] = given
            else:
                eqn = self.made_by[atom]
                made = self.b.copy(eqn, [self.whole(a) for a in eqn.invars])
                self.wholes.update(zip(eqn.outvars, made, strict=True))
        return self.wholes[atom]

    # -- equations -------------------------------------------------------------------------------

    def cut(self, aval: Any, layout: Layout) -> Any:
        """The type of a value in this block."""
        if self.rows is None or not isinstance(layout, RowAxis):
            return aval
        key = (aval.shape, aval.dtype, aval.weak_type, layout)
        if key not in self._types:
            self._types[key] = self.rows.of(layout).of(aval)
        return self._types[key]

    def emit(self, eqn: JaxprEqn, step: Step) -> list[Var]:
        """Write an equation with rows, on this block."""
        if (made := self._special(self, eqn, step)) is not None:
            return made
        atoms = [self.read(a, row) for a, row in zip(eqn.invars, step.operands, strict=True)]
        types = [self.cut(v.aval, x) for v, x in zip(eqn.outvars, step.outs, strict=True)]
        if self.rows is None:
            return self.b.copy(eqn, atoms, types)
        if step.bodies:
            new = list(map(self._body, bodies(eqn), step.bodies, step.ends))
            return self.b.copy_with_bodies(eqn, new, atoms, types, self.rows.operands())
        return self.b.copy(eqn, atoms, types, **(step.params(types) if step.params else {}))

    def _body(self, jaxpr: ClosedJaxpr, flow: Flow, outs: Sequence[Layout]) -> ClosedJaxpr:
        """Return a body on this block, its outputs with the given layouts."""
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
                for v, made in zip(eqn.outvars, w.emit(eqn, step), strict=True):
                    w.place(flow.layout(v))[v] = made
            elif eqn.effects:  # a print; anything else is made where it is read
                w.wholes.update(
                    zip(eqn.outvars, w.b.copy(eqn, [w.whole(a) for a in eqn.invars]), strict=True)
                )
        return w.b.build(
            [
                w.read(a, x if isinstance(x, RowAxis) else None)
                for a, x in zip(inner.outvars, outs, strict=True)
            ]
        )
