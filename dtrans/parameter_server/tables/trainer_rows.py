"""Forward and backward of a trainer, written for the rows of tables that it looks up.

The program first computes the row ids. For each table, a `split_ids` equation sorts them, and a
`prefetch` equation fetches their rows from servers. All other equations read the fetched rows
instead of the table, and the position of a row among the fetched rows instead of its id. So no
value of the program has all rows of a table. Bodies of loops, branches and `jax.checkpoint` get the
sorted ids as an additional input.

An equation that reads fetched rows may have other operands with a row for each row of the table.
These operands are computed for the fetched rows only (`dtrans.rows.parts`). For example, a constant
becomes a smaller constant. If this is not possible, the operand is computed in full, and the rows
are then selected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Var
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import avals, producers_of, variables
from dtrans.ir.program import DIST, FORWARD, RPC, is_communication
from dtrans.ops import geo_prefetch_p, prefetch_p, split_ids_p
from dtrans.parameter_server.tables.lookups import Lookups, TableLookups
from dtrans.parameter_server.tables.pick_ids import atom_key, numbers_first
from dtrans.parameter_server.tables.row_picks import RowPick, run_ids
from dtrans.parameter_server.tables.wide_ids import WideIds
from dtrans.rows.layout import RowAxis
from dtrans.rows.rules import Step
from dtrans.rows.slices import Slice, Start
from dtrans.rows.writer import RowWriter


class _TableRows:
    """Rows of each table that a step looks up.

    A `RowWriter` rewrites a program for some rows of its arrays. It gets these rows from this
    object, which has the interface `BlockRows`.

    Attributes:
      sizes: for each table, the number of looked-up rows.
      uniq: for each table, the sorted ids of these rows.
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
    """Rewrite an equation that reads rows by id, or adds to rows; return its outputs.

    The new equation works on the fetched rows. So it uses a row's position among the fetched rows
    in place of the row's id.

    Args:
      positions: a cache that forward and backward share: for each array of row ids, the array of
        their positions among the fetched rows.
      w: writer of the program.
      eqn: an equation of the step.
      step: the layouts of the rows in operands and outputs of `eqn`, from row analysis.

    Returns:
      The outputs; None for all other equations.
    """
    if not isinstance(step, RowPick):
        return None
    row = step.operands[0]
    assert row is not None and isinstance(w.rows, _TableRows)
    atoms = []
    for a, layout in zip(eqn.invars, step.operands, strict=True):
        atoms.append(w.read(a, layout))
    numbers, uniq = atoms[step.numbers], w.rows.uniq[row.leaf]
    rows = eqn.invars[0].aval.shape[row.axis]
    key = atom_key(numbers), step.component, step.out_of_range, uniq
    if key not in positions:
        fn = _position(rows, step.out_of_range)
        if step.component is not None:
            fn = _with_position(step.component, rows, step.out_of_range)
        (positions[key],) = w.b.call(fn, numbers, uniq)
    atoms[step.numbers] = positions[key]
    types = []
    for v, out_layout in zip(eqn.outvars, step.outs, strict=True):
        types.append(w.block_type(v.aval, out_layout))
    return w.b.copy(eqn, atoms, types)


class TableWriter:
    """Writer of forward and backward for the rows of tables that a trainer looks up.

    It implements `dtrans.step.forward_backward.HalfWriter`.

    Args:
      b: builder of the trainer's program.
      jaxpr: the jaxpr of the step.
      found: the lookups of the step, from `find_lookups`.
      tables: for each table, its variable in `jaxpr`.
      where: for each table, the parameters of `prefetch` that locate the table's rows on servers.
      eqns, roles: the equations of forward and backward, with their roles.
      state: in GEO-SGD, for each table, variables of its optimizer state, by name. This state has a
        row for each row of the table; these rows are also fetched. None in other modes.

    Attributes:
      sizes: for each table, the number of fetched rows.
      uniq: for each table, the sorted ids of the fetched rows.
      rows: the fetched rows of tables and of optimizer state, by name.
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
        pick = functools.partial(_pick, {})
        # `outside` may return the variable itself, since an earlier equation has written this
        # variable.
        self.writer = RowWriter(
            b, found.flow, rows, producers_of(eqns), outside=lambda var: var, special=pick
        )
        self.b, self.uniq, self.sizes = b, rows.uniq, rows.sizes
        self._tables, self._where, self._state = found.tables, where, state
        self.rows: dict[str, Var] = {}
        self._plain: dict[int, tuple[JaxprEqn, Step | None]] = {}
        for i, (eqn, plain) in enumerate(zip(found.eqns, found.inlined_eqns, strict=True)):
            self._plain[id(eqn)] = plain, found.flow.steps.get(i)
        self._done = set[int]()
        self._write_ids([*eqns, *found.id_eqns], eqns, roles, jaxpr)
        self._prefetch(tables)

    def _write_ids(
        self,
        candidates: Sequence[JaxprEqn],
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        jaxpr: Any,
    ) -> None:
        """Write the equations that compute row ids."""
        ids: list[Atom] = []
        for table in self._tables.values():
            ids += [a for a, *_ in table.ids]
        role_of = dict(zip(map(id, eqns), roles, strict=True))
        for e in numbers_first(candidates, ids, jaxpr):
            self.b.role = role_of.get(id(e), FORWARD)
            if id(e) in role_of:
                self._keep(e)
                self._done.add(id(e))
            else:
                # This is not an equation of the step. It comes from `found.id_eqns`, or is a loop
                # that `numbers_first` rewrote to compute only ids.
                atoms = list(map(self.writer.read_full, e.invars))
                new = self.b.copy(e, atoms, avals(e.outvars))
                self.writer.shared.update(zip(e.outvars, new, strict=True))

    # -- HalfWriter ------------------------------------------------------------------------------

    def emit(self, eqn: JaxprEqn) -> None:
        """Write an equation of the step so that it reads fetched rows instead of full tables."""
        w = self.writer
        if id(eqn) in self._done:
            return
        # `exchange` equations were added after the search for lookups, so they have no analysis.
        plain, step = self._plain.get(id(eqn), (eqn, None))
        if step is None:
            self._keep(eqn)
        else:
            for v, new in zip(eqn.outvars, w.emit(plain, step), strict=True):
                w.place(w.flow.layout(v))[v] = new

    def result(self, atom: Atom, maker: int) -> Atom:
        """Return the variable of the trainer's program that contains an output of the step.

        Args:
          atom: the output, as a variable of the step.
          maker: not used; other writers need it.
        """
        if isinstance(atom, Var):
            layout = self.writer.flow.layout(atom)
            if isinstance(layout, RowAxis) and layout.leaf:
                return self.writer.read(atom, layout)
        return self.writer.read(atom, None)

    # -- equations -------------------------------------------------------------------------------

    def _keep(self, eqn: JaxprEqn) -> None:
        self.b.keep(eqn, list(map(self.writer.read_full, eqn.invars)))
        self.writer.shared.update(zip(eqn.outvars, eqn.outvars, strict=True))

    def _ids(self, table: TableLookups, wide: WideIds) -> list[Atom]:
        """Return the row ids that a step looks up in a table, not truncated to 32 bits."""
        found: list[Atom] = []
        for atom, component, _, count in table.ids:
            if component is not None:
                atom, component = wide.component(atom, component)
            found += self.b.call(_component(component, count), wide.of(atom))
        return found

    def _prefetch(self, tables: Mapping[str, Var]) -> None:
        """Write the equations that sort row ids and fetch the rows.

        All `prefetch` equations follow each other, so that a trainer requests the rows of all
        tables at once.
        """
        b, found = self.b, self._tables
        b.role = FORWARD
        wide = WideIds(b, self.writer.producers, self.writer.read_full)
        ids = {n: self._ids(t, wide) for n, t in found.items()}
        b.role = DIST
        for n, t in found.items():
            outside = tuple(how for _, _, how, _ in t.ids)
            (uniq,) = b.bind(
                split_ids_p, *ids[n], table=n, rows=t.rows, size=t.size, outside=outside
            )
            b.labels[uniq] = f"{n}@IDS"
            self.uniq[n] = uniq
        b.role = RPC
        primitive = prefetch_p if self._state is None else geo_prefetch_p
        for n, t in found.items():
            arrays = {n: tables[n]}
            if self._state:
                arrays |= self._state[n]
            types = []
            for v in arrays.values():
                types.append(v.aval.update(shape=(t.size, *v.aval.shape[1:])))
            fetched = b.bind(primitive, self.uniq[n], types=tuple(types), **self._where[n])
            for name, v in zip(arrays, fetched, strict=True):
                self.rows[name] = v
                b.labels[v] = f"{name}@ROWS"
            self.writer.env[tables[n]] = self.rows[n]
        b.role = FORWARD


@functools.cache
def _component(component: int | None, count: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function that extracts row ids from the operand of a lookup.

    Args:
      component: position of the row id in each index vector; None if the operand contains only row
        ids.
      count: the number of consecutive rows that each lookup reads.
    """

    def fn(operand: jax.Array) -> jax.Array:
        ids = jnp.ravel(operand) if component is None else operand[..., component]
        return ids if count == 1 else jnp.ravel(run_ids(ids, count))

    return fn


@functools.cache
def _with_position(
    component: int, rows: int, outside: str
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function that replaces row ids in index vectors by positions among the fetched rows.

    Args:
      component, outside: as in `RowPick`.
      rows: number of rows of the table.
    """
    position = _position(rows, outside)

    def fn(numbers: jax.Array, uniq: jax.Array) -> jax.Array:
        at = position(numbers[..., component], uniq)
        numbers = numbers.astype(at.dtype)
        entry = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, numbers.ndim - 1)
        return jnp.where(entry == component, at[..., None], numbers)

    return fn


@functools.cache
def _position(rows: int, outside: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function that maps row ids to their positions in the sorted ids of fetched rows.

    For the sorted ids [3, 8, 9], the function maps 8 to 1.

    Args:
      rows: number of rows of the table.
      outside: treatment of ids outside the table, as in `RowPick`.
    """

    def fn(numbers: jax.Array, uniq: jax.Array) -> jax.Array:
        ids = numbers.astype(uniq.dtype)
        if outside == "clip":
            ids = jnp.clip(ids, 0, rows - 1)
        at = jnp.searchsorted(uniq, ids)
        if outside == "drop":
            # for an id outside the table: a position outside the fetched rows
            at = jnp.where((ids >= 0) & (ids < rows), at, uniq.size)
        # An id type with fewer than 32 bits may be too small for the position.
        return at if numbers.dtype.itemsize < at.dtype.itemsize else at.astype(numbers.dtype)

    return fn


def without_unused(b: Builder, outs: Sequence[Atom]) -> None:
    """Remove the equations of a builder that have no used output.

    Equations that communicate or have effects stay.

    Args:
      b: the builder of a program.
      outs: the outputs of the program.
    """
    used = set(variables(outs))
    eqns, roles = [], []
    for eqn, role in zip(reversed(b.eqns), reversed(b.roles), strict=True):
        if is_communication(eqn) or eqn.effects or used.intersection(eqn.outvars):
            eqns.append(eqn)
            roles.append(role)
            used.update(variables(eqn.invars))
    b.eqns[:], b.roles[:] = eqns[::-1], roles[::-1]
