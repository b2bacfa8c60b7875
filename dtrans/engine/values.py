"""Values on a shard, and their conversions between layouts.

A value is stored in the layout in which it was computed. For an equation that reads another layout,
the value is converted, and the converted value is stored as well:

    replicated -> sharded   a slice; the piece of an `iota` or constant is computed directly
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
from collections.abc import Callable, Collection, Iterable, Sequence
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
from dtrans.engine.shard_collectives import ShardCollectives
from dtrans.errors import ConfigError
from dtrans.ir.array_fns import times
from dtrans.ir.builder import Builder
from dtrans.ir.cost import nbytes
from dtrans.ir.dataflow import all_operands, is_zero_array, producers_of, variables
from dtrans.ir.display import short_type
from dtrans.rows.layout import SHARED, RowAxis, Shared, rows_or_none
from dtrans.step.scopes import in_local_scope


class ShardValues(abc.ABC):
    """Values of one program as a single shard computes them, in the layouts that equations need.

    The writer of the program asks for each operand of an equation in a layout: the full array, or
    this shard's piece. If the value was computed in another layout, this class writes a conversion,
    such as an all-gather. It stores the converted value for later equations.

    Args:
      jaxpr: the jaxpr, with calls inlined.
      shards: number and mesh axes of the shards.
      within: description of the loop or call whose body the jaxpr is; "" for the whole program.

    Attributes:
      gathers: the all-gathers of full values that the conversions have written, for the plan's
        notes.
      built_as_rows: replicated values that this shard computes only as a piece: value -> layout of
        the piece.
      read_as_rows: partial sums that equations read only as a piece.
      sliced: maps each replicated input to the sharded layout in which all equations read it. The
        entry is `SHARED` before the first read, and None after reads in different layouts.
      scaled: records scaled copies: `scaled[v] = (w, k)` if v = w / shards**k. If v is this shard's
        term of a replicated w, k is 1. If v is a local sum times the number of shards, k is -1. An
        integer w has no quotient: the first shard has w as its term, and other shards have 0.
      local_values: the local values (see the module).
    """

    is_local = False  # True if all equations are inside `dtrans.local`
    # the layouts of values whose rows are in another order than on one device; None if the writer
    # may not reorder rows
    orders: list[RowAxis] | None = None
    # partial sums to reduce-scatter although several equations read them
    sums_to_scatter: Collection[Var] = frozenset()

    def __init__(self, jaxpr: ClosedJaxpr, shards: Shards, within: str = "") -> None:
        inner = opened(jaxpr)
        self.shards = shards
        self.write_to(Builder(jaxpr))
        self.gathers: list[Gathered] = []
        self.within = within
        # value -> layout; values that are not in this dict are replicated
        self.layouts: dict[Var, ShardLayout] = {}
        # sharded inputs of the program, and their transposes and casts
        self.inputs: set[Var] = set()
        self._values: dict[Any, Atom] = {}  # (value, layout) -> value on this shard
        self._producers = producers_of(inner.eqns)
        self._uses = Counter(variables([*inner.outvars, *all_operands(inner.eqns)]))
        self.built_as_rows: dict[Var, RowAxis] = {}
        self.read_as_rows: set[Var] = set()
        self.sliced: dict[Var, RowAxis | Shared | None] = {}
        self.scaled: dict[Var, tuple[Atom, int]] = {}
        self.local_values: set[Atom] = set()
        self.local_terms: set[Atom] = set()  # partial sums inside `dtrans.local`
        self._reason: Callable[[], str] = str

    def write_to(self, b: Builder) -> None:
        """Write equations to this builder from now on."""
        self.b, self.pieces = b, Pieces(b, self.shards)
        self.collectives = ShardCollectives(b, self.shards)

    # -- layouts ---------------------------------------------------------------------------------

    def layout(self, atom: Atom) -> ShardLayout:
        """Return the layout in which a value was computed."""
        if isinstance(atom, Literal):
            return SHARED
        return self.layouts.get(atom, SHARED)

    def operand(self, atom: Atom) -> Operand:
        """Return the facts about an operand that decide the cost of an equation's strategies.

        `dtrans.engine.rules.choose` reads the operand's layout, whether it is an input, and which
        conversions are already stored.
        """
        if isinstance(atom, Literal):
            return Operand(SHARED)
        is_converted = lambda row: (atom, row) in self._values
        return Operand(self.layout(atom), atom in self.inputs, is_converted)

    def computed(self) -> dict[Var, Atom]:
        """Return each value in its first layout: this shard's piece or term, or the full value."""
        layouts = self.layouts
        return {v: x for (v, row), x in self._values.items() if row == layouts.get(v)}

    def define(self, var: Var, layout: ShardLayout, value: Atom) -> None:
        """Store a value in the layout in which it was computed."""
        if layout is SHARED:
            self._values[var, None] = value
            return
        self.layouts[var] = layout
        self._values[var, layout] = value

    def take(self, var: Var, layout: ShardLayout, *, is_input: bool) -> None:
        """Add an input to the program: this shard's piece of `var`, its term, or the full value.

        Args:
          var: the input of the program of one device.
          layout: layout of the input; it determines the input's shape on this shard.
          is_input: True for inputs of the whole program, False for inputs of a loop's body.
        """
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
        """Note which equation or output reads the values that the next calls of `read` return.

        If a read needs an all-gather, the plan names this reader and its source line.

        Args:
          reason: returns a description of the reader.
          eqn: the reader, if it is an equation.
        """
        self._reason = reason
        self.b.source = eqn

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        """Return a value in full or as a piece; convert it if it is stored in another layout.

        Args:
          atom: the value.
          row: layout of the wanted piece, or None for the full value.
        """
        if isinstance(atom, Literal) and (row is None or not atom.aval.ndim):
            return atom
        key = (atom, row)
        if isinstance(atom, Literal):
            return self._rows_of(atom, row)
        if row is not None and isinstance(self.layout(atom), Partial):
            self.read_as_rows.add(atom)
        if row is None and atom in self.sliced:
            self.sliced[atom] = None
        if key not in self._values:
            self._values[key] = self._converted(atom, self.layout(atom), row)
        return self._values[key]

    def as_(self, atom: Atom, layout: ShardLayout) -> Atom:
        """Return a value in a layout: as this shard's piece, as its term of a sum, or in full."""
        if isinstance(layout, Partial):
            return self.term(atom)
        return self.read(atom, rows_or_none(layout))

    def in_layouts(self, atoms: Iterable[Atom], layouts: Iterable[ShardLayout]) -> list[Atom]:
        """Return values in the given layouts."""
        return [self.as_(a, x) for a, x in zip(atoms, layouts, strict=True)]

    def in_full(self, atoms: Iterable[Atom]) -> list[Atom]:
        """Return values in full; all-gather pieces, and all-reduce partial sums."""
        return [self.read(a, None) for a in atoms]

    def term(self, atom: Atom) -> Atom:
        """Return this shard's term of a value: the terms of all shards add up to the value.

        If the value is replicated, the first shard has it as its term, and other shards have zeros.
        If the shard's index is an input, as in bodies of loops, each term is value / number of
        shards instead. The index may then stay unused.
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
                return self.collectives.all_reduce("sum", [term])[0]
            is_scattered = self._uses[var] == 1 or var in self.sums_to_scatter
            is_scattered &= self.shards.is_even
            is_scattered &= (var, None) not in self._values  # a slice of the full sum is free
            if is_scattered and var not in self.local_terms and row.order is None:
                self.layouts[var] = row  # further readers may also read the piece
                return self.collectives.reduce_scatter(term, row)
            if (var, None) not in self._values:
                self._values[var, None] = self._converted(var, had, None)
            return self._rows_of(self._values[var, None], row)
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
        if row.axis == had.axis or row.order or had.order or not self.shards.is_even:
            return self._rows_of(self.read(var, None), row)
        piece, size = self._values[var, had], var.aval.shape[had.axis]
        return self.collectives.all_to_all(piece, size, had, row)

    @property
    def to_scatter(self) -> set[Var]:
        """Return partial sums that several equations read, if one of them needs only a piece.

        A second pass reduce-scatters these sums (`sums_to_scatter`), so that each shard reduces
        only its piece.
        """
        return {v for v in self.read_as_rows if self._uses[v] > 1}

    def producer(self, atom: Atom) -> JaxprEqn | None:
        """Return the equation that computes a value; None for inputs, constants and literals."""
        if isinstance(atom, Var):
            return self._producers.get(atom)
        return None

    def reads_of(self, var: Var) -> int:
        """Return the number of equations and outputs of the original program that read a value."""
        return self._uses[var]

    def reduced_here(self, op: str, terms: Sequence[Atom]) -> Sequence[Atom]:
        """All-reduce this shard's terms of some sums.

        Inside `dtrans.local`, a sum covers only the shard's own rows, so the terms are returned
        unchanged.
        """
        if self.in_local:
            return terms
        return self.collectives.all_reduce(op, terms)

    def scatter(self, var: Var, row: RowAxis) -> None:
        """Write the reduce-scatter of a partial sum now, so that later equations read pieces.

        A value that is no partial sum stays unchanged.
        """
        if isinstance(self.layout(var), Partial) and var not in self.local_terms:
            term = self._values[var, PARTIAL]
            self.define(var, row, self.collectives.reduce_scatter(term, row))

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
        size = var.aval.shape[had.axis]
        return self.collectives.all_gather(self._values[var, had], size, had)

    def _rows_of(self, value: Atom, row: RowAxis | None) -> Atom:
        assert row is not None
        size = value.aval.shape[row.axis]
        if self.pads_with_entries(size, row):
            at = self.pieces.shard_row(np.maximum(self.shards.entries(size, row), 0))
            return self.b.call(take_entries(row.axis), value, at)[0]
        return self.pieces.of(value.aval.shape[row.axis], row).take_from(self.b, value)

    def pads_with_entries(self, size: int, row: RowAxis) -> bool:
        """Return True if the padding of pieces must repeat real entries.

        The shards of an uneven dimension have padded pieces. With `finite_padding`, zeros are no
        valid padding, since an equation could compute infinities from them.
        """
        return self.shards.finite_padding and self.shards.pads(size, row)

    @abc.abstractmethod
    def build_rows(self, var: Var, row: RowAxis) -> Atom | None:
        """Write this shard's piece of a value that it can compute alone, such as an `iota`.

        Return None if the value must be sliced or converted instead
        (`dtrans.engine.counted_values`).
        """

    @abc.abstractmethod
    def carry_out(self, eqn: JaxprEqn, way: Strategy) -> list[Atom]:
        """Write one equation by the chosen strategy, and return this shard's outputs.

        If the strategy computes partial sums, the caller reduces them later.
        """
