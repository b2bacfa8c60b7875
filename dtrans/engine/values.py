"""Values on a shard: as they were made, and as they are read.

A value is kept as it was made, and converted where it is read otherwise, once for each way of
reading it:

    whole -> cut    a slice at the shard's offset; what is only counted or filled in is made as a slice to begin with
    cut -> whole    all_gather, noted in `gathers`
    cut -> cut      all_to_all, along another dimension
    sum -> whole    all_reduce
    sum -> cut      reduce_scatter, where nothing else reads it

A user may say that reductions are of each shard's own piece (`dtrans.local`). What they make stands
for the value of
all: a sum is what the shard has, times the number of shards. Such values are the shard's *own*:
nothing is reduced, and what they are for all, where that is asked for, is their mean.
"""

from __future__ import annotations

import abc
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, line_of, opened
from dtrans.engine.array_fns import on_first, taken
from dtrans.engine.layout import (
    PARTIAL,
    Gathered,
    Partial,
    Placed,
    Shards,
    cut_along,
    nbytes,
    rows_or_none,
)
from dtrans.engine.pieces import Pieces
from dtrans.engine.rules import Operand, Way, way_of
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import padded, times
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import is_zero_array
from dtrans.ir.display import short_type
from dtrans.ops import all_gather_p, all_reduce_p, reduce_scatter_p
from dtrans.ops.all_to_all import all_to_all_p
from dtrans.rows.layout import SHARED, RowAxis, Shared
from dtrans.rows.parts import recipe_of
from dtrans.step.scopes import in_local_scope


class ShardValues(abc.ABC):
    """The values of one jaxpr on one shard.

    Args:
      jaxpr: that they are of, without calls.
      shards: for whom.
      within: the equation whose body this is, as text.

    Attributes:
      gathers: what is made whole.
      asked: what is made whole, and read in pieces.
      sliced: in which pieces alone an input that is whole is read; `SHARED` where nothing reads it
        yet, None where something reads more.
      scaled: values that stand for others, each with that value, and by which power of the number
        of shards it is smaller: a term that only the first shard has is of one that all have (1),
        what stands for a sum of all of a shard's own (-1).
      own: values that are whole, and of which each shard has its own.
    """

    is_local = False  # whether all equations are in `dtrans.local`
    orders: list[RowAxis] | None = (
        None  # layouts of rows that were moved; None if rows may not be moved
    )

    def __init__(self, jaxpr: ClosedJaxpr, shards: Shards, within: str = "") -> None:
        inner = opened(jaxpr)
        self.b = Builder(jaxpr)
        self.shards = shards
        self.gathers: list[Gathered] = []
        self.within = within
        self.layouts: dict[Var, Placed] = {}  # how a value was made; what is not here is whole
        self.inputs: set[Var] = set()  # inputs that are cut, and what holds the same numbers
        self._made: dict[Any, Atom] = {}  # a value, by itself and how it is read
        self._made_by = {v: e for e in inner.eqns for v in e.outvars}
        reads: Iterable[Atom] = (*inner.outvars, *(a for e in inner.eqns for a in e.invars))
        self._uses = Counter(a for a in reads if isinstance(a, Var))
        self.pieces = Pieces(self.b, shards)
        self.asked: dict[Var, RowAxis] = {}
        self.sliced: dict[Var, RowAxis | Shared | None] = {}
        self.scaled: dict[Var, tuple[Atom, int]] = {}
        self.own: set[Atom] = set()
        self.own_terms: set[Atom] = set()  # sums whose terms stand for them
        self._counted: dict[tuple[Atom, int], bool] = {}
        self._reason: Callable[[], str] = str

    # -- what values are -------------------------------------------------------------------------

    def layout(self, atom: Atom) -> Placed:
        """How a value was made."""
        return SHARED if isinstance(atom, Literal) else self.layouts.get(atom, SHARED)

    def operand(self, atom: Atom) -> Operand:
        """Return the facts about a value that `choose` needs."""
        if isinstance(atom, Literal):
            return Operand(SHARED)
        return Operand(
            self.layout(atom), atom in self.inputs, lambda row: (atom, row) in self._made
        )

    def define(self, var: Var, layout: Placed, value: Atom) -> None:
        """A value, as it is made."""
        if layout is not SHARED:
            self.layouts[var] = layout
        self._made[
            var, layout if isinstance(layout, RowAxis) else None if layout is SHARED else PARTIAL
        ] = value

    def take(self, var: Var, layout: Placed, *, is_input: bool) -> None:
        """An input, as it lies."""
        self.define(var, layout, self.b.input(self.shards.cut(var.aval, layout)))
        if layout is SHARED:
            self.sliced[var] = SHARED
        if is_input and isinstance(layout, RowAxis):
            self.inputs.add(var)

    @property
    def in_local(self) -> bool:
        """Whether what reads values is in `dtrans.local`."""
        return self.is_local or (self.b.source is not None and in_local_scope(self.b.source))

    def needed_by(self, reason: Callable[[], str], eqn: JaxprEqn | None = None) -> None:
        """What reads values from here on, for `gathers`."""
        self._reason = reason
        self.b.source = eqn

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        """A value, cut as it is asked for, or whole."""
        if isinstance(atom, Literal) and (row is None or not atom.aval.ndim):
            return atom
        key = (atom, row)
        if isinstance(atom, Literal):
            return self._rows_of(atom, row)
        if row is None and atom in self.sliced:
            self.sliced[atom] = None
        if key not in self._made:
            self._made[key] = self._converted(atom, self.layout(atom), row)
        return self._made[key]

    def as_(self, atom: Atom, layout: Placed) -> Atom:
        """Return a value in a layout."""
        return (
            self.term(atom)
            if isinstance(layout, Partial)
            else self.read(atom, rows_or_none(layout))
        )

    def term(self, atom: Atom) -> Atom:
        """This shard's term of a value: of one that is whole, the first shard has all and others
        have nothing."""
        if isinstance(self.layout(atom), Partial):
            return self._made[atom, PARTIAL]
        value = self.read(atom, None)
        if is_zero_array(atom, self._made_by):
            return value
        if isinstance(atom, Var) and atom in self.own:
            if not jnp.issubdtype(atom.aval.dtype, jnp.inexact):
                raise ConfigError(
                    f"dtrans.local(): {short_type(atom.aval)} is each {self.shards.noun}'s own, "
                    "leaves the step, and "
                    "has no mean; make it outside of the scope"
                )
            (made,) = self.b.call(times(1 / self.shards.count), value)
        elif self.pieces.takes_index and jnp.issubdtype(atom.aval.dtype, jnp.inexact):
            (made,) = self.b.call(times(1 / self.shards.count), value)
        else:
            (made,) = self.b.call(on_first, value, self.pieces.index())
        if isinstance(made, Var) and made is not value:  # it is, where it has no entries
            self.scaled[made] = value, 1
        return made

    # -- conversions -----------------------------------------------------------------------------

    def _converted(self, var: Var, had: Placed, row: RowAxis | None) -> Atom:
        if isinstance(had, Partial):
            term = self._made[var, PARTIAL]
            if row is None and var in self.own_terms:
                (made,) = self.b.call(times(self.shards.count), term)
                if isinstance(made, Var):
                    self.scaled[made] = term, -1
                return made
            if row is None:
                return self.reduced("sum", [term])[0]
            if self._uses[var] == 1 and var not in self.own_terms and row.order is None:
                return self._scattered(term, row)
            return self._rows_of(self.read(var, None), row)
        if not isinstance(had, RowAxis):
            if row is None:
                assert self.b.is_constant(var), var
                return var
            if var in self.sliced:
                self.sliced[var] = row if self.sliced[var] is SHARED else None
                return self._rows_of(self._made[var, None], row)
            return self.made_as_rows(var, row) or self._rows_of(self.read(var, None), row)
        if row is None:
            return self._gathered(var, had)
        if row.axis == had.axis or row.order or had.order:
            return self._rows_of(self.read(var, None), row)
        return self._exchanged(var, had, row)

    def reduced(self, op: str, terms: Sequence[Atom]) -> list[Var]:
        """What terms of all shards make together."""
        return self.b.bind(
            all_reduce_p, *terms, op=op, name=self.shards.label, owners=(), over=self.shards.over
        )

    def _scattered(self, term: Atom, row: RowAxis) -> Atom:
        whole = self.shards.whole(term.aval.shape[row.axis], row)
        (wide,) = self.b.call(padded(row.axis, whole), term)
        return self.b.bind(
            reduce_scatter_p, wide, name=self.shards.label, **self._among(), axis=row.axis
        )[0]

    def _gathered(self, var: Var, had: RowAxis) -> Atom:
        if self.in_local:
            raise ConfigError(
                f"dtrans.local(): {self._reason()} mixes rows of the batch otherwise than by a "
                "sum, a mean or a "
                f"maximum, and cannot be of each {self.shards.noun}'s own rows alone; leave it "
                "outside of the "
                "scope, or say batch='local'"
            )
        eqn = self.b.source or self._made_by.get(var)
        line = "" if eqn is None else line_of(eqn)
        self.gathers.append(
            Gathered(var.aval.shape, var.aval.dtype, nbytes(var.aval), self._reason(), line)
        )
        (wide,) = self.b.bind(
            all_gather_p,
            self._made[var, had],
            name=self.shards.label,
            axis=had.axis,
            **self._among(),
        )
        if had.order is not None:
            return self._in_sequence(wide, var.aval.shape[had.axis], had)
        return self._without_end(wide, had.axis, var.aval.shape[had.axis])

    def _in_sequence(self, wide: Atom, size: int, had: RowAxis) -> Atom:
        """Sort the slots of all shards, one shard behind the other, and drop padding."""
        entries = self.shards.entries(size, had).reshape(-1)
        places = np.flatnonzero(entries >= 0)
        at = places[np.argsort(entries[places])].astype(np.int32)
        return self.b.call(taken(had.axis), wide, self.b.constant(at))[0]

    def _exchanged(self, var: Var, had: RowAxis, row: RowAxis) -> Atom:
        shape = var.aval.shape
        wide = self.b.call(
            padded(row.axis, self.shards.whole(shape[row.axis], row)), self._made[var, had]
        )
        (got,) = self.b.bind(
            all_to_all_p,
            *wide,
            name=self.shards.label,
            cut=row.axis,
            joined=had.axis,
            **self._among(),
        )
        return self._without_end(got, had.axis, shape[had.axis])

    def _among(self) -> dict[str, Any]:
        return {"over": self.shards.over, "size": self.shards.count}

    def _without_end(self, value: Atom, axis: int, size: int) -> Atom:
        return value if value.aval.shape[axis] == size else self.b.part(value, axis, 0, size)

    def _rows_of(self, value: Atom, row: RowAxis | None) -> Atom:
        assert row is not None
        size = value.aval.shape[row.axis]
        if self._pads_with_entries(size, row):
            at = self.pieces.own_row(np.maximum(self.shards.entries(size, row), 0))
            return self.b.call(taken(row.axis), value, at)[0]
        return self.pieces.of(value.aval.shape[row.axis], row).cut(self.b, value)

    def _pads_with_entries(self, size: int, row: RowAxis) -> bool:
        """Return True if padding has to be real entries, whose derivatives are finite; those of
        zeros may not be."""
        return self.shards.finite_padding and self.shards.pads(size, row)

    # -- slices of whole values, made with nothing of the rest -------------------------------------

    def made_as_rows(self, var: Var, row: RowAxis) -> Atom | None:
        """A piece of a value of counters, and of what is repeated or written into that; None for
        others."""
        eqn = self._made_by.get(var)
        if eqn is None or not self._is_counted(var, row.axis):
            return None
        if self._pads_with_entries(var.aval.shape[row.axis], row):
            return None
        if eqn.primitive.name not in ("iota", "broadcast_in_dim"):
            self.asked[var] = row
        recipe = recipe_of(eqn, 0, self.pieces.of(var.aval.shape[row.axis], row))
        if row.order is not None and recipe is not None:
            local = self.shards.local(var.aval.shape[row.axis], row)
            if any(p is not None and p.size != local for _, p in recipe.needs):
                return None  # the order of an operand would be another
        if recipe is not None:
            along = (
                None if p is None else dataclasses.replace(row, axis=p.axis)
                for _, p in recipe.needs
            )
            return recipe.write(
                self.b, [self.read(a, r) for (a, _), r in zip(recipe.needs, along, strict=True)]
            )
        way = way_of(eqn, [row, *(SHARED,) * (len(eqn.invars) - 1)], self.shards)
        return None if way is None or way.outs != (row,) else self.carried_out(eqn, way)[0]

    def _is_counted(self, var: Atom, axis: int) -> bool:
        """Whether a value along an axis is made of counters and of what is repeated: nothing large
        is sliced then."""
        if (var, axis) not in self._counted:
            eqn = self._made_by.get(var) if isinstance(var, Var) else None
            self._counted[var, axis] = (
                eqn is not None and len(eqn.outvars) == 1 and self._counts(eqn, axis)
            )
        return self._counted[var, axis]

    def _counts(self, eqn: JaxprEqn, axis: int) -> bool:
        name = eqn.primitive.name
        if name.startswith("scatter"):  # something is written into what is counted
            return self._is_counted(eqn.invars[0], axis)
        recipe = recipe_of(eqn, 0, self.pieces.of(eqn.outvars[0].aval.shape[axis], cut_along(axis)))
        if recipe is None or name in (
            "broadcast_in_dim",
            "random_bits",
        ):  # which make more than they read
            return recipe is not None
        if (
            name == "gather" and eqn.invars[1] in self.sliced
        ):  # what it picks is larger than what names it
            return True
        along = [(a, part.axis) for a, part in recipe.needs if part is not None]
        return all(self._is_counted(a, at) for a, at in along)

    @abc.abstractmethod
    def carried_out(self, eqn: JaxprEqn, way: Way) -> list[Atom]:
        """The outputs of an equation in one way, or their parts."""
