"""A trainer's half, written for the rows that it looks up.

First come the numbers of rows, and all that they are made of; then, for each table, `split_ids` and
`prefetch`; then everything else, with an operand of `size` rows in the place of the table. A number
becomes the place of its row among those that are there, which are sorted. So no value of the
program has the rows of a table. Bodies of loops, of branches and of what is computed again are
given the numbers too, as constants.

Of what else meets rows of a table the rows with these numbers are made (`dtrans.rows.parts`): a
constant of one value is made smaller, and what needs its whole operands is made whole, and its rows
are picked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dtrans._jax import Atom, JaxprEqn, Literal, Var
from dtrans.ir.builder import Builder
from dtrans.ir.program import DIST, FORWARD, RPC, is_communication
from dtrans.ops import geo_prefetch_p, prefetch_p, split_ids_p
from dtrans.parameter_server.tables.lookups import Lookups, RowPick, TableLookups, numbers_first
from dtrans.parameter_server.tables.wide_numbers import WideNumbers
from dtrans.rows.layout import RowAxis
from dtrans.rows.rules import Step
from dtrans.rows.slices import Slice, Start
from dtrans.rows.writer import RowWriter


class _TableRows:
    """The rows of tables that a step looks up, by table (`dtrans.rows.writer.BlockRows`).

    Attributes:
      sizes: how many there are.
      uniq: their numbers, sorted.
    """

    def __init__(self, sizes: Mapping[str, int], uniq: dict[str, Var]) -> None:
        self.sizes, self.uniq = sizes, uniq
        self._starts = {n: Start(functools.partial(self._numbers, n)) for n in sizes}

    def _numbers(self, table: str, b: Builder) -> Atom:
        return self.uniq[table]

    def of(self, row: RowAxis) -> Slice:
        return Slice(row.axis, self._starts[row.leaf], self.sizes[row.leaf]).widened(row.width)

    def inside(self, b: Builder) -> _TableRows:
        return _TableRows(self.sizes, {n: b.input(v.aval) for n, v in self.uniq.items()})

    def operands(self) -> Sequence[Atom]:
        return list(self.uniq.values())


def _pick(
    places: dict[tuple[Any, ...], Atom], w: RowWriter, eqn: JaxprEqn, step: Step
) -> list[Var] | None:
    """Write what picks rows, or adds to rows, among those that are here; None for any other
    equation.

    Args:
      places: where rows are among sorted ones, by the numbers that they are picked by.
    """
    if not isinstance(step, RowPick):
        return None
    row = step.operands[0]
    assert row is not None and isinstance(w.rows, _TableRows)
    atoms = [w.read(a, x) for a, x in zip(eqn.invars, step.operands, strict=True)]
    numbers, uniq = atoms[step.numbers], w.rows.uniq[row.leaf]
    key = numbers, step.component, uniq
    if key not in places:
        fn = _place_of if step.component is None else _placed(step.component)
        (places[key],) = w.b.call(fn, numbers, uniq)
    atoms[step.numbers] = places[key]
    types = [w.cut(v.aval, x) for v, x in zip(eqn.outvars, step.outs, strict=True)]
    return w.b.copy(eqn, atoms, types)


class TableWriter:
    """Writer of a trainer's half for the rows of tables that it looks up
    (`dtrans.step.forward_backward.HalfWriter`).

    Args:
      b: what it is written with.
      jaxpr: of the step.
      found: what the step looks up.
      tables: by name, the variable that stands for a table in `jaxpr`.
      where: by name, the parameters of `prefetch` that say where rows are.
      eqns, roles: of the half.
      state: by table, the trainer's own arrays that have a row for each of its rows, which come
        with these: the variables by name. None where rows alone come, from servers.

    Attributes:
      sizes: by table, how many rows of it there are.
      uniq: by table, the numbers of its rows.
      held: the rows of tables, and of what comes with them, by name.
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
        made_by = {v: e for e in eqns for v in e.outvars}
        pick = functools.partial(_pick, {})
        # everything is written in order: a shared value is there
        self.writer = RowWriter(b, found.flow, rows, made_by, outside=lambda var: var, special=pick)
        self.b, self.uniq, self.sizes = b, rows.uniq, rows.sizes
        self._tables, self._where, self._state = found.tables, where, state
        self.held: dict[str, Var] = {}
        plain = zip(found.eqns, found.plain, strict=True)
        self._plain = {id(e): (p, found.flow.steps.get(i)) for i, (e, p) in enumerate(plain)}
        numbers = [a for t in found.tables.values() for a, _ in t.ids]
        role_of = {id(e): role for e, role in zip(eqns, roles, strict=True)}
        self._done = set[int]()
        for e in numbers_first([*eqns, *found.numbering], numbers, jaxpr):
            b.role = role_of.get(id(e), FORWARD)
            if id(e) in role_of:
                self._keep(e)
                self._done.add(id(e))
            else:  # the part of a loop that makes numbers
                made = b.copy(
                    e, [self.writer.read_full(a) for a in e.invars], [v.aval for v in e.outvars]
                )
                self.writer.shared.update(zip(e.outvars, made, strict=True))
        self._prefetch(tables)

    # -- as a writer of halves -------------------------------------------------------------------

    def emit(self, eqn: JaxprEqn) -> None:
        """Write the next equation."""
        w = self.writer
        if id(eqn) in self._done:
            return
        # an exchange was not there when rows were looked for
        plain, step = self._plain.get(id(eqn), (eqn, None))
        if step is None:
            self._keep(eqn)
        else:
            for v, new in zip(eqn.outvars, w.emit(plain, step), strict=True):
                w.place(w.flow.layout(v))[v] = new

    def result(self, atom: Atom, maker: int) -> Atom:
        """Return a value that is wanted."""
        layout = RowAxis("", 0) if isinstance(atom, Literal) else self.writer.flow.layout(atom)
        return self.writer.read(
            atom, layout if isinstance(layout, RowAxis) and layout.leaf else None
        )

    # -- equations -------------------------------------------------------------------------------

    def _keep(self, eqn: JaxprEqn) -> None:
        self.b.keep(eqn, [self.writer.read_full(a) for a in eqn.invars])
        self.writer.shared.update((v, v) for v in eqn.outvars)

    def _ids(self, table: TableLookups, wide: WideNumbers) -> list[Atom]:
        """Return the row numbers that a step looks up in a table, from before JAX narrowed them."""
        numbers = [(a, c) if c is None else wide.component(a, c) for a, c in table.ids]
        return [self.b.call(_component(c), wide.of(a))[0] for a, c in numbers]

    def _prefetch(self, tables: Mapping[str, Var]) -> None:
        """Get the rows that a step looks up: those of all tables at once, nothing is computed in
        between."""
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
            here = {n: tables[n], **(self._state[n] if self._state else {})}
            types = tuple(v.aval.update(shape=(t.size, *v.aval.shape[1:])) for v in here.values())
            rows = dict(
                zip(
                    here,
                    b.bind(primitive, self.uniq[n], types=types, **self._where[n]),
                    strict=True,
                )
            )
            self.writer.env[tables[n]] = rows[n]
            self.held |= rows
            b.labels.update((v, f"{name}@ROWS") for name, v in rows.items())
        b.role = FORWARD


@functools.cache
def _component(component: int | None) -> Callable[[jax.Array], jax.Array]:
    if component is None:
        return jnp.ravel
    return lambda x: x[..., component]


@functools.cache
def _placed(component: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Numbers with a component that says where among sorted ones it is."""

    def fn(numbers: jax.Array, uniq: jax.Array) -> jax.Array:
        at = jnp.searchsorted(uniq, numbers[..., component].astype(uniq.dtype)).astype(
            numbers.dtype
        )
        entry = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, numbers.ndim - 1)
        return jnp.where(entry == component, at[..., None], numbers)

    return fn


def _place_of(number: jax.Array, uniq: jax.Array) -> jax.Array:
    return jnp.searchsorted(uniq, number.astype(uniq.dtype)).astype(number.dtype)


def without_unused(b: Builder, outs: Sequence[Atom]) -> None:
    """Leave out equations that compute what nobody reads."""
    used = {a for a in outs if isinstance(a, Var)}
    kept = []
    for i in reversed(range(len(b.eqns))):
        eqn = b.eqns[i]
        if is_communication(eqn) or eqn.effects or used.intersection(eqn.outvars):
            kept.append(i)
            used.update(a for a in eqn.invars if isinstance(a, Var))
    b.eqns[:], b.roles[:] = (
        [b.eqns[i] for i in reversed(kept)],
        [b.roles[i] for i in reversed(kept)],
    )
