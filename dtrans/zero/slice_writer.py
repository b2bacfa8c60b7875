"""Equations on slices of leaves, as the engine writes them.

A leaf is cut along one dimension (`RowAxis`). Values computed from leaves alone, row by row, have
slices too: a stack in another type, some layers of it, a layer that is picked by a number. So a
loop can take slices, however it comes to its layers, and a layer is whole only where an equation
mixes its rows:

    w: (16, D, D), cut along its second dimension
    stack = convert w          slices: the loop scans over these
    layer = dynamic_slice w i  a *root*: gathered itself, where it is read whole, and never w
    sum(w ** 2)                of slices, and an all_reduce
    dot h layer                reads all of `layer`

`dtrans.engine.rules` has the ways to carry out an equation on slices. Values of the batch differ
from rank to rank (they are *local*): slices are computed only from values that are the same on all
ranks.

A gradient is a sum of local values over ranks. Its slices are scattered where
`dtrans.zero.scatter_flow` says: a loop scatters the gradient of each layer in its own turn.
`dtrans.zero.all_gather` decides when leaves are gathered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dtrans._jax import (
    COND,
    REMAT,
    SCAN,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Var,
    Wiring,
    bodies,
    closed_with,
    facts_of,
    is_rearrangement,
    linear_group,
    opened,
    wiring,
)
from dtrans.engine.layout import Shards, rows_only
from dtrans.engine.pieces import Pieces
from dtrans.engine.rules import Strategy, strategy_of
from dtrans.engine.writer import SplitWriter
from dtrans.errors import UnknownPrimitiveWarning
from dtrans.ir.array_fns import converted, times
from dtrans.ir.builder import Builder
from dtrans.ir.dataflow import is_zero_array
from dtrans.ir.program import DIST
from dtrans.ops import LAYERS, all_reduce_p
from dtrans.rows.layout import SHARED, RowAxis
from dtrans.step.weight_gradients import fuse_transposes
from dtrans.zero.rank_values import local_inside
from dtrans.zero.scatter_flow import scatter_flow


_TAKES_SLICES = frozenset({SCAN, COND, *REMAT})  # equations whose bodies can take slices


@dataclasses.dataclass(frozen=True)
class Gathering:
    """Options of the gathers of leaves and of the scatters of gradients.

    Attributes:
      axis_name: named axis of the ranks.
      degree: number of ranks.
      dtypes: type in which gradients of a leaf are reduced, where that is not their own.
      prefetch: number of windows that are gathered ahead of time.
      prefetch_in_loops: the same, in loops over layers.
      segment: bytes up to which leaves of neighbouring windows are gathered together.
      once: True if a gathered leaf is kept to its last use, in either direction.
    """

    axis_name: str
    degree: int
    dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefetch: int = 0
    prefetch_in_loops: int = 0
    segment: float = 0
    once: bool = False


@dataclasses.dataclass(frozen=True)
class Given:
    """Values that exist, or are wanted, as slices where equations are written.

    Attributes:
      rows: layouts of values that exist as slices; each names its leaf.
      local: values that differ from rank to rank.
      wanted: gradients that are to be slices, and their rows.
      slices: the slices of values, where equations are written and not only analyzed.
      summed: inputs that are slices of gradients.
    """

    rows: Mapping[Var, RowAxis]
    local: Collection[Var]
    wanted: Mapping[Var, RowAxis]
    slices: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)
    summed: Mapping[Var, Atom] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class BodiesOnSlices:
    """A loop, a branch, or a body that is computed twice, on slices.

    Attributes:
      passed: operands that the bodies take as slices, and their rows inside.
      wanted: outputs that are slices of gradients, and their rows inside.
      bodies: writers of the bodies.
    """

    passed: Mapping[int, RowAxis]
    wanted: Mapping[int, RowAxis]
    bodies: Sequence[Any]


class SliceWriter(SplitWriter):
    """Writer of equations that read sliced leaves: each rank holds one slice.

    Args:
      b: the builder to write with.
      like: jaxpr of the equations.
      eqns: equations in order, calls in their bodies inlined.
      roles: role of each equation.
      given: values that exist or are wanted as slices.
      how: options.
      ends: values that are read beside those that equations read.

    Attributes:
      rows: layout of each value that can be computed as slices; it names the leaf.
      roots: leaves, and values that are gathered themselves, that a value is computed from.
      whole: roots that are read whole.
      reads: by position, the values with slices that an equation reads whole.
      ways: by position, how an equation is carried out on slices.
      entered: by position, an equation whose bodies take or give slices.
    """

    def __init__(
        self,
        b: Builder,
        like: ClosedJaxpr,
        eqns: Sequence[JaxprEqn],
        roles: Sequence[str],
        given: Given,
        how: Gathering,
        ends: Iterable[Atom] = (),
    ) -> None:
        super().__init__(
            like, Shards(how.degree, (how.axis_name,), "rank", label=LAYERS, shares_work=False)
        )
        self.inner = opened(like)
        self.b, self.pieces = b, Pieces(b, self.shards)
        self.eqns, self.roles, self.given, self.how, self.local = (
            eqns,
            roles,
            given,
            how,
            given.local,
        )
        # values that are computed otherwise than in the step
        self.env: dict[Var, Atom] = dict(given.summed)
        self.late: Atom | None = None  # a scattered gradient, if there is one since the last gather
        self._maker = {v: i for i, e in enumerate(eqns) for v in e.outvars}
        self._producers = {v: eqns[i] for v, i in self._maker.items() if v not in self.local}
        self.scattering = scatter_flow(eqns, given.wanted, self.local, ends, given.summed)

        self.rows: dict[Var, RowAxis] = {}
        self.roots: dict[Var, frozenset[Var]] = {}
        self.whole: set[Var] = set()
        self.reads: dict[int, list[Atom]] = {}
        self.ways: dict[int, Strategy] = {}
        self.entered: dict[int, BodiesOnSlices] = {}
        for v, row in given.rows.items():
            self._add(v, row, [v])
        self._values |= {(v, self.layouts[v]): piece for v, piece in given.slices.items()}
        with warnings.catch_warnings():
            # leaves are gathered where they are read, by whatever primitive
            warnings.simplefilter("ignore", UnknownPrimitiveWarning)
            self._follow()

    # -- analysis ----------------------------------------------------------------------------------

    def roots_of(self, atoms: Iterable[Atom]) -> frozenset[Var]:
        """Return the roots of values."""
        return frozenset().union(*(self.roots.get(a, ()) for a in atoms if isinstance(a, Var)))

    def read_whole(self, atoms: Iterable[Atom]) -> None:
        """Note that values are read whole."""
        self.whole |= self.roots_of(atoms)

    def position_of(self, atom: Atom) -> int:
        """Return the position of the equation that computes a value; behind all of them for an
        input."""
        return self._maker.get(atom, len(self.eqns)) if isinstance(atom, Var) else len(self.eqns)

    def largest(self) -> dict[str, int]:
        """Return, for each leaf, the elements of the largest piece of it that is whole at a
        time."""
        found: dict[str, int] = {}
        sizes = [(self.rows[v].leaf, int(v.aval.size)) for v in self.whole]
        for entered in self.entered.values():
            for body in entered.bodies:
                sizes += body.largest().items()
        for leaf, size in sizes:
            found[leaf] = max(found.get(leaf, 0), size)
        return found

    def _add(self, v: Var, row: RowAxis, roots: Iterable[Var]) -> None:
        """Note that a value can be computed as slices."""
        self.rows[v], self.roots[v], self.layouts[v] = row, frozenset(roots), self._plain(v, row)

    def _row(self, atom: Atom) -> RowAxis | None:
        """Return the layout of a value that has slices."""
        return self.rows.get(atom) if isinstance(atom, Var) else None

    def _plain(self, atom: Atom, row: RowAxis) -> RowAxis:
        """Return a layout as the engine names it."""
        return self.shards.plain(dataclasses.replace(row, leaf=""), atom.aval.shape[row.axis])

    def _of_rank(self, v: Var, row: RowAxis) -> Any:
        """Return the type of a rank's slice."""
        return self.shards.cut(v.aval, self._plain(v, row))

    def _follow(self) -> None:
        """Follow slices through the equations."""
        elsewhere = self.scattering.operands(self.eqns)
        for i, eqn in enumerate(self.eqns):
            if i not in self.scattering.loops and not any(map(self._row, eqn.invars)):
                continue
            follow = self._enter if eqn.primitive.name in _TAKES_SLICES else self._through
            on_slices = {*follow(i, eqn), *elsewhere.get(i, ())}
            self.reads[i] = [a for k, a in enumerate(eqn.invars) if k not in on_slices]
            self.read_whole(self.reads[i])
        # a reduction of a leaf that is gathered anyway needs no collective
        while needed := [i for i, way in self.ways.items()
                         if way.reduce and self.roots_of(self.eqns[i].invars) & self.whole]:  # fmt: skip
            for i in needed:
                del self.ways[i]
                self.reads[i] = list(self.eqns[i].invars)
                self.read_whole(self.reads[i])

    def _through(self, i: int, eqn: JaxprEqn) -> Collection[int]:
        """Follow slices through one equation; return the operands that it reads as slices."""
        way = self._way(eqn)
        if way is None:
            return ()
        self.ways[i] = way
        (out,), (row,) = eqn.outvars, way.outs
        if isinstance(row, RowAxis):
            first = next(a for a in eqn.invars if isinstance(a, Var) and a in self.rows)
            before = zip(out.aval.shape[: row.axis], first.aval.shape, strict=False)
            picks = eqn.primitive.name == "slice" and any(n < m for n, m in before)
            is_root = picks or not is_cheap(eqn)
            row = dataclasses.replace(row, leaf=self.rows[first].leaf)
            self._add(out, row, [out] if is_root else self.roots_of(eqn.invars))
        return range(len(eqn.invars))

    def _way(self, eqn: JaxprEqn) -> Strategy | None:
        """Return the way to carry out an equation on slices alone; None if it needs whole
        values."""
        ins = [rows_only(self.layout(a)) for a in eqn.invars]
        rows = [self._row(a) for a in eqn.invars]
        is_local = any(a in self.local for a, row in zip(eqn.invars, rows, strict=True)
                       if row is None and isinstance(a, Var))  # fmt: skip
        leaves = {row.leaf for row in rows if row is not None}
        if is_local or len(leaves) > 1 or eqn.effects or len(eqn.outvars) != 1:
            return None
        way = strategy_of(eqn, ins, self.shards)
        if (
            way is None
            or way.write
            or any(x not in (SHARED, y) for x, y in zip(ins, way.operands, strict=True))
        ):
            return None
        # each rank would round its part
        rounds = way.reduce and eqn.outvars[0].aval.dtype.itemsize == 2
        return None if rounds else way

    def _enter(self, i: int, eqn: JaxprEqn) -> Collection[int]:
        """Follow slices into bodies; return the operands that they take as slices."""
        wires, wanted = wiring(eqn), self.scattering.loops.get(i, {})
        passed = {} if self.how.once else self._passable(eqn, wires)
        local = local_inside(eqn, self.local) if passed or wanted else []
        while passed or wanted:
            writer = functools.partial(self._body_writer, i, wires, passed, wanted)
            made = list(map(writer, range(len(local)), local))
            kept = {
                k: row
                for k, row in passed.items()
                if not any(_gathers(eqn, wires, k, body) for body in made)
            }
            if kept == passed:
                self.entered[i] = BodiesOnSlices(passed, wanted, made)
                self._hand_on(eqn, wires, made, wanted)
                break
            passed = kept
        return passed

    def _passable(self, eqn: JaxprEqn, wires: Wiring) -> dict[int, RowAxis]:
        """Return the operands that bodies may take as slices, and their rows inside."""
        found: dict[int, RowAxis] = {}
        picks = eqn.invars[0]
        if (
            eqn.primitive.name == COND
            and isinstance(picks, Var)
            and (picks in self.local or self._row(picks))
        ):
            return found  # ranks are in different branches
        for k in wires.ins[0]:
            row, less = self._row(eqn.invars[k]), int(k in wires.slices)
            if row is not None and k not in wires.carried and row.axis >= less:
                found[k] = dataclasses.replace(row, axis=row.axis - less)
        return found

    def _hand_on(
        self,
        eqn: JaxprEqn,
        wires: Wiring,
        made: Sequence[SliceWriter],
        wanted: Mapping[int, RowAxis],
    ) -> None:
        """Note the outputs that all bodies can compute as slices."""
        for k, v in enumerate(eqn.outvars):
            row, *others = [body._row(body.inner.outvars[k]) for body in made]
            if (
                row is not None
                and k not in wanted
                and k not in wires.carried.values()
                and {row}.issuperset(others)
            ):
                self._add(v, dataclasses.replace(row, axis=row.axis + (k in wires.stacks)), [v])

    def _body_writer(
        self,
        i: int,
        wires: Wiring,
        passed: Mapping[int, RowAxis],
        wanted: Mapping[int, RowAxis],
        number: int,
        local: Collection[Var],
    ) -> SliceWriter:
        """Return the writer of a body, which has written nothing yet."""
        old, role = bodies(self.eqns[i])[number], self.roles[i]
        inner = opened(old)
        eqns, roles = fuse_transposes(inner.eqns, [role] * len(inner.eqns), inner.outvars)
        like = closed_with(old, eqns=eqns)
        b = Builder(like)
        b.role = role
        rows: dict[Var, RowAxis] = {}
        slices: dict[Var, Atom] = {}
        summed: dict[Var, Atom] = {}
        for k, v in zip(wires.ins[number], inner.invars, strict=True):
            if k in passed:
                rows[v] = passed[k]
                slices[v] = b.input(self._of_rank(v, passed[k]))
            elif wires.carried.get(k) in wanted:
                summed[v] = b.input(self._of_rank(v, wanted[wires.carried[k]]))
            else:
                b.invars.append(v)
        targets = {a: row for k, row in wanted.items() if isinstance(a := inner.outvars[k], Var)}
        how = dataclasses.replace(self.how, prefetch=self.how.prefetch_in_loops)
        given = Given(rows, local, targets, slices, summed)
        body = type(self)(b, like, eqns, roles, given, how, inner.outvars)
        body.read_whole(inner.outvars[k] for k in wires.carried.values())
        return body

    # -- values ------------------------------------------------------------------------------------

    def read(self, atom: Atom, row: RowAxis | None) -> Atom:
        if isinstance(atom, Var) and row is None:
            return self.env.get(atom, atom)
        return (
            self.slice_of(atom)
            if isinstance(atom, Var) and atom in self.rows
            else super().read(atom, row)
        )

    def slice_of(self, var: Var) -> Atom:
        """Return the slice of a value that has one; it is written where it is first read."""
        key = var, self.layouts[var]
        if key not in self._values:
            i = self._maker[var]
            (self._values[key],) = self.carry_out(self.eqns[i], self.ways[i])
        return self._values[key]

    def is_there(self, var: Var, i: int) -> bool:
        """Return True if a slice can be computed before equation `i`."""
        at = self._maker.get(var, -1)
        if at < 0 or (var, self.layouts.get(var)) in self._values:
            return True
        if var not in self.rows or at not in self.ways:
            return var not in self.rows and at < i
        return all(self.is_there(a, i) for a in self.eqns[at].invars if isinstance(a, Var))

    def _is_counted(self, var: Atom, axis: int) -> bool:
        # rows of whatever is the same on all ranks are computed from as little as possible
        return True

    # -- reductions and gradients
    # --------------------------------------------------------------------

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """Write equations that are part of a collective."""
        role, self.b.role = self.b.role, DIST
        yield
        self.b.role = role

    def write_reduction(self, i: int) -> None:
        """Write a reduction over slices, and over ranks."""
        eqn, way = self.eqns[i], self.ways[i]
        (part,) = self.carry_out(eqn, way)
        over = self.shards.over
        with self.communicating():
            (made,) = self.b.bind(
                all_reduce_p, part, op=way.reduce, name="slices", owners=(), over=over
            )
        self.env[eqn.outvars[0]] = made

    def scattered(self, var: Var, row: RowAxis) -> Atom:
        """Write the reduce-scatter of a gradient; return this rank's slice of the sum over
        ranks."""
        grad, own = self.env.get(var, var), var.aval.dtype
        dtype = jnp.dtype(self.how.dtypes.get(row.leaf, own))
        with self.communicating():
            sent = grad if own == dtype else self.b.call(converted(dtype), grad)[0]
            self.late = made = self._scattered(sent, self._plain(var, row))
        return made if own == dtype else self.b.call(converted(jnp.dtype(own)), made)[0]

    def wanted_slice(self, atom: Atom, row: RowAxis) -> Atom:
        """Return the slice of a term of a gradient; what all ranks have is added up as often as
        there are ranks."""
        if isinstance(atom, Var) and atom in self.scattering.rows:
            return self.env[atom]
        if isinstance(atom, Var) and atom in self.local:
            return self.scattered(atom, row)
        piece = self.read(atom, self._plain(atom, row))
        return (
            piece
            if is_zero_array(atom, self._producers)
            else self.b.call(times(self.how.degree), piece)[0]
        )

    def write_on_rows(self, i: int) -> None:
        """Write an equation that is linear in gradients, on slices of these."""
        eqn, step = self.eqns[i], self.scattering.steps[i]
        terms = {k for k, a in enumerate(eqn.invars) if isinstance(a, Var) and a in self.local}
        together = linear_group(eqn, terms)
        atoms: list[Atom] = []
        for k, (a, row) in enumerate(zip(eqn.invars, step.operands, strict=True)):
            if row is not None and k in together:
                atoms.append(self.wanted_slice(a, row))
            else:
                atoms.append(self.read(a, None if row is None else self._plain(a, row)))
        (out,), (of_out,) = eqn.outvars, step.outs
        assert isinstance(of_out, RowAxis)
        types = [self._of_rank(out, of_out)]
        (self.env[out],) = self.b.copy(
            eqn, atoms, types, **(step.params(types) if step.params else {})
        )


def is_cheap(eqn: JaxprEqn) -> bool:
    """Return True if an equation costs so little that ranks may carry it out twice, and send its
    operand."""
    return facts_of(eqn).elementwise or is_rearrangement(eqn)


def _gathers(eqn: JaxprEqn, wires: Wiring, k: int, body: SliceWriter) -> bool:
    """Return True if a body, in each of its turns, reads all of an operand, and does not hand it
    on."""
    v = body.inner.invars[wires.ins[0].index(k)]
    hands_on = eqn.primitive.name == COND and v in body.roots_of(body.inner.outvars)
    return k not in wires.slices and v in body.whole and not hands_on
