"""Writing equations for a block of rows.

An equation on whole leaves becomes the same equation on rows `start` to `stop`: operands with rows are those of the
block, and a shared operand that meets rows is sliced *where it is made*: the slice moves up through broadcasts and
elementwise equations until it reaches scalars and counters (`iota`), so that no array of the full shape is made on
a server that holds some of its rows. Only what cannot be moved (random bits, which must be those of the whole leaf)
is made whole and then sliced. Bodies of loops and branches are written in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrans._jax import (
    COND,
    ELEMENTWISE,
    SCAN,
    WHILE,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    opened,
    scan_counts,
    while_counts,
    with_bodies,
)
from dtrans.ir.builder import Builder
from dtrans.rows.flow import Flow
from dtrans.rows.layout import SHARED, Layout, RowAxis
from dtrans.rows.row_buckets import RowBuckets, counted, taken
from dtrans.rows.rules import Step


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of a leaf."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start

    def numbers(self) -> np.ndarray:
        """The numbers of these rows in the leaf, increasing."""
        return np.arange(self.start, self.stop)

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

    def along(self, row: RowAxis) -> RowRange:
        """Where these rows are along the axis of a value that has them."""
        return RowRange(self.start * row.width, self.stop * row.width)

    def cut(self, aval: Any, layout: Layout) -> Any:
        """The type of these rows of a value."""
        if not isinstance(layout, RowAxis):
            return aval
        shape, axis = aval.shape, layout.axis
        return aval.update(shape=(*shape[:axis], self.rows * layout.width, *shape[axis + 1 :]))

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


RowSet = RowRange | RowBuckets  # which rows of a leaf a part has


@functools.cache
def _iota(dtype: Any, shape: tuple[int, ...], axis: int, start: int) -> Callable[[], jax.Array]:
    """An iota that begins at `start`; counted so that small types round, or wrap, as in the whole."""

    def fn() -> jax.Array:
        if not start:
            return jax.lax.broadcasted_iota(dtype, shape, axis)
        counted = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + jnp.asarray(start, jnp.int32)
        return counted.astype(dtype)

    return fn


class RowWriter:
    """Writes the equations of one jaxpr for one block of rows.

    Args:
      jaxpr: that they are of.
      flow: what the row analysis found in it.
      span: the rows of the block; None where it has whole leaves.
      made_by: value to the equation that makes it, where that is known already: many blocks are of one jaxpr.
    """

    def __init__(
        self, jaxpr: ClosedJaxpr, flow: Flow, span: RowSet | None, made_by: Mapping[Var, JaxprEqn] | None = None
    ) -> None:
        self.b = Builder(jaxpr)
        self.flow = flow
        self.span = span
        self.made_by = made_by if made_by is not None else {v: e for e in opened(jaxpr).eqns for v in e.outvars}
        self.env: dict[Var, Atom] = {}  # values of this block's own
        self.wholes: dict[Var, Atom] = {}  # shared values
        self._rows: dict[tuple[Var, int, int], Atom] = {}  # rows of shared values
        self._types: dict[Any, Any] = {}

    # -- what a writer of whole programs does otherwise ------------------------------------------

    def own(self, var: Var) -> Atom | None:
        """A value of this block's own; None for one that is not."""
        return self.env.get(var)

    def outside(self, var: Var) -> Atom | None:
        """A shared value that comes from elsewhere; None for one that is made here."""
        return None

    def place(self, layout: Layout) -> dict[Var, Atom]:
        """Where a value of a body is kept: beside rows of a block, everything that has no rows is shared."""
        return self.env if isinstance(layout, RowAxis) or (self.span is None and layout is not SHARED) else self.wholes

    # -- operands --------------------------------------------------------------------------------

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        """An operand, as rows or whole."""
        if isinstance(atom, Literal):
            return atom
        own = self.own(atom)
        if own is not None:
            return own
        if row is None or self.span is None:
            return self.whole(atom)
        key = (atom, row.axis, row.width)
        if key not in self._rows:
            self._rows[key] = self._shared_rows(atom, row)
        return self._rows[key]

    def whole(self, atom: Atom) -> Atom:
        """A shared value as it is: a constant of the program, made here, or from elsewhere."""
        if isinstance(atom, Literal) or self.b.is_constant(atom):
            return atom
        if atom not in self.wholes:
            given = self.outside(atom)
            if given is not None:
                self.wholes[atom] = given
            else:
                eqn = self.made_by[atom]
                made = self.b.copy(eqn, [self.whole(a) for a in eqn.invars])
                self.wholes.update(zip(eqn.outvars, made, strict=True))
        return self.wholes[atom]

    def _shared_rows(self, atom: Var, row: RowAxis) -> Atom:
        """This block's rows of a shared value, made with as little as possible of the rest."""
        assert self.span is not None
        b, axis = self.b, row.axis
        if b.is_constant(atom):
            return self.rows_of_constant(atom, row)
        eqn = self.made_by.get(atom)
        if eqn is not None and self.follows(atom):
            shape = atom.aval.shape
            if eqn.primitive.name in ELEMENTWISE and len(eqn.outvars) == 1:
                # an operand of size 1 there is broadcast in every block
                full = [a.aval.ndim == len(shape) and a.aval.shape[axis] == shape[axis] for a in eqn.invars]
                return b.copy(eqn, [self.read(a, row if f else None) for a, f in zip(eqn.invars, full, strict=True)])[0]
            if eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1:
                (operand,) = eqn.invars
                dims = eqn.params["broadcast_dimensions"]
                grown = axis not in dims or operand.aval.shape[dims.index(axis)] != shape[axis]
                inner = None if grown else dataclasses.replace(row, axis=dims.index(axis))
                return b.copy(eqn, [self.read(operand, inner)], shape=self.span.cut(atom.aval, row).shape)[0]
            if eqn.primitive.name == "iota" and not eqn.invars:
                along, shape = eqn.params["dimension"], self.span.cut(atom.aval, row).shape
                if along == axis:
                    return self.counted(atom.aval.dtype, shape, row)
                return b.call(_iota(atom.aval.dtype, shape, along, 0))[0]
        return self.rows_of_whole(self.whole(atom), row)

    # -- where the block is: what a writer of blocks that know it only when they run does otherwise

    def rows_of_constant(self, var: Var, row: RowAxis) -> Atom:
        """This block's rows of a constant."""
        assert self.span is not None
        index = (slice(None),) * row.axis + (self.span.along(row).index,)
        return self.b.constant(np.asarray(self.b.constant_value(var))[index])

    def counted(self, dtype: Any, shape: tuple[int, ...], row: RowAxis) -> Atom:
        """An iota along the axis of the rows."""
        assert self.span is not None
        rows = self.span.along(row)
        if isinstance(rows, RowBuckets):
            return self.b.call(counted(rows, dtype, shape, row.axis))[0]
        return self.b.call(_iota(dtype, shape, row.axis, rows.start))[0]

    def rows_of_whole(self, value: Atom, row: RowAxis) -> Atom:
        """This block's rows of a value that is here."""
        assert self.span is not None
        rows = self.span.along(row)
        if isinstance(rows, RowBuckets):
            return self.b.call(taken(rows, row.axis), value)[0]
        return self.b.part(value, row.axis, rows.start, rows.stop)

    def inside(self, jaxpr: ClosedJaxpr, flow: Flow) -> RowWriter:
        """A writer of a body."""
        return RowWriter(jaxpr, flow, self.span)

    def follows(self, var: Var) -> bool:
        """Whether the equation that makes a shared value may be carried out here."""
        return True

    # -- equations -------------------------------------------------------------------------------

    def cut(self, aval: Any, layout: Layout) -> Any:
        """The type of a value in this block."""
        if self.span is None or not isinstance(layout, RowAxis):
            return aval
        key = (aval.shape, aval.dtype, aval.weak_type, layout)
        if key not in self._types:
            self._types[key] = self.span.cut(aval, layout)
        return self._types[key]

    def emit(self, eqn: JaxprEqn, step: Step) -> list[Var]:
        """An equation with rows, on this block."""
        atoms = [self.read(a, row) for a, row in zip(eqn.invars, step.operands, strict=True)]
        types = [self.cut(v.aval, x) for v, x in zip(eqn.outvars, step.outs, strict=True)]
        if self.span is None:
            return self.b.copy(eqn, atoms, types)
        params: dict[str, Any] = step.params(types) if step.params else {}
        if step.bodies:
            params = self._bodies(eqn, step)
        return self.b.copy(eqn, atoms, types, **params)

    def _bodies(self, eqn: JaxprEqn, step: Step) -> dict[str, Any]:
        """The parameters of a loop or a branch, its bodies on this block."""
        name, old = eqn.primitive.name, bodies(eqn)
        if name == COND:
            outs: list[Sequence[Layout]] = [step.outs] * len(old)
        elif name == SCAN:
            (flow,), (inner,) = step.bodies, map(opened, old)
            consts, carried = scan_counts(eqn)
            carry = inner.invars[consts : consts + carried]
            outs = [[*map(flow.layout, carry), *map(flow.layout, inner.outvars[carried:])]]
        else:
            assert name == WHILE, name
            carry = opened(old[1]).invars[while_counts(eqn)[1] :]
            outs = [[SHARED], [*map(step.bodies[1].layout, carry)]]
        return with_bodies(eqn, map(self._body, old, step.bodies, outs))

    def _body(self, jaxpr: ClosedJaxpr, flow: Flow, outs: Sequence[Layout]) -> ClosedJaxpr:
        """A body on this block, its outputs with the given layouts."""
        inner = opened(jaxpr)
        w = self.inside(jaxpr, flow)
        for v in inner.invars:
            layout = flow.layout(v)
            w.place(layout)[v] = w.b.input(self.cut(v.aval, layout))
        for i, eqn in enumerate(inner.eqns):
            step = flow.steps.get(i)
            if step is not None:
                for v, made in zip(eqn.outvars, w.emit(eqn, step), strict=True):
                    w.place(flow.layout(v))[v] = made
            elif eqn.effects:  # a print; anything else is made where it is read
                w.wholes.update(zip(eqn.outvars, w.b.copy(eqn, [w.whole(a) for a in eqn.invars]), strict=True))
        return w.b.build(
            [w.read(a, x if isinstance(x, RowAxis) else None) for a, x in zip(inner.outvars, outs, strict=True)]
        )
