"""Values on a shard, and their conversions between layouts.

A value is stored in the layout in which it was computed. For an equation that reads another layout,
the value is converted, and the converted value is stored as well:

    replicated -> sharded   a slice; of a counter or fill, the shard computes its piece directly
    sharded -> replicated   all_gather, which is listed in `gathers`
    sharded -> sharded      all_to_all, if the dimension changes
    partial -> replicated   all_reduce
    partial -> sharded      reduce_scatter, if nothing else reads the sum

The part of a sharded value that a shard has is its *piece*.

Inside `dtrans.local`, each shard reduces over its own piece only, without communication. A local
sum is multiplied by the number of shards, so that it estimates the global sum. Results of such
reductions are *local* values: they differ between shards. If an output of the program is a local
value, the program returns its mean over shards.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dtrans._jax import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, line_of, opened
from dtrans.engine.array_fns import on_first, take_entries
from dtrans.engine.layout import (
    PARTIAL,
    Gathered,
    Partial,
    ShardLayout,
    Shards,
)
from dtrans.engine.pieces import Pieces
from dtrans.engine.rules import Operand, Strategy
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import padded, times
from dtrans.ir.builder import Builder
from dtrans.ir.cost import nbytes
from dtrans.ir.dataflow import all_operands, is_zero_array, producers_of, variables
from dtrans.ir.display import short_type
from dtrans.ops import all_gather_p, all_reduce_p, reduce_scatter_p
from dtrans.ops.all_to_all import all_to_all_p
from dtrans.rows.layout import SHARED, RowAxis, Shared, rows_or_none
from dtrans.step.scopes import in_local_scope


class ShardValues(abc.ABC):
    """Values of one jaxpr on one shard.

    Args:
      jaxpr: the jaxpr, with calls inlined.
      shards: number and mesh axes of the shards.
      within: text of the equation that has the jaxpr as a body; "" if the jaxpr is no body.

    Attributes:
      gathers: values that are gathered.
      built_as_rows: maps each full value that equations read as a piece to the piece's layout.
      sliced: replicated input -> the only sharded layout in which equations read the input. The
        value is `SHARED` before the first read, and None after reads in several layouts.
      scaled: `scaled[v] = (w, k)` if v = w / shards**k. If v is the term of a replicated w, k is 1.
        If v is a local sum times the number of shards, k is -1. An integer w has no quotient: the
        first shard has w as its term, and other shards have 0.
      local_values: the local values (see the module).
    """

    is_local = False  # True if all equations are inside `dtrans.local`
    # the layouts of values whose rows are in another order than on one device; None if the writer
    # may not reorder rows
    orders: list[RowAxis] | None = None

    def __init__(self, jaxpr: ClosedJaxpr, shards: Shards, within: str = "") -> None:
        inner = opened(jaxpr)
        self.b = Builder(jaxpr)
        self.shards = shards
        self.gathers: list[Gathered] = []
        self.within = within
        # value -> layout; values that are not in this dict are replicated
        self.layouts: dict[Var, ShardLayout] = {}
        # sharded inputs of the program, and their transposes and casts
        self.inputs: set[Var] = set()
        self._values: dict[Any, Atom] = {}  # (value, layout) -> value on this shard
        self._producers = producers_of(inner.eqns)
        self._uses = Counter(variables([*inner.outvars, *all_operands(inner.eqns)]))
        self.pieces = Pieces(self.b, shards)
        self.built_as_rows: dict[Var, RowAxis] = {}
        self.sliced: dict[Var, RowAxis | Shared | None] = {}
        self.scaled: dict[Var, tuple[Atom, int]] = {}
        self.local_values: set[Atom] = set()
        self.local_terms: set[Atom] = set()  # partial sums inside `dtrans.local`
        self._reason: Callable[[], str] = str

    # -- layouts ---------------------------------------------------------------------------------

    def layout(self, atom: Atom) -> ShardLayout:
        """Return the layout in which a value was computed."""
        if isinstance(atom, Literal):
            return SHARED
        return self.layouts.get(atom, SHARED)

    def operand(self, atom: Atom) -> Operand:
        """Return the `Operand` by which `dtrans.engine.rules.choose` knows a value."""
        if isinstance(atom, Literal):
            return Operand(SHARED)
        is_converted = lambda row: (atom, row) in self._values
        return Operand(self.layout(atom), atom in self.inputs, is_converted)

    def define(self, var: Var, layout: ShardLayout, value: Atom) -> None:
        """Store a value in the layout in which it was computed."""
        if layout is SHARED:
            self._values[var, None] = value
            return
        self.layouts[var] = layout
        self._values[var, layout] = value

    def take(self, var: Var, layout: ShardLayout, *, is_input: bool) -> None:
        """Add an input in this layout; `is_input` is False for an input of a body."""
        self.define(var, layout, self.b.input(self.shards.part_type(var.aval, layout)))
        if layout is SHARED:
            self.sliced[var] = SHARED
        if is_input and isinstance(layout, RowAxis):
            self.inputs.add(var)

    @property
    def in_local(self) -> bool:
        """True if the equation that is being written is inside `dtrans.local`."""
        return self.is_local or (self.b.source is not None and in_local_scope(self.b.source))

    def needed_by(self, reason: Callable[[], str], eqn: JaxprEqn | None = None) -> None:
        """Set the equation or output that reads values from now on; `reason` describes it."""
        self._reason = reason
        self.b.source = eqn

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        """Return a value as a piece in layout `row`, or the full value if `row` is None."""
        if isinstance(atom, Literal) and (row is None or not atom.aval.ndim):
            return atom
        key = (atom, row)
        if isinstance(atom, Literal):
            return self._rows_of(atom, row)
        if row is None and atom in self.sliced:
            self.sliced[atom] = None
        if key not in self._values:
            self._values[key] = self._converted(atom, self.layout(atom), row)
        return self._values[key]

    def as_(self, atom: Atom, layout: ShardLayout) -> Atom:
        """Return a value in a layout: the piece, the full value or the term."""
        if isinstance(layout, Partial):
            return self.term(atom)
        return self.read(atom, rows_or_none(layout))

    def in_layouts(self, atoms: Iterable[Atom], layouts: Iterable[ShardLayout]) -> list[Atom]:
        """Return values in the given layouts."""
        return [self.as_(a, x) for a, x in zip(atoms, layouts, strict=True)]

    def in_full(self, atoms: Iterable[Atom]) -> list[Atom]:
        """Return full values."""
        return [self.read(a, None) for a in atoms]

    def term(self, atom: Atom) -> Atom:
        """Return this shard's term of a value.

        If the value is replicated, the first shard has it as its term, and other shards have zeros.
        In bodies that take the shard's index as an input, each term is value / number of shards.
        """
        if isinstance(self.layout(atom), Partial):
            return self._values[atom, PARTIAL]
        value = self.read(atom, None)
        if is_zero_array(atom, self._producers):
            return value
        if isinstance(atom, Var) and atom in self.local_values:
            if not jnp.issubdtype(atom.aval.dtype, jnp.inexact):
                raise ConfigError(
                    f"the step returns {short_type(atom.aval)} from dtrans.local(). The array "
                    f"differs between {self.shards.noun}s, and this type has no mean; compute "
                    "the array outside of dtrans.local()"
                )
            (scaled,) = self.b.call(times(1 / self.shards.count), value)
        elif self.pieces.takes_index and jnp.issubdtype(atom.aval.dtype, jnp.inexact):
            (scaled,) = self.b.call(times(1 / self.shards.count), value)
        else:
            (scaled,) = self.b.call(on_first, value, self.pieces.index())
        # for an empty array, no equation is written, and `scaled` is `value`
        if isinstance(scaled, Var) and scaled is not value:
            self.scaled[scaled] = value, 1
        return scaled

    # -- conversions -----------------------------------------------------------------------------

    def _converted(self, var: Var, had: ShardLayout, row: RowAxis | None) -> Atom:
        if isinstance(had, Partial):
            term = self._values[var, PARTIAL]
            if row is None and var in self.local_terms:
                (scaled,) = self.b.call(times(self.shards.count), term)
                if isinstance(scaled, Var):
                    self.scaled[scaled] = term, -1
                return scaled
            if row is None:
                return self.reduced("sum", [term])[0]
            if self._uses[var] == 1 and var not in self.local_terms and row.order is None:
                return self._scattered(term, row)
            return self._rows_of(self.read(var, None), row)
        if not isinstance(had, RowAxis):
            if row is None:
                assert self.b.is_constant(var), var
                return var
            if var in self.sliced:
                self.sliced[var] = row if self.sliced[var] is SHARED else None
                return self._rows_of(self._values[var, None], row)
            return self.build_rows(var, row) or self._rows_of(self.read(var, None), row)
        if row is None:
            return self._gathered(var, had)
        if row.axis == had.axis or row.order or had.order:
            return self._rows_of(self.read(var, None), row)
        return self._exchanged(var, had, row)

    def producer(self, atom: Atom) -> JaxprEqn | None:
        """Return the equation that computes a value; None for inputs, constants and literals."""
        if isinstance(atom, Var):
            return self._producers.get(atom)
        return None

    def reads_of(self, var: Var) -> int:
        """Return the number of times that equations and outputs read a value."""
        return self._uses[var]

    def reduced_here(self, op: str, terms: Sequence[Atom]) -> Sequence[Atom]:
        """All-reduce terms over shards; inside `dtrans.local`, return them unchanged."""
        if self.in_local:
            return terms
        return self.reduced(op, terms)

    def reduced(self, op: str, terms: Sequence[Atom]) -> list[Var]:
        """All-reduce terms over shards."""
        return self.b.bind(
            all_reduce_p, *terms, op=op, name=self.shards.label, owners=(), over=self.shards.over
        )

    def _scattered(self, term: Atom, row: RowAxis) -> Atom:
        padded_size = self.shards.padded_size(term.aval.shape[row.axis], row)
        (wide,) = self.b.call(padded(row.axis, padded_size), term)
        return self.b.bind(
            reduce_scatter_p, wide, name=self.shards.label, **self._among(), axis=row.axis
        )[0]

    def _gathered(self, var: Var, had: RowAxis) -> Atom:
        if self.in_local:
            raise ConfigError(
                f"{self._reason()} inside dtrans.local() mixes rows of the batch. Over its own "
                f"rows, a {self.shards.noun} can only compute sums, means, maxima and minima; move "
                "the operation outside of dtrans.local(), or pass batch='local'"
            )
        eqn = self.b.source or self._producers.get(var)
        line = "" if eqn is None else line_of(eqn)
        self.gathers.append(
            Gathered(var.aval.shape, var.aval.dtype, nbytes(var.aval), self._reason(), line)
        )
        (wide,) = self.b.bind(
            all_gather_p,
            self._values[var, had],
            name=self.shards.label,
            axis=had.axis,
            **self._among(),
        )
        if had.order is not None:
            return self._in_sequence(wide, var.aval.shape[had.axis], had)
        return self._without_end(wide, had.axis, var.aval.shape[had.axis])

    def _in_sequence(self, wide: Atom, size: int, had: RowAxis) -> Atom:
        """Drop the padding of a gathered value, and sort the entries by their global index.

        Used for layouts with an order, in which shards do not have consecutive entries.
        """
        entries = self.shards.entries(size, had).reshape(-1)
        places = np.flatnonzero(entries >= 0)
        at = places[np.argsort(entries[places])].astype(np.int32)
        return self.b.call(take_entries(had.axis), wide, self.b.constant(at))[0]

    def _exchanged(self, var: Var, had: RowAxis, row: RowAxis) -> Atom:
        shape = var.aval.shape
        wide = self.b.call(
            padded(row.axis, self.shards.padded_size(shape[row.axis], row)), self._values[var, had]
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
        if value.aval.shape[axis] == size:
            return value
        return self.b.part(value, axis, 0, size)

    def _rows_of(self, value: Atom, row: RowAxis | None) -> Atom:
        assert row is not None
        size = value.aval.shape[row.axis]
        if self.pads_with_entries(size, row):
            at = self.pieces.shard_row(np.maximum(self.shards.entries(size, row), 0))
            return self.b.call(take_entries(row.axis), value, at)[0]
        return self.pieces.of(value.aval.shape[row.axis], row).take_from(self.b, value)

    def pads_with_entries(self, size: int, row: RowAxis) -> bool:
        """Return True if pieces have padding that must repeat real entries (`finite_padding`)."""
        return self.shards.finite_padding and self.shards.pads(size, row)

    @abc.abstractmethod
    def build_rows(self, var: Var, row: RowAxis) -> Atom | None:
        """Write the piece of a value that depends on counters and fills alone; else return None."""

    @abc.abstractmethod
    def carry_out(self, eqn: JaxprEqn, way: Strategy) -> list[Atom]:
        """Write an equation by a strategy; return this shard's outputs before they are reduced."""
