"""Trainer's half of a step, written for the rows that it looks up.

First come the equations that compute row ids. `split_ids` and `prefetch` for each table follow, and
then all other equations. These have an operand of `size` rows instead of the table. Fetched rows
are sorted by id, and an id becomes the position of its row among them. So no value of the program
has all rows of the table. Bodies of loops, branches and remat get the ids as constants.

Other operands of such equations are reduced to the same rows (`dtrans.rows.parts`). A constant of
one value shrinks. An operation that needs its full operands runs in full, and its rows are picked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import avals, variables
from dtrans.ir.program import DIST, FORWARD, RPC, is_communication
from dtrans.ops import geo_prefetch_p, prefetch_p, split_ids_p
from dtrans.parameter_server.tables.lookups import Lookups, RowPick, TableLookups, numbers_first
from dtrans.parameter_server.tables.wide_numbers import WideNumbers
from dtrans.rows.layout import RowAxis
from dtrans.rows.rules import Step
from dtrans.rows.slices import Slice, Start
from dtrans.rows.writer import RowWriter


class _TableRows:
    """Looked-up rows of tables, by table; implements `dtrans.rows.writer.BlockRows`.

    Attributes:
      sizes: the number of rows.
      uniq: the sorted ids of the rows.
    """

    def __init__(self, sizes: Mapping[str, int], uniq: dict[str, Var]) -> None:
        self.sizes, self.uniq = sizes, uniq
        self._starts = {n: Start(functools.partial(self._ids, n)) for n in sizes}

    def _ids(self, table: str, b: Builder) -> Atom:
        return self.uniq[table]

    def of(self, row: RowAxis) -> Slice:
        return Slice(row.axis, self._starts[row.leaf], self.sizes[row.leaf]).widened(row.width)

    def inside(self, b: Builder) -> _TableRows:
        return _TableRows(self.sizes, {n: b.input(v.aval) for n, v in self.uniq.items()})

    def operands(self) -> Sequence[Atom]:
        return list(self.uniq.values())


def _pick(
    positions: dict[tuple[Any, ...], Atom], w: RowWriter, eqn: JaxprEqn, step: Step
) -> list[Var] | None:
    """Write an equation that picks rows, or adds to rows; return None for any other equation.

    Args:
      positions: positions among the fetched rows, by ids; shared by forward and backward.
    """
    if not isinstance(step, RowPick):
        return None
    row = step.operands[0]
    assert row is not None and isinstance(w.rows, _TableRows)
    atoms = [w.read(a, x) for a, x in zip(eqn.invars, step.operands, strict=True)]
    numbers, uniq = atoms[step.numbers], w.rows.uniq[row.leaf]
    key = numbers, step.component, uniq
    if key not in positions:
        fn: Callable[..., jax.Array] = _position_of
        if step.component is not None:
            fn = _with_position(step.component)
        (positions[key],) = w.b.call(fn, numbers, uniq)
    atoms[step.numbers] = positions[key]
    types = [w.cut(v.aval, x) for v, x in zip(eqn.outvars, step.outs, strict=True)]
    return w.b.copy(eqn, atoms, types)


class TableWriter:
    """Writer of a trainer's half for the rows of tables that it looks up.

    It implements `dtrans.step.forward_backward.HalfWriter`.

    Args:
      b: builder of the trainer's program.
      jaxpr: the jaxpr of the step.
      found: the lookups of the step.
      tables: table to its variable in `jaxpr`.
      where: table to the parameters of `prefetch` with the locations of its rows.
      eqns, roles: the half.
      state: table to the trainer's own arrays with a row for each of its rows, as variables by
        name; their rows come with the table's. None if servers send rows of the table alone.

    Attributes:
      sizes: the number of fetched rows, by table.
      uniq: the ids of fetched rows, by table.
      rows: fetched rows of tables and of their state, by name.
    """

    def __init__(
        self,
        b: Builder,
        jaxpr: Any,
        found: Lookups,
        tables: Mapping[str, Var],
        where: Mapping[str, Mapping[str, Any]],
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        state: Mapping[str, Mapping[str, Var]] | None = None,
    ) -> None:
        rows = _TableRows({n: t.size for n, t in found.tables.items()}, {})
        producers = {v: e for e in eqns for v in e.outvars}
        pick = functools.partial(_pick, {})
        # equations are written in order, so a shared value exists when it is read
        self.writer = RowWriter(
            b, found.flow, rows, producers, outside=lambda var: var, special=pick
        )
        self.b, self.uniq, self.sizes = b, rows.uniq, rows.sizes
        self._tables, self._where, self._state = found.tables, where, state
        self.rows: dict[str, Var] = {}
        self._plain: dict[int, tuple[JaxprEqn, Step | None]] = {}
        for i, (eqn, plain) in enumerate(zip(found.eqns, found.plain, strict=True)):
            self._plain[id(eqn)] = plain, found.flow.steps.get(i)
        self._done = set[int]()
        self._write_ids([*eqns, *found.numbering], eqns, roles, jaxpr)
        self._prefetch(tables)

    def _write_ids(
        self,
        candidates: Sequence[JaxprEqn],
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        jaxpr: Any,
    ) -> None:
        """Write the equations that compute row ids."""
        ids = [a for t in self._tables.values() for a, _ in t.ids]
        role_of = {id(e): role for e, role in zip(eqns, roles, strict=True)}
        for e in numbers_first(candidates, ids, jaxpr):
            self.b.role = role_of.get(id(e), FORWARD)
            if id(e) in role_of:
                self._keep(e)
                self._done.add(id(e))
            else:  # the part of a loop that computes ids
                atoms = [self.writer.read_full(a) for a in e.invars]
                new = self.b.copy(e, atoms, avals(e.outvars))
                self.writer.shared.update(zip(e.outvars, new, strict=True))

    # -- HalfWriter ------------------------------------------------------------------------------

    def emit(self, eqn: JaxprEqn) -> None:
        """Write the next equation."""
        w = self.writer
        if id(eqn) in self._done:
            return
        # the lookups were found before exchanges were written
        plain, step = self._plain.get(id(eqn), (eqn, None))
        if step is None:
            self._keep(eqn)
        else:
            for v, new in zip(eqn.outvars, w.emit(plain, step), strict=True):
                w.place(w.flow.layout(v))[v] = new

    def result(self, atom: Atom, maker: int) -> Atom:
        """Return a wanted value."""
        layout = RowAxis("", 0) if isinstance(atom, Literal) else self.writer.flow.layout(atom)
        return self.writer.read(
            atom, layout if isinstance(layout, RowAxis) and layout.leaf else None
        )

    # -- equations -------------------------------------------------------------------------------

    def _keep(self, eqn: JaxprEqn) -> None:
        self.b.keep(eqn, [self.writer.read_full(a) for a in eqn.invars])
        self.writer.shared.update((v, v) for v in eqn.outvars)

    def _ids(self, table: TableLookups, wide: WideNumbers) -> list[Atom]:
        """Return the row ids that a step looks up in a table, from before JAX narrowed them."""
        found: list[Atom] = []
        atoms = [(a, c) if c is None else wide.component(a, c) for a, c in table.ids]
        for atom, component in atoms:
            found += self.b.call(_component(component), wide.of(atom))
        return found

    def _prefetch(self, tables: Mapping[str, Var]) -> None:
        """Write the fetch of looked-up rows: all `prefetch` equations follow each other.

        A trainer then requests the rows of all tables at once.
        """
        b, found = self.b, self._tables
        b.role = FORWARD
        wide = WideNumbers(b, self.writer.producers, self.writer.read_full)
        ids = {n: self._ids(t, wide) for n, t in found.items()}
        b.role = DIST
        for n, t in found.items():
            (uniq,) = b.bind(split_ids_p, *ids[n], table=n, rows=t.rows, size=t.size)
            b.labels[uniq] = f"{n}@IDS"
            self.uniq[n] = uniq
        b.role = RPC
        primitive = prefetch_p if self._state is None else geo_prefetch_p
        for n, t in found.items():
            arrays = {n: tables[n]}
            if self._state:
                arrays |= self._state[n]
            shapes = [(t.size, *v.aval.shape[1:]) for v in arrays.values()]
            types = tuple(
                v.aval.update(shape=shape) for v, shape in zip(arrays.values(), shapes, strict=True)
            )
            fetched = b.bind(primitive, self.uniq[n], types=types, **self._where[n])
            for name, v in zip(arrays, fetched, strict=True):
                self.rows[name] = v
                b.labels[v] = f"{name}@ROWS"
            self.writer.env[tables[n]] = self.rows[n]
        b.role = FORWARD


@functools.cache
def _component(component: int | None) -> Callable[[jax.Array], jax.Array]:
    if component is None:
        return jnp.ravel
    return lambda x: x[..., component]


@functools.cache
def _with_position(component: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function that replaces the row id in index vectors by a position in sorted ids."""

    def fn(numbers: jax.Array, uniq: jax.Array) -> jax.Array:
        ids = numbers[..., component].astype(uniq.dtype)
        at = jnp.searchsorted(uniq, ids).astype(numbers.dtype)
        entry = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, numbers.ndim - 1)
        return jnp.where(entry == component, at[..., None], numbers)

    return fn


def _position_of(number: jax.Array, uniq: jax.Array) -> jax.Array:
    return jnp.searchsorted(uniq, number.astype(uniq.dtype)).astype(number.dtype)


def without_unused(b: Builder, outs: Sequence[Atom]) -> None:
    """Remove equations whose results are not read, from a builder.

    Args:
      outs: the outputs of its program.
    """
    used = set(variables(outs))
    eqns, roles = [], []
    for eqn, role in zip(reversed(b.eqns), reversed(b.roles), strict=True):
        if is_communication(eqn) or eqn.effects or used.intersection(eqn.outvars):
            eqns.append(eqn)
            roles.append(role)
            used.update(variables(eqn.invars))
    b.eqns[:], b.roles[:] = eqns[::-1], roles[::-1]
